"""This library's own arithmetic beside the others: static scales, found here from the operands themselves."""

from __future__ import annotations

import functools

import torch

from qvit import ops, reference
from qvit.baselines.base import Call, Method, check_kernel, check_operands
from qvit.scales import Scales


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    bias: torch.Tensor | None = None,
    *,
    precision: str,
) -> torch.Tensor:
    """docs/numerics.md with one scale a tensor and no vectors over channels, as the published methods have it.

    Args:
        q, k, v: (B, H, N, D), one float type.
        softmax_scale: Factor of the scores.
        bias: Additive float (B, 1 or H, N, N), or None.
        precision: "standard" or "high".

    Returns:
        (B, H, N, D) of q's type.

    Raises:
        BackendError: Operands that do not go together.
        CalibrationError: Operands that no scale can be found from, such as zeros.
    """
    constants = _scales(q, k, v, softmax_scale).constants(q.device)
    addend = None if bias is None else reference.exponent_bias(bias, constants)
    return reference.attention(q, k, v, constants, addend, precision=precision).transpose(1, 2)


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, precision: str) -> Call:
    """The kernel on int8 operands: (B, N, H, D) int8 at the output's own scale.

    Raises:
        BackendError: Operands that do not go together, or a device that Triton cannot serve.
    """
    check_kernel(q.device)
    scales = _scales(q, k, v, softmax_scale)
    mults = (x.to(q.device) for x in (scales.q_mult, scales.k_mult, scales.v_mult))
    zeros = (None, scales.k_zero.to(q.device), None)
    quantized = map(reference.quantize_operand, (q, k, v), mults, zeros)
    operands = [x.to(torch.int8) for x in quantized]
    scales.constants(q.device)  # built outside of what is timed
    return lambda: ops.attention(*operands, scales, precision=precision, out_dtype=torch.int8, backend="triton")


def _scales(q, k, v, softmax_scale: float) -> Scales:
    check_operands(q, k, v)
    return Scales.from_tensors(q, k, v, softmax_scale=softmax_scale, channels=False)


def _method(precision: str, weight_bits: int) -> Method:
    return Method(
        name=f"qvit_{precision}",
        title=f"qvit, {precision}",
        granularity="tensor",
        source="docs/numerics.md, sections 1 to 4",
        integer_only=True,
        attention=functools.partial(attention, precision=precision),
        prepare=functools.partial(prepare, precision=precision),
        pv_bits=(weight_bits, 8),
    )


STANDARD = _method("standard", 8)
HIGH = _method("high", 16)
