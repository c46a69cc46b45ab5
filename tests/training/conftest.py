from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.config import apply_overrides, from_dict, is_torchrun_variable, to_yaml
from tests.training import ranks

TIMEOUT = 120.0


def make_run(folder: Path, *overrides: str) -> Path:
    """Make a run directory with a config; overrides as ``--set`` takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(from_dict(apply_overrides({}, overrides))))
    return folder


def read_log(run_dir: Path, rank: int, attempt: int = 0) -> list[dict]:
    path = run_dir / "metrics" / f"attempt_{attempt}" / f"rank_{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def events(run_dir: Path, rank: int, name: str, attempt: int = 0) -> list[dict]:
    return [line for line in read_log(run_dir, rank, attempt) if line.get("event") == name]


def steps(run_dir: Path, rank: int, attempt: int = 0) -> list[dict]:
    return [line for line in read_log(run_dir, rank, attempt) if "loss" in line]


class Launched:
    """A torchrun that was started here."""

    def __init__(self, run_dir: Path, nproc: int, *options: str) -> None:
        self.run_dir = run_dir
        environ = {k: v for k, v in os.environ.items() if not is_torchrun_variable(k)}
        environ |= {"DDP_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1", "DDP_ATTEMPT_BASE": "0"}
        self.output = (run_dir / "torchrun.log").open("wb")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        command += ["--log-dir", str(run_dir / "logs"), "--redirects", "3", *options, "-m", "ddp_core.training"]
        self.process = subprocess.Popen(
            command, env=environ, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.nproc = nproc

    def wait(self, timeout: float = TIMEOUT) -> int:
        return self.process.wait(timeout)

    def logs(self, name: str) -> str:
        return "\n".join(p.read_text() for p in sorted((self.run_dir / "logs").rglob(name)))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()


@pytest.fixture(scope="session")
def torchrun():
    """Start torchrun on a run directory; it is ended with the session."""
    launched = []

    def launch(run_dir: Path, nproc: int, *options: str) -> Launched:
        launched.append(Launched(run_dir, nproc, *options))
        return launched[-1]

    yield launch
    for one in launched:
        one.close()


@pytest.fixture(scope="session")
def in_ranks():
    """Run a function of tests.training.ranks in real processes with torchrun's environment; the results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.ranks"])

    def run(function, nproc: int, *args, missing: int = 0, environ_of_all: dict[str, str] | None = None) -> list:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        results = context.SimpleQueue()
        processes = []
        for rank in range(nproc):
            environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DDP_RUN_DIR": "unused"}
            environ = {name: str(value) for name, value in (environ | (environ_of_all or {})).items()}
            process = context.Process(target=ranks.run_rank, args=(function, environ, results, args))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(TIMEOUT)
        alive = [p for p in processes if p.is_alive()]
        for process in alive:
            process.kill()
            process.join()
        found = {}
        while not results.empty():
            rank, value, error = results.get()
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
        assert not alive, f"{len(alive)} ranks hang"
        assert len(found) == nproc - missing
        return [found.get(rank) for rank in range(nproc)]

    return run
