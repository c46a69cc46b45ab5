"""Data sets, opened. How they are split over the ranks is :class:`Split`; the loaders are in ``loading``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from ddp_core.config import TrainingConfig
from ddp_core.errors import UserError
from ddp_core.split import Split, split
from ddp_core.training.distributed import World

__all__ = ["Data", "ImageTensors", "Split", "SyntheticImages", "open_data", "size_of", "split"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images, float32 ``[batch, channels, height, width]``, and labels, int64 ``[batch]``."""

DIGITS = Path(__file__).parent.parent / "data" / "digits.npz"

# Mean and standard deviation of the training images, each from 0 to 1, per channel.
_DIGITS_STATS = ((0.306,), (0.376,))
_MNIST_STATS = ((0.1307,), (0.3081,))
_FASHION_STATS = ((0.2860,), (0.3530,))
_CIFAR_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# https://docs.pytorch.org/vision/stable/models.html
_IMAGENET_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

SYNTHETIC_CLASSES = 10


@dataclass(frozen=True)
class Data:
    """A data set, opened.

    Attributes:
        train: The training samples.
        val: The validation samples.
        shape: Channels, height and width of an image as the model sees it.
        classes: Number of classes.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    shape: tuple[int, int, int]
    classes: int


def size_of(dataset: Dataset[Any]) -> int:
    """Give the number of samples."""
    return len(cast("Sequence[Any]", dataset))


def open_data(config: TrainingConfig, world: World) -> Data:
    """Open the config's data set; rank 0 downloads what is missing while the others wait.

    Raises:
        UserError: On every rank, if the data cannot be had.
    """
    folder = Path(config.data_dir or "data")
    match config.dataset:
        case "digits":
            return _digits(config.image_size)
        case "synthetic":
            return _synthetic(config.synthetic_samples, config.image_size or 32, config.seed)
        case "image_folder":
            return _image_folder(folder, config.image_size or 224)
        case name:
            return world.prepare_on_rank_zero(lambda download: _torchvision(name, folder, config.image_size, download))


class ImageTensors(Dataset[Any]):
    """Images held in memory as bytes, made into floats a batch at a time.

    Args:
        images: uint8 ``[n, channels, height, width]``.
        labels: ``[n]``.
        stats: Mean and standard deviation per channel, of images from 0 to 1.
        top: The pixel value that counts as 1.
        size: Resize to this many pixels square, or None to leave the images as they are.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        stats: tuple[tuple[float, ...], tuple[float, ...]],
        top: float = 255.0,
        size: int | None = None,
    ) -> None:
        self.images = images
        self.labels = labels.long()
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in stats)
        # (x / top - mean) / std, as one multiplication and one addition.
        self._scale, self._shift = 1 / (top * std), -mean / std
        self._size = size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as it comes out."""
        channels, height, width = self.images.shape[1:]
        return (channels, self._size, self._size) if self._size else (channels, height, width)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        """Give a whole batch, which DataLoader asks for where a data set can."""
        images = self.images[indices].float() * self._scale + self._shift
        if self._size and images.shape[-2:] != (self._size, self._size):
            images = functional.interpolate(images, (self._size, self._size), mode="bilinear", antialias=True)
        return images, self.labels[indices]


class SyntheticImages(Dataset[Any]):
    """Made-up images that cost next to nothing to make: a pattern for each class, under noise.

    Image ``i`` is the same in every process and every epoch.

    Args:
        count: Number of images.
        shape: Channels, height and width.
        seed: Seed of patterns and noise.
        first: Index of the first image; validation starts where training ends.
    """

    def __init__(self, count: int, shape: tuple[int, int, int], seed: int, first: int = 0) -> None:
        self.shape = shape
        self._count, self._first = count, first
        generator = torch.Generator().manual_seed(seed)
        self._patterns = torch.randn(SYNTHETIC_CLASSES, *shape, generator=generator)
        # Each image reads its noise from its own place in one long strip.
        self._strip = torch.randn(math.prod(shape) + 65_536, generator=generator)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        number = self._first + index
        label = number % SYNTHETIC_CLASSES
        start = number * 40_503 % 65_536
        noise = self._strip[start : start + math.prod(self.shape)].view(self.shape)
        return torch.add(noise, self._patterns[label], alpha=0.5), label


def _digits(size: int | None) -> Data:
    with np.load(DIGITS) as file:
        train, val = (
            ImageTensors(
                torch.from_numpy(file[f"{part}_images"]).unsqueeze(1),
                torch.from_numpy(file[f"{part}_labels"]),
                _DIGITS_STATS,
                top=16.0,
                size=size,
            )
            for part in ("train", "val")
        )
    return Data(train, val, train.shape, classes=10)


def _synthetic(samples: int, size: int, seed: int) -> Data:
    shape = (3, size, size)
    val = SyntheticImages(max(1, samples // 10), shape, seed, first=samples)
    return Data(SyntheticImages(samples, shape, seed), val, shape, SYNTHETIC_CLASSES)


def _torchvision(name: str, folder: Path, size: int | None, download: bool) -> Data:
    import torchvision

    datasets: Any = torchvision.datasets
    kind, stats = {
        "mnist": (datasets.MNIST, _MNIST_STATS),
        "fashion_mnist": (datasets.FashionMNIST, _FASHION_STATS),
        "cifar10": (datasets.CIFAR10, _CIFAR_STATS),
    }[name]
    try:
        opened = [kind(folder, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name} is not in {folder.absolute()} and could not be downloaded ({reason}); "
            "copy it there, or train on digits, which comes along",
            field="training.dataset",
        ) from None
    train, val = (
        ImageTensors(_channels_first(torch.as_tensor(d.data)), torch.as_tensor(d.targets), stats, size=size)
        for d in opened
    )
    return Data(train, val, train.shape, classes=10)


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    # MNIST: [n, height, width]; CIFAR: [n, height, width, channels]
    return images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()


def _image_folder(folder: Path, size: int) -> Data:
    """Open ``folder/train/<class>/`` and ``folder/val/<class>/``; images are resized and cropped, not varied."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2 as transforms

    v2: Any = transforms

    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(size, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*_IMAGENET_STATS),
        ]
    )
    opened = []
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise UserError(
                f"there is no folder {(folder / part).absolute()}; image_folder needs train/<class>/ and val/<class>/",
                field="training.data_dir",
            )
        try:
            opened.append(ImageFolder(folder / part, transform))
        except OSError as error:  # torchvision's FileNotFoundError for no class, or a class without images
            raise UserError(str(error).splitlines()[0], field="training.data_dir") from None
    train, val = opened
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(
            f"train/ and val/ in {folder.absolute()} must have the same classes; {', '.join(odd[:5])} is in one only",
            field="training.data_dir",
        )
    return Data(train, val, (3, size, size), len(train.classes))
