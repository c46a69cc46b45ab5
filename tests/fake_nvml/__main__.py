"""Run a command on a machine with simulated GPUs: ``python -m tests.fake_nvml --gpus 4 --animate -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fake_nvml import FakeNvml


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_nvml", description=__doc__)
    parser.add_argument("--gpus", type=int, default=4, help="how many GPUs there are (default: 4)")
    parser.add_argument("--animate", action="store_true", help="let their values move as in training")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fake-nvml-state-") as folder:
        fake = FakeNvml(Path(folder), gpus=args.gpus)
        start = time.monotonic()
        if args.animate:
            fake.animate(0)
        process = subprocess.Popen(args.command, env=os.environ | fake.env())
        # The command decides when to end: it gets Ctrl-C from the terminal itself, and SIGTERM from here.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                code = process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if args.animate:
                    fake.animate(time.monotonic() - start)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
