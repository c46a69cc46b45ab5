"""Models, with their first layer and head fitted to the data."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_core.errors import UserError

Shape = tuple[int, int, int]
"""Channels, height and width of one image."""


def build_model(name: str, shape: Shape, classes: int, *, smallest_batch: int = 2) -> nn.Module:
    """Build a model for images of a shape; its weights come from torch's random numbers.

    Args:
        name: ``cnn``, ``mlp`` or a torchvision classification model.
        shape: Channels, height and width of an image.
        classes: Number of classes.
        smallest_batch: The smallest batch there will be in training.

    Returns:
        A model from images ``[batch, *shape]`` to logits ``[batch, classes]``.

    Raises:
        UserError: For an unknown name, or images or batches that the architecture cannot take,
            with what to set instead.
    """
    try:
        model = _build(name, shape, classes)
        _try(model, shape, smallest_batch)
    except _MISFITS as error:
        raise UserError(*_explain(name, shape, classes, smallest_batch, str(error))) from None
    return model


# What torch and torchvision raise for images or batches that an architecture cannot take.
_MISFITS = (RuntimeError, ValueError, AssertionError, ZeroDivisionError)


@torch.no_grad()
def _try(model: nn.Module, shape: Shape, batch: int) -> None:
    """Run a training forward on the CPU."""
    with without_trace(model):
        model(torch.zeros(batch, *shape))


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Let training forwards leave no trace in the model's buffers (BatchNorm) or in random numbers (dropout)."""
    before = [buffer.clone() for buffer in model.buffers()]
    devices = {buffer.device for buffer in (*model.parameters(), *before) if buffer.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def _explain(name: str, shape: Shape, classes: int, smallest_batch: int, problem: str) -> tuple[str, str]:
    """Find out what to change: the message, and the field it is about."""

    def works(size: Shape) -> bool:
        # On the meta device there are only shapes, so that trying many sizes of a large model is quick.
        try:
            with torch.device("meta"):
                _build(name, size, classes)(torch.empty(2, *size))
        except _MISFITS:
            return False
        return True

    channels, height, width = shape
    if smallest_batch == 1 and works(shape):
        return (
            f"the last batch of an epoch would be a single sample, too little for {name}'s BatchNorm on images of "
            f"{height} × {width}; choose another batch_size",
            "training.batch_size",
        )
    size = next((s for s in (16, 32, 48, 64, 96, 128, 224, 299) if works((channels, s, s))), None)
    advice = f"; set image_size to {size}" if size else ""
    reason = problem.strip().splitlines()[0] if problem.strip() else "they do not fit"
    return f"{name} cannot take images of {height} × {width}{advice} ({reason})", "training.image_size"


def _build(name: str, shape: Shape, classes: int) -> nn.Module:
    if name == "cnn":
        return small_cnn(shape, classes)
    if name == "mlp":
        return mlp(shape, classes)
    return _from_torchvision(name, shape, classes)


def small_cnn(shape: Shape, classes: int) -> nn.Module:
    """Convolutions, halving the image until it is at most 7 pixels wide, and two linear layers."""
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU()]
    wide = 32
    while True:
        layers += [nn.Conv2d(wide, 64, 3, padding=1), nn.ReLU()]
        wide = 64
        if min(height, width) < 4:
            break
        layers += [nn.MaxPool2d(2)]
        height, width = height // 2, width // 2
        if max(height, width) <= 7:
            break
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * height * width, 128), nn.ReLU(), nn.Linear(128, classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer of 256."""
    channels, height, width = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 256), nn.ReLU(), nn.Linear(256, classes))


def _from_torchvision(name: str, shape: Shape, classes: int) -> nn.Module:
    import torchvision

    models: Any = torchvision.models

    known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"torchvision has no classification model {name!r}{hint}", field="training.model")
    channels, height, width = shape
    options: dict[str, Any] = {}
    if name.startswith("vit"):
        if height != width:
            raise ValueError(f"{name} needs square images")
        options["image_size"] = height
    elif name.startswith("maxvit"):
        options["input_size"] = (height, width)
    elif name.startswith(("inception", "googlenet")):
        # Their second heads need a loss of their own; and the normal initialisation takes seconds.
        options |= {"aux_logits": False, "init_weights": False}
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    if channels != 3:
        _fit_first_layer(model, channels)
    return model


def _fit_first_layer(model: nn.Module, channels: int) -> None:
    """Replace the first convolution, a patch embedding included, by one for this many channels."""
    path, old = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        dilation=old.dilation,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    with torch.no_grad():
        # The architecture's own initialisation, which torch's default for a convolution is not.
        repeats = -(-channels // 3)
        new.weight.copy_(old.weight.repeat(1, repeats, 1, 1)[:, :channels])
        if new.bias is not None and old.bias is not None:
            new.bias.copy_(old.bias)
    model.set_submodule(path, new)


def count_parameters(model: nn.Module) -> int:
    """Count the trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
