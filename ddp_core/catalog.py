"""The data sets and models the built-in training knows, as plain facts.

Both the config's checks and the launch form read this, so it imports neither torch nor
torchvision. ``ddp_core.training`` builds what is named here and its tests hold the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DatasetFacts:
    """What is known of a data set before it is opened.

    Attributes:
        train: Number of training samples, or None when it depends on a folder or an option.
        val: Number of validation samples, or None likewise.
        shape: Channels, height and width of one image, or None likewise.
        classes: Number of classes, or None likewise.
        summary: One line for the launch form.
    """

    train: int | None
    val: int | None
    shape: tuple[int, int, int] | None
    classes: int | None
    summary: str


# Sizes: torchvision's documentation of each data set; digits: 1,797 images, a fifth kept back.
DATASETS: dict[str, DatasetFacts] = {
    "digits": DatasetFacts(1437, 360, (1, 8, 8), 10, "1,797 handwritten digits of 8 × 8, comes along"),
    "mnist": DatasetFacts(60000, 10000, (1, 28, 28), 10, "70,000 handwritten digits, downloaded once"),
    "fashion_mnist": DatasetFacts(60000, 10000, (1, 28, 28), 10, "70,000 pictures of clothes, downloaded once"),
    "cifar10": DatasetFacts(50000, 10000, (3, 32, 32), 10, "60,000 small photographs, downloaded once"),
    "image_folder": DatasetFacts(None, None, None, None, "your own images: train/<class>/ and val/<class>/"),
    "synthetic": DatasetFacts(None, None, None, None, "made-up images of any size, to measure speed"),
}  # fmt: skip

# Families that torchvision.models.get_model knows and whose first layer and head can be fitted.
_TORCHVISION_MODEL = re.compile(
    r"(alexnet|convnext|densenet|efficientnet|googlenet|inception|maxvit|mnasnet|mobilenet|regnet|resnet"
    r"|resnext|shufflenet|squeezenet|swin|vgg|vit|wide_resnet)[a-z0-9_]*"
)
BUILTIN_MODELS = {
    "cnn": "a small convolutional network, right for digits and MNIST",
    "mlp": "a multi-layer perceptron with one hidden layer",
}
SUGGESTED_MODELS = [
    *BUILTIN_MODELS,
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
]


def is_model_name(name: str) -> bool:
    """Tell whether ``name`` can be a model: built in, or of one of torchvision's families."""
    return name in BUILTIN_MODELS or _TORCHVISION_MODEL.fullmatch(name) is not None


IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})


def count_image_folder(folder: Path) -> tuple[int, int]:
    """Count an image folder's images and classes as torchvision's ImageFolder would.

    Returns:
        Number of images and number of classes; ``(0, 0)`` for a folder that is not there.
    """
    if not folder.is_dir():
        return 0, 0
    classes = [entry for entry in folder.iterdir() if entry.is_dir()]
    images = sum(1 for c in classes for p in c.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    return images, len(classes)
