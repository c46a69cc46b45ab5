"""One optimizer step: precision, loss scaling, clipping, the update, the moving average."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_core.config import TrainingConfig
from ddp_core.errors import UserError

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters, lr, weight_decay: torch.optim.SGD(
        parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay, fused=True
    ),
    "adamw": lambda parameters, lr, weight_decay: torch.optim.AdamW(
        parameters, lr=lr, weight_decay=weight_decay, fused=True
    ),
}
"""The optimizers by name. Fused ones can leave a step out on the device itself: see :class:`Optimization`."""


class Ema:
    """A moving average of a model's weights; its buffers are the model's.

    Args:
        model: The bare model.
        decay: How much of the average stays in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(model, multi_avg_fn=average)
        self.model: nn.Module = self._averaged.module

    def update(self, model: nn.Module) -> None:
        """Take in the model's weights after a step."""
        self._averaged.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights under the model's own names, and how many updates are in them."""
        return {"model": self.model.state_dict(), "updates": self._averaged.n_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the average up again."""
        self.model.load_state_dict(state["model"])
        self._averaged.n_averaged.copy_(state["updates"])


class Optimization:
    """All that turns a loss into new weights, the same for one batch and for many added up.

    A step whose gradient is not finite is left out, and on every rank alike without a word between
    them: a loss that is not finite is made to give a gradient that is not either, and averaging
    spreads that to all ranks. The fused optimizers read the verdict on the device, so nobody waits.

    Args:
        model: The bare model, on its device.
        t: The training's options.
        lr: The learning rate, scaled.
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, t: TrainingConfig, lr: float, device: torch.device) -> None:
        if t.precision == "fp16" and device.type != "cuda":
            raise UserError("fp16 needs CUDA, and this run trains on the CPU; use bf16 or fp32", "training.precision")
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[t.optimizer](model.parameters(), lr, t.weight_decay)
        self.scaler = torch.amp.GradScaler(device.type, enabled=t.precision == "fp16")
        self.ema = Ema(model, t.ema_decay) if t.ema_decay else None
        self._model, self._t, self._device = model, t, device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._nan = torch.tensor(float("nan"), device=device)
        self._one = torch.ones((), device=device)

    def autocast(self) -> torch.autocast:
        """Around forward and loss, not backward: computes in the precision asked for."""
        dtype = torch.float16 if self._t.precision == "fp16" else torch.bfloat16
        return torch.autocast(self._device.type, dtype, enabled=self._t.precision != "fp32")

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add a batch's gradients to the step's.

        Args:
            loss: Mean loss of the batch, a scalar.
            share: The batch's part of the samples this rank has in the step.
        """
        finite = torch.where(loss.detach().isfinite(), self._one, self._nan)
        self.scaler.scale(loss * (finite * share)).backward()  # type: ignore[no-untyped-call]

    def unscaled(self, norm: torch.Tensor) -> torch.Tensor:
        """Take fp16's loss scale out of a norm that was measured before :meth:`step`; nothing waits for the GPU."""
        return norm / self.scaler.scale(self._one)

    def step(self) -> torch.Tensor:
        """Clip, update the weights unless the gradient is not finite, and clear the gradients.

        Returns:
            Norm of the averaged gradient before clipping, a scalar on the device.
        """
        self.scaler.unscale_(self.optimizer)  # first: a norm of scaled gradients would clip at random
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if self._t.clip_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self._t.clip_grad_norm, norm)
        if not self.scaler.is_enabled():
            # What GradScaler gives a fused optimizer: 1 leaves the step out.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(self._model)
        return norm

    def parts(self) -> Iterator[tuple[str, Any]]:
        """What belongs into a checkpoint, by name."""
        yield "optimizer", self.optimizer
        yield "scaler", self.scaler
        if self.ema:
            yield "ema", self.ema
