"""Small studies of QFlash's arithmetic (arXiv 2604.25306), in PyTorch: its steps one by one, its scale over tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import torch

from qvit import reference
from qvit.evaluation.results import sqnr_db
from qvit.reference import PAPER_KEY_TILE, PAPER_MIN, wrap_int32
from qvit.scales import LOG2E, QMAX

# Axes of (B, H, N, D) that share a scale of q and k; v has one for each head at "token", whose rows are summed over.
GRANULARITIES = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "token": (3,)}


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Softmax attention in float64, what everything is compared with."""
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.mT * softmax_scale, -1) @ v


def quantize(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 x and its float32 scales, which have one entry along the axes that share them."""
    top = x.abs().amax(GRANULARITIES[granularity], keepdim=True).float()
    scale = top.clamp_min(torch.finfo(torch.float32).tiny) / QMAX
    return (x.float() / scale).round().to(torch.int8), scale


def _as_int8(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """x as int8 holds it, in float64."""
    integers, scale = quantize(x, granularity)
    return integers.double() * scale.double()


def int8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, granularity: str
) -> torch.Tensor:
    """Exact softmax on int8 q, k and v: what a granularity allows at best."""
    rows = "head" if granularity == "token" else granularity
    return exact_attention(_as_int8(q, granularity), _as_int8(k, granularity), _as_int8(v, rows), softmax_scale)


def count_scales(heads: int, tokens: int, granularity: str) -> int:
    """Scales of q, k and v of one image or window."""
    return {"tensor": 3, "head": 3 * heads, "token": (2 * tokens + 1) * heads}[granularity]


def partly_integer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    *,
    int8_values: bool = False,
    integer_exponent: bool = False,
) -> torch.Tensor:
    """QFlash up to a step: int8 products of queries and keys, and what the flags add; the rest in float64.

    Args:
        q, k, v: (B, H, N, D) float.
        softmax_scale: Factor of the scores.
        int8_values: int8 weights and values too.
        integer_exponent: Weights and the running maximum's factors by ShiftExp2.

    Returns:
        (B, H, N, D) float64.
    """
    (q8, q_scale), (k8, k_scale) = reference.quantize_tensor(q), reference.quantize_tensor(k)
    v8, v_scale = reference.quantize_tensor(v) if int8_values else (v, 1.0)
    one, exp_mult, *_ = reference.paper_constants(q_scale, k_scale, softmax_scale, text=False).long()
    octave = float(q_scale.double() * k_scale.double()) * softmax_scale * LOG2E

    def exp2(x: torch.Tensor) -> torch.Tensor:
        if integer_exponent:
            return reference.shift_exp2(x, one, exp_mult).double() / one
        return torch.exp2(x.double() * octave)

    top = torch.full_like(q8[..., :1], 0, dtype=torch.long) + PAPER_MIN
    row_sum, acc = torch.zeros_like(top, dtype=torch.float64), torch.zeros_like(q8, dtype=torch.float64)
    for keys, values in zip(k8.split(PAPER_KEY_TILE, 2), v8.split(PAPER_KEY_TILE, 2)):
        score = (q8.double() @ keys.double().mT).long()
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        weight, factor = exp2(score - new_top), exp2(top - new_top)
        if int8_values:
            weight = (weight * QMAX).round().clamp_max(QMAX)
        row_sum = row_sum * factor + weight.sum(-1, keepdim=True)
        acc = acc * factor + weight @ values.double()
        top = new_top
    return acc / row_sum * v_scale


@dataclass(frozen=True)
class TileState:
    """The accumulator after a tile.

    Attributes:
        scale_log2: Units of the accumulator in one of the first tile's, as a power of two.
        bits: Of the largest accumulator, had it room; int32 has 31.
        sqnr_db: Of acc / row_sum as int32 holds them, against exact attention over the keys so far.
    """

    scale_log2: float
    bits: float
    sqnr_db: float


def accumulator_over_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, release: bool
) -> list[TileState]:
    """QFlash's accumulator tile by tile, with ScaleRelease or without.

    Without it nothing divides by R, the units of 1.0: a running maximum's factor multiplies the accumulator's scale,
    so that each tile's products need R once more.
    """
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (reference.quantize_tensor(x) for x in (q, k, v))
    constants = reference.paper_constants(q_scale, k_scale, softmax_scale, text=False).long()
    one, exp_mult, requant, shift, mult = constants
    top = torch.full_like(q8[..., :1], 0, dtype=torch.long) + PAPER_MIN
    # Row sum and accumulator side by side, for they are treated alike: as int32 holds them, and as they would be.
    held = torch.zeros(*q8.shape[:-1], q8.shape[-1] + 1, dtype=torch.long)
    true = held.double()
    states, seen = [], 0
    for tile, (keys, values) in enumerate(zip(k8.split(PAPER_KEY_TILE, 2), v8.split(PAPER_KEY_TILE, 2))):
        score = (q8.double() @ keys.double().mT).long()
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        weight = reference.shift_exp2(score - new_top, one, exp_mult) * requant + (1 << (shift - 1)) >> shift
        weight = weight.clamp_max(QMAX)
        factor = reference.shift_exp2(top - new_top, one, exp_mult)
        added = torch.cat([weight.sum(-1, keepdim=True), (weight.double() @ values.double()).long()], -1)
        if release:
            held = reference.scale_release(held, factor, mult) + added
            true, scale = held.double(), 0.0
        else:
            held = wrap_int32(wrap_int32(held * factor) + wrap_int32(added * pow(int(one), tile, 2**32)))
            true, scale = true * factor + added.double() * float(one) ** tile, tile * log2(one)
        top, seen = new_top, seen + keys.shape[2]
        out = held[..., 1:] / held[..., :1].where(held[..., :1] != 0, 1) * v_scale
        noise = sqnr_db(exact_attention(q, k[:, :, :seen], v[:, :, :seen], softmax_scale), out)
        states.append(TileState(scale, log2(float(true.abs().max())), noise))
    return states
