"""Whether a quantized model may be trusted: each layer's distance from float, and its answers beside the float ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qvit.config import QuantConfig
from qvit.errors import CalibrationError

LEAST_PICTURES = 64  # fewer say little of a share
_SHOWN = 5


def require_sqnr(sqnr: Mapping[str, float | None], config: QuantConfig) -> None:
    """Refuses layers that are further from float than `config.min_sqnr_db` allows.

    The published arithmetics are not held to it: they are there to be measured.

    Args:
        sqnr: dB by module name; None where nothing was measured.
        config: Of the quantization.

    Raises:
        CalibrationError: With the worst layers, worst first.
    """
    floor = config.min_sqnr_db
    if floor is None or config.arithmetic != "qvit":
        return
    measured = {name: db for name, db in sqnr.items() if db is not None}
    failed = sorted((db if db == db else float("-inf"), name) for name, db in measured.items() if not db >= floor)
    if not failed:
        return
    worst = ", ".join(f"{name!r} ({db:.1f} dB)" for db, name in failed[:_SHOWN])
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    raise CalibrationError(
        f"{len(failed)} of {len(measured)} attention modules are under min_sqnr_db = {floor:g} on a calibration batch: "
        f"{worst}{more}. Calibrate on more real, preprocessed images, try precision='high', granularity='head' "
        "or another calibration method, exclude these modules, or lower min_sqnr_db (None refuses nothing)"
    )


class Answers:
    """What the float model answers to the first calibration pictures, to hold a quantized one against."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self._top1: list[torch.Tensor] = []

    def note(self, model: nn.Module, batch: torch.Tensor, output: Any) -> None:
        """Keeps the answers to a batch, where the model classifies and more pictures are wanted."""
        if self.pictures < LEAST_PICTURES and _classifies(model, output):
            self.batches.append(batch)
            self._top1.append(output.argmax(1).cpu())

    @property
    def pictures(self) -> int:
        """How many answers are kept."""
        return sum(map(len, self.batches))

    def agreement(self, logits: Iterable[torch.Tensor]) -> float | None:
        """Percent of the pictures that have the same Top-1 in `logits`, batch by batch; None for too few pictures.

        Raises:
            CalibrationError: The logits hold NaN or Inf.
        """
        if self.pictures < LEAST_PICTURES:
            return None
        same = 0
        for top1, found in zip(self._top1, logits, strict=True):
            if not torch.isfinite(found).all():
                raise CalibrationError("the quantized model gives NaN or Inf where the float model does not")
            same += int((found.argmax(1).cpu() == top1).sum())
        return 100 * same / self.pictures


def require_finite(model: nn.Module, output: Any, rerun: Callable[[], Any]) -> None:
    """Refuses a float model whose output holds NaN or Inf, and names the layer where they came up.

    Args:
        model: The model.
        output: What it gave.
        rerun: Gives it again, where that is needed.

    Raises:
        CalibrationError: With the first module of the forward that gave NaN or Inf.
    """
    if _is_finite(output):
        return
    found: list[str] = []
    hooks = []
    try:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(_noting(name, found)))
        rerun()
    finally:
        for hook in hooks:
            hook.remove()
    where = f"layer {found[0]!r}" if found and found[0] else "the model"
    raise CalibrationError(
        f"{where} gives NaN or Inf on a calibration batch: the float model itself does not work here. Look at the "
        "weights of this layer; a float16 model may need bfloat16 or float32"
    )


def _noting(name: str, found: list[str]) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if not _is_finite(output):
            found.append(name)

    return hook


def _is_finite(output: Any) -> bool:
    """True where no tensor of a (nested) output holds NaN or Inf."""
    if isinstance(output, torch.Tensor):
        return not output.is_floating_point() or bool(torch.isfinite(output).all())
    if isinstance(output, Mapping):
        return all(map(_is_finite, output.values()))
    return all(map(_is_finite, output)) if isinstance(output, (list, tuple)) else True


def _classifies(model: nn.Module, output: Any) -> bool:
    """True for logits; features of the same shape are none, so the model has to say how many classes it has."""
    shaped = isinstance(output, torch.Tensor) and output.ndim == 2 and output.shape[1] > 1
    return shaped and getattr(model, "num_classes", None) == output.shape[1]
