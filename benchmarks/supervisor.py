"""What supervising costs: memory and CPU of the supervisor of a real run, with simulated GPUs.

Run: ``python -m benchmarks.supervisor [--seconds 30]``. Targets: at most 60 MB resident, under 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ddp_core.runs import Store
from tests.fake_nvml import FakeNvml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="how long to watch")
    parser.add_argument("--nproc", type=int, default=4, help="ranks of the run, and GPUs it holds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeNvml(Path(folder) / "nvml", gpus=args.nproc)
        env = os.environ | fake.env() | {"DDP_LEASES": f"{folder}/leases", "DDP_STORE": f"{folder}/store"}
        config = Path(folder) / "run.yaml"
        gpus = list(range(args.nproc))
        launch = {"nproc_per_node": args.nproc, "device": "cpu", "gpus": gpus}
        config.write_text(json.dumps({"launch": launch, "training": {"epochs": 1_000_000}}))
        subprocess.run([sys.executable, "-m", "ddp_core.cli", "launch", str(config)], env=env, check=True)
        run = Store(f"{folder}/store").run("digits-1")
        try:
            while (state := run.state()).state != "running":
                assert not state.state.ended, state.reason
                time.sleep(0.1)
            assert state.supervisor is not None
            supervisor = psutil.Process(state.supervisor.pid)
            rank = psutil.Process(state.ranks[0].pid)
            before, rank_before, start = supervisor.cpu_times(), rank.cpu_times(), time.monotonic()
            time.sleep(args.seconds)
            seconds = time.monotonic() - start
            after, rank_after = supervisor.cpu_times(), rank.cpu_times()
            used = after.user + after.system - before.user - before.system
            rank_used = rank_after.user + rank_after.system - rank_before.user - rank_before.system
            memory, rank_memory = supervisor.memory_info().rss, rank.memory_info().rss
        finally:
            subprocess.run([sys.executable, "-m", "ddp_core.cli", "stop", "digits-1"], env=env, check=True)
    print(f"{'':<22}{'supervisor':>12}{'one rank':>12}{'ratio':>10}")
    print(f"{'resident memory, MB':<22}{memory / 1e6:>12.1f}{rank_memory / 1e6:>12.1f}{memory / rank_memory:>10.3f}")
    share, rank_share = 100 * used / seconds, 100 * rank_used / seconds
    print(f"{'CPU, % of a core':<22}{share:>12.2f}{rank_share:>12.2f}{share / rank_share:>10.4f}")


if __name__ == "__main__":
    main()
