"""What was swapped, with what; what was left, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from qvit import ops, speed
from qvit.config import QuantConfig
from qvit.discovery import Site, find_attention
from qvit.errors import BackendError
from qvit.patches.windows import FoldedBlock

_COLUMNS = (
    *("name", "type", "status", "heads", "head_dim", "layout", "backend", "precision", "sqnr_db"),
    *("integer_us", "float_us", "attention", "reason"),
)
_FLOAT = "float"


@dataclass(frozen=True)
class Row:
    """One attention module.

    Attributes:
        name: Module path; empty for the model itself.
        type: Name of the host's class.
        status: "swapped" or "left".
        reason: Why it was left; empty when swapped.
        heads, head_dim: None where a left module does not tell.
        layout: "image" where Swin's shift and windows are addresses of the operator, "windows" where they are moved.
        backend: What runs it on its present device: "triton" or "reference"; empty when left.
        precision: "standard" or "high", or the arithmetic's name for "paper" and "paper_text"; empty when left.
        sqnr_db: Signal to quantization noise of the integer core on a calibration batch; None when left, or where
            the `Calibration` was of another arithmetic or precision.
        integer_us, float_us: With `skip_slower`, the recorded microseconds for the last forward's batch; None without.
        attention: With `skip_slower`, what computed the last forward: "float" or "integers", with a reason where no
            times are recorded; or that each call decides. As Python last ran it: replays of CUDA graphs do not count.
    """

    name: str
    type: str
    status: str
    reason: str = ""
    heads: int | None = None
    head_dim: int | None = None
    layout: str = ""
    backend: str = ""
    precision: str = ""
    sqnr_db: float | None = None
    integer_us: float | None = None
    float_us: float | None = None
    attention: str = ""


@dataclass(frozen=True)
class Report:
    """The attention modules of a model, in module order; `str()` is a table.

    Attributes:
        rows: One a module.
        agreement: Percent of the calibration pictures that got the float model's answer when the model was quantized;
            None where it does not classify, or calibration saw fewer than 64 pictures.
    """

    rows: tuple[Row, ...]
    agreement: float | None = None

    @property
    def swapped(self) -> int:
        """Number of swapped modules: they run in integers, but for the calls that `skip_slower` gives to float."""
        return sum(row.status == "swapped" for row in self.rows)

    @property
    def left(self) -> int:
        """Number of attention modules that stay float."""
        return self.total - self.swapped

    @property
    def total(self) -> int:
        """Number of all attention modules."""
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe values."""
        counts = {"swapped": self.swapped, "left": self.left, "total": self.total, "agreement": self.agreement}
        return {**counts, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = f"{self.swapped} of {self.total} attention modules run in integers"
        in_float = sum(row.attention == _FLOAT for row in self.rows)
        if in_float:
            head += f"; by skip_slower, {in_float} of these ran in float at the last forward"
        if self.agreement is not None:
            head += f"; {self.agreement:.1f} % of the calibration pictures got the float model's answer"
        if not self.rows:
            return head
        cells = [[_cell(getattr(row, column)) for column in _COLUMNS] for row in self.rows]
        used = [i for i in range(len(_COLUMNS)) if any(line[i] for line in cells)]
        table = [[line[i] for i in used] for line in [list(_COLUMNS), *cells]]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        return "\n".join([head, lines[0], "-" * max(map(len, lines)), *lines[1:]])


def report(model: nn.Module) -> Report:
    """Lists everything in the model that computes attention; the model may be quantized or not."""
    records = [site.module.qvit_record for site in find_attention(model) if site.is_swapped]
    exclude = tuple(dict.fromkeys(pattern for record in records for pattern in record.config.exclude))
    agreements = {record.agreement for record in records}  # several, where parts were quantized one by one
    rows = tuple(_row(site, _parent(model, site)) for site in find_attention(model, exclude))
    return Report(rows, agreements.pop() if len(agreements) == 1 else None)


def _parent(model: nn.Module, site: Site) -> nn.Module:
    return model.get_submodule(site.name.rpartition(".")[0])


def _row(site: Site, parent: nn.Module) -> Row:
    module = site.module
    if not site.is_swapped:
        heads, head_dim = getattr(module, "num_heads", None), getattr(module, "head_dim", None)
        if site.adapter is not None:
            heads, head_dim = site.adapter.heads_of(module), site.adapter.head_dim_of(module)
        return Row(site.name, site.type_name, "left", site.reason or "not_quantized", _int(heads), _int(head_dim))
    config: QuantConfig = module.qvit_record.config
    integer_us, float_us, attention = _choice(module, config)
    moved = isinstance(parent, FoldedBlock) and not parent.is_untouched()  # by a hook on the attention, say
    return Row(
        name=site.name,
        type=site.type_name,
        status="swapped",
        heads=site.adapter.heads_of(module),
        head_dim=site.adapter.head_dim_of(module),
        layout="windows" if moved else module.layout,
        backend=_backend(module.qvit_constants.device, config),
        precision=config.precision if config.arithmetic == "qvit" else config.arithmetic,
        sqnr_db=module.qvit_record.sqnr_db,
        integer_us=integer_us,
        float_us=float_us,
        attention=attention,
    )


def _choice(module: nn.Module, config: QuantConfig) -> tuple[float | None, float | None, str]:
    """Both recorded times, and what `skip_slower` made of them."""
    device = module.qvit_constants.device
    if not config.skip_slower:
        return None, None, ""
    if not speed.is_recorded(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return None, None, f"integers: no times recorded for {name}"
    if module.qvit_choice is None:
        return None, None, "decided at each call"
    times, in_float = module.qvit_choice
    if times is None:
        return None, None, "integers: no times recorded for this shape or type"
    return *times, _FLOAT if in_float else "integers"


def _backend(device: torch.device, config: QuantConfig) -> str:
    if config.arithmetic == "paper_text":
        return "reference"
    try:
        return ops.select_backend(device, config.backend)
    except BackendError:
        return f"none on {device.type}"


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "" if value is None else str(value)
