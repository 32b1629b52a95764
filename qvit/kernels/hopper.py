"""Integer attention for Hopper (sm_90) in one launch, in Gluon: Triton with the layouts in our hands.

The arithmetic and the plan are those of fused.py: a program owns a head, quantizes K and V once into shared memory and
takes its blocks of queries one by one. Here nothing is moved for the compiler's sake. Between the integers in shared
memory and the output nothing leaves the registers, because of two orders that softmax and the products do not see:
- K's rows are stored so that the accumulator of the scores is, as it stands, the operand of the second product;
- V's channels are stored so that a thread ends up with neighbouring channels of the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qvit.kernels import numerics

BLOCK_M = gl.constexpr(64)
_MASKED_SCORE = gl.constexpr(6)  # its place among a head's scalars
_QUANTIZE_HALF = gl.constexpr(numerics.QUANTIZE_HALF.value)
_STANDARD = gl.constexpr(numerics.STANDARD_HOPPER.value)
_HIGH = gl.constexpr(numerics.HIGH.value)
# Four keys' values -> a word for each channel: of int8, by four channels; of float16, quantized like QUANTIZE_HALF, by
# two; of what float32 became, one.
_WORDS_INT8 = gl.constexpr(
    "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362;"
    "prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410;"
    "prmt.b32 $3, c, d, 0x7632; }"
)
_WORDS_HALF = gl.constexpr(
    "{ .reg .b32 x<4>, hi, lo; mov.b32 hi, 0x667F667F; mov.b32 lo, 0x65816581;"
    + "".join(
        f"fma.rn.f16x2 x{i}, ${2 + i}, $6, $7; max.f16x2 x{i}, x{i}, lo; min.f16x2 x{i}, x{i}, hi;" for i in range(4)
    )
    + "prmt.b32 x0, x0, x1, 0x6240; prmt.b32 x2, x2, x3, 0x6240; prmt.b32 $0, x0, x2, 0x5410;"
    + "prmt.b32 $1, x0, x2, 0x7632; }"
)
_WORDS = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410; }"
)

# Triton 3.7 gave the barrier another name.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


# ---------------------------------------------------------------- layouts and tiles


@gluon.constexpr_function
def _widths(tokens):
    """Tiles of keys: powers of two from 128 to 32, only the last of them partly filled."""
    left, widths = -(-tokens // 32) * 32, ()
    while left:
        widths += (min(128, 1 << (left.bit_length() - 1)),)
        left -= widths[-1]
    return widths


@gluon.constexpr_function
def _start(tokens, i):
    return sum(_widths(tokens)[:i])


@gluon.constexpr_function
def _count(tokens):
    return len(_widths(tokens))


@gluon.constexpr_function
def _bits(size, dim):
    return [[1 << i, 0] if dim == 0 else [0, 1 << i] for i in range(size.bit_length() - 1)]


@gluon.constexpr_function
def _mma(rows, columns):
    """Accumulators [rows, columns], 16 rows a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def _operand(rows, columns):
    """The 8-bit operand in registers that goes with such accumulators."""
    return gl.DotOperandLayout(0, _mma(rows, columns), 4)


@gluon.constexpr_function
def _rows(columns, size, warps):
    """A tile of rows: each thread takes ``size`` neighbouring channels."""
    lanes = columns // size
    return gl.BlockedLayout([1, size], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _quads(width, columns, warps, words=False):
    """A tile of V [width, columns]: each thread takes four neighbouring keys of eight neighbouring channels.

    ``words``: of the tile [width / 4, columns] of words, made of four keys each.
    """
    keys, channels = _bits(width // 4 if words else width, 0), _bits(columns, 1)
    others = channels[3:] + (keys if words else keys[2:])
    end = 4 + warps.bit_length()
    warp = others[5:end] + [[0, 0]] * (end - len(others))
    own = channels[:3] if words else channels[:3] + keys[:2]
    return gl.DistributedLinearLayout(
        own + others[end:], others[:5], warp, [], [width // 4 if words else width, columns]
    )


@gluon.constexpr_function
def _out(rows, columns):
    """Rows of the output in the accumulators' threads, each with a quarter of a row's channels side by side."""
    lanes = [[0, columns // 4], [0, columns // 2], [1, 0], [2, 0], [4, 0]]
    own = _bits(columns // 4, 1) + [[8, 0]]
    return gl.DistributedLinearLayout(own, lanes, _bits(rows, 0)[4:], [], [rows, columns])


@gluon.constexpr_function
def _swizzled(bytes_of_row, bits=8):
    return gl.NVMMASharedLayout(min(bytes_of_row, 128), bits)


# ---------------------------------------------------------------- from memory to int8


@gluon.jit
def _vector(c_ptr, index: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    o_d = gl.arange(0, DP, layout=layout)
    return gl.load(c_ptr + index * D + o_d, mask=o_d < D, other=0).to(gl.float32, bitcast=True)


@gluon.jit
def _factors(
    c_ptr, mult: gl.constexpr, zero: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, IN: gl.constexpr,
    HALF: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    """What quantizes operands of type IN and layout ``rows``: multipliers and addends, [DP]; of int8, nothing.

    Multipliers are vector ``mult`` of the constants, zero points vector ``zero`` or, at -1, 0.
    """
    if IN == gl.int8:
        return 0, 0
    else:
        half: gl.constexpr = HALF and IN == gl.float16
        rounder: gl.constexpr = 1536.0 if half else 12582912.0
        layout: gl.constexpr = gl.SliceLayout(0, rows)
        r = _vector(c_ptr, mult, D, DP, layout)
        if zero >= 0:
            c = rounder - _vector(c_ptr, zero, D, DP, layout)
        else:
            c = gl.full([DP], rounder, gl.float32, layout=layout)
        if half:
            r = r.to(gl.float16)
            c = c.to(gl.float16)
        return r, c


@gluon.jit
def _rounded(x, r, c):
    """int32 whose low byte is the quantized value."""
    x = x.to(gl.float32)
    none = gl.zeros_like(x)
    y = gl.fma(x, r[None, :] + none, c[None, :] + none)
    return gl.minimum(gl.maximum(y, 12582785.0), 12583039.0).to(gl.int32, bitcast=True)


@gluon.jit
def _quantize(x, factors):
    """numerics.quantize, by :func:`_factors`."""
    if x.dtype == gl.int8:
        return x
    elif factors[0].dtype == gl.float16:
        r, c = factors
        return gl.inline_asm_elementwise(
            _QUANTIZE_HALF, "=r,r,r,r,r,r,r", [x, r[None, :], c[None, :]], dtype=gl.int8, is_pure=False, pack=4
        )
    else:
        return _rounded(x, factors[0], factors[1]).to(gl.int8)


@gluon.jit
def _quantize_words(x, factors):
    """A tile of V [keys, DP], quantized: words of four neighbouring keys, int32 [keys / 4, DP]."""
    layout: gl.constexpr = _quads(x.shape[0], x.shape[1], gl.num_warps(), True)
    channels: gl.constexpr = gl.SliceLayout(0, layout)
    if x.dtype != gl.int8:  # whatever the tile's width, a thread has the same channels
        r = gl.convert_layout(factors[0], channels, assert_trivial=True)
        c = gl.convert_layout(factors[1], channels, assert_trivial=True)
    even, odd = gl.split(gl.permute(gl.reshape(x, [x.shape[0] // 4, 2, 2, x.shape[1]]), (0, 3, 1, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0 = gl.convert_layout(x0, layout, assert_trivial=True)
    x1 = gl.convert_layout(x1, layout, assert_trivial=True)
    x2 = gl.convert_layout(x2, layout, assert_trivial=True)
    x3 = gl.convert_layout(x3, layout, assert_trivial=True)
    if x.dtype == gl.int8:
        return gl.inline_asm_elementwise(
            _WORDS_INT8, "=r,=r,=r,=r,r,r,r,r", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=4
        )
    elif r.dtype == gl.float16:
        return gl.inline_asm_elementwise(
            _WORDS_HALF, "=r,=r,r,r,r,r,r,r", [x0, x1, x2, x3, r[None, :], c[None, :]], dtype=gl.int32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        rounded = [_rounded(x0, r, c), _rounded(x1, r, c), _rounded(x2, r, c), _rounded(x3, r, c)]
        return gl.inline_asm_elementwise(_WORDS, "=r,r,r,r,r", rounded, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _pointers(ptr, stride_n, start, N, W: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """Pointers of a tile of rows [W, DP], and which of them exist."""
    o_n = start + gl.arange(0, W, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, DP, layout=gl.SliceLayout(0, layout))
    mask = (o_n < N)[:, None]
    if D < DP:
        mask = mask & (o_d < D)[None, :]
    return ptr + o_n[:, None] * stride_n + o_d[None, :], mask


@gluon.jit
def _load(ptr, stride_n, start, N, W: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    rows, mask = _pointers(ptr, stride_n, start, N, W, D, DP, layout)
    return gl.load(rows, mask=mask, other=0)


@gluon.jit
def _keys(k, factors):
    """A tile of K as it lies in shared memory: row 8i + 2t + e of 16 holds key 4t + 2i + e."""
    W: gl.constexpr = k.shape[0]
    DP: gl.constexpr = k.shape[1]
    k = _quantize(k, factors)
    return gl.reshape(gl.permute(gl.reshape(k, [W // 16, 4, 2, 2, DP]), (0, 2, 1, 3, 4)), [W, DP])


@gluon.jit
def _values(v, factors):
    """A tile of V^T as it lies in shared memory, int32 [DP, keys / 4].

    Row 8n + 2t + e holds channel (DP / 4) t + 2n + e.
    """
    W: gl.constexpr = v.shape[0]
    DP: gl.constexpr = v.shape[1]
    v = gl.reshape(_quantize_words(v, factors), [W // 4, 4, DP // 8, 2])
    return gl.reshape(gl.permute(v, (2, 1, 3, 0)), [DP, W // 4])


@gluon.jit
def _sum_values(vts, DP: gl.constexpr, N: gl.constexpr):
    """V's sum over the keys, int32 [32, DP] in shared memory, the same in every row: each thread reads its own.

    It stays there because the registers are needed.
    """
    ones = gl.full([BLOCK_M, 32], 1, gl.int8, layout=_operand(BLOCK_M, DP))
    sums = gl.zeros([BLOCK_M, DP], gl.int32, layout=_mma(BLOCK_M, DP))
    for i in gl.static_range(_count(N)):
        for j in gl.static_range(_widths(N)[i] // 32):
            sums = warpgroup_mma(ones, vts[i].slice(j * 32, 32, 1).permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    half, _ = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, DP]), (0, 2, 3, 1)))
    half = gl.reshape(half, [32, DP])
    return gl.allocate_shared_memory(gl.int32, [32, DP], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]), half)


# ---------------------------------------------------------------- attention


@gluon.jit
def _start_scores(q, k):
    M: gl.constexpr = q.shape[0]
    W: gl.constexpr = k.shape[0]
    zeros = gl.zeros([M, W], gl.int32, layout=_mma(M, W))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _mask(s, masked, N, START: gl.constexpr):
    W: gl.constexpr = s.shape[1]
    c = gl.arange(0, W, layout=gl.SliceLayout(0, s.type.layout))
    key = START + c // 16 * 16 + c // 2 % 4 * 4 + c // 8 % 2 * 2 + c % 2
    return gl.where((key < N)[None, :], s, masked)


@gluon.jit
def _partial_max(s):
    """Maxima [rows, 8] of the scores that each thread holds."""
    return gl.max(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)


@gluon.jit
def _operand_order(s):
    """Within 16 keys, position 4t + 2i + e takes column 8i + 2t + e: nothing moves between threads."""
    M: gl.constexpr = s.shape[0]
    W: gl.constexpr = s.shape[1]
    return gl.reshape(gl.permute(gl.reshape(s, [M, W // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [M, W])


@gluon.jit
def _weights(s, base, step, exp_bits, HIGH: gl.constexpr):
    """numerics.weights_standard or, in two planes, _high; standard gives its one plane twice."""
    if HIGH:
        return gl.inline_asm_elementwise(
            _HIGH, "=r,=r" + ",r" * 20, [s, base[:, None], step, exp_bits, 1 << (32 - exp_bits)],
            dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        p = gl.inline_asm_elementwise(
            _STANDARD, "=r" + ",r" * 20, [s, base[:, None], step, exp_bits, 1 << (32 - exp_bits)],
            dtype=gl.int8, is_pure=True, pack=4,
        )  # fmt: skip
        return p, p


@gluon.jit
def _units(c_ptr, D: gl.constexpr):
    """M, F and the stand-in for a masked score of a head."""
    return gl.load(c_ptr + 6 * D), gl.load(c_ptr + 6 * D + 1), gl.load(c_ptr + 6 * D + _MASKED_SCORE)


@gluon.jit
def _ones(ROWS: gl.constexpr):
    """int8 ones [ROWS, 128] in shared memory, for sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    ones = gl.full([ROWS, 128], 1, gl.int8, layout=layout)
    return gl.allocate_shared_memory(gl.int8, [ROWS, 128], _swizzled(128), ones)


@gluon.jit
def _distance_base(top, units):
    """numerics.distance_base without a bias."""
    mult, exp_bits, _ = units
    return top * mult + ((numerics.SHIFT_OCTAVES << exp_bits) + (1 << (exp_bits - 7)))


@gluon.jit
def _sum_rows(p, sums, ones):
    p = gl.convert_layout(p, _operand(p.shape[0], 8), assert_trivial=True)
    return warpgroup_mma(p, ones.slice(0, p.shape[1], 1).permute((1, 0)), sums, is_async=True)


@gluon.jit
def _reciprocal(row_sum, BITS: gl.constexpr, PEAK: gl.constexpr):
    """numerics.reciprocal."""
    row_sum = gl.maximum(row_sum, PEAK)
    leading = gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [row_sum], dtype=gl.int32, is_pure=True, pack=1)
    divisor = (row_sum << leading).to(gl.uint32, bitcast=True)
    estimate = gl.full_like(divisor, 3031741620) - gl.umulhi(divisor, gl.full_like(divisor, 2021161080))
    for _ in gl.static_range(3):
        error = gl.full_like(divisor, 2147483648) - gl.umulhi(divisor, estimate)
        estimate = (gl.umulhi(estimate, error) << 2) + 2
    return (estimate >> (62 - BITS - leading).to(gl.uint32)).to(gl.int32, bitcast=True)


@gluon.jit
def _inverse(sums, low_sums, N: gl.constexpr, HIGH: gl.constexpr):
    """Reciprocals [rows, 4] of the weights' sums, from their complements' sums [rows, 8], the same in every column.

    Each thread takes the columns that it holds, so that no thread asks another.
    """
    M: gl.constexpr = sums.shape[0]
    KEYS: gl.constexpr = _start(N, _count(N))
    row_sum, _ = gl.split(gl.reshape(127 * KEYS - sums, [M, 4, 2]))
    if HIGH:
        low_sum, _ = gl.split(gl.reshape(KEYS + low_sums, [M, 4, 2]))
        return _reciprocal((row_sum << 8) - low_sum, 44, 65192)
    else:
        return _reciprocal(row_sum, 36, 255)


@gluon.jit
def _spread(inverse, like):
    """What [rows, 4] holds for a row, over the row's channels: column 8n + 2t + e takes column t."""
    M: gl.constexpr = like.shape[0]
    DP: gl.constexpr = like.shape[1]
    split = gl.reshape(like, [M, DP // 8, 4, 2])
    layout: gl.constexpr = split.type.layout
    inner: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    wide = gl.expand_dims(gl.expand_dims(gl.convert_layout(inverse, inner, assert_trivial=True), 1), 3)
    wide = wide + gl.zeros([M, DP // 8, 4, 2], inverse.dtype, layout=layout)
    return gl.convert_layout(gl.reshape(wide, [M, DP]), like.type.layout, assert_trivial=True)


@gluon.jit
def _multiply_high(a, b):
    return ((a.to(gl.int64) * b.to(gl.int64)) >> 32).to(gl.int32)


@gluon.jit
def _in_order(x, PAIRS: gl.constexpr):
    """Channels back in their order: a thread's are neighbours now.

    PAIRS: column 8n + 2t + e holds channel (DP / 4) t + 2n + e; else (DP / 4) t + (DP / 8) e + n.
    """
    M: gl.constexpr = x.shape[0]
    DP: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [M, DP // 8, 4, 2])
    if PAIRS:
        x = gl.permute(x, (0, 2, 1, 3))
    else:
        x = gl.permute(x, (0, 2, 3, 1))
    x = gl.reshape(x, [M, DP])
    return gl.convert_layout(x, _out(M, DP), assert_trivial=True)


@gluon.constexpr_function
def _columns_layout(columns):
    """V's sums [32, columns]: each thread holds those of its accumulators' channels."""
    own = [[0, 1]] + _bits(columns, 1)[3:]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[8, 0], [16, 0]], [], [32, columns])


@gluon.jit
def _normalise(
    acc, low, inverse, columns, c_ptr, out_up, D: gl.constexpr, HIGH: gl.constexpr, OUT: gl.constexpr,
    PAIRS: gl.constexpr = True,
):  # fmt: skip
    """numerics.normalise. inverse: [rows, 4] (:func:`_inverse`); columns: as acc; PAIRS: for :func:`_in_order`."""
    acc = columns * 127 - acc
    if HIGH:
        acc = (acc << 2) + ((0 - columns - low + 32) >> 6)
    layout: gl.constexpr = gl.SliceLayout(0, _out(acc.shape[0], acc.shape[1]))
    if OUT == gl.int8:
        o_d = gl.arange(0, acc.shape[1], layout=layout)
        ratio = gl.load(c_ptr + 5 * D + o_d, mask=o_d < D, other=0)
        out = _multiply_high(_in_order(_multiply_high(acc << out_up, _spread(inverse, acc)), PAIRS), ratio[None, :])
        down = out_up + gl.load(c_ptr + 6 * D + 5) - (26 if HIGH else 28)
        out = (out + (1 << (down - 1))) >> down
        return gl.minimum(gl.maximum(out, -127), 127).to(OUT)
    else:
        unit: gl.constexpr = 2.0**-38 if HIGH else 2.0**-36
        out = _in_order(acc.to(gl.float32) * _spread(inverse.to(gl.float32) * unit, acc), PAIRS)
        return (out * _vector(c_ptr, 4, D, acc.shape[1], layout)[None, :]).to(OUT)


@gluon.jit
def _attend(
    q, ks, vts, columns, ones, units, c_ptr, out_ptr, start, H, N: gl.constexpr, D: gl.constexpr,
    HIGH: gl.constexpr, OUT_UP: gl.constexpr,
):  # fmt: skip
    """A block of 64 queries, from int8 in shared memory to the output."""
    COUNT: gl.constexpr = _count(N)
    DP: gl.constexpr = q.shape[1]
    MMA: gl.constexpr = _mma(BLOCK_M, DP)
    OPERAND: gl.constexpr = _operand(BLOCK_M, DP)
    mult, exp_bits, masked = units
    scores = ()
    for i in gl.static_range(COUNT):
        scores = scores + (_start_scores(q, ks[i]),)
    kept = ()
    for i in gl.static_range(COUNT):  # a tile's maximum while the next one's scores are under way
        s = warpgroup_mma_wait(COUNT - 1 - i, deps=(scores[i],))
        if i == COUNT - 1:
            s = _mask(s, masked, N, _start(N, i))
        kept = kept + (s,)
        if i == 0:
            best = _partial_max(s)
        else:
            best = gl.maximum(best, gl.convert_layout(_partial_max(s), best.type.layout, assert_trivial=True))
    top = gl.convert_layout(gl.max(best, 1), gl.SliceLayout(1, OPERAND), assert_trivial=True)
    base = _distance_base(top, units)
    acc = gl.zeros([BLOCK_M, DP], gl.int32, layout=MMA)
    sums = gl.zeros([BLOCK_M, 8], gl.int32, layout=_mma(BLOCK_M, 8))
    low = acc
    low_sums = sums
    for i in gl.static_range(COUNT):
        s = gl.convert_layout(_operand_order(kept[i]), OPERAND)
        p, p_low = _weights(s, base, 0 - mult, exp_bits, HIGH)
        sums = _sum_rows(p, sums, ones)
        if HIGH:
            low_sums = _sum_rows(p_low, low_sums, ones)
        acc = warpgroup_mma(p, vts[i].permute((1, 0)), acc, is_async=True)
        if HIGH:
            low = warpgroup_mma(p_low, vts[i].permute((1, 0)), low, is_async=True)
    if HIGH:  # the reciprocal while the last products are under way
        sums, low_sums = warpgroup_mma_wait(2, deps=(sums, low_sums))
        inverse = _inverse(sums, low_sums, N, True)
        acc, low = warpgroup_mma_wait(0, deps=(acc, low))
    else:
        sums = warpgroup_mma_wait(1, deps=(sums,))
        inverse = _inverse(sums, low_sums, N, False)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    half = gl.reshape(columns.load(_columns_layout(DP)), [4, 8, DP])
    both = gl.reshape(gl.permute(gl.join(half, half), (0, 3, 1, 2)), [BLOCK_M, DP])
    both = gl.convert_layout(both, MMA, assert_trivial=True)
    out = _normalise(acc, low, inverse, both, c_ptr, OUT_UP, D, HIGH, out_ptr.dtype.element_ty)
    rows, mask = _pointers(out_ptr, H * D, start, N, BLOCK_M, D, DP, _out(BLOCK_M, DP))
    gl.store(rows, out, mask=mask)


@gluon.jit
def _prefetch(ptr, stride_n, N: gl.constexpr, D: gl.constexpr):
    """Ask for a head's rows in the second-level cache, for the program that will take this one's place."""
    o = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in gl.static_range((N + 127) // 128):
        rows = ptr + gl.minimum(o + 128 * i, N - 1) * stride_n
        for j in gl.static_range((D * ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024):
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                [(rows + j * (1024 // ptr.dtype.element_ty.primitive_bitwidth)).to(gl.int64, bitcast=True)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def hopper_kernel(
    q_ptr, k_ptr, v_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    B, H, ahead,
    N: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, STEP: gl.constexpr, HIGH: gl.constexpr,
    OUT_UP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) float or int8, channels side by side -> out (B, N, H, D).

    Program (i, h, b) takes blocks of queries i, i + STEP, ... and prefetches for the one ``ahead`` images on.
    """
    IN: gl.constexpr = q_ptr.dtype.element_ty
    BLOCKS: gl.constexpr = ((N + BLOCK_M - 1) // BLOCK_M + STEP - 1) // STEP
    ROWS: gl.constexpr = _rows(DP, 16 if IN == gl.int8 else 8, gl.num_warps())
    part = gl.program_id(0)
    i_h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    h = i_h.to(gl.int64)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    q_ptr += h * stride_qh
    k_ptr += h * stride_kh
    v_ptr += h * stride_vh
    out_ptr += b * (N * H * D) + i_h * D

    q_factors = _factors(c_ptr, 0, -1, D, DP, IN, HALF, ROWS)
    k_factors = _factors(c_ptr, 1, 2, D, DP, IN, HALF, ROWS)
    v_factors = _factors(c_ptr, 3, -1, D, DP, IN, HALF, _quads(_widths(N)[0], DP, gl.num_warps(), True))
    ks = ()
    vts = ()
    for i in gl.static_range(_count(N)):
        k = _load(k_ptr + b * stride_kb, stride_kn, _start(N, i), N, _widths(N)[i], D, DP, ROWS)
        v = _load(
            v_ptr + b * stride_vb,
            stride_vn,
            _start(N, i),
            N,
            _widths(N)[i],
            D,
            DP,
            _quads(_widths(N)[i], DP, gl.num_warps()),
        )
        k = _keys(k, k_factors)
        ks = ks + (gl.allocate_shared_memory(gl.int8, k.shape, _swizzled(DP), k),)
        vt = _values(v, v_factors)
        vt = gl.allocate_shared_memory(gl.int32, vt.shape, _swizzled(_widths(N)[i], 32), vt)
        vts = vts + (vt._reinterpret(gl.int8, [DP, _widths(N)[i]], _swizzled(_widths(N)[i])),)
    qs = gl.allocate_shared_memory(gl.int8, [BLOCKS, BLOCK_M, DP], _swizzled(DP))
    for i in gl.static_range(BLOCKS):
        q = _load(q_ptr + b * stride_qb, stride_qn, (part + i * STEP) * BLOCK_M, N, BLOCK_M, D, DP, ROWS)
        qs.index(i).store(_quantize(q, q_factors))
    later = b + ahead
    if later < B:
        _prefetch(q_ptr + later * stride_qb, stride_qn, N, D)
        _prefetch(k_ptr + later * stride_kb, stride_kn, N, D)
        _prefetch(v_ptr + later * stride_vb, stride_vn, N, D)
    ones = _ones(8)
    fence_async_shared()
    columns = _sum_values(vts, DP, N)
    _barrier()
    units = _units(c_ptr, D)
    for i in range(BLOCKS):
        _attend(
            qs.index(i), ks, vts, columns, ones, units, c_ptr, out_ptr, (part + i * STEP) * BLOCK_M, H, N, D, HIGH,
            OUT_UP,
        )  # fmt: skip
