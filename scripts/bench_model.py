"""Measure how fast whole models are on one NVIDIA GPU: float, and with qvit's attention, in the same modes.

python scripts/bench_model.py --models swin_tiny deit_small --batches 64 256
python scripts/bench_model.py --resume                                  # what the CSV file does not have yet
python scripts/bench_model.py --resume --modes lean --models swin_tiny  # compiled for less memory
python scripts/bench_model.py --markdown docs/results/bench_model.csv

Weights are random, with those of qkv scaled up so that attention is not flat; speed does not depend on them. Both sides
take turns in one process. "eager" is timed as Python calls it and as a CUDA graph; "compiled" is torch.compile in its
default mode with static shapes, timed likewise ("compiled graph"). "lean", measured when it is asked for, is the same
without inductor's reuse of buffers, which keeps more of them alive than the allocator does; the table leaves it out.
TF32 is off. Swin is measured with timm's fused attention as well, which timm leaves off. Nothing is timed before the
attention of every patched model has been compared with the float one's; rows are written as they come.

Exit status: 0, 1 when a patched model disagrees (nothing is timed then) or fails, 2 when the benchmark could not run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import timm
import torch
from torch import nn
from tqdm import tqdm

import qvit
from qvit.config import PRECISIONS
from qvit.errors import ConfigError, QvitError, UnsupportedModuleError
from qvit.evaluation import results
from qvit.evaluation.results import MismatchError
from qvit.evaluation.timing import Call, Measurement, Timing, TurnTimer

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
NAME = "bench_model"
MODELS = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit_base": "deit_base_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "swinv2_tiny": "swinv2_tiny_window8_256",
}
FIRST = (("swin_tiny", 64), ("swin_tiny", 256), ("swin_small", 64), ("swin_small", 256), ("deit_small", 256))
BATCHES = (1, 8, 64, 256)
# What --modes names, and the modes that come of it: as Python calls it, and in a CUDA graph.
MODES = {"eager": ("eager", "graph"), "compiled": ("compiled", "compiled graph"), "lean": ("lean", "lean graph")}
ALL_MODES = tuple(mode for modes in MODES.values() for mode in modes)
COMPILERS = {"compiled": {}, "lean": {"options": {"allow_buffer_reuse": False}}}  # arguments of torch.compile
QUICK = {"models": ["deit_tiny", "swin_tiny"], "batches": [8], "rounds": 1, "seconds": 0.05}
QKV_GAIN = 4  # with timm's initial weights the scores would hardly differ
CALIBRATION_BATCHES, CALIBRATION_IMAGES, CHECKED_IMAGES = 3, 8, 4
FAILED = "failed"  # how the note of a failure begins
NOTE_LENGTH = 160  # of an error's text
MIB = 1 << 20
DEVICE = "cuda"


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        method: "float" or "qvit".
        precision: Of the attention: "float32", "float16", "float16 fused" (timm's fused attention), or qvit's.
        model: On the device; None where qvit finds nothing to swap.
        swapped, left: Attention layers in integers and in float.
        sqnr_db: Of the swapped attention layer that agrees least with float.
        note: Why there is no model.
    """

    method: str
    precision: str
    model: nn.Module | None
    swapped: int = 0
    left: int = 0
    sqnr_db: float | None = None
    note: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and the images."""
        return torch.float32 if self.precision == "float32" else torch.float16


def build(name: str, seed: int, fused: bool = False) -> nn.Module:
    """A float32 model with random weights on the device; ``fused`` with timm's experimental fused attention."""
    torch.manual_seed(seed)
    timm.layers.set_fused_attn(True, experimental=fused)
    try:
        model = timm.create_model(MODELS[name]).eval()
    finally:
        timm.layers.set_fused_attn(True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("qkv.weight"):
                parameter.mul_(QKV_GAIN)
    return model.to(DEVICE)


def draw_images(model: nn.Module, count: int, seed: int) -> torch.Tensor:
    """Unit Gaussian images of the model's size, float16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (count, 3, *model.patch_embed.img_size)
    return torch.randn(shape, device=DEVICE, dtype=torch.float16, generator=generator)


def float_subjects(name: str, seed: int) -> list[Subject]:
    """The float models; one with fused attention where timm would not fuse by itself."""
    single = build(name, seed)
    layers = qvit.report(single).total
    models = {"float32": single, "float16": copy.deepcopy(single).half()}
    if any(getattr(module, "fused_attn", True) is False for module in single.modules()):
        models["float16 fused"] = build(name, seed, fused=True).half()
    return [Subject("float", precision, model, left=layers) for precision, model in models.items()]


def quantized_subjects(model: nn.Module, precisions: list[str], seed: int) -> list[Subject]:
    """Patched copies of a float16 model, each compared with it."""
    loader = [draw_images(model, CALIBRATION_IMAGES, seed + i) for i in range(CALIBRATION_BATCHES)]
    try:
        calibration = qvit.calibrate(model, loader)
    except UnsupportedModuleError as error:
        left, note = qvit.report(model).total, _note("not swapped", error)
        return [Subject("qvit", precision, None, left=left, note=note) for precision in precisions]
    return [_quantized_subject(model, calibration, precision, seed) for precision in precisions]


def _note(what: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{what}: {text[:NOTE_LENGTH]}"


def _quantized_subject(model: nn.Module, calibration: qvit.Calibration, precision: str, seed: int) -> Subject:
    patched = qvit.quantize(copy.deepcopy(model), calibration, qvit.QuantConfig(precision=precision))
    images = draw_images(model, CHECKED_IMAGES, seed + CALIBRATION_BATCHES)  # none of the calibration's
    worst = min(compare_attention(model, patched, images).values())
    report = qvit.report(patched)
    return Subject("qvit", precision, patched, report.swapped, report.left, worst)


@torch.inference_mode()
def compare_attention(model: nn.Module, patched: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """SQNR in dB of each swapped attention's output, on what reaches that attention in the float model.

    Both are called where a block calls its attention, so that what moves windows is compared with them, and without
    hooks, of which a patched Swin block would take notice.
    """
    found: dict[str, float] = {}
    names = [row.name for row in qvit.report(patched).rows if row.status == "swapped"]
    spied = [_spy(model, patched, name, found) for name in names]
    try:
        model(images)
    finally:
        for module, method in spied:
            delattr(module, method)
    return found


def _spy(model: nn.Module, patched: nn.Module, name: str, found: dict[str, float]) -> tuple[nn.Module, str]:
    """Makes the float attention compare itself with the patched one; returns the method that stands in."""
    parent = name.rpartition(".")[0]
    path, method = (parent, "_attn") if hasattr(model.get_submodule(parent), "_attn") else (name, "forward")
    module, twin = model.get_submodule(path), getattr(patched.get_submodule(path), method)
    original = getattr(module, method)

    def compare(*args: object, **kwargs: object) -> torch.Tensor:
        out = original(*args, **kwargs)
        found[name] = results.sqnr_db(out, twin(*args, **kwargs))
        return out

    setattr(module, method, compare)
    return module, method


def prepare(args: argparse.Namespace) -> dict[str, list[Subject]]:
    """All models, compared.

    Raises:
        MismatchError: A patched model's attention disagrees with the float model's.
    """
    subjects = {}
    for name in tqdm(args.models, desc="build and compare", unit=" models"):
        floats = float_subjects(name, args.seed)
        half = next(subject.model for subject in floats if subject.precision == "float16")
        subjects[name] = floats + quantized_subjects(half, args.precision, args.seed)
        for subject in subjects[name]:
            require_agreement(name, subject, args.min_sqnr)
    return subjects


def require_agreement(name: str, subject: Subject, floor: float) -> None:
    """Refuse a patched model whose worst attention layer is below a floor in dB.

    Raises:
        MismatchError: It is, or is not a number.
    """
    if subject.sqnr_db is not None and not subject.sqnr_db >= floor:
        raise MismatchError(
            f"{name}, precision {subject.precision}: an attention layer agrees with float to {subject.sqnr_db:.1f} dB, "
            f"expected at least {floor:g} dB; nothing is timed"
        )


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """A line of the CSV file: one model at one batch size in one mode. An empty cell was not measured.

    Attributes:
        mode: "eager", "graph", "compiled", "compiled graph", "lean" or "lean graph".
        method, precision: Of :class:`Subject`.
        ms, ms_p20, ms_p80: Milliseconds for a batch: median and two quantiles.
        images_per_s: By the median.
        peak_mib: Weights, and at most so much more during a forward, outside the graph.
        swapped, left, sqnr_db: Of :class:`Subject`.
        note: Why something was not measured.
    """

    model: str
    batch: int
    mode: str
    method: str
    precision: str
    ms: float | None
    ms_p20: float | None
    ms_p80: float | None
    images_per_s: float | None
    peak_mib: float | None
    swapped: int
    left: int
    sqnr_db: float | None
    note: str
    gpu: str
    driver: str | None
    torch: str
    triton: str
    timm: str
    qvit: str
    seed: int
    date: str

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        """What no two rows of a file share."""
        return self.model, self.batch, self.mode, self.method, self.precision


write_csv = partial(results.write_csv, kind=Row)
read_csv = partial(results.read_csv, kind=Row)


@dataclass
class Outcome:
    """What is known of a subject after a task: memory, times, or what went wrong."""

    peak_mib: float | None = None
    measurement: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Task:
    """What is timed together: a model at one batch size, uncompiled or compiled in one way.

    Attributes:
        kind: A key of `MODES`.
    """

    model: str
    batch: int
    kind: str

    def subjects(self, subjects: dict[str, list[Subject]]) -> list[Subject]:
        """Those of the model; float32 is not compiled."""
        return [s for s in subjects[self.model] if self.kind == "eager" or s.precision != "float32"]

    def keys(self, subjects: dict[str, list[Subject]]) -> set[tuple]:
        """Keys of its rows."""
        of_model = self.subjects(subjects)
        return {(self.model, self.batch, mode, s.method, s.precision) for mode in MODES[self.kind] for s in of_model}

    def __str__(self) -> str:
        return f"{self.model} x {self.batch} {self.kind}"


def make_rows(task: Task, subject: Subject, outcome: Outcome, machine: dict) -> Iterator[Row]:
    """The rows of an outcome: with the host, then in a graph."""
    called, replayed = MODES[task.kind]
    timings = {called: None, replayed: None}
    if outcome.measurement is not None:
        timings = {called: outcome.measurement.eager, replayed: outcome.measurement.graph}
    for mode, timing in timings.items():
        yield Row(
            model=task.model,
            batch=task.batch,
            mode=mode,
            method=subject.method,
            precision=subject.precision,
            **_times(timing, task.batch),
            peak_mib=_rounded(outcome.peak_mib, 1),
            swapped=subject.swapped,
            left=subject.left,
            sqnr_db=_rounded(subject.sqnr_db, 2),
            note=outcome.note,
            **machine,
        )


def _times(timing: Timing | None, batch: int) -> dict[str, float | None]:
    if timing is None:
        return dict.fromkeys(("ms", "ms_p20", "ms_p80", "images_per_s"))
    ms, ms_p20, ms_p80 = (round(x / 1000, 4) for x in (timing.median, timing.p20, timing.p80))
    return {"ms": ms, "ms_p20": ms_p20, "ms_p80": ms_p80, "images_per_s": round(batch / timing.median * 1e6, 1)}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """Rows of two runs in the order of models, batches and modes; of two with one key the new one."""
    rows = {row.key: row for row in [*old, *new]}.values()
    order = {name: place for place, name in enumerate(MODELS)}
    return sorted(rows, key=lambda row: (order.get(row.model, len(order)), row.batch, ALL_MODES.index(row.mode)))


# ---------------------------------------------------------------- measurement


def plan_tasks(models: list[str], batches: list[int], kinds: list[str]) -> list[Task]:
    """All tasks: first everything of the cases in `FIRST`; of the rest what compiles comes last, for it takes long."""
    cases = [(model, batch) for model in models for batch in batches]
    first = [case for case in FIRST if case in cases]
    rest = [case for case in cases if case not in FIRST]
    kinds = [kind for kind in MODES if kind in kinds]
    return [Task(*case, kind) for case in first for kind in kinds] + [
        Task(*case, kind) for kind in kinds for case in rest
    ]


def compile_model(model: nn.Module, kind: str) -> nn.Module:
    """torch.compile in its default mode, for the batch size that it is called with; ``kind`` is of `COMPILERS`."""
    return torch.compile(model, dynamic=False, **COMPILERS[kind])


@torch.inference_mode()
def measure_peak(model: nn.Module, call: Call) -> float:
    """MiB of the weights and of what a forward allocates beside them at the most."""
    call()  # whatever is allocated, compiled or chosen once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    weights = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    return (weights + torch.cuda.max_memory_allocated() - before) / MIB


def enter(task: Task, subject: Subject, images: torch.Tensor, timer: TurnTimer) -> Outcome:
    """Warm a subject up and give it to the timer; a failure becomes the outcome's note."""
    outcome = Outcome(note=subject.note)
    if subject.model is None:
        return outcome
    run = compile_model(subject.model, task.kind) if task.kind in COMPILERS else subject.model
    call = partial(run, images.to(subject.dtype))
    try:
        outcome.peak_mib = measure_peak(subject.model, call)
        timer.add(f"{subject.method} {subject.precision}", [call], torch.inference_mode)
    except (RuntimeError, QvitError) as error:
        torch.cuda.synchronize()  # raises when the error has cost the device: then nothing else can be measured
        outcome.note = _note(FAILED, error)
    return outcome


def measure(
    task: Task, subjects: list[Subject], args: argparse.Namespace, machine: dict, bar: tqdm
) -> tuple[list[Row], str]:
    """Rows of a task, and how long its parts took."""
    start = perf_counter()
    timer = TurnTimer(args.rounds, args.seconds)
    size = next(subject.model for subject in subjects if subject.model is not None)
    images = draw_images(size, task.batch, args.seed)
    outcomes = [enter(task, subject, images, timer) for subject in subjects]
    ready = perf_counter()
    measurements = timer.run(bar.update)
    for subject, outcome in zip(subjects, outcomes):
        outcome.measurement = measurements.get(f"{subject.method} {subject.precision}")
    rows = [row for subject, outcome in zip(subjects, outcomes) for row in make_rows(task, subject, outcome, machine)]
    return rows, f"ready in {ready - start:.1f} s, timed in {perf_counter() - ready:.1f} s"


def release() -> None:
    """Give up compiled code and freed memory, so that a task starts as the first one did."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def benchmark(args: argparse.Namespace, old: list[Row], machine: dict) -> list[Row]:
    """Compare all models, then measure task by task; the CSV file is written after each.

    Raises:
        MismatchError: A patched model disagrees with the float one.
    """
    start = perf_counter()
    subjects, rows = prepare(args), old
    print(f"built and compared in {perf_counter() - start:.1f} s")
    there = {row.key for row in old if not row.note.startswith(FAILED)}
    tasks = [t for t in plan_tasks(args.models, args.batches, args.modes) if not t.keys(subjects) <= there]
    turns = [args.rounds * len(task.subjects(subjects)) for task in tasks]
    with tqdm(total=sum(turns), unit=" turns") as bar:
        for number, task in enumerate(tasks, 1):
            bar.set_description(str(task))
            new, phases = measure(task, task.subjects(subjects), args, machine, bar)
            rows = merge(rows, new)
            save(args.output, rows)
            release()
            bar.update(sum(turns[:number]) - bar.n)  # the turns of those that did not run
            bar.write(f"{task}: {phases}")
    return rows


def save(folder: Path, rows: list[Row]) -> None:
    """Write the CSV file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(rows, folder / f"{NAME}.csv")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {folder}: {error}") from error


# ---------------------------------------------------------------- results


@dataclass
class Comparison:
    """A model at one batch size with one precision of qvit, against float; milliseconds.

    Attributes:
        single: float32 in eager mode.
        float16: The faster of both attentions, by mode.
        patched: qvit, by mode.
    """

    model: str
    batch: int
    precision: str
    single: float | None = None
    float16: dict[str, float] = field(default_factory=dict)
    patched: dict[str, float] = field(default_factory=dict)

    def times(self, mode: str) -> tuple[float | None, float | None]:
        """float16 and qvit in a mode, or with "best" each in its fastest."""
        if mode == "best":
            return min(self.float16.values(), default=None), min(self.patched.values(), default=None)
        return self.float16.get(mode), self.patched.get(mode)

    def ratio(self, mode: str) -> float | None:
        """How many times faster qvit is than float16 in a mode, or "best"."""
        float16, patched = self.times(mode)
        return None if float16 is None or patched is None else float16 / patched


COMPARED = (*MODES["eager"], *MODES["compiled"], "best")


def compare(rows: list[Row]) -> list[Comparison]:
    """A comparison for each model, batch and precision of qvit, in the order of the rows."""
    comparisons = {
        (row.model, row.batch, row.precision): Comparison(row.model, row.batch, row.precision)
        for row in rows
        if row.method == "qvit"
    }
    for row in rows:
        if row.ms is None or row.mode not in COMPARED:
            continue
        for comparison in comparisons.values():
            if (comparison.model, comparison.batch) == (row.model, row.batch):
                _enter_time(comparison, row)
    return list(comparisons.values())


def _enter_time(comparison: Comparison, row: Row) -> None:
    if row.precision == "float32":
        comparison.single = row.ms if row.mode == "eager" else comparison.single
    elif row.method == "float":
        comparison.float16[row.mode] = min(row.ms, comparison.float16.get(row.mode, row.ms))
    elif row.precision == comparison.precision:
        comparison.patched[row.mode] = row.ms


def table(rows: list[Row]) -> list[list[str]]:
    """The comparisons as cells, a header first."""
    lines = [["model", "batch", "precision", "float32 eager", *COMPARED]]
    for c in compare(rows):
        cells = [_cell(c, mode) for mode in COMPARED]
        lines.append([c.model, str(c.batch), c.precision, _number(c.single), *cells])
    return lines


def _cell(comparison: Comparison, mode: str) -> str:
    float16, patched = comparison.times(mode)
    if float16 is None and patched is None:
        return "-"
    return results.format_ratios(f"{_number(float16)} / {_number(patched)}", comparison.ratio(mode))


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.2f}"


def legend(rows: list[Row]) -> str:
    """What the numbers of the table are, and where they come from."""
    return (
        "Milliseconds a batch, the faster float16 model / qvit (in brackets: how many times faster), in one mode on "
        "both sides, and at the end each in its fastest; random weights; "
        f"{results.legend_of_machines(rows, ('timm',))}"
    )


def format_summary(rows: list[Row]) -> str:
    """The table for a terminal."""
    return "\n".join([*results.text_table(table(rows)), legend(rows)])


def format_markdown(rows: list[Row]) -> str:
    """The table for the documentation."""
    return "\n".join([f"{legend(rows)}:", "", *results.markdown_table(table(rows))])


def write_plot(rows: list[Row], path: Path) -> None:
    """Bars of the speed-up over float16, a panel for each model.

    Raises:
        ConfigError: There is nothing to draw, or it cannot be written.
    """
    panels: dict[str, list] = {}
    for c in compare(rows):
        bars = (f"x {c.batch}\n{c.precision}", {mode: c.ratio(mode) for mode in COMPARED})
        panels.setdefault(c.model, []).append(bars)
    if not panels:
        raise ConfigError("the results have no row of a patched model, of which the plot is; measure one first")
    try:
        results.write_ratio_plot(path, panels, COMPARED, "speed-up over float16")
    except OSError as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error


# ---------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; without a GPU only --markdown and --plot are accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=["eager", "compiled"])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["standard"], help="of qvit's attention")
    results.add_measurement_arguments(parser, BATCHES)
    floor_help = "least agreement with float, in dB, of each swapped attention layer"
    parser.add_argument("--min-sqnr", type=float, default=15.0, metavar="DB", help=floor_help)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help=f"for {NAME}.csv and .png")
    parser.add_argument("--resume", action="store_true", help="keep the CSV file's rows and measure what it lacks")
    parser.add_argument("--quick", action="store_true", help="two small models, little time: to see that all runs")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--markdown", type=Path, metavar="CSV", help="print the table of a CSV file, measure nothing")
    instead.add_argument("--plot", type=Path, metavar="CSV", help="draw the plot of a CSV file, measure nothing")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(arguments)
    if args.markdown is None and args.plot is None:
        results.require_gpu(parser, "--markdown and --plot")
    return args


def run(args: argparse.Namespace) -> None:
    """Measure, print the table and draw the plot.

    Raises:
        MismatchError: A patched model disagrees with float, or failed in a task; the rows of the others are written.
        ConfigError: The rows to keep are of another machine, or the files cannot be written.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path = args.output / f"{NAME}.csv"
    old = read_csv(path) if args.resume and path.exists() else []
    machine = {**results.describe_machine(args.seed), "timm": timm.__version__}
    require_same_machine(old, machine, path)
    rows = benchmark(args, old, machine)
    print(format_summary(rows))
    write_plot(rows, path.with_suffix(".png"))
    failed = [row for row in rows if row.method == "qvit" and row.note.startswith(FAILED)]
    if failed:
        tasks = ", ".join(f"{row.model} x {row.batch} {row.mode}" for row in failed)
        raise MismatchError(f"qvit failed in {tasks}; the notes in {path} say why")


def require_same_machine(rows: list[Row], machine: dict, path: Path) -> None:
    """Refuse to keep rows that cannot be compared with new ones; drivers may differ, each row names its own.

    Raises:
        ConfigError: They are of another GPU, other versions or another seed.
    """
    for name in machine.keys() - {"driver", "date"}:
        for row in rows:
            if getattr(row, name) != machine[name]:
                raise ConfigError(
                    f"{path} has rows with {name} {getattr(row, name)!r}, this run has {machine[name]!r}: measure "
                    "without --resume, or into another folder"
                )


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    args = parse_arguments(arguments)

    def act() -> None:
        if args.markdown is not None:
            print(format_markdown(read_csv(args.markdown)))
        elif args.plot is not None:
            write_plot(read_csv(args.plot), args.plot.with_suffix(".png"))
        else:
            run(args)

    return results.exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
