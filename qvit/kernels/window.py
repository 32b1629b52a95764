"""Integer attention in windows of an image, for Swin: shift, padding, partition and reverse are folded into addresses.

A program owns one head of one window. A table gives the image's row that each of the window's positions takes; -1 is a
position outside the image, whose q, k and v are those of a zero input: the projection's bias.
"""

import triton
import triton.language as tl

from qvit.kernels import fused, numerics


@triton.jit
def _load(ptr, pad_ptr, rows_ptr, stride_n, o_n, o_d, N: tl.constexpr, D: tl.constexpr, PADS: tl.constexpr):
    """Rows of the window's positions o_n, [positions, DP]; positions past N are zero."""
    row = tl.load(rows_ptr + o_n, mask=o_n < N, other=-1)
    mask = (row >= 0)[:, None] & (o_d < D)[None, :]
    x = tl.load(ptr + row.to(tl.int64)[:, None] * stride_n + o_d[None, :], mask=mask, other=0)
    if PADS:
        pad = tl.load(pad_ptr + o_d, mask=o_d < D, other=0)
        x = tl.where(((row < 0) & (o_n < N))[:, None], pad[None, :], x)
    return x


@triton.jit
def _value_rows(
    v_ptr, pad_ptr, rows_ptr, stride_n, start: tl.constexpr, J: tl.constexpr, o_d, mult, zero, N: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, PADS: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # Every fourth position of the tile's reordered keys, as in fused.py.
    g = tl.arange(0, W // 4)
    key = start + g // 4 * 16 + J // 2 * 8 + g % 4 * 2 + J % 2
    x = _load(v_ptr, pad_ptr, rows_ptr, stride_n, key, o_d, N, D, PADS)
    return numerics.quantize(x, mult, zero, HALF, INTERPRET)


@triton.jit
def _values(
    v_ptr, pad_ptr, rows_ptr, stride_n, start: tl.constexpr, o_d, mult, zero, N: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, W: tl.constexpr, PADS: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    a = _value_rows(v_ptr, pad_ptr, rows_ptr, stride_n, start, 0, o_d, mult, zero, N, D, W, PADS, HALF, INTERPRET)
    b = _value_rows(v_ptr, pad_ptr, rows_ptr, stride_n, start, 1, o_d, mult, zero, N, D, W, PADS, HALF, INTERPRET)
    c = _value_rows(v_ptr, pad_ptr, rows_ptr, stride_n, start, 2, o_d, mult, zero, N, D, W, PADS, HALF, INTERPRET)
    d = _value_rows(v_ptr, pad_ptr, rows_ptr, stride_n, start, 3, o_d, mult, zero, N, D, W, PADS, HALF, INTERPRET)
    return fused.join_rows(a, b, c, d, DP, W)


@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, pad_ptr, rows_ptr, pattern_ptr, bias_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_bias_g, stride_bias_h, stride_bias_m, L, H,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BIAS: tl.constexpr, PADS: tl.constexpr, HIGH: tl.constexpr, INT8_OUT: tl.constexpr,
    OUT_UP: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """q, k, v (B, L, H, D) -> out (B, L, H, D). Program (w, h, b): window w of image b. BIAS as in fused.py.

    rows: int32 (windows, N); pattern: int32 (windows,), which bias (patterns, H, N, N) a window takes; pad: (3, H, D).
    """
    COUNT: tl.constexpr = TILES + (TAIL > 0)
    i_w = tl.program_id(0)
    i_h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = i_h.to(tl.int64)
    o_d = tl.arange(0, DP)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    mult, exp_bits, step, masked = numerics.exponent_units(c_ptr, D, BIAS)
    q_mult, k_mult, k_zero, v_mult, zero = numerics.load_multipliers(c_ptr, o_d, D)
    rows_ptr += i_w * N
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    pad_ptr += i_h * D
    out_ptr += b * L * (H * D) + i_h * D
    if BIAS:
        bias_ptr += tl.load(pattern_ptr + i_w).to(tl.int64) * stride_bias_g + h * stride_bias_h

    ks = ()
    vts = ()
    columns = tl.zeros([16, DP], tl.int32)
    for i in tl.static_range(COUNT):
        o_n = i * TILE + tl.arange(0, TILE if i < TILES else TAIL)
        k = _load(k_ptr, pad_ptr + H * D, rows_ptr, stride_kn, o_n, o_d, N, D, PADS)
        ks = ks + (numerics.quantize(k, k_mult, k_zero, HALF, INTERPRET),)
        vt = _values(
            v_ptr, pad_ptr + 2 * H * D, rows_ptr, stride_vn, i * TILE, o_d, v_mult, zero, N, D, DP,
            TILE if i < TILES else TAIL, PADS, HALF, INTERPRET,
        )  # fmt: skip
        vts = vts + (vt,)
        ones = tl.full([16, TILE if i < TILES else TAIL], 1, tl.int8)
        columns = tl.dot(ones, tl.trans(vt), columns, out_dtype=tl.int32)
    columns = tl.max(columns, 0)

    for i_m in tl.range(0, tl.cdiv(N, BLOCK_M)):
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        q = _load(q_ptr, pad_ptr, rows_ptr, stride_qn, o_m, o_d, N, D, PADS)
        q = numerics.quantize(q, q_mult, zero, HALF, INTERPRET)
        out = fused.attend_block(
            q, ks, vts, columns, bias_ptr, stride_bias_m, o_m, o_d, mult, exp_bits, step, masked, c_ptr, N, D, DP, TILE,
            TILES, TAIL, BLOCK_M, BIAS, HIGH, INT8_OUT, OUT_UP, out_ptr.dtype.element_ty, INTERPRET,
        )  # fmt: skip
        row = tl.load(rows_ptr + o_m, mask=o_m < N, other=-1)
        o_out = row.to(tl.int64)[:, None] * (H * D) + o_d[None, :]
        tl.store(out_ptr + o_out, out, mask=(row >= 0)[:, None] & (o_d < D)[None, :])
