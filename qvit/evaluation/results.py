"""What the benchmarks share beside the clock: rows as CSV files, tables, a plot of ratios, and what the machine was."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib import metadata
from math import nan
from pathlib import Path
from typing import TypeVar

import torch

import qvit
from qvit.errors import ConfigError, QvitError

CPU = "CPU"  # in the column of GPUs
_LEGEND_LETTERS = 120  # that fit beside each other in a plot

RowT = TypeVar("RowT")
Cells = Sequence[Sequence[str]]
Bars = Sequence[tuple[str, Mapping[str, float | None]]]


class MismatchError(QvitError):
    """The product gives something else than it has to, or nothing."""


def describe_machine(seed: int, device: str = "cuda") -> dict:
    """The columns that every row of a run has in common: GPU, or "CPU", versions, seed and date."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else CPU,
        "driver": driver_version() if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton") or "none",
        "qvit": qvit.__version__,
        "seed": seed,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def legend_of_machines(rows: Iterable, also: Sequence[str] = ()) -> str:
    """The GPUs, versions, seeds and dates of rows, each once; ``also`` names more columns of versions."""
    names = ("torch", "triton", *also, "qvit", "seed")
    machines = dict.fromkeys(
        ", ".join(
            [
                row.gpu if row.gpu == CPU else f"{row.gpu}, driver {row.driver or 'unknown'}",
                *(f"{name} {getattr(row, name)}" for name in names),
                row.date,
            ]
        )
        for row in rows
    )
    return "; ".join(machines)


# ---------------------------------------------------------------- CSV files


def write_csv(rows: Iterable[RowT], path: Path, kind: type[RowT]) -> None:
    """Write rows of a dataclass, its fields as columns; the file is the old or the new one, never a part."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    os.replace(part, path)


def read_csv(path: Path, kind: type[RowT]) -> list[RowT]:
    """Read what :func:`write_csv` wrote.

    Raises:
        ConfigError: No such file, or it holds something else, or nothing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            records = list(csv.DictReader(file))
        if not records:
            raise ValueError("no rows")
        return [kind(**{f.name: _parse(record[f.name], f.type) for f in fields(kind)}) for record in records]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no CSV file of this benchmark: {error!r}") from error


def _parse(text: str, kind: str) -> object:
    base, _, optional = kind.partition(" | ")
    if optional and not text:
        return None
    return {"str": str, "int": int, "float": float, "bool": "True".__eq__}[base](text)


# ---------------------------------------------------------------- tables and plots


def format_ratios(text: str, *ratios: float | None) -> str:
    """A cell: a text, and in brackets the ratios that are known."""
    known = [f"{ratio:.2f}x" for ratio in ratios if ratio is not None]
    return f"{text} ({', '.join(known)})" if known else text


def text_table(cells: Cells) -> list[str]:
    """Lines for a terminal."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]


def markdown_table(cells: Cells) -> list[str]:
    """Lines of Markdown; the first row is the header."""
    header, *body = cells
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]


def write_ratio_plot(
    path: Path, panels: Mapping[str, Bars], series: Sequence[str], label: str, *, line: float | None = 1
) -> None:
    """Bars of ratios in panels, one above the other; without matplotlib a line on stderr says that there is no plot.

    Args:
        path: The picture to write.
        panels: By title, groups of bars: a label, and a ratio for each of ``series`` or none.
        series: Names of the bars of a group.
        label: What the ratios are.
        line: Where a horizontal line is drawn.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed (pip install 'qvit[bench]')", file=sys.stderr)
        return
    figure = Figure(figsize=(12, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (title, groups) in zip(axes, panels.items()):
        axis.set_prop_cycle(color=colormaps["tab10" if len(series) <= 10 else "tab20"].colors)
        _draw_panel(axis, groups, series)
        if line is not None:
            axis.axhline(line, color="black", linewidth=1)
        axis.set_title(title, fontsize="medium")
        axis.set_ylabel(label)
    columns = min(len(series), _LEGEND_LETTERS // (max(map(len, series)) + 6) + 1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    figure.savefig(path, dpi=120)


def _draw_panel(axis, groups: Bars, series: Sequence[str]) -> None:
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        places = [place + width * (number - (len(series) - 1) / 2) for place in range(len(groups))]
        axis.bar(places, [ratios.get(name) or nan for _, ratios in groups], width, label=name)
    axis.set_xticks(range(len(groups)), [title for title, _ in groups])


# ---------------------------------------------------------------- command lines and arithmetic


def add_measurement_arguments(parser: argparse.ArgumentParser, batches: Sequence[int]) -> None:
    """Add the options of every benchmark: --batches, --rounds, --seconds and --seed."""
    parser.add_argument("--batches", nargs="+", type=positive, default=list(batches), metavar="IMAGES")
    parser.add_argument("--rounds", type=positive, default=3, help="turns that each method gets")
    parser.add_argument("--seconds", type=float, default=0.3, help="GPU time for a method's replays in one case")
    parser.add_argument("--seed", type=int, default=0)


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def require_gpu(parser: argparse.ArgumentParser, others: str) -> None:
    """End with a usage error where there is no GPU; ``others`` are the options that need none."""
    if not torch.cuda.is_available():
        parser.error(f"torch sees no CUDA device here, and speed is measured on nothing else; {others} need none")


def exit_status(action: Callable[[], None]) -> int:
    """Run a benchmark and print an expected error as one line: 0, 1 where the product is wrong, 2 for the others."""
    try:
        action()
    except QvitError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1 if isinstance(error, MismatchError) else 2
    return 0


def sqnr_db(expected: torch.Tensor, result: torch.Tensor) -> float:
    """Signal to noise of a result in dB, computed in float64; inf where it is exact."""
    expected, result = expected.double(), result.double()
    signal, noise = (x.square().sum() for x in (expected, expected - result))
    return 10 * (signal / noise).log10().item()
