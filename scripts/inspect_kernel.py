"""What the kernels compile to for NVIDIA GPUs, read from the machine code; needs no GPU.

python scripts/inspect_kernel.py
python scripts/inspect_kernel.py --capability 90 --kernel hopper --tokens 197 --opcodes
python scripts/inspect_kernel.py --capability 80 90 120 --csv kernels.csv

"per score" counts the instructions of a thread in the loops over keys (or, where tiles are unrolled, over queries) for
each attention score that it makes there, keys that fill up the last tile included.
"float" names the float instructions of a kernel from int8 to int8: there must be none. The first run compiles for some
minutes; later ones find Triton's cache.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import textwrap

import triton
from tqdm import tqdm

from qvit.kernels import inspection

CAPABILITIES = (80, 86, 89, 90, 100, 120)
KERNELS = ("hopper", "hopper_long", "hopper_stream", "fused", "attend", "pack")
# ViT, a window of Swin, CLIP with patches of 14; DeiT at 384; SAM
TOKENS = {
    "hopper": (197, 257),
    "hopper_long": (577,),
    "hopper_stream": (577, 4096),
    "fused": (197, 49, 257),
    "attend": (577,),
}
POINTERS = {"int8": "*i8", "float16": "*fp16"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--tokens", type=int, nargs="+", help="default: some, by kernel")
    parser.add_argument("--head-dim", type=int, help="default: 32 for up to 64 tokens, else 64")
    parser.add_argument("--precision", nargs="+", choices=("standard", "high"), default=("standard", "high"))
    parser.add_argument(
        "--operand", nargs="+", choices=tuple(POINTERS), default=tuple(POINTERS), help="type of q, k, v and the result"
    )
    parser.add_argument("--opcodes", action="store_true", help="print how often each opcode occurs")
    parser.add_argument("--csv", help="write the table to this file too")
    args = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and the interpreter compiles nothing")
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """What to compile, one dict each; a kernel appears once for what does not change it."""
    found = []
    for kernel in args.kernel:
        shapes = [(n, args.head_dim or (32 if n <= 64 else 64)) for n in args.tokens or TOKENS.get(kernel, ())]
        precisions = args.precision
        if kernel == "pack":
            shapes, precisions = [("-", args.head_dim or 64)], ["-"]
        for (tokens, dim), precision, operand, cap in itertools.product(
            shapes, precisions, args.operand, args.capability
        ):
            if kernel.startswith("hopper") and cap != 90:
                continue
            case = {"kernel": kernel, "tokens": tokens, "head_dim": dim, "precision": precision}
            found.append(case | {"operand": operand, "capability": cap})
    return found


def compile_case(case: dict) -> inspection.Compiled:
    """Compile one kernel as ``launch.py`` would launch it."""
    pointer, options = POINTERS[case["operand"]], {"head_dim": case["head_dim"]}
    if case["kernel"] == "pack":
        return inspection.compile_pack(case["capability"], operand=pointer, **options)
    options |= {"kind": case["kernel"], "tokens": case["tokens"], "high": case["precision"] == "high"}
    return inspection.compile_attention(case["capability"], operand=pointer, out=pointer, **options)


def measure(case: dict, compiled: inspection.Compiled) -> dict:
    """A row of the table."""
    integer = case["operand"] == "int8"
    return case | {
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "shared_bytes": compiled.shared_bytes,
        "main_loop": len(compiled.main_loop),
        "outside": len(compiled.outside),
        "per_score": f"{compiled.per_score:.2f}" if compiled.scores else "-",
        "float": (" ".join(compiled.float_instructions) or "none") if integer else "-",
    }


def format_opcodes(row: dict, compiled: inspection.Compiled) -> str:
    """Opcodes of the main loop per score, where there are scores, and of the rest in full."""
    unit = compiled.scores or 1
    loop = [f"{op} {n / unit:.3g}" for op, n in inspection.count_opcodes(compiled.main_loop).most_common()]
    rest = [f"{op} {n}" for op, n in inspection.count_opcodes(compiled.outside).most_common()]
    title = "{kernel} N={tokens} D={head_dim} {precision} {operand} sm_{capability}".format(**row)
    fill = lambda name, ops: textwrap.fill(f"  {name}: " + ", ".join(ops), 118, subsequent_indent="    ")  # noqa: E731
    name = "main loop, per score" if compiled.scores else "main loop"
    return "\n".join([title, fill(name, loop), fill("outside", rest or ["nothing"])])


def format_table(rows: list[dict]) -> str:
    """The rows under their names, in columns."""
    table = [list(rows[0]), *([str(x) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(x.rjust(width) for x, width in zip(line, widths)) for line in table)


def write_csv(rows: list[dict], path: str) -> None:
    """The rows, each with the version of Triton that compiled it."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "triton"])
        writer.writeheader()
        writer.writerows(row | {"triton": triton.__version__} for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    args = parse_arguments(arguments)
    rows, opcodes = [], []
    for case in (bar := tqdm(cases(args), unit="kernel")):
        bar.set_postfix_str("{kernel} {tokens} sm_{capability}".format(**case))
        compiled = compile_case(case)
        rows.append(measure(case, compiled))
        opcodes.append(format_opcodes(rows[-1], compiled))
    print(f"Triton {triton.__version__}")
    print(format_table(rows))
    if args.opcodes:
        print(*opcodes, sep="\n")
    if args.csv:
        write_csv(rows, args.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
