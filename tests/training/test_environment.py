import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.errors import UserError
from ddp_core.training.environment import RankEnvironment

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}

# A lock taken twice blocks in C and no signal gets it out: like waiting for other ranks.
BLOCKED = """
import ctypes, sys, time
from ddp_core.training.environment import StopFlag
flag = StopFlag(on_early_stop=lambda: print("said", flush=True))
{defer}
print("ready", flush=True)
mutex = ctypes.create_string_buffer(128)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
{block}
"""


def test_the_attempt_is_the_launchers_base_plus_torchruns_restarts():
    environ = TORCHRUN | {"DDP_RUN_DIR": "/runs/a", "DDP_ATTEMPT_BASE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    here = RankEnvironment.from_environ(environ)
    assert here == RankEnvironment(Path("/runs/a"), 5, 1, 8, 4, attempt=3)
    assert here.log_path == Path("/runs/a/metrics/attempt_3/rank_5.jsonl")


@pytest.mark.parametrize(("missing", "hint"), [("DDP_RUN_DIR", "config.yaml"), ("RANK", "torchrun --standalone")])
def test_a_missing_variable_is_named_with_what_to_do(missing, hint):
    environ = TORCHRUN | {"DDP_RUN_DIR": "/runs/a"}
    del environ[missing]
    with pytest.raises(UserError, match=missing) as caught:
        RankEnvironment.from_environ(environ)
    assert hint in str(caught.value)


def _blocked(defer: str, block: str) -> subprocess.Popen[str]:
    code = BLOCKED.format(defer=defer, block=block)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_stop_before_training_ends_a_rank_that_is_blocked_in_c():
    process = _blocked("", "libc.pthread_mutex_lock(mutex)")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "said\n")


def test_a_stop_during_training_only_sets_the_flag():
    block = "while not flag.requested: time.sleep(0.01)\nprint('finished the step')"
    process = _blocked("flag.defer()", block)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "finished the step\n")


def test_the_entry_does_not_import_torch():
    code = "import sys, ddp_core.training.__main__; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torchrun_a_process_trains_alone():
    here = RankEnvironment.from_environ({"DDP_RUN_DIR": "/runs/x"})
    assert (here.rank, here.world_size, here.local_world_size, here.attempt, here.alone) == (0, 1, 1, 0, True)
