"""Chains of one integer operation, to count and time what it costs beside a multiply-add."""

import triton
import triton.language as tl

OPERATIONS = ("multiply-add", "shift", "scale release", "division")
LENGTH = 64  # operations one after the other, each on the result of the one before
BLOCK, WARPS = 1024, 4


@triton.jit
def chain_kernel(x_ptr, out_ptr, by, OPERATION: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """x (a multiple of BLOCK) -> out, int32; every link is a multiply-add, and after it the operation."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    for link in tl.static_range(LENGTH):
        x = x * by + link
        if OPERATION == "shift":
            x = x >> by
        elif OPERATION == "scale release":
            x = ((x.to(tl.int64) * by + 536870912) >> 30).to(tl.int32)
        elif OPERATION == "division":
            x = x // by
    tl.store(out_ptr + i, x)
