"""Recorded times of integer and float attention, which `QuantConfig.skip_slower` goes by. Nothing is timed here.

``scripts/bench_attention.py --speed-table`` writes the table, ``speed.json``, from a CSV file of the benchmark.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import NamedTuple

import torch

PATH = Path(__file__).with_name("speed.json")
DTYPE = torch.float16  # of the operands that the benchmark times; other types have no recorded times
TOKENS_SHARE = 10  # recorded tokens may be off by one part in so many
REACH = 2  # batch * heads may be off by this factor from one of its recorded neighbours


class TimedShape(NamedTuple):
    """A row of the table: one shape, with the microseconds of the integer kernel and of the best float kernel.

    `batch` counts windows too: it is the first dimension of the operands.
    """

    tokens: int
    head_dim: int
    heads: int
    batch: int
    bias: bool
    precision: str
    integer_us: float
    float_us: float

    @property
    def size(self) -> int:
        """How many attentions are computed: batch * heads."""
        return self.batch * self.heads

    @property
    def times(self) -> tuple[float, float]:
        """Microseconds: integer, float."""
        return self.integer_us, self.float_us


@dataclass(frozen=True, eq=False)  # compared by identity, so that the look-up can be cached
class SpeedTable:
    """The recorded times of GPUs of one compute capability."""

    capability: tuple[int, int]
    rows: tuple[TimedShape, ...]


@functools.cache
def load_table() -> SpeedTable:
    """The table that comes with the package; read once."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    major, minor = document["capability"]
    return SpeedTable((major, minor), tuple(TimedShape(**row) for row in document["rows"]))


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for every other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def is_recorded(device: torch.device) -> bool:
    """True where the table has times of such a device at all."""
    table = load_table()
    return bool(table.rows) and capability_of(device) == table.capability


def recorded_times(
    capability: tuple[int, int] | None,
    precision: str,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    bias: bool,
) -> tuple[float, float] | None:
    """Microseconds of an attention by the table: integer, float. None where nothing near enough is recorded.

    Capability, precision, head_dim and bias have to match. Of the recorded tokens within 10 % of the asked ones the
    nearest count, of two the smaller. There, batch * heads has to be within a factor 2 of a recorded one; between two
    recorded ones the times are interpolated, above the largest they grow in proportion, below the smallest they stay.
    """
    table = load_table()
    if capability != table.capability:
        return None
    return _look_up(table, precision, batch, heads, tokens, head_dim, bias)


@torch.compiler.assume_constant_result
def times_on(
    device: torch.device,
    dtype: torch.dtype,
    precision: str,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    bias: bool,
) -> tuple[float, float] | None:
    """:func:`recorded_times` on a device. A constant for torch.compile, which takes integers and no symbols."""
    if dtype != DTYPE:
        return None
    return recorded_times(capability_of(device), precision, batch, heads, tokens, head_dim, bias)


@functools.lru_cache(maxsize=1024)
def _look_up(
    table: SpeedTable, precision: str, batch: int, heads: int, tokens: int, head_dim: int, bias: bool
) -> tuple[float, float] | None:
    wanted = (precision, head_dim, bias)
    rows = [row for row in table.rows if (row.precision, row.head_dim, row.bias) == wanted]
    rows = [row for row in rows if TOKENS_SHARE * abs(row.tokens - tokens) <= tokens]
    nearest = min((row.tokens for row in rows), key=lambda recorded: (abs(recorded - tokens), recorded), default=None)
    rows = [row for row in rows if row.tokens == nearest]
    # Several shapes may have one size: the one with as many heads comes last, and stays.
    by_size = {row.size: row for row in sorted(rows, key=lambda row: (row.heads == heads, -row.batch))}
    return _times_at(batch * heads, by_size)


def _times_at(size: int, rows: dict[int, TimedShape]) -> tuple[float, float] | None:
    below = max((recorded for recorded in rows if recorded <= size), default=None)
    above = min((recorded for recorded in rows if recorded >= size), default=None)
    near_below = below is not None and size <= REACH * below
    near_above = above is not None and above <= REACH * size
    if not near_below and not near_above:
        return None
    if below is None:
        return rows[above].times
    if above is None:
        integer_us, float_us = rows[below].times
        return integer_us * size / below, float_us * size / below
    if below == above:
        return rows[below].times
    share = log(size / below) / log(above / below)
    integer_us, float_us = (low + share * (high - low) for low, high in zip(rows[below].times, rows[above].times))
    return integer_us, float_us
