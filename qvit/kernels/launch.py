"""Launch the kernels: workspaces, grids and launch configurations. Nothing here changes a result."""

from __future__ import annotations

import contextlib

import torch
import triton

from qvit.kernels import attend, numerics, pack, paper

GRID_Z = 65535  # largest third dimension of a grid


def _device_guard(x: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _ceil_to(x: int, multiple: int) -> int:
    return (x + multiple - 1) // multiple * multiple


def _group_magic(groups: int) -> int:
    """ceil(2^32 / groups) as an int32: b - groups * high_word(b * magic) is b % groups for b and groups under 2^16."""
    magic = -(-(1 << 32) // groups) % (1 << 32)
    return magic - (1 << 32) if magic >= 1 << 31 else magic


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
    block_m: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Pack q, k and V^T, then attend, into ``out`` (B, N, H, D).

    Args:
        q, k, v: (B, H, N, D), one type, any strides.
        constants: int32 (H, 6 * D + 8).
        bias: int32 (G, H, N, N) in exponent units with unit last stride and B a multiple of G, or None.
        out: Contiguous result, int8 or float.
        high: Two planes and the curve.
        out_up: Bits the accumulator moves up before an int8 output's multiply.
        block_m, num_warps, num_stages: Launch configuration; results do not depend on it.
    """
    batch, heads, tokens, head_dim = q.shape
    padded_dim = max(32, triton.next_power_of_2(head_dim))
    padded = _ceil_to(tokens, pack.TILE)
    groups = 1 if bias is None else bias.shape[0]
    chunk = min(batch, GRID_Z // groups * groups)
    rows = torch.empty(3, chunk, heads, padded * padded_dim, dtype=torch.int8, device=q.device)
    sums = torch.empty(chunk, heads, padded // pack.TILE, padded_dim, dtype=torch.int32, device=q.device)
    rest = tokens % pack.TILE
    tail = 0 if rest == 0 else 32 if rest <= 32 else 64
    bias_strides = (0, 0, 0) if bias is None else (bias.stride(0) if groups > 1 else 0, bias.stride(1), bias.stride(2))
    with _device_guard(q):
        for start in range(0, batch, chunk):
            span = slice(start, start + chunk)
            qs, ks, vs = q[span], k[span], v[span]
            size = qs.shape[0]
            pack.pack_kernel[(padded // pack.TILE, heads, size)](
                qs, ks, vs, constants, rows[0], rows[1], rows[2], sums,
                *qs.stride(), *ks.stride(), *vs.stride(), heads, tokens, padded,
                D=head_dim, DP=padded_dim, TILE=pack.TILE, INT8=q.dtype == torch.int8,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            attend.attend_kernel[(triton.cdiv(tokens, block_m), heads, size)](
                rows[0], rows[1], rows[2], sums, sums if bias is None else bias, constants, out[span],
                *bias_strides, groups, _group_magic(groups), heads, tokens, padded, tokens // pack.TILE, out_up,
                D=head_dim, DP=padded_dim, TAIL=tail, BIAS=bias is not None, HIGH=high,
                INT8_OUT=out.dtype == torch.int8, BLOCK_M=block_m, INTERPRET=numerics.INTERPRETED,
                num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
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
    padded_dim = max(32, triton.next_power_of_2(head_dim))
    groups = 1 if bias is None else bias.shape[0]
    chunk = min(batch, GRID_Z // groups * groups)
    bias_strides = (0, 0, 0) if bias is None else (bias.stride(0) if groups > 1 else 0, bias.stride(1), bias.stride(2))
    with _device_guard(q):
        for start in range(0, batch, chunk):
            span = slice(start, start + chunk)
            qs, ks, vs = q[span], k[span], v[span]
            paper.paper_kernel[(triton.cdiv(tokens, 64), heads, qs.shape[0])](
                qs, ks, vs, out if bias is None else bias, constants, out[span],
                *qs.stride(), *ks.stride(), *vs.stride(), *bias_strides, groups, _group_magic(groups), heads, tokens,
                D=head_dim, DP=padded_dim, BIAS=bias is not None, num_warps=4, num_stages=2,
            )  # fmt: skip
