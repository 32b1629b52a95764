"""The attention core of a model: its shapes, its operands, and a method's definition in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from qvit.calibration import observe_cores
from qvit.config import QuantConfig
from qvit.discovery import plan_swap
from qvit.patches.base import CoreInputs, QuantizedModule
from qvit.patches.windows import FoldedBlock

Attention = Callable[..., torch.Tensor]  # (q, k, v, softmax_scale, bias) -> (B, H, N, D)


@dataclass(frozen=True, eq=False)
class Capture:
    """What one attention module computes on.

    Attributes:
        layer: Its name in the model.
        core: Its operands.
        softmax_scale: Factor of the scores.
    """

    layer: str
    core: CoreInputs
    softmax_scale: float


def capture_cores(model: nn.Module, images: torch.Tensor) -> list[Capture]:
    """The operands of every attention module of a float model, in module order."""
    sites = plan_swap(model, QuantConfig())
    seen: dict[str, CoreInputs] = {}
    with torch.no_grad():
        observe_cores(model, [images], sites, {site.name: partial(seen.setdefault, site.name) for site in sites})
    return [Capture(s.name, seen[s.name], s.adapter.scale_of(s.module)) for s in sites if s.name in seen]


def replace_core(model: nn.Module, attention: Attention) -> nn.Module:
    """Let every swapped module of a model attend by a method's definition; there is no way back, so give it a copy.

    Args:
        model: A quantized model; blocks that give their attention the image give it windows again.
        attention: The definition, with scales of its own; it is given the bias, float (B, 1 or H, N, N) or None.
    """
    for module in model.modules():
        if isinstance(module, FoldedBlock):
            module.unfold()
        elif isinstance(module, QuantizedModule):
            module.attend = partial(_attend, module, attention)
    return model


def _attend(module, attention: Attention, q, k, v, *masks) -> torch.Tensor:
    """What stands in for `QuantizedModule.attend`."""
    bias = module.float_bias(module, q, *masks)
    bias = None if bias is None else _additive(bias, len(q))
    return attention(q, k, v, module.qvit_settings.softmax_scale, bias).transpose(1, 2).flatten(2)


def _additive(bias: torch.Tensor, batch: int) -> torch.Tensor:
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, float("-inf"))
    return bias.repeat(batch // len(bias), 1, 1, 1)
