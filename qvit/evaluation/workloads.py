"""Shapes of attention that are measured: the seven of the QFlash paper."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a set for each element of q: float16 operands, the product's and the paper's int8 ones, a float16 output.
INT8_BYTES, FLOAT_BYTES = 3, 6
SET_BYTES = FLOAT_BYTES + 2 * INT8_BYTES + 2


@dataclass(frozen=True)
class Workload:
    """The shape of an attention: an image has ``windows`` windows with ``heads`` heads of ``tokens`` x ``head_dim``."""

    name: str
    windows: int
    heads: int
    tokens: int
    head_dim: int

    def elements(self, batch: int) -> int:
        """Elements of q, or of k, v or the output."""
        return batch * self.windows * self.heads * self.tokens * self.head_dim

    def scores(self, batch: int) -> int:
        """Elements of q k^T."""
        return batch * self.windows * self.heads * self.tokens**2

    def set_bytes(self, batch: int) -> int:
        """Memory of an input set, with what the methods make of it."""
        return SET_BYTES * self.elements(batch)


PAPER_WORKLOADS = (
    Workload("A1", 1, 3, 197, 64),
    Workload("A2", 1, 6, 197, 64),
    Workload("A3", 1, 12, 197, 64),
    Workload("A4", 64, 3, 49, 32),
    Workload("A5", 16, 6, 49, 32),
    Workload("A6", 4, 12, 49, 32),
    Workload("A7", 1, 24, 49, 32),
)
