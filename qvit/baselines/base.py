"""What the methods share: their description, and the quantizers that more than one of them uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from qvit import ops
from qvit.errors import BackendError
from qvit.scales import LOG2E, QMAX

MASK = -50.0  # natural log: a bias as low is a mask
FAR = -(1 << 20)  # a requantized score at which a key weighs nothing
KEY_TILE = 64  # keys of a tile of the online softmaxes; their running maximum makes it part of the arithmetic

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Method:
    """An attention operator of a paper, to be measured beside the others.

    Attributes:
        name: Key in :data:`qvit.baselines.METHODS`.
        title: Name in tables.
        granularity: What shares a scale of q and k: "token", "head", "tensor"; "-" for a method without scales.
        source: Paper, arXiv id, and the numbers of the equations or the algorithm.
        integer_only: No float between the int8 operands and the result.
        attention: (q, k, v, softmax_scale, bias=None) -> result. The definition: float q, k, v (B, H, N, D) of one
            device, float result (B, H, N, D) of q's type; quantizes inside as the method does. ``bias`` is an additive
            float (B, 1 or H, N, N), as Swin's attention has it.
        prepare: (q, k, v, softmax_scale) -> call. Quantizes, and returns the call that a GPU benchmark times, on the
            quantized operands; its result is the kernel's own, in its own layout and type. None where the method has
            no kernel here.
        qk_bits: Bits of the two operands of q k^T, for :meth:`bops`.
        pv_bits: Bits of the two operands of p v.
    """

    name: str
    title: str
    granularity: str
    source: str
    integer_only: bool
    attention: Callable[..., torch.Tensor]
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Call] | None
    qk_bits: tuple[int, int] = (8, 8)
    pv_bits: tuple[int, int] = (8, 8)

    def bops(self, tokens: int, head_dim: int) -> int:
        """Bit operations of one head's attention: multiply-accumulates x bits of one operand x bits of the other.

        The usual convention. Both products count N * N * D multiply-accumulates; the softmax, linear in these, counts
        none. That QFlash's Table 5 does the same is a guess: neither its text nor its code was found to say.
        """
        return tokens * tokens * head_dim * (math.prod(self.qk_bits) + math.prod(self.pv_bits))


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses what no method here defines.

    Raises:
        BackendError: q, k, v that are not (B, H, N, D) of one shape, one float type and one device.
    """
    if q.ndim != 4 or not q.shape == k.shape == v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise BackendError(f"q, k and v must have one shape (B, H, N, D), found {shapes}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise BackendError(f"q, k and v must share a float type and a device, found {found}")


def check_kernel(device: torch.device) -> None:
    """Refuses a device that Triton's kernels cannot run on, before anything is launched.

    Raises:
        BackendError: Neither a GPU that Triton serves, nor a CPU under Triton's interpreter.
    """
    ops.select_backend(device, "triton")


def integer_product(a: torch.Tensor, b: torch.Tensor, peak: int = 128 * 128) -> torch.Tensor:
    """a @ b of integers, exact, int64.

    As a floating-point product, which every device has and which is exact while its sums are: on the CPU in float32
    while these stay inside 2^24, else in float64.

    Args:
        a: (..., M, K), integers.
        b: (..., K, N), integers.
        peak: Bound of the product of one element of each, K times which is less than 2^53.
    """
    wide = a.device.type != "cpu" or a.shape[-1] * peak > 1 << 24
    dtype = torch.float64 if wide else torch.float32
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(dtype) @ b.to(dtype)).long()


class IntegerBias(NamedTuple):
    """An additive bias of integer scores.

    Attributes:
        units: int64, the bias in units of a score; a mask's is held where its key weighs nothing.
        masked: bool, where it is a mask. One would use up the range of requantized scores, so it stays out of that.
    """

    units: torch.Tensor
    masked: torch.Tensor

    @classmethod
    def of(cls, bias: torch.Tensor | None, unit: torch.Tensor) -> IntegerBias | None:
        """A float bias, where one unit of a score is worth ``unit``."""
        if bias is None:
            return None
        return cls((bias.double().clamp_min(2 * MASK) / unit).round().long(), bias <= MASK)


def add_bias(scores: torch.Tensor, bias: IntegerBias | None) -> torch.Tensor:
    """Integer scores with their bias."""
    return scores if bias is None else scores + bias.units


def hide_masked(scores: torch.Tensor, bias: IntegerBias | None, value: int) -> torch.Tensor:
    """Scores (B, H, N, N) with ``value`` for those of masked keys."""
    return scores if bias is None else scores.masked_fill(bias.masked, value)


def dyadic(ratio: torch.Tensor) -> torch.Tensor:
    """A positive ratio as int64 (2,): multiplier in 2^30 .. 2^31 - 1, and right shift.

    A shift beyond 62 takes every product to 0, so it is held there.
    """
    mantissa, exponent = torch.frexp(ratio.double())
    return torch.stack([torch.round(mantissa * 2**31).long().clamp_max(2**31 - 1), (31 - exponent).long().clamp(1, 62)])


def requantize(x: torch.Tensor, multiplier: torch.Tensor, limit: int = QMAX) -> torch.Tensor:
    """x (int64, as an int32 holds it) by a :func:`dyadic` number, rounded half up, held in -limit .. limit."""
    mult, shift = multiplier
    return ((x * mult + (1 << (shift - 1))) >> shift).clamp(-limit, limit)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, one scale a token: int8 (B, H, N, D) and float32 scales (B, H, N)."""
    x = x.float()
    scale = x.abs().amax(-1) / QMAX
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale[..., None]).round().clamp(-QMAX, QMAX).to(torch.int8), scale


def online_softmax(
    scores: torch.Tensor, weigh: Callable[[torch.Tensor, slice], torch.Tensor], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's softmax over tiles of keys, in float32.

    Args:
        scores: (B, H, N, N) float32, in octaves: softmax of 2 to them.
        weigh: (p, keys) -> the product of a tile's weights 2^(score - running maximum) with the values of these keys.
        bias: Added to the scores; in natural-log units, and held where a key weighs nothing.

    Returns:
        Accumulator (B, H, N, D) and row sum (B, H, N, 1); their ratio is the attention.
    """
    if bias is not None:
        scores = scores + bias.float().clamp_min(2 * MASK) * LOG2E
    top = torch.full_like(scores[..., :1], -math.inf)
    acc, row_sum = torch.zeros((), device=scores.device), torch.zeros_like(top)
    for start in range(0, scores.shape[-1], KEY_TILE):
        keys = slice(start, start + KEY_TILE)
        new_top = torch.maximum(top, scores[..., keys].amax(-1, keepdim=True))
        weight = torch.exp2(scores[..., keys] - new_top)
        release = torch.exp2(top - new_top)
        row_sum = row_sum * release + weight.sum(-1, keepdim=True)
        acc = acc * release + weigh(weight, keys)
        top = new_top
    return acc, row_sum
