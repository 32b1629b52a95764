"""Compile the kernels for any NVIDIA target on a machine without a GPU, and read what the hardware would run.

PTX proves nothing about floating point: an integer division shows none there and compiles to I2F, MUFU.RCP and F2I.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pathlib
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qvit.kernels import attend, fused, launch, pack

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;")
_LABEL = re.compile(r"\s*(\.L\w+):")
_OPCODE = re.compile(r"(?:@!?U?P[T\d]+\s+)?(([A-Z][A-Z0-9_]*)(?:\.\w+)?)")  # a predicate, opcode and first modifier
_BRANCH = re.compile(r"\bBRA\b[^`]*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"(?:@\S+\s+)?[IH]G?MMA\b")
_FLOAT = re.compile(r"^(F|H|D|MUFU|I2F|UF|UI2F)")
_INTEGER = {"FLO", "UFLO", "FENCE", "DEPBAR"}  # find leading one, and two barriers: no arithmetic
# The assembler's way to load an immediate on the other pipe: zero times zero plus the bits of a constant.
_IMMEDIATE = re.compile(r"HFMA2(?:\.MMA)? R\d+, -RZ, RZ, [-+.0-9a-zA-Z]+, [-+.0-9a-zA-Z]+")


def read_sass(sass: str) -> tuple[list[str], list[range]]:
    """The instructions of a disassembly, and the positions of its loops, the largest first.

    A loop is what a branch back to a label spans. Blocks that the assembler moves behind the last EXIT branch back as
    well, to where they came from: a span with an unconditional EXIT in it is no loop.
    """
    instructions, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[1])
    for i, instruction in enumerate(instructions):
        target = _BRANCH.search(instruction)
        span = range(labels.get(target[1], i), i + 1) if target else range(0)
        # One instruction is no loop either: a branch to itself ends every kernel.
        if len(span) > 1 and "EXIT" not in instructions[span.start : span.stop]:
            loops.append(span)
    return instructions, sorted(loops, key=len, reverse=True)


def count_opcodes(instructions: list[str], modifiers: bool = True) -> collections.Counter:
    """How often each opcode occurs, by default with its first modifier: IMAD.WIDE, IMAD.MOV."""
    return collections.Counter(_OPCODE.match(x)[1 if modifiers else 2] for x in instructions)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel for one target: its PTX, its SASS, and what it takes."""

    ptx: str
    sass: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    scores: float = 0  # of a thread in one turn of the main loop; 0 for a kernel that makes none
    passes: bool = False  # the loops over keys follow each other, not inside of one over queries

    @property
    def instructions(self) -> list[str]:
        return read_sass(self.sass)[0]

    @property
    def main_loop(self) -> list[str]:
        """Instructions of the largest loop; all of the kernel's where it has none."""
        instructions, loops = read_sass(self.sass)
        return instructions[loops[0].start : loops[0].stop] if loops else instructions

    @property
    def outside(self) -> list[str]:
        """Instructions before and after the main loop."""
        instructions, loops = read_sass(self.sass)
        return instructions[: loops[0].start] + instructions[loops[0].stop :] if loops else []

    @property
    def turns(self) -> list[str]:
        """Instructions of the loops over keys: those with products inside the main loop, or the main loop.

        With ``passes``, those with products wherever they are.
        """
        instructions, loops = read_sass(self.sass)
        within = lambda x: self.passes or loops[0].start <= x.start and x.stop <= loops[0].stop  # noqa: E731
        inner = [instructions[x.start : x.stop] for x in loops[not self.passes :] if within(x)]
        return [x for loop in inner if any(map(_PRODUCT.match, loop)) for x in loop] or self.main_loop

    @property
    def per_score(self) -> float | None:
        """Instructions of the loops over keys for each score that a thread makes there."""
        return len(self.turns) / self.scores if self.scores else None

    @property
    def opcodes(self) -> collections.Counter:
        """All opcodes without their modifiers, and without what only loads an immediate."""
        return count_opcodes([x for x in self.instructions if not _IMMEDIATE.search(x)], modifiers=False)

    @property
    def float_instructions(self) -> list[str]:
        """Opcodes that do or convert floating point, and divisions in the PTX."""
        ops = [op for op in self.opcodes if _FLOAT.match(op) and op not in _INTEGER]
        return sorted(ops) + sorted(set(re.findall(r"\b(?:div|rem)\.[a-z0-9.]+", self.ptx)))


def _tool(name: str) -> pathlib.Path:
    return pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _source_of(kernel) -> type:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def compile_kernel(
    kernel, capability: int, constexprs: dict, types: dict, *, num_warps=4, num_stages=2, **limits: int
) -> Compiled:
    """Compile a Triton kernel for sm_<capability> and disassemble it.

    Args:
        kernel: The jitted function.
        capability: 80, 86, 89, 90, 100 or 120.
        constexprs: Values of its constexpr parameters by name.
        types: Triton types of the others by name; pointers are int8 and scalars int32 where not named.
        num_warps, num_stages: Launch configuration.
        limits: "maxnreg", where the launch limits the registers.
    """
    names = kernel.arg_names
    kinds = {n: types.get(n, "*i8" if n.endswith("_ptr") else "i32") for n in names}
    # What a launch on the views of a packed qkv finds by itself: unit strides, and 16 in all other strides and sizes.
    constexprs = constexprs | {n: 1 for n in names if n in ("stride_qd", "stride_kd", "stride_vd")}
    aligned = [n for n in names if n.endswith("_ptr") or n == "NP" or (n.startswith("stride_") and "bias" not in n)]
    source = _source_of(kernel)(
        fn=kernel,
        signature={n: "constexpr" if n in constexprs else kinds[n] for n in names},
        constexprs={(names.index(n),): v for n, v in constexprs.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constexprs},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False} | limits
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: E731
        sass = run(_tool("nvdisasm"), "-c", cubin.name)
        usage = run(_tool("cuobjdump"), "--dump-resource-usage", cubin.name)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Compiled(built.asm["ptx"], sass, int(registers), int(stack), built.metadata.shared)


def compile_attention(
    capability: int,
    *,
    kind: str = "fused",
    tokens: int = 197,
    head_dim: int = 64,
    high: bool = False,
    bias: bool = False,
    operand: str = "*i8",
    out: str = "*i8",
    block_m: int = 64,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Compiled:
    """An attention kernel for one sequence length; with ``*i8`` operands and result, its integer-only form.

    Args:
        capability: As for :func:`compile_kernel`.
        kind: "fused", "hopper" or "hopper_long" (one launch), "attend" or "hopper_stream" (the second of two, on packed
            operands). The Hopper kernels have no bias and are for 90 alone.
        tokens, head_dim: Sequence length and head dimension.
        high, bias: Precision, and whether there is a bias.
        operand, out: Pointer types of q, k, v (in one launch) and of the result.
        block_m, num_warps, num_stages: Launch configuration; by default that of ``launch.py``.
    """
    one_launch = kind != "attend"
    usual = {"fused": 2 if tokens <= launch.TILE else 4, "hopper_long": 8, "hopper_stream": 4 if high else 8}
    num_warps = num_warps or usual.get(kind, 4)
    num_stages = num_stages or (1 if one_launch else 3)
    tiles, tail = launch.tiles(tokens)
    constexprs = {"D": head_dim, "DP": launch.padded_dim(head_dim), "TAIL": tail, "BIAS": bias, "HIGH": high}
    constexprs |= {"INT8_OUT": out == "*i8", "BLOCK_M": block_m, "INTERPRET": False}
    types = {"sum_ptr": "*i32", "bias_ptr": "*i32", "constants_ptr": "*i32", "out_ptr": out}
    kernel = attend.attend_kernel
    if one_launch:
        kernel = fused.fused_kernel
        constexprs |= {"N": tokens, "STEP": 1, "OUT_UP": 8, "HALF": True}
        types |= {"q_ptr": operand, "k_ptr": operand, "v_ptr": operand}
    if kind == "fused":
        constexprs |= {"TILE": launch.TILE, "TILES": tiles}
    limits = {}
    if kind.startswith("hopper"):
        module = importlib.import_module(f"qvit.kernels.{kind}")  # needs a newer Triton than the rest
        kernel = getattr(module, f"{kind}_kernel")
        if kind != "hopper":
            limits, block_m = launch.long_options(high), 16 * num_warps
            constexprs["WIDTH"] = limits.pop("WIDTH")
        constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    compiled = compile_kernel(
        kernel, capability, constexprs, types, num_warps=num_warps, num_stages=num_stages, **limits
    )
    # With those that fill up the last tile where tiles are unrolled; else of one turn.
    turn = {"attend": launch.TILE, "hopper_long": 2 * launch.TILE, "hopper_stream": 2 * launch.TILE}
    scores = block_m * turn.get(kind, tiles * launch.TILE + tail) / (32 * num_warps)
    return dataclasses.replace(compiled, scores=scores, passes=kind == "hopper_stream")


def compile_window(
    tokens: int,
    *,
    head_dim: int = 32,
    high: bool = False,
    operand: str = "*i8",
    plain: bool = False,
    step: int = 1,
) -> Compiled:
    """The kernel that gives a warp a window, for sm_90; operands and result of one pointer type.

    Args:
        tokens, head_dim: Positions of a window and head dimension.
        high: Precision.
        operand: Pointer type of q, k, v and the result.
        plain: A short sequence without table and bias, instead of a window of an image with pads.
        step: Programs that share a window.
    """
    from qvit.kernels import window_warp  # needs a newer Triton than the rest

    constexprs = {"N": tokens, "D": head_dim, "PLAIN": plain, "PADS": not plain, "STEP": step}
    constexprs |= {"HIGH": high, "OUT_UP": 8, "HALF": True}
    types = dict.fromkeys(("rows_ptr", "pattern_ptr", "bias_ptr", "constants_ptr"), "*i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "pad_ptr", "out_ptr"), operand)
    return compile_kernel(window_warp.window_warp_kernel, 90, constexprs, types, num_warps=1)


def compile_stream_pack(*, head_dim: int = 64, operand: str = "*i8") -> Compiled:
    """What packs K and V for "hopper_stream", for sm_90."""
    from qvit.kernels import hopper_stream  # needs a newer Triton than the rest

    types = {"k_ptr": operand, "v_ptr": operand, "sum_ptr": "*i32", "constants_ptr": "*i32"}
    return compile_kernel(hopper_stream.hopper_pack_kernel, 90, {"D": head_dim, "HALF": True}, types, num_warps=4)


def compile_pack(capability: int, *, head_dim: int = 64, operand: str = "*i8") -> Compiled:
    """The packing kernel for operands of a pointer type; int8 operands are only moved."""
    constexprs = {"D": head_dim, "DP": launch.padded_dim(head_dim), "TILE": launch.TILE}
    constexprs |= {"HALF": True, "INTERPRET": False}
    types = {"q_ptr": operand, "k_ptr": operand, "v_ptr": operand, "sum_ptr": "*i32", "constants_ptr": "*i32"}
    return compile_kernel(pack.pack_kernel, capability, constexprs, types)
