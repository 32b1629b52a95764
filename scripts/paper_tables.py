"""The tables of the QFlash paper (arXiv 2604.25306), measured here, with the paper's figures beside where known.

python scripts/paper_tables.py --device cpu                    # whatever needs no GPU, in a few minutes
python scripts/paper_tables.py --tables fig3 2 3 --device cuda
python scripts/paper_tables.py --tables 4 --capture-from deit_small_patch16_224.fb_in1k
python scripts/paper_tables.py --tables 5 --models deit_small --data /data/imagenet --device cuda
python scripts/paper_tables.py --page                          # docs/paper_tables.md from the recorded files

A cell that could not be measured says why, and does not replace one that was. Every table is a CSV file, with a plot
where there is something to draw.

Exit status: 0, 1 when this library is less accurate than it has to be (the files are written), 2 when it could not run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from qvit import reference
from qvit.baselines import METHODS, Method
from qvit.errors import BackendError, ConfigError, QvitError
from qvit.evaluation import counters, results, studies
from qvit.evaluation.cores import capture_cores
from qvit.evaluation.published import FIGURES
from qvit.evaluation.results import MismatchError, sqnr_db
from qvit.evaluation.runner import SETTINGS, EvaluationOptions, load_sample, run_evaluation
from qvit.evaluation.timing import Call, TurnTimer, capture, count_sets
from qvit.evaluation.workloads import INT8_BYTES, PAPER_WORKLOADS, Workload
from qvit.scales import Scales

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, RESULTS, PAGE = ROOT / "configs", ROOT / "docs" / "results", ROOT / "docs" / "paper_tables.md"
NEEDS_GPU, NO_KERNEL = "needs a GPU", "no kernel"
SPEED_UP = "speed-up over I-ViT"
MEDIAN = "median dB"
RIVAL, FLOAT = "i_vit", "flash_attention_2"  # of the speed-ups, and of the energy's ratio
WORKLOADS = {workload.name: workload for workload in PAPER_WORKLOADS}
VIT, SWIN = ("A1", "A2", "A3"), ("A4", "A5", "A6", "A7")
ACCURACY_WORKLOADS = ("A2", "A7")  # of Tables 2 and 4
COUNTED_BATCH, ABLATION_BATCH = 8, 1024
CAPTURED_IMAGES = 4
MAX_SET_BYTES = 8 << 30

# Least SQNR of this library's rows in dB, on A2 and A7, the median of the draws.
FLOORS = {"uniform": {"qvit_standard": (34.0, 34.0), "qvit_high": (36.5, 37.5)},
          "Gaussian": {"qvit_standard": (30.0, 30.0), "qvit_high": (34.5, 34.5)}}  # fmt: skip


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """A cell of a table.

    Attributes:
        case: What was measured: a workload, an input, a model.
        method: How, by its name in :data:`qvit.baselines.METHODS` or a name of the table's own.
        quantity: What, with its unit.
        value: The number, or None.
        text: What the cell says without a number.
        paper: The paper's number, or None where it is not known.
        source: Where that is from.
        setting: More about the case: the input, the pictures.
    """

    case: str
    method: str
    quantity: str
    value: float | None
    text: str
    paper: float | None
    source: str
    setting: str
    gpu: str
    driver: str | None
    torch: str
    triton: str
    qvit: str
    seed: int
    date: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later run replaces."""
        return self.case, self.method, self.quantity

    @property
    def cell(self) -> str:
        """The number or the text."""
        return self.text if self.value is None else format_number(self.value)


def format_number(value: float) -> str:
    """Two decimals, fewer where there are none, more where they are all."""
    if value.is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.2f}" if 0.1 <= abs(value) < 1e7 else f"{value:.3g}"


@dataclass(eq=False)
class Session:
    """A run: its arguments, and what makes rows of its results."""

    args: argparse.Namespace
    table: str = ""

    @cached_property
    def machine(self) -> dict:
        """The columns that all rows have in common."""
        return results.describe_machine(self.args.seed, self.args.device)

    @property
    def on_gpu(self) -> bool:
        """True where speed can be measured."""
        return torch.device(self.args.device).type == "cuda"

    @property
    def methods(self) -> dict[str, Method]:
        """Those that were asked for."""
        return {name: METHODS[name] for name in self.args.methods}

    @property
    def kernels(self) -> dict[str, Method]:
        """Those that have a kernel."""
        return {name: method for name, method in self.methods.items() if method.prepare is not None}

    def row(self, case: str, method: str, quantity: str, cell: float | str | None, setting: str = "") -> Row:
        """A row with the paper's figure beside."""
        value = None if isinstance(cell, str) or cell is None else float(f"{cell:.6g}")
        paper, source = FIGURES.get((self.table, case, method, quantity), (None, ""))
        text = cell if isinstance(cell, str) else ""
        return Row(case, method, quantity, value, text, paper, source, setting, **self.machine)


# ---------------------------------------------------------------- operands


@dataclass(frozen=True, eq=False)
class Operands:
    """q, k and v (B, H, N, D) of an attention."""

    case: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    setting: str

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """What a method takes."""
        return self.q, self.k, self.v, self.softmax_scale


INPUTS: dict[str, Callable[..., torch.Tensor]] = {
    "uniform": lambda *shape, **options: torch.rand(*shape, **options) * 8 - 4,  # the paper's benchmark
    "Gaussian": torch.randn,
}


def draw(workload: Workload, batch: int, kind: str, session: Session, seed: int | None = None) -> Operands:
    """float16 operands of a workload."""
    seed = session.args.seed if seed is None else seed
    generator = torch.Generator(session.args.device).manual_seed(seed)
    shape = (3, batch * workload.windows, workload.heads, workload.tokens, workload.head_dim)
    packed = INPUTS[kind](*shape, generator=generator, device=session.args.device).half()
    setting = {"uniform": "uniform in +-4, float16", "Gaussian": "unit Gaussian, float16"}[kind]
    return Operands(f"{workload.name} {kind}", *packed.unbind(), workload.head_dim**-0.5, setting)


def capture_operands(session: Session, name: str) -> Operands:
    """Operands of the middle attention layer of a model, on a few pictures."""
    model, images, source = load_sample(name, CONFIGS, session.args.data, CAPTURED_IMAGES)
    model = model.to(session.args.device)
    captures = capture_cores(model, images)
    found = captures[len(captures) // 2]
    setting = f"{found.layer}, {len(images)} pictures of {source}" + ", its bias left out" * (
        found.core.bias is not None
    )
    q, k, v = (x.contiguous() for x in found.core[:3])
    case = f"{Path(name).stem} {'x'.join(map(str, q.shape[1:]))}"
    return Operands(case, q, k, v, found.softmax_scale, setting)


def all_operands(session: Session) -> Iterator[Operands]:
    """The inputs of Table 4: both random ones, and those of models."""
    for kind in INPUTS:
        for name in ACCURACY_WORKLOADS:
            yield draw(WORKLOADS[name], 1, kind, session)
    for model in session.args.capture_from:
        yield capture_operands(session, model)


# ---------------------------------------------------------------- Table 1, Figure 3


ORIGINS = {
    "A1": "ViT-T, DeiT-T",
    "A2": "ViT-S, DeiT-S",
    "A3": "ViT-B, DeiT-B",
    **{name: f"Swin-T and Swin-S, stage {stage}" for stage, name in enumerate(SWIN, 1)},
}


def table1(session: Session) -> Iterator[Row]:
    """The workloads."""
    for w in PAPER_WORKLOADS:
        shape = {"windows": w.windows, "heads": w.heads, "tokens": w.tokens, "head dim": w.head_dim}
        for quantity, value in {**shape, "scores": w.scores(1)}.items():
            yield session.row(w.name, ORIGINS[w.name], quantity, value)


def timed_calls(session: Session, workload: Workload, batch: int, methods: dict[str, Method]) -> dict[str, list[Call]]:
    """Calls of each method on its own copies of the same input sets, so many that the cache does not hold them."""
    cache = torch.cuda.get_device_properties(session.args.device).L2_cache_size
    smallest = INT8_BYTES * workload.elements(batch)
    sets = count_sets(smallest, len(methods) * workload.set_bytes(batch), cache, MAX_SET_BYTES)
    drawn = [draw(workload, batch, "uniform", session, session.args.seed + i) for i in range(sets)]
    return {name: [method.prepare(*x.arguments) for x in drawn] for name, method in methods.items()}


def time_methods(
    session: Session, workload: Workload, batch: int, methods: dict[str, Method]
) -> dict[str, float | str]:
    """Microseconds a call in a CUDA graph, of methods that take turns; or why there are none."""
    cells: dict[str, float | str] = {name: NO_KERNEL for name, method in methods.items() if method.prepare is None}
    kernels = {name: method for name, method in methods.items() if method.prepare is not None}
    if not session.on_gpu:
        return cells | dict.fromkeys(kernels, NEEDS_GPU)
    timer = TurnTimer(session.args.rounds, session.args.seconds)
    for name, calls in timed_calls(session, workload, batch, kernels).items():
        try:
            timer.add(name, calls)
        except (RuntimeError, QvitError) as error:
            torch.cuda.synchronize()  # raises when the error has cost the device: then nothing else can be measured
            cells[name] = f"failed: {str(error).splitlines()[0]}"
    return cells | {name: measured.graph.median for name, measured in timer.run().items()}


def ratio(cell: float | str, of: float | str) -> float | str:
    """One number as a part of another, or the text that one of them is: that the second is not there comes first."""
    texts = [x for x in (of, cell) if isinstance(x, str)]
    return texts[0] if texts else cell / of


def figure3(session: Session) -> Iterator[Row]:
    """Latency at every batch, and the speed-up over I-ViT; at the end the best of each family."""
    for batch in session.args.batches:
        speed_ups: dict[str, dict[str, float | str]] = {}
        for workload in PAPER_WORKLOADS:
            times = time_methods(session, workload, batch, session.methods)
            speed_ups[workload.name] = {m: ratio(times[RIVAL], x) for m, x in times.items()}
            for quantity, cells in (("us", times), (SPEED_UP, speed_ups[workload.name])):
                for method, cell in cells.items():
                    yield session.row(f"{workload.name}, batch {batch}", method, quantity, cell)
        for family in (VIT, SWIN):
            case = f"best of {family[0]}-{family[-1]}, batch {batch}"
            for method in session.methods:
                cells = [speed_ups[name][method] for name in family]
                best = max((x for x in cells if isinstance(x, float)), default=cells[0])
                yield session.row(case, method, SPEED_UP, best)


# ---------------------------------------------------------------- Tables 2 and 3: counters


def table2(session: Session) -> Iterator[Row]:
    """Use of the tensor cores, read by Nsight Compute in a process of its own."""
    found = count_operations(session)
    for name in ACCURACY_WORKLOADS:
        for method in session.kernels:
            for quantity in counters.TENSOR_METRICS:
                cell = found if isinstance(found, str) else found[name, method].get(quantity, "failed")
                yield session.row(f"{name}, batch {COUNTED_BATCH}", method, quantity, cell)


def count_operations(session: Session) -> dict[tuple[str, str], dict[str, float]] | str:
    """`counters.TENSOR_METRICS` of each workload and method, or why there are none."""
    if not session.on_gpu:
        return NEEDS_GPU
    cases = [(name, method) for name in ACCURACY_WORKLOADS for method in session.kernels]
    options = ["--methods", *session.kernels, "--seed", str(session.args.seed), "--device", session.args.device]
    try:
        counted = counters.profile([sys.executable, __file__, "--tables", "2", "--profiled", *options], len(cases))
    except BackendError as error:
        return str(error)
    return dict(zip(cases, counted, strict=True))


def run_profiled(session: Session) -> None:
    """What `counters.profile` starts: a call of each workload and method, warmed up."""
    calls: list[Call | None] = []
    for name in ACCURACY_WORKLOADS:
        operands = draw(WORKLOADS[name], COUNTED_BATCH, "uniform", session)
        for method in session.kernels.values():
            try:
                call = method.prepare(*operands.arguments)
                for _ in range(3):
                    call()
                calls.append(call)
            except (RuntimeError, QvitError) as error:
                print(f"{method.title} on {name}: {error}", file=sys.stderr)
                calls.append(None)
    counters.run_profiled(calls)


def table3(session: Session) -> Iterator[Row]:
    """Energy a call on A2, as counted and above idle, and how much of FlashAttention-2's that is."""
    energies = measure_energies(session)
    case = f"A2, batch {COUNTED_BATCH}"
    rival = energies[FLOAT]
    of = rival.total if isinstance(rival, counters.Energy) else rival
    for method, cell in energies.items():
        known = isinstance(cell, counters.Energy)
        total, above = (cell.total, cell.above_idle) if known else (cell, cell)
        yield session.row(case, method, "uJ a call", total)
        yield session.row(case, method, "uJ above idle", above)
        yield session.row(case, method, "of FlashAttention-2", ratio(total, of))


def measure_energies(session: Session) -> dict[str, counters.Energy | str]:
    """Of each method with a kernel: its energy, or why there is none."""
    if not session.on_gpu:
        return dict.fromkeys(session.kernels, NEEDS_GPU)
    try:
        counter = counters.EnergyCounter(session.args.device)
    except BackendError as error:
        return dict.fromkeys(session.kernels, str(error))
    prepared = timed_calls(session, WORKLOADS["A2"], COUNTED_BATCH, session.kernels)
    idle = counters.idle_watts(counter, session.args.energy_seconds)
    energies = {}
    for method, calls in tqdm(prepared.items(), desc="energy", unit=" methods", leave=False):
        for call in calls:
            call()
        graph = capture(calls)
        energies[method] = counters.measure_energy(counter, graph.replay, len(calls), session.args.energy_seconds, idle)
    return energies


# ---------------------------------------------------------------- Table 4: accuracy of the operators


def table4(session: Session) -> Iterator[Row]:
    """SQNR and MSE against float64 attention."""
    for operands in all_operands(session):
        exact = studies.exact_attention(*operands.arguments)
        for name, method in session.methods.items():
            yield from judge(session, operands, name, partial(method.attention, *operands.arguments), exact)
    for kind in INPUTS:
        for name in ACCURACY_WORKLOADS:
            yield from spread_over_draws(session, WORKLOADS[name], kind)


def spread_over_draws(session: Session, workload: Workload, kind: str) -> Iterator[Row]:
    """How far a random input's SQNR hangs on the draw, the one of `seed` and those after it."""
    found: dict[str, list[float]] = {name: [] for name in session.methods}
    for i in range(session.args.draws):
        operands = draw(workload, 1, kind, session, session.args.seed + i)
        exact = studies.exact_attention(*operands.arguments)
        for name, method in session.methods.items():
            found[name].append(sqnr_db(exact, method.attention(*operands.arguments)))
    for name, values in found.items():
        for quantity, value in zip(("lowest dB", MEDIAN, "highest dB"), (min(values), median(values), max(values))):
            yield session.row(operands.case, name, quantity, value, f"{operands.setting}, {len(values)} draws")


def judge(session: Session, operands: Operands, name: str, action: Call, exact: torch.Tensor) -> Iterator[Row]:
    """The rows of one result; a method that refuses the operands says so."""
    try:
        result = action().double()
        cells = {"SQNR dB": sqnr_db(exact, result), "MSE": (exact - result).square().mean().item()}
    except BackendError as error:
        cells = dict.fromkeys(("SQNR dB", "MSE"), str(error))
    for quantity, cell in cells.items():
        yield session.row(operands.case, name, quantity, cell, operands.setting)


def check_floors(rows: Iterable[Row]) -> None:
    """Refuse rows of this library that are less accurate than they have to be.

    Raises:
        MismatchError: One is.
    """
    least = {
        (f"{workload} {kind}", method, MEDIAN): floor
        for kind, floors in FLOORS.items()
        for method, pair in floors.items()
        for workload, floor in zip(ACCURACY_WORKLOADS, pair)
    }
    low = [row for row in rows if row.key in least and (row.value is None or not row.value >= least[row.key])]
    if low:
        found = "; ".join(f"{row.method} on {row.case}: {row.cell} dB, at least {least[row.key]:g}" for row in low)
        raise MismatchError(f"not as accurate as it has to be: {found}")


# ---------------------------------------------------------------- Table 5: accuracy of models

# These run as in a quantized model, with static scales or the paper's dynamic ones; the others replace the core.
AS_MODULES = {
    "qvit_standard": SETTINGS["standard"],
    "qvit_high": SETTINGS["high"],
    "qflash": SETTINGS["paper"],
    "qflash_text": SETTINGS["paper_text"],
}
FLOAT_BITS = {"fp32": (32, 32), "fp16": (16, 16)}


def table5(session: Session) -> Iterator[Row]:
    """Top-1 with the attention alone quantized."""
    for model in session.args.models:
        report = evaluate_model(session, model)
        data = report["data"]
        setting = ", ".join(
            filter(None, [f"{data['pictures']} pictures of {Path(data['source']).name}", report["checkpoint"]])
        )
        floats = [name for name in FLOAT_BITS if name in report["results"]]
        for name in [*floats, *session.methods]:
            for quantity, cell in model_cells(report, name).items():
                yield session.row(model, name, quantity, cell, setting)


def evaluate_model(session: Session, model: str) -> dict:
    """The report of eval_imagenet's own evaluation, with the other methods in it."""
    args = session.args
    options = EvaluationOptions(
        model=model,
        settings={n: AS_MODULES[n] for n in session.methods if n in AS_MODULES} or {"standard": SETTINGS["standard"]},
        cores={name: method.attention for name, method in session.methods.items() if name not in AS_MODULES},
        data=args.data,
        checkpoint=args.checkpoint,
        device=args.device,
        batch_size=args.batch_size,
        limit=args.max_samples,
        calib=args.calib,
    )
    return run_evaluation(options, CONFIGS)


def model_cells(report: dict, name: str) -> dict[str, float | str | None]:
    """The cells of a method's line, or of a float model's."""
    found = report["results"][name]
    accuracy = {"Top-1 %": "top1", "agreement %": "agreement", "logit SQNR dB": "sqnr_db"}
    cells = {quantity: found[key] for quantity, key in accuracy.items()}
    cells["G BOPs"] = sum(x["heads"] * count_bops(name, x["tokens"], x["head_dim"]) for x in report["attention"]) / 1e9
    integer = name in METHODS and METHODS[name].integer_only
    return {**cells, "integer-only": "yes" if integer else "no"}


def count_bops(name: str, tokens: int, head_dim: int) -> int:
    """Bit operations of one head's two products."""
    if name in METHODS:
        return METHODS[name].bops(tokens, head_dim)
    return sum(tokens**2 * head_dim * bits**2 for bits in FLOAT_BITS[name])


# ---------------------------------------------------------------- the challenges


TILES = Workload("C1", 1, 2, 1024, 64)


def challenge1(session: Session) -> Iterator[Row]:
    """The accumulator's scale over tiles, with and without ScaleRelease."""
    operands = draw(TILES, 1, "uniform", session)
    arguments = [x.cpu() if isinstance(x, torch.Tensor) else x for x in operands.arguments]
    for name, release in (("with ScaleRelease", True), ("without", False)):
        for tile, state in enumerate(studies.accumulator_over_tiles(*arguments, release=release), 1):
            cells = {"scale, log2": state.scale_log2, "largest, bits": state.bits, "SQNR dB": state.sqnr_db}
            for quantity, cell in cells.items():
                yield session.row(f"tile {tile}", name, quantity, cell, operands.setting)


CAPABILITIES = (80, 90, 120)


def challenge2(session: Session) -> Iterator[Row]:
    """What a shift, a scale release and a division cost beside a multiply-add: instructions, and time on a GPU."""
    try:
        from qvit.kernels import costs, numerics
    except ImportError:
        yield session.row("all", "all", "instructions", "needs Triton")
        return
    per_thread = costs.LENGTH * costs.BLOCK / (32 * costs.WARPS)
    for capability in CAPABILITIES:
        count = partial(count_chain, costs, capability)
        cells = {
            x: "Triton's interpreter compiles nothing" if numerics.INTERPRETED else count(x) for x in costs.OPERATIONS
        }
        yield from chain_rows(session, f"sm_{capability}", "instructions", cells, per_thread)
    times = time_chains(session, costs) if session.on_gpu else dict.fromkeys(costs.OPERATIONS, NEEDS_GPU)
    yield from chain_rows(session, "time", "ps", times, CHAINS * costs.LENGTH / 1e6)


def chain_rows(session: Session, case: str, quantity: str, cells: dict, links: float) -> Iterator[Row]:
    """The first operation for itself, the others less the first, which is in each of their links."""
    base = next(iter(cells.values()))
    for place, (name, cell) in enumerate(cells.items()):
        own = cell if isinstance(cell, str) else (cell - base * (place > 0)) / links
        yield session.row(case, name, quantity, own)


def count_chain(costs, capability: int, operation: str) -> int:
    """Instructions of the machine code of a chain."""
    from qvit.kernels import inspection

    constexprs = {"OPERATION": operation, "LENGTH": costs.LENGTH, "BLOCK": costs.BLOCK}
    types = {"x_ptr": "*i32", "out_ptr": "*i32"}
    built = inspection.compile_kernel(costs.chain_kernel, capability, constexprs, types, num_warps=costs.WARPS)
    return sum(x.split()[0] != "NOP" for x in built.instructions)


CHAINS = 1 << 24


def time_chains(session: Session, costs) -> dict[str, float]:
    """Microseconds of `CHAINS` chains of each operation."""
    x = torch.randint(1 << 20, (CHAINS,), dtype=torch.int32, device=session.args.device)
    out = torch.empty_like(x)
    timer = TurnTimer(session.args.rounds, session.args.seconds)

    def call(operation: str) -> torch.Tensor:
        grid = (CHAINS // costs.BLOCK,)
        costs.chain_kernel[grid](x, out, 3, OPERATION=operation, LENGTH=costs.LENGTH, BLOCK=costs.BLOCK)
        return out

    for operation in costs.OPERATIONS:
        timer.add(operation, [partial(call, operation)])
    return {operation: measured.graph.median for operation, measured in timer.run().items()}


def challenge3(session: Session) -> Iterator[Row]:
    """Granularity of the scales: accuracy, how many there are, and what finding them costs."""
    for operands in all_operands(session):
        exact = studies.exact_attention(*operands.arguments)
        heads, tokens = operands.q.shape[1:3]
        for name, action in granular_actions(operands).items():
            yield from judge(session, operands, name, action, exact)
        for granularity in studies.GRANULARITIES:
            count = studies.count_scales(heads, tokens, granularity)
            yield session.row(operands.case, f"exact softmax, per {granularity}", "scales", count, operands.setting)
    for granularity, cell in time_quantization(session).items():
        yield session.row(f"A2, batch {COUNTED_BATCH}", f"exact softmax, per {granularity}", "us to quantize", cell)


def granular_actions(operands: Operands) -> dict[str, Call]:
    """int8 operands with exact softmax, then this library's arithmetic, for which scores have to share a scale."""
    exact = {
        f"exact softmax, per {x}": partial(studies.int8_attention, *operands.arguments, x)
        for x in studies.GRANULARITIES
    }
    product = {
        f"qvit {precision}, per {granularity}{', vectors over channels' * channels}": partial(
            product_attention, operands, precision, granularity, channels
        )
        for precision in ("standard", "high")
        for granularity, channels in (("tensor", False), ("head", False), ("tensor", True))
    }
    return exact | product


def product_attention(operands: Operands, precision: str, granularity: str, channels: bool) -> torch.Tensor:
    """This library's arithmetic with scales of the operands themselves."""
    q, k, v, softmax_scale = operands.arguments
    scales = Scales.from_tensors(q, k, v, softmax_scale=softmax_scale, granularity=granularity, channels=channels)
    return reference.attention(q, k, v, scales.constants(q.device), precision=precision).transpose(1, 2)


def time_quantization(session: Session) -> dict[str, float | str]:
    """Microseconds of finding scales and quantizing q, k and v by PyTorch's operators, in a CUDA graph."""
    if not session.on_gpu:
        return dict.fromkeys(studies.GRANULARITIES, NEEDS_GPU)
    operands = draw(WORKLOADS["A2"], COUNTED_BATCH, "uniform", session)
    timer = TurnTimer(session.args.rounds, session.args.seconds)
    for granularity in studies.GRANULARITIES:
        timer.add(
            granularity, [partial(lambda g: [studies.quantize(x, g) for x in operands.arguments[:3]], granularity)]
        )
    return {granularity: measured.graph.median for granularity, measured in timer.run().items()}


# ---------------------------------------------------------------- the ablation


def half_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """PyTorch's attention in float16."""
    return torch.nn.functional.scaled_dot_product_attention(q.half(), k.half(), v.half(), scale=softmax_scale)


PARTLY = studies.partly_integer_attention
# By step: its definition, and the method whose kernel is timed for it.
ABLATION: dict[str, tuple[Callable, str | None]] = {
    "float": (half_attention, FLOAT),
    "int8 QK": (PARTLY, "int_flash_half"),
    "+ int8 PV": (partial(PARTLY, int8_values=True), "int_flash_full"),
    "+ integer exponent": (partial(PARTLY, int8_values=True, integer_exponent=True), None),
    "+ integer accumulation": (METHODS["qflash"].attention, "qflash"),
}


def ablation(session: Session) -> Iterator[Row]:
    """From float to integers, step by step: accuracy by definitions with one scale a tensor, time by kernels."""
    for kind in INPUTS:
        operands = draw(WORKLOADS["A2"], 1, kind, session)
        exact = studies.exact_attention(*operands.arguments)
        for step, (attention, _) in ABLATION.items():
            yield from judge(session, operands, step, partial(attention, *operands.arguments), exact)
    timed = {name: METHODS[name] for _, name in ABLATION.values() if name in METHODS}
    times = time_methods(session, WORKLOADS["A2"], ABLATION_BATCH, timed)
    case = f"A2, batch {ABLATION_BATCH}"
    for step, (_, name) in ABLATION.items():
        cell = times.get(name, NO_KERNEL)
        yield session.row(case, step, "us", cell, f"kernel of {name}" if name in METHODS else "")
        yield session.row(case, step, "speed-up over float", ratio(times.get(FLOAT, NO_KERNEL), cell))


# ---------------------------------------------------------------- all tables


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        title: Heading.
        about: What its cells are, for the page.
        measure: Gives its rows.
        plots: Quantities that are drawn.
        by: What the methods' column is called.
        across: Methods are columns, and quantities lines.
        command: Arguments that measure it on a GPU, where a CPU cannot.
    """

    title: str
    about: str
    measure: Callable[[Session], Iterator[Row]]
    plots: tuple[str, ...] = ()
    by: str = "method"
    across: bool = False
    command: str = ""


TABLES = {
    "1": Table(
        "Table 1: workloads",
        "Attention of one image: windows x heads of tokens x head dimension. `scores` counts the elements of q k^T.",
        table1,
        by="of",
    ),
    "fig3": Table(
        "Figure 3: latency",
        "Median microseconds of a call in a CUDA graph, on operands that are quantized beforehand, methods in turns. "
        "`best of` is the largest speed-up of a family, which is what the paper's abstract states.",
        figure3,
        (SPEED_UP,),
        across=True,
        command="--tables fig3 --device cuda",
    ),
    "2": Table(
        "Table 2: use of the tensor cores",
        "Cycles in which the tensor cores work, for int8 (IMMA) and for float16 (HMMA) operands, in percent of all, "
        "read by Nsight Compute; kernels of one call are weighted by their durations.",
        table2,
        tuple(counters.TENSOR_METRICS),
        command="--tables 2 --device cuda",
    ),
    "3": Table(
        "Table 3: energy",
        "NVML's energy counter over a loop of some seconds, as counted and less what the idle GPU takes. The paper "
        "summed up nvidia-smi's power.",
        table3,
        ("uJ a call", "uJ above idle"),
        command="--tables 3 --device cuda",
    ),
    "4": Table(
        "Table 4: accuracy of the operators",
        "Against float64 attention of the same operands. A2 and A7 are one image; the paper's input is `uniform`; "
        "`SQNR dB` and `MSE` are of the draw of the seed, the rest of several draws. The last cases are q, k and v of "
        "the middle attention layer of a model. This library's rows have float output and one scale a tensor, found "
        "from the operands, as the published methods have.",
        table4,
        ("SQNR dB",),
    ),
    "5": Table(
        "Table 5: accuracy of models",
        "The attention alone is quantized; everything else is float. BOPs are of the attention's two products, for one "
        "picture. `qvit` and `qflash` run as in a model that is quantized by this library, `qvit` with static scales; "
        "the others take the place of the attention core and find scales on every batch. `integer-only` is the core, "
        "from int8 operands to its result.",
        table5,
        ("logit SQNR dB",),
    ),
    "c1": Table(
        "Challenge 1: the accumulator's scale",
        "QFlash's accumulator after each tile of 64 keys. Without ScaleRelease each tile multiplies its scale by the "
        "units of 1.0: `largest, bits` is what the accumulator would need, SQNR what int32 leaves of it (against "
        "exact attention over the keys so far).",
        challenge1,
        ("largest, bits", "SQNR dB"),
    ),
    "c2": Table(
        "Challenge 2: shift and division",
        "Instructions of a thread for one operation, in a chain of which each link is a multiply-add and the "
        "operation; the multiply-add is taken off. `scale release` is a 64-bit product, an addition and a shift. All "
        "divisions are by one divisor, whose reciprocal is found once. Picoseconds are of the whole GPU.",
        challenge2,
        ("instructions",),
        by="operation",
    ),
    "c3": Table(
        "Challenge 3: granularity",
        "int8 q, k and v with exact softmax, which no integer arithmetic surpasses; then this library's, whose scores "
        "have to share a scale in a head: per token there is none. `vectors over channels` is what a quantized model "
        "has: K's middle, q and k balanced, a scale for each channel of V. `scales` are those of an image or window.",
        challenge3,
        ("SQNR dB",),
    ),
    "ablation": Table(
        "Ablation",
        "Accuracy: one scale a tensor, tiles of 64 keys, what is not integer yet in float64. Time: the kernels that "
        "there are for a step; those of INT-FlashAttention have scales for each token.",
        ablation,
        ("SQNR dB",),
        by="step",
        command="--tables ablation --device cuda",
    ),
}  # fmt: skip
CHALLENGES = ("c1", "c2", "c3")
CHOICES = ("1", "2", "3", "4", "5", "fig3", "challenges", "ablation", *CHALLENGES)


def file_of(folder: Path, name: str, suffix: str = ".csv") -> Path:
    """Where a table is recorded."""
    return folder / f"paper_{name if name.startswith(('fig', 'c', 'a')) else f'table{name}'}{suffix}"


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """Rows of two runs. A case of both is the new run's, but where that has no number and the old one has."""
    measured = {row.key: row for row in old if row.value is not None}
    rows = [measured.get(row.key, row) if row.value is None else row for row in new]
    again = {row.case for row in new}
    return [row for row in old if row.case not in again] + rows


# ---------------------------------------------------------------- output


def cells_of(table: Table, rows: list[Row]) -> list[list[str]]:
    """A table as cells, a header first."""
    return (_across if table.across else _down)(table, rows)


def _down(table: Table, rows: list[Row]) -> list[list[str]]:
    """A line for each case and method; a quantity that the paper has somewhere has its column beside."""
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    known = {row.quantity for row in rows if row.paper is not None}
    columns = [(q, paper) for q in quantities for paper in (False, True) if not paper or q in known]
    settings = any(row.setting for row in rows)
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.case, row.method), {})[row.quantity] = row
    header = ["case", table.by, *(f"paper: {q}" if paper else q for q, paper in columns), *["setting"] * settings]
    body = [
        [case, title_of(method), *(_cell(line.get(q), paper) for q, paper in columns),
         *[next(iter(line.values())).setting] * settings]
        for (case, method), line in lines.items()
    ]  # fmt: skip
    return [header, *body]


def _across(table: Table, rows: list[Row]) -> list[list[str]]:
    """A line for each case and quantity, methods beside each other; the paper's in brackets."""
    methods = list(dict.fromkeys(row.method for row in rows))
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.case, row.quantity), {})[row.method] = row
    body = []
    for line, found in lines.items():
        cells = [found.get(method) for method in methods]
        body.append([*line, *(_cell(x) + (f" [{_cell(x, True)}]" if _cell(x, True) else "") for x in cells)])
    return [["case", "quantity", *map(title_of, methods)], *body]


def _cell(row: Row | None, paper: bool = False) -> str:
    if row is None:
        return ""
    if paper:
        return "" if row.paper is None else format_number(row.paper)
    return row.cell


def title_of(method: str) -> str:
    """A method's name for people."""
    return METHODS[method].title if method in METHODS else method


def missing(rows: list[Row]) -> str:
    """What a table without any number lacks; empty for one that has a number."""
    return "" if any(row.value is not None for row in rows) else ", ".join(dict.fromkeys(row.text for row in rows))


def write_plot(table: Table, rows: list[Row], path: Path) -> None:
    """Bars of the table's plotted quantities, a panel each; nothing where none of them has a number."""
    drawn = [row for row in rows if row.quantity in table.plots and row.value is not None and isfinite(row.value)]
    if not drawn:
        return
    methods = list(dict.fromkeys(row.method for row in drawn))
    panels = {}
    for quantity in dict.fromkeys(row.quantity for row in drawn):
        cases: dict[str, dict[str, float]] = {}
        for row in drawn:
            if row.quantity == quantity:
                cases.setdefault(row.case.replace(" ", "\n", 1), {})[title_of(row.method)] = row.value
        panels[quantity] = list(cases.items())
    line = 1 if SPEED_UP in table.plots else 0
    results.write_ratio_plot(path, panels, [title_of(m) for m in methods], table.title, line=line)


def save(name: str, rows: list[Row], folder: Path) -> None:
    """Write a table's CSV file and plot.

    Raises:
        ConfigError: They cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.write_csv(rows, file_of(folder, name), Row)
        write_plot(TABLES[name], rows, file_of(folder, name, ".png"))
    except OSError as error:
        raise ConfigError(f"cannot write the results to {folder}: {error}") from error


read_csv = partial(results.read_csv, kind=Row)


# ---------------------------------------------------------------- the page

HEAD = """# The tables of the QFlash paper

Made by `python scripts/paper_tables.py --page` from the CSV files in [{folder}]({folder}); the script measures them.
Figures of the paper (arXiv 2604.25306) are beside where they are known, with their source in the CSV file; an empty
cell is not known. A cell without a number says what was missing."""


def make_page(folder: Path, page: Path) -> str:
    """The text of the result page.

    Args:
        folder: Where the CSV files are.
        page: Where the page will be, for its links.

    Raises:
        ConfigError: There is no table in the folder.
    """
    tables = {name: read_csv(file_of(folder, name)) for name in TABLES if file_of(folder, name).exists()}
    if not tables:
        raise ConfigError(f"there is no table in {folder}: measure one first")
    link = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = [HEAD.format(folder=link)]
    for name, rows in tables.items():
        parts += section(name, rows, link if file_of(folder, name, ".png").exists() else None)
    return "\n\n".join([*parts, *differences(tables)]) + "\n"


def section(name: str, rows: list[Row], plots: str | None) -> list[str]:
    """The parts of a table on the page."""
    table = TABLES[name]
    parts = [f"## {table.title}", table.about]
    if reasons := missing(rows):
        parts.append(f"Not measured yet: {reasons}. `python scripts/paper_tables.py {table.command}` does.")
        rows = [row for row in rows if row.paper is not None]
    elif plots is not None:
        parts.append(f"![{table.title}]({plots}/{file_of(Path(), name, '.png').name})")
    if not rows:
        return parts
    return [*parts, f"{results.legend_of_machines(rows)}:", "\n".join(results.markdown_table(cells_of(table, rows)))]


def differences(tables: dict[str, list[Row]]) -> list[str]:
    """Where the paper's figures and these differ, and why, as far as something here was measured that says it."""
    both = [(n, r) for n, rows in tables.items() for r in rows if r.value is not None and r.paper is not None]
    lines = [["table", "case", "method", "quantity", "here", "paper", "difference", "source of the paper's"]]
    lines += [
        [
            n,
            r.case,
            title_of(r.method),
            r.quantity,
            r.cell,
            format_number(r.paper),
            f"{r.value - r.paper:+.2f}",
            r.source,
        ]
        for n, r in both
    ]
    rows = {(name, *row.key): row.value for name, found in tables.items() for row in found if row.value is not None}
    parts = ["## Beside the paper"]
    if both:
        parts.append("\n".join(results.markdown_table(lines)))
    parts += explain(rows)
    return parts if len(parts) > 1 else []


# Sentences about what was measured, with the rows whose numbers they name; one whose rows are missing is left out.
EXPLANATIONS: tuple[tuple[str, dict[str, tuple[str, str, str, str]]], ...] = (
    (
        "**QFlash's input is kind to it.** On uniform operands of +-4 the published arithmetic has {uniform:.1f} dB on "
        "A2, on unit Gaussian ones {gaussian:.1f}, where int8 q, k and v with exact softmax allow {ceiling:.1f}. The "
        "ablation says where it goes: up to the integer exponent {exponent:.1f} dB are left, and the last step "
        "(integer accumulation, and an int8 output at V's scale, truncated) leaves {accumulation:.1f}.",
        {
            "uniform": ("4", "A2 uniform", "qflash", "SQNR dB"),
            "gaussian": ("4", "A2 Gaussian", "qflash", "SQNR dB"),
            "ceiling": ("c3", "A2 Gaussian", "exact softmax, per tensor", "SQNR dB"),
            "exponent": ("ablation", "A2 Gaussian", "+ integer exponent", "SQNR dB"),
            "accumulation": ("ablation", "A2 Gaussian", "+ integer accumulation", "SQNR dB"),
        },
    ),
    (
        "**QFlash on A7.** The arithmetic of the published code gives {code_low:.1f} to {code_high:.1f} dB over the "
        "draws, Algorithm 1 as printed {text_low:.1f} to {text_high:.1f}; on A2 they give {code_a2_low:.1f} to "
        "{code_a2_high:.1f} and {text_a2_low:.1f} to {text_a2_high:.1f}. Which of the two the paper's figures are of "
        "was not found.",
        {
            f"{name}{place}_{end}": ("4", case, method, quantity)
            for name, method in (("code", "qflash"), ("text", "qflash_text"))
            for place, case in (("", "A7 uniform"), ("_a2", "A2 uniform"))
            for end, quantity in (("low", "lowest dB"), ("high", "highest dB"))
        },
    ),
    (
        "**The tensor cores wait, in every method.** At batch 8, A2 keeps them busy for {qvit:.1f} % of the time here, "
        "for {high:.1f} in high precision, for {qflash:.1f} in the published code and for {flash:.1f} in "
        "FlashAttention-2: 24 heads are little work for a large GPU, and what they wait for is the rest of the kernel. "
        "A share is of one GPU, so those of the paper, of another one, do not compare.",
        {
            "qvit": ("2", "A2, batch 8", "qvit_standard", "IMMA %"),
            "high": ("2", "A2, batch 8", "qvit_high", "IMMA %"),
            "qflash": ("2", "A2, batch 8", "qflash", "IMMA %"),
            "flash": ("2", "A2, batch 8", "flash_attention_2", "HMMA %"),
        },
    ),
    (
        "**I-ViT hangs on the draw.** Its SQNR is {low:.1f} to {high:.1f} dB on A2 (median {middle:.1f}) and "
        "{low7:.1f} to {high7:.1f} on A7 ({middle7:.1f}): a natural-log unit is a few steps of its int8 scores, and "
        "Shiftmax rounds it to a whole number of them, so that the largest score of a draw sets the exponential's "
        "base. The paper's figures are of one draw.",
        {
            f"{name}{place}": ("4", case, "i_vit", quantity)
            for place, case in (("", "A2 uniform"), ("7", "A7 uniform"))
            for name, quantity in (("low", "lowest dB"), ("high", "highest dB"), ("middle", MEDIAN))
        },
    ),
    (
        "**The challenges.** Without ScaleRelease the accumulator needs {bits:.0f} bits after three tiles, and int32 "
        "leaves {wrapped:.1f} dB of the {released:.1f} with it. A division costs {division:.1f} instructions on sm_90, "
        "a shift {shift:.1f} and a scale release {release:.1f}. One scale for each token allows {token:.1f} dB on A2's "
        "Gaussian input, one for the tensor {tensor:.1f}; with this library's vectors over channels, whose scores "
        "still share a scale, high precision has {product:.1f}.",
        {
            "bits": ("c1", "tile 3", "without", "largest, bits"),
            "wrapped": ("c1", "tile 3", "without", "SQNR dB"),
            "released": ("c1", "tile 3", "with ScaleRelease", "SQNR dB"),
            "division": ("c2", "sm_90", "division", "instructions"),
            "shift": ("c2", "sm_90", "shift", "instructions"),
            "release": ("c2", "sm_90", "scale release", "instructions"),
            "token": ("c3", "A2 Gaussian", "exact softmax, per token", "SQNR dB"),
            "tensor": ("c3", "A2 Gaussian", "exact softmax, per tensor", "SQNR dB"),
            "product": ("c3", "A2 Gaussian", "qvit high, per tensor, vectors over channels", "SQNR dB"),
        },
    ),
)


def explain(rows: dict[tuple[str, str, str, str], float]) -> list[str]:
    """The sentences whose numbers are there."""
    return [
        text.format(**{name: rows[key] for name, key in keys.items()})
        for text, keys in EXPLANATIONS
        if all(key in rows for key in keys.values())
    ]


# ---------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=CHOICES, default=list(TABLES), metavar="NAME", help=f"{CHOICES}")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    results.add_measurement_arguments(parser, (1, 8))
    parser.add_argument("--draws", type=results.positive, default=10, help="of the random inputs in Table 4")
    parser.add_argument("--energy-seconds", type=float, default=5.0, help="loop of each method in Table 3")
    capture_help = "models whose q, k and v Table 4 takes: configurations, timm names or safetensors files"
    parser.add_argument(
        "--capture-from", nargs="*", default=["demo_deit", "demo_swin"], metavar="MODEL", help=capture_help
    )
    model_help = "of Table 5: short names of YAMLs in configs/, or paths of some"
    parser.add_argument("--models", nargs="+", default=["demo_deit", "demo_swin"], metavar="MODEL", help=model_help)
    parser.add_argument("--data", help="pictures, as eval_imagenet.py takes them; default: those of each configuration")
    parser.add_argument("--calib", help="source of calibration pictures")
    parser.add_argument("--checkpoint", help="weights of the one model of Table 5")
    parser.add_argument("--max-samples", type=results.positive, help="evaluate so many pictures")
    parser.add_argument("--batch-size", type=results.positive, default=64, help="pictures in a batch of Table 5")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for the CSV files and plots")
    page_help = "write the result page of the files in --output instead, measure nothing"
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help=page_help)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)  # what Table 2 runs
    args = parser.parse_args(arguments)
    if args.checkpoint is not None and len(args.models) != 1:
        parser.error("--checkpoint has the weights of one model: name it with --models")
    if args.device not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, not {args.device}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device here: use --device cpu")
    if args.seconds <= 0 or args.energy_seconds <= 0:
        parser.error("--seconds and --energy-seconds must be above 0")
    chosen = {name for choice in args.tables for name in (CHALLENGES if choice == "challenges" else (choice,))}
    args.tables = [name for name in TABLES if name in chosen]
    for name, rival in (("fig3", RIVAL), ("3", FLOAT)):  # old ratios would stand beside new times
        if name in chosen and rival not in args.methods:
            parser.error(f"the ratios of --tables {name} are to {rival}: name it in --methods as well")
    return args


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure the tables, one after the other; each is written and printed when it is there.

    Raises:
        MismatchError: This library's rows of Table 4 are under their floors.
        QvitError: Something could not run.
    """
    session = Session(args)
    low = None
    for name in args.tables:
        session.table, path = name, file_of(args.output, name)
        table, old = TABLES[name], read_csv(path) if path.exists() else []
        new = list(tqdm(table.measure(session), desc=table.title, unit=" cells"))
        rows = merge(old, new)
        save(name, rows, args.output)
        lines = [missing(rows)] if missing(rows) else results.text_table(cells_of(table, rows))
        print("\n".join(["", table.title, *lines]))
        low = new if name == "4" else low
    if low is not None:
        check_floors(low)


def write_page(folder: Path, page: Path) -> None:
    """Write the result page.

    Raises:
        ConfigError: There is nothing to show, or it cannot be written.
    """
    text = make_page(folder, page)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {page}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    args = parse_arguments(arguments)

    def act() -> None:
        if args.page is not None:
            write_page(args.output, args.page)
        elif args.profiled:
            run_profiled(Session(args))
        else:
            run(args)

    return results.exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
