"""Speed of the built-in trainer beside hand-written DDP, Lightning Fabric and Accelerate, doing the same work.

Run: ``python -m benchmarks.trainer [--steps 200] [--repeat 3] [--case small|large] [--nproc 2] [--device cpu]``. The
built-in trainer has everything on: rank log, watches, stop vote, checkpoints. The others have nothing. Same model,
data, batch, loader and optimizer for all, a thread per rank on the CPU; they take turns, so that a machine that is slow
for a while is slow for all. Fabric and Accelerate come with ``pip install -e .[benchmark]``.

Measured is the time from the end of a step to the end of the next, within an epoch and after a warm-up. Target: at
least 0.98 of the bare loop's steps per second where a step takes 20 ms or more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from ddp_core import config as run_config
from ddp_core.config import RunConfig, is_torchrun_variable
from ddp_core.training.data import open_data
from ddp_core.training.distributed import World, choose_device
from ddp_core.training.models import build_model
from ddp_core.training.optimization import OPTIMIZERS

WARM_UP = 20
TARGET = 0.98

CASES: dict[str, dict[str, Any]] = {
    "large": {"model": "resnet18", "dataset": "synthetic", "image_size": 32, "batch_size": 16, "lr": 0.01},
    "small": {"model": "cnn", "dataset": "digits", "batch_size": 16},
}
BARE = "bare DDP loop"
WAYS = {
    BARE: None,
    "built-in, all on": None,
    "built-in, watch off": None,
    "Lightning Fabric": "lightning",
    "Accelerate": "accelerate",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", choices=[*CASES], action="append", help="default: all")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rank", metavar="WAY", help=argparse.SUPPRESS)  # this process is a rank
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return 0

    ways = [way for way, package in WAYS.items() if package is None or importlib.util.find_spec(package)]
    for way in WAYS:
        if way not in ways:
            print(f"{way} is not installed: not measured")
    print(f"{options.nproc} ranks on {options.device}, {options.steps} steps, median of {options.repeat} turns")
    print(f"{'case':<8}{'':<22}{'step':>12}{'steps/s':>10}{'speed beside bare':>20}")
    missed = False
    for case in options.case or CASES:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.repeat):
            for way in ways if turn % 2 == 0 else reversed(ways):
                with tempfile.TemporaryDirectory(prefix="ddp-benchmark-") as folder:
                    times[way].append(run(way, case, Path(folder), options))
        for way, seconds in times.items():
            step = statistics.median(seconds)
            speed = statistics.median(bare / own for bare, own in zip(times[BARE], seconds, strict=True))
            print(f"{case:<8}{way:<22}{step * 1e3:>9.2f} ms{1 / step:>10.1f}{speed:>18.3f} ×")
            missed |= way == "built-in, all on" and step >= 0.020 and speed < TARGET
    print(f"target: built-in, all on, at least {TARGET} × where a step takes 20 ms: {'MISSED' if missed else 'met'}")
    return int(missed)


def config_of(case: str, way: str, options: argparse.Namespace) -> RunConfig:
    """The config of a run that has at least so many steps."""
    training = dict(CASES[case])
    per_step = training["batch_size"] * options.nproc
    if training["dataset"] == "synthetic":
        training |= {"synthetic_samples": per_step * (options.steps + WARM_UP), "epochs": 1}
    else:
        training["epochs"] = -(-(options.steps + WARM_UP) * per_step // 1437)
    return run_config.from_dict(
        {
            "launch": {"nproc_per_node": options.nproc, "device": options.device},
            "training": training,
            "watch": {"enabled": way != "built-in, watch off"},
        }
    )


def run(way: str, case: str, folder: Path, options: argparse.Namespace) -> float:
    """Train once; the seconds of a step, as rank 0 has them."""
    (folder / "config.yaml").write_text(run_config.to_yaml(config_of(case, way, options)))
    environ = {name: value for name, value in os.environ.items() if not is_torchrun_variable(name)}
    environ |= {"DDP_RUN_DIR": str(folder), "DDP_ATTEMPT_BASE": "0", "OMP_NUM_THREADS": "1"}
    if options.device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    built_in = way.startswith("built-in")
    what = ["-m", "ddp_core.training"] if built_in else ["-m", "benchmarks.trainer", "--rank", way]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc)]
    with (folder / "output.txt").open("wb") as output:
        done = subprocess.run([*command, *what], env=environ, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{(folder / 'output.txt').read_text()[-3000:]}")
    log = folder / ("metrics/attempt_0/rank_0.jsonl" if built_in else "times.jsonl")
    lines = [line for line in map(json.loads, log.read_text().splitlines()) if "loss" in line or not built_in]
    ends = [(line["epoch"], line["ts"]) for line in lines][WARM_UP : WARM_UP + options.steps]
    return statistics.fmean(b - a for (epoch, a), (after, b) in pairwise(ends) if epoch == after)


def rank(way: str) -> None:
    """What each rank of a bare loop does."""
    folder, number = Path(os.environ["DDP_RUN_DIR"]), int(os.environ["RANK"])
    config = run_config.load(folder / "config.yaml")
    ends: list[tuple[int, float]] = []

    def ended(epoch: int) -> None:
        ends.append((epoch, time.time()))

    {BARE: bare, "Lightning Fabric": fabric, "Accelerate": accelerate}[way](config, ended)
    if number == 0:
        (folder / "times.jsonl").write_text("".join(json.dumps({"epoch": e, "ts": ts}) + "\n" for e, ts in ends))


def work(config: RunConfig, device: torch.device, *, sharded: bool) -> tuple[nn.Module, Any, DataLoader[Any]]:
    """Model, optimizer and loader as the built-in trainer has them; the others shard the loader themselves."""
    t = config.training
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = open_data(t, World(rank=number, local_rank=number, size=size, device=device, control=None))
    torch.manual_seed(t.seed)
    model = build_model(t.model, data.shape, data.classes).to(device)
    optimizer = OPTIMIZERS[t.optimizer](model.parameters(), t.lr, t.weight_decay)
    sampler: Any = DistributedSampler(data.train, size, number, seed=t.seed) if sharded else None
    loader = DataLoader(
        data.train,
        t.batch_size,
        shuffle=None if sharded else True,
        sampler=sampler,
        collate_fn=as_it_is if hasattr(data.train, "__getitems__") else default_collate,
        pin_memory=device.type == "cuda",
    )
    return model, optimizer, loader


def as_it_is(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[torch.device]:
    """The process group, as bare as it goes."""
    device, _ = choose_device(config.launch.device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    yield device
    dist.destroy_process_group()


def bare(config: RunConfig, ended: Callable[[int], None]) -> None:
    with joined(config) as device:
        model, optimizer, loader = work(config, device, sharded=True)
        ids = [device.index] if device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        for epoch in range(config.training.epochs):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for images, labels in loader:
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)  # noqa: PLW2901
                cross_entropy(ddp(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                ended(epoch)
            if device.type == "cuda":
                torch.cuda.synchronize()


def fabric(config: RunConfig, ended: Callable[[int], None]) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=config.launch.device, devices=config.launch.nproc_per_node, strategy="ddp")
    fabric.launch()
    model, optimizer, loader = work(config, fabric.device, sharded=False)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(config.training.epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            fabric.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ended(epoch)
    dist.destroy_process_group()


def accelerate(config: RunConfig, ended: Callable[[int], None]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=config.launch.device == "cpu")
    model, optimizer, loader = accelerator.prepare(*work(config, accelerator.device, sharded=False))
    for epoch in range(config.training.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ended(epoch)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
