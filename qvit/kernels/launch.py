"""Launch the kernels: workspaces, grids and launch configurations. Nothing here changes a result."""

from __future__ import annotations

import contextlib
import functools

import torch
import triton

from qvit.kernels import attend, fused, numerics, pack, paper

GRID_Z = 65535  # largest third dimension of a grid
TILE = 64  # keys of a tile
FUSED_TOKENS = 320  # longest sequence whose scores stay in registers


def _device_guard(x: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _group_magic(groups: int) -> int:
    """ceil(2^32 / groups) as an int32: b - groups * high_word(b * magic) is b % groups for b and groups under 2^16."""
    magic = -(-(1 << 32) // groups) % (1 << 32)
    return magic - (1 << 32) if magic >= 1 << 31 else magic


def tiles(tokens: int) -> tuple[int, int]:
    """Full tiles of keys, and columns of the last, partial one."""
    full, rest = divmod(tokens, TILE)
    return full, 0 if rest == 0 else 32 if rest <= 32 else TILE


def padded_dim(head_dim: int) -> int:
    """Channels that the kernels work on: a power of two, and what an int8 product needs."""
    return max(32, triton.next_power_of_2(head_dim))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    high: bool,
    out_up: int,
    half: bool,
) -> None:
    """Integer attention into ``out`` (B, N, H, D), by one launch for short sequences, else by two.

    Args:
        q, k, v: (B, H, N, D), one type, any strides.
        constants: int32 (H, 6 * D + 8).
        bias: int32 (G, H, N, N) in exponent units with unit last stride and B a multiple of G, or None.
        out: Contiguous result, int8 or float.
        high: Two planes and the curve.
        out_up: Bits the accumulator moves up before an int8 output's multiply.
        half: The constants are exact in float16.
    """
    chunk = _chunk(q.shape[0], bias)
    # The fused kernel's offsets inside a head are 32-bit; the packing kernel's are not.
    reach = max(q.shape[2] * x.stride(2) + q.shape[3] * x.stride(3) for x in (q, k, v))
    launch = fused_attention if q.shape[2] <= FUSED_TOKENS and reach < 2**31 else packed_attention
    with _device_guard(q):
        for start in range(0, q.shape[0], chunk):
            span = slice(start, start + chunk)
            launch(q[span], k[span], v[span], constants, bias, out[span], high=high, out_up=out_up, half=half)


def _chunk(batch: int, bias: torch.Tensor | None) -> int:
    """Batches of a launch: a grid's third dimension holds, and a whole number of a bias's windows."""
    groups = 1 if bias is None else bias.shape[0]
    return min(batch, GRID_Z // groups * groups)


def _bias_arguments(bias: torch.Tensor | None, unused: torch.Tensor) -> tuple:
    """A pointer, three strides, the number of windows and what divides by it."""
    if bias is None:
        return unused, (0, 0, 0, 1, 0)
    groups = bias.shape[0]
    return bias, (bias.stride(0) if groups > 1 else 0, bias.stride(1), bias.stride(2), groups, _group_magic(groups))


@functools.cache
def _processors(index: int | None) -> int:
    """Streaming multiprocessors of a GPU; of the interpreter, one."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _programs_per_head(heads: int, blocks: int, processors: int) -> int:
    """How many programs share a head's blocks of queries. Each quantizes K and V anew, so only to fill the GPU."""
    return max(1, min(blocks, processors // heads))


def fused_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, block_m=64, step=None, num_warps=None, num_stages=1
) -> None:
    """One launch; ``step`` programs share a head's blocks of ``block_m`` queries. See :func:`attention`."""
    batch, heads, tokens, head_dim = q.shape
    full, tail = tiles(tokens)
    if step is None:
        step = _programs_per_head(batch * heads, triton.cdiv(tokens, block_m), _processors(q.device.index))
    if num_warps is None:
        num_warps = 2 if tokens <= TILE else 4
    addend, bias_arguments = _bias_arguments(bias, constants)
    fused.fused_kernel[(min(step, triton.cdiv(tokens, block_m)), heads, batch)](
        q, k, v, addend, constants, out, *q.stride(), *k.stride(), *v.stride(), *bias_arguments, heads,
        N=tokens, D=head_dim, DP=padded_dim(head_dim), TILE=TILE, TILES=full, TAIL=tail, STEP=step, BLOCK_M=block_m,
        BIAS=bias is not None, HIGH=high, INT8_OUT=out.dtype == torch.int8, OUT_UP=out_up, HALF=half,
        INTERPRET=numerics.INTERPRETED, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def packed_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, block_m=64, num_warps=4, num_stages=3
) -> None:
    """Two launches: pack q, k and V^T, then attend. See :func:`attention`."""
    batch, heads, tokens, head_dim = q.shape
    full, tail = tiles(tokens)
    columns, padded = padded_dim(head_dim), triton.cdiv(tokens, TILE) * TILE
    rows = torch.empty(3, batch, heads, padded * columns, dtype=torch.int8, device=q.device)
    sums = torch.empty(batch, heads, padded // TILE, columns, dtype=torch.int32, device=q.device)
    common = {"D": head_dim, "DP": columns, "INTERPRET": numerics.INTERPRETED, "enable_fp_fusion": False}
    pack.pack_kernel[(padded // TILE, heads, batch)](
        q, k, v, constants, rows[0], rows[1], rows[2], sums,
        *q.stride(), *k.stride(), *v.stride(), heads, tokens, padded, TILE=TILE, HALF=half, num_warps=4, **common,
    )  # fmt: skip
    addend, bias_arguments = _bias_arguments(bias, sums)
    attend.attend_kernel[(triton.cdiv(tokens, block_m), heads, batch)](
        rows[0], rows[1], rows[2], sums, addend, constants, out, *bias_arguments, heads, tokens, padded, full, out_up,
        TAIL=tail, BIAS=bias is not None, HIGH=high, INT8_OUT=out.dtype == torch.int8, BLOCK_M=block_m,
        num_warps=num_warps, num_stages=num_stages, **common,
    )  # fmt: skip


def attention_paper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """QFlash as published, into ``out`` (B, N, H, D) int8. q, k, v: (B, H, N, D) int8; bias int32 in score units."""
    batch, heads, tokens, head_dim = q.shape
    addend, bias_arguments = _bias_arguments(bias, constants)
    chunk = _chunk(batch, bias)
    with _device_guard(q):
        for start in range(0, batch, chunk):
            span = slice(start, start + chunk)
            qs, ks, vs = q[span], k[span], v[span]
            paper.paper_kernel[(triton.cdiv(tokens, 64), heads, qs.shape[0])](
                qs, ks, vs, addend, constants, out[span],
                *qs.stride(), *ks.stride(), *vs.stride(), *bias_arguments, heads, tokens,
                D=head_dim, DP=padded_dim(head_dim), BIAS=bias is not None, num_warps=4, num_stages=2,
            )  # fmt: skip
