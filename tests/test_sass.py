"""The int8-to-int8 attention is integer-only: read from the machine code of three targets, with no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROOF = """
from qvit.kernels import inspection
for options in ({{}}, {{"high": True}}, {{"bias": True}}):
    for kind in ("fused", "attend"):
        compiled = inspection.compile_attention({cap}, kind=kind, tokens={tokens}, head_dim={dim}, **options)
        assert any("MMA" in op for op in compiled.opcodes)
        print("FLOAT", compiled.float_instructions)
print("FLOAT", inspection.compile_pack({cap}, head_dim={dim}).float_instructions)
"""

FLOAT_ENDS = """
from qvit.kernels import inspection
print("FLOAT", inspection.compile_attention({cap}, operand="*fp16").float_instructions)
print("FLOAT", inspection.compile_attention({cap}, out="*fp16").float_instructions)
"""

DIVISION = """
import triton, triton.language as tl
from qvit.kernels import inspection, numerics

@triton.jit
def by_division(row_sum, BITS: tl.constexpr, PEAK: tl.constexpr, INTERPRET: tl.constexpr):
    return (1 << 30) // tl.maximum(row_sum, 1)

numerics.reciprocal = by_division  # before anything is compiled: the compiler remembers a kernel's source
print("FLOAT", inspection.compile_attention({cap}).float_instructions)
print("FLOAT", inspection.compile_attention({cap}, kind="attend").float_instructions)
"""


def _float_instructions(program: str, folder) -> list[str]:
    # The suite may run under Triton's interpreter, which cannot compile: ask a fresh process, from a file, since the
    # compiler reads a kernel's source.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("FLOAT")]


@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
@pytest.mark.parametrize(("tokens", "dim"), [(197, 64), (49, 32)], ids=["vit_N197_D64", "swin_N49_D32"])
def test_int8_attention_is_integer_only(capability, tokens, dim, tmp_path):
    program = PROOF.format(cap=capability, tokens=tokens, dim=dim)
    assert _float_instructions(program, tmp_path) == ["FLOAT []"] * 7


@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
def test_the_proof_catches_division_and_float_operands(capability, tmp_path):
    ends = _float_instructions(FLOAT_ENDS.format(cap=capability), tmp_path)
    assert len(ends) == 2 and "FLOAT []" not in ends
    divisions = _float_instructions(DIVISION.format(cap=capability), tmp_path)
    assert len(divisions) == 2 and all("MUFU" in found for found in divisions)
