"""Quantize q, k, v once, into the layout that the attention kernel reads.

q and k become rows of int8, V becomes V^T with its keys reordered (numerics.reorder_keys); all are padded with zeros to
whole tiles. Beside them goes 128 times V's sum over each tile of keys, which the signed weights of the kernel need.
"""

import triton
import triton.language as tl

from qvit.kernels import numerics

TILE = 64  # keys a program packs


@triton.jit
def _pack_rows(
    x_ptr,
    x_base,
    stride_n,
    stride_d,
    out_ptr,
    mult,
    offset,
    o_n,
    o_d,
    row_mask,
    col_mask,
    N,
    INT8: tl.constexpr,
    DP: tl.constexpr,
):
    x = tl.load(
        x_ptr + x_base + o_n.to(tl.int64)[:, None] * stride_n + o_d[None, :] * stride_d,
        mask=row_mask[:, None] & col_mask[None, :], other=0,
    )  # fmt: skip
    if not INT8:
        x = numerics.quantize(x.to(tl.float32) - offset[None, :], mult[None, :])
        x = tl.where(row_mask[:, None], x, 0)
    tl.store(out_ptr + o_n[:, None] * DP + o_d[None, :], x)


@triton.jit
def pack_kernel(
    q_ptr, k_ptr, v_ptr, constants_ptr, q8_ptr, k8_ptr, vt_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, H, N, NP,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) float or int8 -> q8, k8 (B, H, NP, DP), vt (B, H, DP, NP), sum (B, H, NP / TILE, DP)."""
    i_n = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = i_n * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, DP)
    row_mask = o_n < N
    col_mask = o_d < D
    c_ptr = constants_ptr + i_h * (6 * D + 8) + o_d
    q_mult = tl.load(c_ptr, mask=col_mask, other=0).to(tl.float32, bitcast=True)
    k_mult = tl.load(c_ptr + D, mask=col_mask, other=0).to(tl.float32, bitcast=True)
    k_offset = tl.load(c_ptr + 2 * D, mask=col_mask, other=0).to(tl.float32, bitcast=True)
    v_mult = tl.load(c_ptr + 3 * D, mask=col_mask, other=0).to(tl.float32, bitcast=True)
    zero = tl.zeros([DP], tl.float32)
    out = (i_b * H + i_h) * NP * DP
    _pack_rows(
        q_ptr,
        i_b * stride_qb + i_h * stride_qh,
        stride_qn,
        stride_qd,
        q8_ptr + out,
        q_mult,
        zero,
        o_n,
        o_d,
        row_mask,
        col_mask,
        N,
        INT8,
        DP,
    )
    _pack_rows(
        k_ptr,
        i_b * stride_kb + i_h * stride_kh,
        stride_kn,
        stride_kd,
        k8_ptr + out,
        k_mult,
        k_offset,
        o_n,
        o_d,
        row_mask,
        col_mask,
        N,
        INT8,
        DP,
    )
    o_k = i_n * TILE + numerics.key_at(tl.arange(0, TILE))
    v = tl.load(
        v_ptr + i_b * stride_vb + i_h * stride_vh + o_k.to(tl.int64)[:, None] * stride_vn + o_d[None, :] * stride_vd,
        mask=(o_k < N)[:, None] & col_mask[None, :], other=0,
    )  # fmt: skip
    if not INT8:
        v = numerics.quantize(v.to(tl.float32), v_mult[None, :])
    tl.store(vt_ptr + out + o_d[:, None] * NP + o_n[None, :], tl.trans(v))
    o_sum = ((i_b * H + i_h) * (NP // TILE) + i_n) * DP + o_d
    tl.store(sum_ptr + o_sum, tl.sum(v.to(tl.int32), 0) * 128)
