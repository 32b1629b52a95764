"""FlashAttention-2 (arXiv 2307.08691, Algorithm 1) in float16: the yardstick without any quantization.

The definition is ``scaled_dot_product_attention``; on a GPU the timed call insists on its flash backend.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qvit.baselines.base import Call, Method, check_operands


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float16 attention.

    Args:
        q, k, v: (B, H, N, D), one float type; rounded to float16.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.

    Returns:
        (B, H, N, D) of q's type.

    Raises:
        BackendError: Operands that do not go together.
    """
    check_operands(q, k, v)
    bias = None if bias is None else bias.half()
    out = scaled_dot_product_attention(q.half(), k.half(), v.half(), attn_mask=bias, scale=softmax_scale)
    return out.to(q.dtype)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> Call:
    """SDPA's flash backend on float16 operands: (B, H, N, D) float16. Torch raises where it cannot serve them."""
    check_operands(q, k, v)
    operands = [x.half() for x in (q, k, v)]

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*operands, scale=softmax_scale)

    return call


FLASH_ATTENTION_2 = Method(
    name="flash_attention_2",
    title="FlashAttention-2 (FP16)",
    granularity="-",
    source="FlashAttention-2, arXiv 2307.08691, Algorithm 1; SDPA's flash backend",
    integer_only=False,
    attention=attention,
    prepare=prepare,
    qk_bits=(16, 16),
    pv_bits=(16, 16),
)
