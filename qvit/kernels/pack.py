"""Quantize q, k, v once, into the layout that the attention kernel reads.

q and k become rows of int8, V becomes V^T with its keys reordered (numerics.reorder_keys); all are padded with zeros to
whole tiles. Beside them goes V's sum over each tile of keys, which the kernel's signed weights need.
"""

import triton
import triton.language as tl

from qvit.kernels import numerics


@triton.jit
def _pack_rows(
    x_ptr, stride_n, stride_d, out_ptr, mult, zero, o_n, o_d, N, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    mask = (o_n < N)[:, None] & (o_d < D)[None, :]
    x = tl.load(x_ptr + o_n.to(tl.int64)[:, None] * stride_n + o_d.to(tl.int64)[None, :] * stride_d, mask=mask, other=0)
    x = numerics.quantize(x, mult, zero, HALF, INTERPRET)
    tl.store(out_ptr + o_n[:, None] * DP + o_d[None, :], tl.where(mask, x, 0))


@triton.jit
def pack_kernel(
    q_ptr, k_ptr, v_ptr, constants_ptr, q8_ptr, k8_ptr, vt_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, H, N, NP,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) float or int8 -> q8, k8 (B, H, NP, DP), vt (B, H, DP, NP), sum (B, H, NP / TILE, DP)."""
    i_n = tl.program_id(0)
    i_h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = i_h.to(tl.int64)
    o_n = i_n * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, DP)
    q_mult, k_mult, k_zero, v_mult, zero = numerics.load_multipliers(constants_ptr + i_h * (6 * D + 8), o_d, D)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    out = (b * H + i_h) * NP * DP
    _pack_rows(q_ptr, stride_qn, stride_qd, q8_ptr + out, q_mult, zero, o_n, o_d, N, D, DP, HALF, INTERPRET)
    _pack_rows(k_ptr, stride_kn, stride_kd, k8_ptr + out, k_mult, k_zero, o_n, o_d, N, D, DP, HALF, INTERPRET)
    o_k = i_n * TILE + numerics.key_at(tl.arange(0, TILE))
    mask = (o_k < N)[:, None] & (o_d < D)[None, :]
    v = tl.load(
        v_ptr + o_k.to(tl.int64)[:, None] * stride_vn + o_d.to(tl.int64)[None, :] * stride_vd, mask=mask, other=0
    )
    v = numerics.quantize(v, v_mult, zero, HALF, INTERPRET)
    tl.store(vt_ptr + out + o_d[:, None] * NP + o_n[None, :], tl.trans(v))
    o_sum = ((b * H + i_h) * (NP // TILE) + i_n) * DP + o_d
    tl.store(sum_ptr + o_sum, tl.sum(v.to(tl.int32), 0))
