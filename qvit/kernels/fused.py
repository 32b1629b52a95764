"""Integer attention in one launch, for sequences whose scores fit in registers (N <= 320).

A program owns one head. It quantizes K and V once and keeps them in shared memory; then it takes its blocks of queries
one by one: all scores, their exact maximum, the weights, the weighted values. Nothing intermediate reaches memory.
"""

import triton
import triton.language as tl

from qvit.kernels import numerics

PACKED = tl.constexpr(2)  # for BIAS: 0 for none, 1 for rows of keys, 2 for a packed one


@triton.jit
def _load(ptr, stride_n, stride_d, o_n, o_d, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MASK: tl.constexpr):
    x_ptr = ptr + o_n[:, None] * stride_n + o_d[None, :] * stride_d
    if MASK:
        return tl.load(x_ptr, mask=(o_n < N)[:, None] & (o_d < D)[None, :], other=0)
    elif D < DP:
        return tl.load(x_ptr, mask=(o_d < D)[None, :], other=0)
    else:
        return tl.load(x_ptr)


@triton.jit
def _value_rows(
    v_ptr, stride_n, stride_d, start: tl.constexpr, J: tl.constexpr, o_d, mult, zero, N: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # Every fourth position of the tile's reordered keys: position 4g + J holds the key that reorder_keys puts there.
    g = tl.arange(0, W // 4)
    key = start + g // 4 * 16 + J // 2 * 8 + g % 4 * 2 + J % 2
    x = _load(v_ptr, stride_n, stride_d, key, o_d, N, D, DP, start + W > N)
    return numerics.quantize(x, mult, zero, HALF, INTERPRET)


@triton.jit
def _values(
    v_ptr, stride_n, stride_d, start: tl.constexpr, o_d, mult, zero, N: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """V^T of a tile, keys reordered, int8 [DP, W].

    8-bit operands must lie contiguous along the keys. Four rows are loaded apart and joined, so that each thread holds
    four neighbouring keys of a channel and moves them as one word.
    """
    a = _value_rows(v_ptr, stride_n, stride_d, start, 0, o_d, mult, zero, N, D, DP, W, HALF, INTERPRET)
    b = _value_rows(v_ptr, stride_n, stride_d, start, 1, o_d, mult, zero, N, D, DP, W, HALF, INTERPRET)
    c = _value_rows(v_ptr, stride_n, stride_d, start, 2, o_d, mult, zero, N, D, DP, W, HALF, INTERPRET)
    d = _value_rows(v_ptr, stride_n, stride_d, start, 3, o_d, mult, zero, N, D, DP, W, HALF, INTERPRET)
    return join_rows(a, b, c, d, DP, W)


@triton.jit
def join_rows(a, b, c, d, DP: tl.constexpr, W: tl.constexpr):
    """[DP, W] of four tensors [W / 4, DP] that hold every fourth row."""
    vt = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (1, 0, 2, 3))
    return tl.reshape(vt, [DP, W])


@triton.jit
def _packed_rows(o_m):
    """Of :func:`qvit.reference.pack_window_bias`, and beside it the keys' part of an offset."""
    return o_m // 16 * 1024 + o_m % 8 * 16 + o_m % 16 // 8 * 2


@triton.jit
def _packed_keys(o_n):
    return o_n // 8 * 128 + o_n % 8 // 2 * 4 + o_n % 2


@triton.jit
def _scores(
    q, k, bias_ptr, stride_bias_m, o_m, start: tl.constexpr, mult, masked, N: tl.constexpr, W: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Integer scores [BLOCK_M, W], with a bias their exponents; masked keys and those past N hold ``masked``."""
    e = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    o_n = start + tl.arange(0, W)
    if BIAS:
        where = (o_m < N)[:, None] & (o_n < N)[None, :]
        if BIAS == PACKED:
            o_b = _packed_rows(o_m)[:, None] + _packed_keys(o_n)[None, :]
        else:
            o_b = o_m[:, None] * stride_bias_m + o_n[None, :]
        bias = tl.load(bias_ptr + o_b, mask=where, other=masked)
        e = tl.where(bias == masked, masked, e * mult + bias)
    elif MASK:
        e = tl.where((o_n < N)[None, :], e, masked)
    return e


@triton.jit
def attend_block(
    q, ks, vts, columns, bias_ptr, stride_bias_m, o_m, o_d, mult, exp_bits, step, masked, c_ptr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, INT8_OUT: tl.constexpr, OUT_UP: tl.constexpr,
    OUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Output [BLOCK_M, DP] of the queries o_m, int8, over tiles of keys and values."""
    COUNT: tl.constexpr = TILES + (TAIL > 0)
    scores = ()
    for i in tl.static_range(COUNT):
        s = _scores(
            q, ks[i], bias_ptr, stride_bias_m, o_m, i * TILE, mult, masked, N, TILE if i < TILES else TAIL, i >= TILES,
            BIAS,
        )  # fmt: skip
        if i == 0:
            top = tl.max(s, 1)
        else:
            top = tl.maximum(top, tl.max(s, 1))
        scores = scores + (s,)
    base = numerics.distance_base(top, step, exp_bits, BIAS)
    acc = tl.zeros([BLOCK_M, DP], tl.int32)
    low = tl.zeros([BLOCK_M, DP], tl.int32)
    sums = tl.zeros([BLOCK_M, 16], tl.int32)
    low_sums = tl.zeros([BLOCK_M, 16], tl.int32)
    for i in tl.static_range(COUNT):
        acc, low, sums, low_sums = numerics.accumulate(
            acc, low, sums, low_sums, scores[i], base, vts[i], step, exp_bits, TILE if i < TILES else TAIL, HIGH,
            BLOCK_M, INTERPRET,
        )  # fmt: skip
    return numerics.normalise(
        acc, low, tl.max(sums, 1), tl.max(low_sums, 1), columns, c_ptr, o_d, OUT_UP, TILES * TILE + TAIL, D, HIGH,
        INT8_OUT, OUT, INTERPRET,
    )  # fmt: skip


@triton.jit
def fused_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_bias_g, stride_bias_h, stride_bias_m, groups, group_magic, H,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, INT8_OUT: tl.constexpr,
    OUT_UP: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) float or int8 -> out (B, N, H, D). Program (i, h, b) takes query blocks i, i + STEP, ...

    N is TILES full tiles of keys and, with TAIL > 0, a last one of TAIL columns.
    """
    COUNT: tl.constexpr = TILES + (TAIL > 0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    b = i_b.to(tl.int64)
    h = i_h.to(tl.int64)
    o_d = tl.arange(0, DP)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    mult, exp_bits, step, masked = numerics.exponent_units(c_ptr, D, BIAS)
    q_mult, k_mult, k_zero, v_mult, zero = numerics.load_multipliers(c_ptr, o_d, D)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    out_ptr += b * (N * H * D) + i_h * D
    if BIAS:
        bias_ptr = numerics.bias_of(bias_ptr, i_b, i_h, stride_bias_g, stride_bias_h, groups, group_magic)

    ks = ()
    vts = ()
    columns = tl.zeros([16, DP], tl.int32)
    for i in tl.static_range(COUNT):
        o_n = i * TILE + tl.arange(0, TILE if i < TILES else TAIL)
        k = _load(k_ptr, stride_kn, stride_kd, o_n, o_d, N, D, DP, i >= TILES)
        ks = ks + (numerics.quantize(k, k_mult, k_zero, HALF, INTERPRET),)
        vt = _values(
            v_ptr, stride_vn, stride_vd, i * TILE, o_d, v_mult, zero, N, D, DP, TILE if i < TILES else TAIL, HALF,
            INTERPRET,
        )  # fmt: skip
        vts = vts + (vt,)
        ones = tl.full([16, TILE if i < TILES else TAIL], 1, tl.int8)
        columns = tl.dot(ones, tl.trans(vt), columns, out_dtype=tl.int32)
    columns = tl.max(columns, 0)

    for i_m in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_M), STEP):
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        q = _load(q_ptr, stride_qn, stride_qd, o_m, o_d, N, D, DP, True)
        q = numerics.quantize(q, q_mult, zero, HALF, INTERPRET)
        out = attend_block(
            q, ks, vts, columns, bias_ptr, stride_bias_m, o_m, o_d, mult, exp_bits, step, masked, c_ptr, N, D, DP, TILE,
            TILES, TAIL, BLOCK_M, BIAS, HIGH, INT8_OUT, OUT_UP, out_ptr.dtype.element_ty, INTERPRET,
        )  # fmt: skip
        o_out = o_m[:, None] * (H * D) + o_d[None, :]
        tl.store(out_ptr + o_out, out, mask=(o_m < N)[:, None] & (o_d < D)[None, :])
