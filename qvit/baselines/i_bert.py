"""I-BERT (arXiv 2101.01321): integer matrix product, i-softmax by a polynomial (Algorithms 1 and 3), integer product.

Unfused; q, k, v and the result are int8 with one scale a tensor, the scores stay int32, the exponentials are
requantized to 16 bits and the weights to 8 bits without a sign, as the published code has it. There a weight alone in
its row reaches 256; here it is held at 255, so that it is a byte.
"""

from __future__ import annotations

import math

import torch

from qvit import reference
from qvit.baselines.base import IntegerBias, Method, add_bias, check_operands, dyadic, integer_product, requantize

COEFFICIENTS = (0.35815147, 0.96963238 / 0.35815147, 1 / 0.35815147)  # a, b, c: e^x = a (x (x + b) + c), -ln 2 < x <= 0
OCTAVES = 30  # under the largest score that still count
EXP_LIMIT = 2**15 - 1  # of a 16-bit exponential


def polynomial_constants(scale: torch.Tensor, bits: int = 31) -> torch.Tensor:
    """int64 (5,): ln 2, b and c of Algorithms 1 and 3 as integers, the bits to drop, and c after that.

    The published code simulates its integers in float. Where scores are so fine that a 32-bit polynomial would
    overflow, its lowest bits are dropped here.

    Args:
        scale: float64 scalar, what one unit of a score is worth; held above 2^-30, so that c fits.
        bits: Of the polynomial's largest value, c.
    """
    scale = scale.clamp_min(2.0**-30)
    _, b, c = COEFFICIENTS
    ln2, b, c = (torch.floor(x).long() for x in (math.log(2) / scale + 1, b / scale, c / scale**2))
    drop = (torch.frexp(c.double()).exponent.long() - bits).clamp_min(0)
    return torch.stack([ln2, b, c, drop, c >> drop])


def i_exp(x: torch.Tensor, constants: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """i-exp (Algorithm 3) before its last shift: e^(x scale) in proportion to mantissa / 2^octaves.

    Args:
        x: int64, at most 0.
        constants: From :func:`polynomial_constants`.

    Returns:
        The mantissa, at least 0, and the octaves, 0 .. 30; int64.
    """
    ln2, b, c, drop, _ = constants
    x = x.maximum(-OCTAVES * ln2)
    octaves = torch.div(-x, ln2, rounding_mode="floor")
    rest = x + octaves * ln2
    return (rest * (rest + b) + c).clamp_min(0) >> drop, octaves


def softmax(x: torch.Tensor, constants: torch.Tensor, requant: torch.Tensor) -> torch.Tensor:
    """i-softmax: weights 0 .. 255 of integer scores, in integers.

    Args:
        x: int64 scores (..., N).
        constants: From :func:`polynomial_constants`.
        requant: Dyadic number that takes the mantissa of a row's largest to 32767.

    Returns:
        int64 (..., N), units of 2^-8.
    """
    mantissa, octaves = i_exp(x - x.amax(-1, keepdim=True), constants)
    weight = requantize(mantissa >> octaves, requant, EXP_LIMIT)
    factor = torch.div(2**32, weight.sum(-1, keepdim=True), rounding_mode="floor")
    return (weight * factor >> 24).clamp_max(255)


def integer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    requant: torch.Tensor,
    bias: IntegerBias | None = None,
) -> torch.Tensor:
    """int8 q, k, v (B, H, N, D) to the accumulator (B, H, N, D), int64, in units of v's scale / 256."""
    scores = add_bias(integer_product(q, k.mT), bias)
    return integer_product(softmax(scores, constants, requant), v, 255 * 128)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """I-BERT's attention; the result passes through int8 by its own scale, found from it.

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
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (reference.quantize_tensor(x) for x in (q, k, v))
    unit = q_scale.double() * k_scale.double() * softmax_scale
    constants = polynomial_constants(unit)
    # A row's largest score is at 0, where the mantissa is the polynomial's constant: the range is known beforehand.
    requant = dyadic(EXP_LIMIT / constants[-1].double())
    acc = integer_attention(q8, k8, v8, constants, requant, IntegerBias.of(bias, unit))
    largest = acc.abs().amax().clamp_min(1).double()
    out = requantize(acc, dyadic(127 / largest))
    return (out * (v_scale * largest / (127 * 256))).to(q.dtype)


I_BERT = Method(
    name="i_bert",
    title="I-BERT",
    granularity="tensor",
    source="I-BERT, arXiv 2101.01321, Algorithms 1 (i-poly) and 3 (i-exp, i-softmax)",
    integer_only=True,
    attention=attention,
    prepare=None,
)
