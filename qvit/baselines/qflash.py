"""QFlash (arXiv 2604.25306): integer attention in tiles of 64 keys, and its published code's kernel.

Two arithmetics. ``qflash`` is that of the published code, ``qflash_text`` that of Algorithm 1 as printed, which floors
where the code rounds. ``qvit.reference.attention_paper`` defines both; docs/numerics.md, section 6, says where it and
the published code differ.

On uniform +-4 the code's arithmetic measures 32.4 dB on A2, as the paper's 32.50 has it, and 33.6 on A7, where the
paper has 31.02: not explained, for the published kernel itself, run in Triton's interpreter, gives 33.2 to 33.5 there.
"""

from __future__ import annotations

import functools

import torch

from qvit import reference
from qvit.baselines.base import Call, Method, check_kernel, check_operands


def quantize(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, text: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor, tuple[torch.Tensor, ...]]:
    """int8 q, k, v (one scale a tensor), the integer constants, and the scales."""
    check_operands(q, k, v)
    operands, scales = zip(*(reference.quantize_tensor(x) for x in (q, k, v)))
    return list(operands), reference.paper_constants(*scales[:2], softmax_scale, text=text), scales


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    bias: torch.Tensor | None = None,
    *,
    text: bool = False,
) -> torch.Tensor:
    """QFlash: (B, H, N, D) float in and out, scales found from the operands.

    Args:
        q, k, v: (B, H, N, D), one float type.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.
        text: Algorithm 1 as printed instead of the published code.

    Returns:
        (B, H, N, D) of q's type.

    Raises:
        BackendError: Operands that do not go together.
    """
    operands, constants, (q_scale, k_scale, v_scale) = quantize(q, k, v, softmax_scale, text=text)
    if bias is not None:
        bias = reference.paper_bias(bias, q_scale, k_scale, softmax_scale)
    out = reference.attention_paper(*operands, constants, bias, text=text)
    return (out.transpose(1, 2) * v_scale).to(q.dtype)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> Call:
    """The kernel on int8 operands, as the published benchmark times it: (B, N, H, D) int8 at v's scale.

    Raises:
        BackendError: Operands that do not go together, or a device that Triton cannot serve.
    """
    check_kernel(q.device)
    operands, constants, _ = quantize(q, k, v, softmax_scale)
    return lambda: torch.ops.qvit.attention_paper(*operands, constants, None, False, "triton")


QFLASH = Method(
    name="qflash",
    title="QFlash (published code)",
    granularity="tensor",
    source="QFlash, arXiv 2604.25306, the published code",
    integer_only=True,
    attention=attention,
    prepare=prepare,
)
QFLASH_TEXT = Method(
    name="qflash_text",
    title="QFlash (as printed)",
    granularity="tensor",
    source="QFlash, arXiv 2604.25306, Algorithm 1",
    integer_only=True,
    attention=functools.partial(attention, text=True),
    prepare=None,
)
