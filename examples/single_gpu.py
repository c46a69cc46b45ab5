"""A complete training on one GPU, or on the CPU: the script before it moves to several GPUs.

Run: ``python examples/single_gpu.py``. The same training on four GPUs is ``four_gpus.py``; ``docs/migrating.md``
explains each change. Only torch and numpy are needed.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

DIGITS = Path(__file__).parent.parent / "ddp_core" / "data" / "digits.npz"


def main() -> None:
    """Train, validate after each epoch, keep a checkpoint."""
    parser = argparse.ArgumentParser(description="Train on one GPU.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DIGITS)
    parser.add_argument("--out", type=Path, default=Path("single_gpu"), help="folder of the checkpoint")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(options.seed)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    train, val = load(options.data)
    order = torch.Generator()
    sampler = RandomSampler(train, generator=order)
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, options.batch_size)

    for epoch in range(options.epochs):
        order.manual_seed(options.seed + epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        loss_sum, correct, count = validate(model, val_loader, device)
        print(f"epoch {epoch + 1}: loss {loss_sum / count:.4f}, accuracy {correct / count:.4f} of {count:.0f} samples")

        options.out.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, options.out / "checkpoint.pth")


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
