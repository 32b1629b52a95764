"""FQ-ViT (arXiv 2111.13824): log-int-softmax, whose weights are powers of two.

As published: activations are 8 bits without a sign, by their minimum and maximum, one scale and zero point for q, k and
v together; the scores are requantized in the same manner; i-exp (I-BERT's) gives the exponentials; the logarithm to
base 2 of sum / exponential, rounded, is the 4-bit weight; and the product with v is a sum of shifted values. The
weights of a row do not sum to 1, which is most of its error: it measures 14.2 dB on A2 and 14.6 on A7 (uniform +-4),
and some 18 and 22 if they did. QFlash's figure was not found.

Where a step of the scores is worth more than 1.67 (natural log), the polynomial's integers are 0 and every key weighs
the same.
"""

from __future__ import annotations

import torch

from qvit.baselines.base import (
    FAR,
    IntegerBias,
    Method,
    add_bias,
    check_operands,
    dyadic,
    hide_masked,
    integer_product,
    requantize,
)
from qvit.baselines.i_bert import OCTAVES, i_exp, polynomial_constants

BITS = 4  # of a weight
LOWEST = 2**BITS - 1  # the smallest weight is 2^-15
LEVELS = 255  # steps of an activation's range
POLYNOMIAL_BITS = 17  # shifted up by 30 octaves and summed over up to 2^15 keys, it fits in 63 bits


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 bits by minimum and maximum: integers less their zero point, int64 -255 .. 255, and the float64 scale."""
    low, high = x.amin().double().clamp_max(0), x.amax().double().clamp_min(0)
    scale = torch.where(high > low, (high - low) / LEVELS, 1.0)
    zero = torch.round(-low / scale)
    return (torch.round(x.double() / scale).clamp(-zero, LEVELS - zero)).long(), scale


def log_round(x: torch.Tensor) -> torch.Tensor:
    """log2 of positive integers (int64), rounded at 1.5 times a power of two; in integers.

    By bisection, for PyTorch has no count of leading zeros.
    """
    rest, exponent = x, torch.zeros_like(x)
    for bits in (32, 16, 8, 4, 2, 1):
        step = (rest >= 1 << bits) * bits
        rest, exponent = rest >> step, exponent + step
    return exponent + (2 * x >= 3 << exponent)


def log_int_softmax(x: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Log-int-softmax: right shifts of a row's keys, 0 .. 15, or 16 for a weight of 0; in integers.

    Args:
        x: int64 scores (..., N).
        constants: From :func:`qvit.baselines.i_bert.polynomial_constants`.

    Returns:
        int64 (..., N).
    """
    mantissa, octaves = i_exp(x - x.amax(-1, keepdim=True), constants)
    weight = (mantissa << (OCTAVES - octaves)).clamp_min(1)
    row_sum = weight.sum(-1, keepdim=True)
    # Rounded, and then rounded again in the logarithm, as the published code does.
    ratio = torch.div(row_sum + (weight >> 1), weight, rounding_mode="floor")
    return log_round(ratio).clamp_max(LOWEST + 1)


def integer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: torch.Tensor,
    limits: torch.Tensor,
    constants: torch.Tensor,
    bias: IntegerBias | None = None,
) -> torch.Tensor:
    """Integers q, k, v (B, H, N, D) to the accumulator, int64, in units of v's scale / 2^15.

    Args:
        q, k, v: int64, -255 .. 255.
        score: Dyadic number that takes a score to 8 bits.
        limits: int64 (2,), smallest and largest of these.
        constants: From :func:`qvit.baselines.i_bert.polynomial_constants`, of the requantized score.
        bias: Of the scores before that.
    """
    scores = add_bias(integer_product(q, k.mT, LEVELS**2), bias)
    scores = requantize(scores, score, LEVELS).clamp(limits[0], limits[1])
    shifts = log_int_softmax(hide_masked(scores, bias, FAR), constants)
    return integer_product((1 << LOWEST) >> shifts, v, LEVELS << LOWEST)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """FQ-ViT's attention; the result passes through 8 bits by its own range.

    Args:
        q, k, v: (B, H, N, D), one float type.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.

    Returns:
        (B, H, N, D) of q's type.

    Raises:
        BackendError: Operands that do not go together.
    """
    check_operands(q, k, v)
    packed, scale = quantize(torch.stack([q, k, v]))
    unit = scale * scale * softmax_scale
    addend = IntegerBias.of(bias, unit)
    scores = hide_masked(add_bias(integer_product(packed[0], packed[1].mT, LEVELS**2), addend), addend, 0)
    levels, score_scale = quantize(scores * unit)
    limits = torch.stack([levels.amin(), levels.amax()])
    constants = polynomial_constants(score_scale, POLYNOMIAL_BITS)
    acc = integer_attention(*packed, dyadic(unit / score_scale), limits, constants, addend)
    out, out_scale = quantize(acc * (scale / 2**LOWEST))
    return (out * out_scale).to(q.dtype)


FQ_VIT = Method(
    name="fq_vit",
    title="FQ-ViT",
    granularity="tensor",
    source="FQ-ViT, arXiv 2111.13824, Log-Int-Softmax, with i-exp of arXiv 2101.01321, Algorithm 3",
    integer_only=True,
    attention=attention,
    prepare=None,
    pv_bits=(BITS, 8),
)
