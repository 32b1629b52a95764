"""QAttn (CVPR Workshops 2024; github.com/IBM/qattn): int8 q k^T, online softmax in float32, bfloat16 p v, int8 out.

Not an arXiv paper, and its equations were not found; this is the arithmetic of the published kernel: q, k and v share
one scale, v is dequantized to bfloat16, weights are rounded to bfloat16 against the running maximum, and the result is
divided by the row sum and its own scale, rounded. That scale is calibrated there, found from the result here.
"""

from __future__ import annotations

import torch

from qvit import reference
from qvit.baselines.base import Method, check_operands, integer_product, online_softmax
from qvit.scales import LOG2E, QMAX


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """QAttn's attention.

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
    packed, scale = reference.quantize_tensor(torch.stack([q, k, v]))
    scores = integer_product(packed[0], packed[1].mT).float() * (scale * scale * softmax_scale * LOG2E)
    values = (packed[2] * scale).bfloat16().float()
    acc, row_sum = online_softmax(scores, lambda weight, keys: weight.bfloat16().float() @ values[:, :, keys], bias)
    out = acc / row_sum
    out_scale = out.abs().amax().clamp_min(torch.finfo(torch.float32).tiny) / QMAX
    return ((out / out_scale).round() * out_scale).to(q.dtype)


QATTN = Method(
    name="qattn",
    title="QAttn",
    granularity="tensor",
    source="QAttn, CVPR Workshops 2024, the published kernel (no equation numbers found)",
    integer_only=False,
    attention=attention,
    prepare=None,
    pv_bits=(16, 16),
)
