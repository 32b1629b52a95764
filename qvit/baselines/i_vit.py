"""I-ViT (arXiv 2207.01405): integer matrix product, Shiftmax (Algorithm 1), integer matrix product.

Unfused, as its deployment graph has it: the scores are requantized to int8 before the softmax, its weights are int8,
and the result is requantized to int8, each by a dyadic number (a multiplier and a shift). Scales are one a tensor;
I-ViT calibrates them, here they are found from the operands, the scores' and the output's too.

On uniform +-4 it measures 17.6 to 26.8 dB on A2 (median of 60 draws 22.1) and 19.9 to 29.0 on A7 (24.0); QFlash's
Table 4 has 25.80 and 25.22. So wide, because a natural-log unit is 4 to 7 steps of the int8 scores here, and Algorithm
1 rounds it up to a whole number of them: the base of the exponential hangs on the largest score. Of what else is open,
16-bit weights, as in the published simulation, add 0.3 dB; 16-bit scores give 26.9 / 28.7 (A2 / A7); int32 scores,
taken straight from the product, 17.3 / 21.2, for the sum of exponentials then nears 2^31 and its integer reciprocal
keeps a bit or two. Which of these QFlash measured is not known.

Small inputs fail: where 197 keys weigh much the same and a natural-log unit is more than 333 steps, the row sum passes
2^31 and is held there, as the published code has it, and the weights come out too large.
"""

from __future__ import annotations

import dataclasses

import torch

from qvit import reference
from qvit.baselines.base import (
    FAR,
    Call,
    IntegerBias,
    Method,
    add_bias,
    check_kernel,
    check_operands,
    dyadic,
    hide_masked,
    integer_product,
    requantize,
)
from qvit.scales import QMAX

SHIFT = 15  # n of Shiftmax: octaves under the largest score that still count
WEIGHT_BITS = 7  # a weight of 1 is 2^7: int8 with a sign that softmax does not need
MAX_STEPS = (1 << 16) - 1  # of a natural-log unit, so that one exponential fits in 31 bits


@dataclasses.dataclass(frozen=True)
class Constants:
    """Everything that depends on scales only, as integer tensors on the operands' device.

    Attributes:
        score: :func:`qvit.baselines.base.dyadic` number that takes a score to int8.
        steps: int64 scalar, -I0 of Algorithm 1: int8 scores of one natural-log unit, rounded up.
        out: Dyadic number that takes the accumulator to int8.
        out_scale: float32 scalar, what one unit of the result is worth.
        bias: Added to the scores before they are requantized; the kernels take none.
    """

    score: torch.Tensor
    steps: torch.Tensor
    out: torch.Tensor
    out_scale: torch.Tensor
    bias: IntegerBias | None = None


def quantize(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], Constants]:
    """int8 q, k, v, contiguous, and the constants that I-ViT's calibration would have found on these operands."""
    check_operands(q, k, v)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (reference.quantize_tensor(x.contiguous()) for x in (q, k, v))
    unit = q_scale.double() * k_scale.double() * softmax_scale
    addend = IntegerBias.of(bias, unit)
    scores = add_bias(integer_product(q8, k8.mT), addend)
    score_scale = _step(hide_masked(scores, addend, 0).abs().amax() * unit)
    score = dyadic(unit / score_scale)
    steps = torch.ceil(1 / score_scale).clamp(1, MAX_STEPS).long()
    acc = integer_product(shiftmax(hide_masked(requantize(scores, score), addend, FAR), steps), v8)
    weight_unit = v_scale.double() / 2**WEIGHT_BITS
    out_scale = _step(acc.abs().amax() * weight_unit)
    return [q8, k8, v8], Constants(score, steps, dyadic(weight_unit / out_scale), out_scale.float(), addend)


def _step(largest: torch.Tensor) -> torch.Tensor:
    """The scale that puts ``largest`` at 127; of zeros, any."""
    return torch.where(largest > 0, largest, 1.0) / QMAX


def shiftmax(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Shiftmax (Algorithm 1): softmax weights 0 .. 127 of int8 scores, in integers.

    e^x becomes 2^(x + x/2 - x/16), whose whole octaves shift the line 1 - fraction / 2.

    Args:
        x: int64 scores (..., N).
        steps: int64 scalar, scores of one natural-log unit.

    Returns:
        int64 (..., N), units of 2^-7.
    """
    x = x - x.amax(-1, keepdim=True)
    x = (x + (x >> 1) - (x >> 4)).maximum(-SHIFT * steps)
    octaves = torch.div(-x, steps, rounding_mode="floor")
    rest = x + octaves * steps
    weight = ((rest >> 1) + steps) << (SHIFT - octaves)
    row_sum = weight.sum(-1, keepdim=True).clamp_max(2**31 - 1)
    factor = torch.div(2**31 - 1, row_sum, rounding_mode="floor")
    return weight * factor >> (31 - WEIGHT_BITS)


def integer_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, constants: Constants) -> torch.Tensor:
    """int8 q, k, v (B, H, N, D) to int8 (B, H, N, D): the definition of the three kernels, one a line."""
    scores = requantize(add_bias(integer_product(q, k.mT), constants.bias), constants.score)
    weights = shiftmax(hide_masked(scores, constants.bias, FAR), constants.steps)
    return requantize(integer_product(weights, v), constants.out).to(torch.int8)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """I-ViT's attention.

    Args:
        q, k, v: (B, H, N, D), one float type.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.

    Returns:
        (B, H, N, D) of q's type.

    Raises:
        BackendError: Operands that do not go together.
    """
    operands, constants = quantize(q, k, v, softmax_scale, bias)
    return (integer_attention(*operands, constants) * constants.out_scale).to(q.dtype)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> Call:
    """Three launches on int8 operands, with int8 scores and weights in memory between them: (B, H, N, D) int8.

    Raises:
        BackendError: Operands that do not go together, or a device that Triton cannot serve.
    """
    check_kernel(q.device)
    from qvit.baselines import i_vit_kernels

    operands, constants = quantize(q, k, v, softmax_scale)
    return lambda: i_vit_kernels.attention(*operands, constants)


I_VIT = Method(
    name="i_vit",
    title="I-ViT",
    granularity="tensor",
    source="I-ViT, arXiv 2207.01405, Algorithm 1 (Shiftmax); its deployment graph",
    integer_only=True,
    attention=attention,
    prepare=prepare,
)
