"""INT-FlashAttention (arXiv 2409.16997, Algorithm 1): int8 products with one scale a token, online softmax in float.

Full: the weights 2^(score - running maximum) become int8 by floor(127 p + 1/2) for the product with an int8 v of one
scale a tensor; the row sum adds them unquantized. Half: only q and k are int8; the product with a float16 v takes
float16 weights. Row sum, and weights rounded to float16 on their way to int8, are as in the published code, which has a
scale of v a head where the paper has one, and tunes the key tile, here 64.

On uniform +-4 half measures 38.0 dB on A2 and 39.1 on A7, where QFlash's Table 4 has 38.19 and 39.07; full 36.7 and
37.6, whose figures there were not found.
"""

from __future__ import annotations

import functools

import torch

from qvit import reference
from qvit.baselines.base import (
    Call,
    Method,
    check_kernel,
    check_operands,
    integer_product,
    online_softmax,
    quantize_tokens,
)
from qvit.scales import LOG2E

WEIGHT = 127  # int8 of a weight of 1

Operands = tuple[torch.Tensor, ...]


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, full: bool) -> Operands:
    """What the kernel takes.

    Returns:
        q, k int8 and v int8 (full) or float16, (B, H, N, D); float32 scales: of q (B, H, N), with the softmax's factor
        in octaves, of k (B, H, N), and of a product of weight and v, a scalar.
    """
    check_operands(q, k, v)
    (q8, q_scale), (k8, k_scale) = (quantize_tokens(x) for x in (q, k))
    v, pv_scale = reference.quantize_tensor(v) if full else (v.half(), torch.ones((), device=v.device))
    pv_scale = pv_scale / WEIGHT if full else pv_scale
    return q8, k8, v, q_scale * (softmax_scale * LOG2E), k_scale, pv_scale


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    pv_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Operands of :func:`quantize` to float16 (B, H, N, D): the definition of the kernel, which takes no bias."""
    full = v.dtype == torch.int8
    scores = integer_product(q, k.mT).float() * q_scale[..., None] * k_scale[..., None, :]

    def weigh(weight: torch.Tensor, keys: slice) -> torch.Tensor:
        if not full:
            return weight.half().float() @ v[:, :, keys].float()
        levels = (weight.half() * WEIGHT + 0.5).to(torch.int8)
        return integer_product(levels, v[:, :, keys]).float() * pv_scale

    acc, row_sum = online_softmax(scores, weigh, bias)
    return (acc / row_sum).half()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    bias: torch.Tensor | None = None,
    *,
    full: bool,
) -> torch.Tensor:
    """INT-FlashAttention.

    Args:
        q, k, v: (B, H, N, D), one float type.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.
        full: v and the weights are int8 as well.

    Returns:
        (B, H, N, D) of q's type, by way of float16.

    Raises:
        BackendError: Operands that do not go together.
    """
    return quantized_attention(*quantize(q, k, v, softmax_scale, full=full), bias).to(q.dtype)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, full: bool) -> Call:
    """The fused kernel on quantized operands: (B, H, N, D) float16.

    Raises:
        BackendError: Operands that do not go together, or a device that Triton cannot serve.
    """
    check_kernel(q.device)
    from qvit.baselines import int_flash_kernel

    operands = quantize(q, k, v, softmax_scale, full=full)
    return lambda: int_flash_kernel.attention(*operands)


def _method(form: str) -> Method:
    full = form == "full"
    return Method(
        name=f"int_flash_{form}",
        title=f"INT-FlashAttention, {form}",
        granularity="token",
        source="INT-FlashAttention, arXiv 2409.16997, Algorithm 1",
        integer_only=False,
        attention=functools.partial(attention, full=full),
        prepare=functools.partial(prepare, full=full),
        pv_bits=(8, 8) if full else (16, 16),
    )


FULL = _method("full")
HALF = _method("half")
