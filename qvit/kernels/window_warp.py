"""Integer attention of up to 64 tokens on Hopper (sm_90), a warp for a window and head, in Gluon.

A window is cut out of an image by a table, with a bias, or (PLAIN) is a short sequence as it lies, without one.

Rows go from the image to shared memory while no one waits, and from there on everything stays in one warp's registers:
no warp waits for another. Keys and channels are taken in orders that softmax and the products do not see:
- the accumulator of the scores is, as it stands, the operand of the second product;
- a thread takes four neighbouring channels of four keys and turns them around to make V's operand;
- a thread ends up with neighbouring channels of the output.
The bias comes in the order of the threads (:func:`qvit.reference.pack_window_bias`), 16 bytes each side by side: read
row by row it would cost more than anything else here. The arithmetic is that of window.py and fused.py.

A grid that is too small to fill the GPU takes as long as its longest program: there STEP programs share a window's
queries, and each prepares K and V anew.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from qvit.kernels import hopper

KEYS = gl.constexpr(64)
CHANNELS = gl.constexpr(32)
ROWS = gl.constexpr(16)  # queries at a time
_WORDS_INT8 = gl.constexpr(hopper._WORDS_INT8.value)


# ---------------------------------------------------------------- layouts


@gluon.constexpr_function
def _mma():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def _operand(index):
    return gl.DotOperandLayout(index, _mma(), 4)


@gluon.constexpr_function
def _queries():
    own = [[0, 1], [0, 2], [8, 0], [0, 16]]
    return gl.DistributedLinearLayout(own, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [16, 32])


@gluon.constexpr_function
def _keys():
    own = [[0, 1], [0, 2], [0, 16], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(own, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [64, 32])


@gluon.constexpr_function
def _values():
    own = [[0, 1], [0, 2], [1, 0], [2, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(own, [[4, 0], [8, 0], [0, 4], [0, 8], [0, 16]], [], [], [64, 32])


@gluon.constexpr_function
def _fragments():
    """A block of the bias as it lies in memory, four neighbours a thread."""
    own, lanes = [[1], [2], [128], [256], [512]], [[4], [8], [16], [32], [64]]
    return gl.DistributedLinearLayout(own, lanes, [], [], [1024])


@gluon.constexpr_function
def _copied(bits):
    """Rows as they are copied: 16 bytes a lane."""
    size = 128 // bits
    return gl.BlockedLayout([1, size], [size, 32 // size], [1, 1], [1, 0])


@gluon.constexpr_function
def _staged(bits):
    """Where they lie in shared memory, so that lanes that read eight rows at a time meet few of the same banks."""
    size = 128 // bits
    return gl.SwizzledSharedLayout(size, 1 if bits == 16 else 2 if bits == 32 else 4, 32 // size, [1, 0])


# ---------------------------------------------------------------- operands


@gluon.jit
def _stage(ptr, pad_ptr, row, stride_n, N: gl.constexpr, D: gl.constexpr, PADS: gl.constexpr):
    """Starts to copy a window's rows; a negative one is outside of the image: the pad, or zeros.

    What lies past the last row is zero as well.
    """
    IN: gl.constexpr = ptr.dtype.element_ty
    layout: gl.constexpr = _copied(IN.primitive_bitwidth)
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    x_ptr = ptr + row * stride_n
    if PADS:
        x_ptr = gl.where(row < 0, pad_ptr, x_ptr)
    x_ptr = gl.multiple_of(x_ptr, [16])  # bytes, as the launch has found
    inside = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout)) < N
    if not PADS:
        inside = inside & (row >= 0)
    mask = inside[:, None]
    if D < CHANNELS:
        mask = mask & (o_d < D)[None, :]
    staged = gl.allocate_shared_memory(IN, [KEYS, CHANNELS], _staged(IN.primitive_bitwidth))
    async_copy.async_copy_global_to_shared(staged, x_ptr[:, None] + o_d[None, :], mask=mask)
    return staged


@gluon.jit
def _query_operand(qs, start: gl.constexpr, factors):
    """Staged rows -> the first product's left operand [16, 32]."""
    q = hopper._quantize(qs.slice(start, ROWS, 0).load(_queries()), factors)
    return gl.convert_layout(q, _operand(0), assert_trivial=True)


@gluon.jit
def _key_operand(ks, factors):
    """Staged rows -> the first product's right operand [32, 64]."""
    k = gl.permute(hopper._quantize(ks.load(_keys()), factors), (1, 0))
    return gl.convert_layout(k, _operand(1), assert_trivial=True)


@gluon.jit
def _value_operand(vs, factors):
    """Staged rows -> the second product's right operand [64, 32].

    Position 4t + 2i + e of 16 takes key 8i + 2t + e, as the accumulators of the scores lie; column 8j + g is channel
    4g + j.
    """
    vs = vs.reshape([KEYS // 16, 2, 4, 2, CHANNELS]).permute((0, 2, 1, 3, 4)).reshape([KEYS, CHANNELS])
    v = hopper._quantize(vs.load(_values()), factors)
    v = gl.inline_asm_elementwise(_WORDS_INT8, "=r,=r,=r,=r,r,r,r,r", [v], dtype=gl.int8, is_pure=True, pack=16)
    # Each block of four keys and four channels is turned around: axes 1 and 3 of these have changed places.
    v = gl.permute(gl.reshape(v, [KEYS // 4, 4, CHANNELS // 4, 4]), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(v, [KEYS, CHANNELS]), _operand(1), assert_trivial=True)


@gluon.jit
def _product(a, b):
    """a [16, 32 or 64] times b, int32."""
    return mma_v2(a, b, gl.zeros([ROWS, b.shape[1]], gl.int32, layout=_mma()))


@gluon.jit
def _sum_values(v):
    """V's sum over the keys, int32 [16, 32], the same in every row."""
    ones = gl.full([ROWS, KEYS], 1, gl.int8, layout=_operand(0))
    sums = _product(ones, v)
    half, _ = gl.split(gl.permute(gl.reshape(sums, [2, ROWS // 2, CHANNELS]), (1, 2, 0)))
    both = gl.reshape(gl.permute(gl.join(half, half), (2, 0, 1)), [ROWS, CHANNELS])  # in the registers of one half
    return gl.convert_layout(both, _mma(), assert_trivial=True)


@gluon.jit
def _load_bias(ptr):
    """A block's bias [16, 64]: stored by tile of keys, row, lane, half of the rows, column."""
    layout: gl.constexpr = _fragments()
    x = gl.load(ptr + gl.arange(0, ROWS * KEYS, layout=layout))
    x = gl.permute(gl.reshape(x, [8, 8, 4, 2, 2]), (3, 1, 0, 2, 4))
    return gl.convert_layout(gl.reshape(x, [ROWS, KEYS]), _mma(), assert_trivial=True)


# ---------------------------------------------------------------- attention


@gluon.jit
def _attend(
    q, k, v, columns, bias_ptr, units, c_ptr, start: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    PLAIN: gl.constexpr, HIGH: gl.constexpr, OUT_UP: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """A block of queries, operands in registers -> the output [16, 32]."""
    mult, exp_bits, masked = units
    if PLAIN:
        e = _product(q, k)
        step = 0 - mult
    else:  # exponents are scores of one unit
        e = _product(q, k) * mult + _load_bias(bias_ptr + start * KEYS)
        units = (1, exp_bits, masked)
        step = -1
    if N < KEYS:
        o_n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, _mma()))
        e = gl.where((o_n < N)[None, :], e, masked)
    base = hopper._distance_base(gl.max(e, 1), units)
    base = gl.convert_layout(base, gl.SliceLayout(1, _operand(0)), assert_trivial=True)
    e = gl.convert_layout(hopper._operand_order(e), _operand(0), assert_trivial=True)
    p, p_low = hopper._weights(e, base, step, exp_bits, HIGH)
    if N - start <= ROWS // 2:  # the other half of the rows is not worth its weights: the compiler drops them
        half = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _operand(0))) < ROWS // 2
        p = gl.where(half[:, None], p, 127)
        p_low = gl.where(half[:, None], p_low, 0)
    ones = gl.full([KEYS, 8], 1, gl.int8, layout=_operand(1))
    acc = _product(p, v)
    sums = _product(p, ones)
    low = acc
    low_sums = sums
    if HIGH:
        low = _product(p_low, v)
        low_sums = _product(p_low, ones)
    inverse = hopper._inverse(sums, low_sums, KEYS, HIGH)
    out = hopper._normalise(acc, low, inverse, columns, c_ptr, OUT_UP, D, HIGH, OUT, False)
    if N - start <= ROWS // 2:
        half = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out.type.layout)) < ROWS // 2
        out = gl.where(half[:, None], out, 0)
    return out


@gluon.jit
def _store(out_ptr, rows_ptr, out, start: gl.constexpr, H, N: gl.constexpr, D: gl.constexpr, PLAIN: gl.constexpr):
    """A block of the output to its rows; none of those outside of the image."""
    OUT: gl.constexpr = hopper._out(ROWS, CHANNELS)
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    if PLAIN:
        mask = (row < N)[:, None]
    else:
        row = gl.load(rows_ptr + row, mask=row < N, other=-1)
        mask = (row >= 0)[:, None]
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, OUT))
    if D < CHANNELS:
        mask = mask & (o_d < D)[None, :]
    gl.store(out_ptr + row[:, None] * (H * D) + o_d[None, :], out, mask=mask)


@gluon.jit
def window_warp_kernel(
    q_ptr, k_ptr, v_ptr, pad_ptr, rows_ptr, pattern_ptr, bias_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, L, H,
    N: gl.constexpr, D: gl.constexpr, PLAIN: gl.constexpr, PADS: gl.constexpr, STEP: gl.constexpr,
    HIGH: gl.constexpr, OUT_UP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """q, k, v (B, L, H, D) -> out (B, L, H, D). Program (w * STEP + i, h, b): part i of window w of image b.

    rows: int32 (windows, N); pattern: int32 (windows,), which packed bias (patterns, H, rows in 16s * 64) a window
    takes; pad: (3, H, D). PLAIN has none of these: the one window is the L = N rows.
    """
    IN: gl.constexpr = q_ptr.dtype.element_ty
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    i_w = gl.program_id(0) // STEP
    part = gl.program_id(0) % STEP
    i_h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    h = i_h.to(gl.int64)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    rows_ptr += i_w * N
    pad_ptr += i_h * D
    out_ptr += b * L * (H * D) + i_h * D

    row = gl.minimum(gl.arange(0, KEYS, layout=gl.SliceLayout(1, _copied(IN.primitive_bitwidth))), N - 1)
    if not PLAIN:
        row = gl.load(rows_ptr + row)
    ks = _stage(k_ptr + b * stride_kb + h * stride_kh, pad_ptr + H * D, row, stride_kn, N, D, PADS)
    vs = _stage(v_ptr + b * stride_vb + h * stride_vh, pad_ptr + 2 * H * D, row, stride_vn, N, D, PADS)
    qs = _stage(q_ptr + b * stride_qb + h * stride_qh, pad_ptr, row, stride_qn, N, D, PADS)
    async_copy.commit_group()
    if PLAIN:
        units = hopper._units(c_ptr, D)
    else:
        units = (gl.load(c_ptr + 6 * D), gl.load(c_ptr + 6 * D + 1), -(2**31))
        bias_ptr += (gl.load(pattern_ptr + i_w) * H + i_h).to(gl.int64) * (BLOCKS * ROWS * KEYS)
    q_factors = hopper._factors(c_ptr, 0, -1, D, CHANNELS, IN, HALF, _queries())
    k_factors = hopper._factors(c_ptr, 1, 2, D, CHANNELS, IN, HALF, _keys())
    v_factors = hopper._factors(c_ptr, 3, -1, D, CHANNELS, IN, HALF, _values())
    async_copy.wait_group(0)

    k = _key_operand(ks, k_factors)
    v = _value_operand(vs, v_factors)
    columns = _sum_values(v)
    for i in gl.static_range(BLOCKS):
        if part == i * STEP // BLOCKS:
            q = _query_operand(qs, i * ROWS, q_factors)
            out = _attend(
                q, k, v, columns, bias_ptr, units, c_ptr, i * ROWS, N, D, PLAIN, HIGH, OUT_UP, out_ptr.dtype.element_ty
            )
            _store(out_ptr, rows_ptr, out, i * ROWS, H, N, D, PLAIN)
