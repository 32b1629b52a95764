"""Measure how fast and how accurate the attention operators are on one NVIDIA GPU, beside PyTorch's and others.

python scripts/bench_attention.py --workloads A1 A2 N577 --batches 1 64
python scripts/bench_attention.py --markdown docs/results/bench_attention.csv
python scripts/bench_attention.py --speed-table docs/results/bench_attention.csv  # what skip_slower goes by

Nothing is timed before every workload's kernels have given the bits of the reference. The tables have the time of a
call in a CUDA graph; the CSV file has the time with the host beside it, and the accuracy.

A4s to A7s are Swin's shifted windows with a relative position bias and a mask. There the product works on the image as
it lies, so that moving windows is in its time; SDPA is given its operands in windows, or moves what a block moves.

Exit status: 0, 1 when a kernel is wrong (nothing is written then), 2 when the benchmark could not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import isqrt
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import qvit.ops  # registers the operators
from qvit import reference, speed
from qvit.config import PRECISIONS
from qvit.errors import ConfigError
from qvit.evaluation import results
from qvit.evaluation.results import (
    MismatchError,
    add_measurement_arguments,
    describe_machine,
    exit_status,
    format_ratios,
    legend_of_machines,
    markdown_table,
    require_gpu,
    sqnr_db,
    text_table,
    write_ratio_plot,
)
from qvit.evaluation.timing import LEAST_SETS, Call, Context, Measurement, TurnTimer, count_sets
from qvit.evaluation.workloads import FLOAT_BYTES, INT8_BYTES, PAPER_WORKLOADS, Workload
from qvit.scales import Ranges, build_scales
from qvit.windows import SHIFT_MASK, WindowPlan, plan_windows

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
NAME = "bench_attention"
CAPABILITIES = {"NVIDIA H200": (9, 0)}  # of the GPUs that a speed table may be of; the CSV file has only the name
SCORED_IMAGES = 2  # images whose accuracy and bits are looked at
CALIBRATION_SCORES = 1 << 25  # about as many scores are computed on the CPU to find the output's scale
GIB = 1 << 30
DEVICE = "cuda"
SHIFTED_SET_BYTES = 3 * FLOAT_BYTES + INT8_BYTES + 2 * 2  # images, windows, folded windows; a block's input, an output


# ---------------------------------------------------------------- workloads and their data


@dataclass(frozen=True)
class ShiftedWorkload(Workload):
    """Windows of a square image of ``side`` x ``side`` tokens, rolled by ``shift``, with a bias and Swin's mask."""

    side: int
    shift: int

    def set_bytes(self, batch: int) -> int:
        return SHIFTED_SET_BYTES * self.elements(batch)

    @property
    def window(self) -> int:
        """Height and width of a window."""
        return isqrt(self.tokens)

    @property
    def across(self) -> int:
        """Windows beside each other."""
        return self.side // self.window


WORKLOADS = {
    workload.name: workload
    for workload in (
        *PAPER_WORKLOADS,
        ShiftedWorkload("A4s", 64, 3, 49, 32, side=56, shift=3),
        ShiftedWorkload("A5s", 16, 6, 49, 32, side=28, shift=3),
        ShiftedWorkload("A6s", 4, 12, 49, 32, side=14, shift=3),
        ShiftedWorkload("A7s", 1, 24, 49, 32, side=7, shift=0),  # one window: the bias alone
        *(Workload(f"N{tokens}", 1, 6, tokens, 64) for tokens in (257, 577, 1025, 1370, 4096)),
    )
}
PANELS = {
    "ViT and DeiT, 197 tokens": ("A1", "A2", "A3"),
    "Swin, windows of 49 tokens": ("A4", "A5", "A6", "A7"),
    "Swin, shifted windows with bias and mask, moved by the kernel": ("A4s", "A5s", "A6s", "A7s"),
    "Longer sequences, 6 heads": ("N257", "N577", "N1025", "N1370", "N4096"),
}

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def unpack(packed: torch.Tensor) -> Operands:
    """q, k and v (B, H, N, D) as views of a packed tensor (B, N, 3, H, D), what a qkv layer gives."""
    return packed.permute(2, 0, 3, 1, 4).unbind()


def pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The packed tensor of q, k and v (B, H, N, D)."""
    return torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)


def lay_out_int8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """int8 operands (B, H, N, D) in the memory layout that is measured, the one of :func:`unpack`."""
    return unpack(pack(q, k, v))


@dataclass(frozen=True, eq=False)
class Case:
    """A workload at one batch size, with its input sets.

    Attributes:
        workload: The shape.
        batch: Images; the operands have ``windows`` entries for each.
        packed: float16 (batch * windows, N, 3, H, D), one for each set.
    """

    workload: Workload
    batch: int
    packed: list[torch.Tensor]

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.workload.head_dim**-0.5

    @property
    def scored_images(self) -> int:
        """Leading images of the first set whose results are looked at."""
        return min(self.batch, SCORED_IMAGES)

    def head(self, result: torch.Tensor) -> torch.Tensor:
        """The scored images' part of a result, or of an operand, that has entries for images or for windows."""
        return result[: len(result) // self.batch * self.scored_images]

    @cached_property
    def floats(self) -> list[Operands]:
        """float16 operands, set by set."""
        return [unpack(packed) for packed in self.packed]

    @cached_property
    def integers(self) -> list[Operands]:
        """int8 operands, quantized with :attr:`scales`, set by set."""
        return [lay_out_int8(*quantize(self.scales, *operands)) for operands in self.floats]

    @cached_property
    def scales(self) -> qvit.Scales:
        """Scales of the first set's leading images, as many as the CPU finds the attention of in short time."""
        images = max(SCORED_IMAGES, CALIBRATION_SCORES // self.workload.scores(1))
        entries = min(self.batch, images) * self.workload.windows
        q, k, v = (x[:entries].cpu().double() for x in self.floats[0])
        return build_scales(Ranges.of(q, k, v, self.attend(q, k, v)), softmax_scale=self.softmax_scale)

    @cached_property
    def exact(self) -> torch.Tensor:
        """float64 attention of the scored images, (entries, H, N, D)."""
        return torch.cat([self.attend(*(x.double() for x in image)) for image in self.images(self.floats[0])])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of whole images' entries, in the operands' type."""
        return torch.softmax(q @ k.mT * self.softmax_scale, -1) @ v

    def images(self, operands: Operands) -> Iterator[Operands]:
        """The scored images' operands, image by image: a whole batch's float64 scores would be large."""
        return zip(*(self.head(x).split(self.workload.windows) for x in operands))


@dataclass(frozen=True, eq=False)
class ShiftedCase(Case):
    """A case of shifted windows.

    Attributes:
        packed: Of images: float16 (batch, side * side, 3, H, D), one for each set.
        bias: The relative position bias, float16 (H, N, N).
    """

    bias: torch.Tensor

    @cached_property
    def plan(self) -> WindowPlan:
        """Where the windows lie."""
        size, shift = self.workload.window, self.workload.shift
        return plan_windows(self.workload.side, self.workload.side, (size, size), (shift, shift))

    def cut(self, image: torch.Tensor) -> torch.Tensor:
        """The windows (batch * windows, N, ...) of an image (batch, side * side, ...)."""
        return image[:, torch.from_numpy(self.plan.rows).long().to(image.device)].flatten(0, 1)

    @cached_property
    def floats(self) -> list[Operands]:
        """float16 operands in windows, set by set: views of a packed tensor, as a float block has them."""
        return [unpack(self.cut(packed)) for packed in self.packed]

    @cached_property
    def folded(self) -> list[Operands]:
        """float16 operands (batch, windows * H, N, D), contiguous: there one mask serves all images by broadcasting."""
        return [tuple(self._fold(x) for x in operands) for operands in self.floats]

    def _fold(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (self.batch, -1)).flatten(1, 2).contiguous()

    @cached_property
    def integer_images(self) -> list[torch.Tensor]:
        """``packed`` as int8, set by set."""
        return [pack(*quantize(self.scales, *unpack(packed))) for packed in self.packed]

    @cached_property
    def additive(self) -> torch.Tensor:
        """Bias and mask of each window, float16 (windows, H, N, N)."""
        masks = torch.from_numpy(self.plan.masks[self.plan.pattern]).to(self.bias.device)
        return self.bias + SHIFT_MASK * masks[:, None].half()

    @cached_property
    def window_mask(self) -> torch.Tensor:
        """The mask of :attr:`floats`: a copy for each image, for a view cannot repeat the windows."""
        return align(self.additive.repeat(self.batch, 1, 1, 1))

    @cached_property
    def folded_mask(self) -> torch.Tensor:
        """The mask of :attr:`folded`: a view."""
        return align(self.additive.flatten(0, 1)[None]).expand(self.batch, -1, -1, -1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention with bias and mask of whole images' windows, in the operands' type."""
        scores = (q @ k.mT * self.softmax_scale).unflatten(0, (-1, self.workload.windows))
        return torch.softmax(scores + self.additive.to(q), -1).flatten(0, 1) @ v


def align(mask: torch.Tensor) -> torch.Tensor:
    """The mask in rows of a multiple of 8, which the memory-efficient backend takes without copying it in each call."""
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -columns % 8))[..., :columns]


def draw_case(workload: Workload, batch: int, sets: int, seed: int) -> Case:
    """A case on unit Gaussian inputs."""
    draw = partial(torch.randn, dtype=torch.float16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
    channels = (3, workload.heads, workload.head_dim)
    if isinstance(workload, ShiftedWorkload):
        packed = [draw(batch, workload.side**2, *channels) for _ in range(sets)]
        return ShiftedCase(workload, batch, packed, draw(workload.heads, workload.tokens, workload.tokens))
    return Case(workload, batch, [draw(batch * workload.windows, workload.tokens, *channels) for _ in range(sets)])


def quantize(scales: qvit.Scales, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """float q, k and v as int8."""
    zero = scales.k_zero.to(k.device)
    return _quantize(q, scales.q_mult), _quantize(k, scales.k_mult, zero), _quantize(v, scales.v_mult)


def _quantize(x: torch.Tensor, mult: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    mult = mult.to(x.device)
    parts = x.chunk(8)  # the exact quantize step works in float64
    return torch.cat([reference.quantize_operand(part, mult, zero).to(torch.int8) for part in parts])


# ---------------------------------------------------------------- methods


@dataclass(frozen=True)
class Operator:
    """A method made ready for one case.

    Attributes:
        calls: One call for each input set.
        decode: Makes real values (B, H, N, D) of a call's result.
        reference: Makes what the scored entries of the first result must equal to the bit.
        context: What the calls run inside.
        note: What the method was spared, for the rows.
    """

    calls: list[Call]
    decode: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double
    reference: Call | None = None
    context: Context = nullcontext
    note: str = ""


def product(case: Case, kind: str, precision: str) -> Operator:
    """qvit's operator, called as a swapped module calls it, on "fp16" or "int8" operands; the output has their type."""
    operands = case.floats if kind == "fp16" else case.integers
    dtype, device = operands[0][0].dtype, operands[0][0].device
    scales, constants = case.scales, case.scales.constants(device)
    unit = scales.o_scale.to(device, torch.float64)[:, None, None] if dtype == torch.int8 else 1.0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return torch.ops.qvit.attention(q, k, v, constants, None, precision, dtype, backend, scales.half_exact)

    return Operator(
        calls=[partial(attend, *x) for x in operands],
        decode=lambda out: out.transpose(1, 2).double() * unit,
        reference=lambda: torch.cat([attend(*image, backend="reference") for image in case.images(operands[0])]),
    )


def sdpa(case: Case, backend: SDPBackend) -> Operator:
    """PyTorch's scaled_dot_product_attention, held to one backend."""
    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=case.softmax_scale)
    return Operator([partial(attend, *x) for x in case.floats], context=partial(sdpa_kernel, backend))


def eager(case: Case) -> Operator:
    """Three PyTorch operators in float16."""
    return Operator([partial(case.attend, *x) for x in case.floats])


def paper(case: Case) -> Operator:
    """The published algorithm's kernel alone: each set is quantized beforehand, with its own scales."""
    calls, v_scales = [], []
    for operands in case.floats:
        integers, (q_scale, k_scale, v_scale) = zip(*map(reference.quantize_tensor, operands))
        units = reference.paper_constants(q_scale, k_scale, case.softmax_scale, text=False)
        calls.append(partial(torch.ops.qvit.attention_paper, *lay_out_int8(*integers), units, None, False, "auto"))
        v_scales.append(v_scale)
    return Operator(calls, decode=lambda out: out.transpose(1, 2).double() * v_scales[0])


def sageattention(case: Case) -> Operator:
    """SageAttention, with the quantization inside the call as it publishes it."""
    attend = partial(importlib.import_module("sageattention").sageattn, sm_scale=case.softmax_scale)
    return Operator([partial(attend, *x) for x in case.floats])


def flash_attn(case: Case) -> Operator:
    """The flash-attn package, on operands (B, N, H, D)."""
    attend = partial(importlib.import_module("flash_attn").flash_attn_func, softmax_scale=case.softmax_scale)
    calls = [partial(attend, *(x.transpose(1, 2) for x in operands)) for operands in case.floats]
    return Operator(calls, decode=lambda out: out.transpose(1, 2).double())


# ---------------------------------------------------------------- methods for shifted windows

SPARED = "q, k and v are given in windows: moving them costs nothing here"
MOVED = "the block's input and the result are moved, as timm does; the mask is made beforehand"


def shifted_product(case: ShiftedCase, kind: str, precision: str) -> Operator:
    """qvit's operator on the image as it lies, called as a swapped block calls it."""
    images = case.packed if kind == "fp16" else case.integer_images
    dtype, device = images[0].dtype, images[0].device
    scales, constants = case.scales, case.scales.constants(device)
    rows, pattern, masks = case.plan.tensors(device)
    addend = qvit.ops.pattern_bias(masks, case.bias, case.workload.heads, SHIFT_MASK)
    addend = qvit.ops.window_bias(addend, constants)
    unit = scales.o_scale.to(device, torch.float64)[:, None, None] if dtype == torch.int8 else 1.0

    def attend(image: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return torch.ops.qvit.window_attention(
            *image.unbind(2), None, constants, addend, rows, pattern, precision, dtype, backend, scales.half_exact
        )

    return Operator(
        calls=[partial(attend, image) for image in images],
        decode=lambda out: case.cut(out).transpose(1, 2).double() * unit,
        reference=lambda: attend(case.head(images[0]), backend="reference"),
    )


def masked_sdpa(case: ShiftedCase, backend: SDPBackend, form: str) -> Operator:
    """PyTorch's scaled_dot_product_attention with a mask, on operands in "windows" or "folded" ones."""
    operands, mask = {"windows": (case.floats, case.window_mask), "folded": (case.folded, case.folded_mask)}[form]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, scale=case.softmax_scale)
    heads = case.workload.heads
    return Operator(
        calls=[partial(attend, *x) for x in operands],
        decode=lambda out: out.double().reshape(-1, heads, *out.shape[-2:]),
        context=partial(sdpa_kernel, backend),
        note=SPARED,
    )


def moved_sdpa(case: ShiftedCase, backend: SDPBackend, form: str) -> Operator:
    """:func:`masked_sdpa`, with the moves that a float Swin block makes before its qkv projection and after."""
    inner, workload = masked_sdpa(case, backend, form), case.workload
    inputs = [packed[:, :, 0].flatten(2).contiguous() for packed in case.packed]  # as large as a block's input

    def attend(x: torch.Tensor, call: Call) -> torch.Tensor:
        partition(x, workload)  # the projection, which would read it, is not part of the attention
        return reverse(call(), workload, case.batch)

    return Operator(
        calls=[partial(attend, *x) for x in zip(inputs, inner.calls)],
        decode=lambda out: case.cut(out).transpose(1, 2).double(),
        context=inner.context,
        note=MOVED,
    )


def partition(x: torch.Tensor, workload: ShiftedWorkload) -> torch.Tensor:
    """The windows (batch * windows, N, C) of images (batch, side * side, C), moved as timm's Swin block moves them."""
    x = x.unflatten(1, (workload.side, workload.side))
    if workload.shift:
        x = x.roll((-workload.shift, -workload.shift), (1, 2))
    split = (workload.across, workload.window)
    return x.unflatten(2, split).unflatten(1, split).transpose(2, 3).reshape(-1, workload.tokens, x.shape[-1])


def reverse(out: torch.Tensor, workload: ShiftedWorkload, batch: int) -> torch.Tensor:
    """The image (batch, side * side, H, D) of an attention's result (batch * windows, H, N, D), or of a folded one."""
    across, window, side = workload.across, workload.window, workload.side
    out = out.unflatten(-2, (window, window))
    out = out.unflatten(1, (across, across, -1)) if len(out) == batch else out.unflatten(0, (batch, across, across))
    x = out.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, side, side, workload.heads, workload.head_dim)
    return (x.roll((workload.shift, workload.shift), (1, 2)) if workload.shift else x).flatten(1, 2)


def masked_eager(case: ShiftedCase) -> Operator:
    """Four PyTorch operators in float16, on folded windows."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * case.softmax_scale + case.folded_mask, -1) @ v

    def decode(out: torch.Tensor) -> torch.Tensor:
        return out.double().reshape(-1, case.workload.heads, *out.shape[-2:])

    return Operator([partial(attend, *x) for x in case.folded], decode, note=SPARED)


# ---------------------------------------------------------------- all methods

Build = Callable[[Case], Operator]
PRODUCT: dict[str, Build] = {
    f"qvit {kind} {precision}": partial(product, kind=kind, precision=precision)
    for kind in ("fp16", "int8")
    for precision in PRECISIONS
}
SDPA: dict[str, Build] = {
    "sdpa flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa math": partial(sdpa, backend=SDPBackend.MATH),
}
METHODS = {**PRODUCT, **SDPA, "eager": eager, "paper kernel": paper}
# The backends that take a mask, each in both forms of its operands; then those worth moving windows for.
MASKED = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
FORMS = ("windows", "folded")
SHIFTED_PRODUCT: dict[str, Build] = {
    method: partial(shifted_product, **build.keywords) for method, build in PRODUCT.items()
}
MASKED_SDPA: dict[str, Build] = {
    f"sdpa {name} {form}": partial(masked_sdpa, backend=backend, form=form)
    for name, backend in MASKED.items()
    for form in FORMS
}
MOVED_SDPA: dict[str, Build] = {
    f"{method} + moves": partial(moved_sdpa, **build.keywords)
    for method, build in MASKED_SDPA.items()
    if not method.startswith("sdpa math")
}
SHIFTED_METHODS = {**SHIFTED_PRODUCT, **MASKED_SDPA, **MOVED_SDPA, "eager": masked_eager}
OPTIONAL = {"sageattention": sageattention, "flash_attn": flash_attn}
COMPARED = (*PRODUCT, "paper kernel")  # with the best of SDPA

# Bytes for each score of the methods that keep all of them: two float16 tensors at a time, two float32 ones.
SCORE_BYTES = {"eager": 4, "sdpa math": 8}


def installed_rivals() -> dict[str, Build]:
    """The optional methods that can run here; those of a package that is missing are named on stdout."""
    rivals = {}
    for package, build in OPTIONAL.items():
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{package}: not installed, no rows ({error})")
        else:
            rivals[package] = build
    return rivals


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """A line of the CSV file: one method on one case. An empty cell was not measured.

    Attributes:
        graph_us, graph_us_p20, graph_us_p80: Microseconds a call in a CUDA graph: median and two quantiles.
        eager_us: The same with the host, of calls back to back.
        sqnr_db: Against float64 attention of the float inputs, on the first images.
        equal: The kernel has the reference's bits there; the product's methods alone.
        note: Why something was not measured, or what a rival was spared.
        sets: Input sets that the calls rotate among.
    """

    workload: str
    windows: int
    heads: int
    tokens: int
    head_dim: int
    batch: int
    method: str
    graph_us: float | None
    graph_us_p20: float | None
    graph_us_p80: float | None
    eager_us: float | None
    sqnr_db: float | None
    equal: bool | None
    note: str
    sets: int | None
    gpu: str
    driver: str | None
    torch: str
    triton: str
    qvit: str
    seed: int
    date: str

    @property
    def case(self) -> tuple[str, int]:
        """Workload and batch."""
        return self.workload, self.batch


@dataclass
class Outcome:
    """What is known of a method on a case: its accuracy, whether its bits are right, its times, or what went wrong."""

    sqnr_db: float | None = None
    equal: bool | None = None
    measurement: Measurement | None = None
    note: str = ""


def make_row(workload: Workload, batch: int, sets: int | None, method: str, outcome: Outcome, machine: dict) -> Row:
    """The row of an outcome."""
    times = dict.fromkeys(("graph_us", "graph_us_p20", "graph_us_p80", "eager_us"))
    if outcome.measurement is not None:
        graph, calls = outcome.measurement.graph, outcome.measurement.eager
        times = dict(zip(times, (round(x, 3) for x in (graph.median, graph.p20, graph.p80, calls.median))))
    shape = {key: getattr(workload, key) for key in ("windows", "heads", "tokens", "head_dim")}
    sqnr = None if outcome.sqnr_db is None else round(outcome.sqnr_db, 2)
    facts = {"sqnr_db": sqnr, "equal": outcome.equal, "note": outcome.note, "sets": sets}
    return Row(workload=workload.name, batch=batch, method=method, **shape, **times, **facts, **machine)


write_csv = partial(results.write_csv, kind=Row)
read_csv = partial(results.read_csv, kind=Row)


# ---------------------------------------------------------------- measurement


def check(workloads: list[Workload], seed: int) -> None:
    """Compare the product's methods with the reference on one image of each workload. This also compiles them.

    Raises:
        MismatchError: A result differs in a bit.
    """
    for workload in tqdm(workloads, desc="check", unit=" workloads"):
        case = draw_case(workload, 1, 1, seed)
        for method in PRODUCT:
            operator = methods_of(workload)[method](case)
            verify(method, case, operator, operator.calls[0]())


def verify(method: str, case: Case, operator: Operator, result: torch.Tensor) -> bool:
    """True: the scored images' part of a result has the reference's bits.

    Raises:
        MismatchError: They have not.
    """
    expected = operator.reference()
    wrong = int((case.head(result) != expected).sum())
    if wrong:
        raise MismatchError(
            f"workload {case.workload.name}, batch {case.batch}: {method} differs from the reference in {wrong} of "
            f"{expected.numel()} values; no speed is reported"
        )
    return True


def judge(method: str, case: Case, operator: Operator) -> Outcome:
    """Accuracy and bits of a method's first result."""
    with operator.context():
        result = operator.calls[0]()
    equal = None if operator.reference is None else verify(method, case, operator, result)
    return Outcome(sqnr_db(case.exact, operator.decode(case.head(result))), equal, note=operator.note)


def enter(method: str, build: Build, case: Case, timer: TurnTimer) -> Outcome:
    """Judge a method and give it to the timer; a rival that refuses, or lack of memory, becomes the outcome's note."""
    outcome = Outcome()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            operator = build(case)
            outcome = judge(method, case, operator)
            timer.add(method, operator.calls, operator.context)
        except (RuntimeError, ValueError, AssertionError) as error:
            if method in COMPARED and not isinstance(error, torch.OutOfMemoryError):
                raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises when the error has cost the device: that is no refusal
            outcome.note = refusal(error, [str(warning.message) for warning in caught])
    return outcome


def refusal(error: Exception, messages: list[str]) -> str:
    """Why a method did not run, on one line: PyTorch's backends say it in warnings, the error itself says little."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [message.split(" (Triggered internally")[0].strip() for message in messages]
    reasons = [line for line in lines if not line.endswith(("because:", "runtime disabled."))]
    return " ".join("; ".join(dict.fromkeys(reasons or [str(error).split("\n")[0]])).split())


def excess(workload: Workload, batch: int, method: str, limit: int) -> str:
    """Why a method is not tried: its operands and scores are above a limit in bytes. Empty when they are not."""
    operands = LEAST_SETS * workload.set_bytes(batch)
    per_score = max((size for name, size in SCORE_BYTES.items() if method.startswith(name)), default=0)
    needed = operands + per_score * workload.scores(batch)
    what = "operands" if operands > limit else "operands and scores"
    return f"skipped: {what} of {needed / GIB:.1f} GiB" if needed > limit else ""


def choose_sets(workload: Workload, batch: int, limit: int) -> int:
    """Number of input sets of a case."""
    elements = workload.elements(batch)
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return count_sets(INT8_BYTES * elements, workload.set_bytes(batch), cache, limit)


def methods_of(workload: Workload, optional: dict[str, Build] | None = None) -> dict[str, Build]:
    """What is measured on a workload; ``optional`` methods take no mask."""
    return SHIFTED_METHODS if isinstance(workload, ShiftedWorkload) else {**METHODS, **(optional or {})}


def measure(
    workload: Workload, batch: int, methods: dict[str, Build], args: argparse.Namespace, machine: dict, bar: tqdm
) -> list[Row]:
    """Rows of all methods on one case."""
    limit = int(args.max_gib * GIB)
    outcomes = {method: Outcome(note=excess(workload, batch, method, limit)) for method in methods}
    tried = [method for method, outcome in outcomes.items() if not outcome.note]
    sets = None
    if tried:
        sets = choose_sets(workload, batch, limit)
        case, timer = draw_case(workload, batch, sets, args.seed), TurnTimer(args.rounds, args.seconds)
        outcomes.update((method, enter(method, methods[method], case, timer)) for method in tried)
        for method, measurement in timer.run(bar.update).items():
            outcomes[method].measurement = measurement
    return [make_row(workload, batch, sets, method, outcome, machine) for method, outcome in outcomes.items()]


def benchmark(args: argparse.Namespace) -> list[Row]:
    """Check everything, then measure everything.

    Raises:
        MismatchError: A kernel is wrong.
    """
    workloads = [WORKLOADS[name] for name in args.workloads]
    rivals, rows = installed_rivals(), []
    check(workloads, args.seed)
    machine = describe_machine(args.seed)
    cases = [(w, batch, methods_of(w, rivals)) for w in workloads for batch in args.batches]
    done = 0
    with tqdm(total=args.rounds * sum(len(methods) for *_, methods in cases), unit=" turns") as bar:
        for workload, batch, methods in cases:
            bar.set_description(f"{workload.name} x {batch}")
            rows += measure(workload, batch, methods, args, machine, bar)
            done += len(methods) * args.rounds
            bar.update(done - bar.n)  # the turns of those that did not run
    return rows


# ---------------------------------------------------------------- results


def is_shifted(row: Row) -> bool:
    """True for shifted windows, whose times are of more than an attention."""
    return isinstance(WORKLOADS.get(row.workload), ShiftedWorkload)


@dataclass(frozen=True)
class Comparison:
    """The graph times of one case against the fastest backend of SDPA; None was not measured.

    Attributes:
        row: Any row of the case.
        best, best_us: The fastest backend and its time; of shifted windows, on operands that are given in windows.
        moved, moved_us: The fastest that moves windows as well.
        times: Time of each of `COMPARED`.
    """

    row: Row
    best: str | None
    best_us: float | None
    moved: str | None
    moved_us: float | None
    times: dict[str, float | None]

    def ratio(self, method: str) -> float | None:
        """How many times faster a method is than the fastest backend."""
        return _ratio(self.best_us, self.times[method])

    def moved_ratio(self, method: str) -> float | None:
        """How many times faster a method is than the fastest backend that moves windows as well."""
        return _ratio(self.moved_us, self.times[method])


def compare(rows: list[Row]) -> list[Comparison]:
    """One comparison for each case, in the order of the rows."""
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.method] = row
    return [_compare(case) for case in cases.values()]


def _compare(case: dict[str, Row]) -> Comparison:
    times = {method: row.graph_us for method, row in case.items()}
    best, moved = _fastest(times, {**SDPA, **MASKED_SDPA}), _fastest(times, MOVED_SDPA)
    row = next(iter(case.values()))
    return Comparison(row, best, times.get(best), moved, times.get(moved), {m: times.get(m) for m in COMPARED})


def _fastest(times: dict[str, float | None], methods: Iterable[str]) -> str | None:
    return min((m for m in methods if times.get(m) is not None), key=times.get, default=None)


def _ratio(rival: float | None, time: float | None) -> float | None:
    return None if time is None or rival is None else rival / time


def tables(rows: list[Row]) -> list[list[list[str]]]:
    """The comparisons as tables of cells, each with a header first: plain attention, then shifted windows."""
    comparisons = compare(rows)
    plain = [["workload", "batch", "best SDPA", *COMPARED]]
    plain += [
        [*_head(c), *(_cell(c.times[method], c.ratio(method)) for method in COMPARED)]
        for c in comparisons
        if not is_shifted(c.row)
    ]
    shifted = [["shifted windows", "batch", "best SDPA", "the same with moves", *PRODUCT]]
    shifted += [
        [
            *_head(c),
            _rival(c.moved, c.moved_us),
            *(_cell(c.times[method], c.ratio(method), c.moved_ratio(method)) for method in PRODUCT),
        ]
        for c in comparisons
        if is_shifted(c.row)
    ]
    return [lines for lines in (plain, shifted) if len(lines) > 1]


def _head(comparison: Comparison) -> list[str]:
    row = comparison.row
    shape = f"{row.workload} {row.windows}x{row.heads}x{row.tokens}x{row.head_dim}"
    return [shape, str(row.batch), _rival(comparison.best, comparison.best_us)]


def _rival(name: str | None, time: float | None) -> str:
    return "-" if name is None else f"{name.removeprefix('sdpa ').removesuffix(' + moves')} {time:.1f}"


def _cell(time: float | None, *ratios: float | None) -> str:
    return "-" if time is None else format_ratios(f"{time:.1f}", *ratios)


def legend(rows: list[Row]) -> str:
    """What the numbers of a table are, and where they come from."""
    text = "Microseconds a call in a CUDA graph (in brackets: how many times faster than the fastest SDPA backend"
    if any(map(is_shifted, rows)):
        text += "; of shifted windows, than SDPA on operands given in windows, and than SDPA with the moves of a block"
    return f"{text}); {legend_of_machines(rows)}"


def format_summary(rows: list[Row]) -> str:
    """The tables for a terminal."""
    return "\n".join([*(line for cells in tables(rows) for line in text_table(cells)), legend(rows)])


def format_markdown(rows: list[Row]) -> str:
    """The tables for the README."""
    return "\n".join([f"{legend(rows)}:", *(line for cells in tables(rows) for line in ("", *markdown_table(cells)))])


def write_plot(rows: list[Row], path: Path) -> None:
    """Bars of the speed-up over the fastest SDPA backend, one panel for each group of workloads."""
    panels: dict[str, list] = {title: [] for title in PANELS}
    titles = {name: title for title, names in PANELS.items() for name in names}
    for comparison in compare(rows):
        row = comparison.row
        bars = (f"{row.workload}\nx {row.batch}", {method: comparison.ratio(method) for method in COMPARED})
        if row.workload in titles:
            panels[titles[row.workload]].append(bars)
    panels = {title: groups for title, groups in panels.items() if groups}
    write_ratio_plot(path, panels, COMPARED, "speed-up over the best SDPA")


def write_results(rows: list[Row], folder: Path) -> None:
    """Write the CSV file and the plot.

    Raises:
        ConfigError: They cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(rows, folder / f"{NAME}.csv")
        write_plot(rows, folder / f"{NAME}.png")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {folder}: {error}") from error


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """Rows of two runs; a case that both have is the new one's."""
    measured = {row.case for row in new}
    rows = [row for row in old if row.case not in measured] + new
    order = {name: place for place, name in enumerate(WORKLOADS)}
    return sorted(rows, key=lambda row: (order.get(row.workload, len(order)), row.batch))


# ---------------------------------------------------------------- the speed table


def make_speed_table(rows: list[Row], source: str) -> dict:
    """The content of ``qvit/speed.json``: integer and float times of every case that has both.

    Args:
        rows: Of one GPU and one set of versions.
        source: Name of the file that the rows are from.

    Raises:
        ConfigError: Rows of several machines, a GPU of unknown compute capability, or no case with both times.
    """
    names = ("gpu", "driver", "torch", "triton", "qvit")
    # A module that may choose float is given windows: the times of shifted windows, which include moves, do not apply.
    rows = [row for row in rows if not is_shifted(row)]
    if not rows:
        raise ConfigError(f"{source} has no case of plain attention, with the times of the integer kernel and of SDPA")
    machines = list(dict.fromkeys(tuple(getattr(row, name) for name in names) for row in rows))
    if len(machines) > 1:
        raise ConfigError(f"{source} has rows of several machines or versions: {machines[0]}, {machines[1]}")
    versions = dict(zip(names, machines[0]))
    gpu = versions.pop("gpu")
    if gpu not in CAPABILITIES:
        raise ConfigError(f"{source} is of {gpu!r}, whose compute capability is not in CAPABILITIES")
    times = [row for comparison in compare(rows) for row in _speed_rows(comparison)]
    if not times:
        raise ConfigError(f"{source} has no case with the times of the integer kernel and of SDPA")
    return {"source": source, "gpu": gpu, "capability": CAPABILITIES[gpu], "versions": versions, "rows": times}


def _speed_rows(comparison: Comparison) -> Iterator[dict]:
    row = comparison.row
    # These attentions have no bias. The batch is the one that a module sees: windows count.
    shape = {"tokens": row.tokens, "head_dim": row.head_dim, "heads": row.heads, "batch": row.batch * row.windows}
    for precision in PRECISIONS:
        times = {"integer_us": comparison.times[f"qvit fp16 {precision}"], "float_us": comparison.best_us}
        if None not in times.values():
            yield {**shape, "bias": False, "precision": precision, **times}


def write_speed_table(table: dict, path: Path) -> None:
    """Write a speed table as JSON, a row on a line.

    Raises:
        ConfigError: It cannot be written.
    """
    head = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items() if key != "rows"]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    try:
        path.write_text("\n".join(["{", *head, '  "rows": [', rows, "  ]", "}", ""]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the speed table {path}: {error}") from error


# ---------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; without a GPU only --markdown and --speed-table are accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    add_measurement_arguments(parser, (1, 8, 64, 256))
    parser.add_argument("--max-gib", type=float, default=24.0, help="skip what needs more GPU memory")
    output_help = f"folder for {NAME}.csv and .png; with --speed-table the file to write, by default the package's own"
    parser.add_argument("--output", type=Path, metavar="PATH", help=output_help)
    parser.add_argument("--append", action="store_true", help="keep the other cases of the CSV file that is there")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--markdown", type=Path, metavar="CSV", help="print the table of a CSV file, measure nothing")
    table_help = "write qvit's table of recorded times from a CSV file, measure nothing"
    instead.add_argument("--speed-table", type=Path, metavar="CSV", help=table_help)
    args = parser.parse_args(arguments)
    measures = args.markdown is None and args.speed_table is None
    if measures:
        require_gpu(parser, "--markdown and --speed-table")
    args.output = args.output or (RESULTS if measures else speed.PATH)
    return args


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    """Measure, print the table and write the files."""
    path = args.output / f"{NAME}.csv"
    old = read_csv(path) if args.append and path.exists() else []
    rows = benchmark(args)
    print(format_summary(rows))
    write_results(merge(old, rows), args.output)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    args = parse_arguments(arguments)

    def act() -> None:
        if args.markdown is not None:
            print(format_markdown(read_csv(args.markdown)))
        elif args.speed_table is not None:
            table = make_speed_table(read_csv(args.speed_table), args.speed_table.name)
            write_speed_table(table, args.output)
            print(f"{len(table['rows'])} rows in {args.output}")
        else:
            run(args)

    return exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
