"""The int8-to-int8 attention is integer-only: read from the machine code of three targets, with no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROOF = """
from qvit.kernels import inspection
sizes = dict(head_dim={dim}, tail={tail})
for compiled in (
    inspection.compile_attention({cap}, high=False, **sizes),
    inspection.compile_attention({cap}, high=True, **sizes),
    inspection.compile_attention({cap}, high=False, bias=True, **sizes),
    inspection.compile_pack({cap}, head_dim={dim}),
):
    print("FLOAT", compiled.float_instructions)
"""

VARIANT = """
import triton, triton.language as tl
from qvit.kernels import attend, inspection, numerics

@triton.jit
def by_division(row_sum, BITS: tl.constexpr, PEAK: tl.constexpr, INTERPRET: tl.constexpr):
    return (1 << 30) // tl.maximum(row_sum, 1)

numerics.reciprocal = by_division
print("FLOAT", inspection.compile_attention({cap}).float_instructions)
print("FLOAT", inspection.compile_pack({cap}, operand="*fp16").float_instructions)
print("FLOAT", inspection.compile_attention({cap}, out="*fp16").float_instructions)
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
@pytest.mark.parametrize(("dim", "tail"), [(64, 32), (32, 64)], ids=["vit_N197_D64", "swin_N49_D32"])
def test_int8_attention_is_integer_only(capability, dim, tail, tmp_path):
    assert _float_instructions(PROOF.format(cap=capability, dim=dim, tail=tail), tmp_path) == ["FLOAT []"] * 4


@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
def test_the_proof_catches_division_and_float_operands(capability, tmp_path):
    division, float_in, float_out = _float_instructions(VARIANT.format(cap=capability), tmp_path)
    assert "MUFU" in division
    assert float_in != "FLOAT []"
    assert float_out != "FLOAT []"
