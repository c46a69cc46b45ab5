"""How long training stands still for a checkpoint of ResNet-50's size: ``python -m benchmarks.checkpoint``.

``torch.save`` and fsync in the loop, as most scripts do it, beside ``Checkpoints.save``, which copies the state and
leaves the writing to a thread; and what a training loop loses while that thread is busy. Both take turns. The training
is a smaller network on the CPU, with a thread fewer than there are cores: with GPUs, too, the CPU has some time left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_core.config import from_dict
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.checkpoint import Checkpoints, Position
from ddp_core.training.distributed import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    options = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    device = torch.device(options.device)
    model, optimizer = trained_resnet50(device)
    one_step = training(device)
    for _ in range(5):
        one_step()

    plain, stall, write, alone, beside, lost = ([] for _ in range(6))
    with tempfile.TemporaryDirectory(prefix="ddp-benchmark-", dir=Path.cwd()) as name:
        folder = Path(name)
        for turn in range(options.repeat):
            settle(device)
            plain.append(seconds(lambda: save_and_fsync(folder / "plain.pth", model, optimizer)))
            size = (folder / "plain.pth").stat().st_size
            (folder / "plain.pth").unlink()

            steps = [seconds(one_step) for _ in range(15)]
            usual = statistics.fmean(steps)
            run_dir = folder / f"run-{turn}"
            log = RankLog(run_dir / "metrics" / "attempt_0" / "rank_0.jsonl")
            world = World(rank=0, local_rank=0, size=1, device=device, control=None)
            parts = {"model": model, "optimizer": optimizer}
            checkpoints = Checkpoints(run_dir, from_dict({}), parts=parts, world=world, log=log)
            settle(device)
            began = time.perf_counter()
            checkpoints.save(Position(epoch=1, step=turn + 1), always=True)
            stall.append(time.perf_counter() - began)
            busy: list[float] = []
            # The name it is written under is there until it is whole.
            while not list(run_dir.glob("model_epoch*.pth")):
                busy.append(seconds(one_step))
            write.append(time.perf_counter() - began)
            checkpoints.close()
            alone.append(usual)
            beside.append(statistics.fmean(busy))
            lost.append(stall[-1] + sum(busy) - len(busy) * usual)
            log.close()
            for path in run_dir.glob("*.pth"):
                path.unlink()

    print(
        f"ResNet-50 with momentum on {device}, {size / 1e6:.0f} MB, median of {options.repeat} turns (and the slowest)"
    )
    held, still = statistics.median(plain), statistics.median(stall)
    for text, values in (
        ("torch.save and fsync: training stands still", plain),
        ("Checkpoints.save: training stands still", stall),
        ("… until the file is whole, beside training", write),
        ("… a step of training, usually", alone),
        ("… a step of training, beside the writer", beside),
        ("… all that training loses, standing still included", lost),
    ):
        print(f"{text:<54}{statistics.median(values) * 1e3:>9.1f} ms{max(values) * 1e3:>12.1f} ms")
    print(f"standing still: {still / held:.3f} of torch.save; all in all: {statistics.median(lost) / held:.3f}")


def trained_resnet50(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A ResNet-50 and SGD with momentum that has taken a step."""
    model = torchvision.models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 64, 64, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def training(device: torch.device) -> Callable[[], None]:
    """One step of a training, to be called again and again."""
    model = torchvision.models.resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(16, 3, 64, 64, device=device), torch.randint(10, (16,), device=device)

    def one_step() -> None:
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        settle(device)

    return one_step


def save_and_fsync(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
