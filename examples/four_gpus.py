"""The training of ``single_gpu.py`` on four GPUs, or on four processes of the CPU, in five steps.

Run: ``torchrun --standalone --nproc-per-node 4 examples/four_gpus.py``. Here ``--batch-size`` is per process: four
times 16 make the same steps as 64 on one GPU. ``docs/migrating.md`` explains each step. Only torch and numpy are
needed.
"""

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

DIGITS = Path(__file__).parent.parent / "ddp_core" / "data" / "digits.npz"


def main() -> None:
    """Join the others, train, and leave on every path."""
    parser = argparse.ArgumentParser(description="Train on several GPUs.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per process and backward")
    parser.add_argument("--accumulation", type=int, default=1, help="backwards per optimizer step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DIGITS)
    parser.add_argument("--out", type=Path, default=Path("four_gpus"), help="folder of the checkpoint to continue from")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 4 examples/four_gpus.py")

    # Step 1 of 5: one process per GPU. torchrun has set RANK, LOCAL_RANK, WORLD_SIZE and the address to meet at.
    local_rank = int(os.environ["LOCAL_RANK"])
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    # torchrun keeps its store over a restart: without a prefix the new ranks find the addresses of the dead ones.
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("attempt_" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if on_cuda else None,
    )
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """What each rank does."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo")  # for counts and flags, which then never wait for the GPU

    torch.manual_seed(options.seed)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    # Step 4 of 5, first half: load on the CPU, into the bare model, before it is wrapped.
    path = options.out / "checkpoint.pth"
    first_epoch, first_step = 0, 0
    if path.exists():  # after a restart by torchrun, or a stop
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, first_step = state["epoch"], state["step"]
        if rank == 0:
            print(f"continuing after {first_epoch} epochs and {first_step} steps", flush=True)

    # Step 2 of 5: wrap. The wrapper is for training; the bare model stays at hand for all else.
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    torch.manual_seed(options.seed + 1 + rank)  # the ranks may start alike, but not drop out alike

    # Step 3 of 5: each rank its share of the samples, in training equally many and in validation each exactly once.
    train, val = load(options.data)
    sampler: DistributedSampler[Any] = DistributedSampler(train, shuffle=True, seed=options.seed)
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world_size)), options.batch_size)
    steps = len(loader) // options.accumulation

    # Step 5 of 5, the script's half: torchrun passes SIGTERM on, and all ranks must end after the same step.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))

    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)  # or every epoch has the order of the first
        ddp.train()
        batches = islice(loader, first_step * options.accumulation, None)
        for step in range(first_step, steps):
            optimizer.zero_grad()
            for left in reversed(range(options.accumulation)):
                images, labels = next(batches)
                with ddp.no_sync() if left else nullcontext():  # gradients travel once a step
                    loss = cross_entropy(ddp(images.to(device)), labels.to(device))
                    (loss / options.accumulation).backward()
            optimizer.step()
            if added_up([len(asked)], control)[0]:
                save(path, model, optimizer, epoch, step + 1)
                return
        first_step = 0

        loss_sum, correct, count = added_up(validate(model, val_loader, device), control)
        if rank == 0:
            mean, accuracy = loss_sum / count, correct / count
            print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy:.4f} of {count:.0f} samples", flush=True)
        save(path, model, optimizer, epoch + 1, 0)


def added_up(values: list[float], group: Any) -> list[float]:
    """Add up each value over all ranks; every rank must call this at the same place."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, step: int) -> None:
    """Step 4 of 5, second half: rank 0 writes the bare model, under another name until it is whole."""
    if dist.get_rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def build_model() -> nn.Module:
    """A small convolutional network for images of 8 × 8 in one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def load(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and the validation samples."""
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}
    train, val = (
        TensorDataset(arrays[f"{part}_images"].unsqueeze(1) / 16, arrays[f"{part}_labels"].long())
        for part in ("train", "val")
    )
    return train, val


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device) -> list[float]:
    """Sum of the losses, how many are right, and how many there are."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        logits = model(images.to(device)).cpu()
        loss = cross_entropy(logits, labels, reduction="sum")
        sums += torch.tensor([loss, (logits.argmax(1) == labels).sum(), len(labels)])
    return sums.tolist()


if __name__ == "__main__":
    main()
