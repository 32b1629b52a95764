"""Find the launch configurations of the attention kernels on one NVIDIA GPU, and write the table they are taken from.

python scripts/tune_attention.py --jobs 16

A configuration never changes a result; each is checked against the first before it is timed. At run time the table is
only looked up: nothing is tuned on a user's first call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
import triton
from tqdm import tqdm

import qvit
from qvit import reference
from qvit.errors import BackendError
from qvit.evaluation.timing import TurnTimer
from qvit.kernels import launch

HEADS = (3, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072)  # of all images of a call together
SETS = 3  # input sets that a timing rotates among


@dataclass(frozen=True)
class Shape:
    """What a range of sequence lengths is tuned by: ``tokens`` stands for all of ``span``."""

    kind: str
    tokens: int
    span: tuple[int, int]
    head_dim: int


SHAPES = (
    Shape("hopper", 197, (65, 224), 64),
    Shape("hopper", 257, (225, 320), 64),
    Shape("packed", 577, (321, 800), 64),
    Shape("packed", 1370, (801, 65536), 64),
)


def candidates(shape: Shape, heads: int, processors: int) -> Iterator[dict]:
    """Complete configurations worth a try, so that no table fills them up; the first is what runs without one."""
    if shape.kind == "packed":
        for block_m, num_warps, num_stages in ((64, 4, 3), (128, 8, 3), (64, 4, 2)):
            yield {"block_m": block_m, "num_warps": num_warps, "num_stages": num_stages}
        return
    blocks = launch.cdiv(shape.tokens, 64)
    places = launch.HOPPER_PROGRAMS * processors
    rule = launch.programs_per_head(heads, blocks, places)
    steps = [rule] + [step for step in (1, 2, blocks) if step != rule and heads * step <= 4 * places]
    for step in steps:
        yield {"step": step}


def operands(shape: Shape, heads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (B, H, N, D) float16, views of one packed qkv; three heads an image."""
    generator = torch.Generator("cuda").manual_seed(seed)
    size = (heads // 3, shape.tokens, 3, 3, shape.head_dim)
    return torch.randn(size, device="cuda", dtype=torch.float16, generator=generator).permute(2, 0, 3, 1, 4).unbind()


def caller(shape: Shape, data: tuple, scales: qvit.Scales, config: dict) -> Callable[[], torch.Tensor]:
    """A call of the shape's kernel with a configuration."""
    run = launch.KERNELS[shape.kind]
    constants = scales.constants("cuda")
    batch, heads, tokens, head_dim = data[0].shape
    up = reference.out_shift(tokens, "standard")

    def call() -> torch.Tensor:
        out = torch.empty(batch, tokens, heads, head_dim, dtype=torch.float16, device="cuda")
        run(*data, constants, None, out, high=False, out_up=up, half=scales.half_exact, **config)
        return out

    return call


def scales_of(data: tuple) -> qvit.Scales:
    """Scales of the first image."""
    return qvit.Scales.from_tensors(*(x[:1].float().cpu() for x in data))


def compile_one(work: tuple[Shape, str]) -> None:
    """Fill the compiler's cache with one configuration."""
    shape, config = work
    data = operands(shape, 3)
    caller(shape, data, scales_of(data), json.loads(config))()
    torch.cuda.synchronize()


def measure(shape: Shape, heads: int, processors: int, seconds: float) -> list[tuple[dict, float]]:
    """Configurations and microseconds of a call, the fastest first.

    Raises:
        BackendError: A configuration gave another result than the first.
    """
    data = [operands(shape, heads, seed) for seed in range(SETS)]
    scales = scales_of(data[0])
    timer = TurnTimer(rounds=2, seconds=seconds)
    configs = list(candidates(shape, heads, processors))
    expected = caller(shape, data[0], scales, configs[0])()
    for index, config in enumerate(configs):
        calls = [caller(shape, x, scales, config) for x in data]
        if not torch.equal(calls[0](), expected):
            raise BackendError(f"{config} changes the result of {shape}; it must not")
        timer.add(str(index), calls)
    times = timer.run()
    return sorted(((c, times[str(i)].graph.median) for i, c in enumerate(configs)), key=lambda x: x[1])


def make_rows(shape: Shape, capability: tuple[int, int], found: dict[int, list[tuple[dict, float]]]) -> list[dict]:
    """Rows of the table for one shape; each holds for as many heads as lie halfway (in ratio) to the next."""
    heads = sorted(found)
    limits = [int(sqrt(a * b)) for a, b in itertools.pairwise(heads)] + [2**31]
    rows: list[dict] = []
    for limit, count in zip(limits, heads, strict=True):
        config = found[count][0][0]
        if rows and rows[-1]["config"] == config:
            rows[-1]["heads"] = limit
            continue
        rows.append(
            {"kind": shape.kind, "capability": list(capability), "head_dim": shape.head_dim}
            | {"tokens": list(shape.span), "heads": limit, "config": config}
        )
    return rows


def merge_rows(old: list[dict], new: list[dict]) -> list[dict]:
    """The new rows, and the old ones of kernels and GPUs that were not tuned now."""
    about = lambda row: (row["kind"], tuple(row["capability"]), row["head_dim"])  # noqa: E731
    tuned = {about(row) for row in new}
    return [row for row in old if about(row) not in tuned] + new


def write_rows(path: Path, machine: dict, name: str, rows: list[dict]) -> None:
    """Write the machine and rows as JSON, a row on a line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{json.dumps(machine)[:-1]}, "{name}": [\n{lines}\n]}}\n')


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=launch.TABLE, help="the table to write")
    parser.add_argument("--log", type=Path, help="write all timings as JSON")
    parser.add_argument("--kinds", nargs="+", default=["hopper", "packed"], choices=("hopper", "packed"))
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS), help="multiples of 3")
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=0.1, help="GPU time for each timing")
    args = parser.parse_args(arguments)
    if any(heads < 3 or heads % 3 for heads in args.heads):
        parser.error("--heads takes multiples of 3: images have three heads here")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("tuning needs an NVIDIA GPU", file=sys.stderr)
        return 2
    capability = torch.cuda.get_device_capability()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = [s for s in SHAPES if s.kind in args.kinds and (s.kind != "hopper" or capability == launch.HOPPER)]
    cases = [(shape, heads) for shape in shapes for heads in args.heads if heads * shape.tokens <= 3072 * 600]
    configs = {(s, json.dumps(c)) for s, heads in cases for c in candidates(s, heads, processors)}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        list(tqdm(pool.imap_unordered(compile_one, configs), total=len(configs), desc="compile"))
    found: dict[Shape, dict[int, list]] = {shape: {} for shape in shapes}
    for shape, heads in tqdm(cases, desc="measure"):
        found[shape][heads] = measure(shape, heads, processors, args.seconds)
    rows = [row for shape in shapes if found[shape] for row in make_rows(shape, capability, found[shape])]
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    old = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    write_rows(args.output, machine, "rows", merge_rows(old, rows))
    if args.log:
        log = [
            {"kind": s.kind, "tokens": s.tokens, "heads": h, "times": t} for s in shapes for h, t in found[s].items()
        ]
        write_rows(args.log, machine, "measured", log)
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
