"""QFlash (arXiv 2604.25306): tiles of 64 keys, running maximum, scale release in 64 bits.

Here to be measured against. ``qvit.reference.attention_paper`` defines it; where the published code differs,
docs/numerics.md says so.
"""

import triton
import triton.language as tl

from qvit.kernels import numerics


@triton.jit
def _shift_exp2(x, one, exp_mult):
    octaves = (x * exp_mult) >> 16
    remainder = x + octaves * one
    return ((remainder >> 1) + one) >> tl.minimum(tl.maximum(octaves, 0), 31)


@triton.jit
def _scale_release(x, factor, mult):
    return ((x.to(tl.int64) * factor.to(tl.int64) * mult.to(tl.int64) + 536870912) >> 30).to(tl.int32)


@triton.jit(do_not_specialize=["group_magic"])
def paper_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_bias_g, stride_bias_h, stride_bias_m, groups, group_magic, H, N,
    D: tl.constexpr, DP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) int8 -> out (B, N, H, D) int8 at V's scale."""
    TILE: tl.constexpr = 64
    MINIMUM: tl.constexpr = -(1 << 20)
    i_m = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, DP)
    one = tl.load(constants_ptr)
    exp_mult = tl.load(constants_ptr + 1)
    requant = tl.load(constants_ptr + 2)
    release = tl.load(constants_ptr + 4)
    b = i_b.to(tl.int64)
    h = i_h.to(tl.int64)
    col_mask = (o_d < D)[None, :]
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    if BIAS:
        bias_ptr = numerics.bias_of(bias_ptr, i_b, i_h, stride_bias_g, stride_bias_h, groups, group_magic)
    q = tl.load(
        q_ptr + o_m.to(tl.int64)[:, None] * stride_qn + o_d.to(tl.int64)[None, :] * stride_qd,
        mask=(o_m < N)[:, None] & col_mask,
        other=0,
    )
    top = tl.full([TILE], MINIMUM, tl.int32)
    row_sum = tl.zeros([TILE], tl.int32)
    acc = tl.zeros([TILE, DP], tl.int32)
    for start in tl.range(0, N, TILE):
        o_n = start + tl.arange(0, TILE)
        row_mask = (o_n < N)[:, None]
        k = tl.load(
            k_ptr + o_n.to(tl.int64)[:, None] * stride_kn + o_d.to(tl.int64)[None, :] * stride_kd,
            mask=row_mask & col_mask,
            other=0,
        )
        score = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        if BIAS:
            where = (o_m < N)[:, None] & (o_n < N)[None, :]
            score += tl.load(bias_ptr + o_m.to(tl.int64)[:, None] * stride_bias_m + o_n[None, :], mask=where, other=0)
        score = tl.where((o_n < N)[None, :], score, MINIMUM)
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = (_shift_exp2(score - new_top[:, None], one, exp_mult) * requant + 32768) >> 16
        weight = tl.minimum(weight, 127).to(tl.int8)
        alpha = _shift_exp2(top - new_top, one, exp_mult)
        row_sum = _scale_release(row_sum, alpha, release) + tl.sum(weight.to(tl.int32), 1)
        v = tl.load(
            v_ptr + o_n.to(tl.int64)[:, None] * stride_vn + o_d.to(tl.int64)[None, :] * stride_vd,
            mask=row_mask & col_mask,
            other=0,
        )
        acc = _scale_release(acc, alpha[:, None], release) + tl.dot(weight, v, out_dtype=tl.int32)
        top = new_top
    # Truncation toward zero by magnitudes, so that it does not hang on how a signed division rounds.
    divisor = tl.where(row_sum == 0, 1, row_sum)
    magnitude = tl.abs(acc).to(tl.uint32) // tl.abs(divisor).to(tl.uint32)[:, None]
    magnitude = tl.minimum(magnitude, 128).to(tl.int32)
    out = tl.where((acc < 0) != (divisor < 0)[:, None], -magnitude, tl.minimum(magnitude, 127))
    o_out = ((b * N + o_m[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(out_ptr + o_out, out.to(tl.int8), mask=(o_m < N)[:, None] & col_mask)
