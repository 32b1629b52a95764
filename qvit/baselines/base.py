"""What the methods share: their description, and the quantizers that more than one of them uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from qvit.errors import BackendError

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
        attention: (q, k, v, softmax_scale) -> result. The definition: float q, k, v (B, H, N, D) of one device, float
            result (B, H, N, D) of q's type; quantizes inside as the method does.
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
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
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
