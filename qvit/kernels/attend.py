"""Integer attention over packed operands: one program owns BLOCK_M queries of one head and meets all its keys twice.

The first pass finds each row's exact maximum, the second makes the weights and sums them against V. Meeting the keys
twice costs one more int8 product, which the tensor cores have to spare, and buys a result that no tile size can change.
"""

import triton
import triton.language as tl

from qvit.kernels import numerics


@triton.jit
def _scores(
    q, k_ptr, bias_ptr, stride_bias_m, o_m, o_n, mult, masked, N, MASK: tl.constexpr, BIAS: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Integer scores [BLOCK_M, keys], with a bias their exponents; masked keys and those past N hold ``masked``."""
    o_d = tl.arange(0, DP)
    k = tl.load(k_ptr + o_n[None, :] * DP + o_d[:, None])
    e = tl.dot(q, k, out_dtype=tl.int32)
    if BIAS:
        where = (o_m < N)[:, None] & (o_n < N)[None, :]
        bias = tl.load(bias_ptr + o_m.to(tl.int64)[:, None] * stride_bias_m + o_n[None, :], mask=where, other=masked)
        e = tl.where(bias == masked, masked, e * mult + bias)
    elif MASK:
        e = tl.where((o_n < N)[None, :], e, masked)
    return e


@triton.jit
def _add_tile(
    acc, low, sums, low_sums, columns, q, base, k_ptr, vt_ptr, sum_ptr, bias_ptr, stride_bias_m, o_m, start, mult,
    masked, step, exp_bits, N, NP,
    W: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    o_n = start + tl.arange(0, W)
    o_d = tl.arange(0, DP)
    e = _scores(q, k_ptr, bias_ptr, stride_bias_m, o_m, o_n, mult, masked, N, MASK, BIAS, DP)
    vt = tl.load(vt_ptr + o_d[:, None] * NP + o_n[None, :])
    columns += tl.load(sum_ptr + start // 64 * DP + o_d)
    acc, low, sums, low_sums = numerics.accumulate(
        acc, low, sums, low_sums, e, base, vt, step, exp_bits, W, HIGH, M, INTERPRET
    )  # fmt: skip
    return acc, low, sums, low_sums, columns


@triton.jit(do_not_specialize=["group_magic", "full_tiles", "out_up"])
def attend_kernel(
    q_ptr, k_ptr, vt_ptr, sum_ptr, bias_ptr, constants_ptr, out_ptr,
    stride_bias_g, stride_bias_h, stride_bias_m, groups, group_magic, H, N, NP, full_tiles, out_up,
    D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr,
    INT8_OUT: tl.constexpr, BLOCK_M: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """q, k (B, H, NP, DP), vt (B, H, DP, NP) int8, sum (B, H, NP / 64, DP) int32 -> out (B, N, H, D).

    bias: int32 (G, H, N, N) in exponent units; batch b uses bias[b % groups].
    """
    TILE: tl.constexpr = 64
    i_m = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    head = i_b.to(tl.int64) * H + i_h
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, DP)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    mult, exp_bits, step, masked = numerics.exponent_units(c_ptr, D, BIAS)
    k_ptr += head * NP * DP
    vt_ptr += head * NP * DP
    sum_ptr += head * (NP // TILE) * DP
    if BIAS:
        bias_ptr = numerics.bias_of(bias_ptr, i_b, i_h, stride_bias_g, stride_bias_h, groups, group_magic)
    q = tl.load(q_ptr + head * NP * DP + o_m[:, None] * DP + o_d[None, :], mask=(o_m < NP)[:, None], other=0)

    best = tl.full([BLOCK_M, TILE], masked, tl.int32)
    for start in tl.range(0, full_tiles * TILE, TILE):
        o_n = start + tl.arange(0, TILE)
        best = tl.maximum(best, _scores(q, k_ptr, bias_ptr, stride_bias_m, o_m, o_n, mult, masked, N, False, BIAS, DP))
    top = tl.max(best, 1)
    if TAIL:
        o_t = full_tiles * TILE + tl.arange(0, TAIL)
        top = tl.maximum(
            top, tl.max(_scores(q, k_ptr, bias_ptr, stride_bias_m, o_m, o_t, mult, masked, N, True, BIAS, DP), 1)
        )

    base = numerics.distance_base(top, step, exp_bits, BIAS)
    acc = tl.zeros([BLOCK_M, DP], tl.int32)
    low = tl.zeros([BLOCK_M, DP], tl.int32)
    sums = tl.zeros([BLOCK_M, 16], tl.int32)
    low_sums = tl.zeros([BLOCK_M, 16], tl.int32)
    columns = tl.zeros([DP], tl.int32)
    for start in tl.range(0, full_tiles * TILE, TILE):
        acc, low, sums, low_sums, columns = _add_tile(
            acc, low, sums, low_sums, columns, q, base, k_ptr, vt_ptr, sum_ptr, bias_ptr, stride_bias_m, o_m, start,
            mult, masked, step, exp_bits, N, NP, TILE, False, BIAS, HIGH, DP, BLOCK_M, INTERPRET,
        )  # fmt: skip
    if TAIL:
        acc, low, sums, low_sums, columns = _add_tile(
            acc, low, sums, low_sums, columns, q, base, k_ptr, vt_ptr, sum_ptr, bias_ptr, stride_bias_m, o_m,
            full_tiles * TILE, mult, masked, step, exp_bits, N, NP, TAIL, True, BIAS, HIGH, DP, BLOCK_M, INTERPRET,
        )  # fmt: skip

    out = numerics.normalise(
        acc, low, tl.max(sums, 1), tl.max(low_sums, 1), columns, c_ptr, o_d, out_up, full_tiles * TILE + TAIL, D, HIGH,
        INT8_OUT, out_ptr.dtype.element_ty, INTERPRET,
    )  # fmt: skip
    o_out = ((i_b.to(tl.int64) * N + o_m[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(out_ptr + o_out, out, mask=(o_m < N)[:, None] & (o_d < D)[None, :])
