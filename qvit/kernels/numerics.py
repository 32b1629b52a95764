"""Steps of the arithmetic that the kernels share: ``docs/numerics.md`` in words, ``qvit/reference.py`` in PyTorch.

Where PTX says in one instruction what Triton cannot (a clamping funnel shift, a byte permutation), a step has an
inline-assembly form and a plain twin. Triton's interpreter runs the twin; a GPU test holds the two equal.
"""

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

MASKED = tl.constexpr(-(2**31))
SHIFT_OCTAVES = tl.constexpr(17)

# Four scores in, four weights out. u: distance from the row's maximum; q: its whole octaves; f: its fraction, as 32
# bits; r: 16-bit intensity by a funnel shift of (1 : curve), clamped at 32, or with the line its complement, by one of
# (-2 : fraction); a, b: two of them packed. The multiply-adds run beside the shifts.
_DECLARE = ".reg .b32 u<4>, q<4>, f<4>, g<4>, r<4>, a, b, c;"
_PAIR = "mad.lo.u32 a, r1, 65536, r0; mad.lo.u32 b, r3, 65536, r2;"
# 1 - g (2/3 - g/6) less its leading half: c (1 - f / 3), f the fraction, c its complement. The complement of a product
# and not the sum with a constant, for which the assembler would move two words for every score.
_CURVE = "".join(
    f"mul.hi.u32 g{i}, f{i}, 0x55555555; not.b32 g{i}, g{i}; not.b32 f{i}, f{i}; mul.hi.u32 f{i}, f{i}, g{i};"
    for i in range(4)
)


def _distances(first: int) -> str:
    """The operands come after the outputs, four copies of each: score, base, step of a score, F, 2^(32 - F)."""
    return "".join(
        f"mad.lo.u32 u{i}, ${first + i}, ${first + 8 + i}, ${first + 4 + i};"
        f"shr.u32 q{i}, u{i}, ${first + 12 + i}; mul.lo.u32 f{i}, u{i}, ${first + 16 + i};"
        for i in range(4)
    )


def _shift(upper: str) -> str:
    return "".join(f"shf.r.clamp.b32 r{i}, f{i}, {upper}, q{i};" for i in range(4))


# From the complements, whose borrow from the upper half is given back.
_STANDARD = tl.constexpr(
    "{" + _DECLARE + _distances(1) + _shift("0xFFFFFFFE") + _PAIR
    + "add.u32 a, a, 0xFF80FF80; add.u32 b, b, 0xFF80FF80; prmt.b32 a, a, b, 0x7531; xor.b32 $0, a, 0x80808080; }"
)  # fmt: skip
# The same where one instruction adds two 16-bit halves (sm_90): the sign needs no exclusive-or.
STANDARD_HOPPER = tl.constexpr(
    "{" + _DECLARE + _distances(1) + _shift("0xFFFFFFFE") + _PAIR
    + "mov.b32 c, 0x7F817F80; add.u16x2 a, a, c; add.u16x2 b, b, c; prmt.b32 $0, a, b, 0x7531; }"
)  # fmt: skip
HIGH = tl.constexpr(
    "{" + _DECLARE + _distances(2) + _CURVE + _shift("1") + _PAIR
    + "add.u32 a, a, 0x007F007F; add.u32 b, b, 0x007F007F;"
    + "prmt.b32 c, a, b, 0x7531; xor.b32 $0, c, 0x7F7F7F7F; prmt.b32 c, a, b, 0x6420; xor.b32 $1, c, 0x7F7F7F7F; }"
)  # fmt: skip


# Four float16 in, four int8 out, two by two: one rounding to an integer from 1024 to 2047, whose low byte is the value.
QUANTIZE_HALF = tl.constexpr(
    "{ .reg .b32 a, b, hi, lo; mov.b32 hi, 0x667F667F; mov.b32 lo, 0x65816581;"
    "fma.rn.f16x2 a, $1, $3, $5; fma.rn.f16x2 b, $2, $4, $6;"
    "max.f16x2 a, a, lo; max.f16x2 b, b, lo; min.f16x2 a, a, hi; min.f16x2 b, b, hi; prmt.b32 $0, a, b, 0x6420; }"
)


@triton.jit
def bias_of(bias_ptr, i_b, i_h, stride_g, stride_h, groups, group_magic):
    """Where the bias of batch i_b, head i_h begins; batch b takes window b % groups, found without a division."""
    group = i_b - tl.umulhi(i_b.to(tl.uint32), group_magic.to(tl.uint32)).to(tl.int32) * groups
    return bias_ptr + group.to(tl.int64) * stride_g + i_h.to(tl.int64) * stride_h


@triton.jit
def load_multipliers(c_ptr, o_d, D: tl.constexpr):
    """q's, k's multipliers, k's zero points, v's multipliers, and a vector of zeros, float32 [DP]."""
    mask = o_d < D
    q_mult = tl.load(c_ptr + o_d, mask=mask, other=0).to(tl.float32, bitcast=True)
    k_mult = tl.load(c_ptr + D + o_d, mask=mask, other=0).to(tl.float32, bitcast=True)
    k_zero = tl.load(c_ptr + 2 * D + o_d, mask=mask, other=0).to(tl.float32, bitcast=True)
    v_mult = tl.load(c_ptr + 3 * D + o_d, mask=mask, other=0).to(tl.float32, bitcast=True)
    return q_mult, k_mult, k_zero, v_mult, tl.zeros_like(k_zero)


@triton.jit
def quantize(x, mult, zero, HALF: tl.constexpr, INTERPRET: tl.constexpr):
    """int8 of x * mult - zero, exact up to its one rounding (half to even), saturated at +-127; int8 stays as it is.

    Adding 1.5 * 2^23 (in float16, 1536) to the product inside a fused multiply-add rounds to an integer, whose bits
    are the low ones. NaN saturates below. HALF: mult and 1536 - zero are exact in float16.
    """
    if x.dtype == tl.int8:
        return x
    elif INTERPRET:  # no fused multiply-add: the product is exact in float64
        y = x.to(tl.float64) * mult.to(tl.float64)[None, :] - zero.to(tl.float64)[None, :]
        y = tl.minimum(tl.maximum(tl.where(y == y, y, -127.0), -127.0), 127.0)
        return ((y + 6755399441055744.0).to(tl.int64, bitcast=True) - 4843621399236968448).to(tl.int8)
    elif HALF and x.dtype == tl.float16:
        r = tl.broadcast_to(mult.to(tl.float16)[None, :], x.shape)
        c = tl.broadcast_to((1536.0 - zero).to(tl.float16)[None, :], x.shape)
        return tl.inline_asm_elementwise(
            QUANTIZE_HALF, "=r,r,r,r,r,r,r", [x, r, c], dtype=tl.int8, is_pure=False, pack=4
        )
    else:
        y = tl.fma(x.to(tl.float32), tl.broadcast_to(mult[None, :], x.shape), 12582912.0 - zero[None, :])
        y = tl.minimum(tl.maximum(y, 12582785.0), 12583039.0)
        return y.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def reorder_keys(x, M: tl.constexpr, N: tl.constexpr):
    """Within 16 keys, position 4t + 2i + e takes key 8i + 2t + e: the accumulator's registers become an operand's."""
    x = tl.permute(tl.reshape(x, [M, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(x, [M, N])


@triton.jit
def key_at(position):
    """The key that :func:`reorder_keys` puts at a position."""
    inner = position % 16
    return position - inner + (inner // 2) % 2 * 8 + inner // 4 * 2 + inner % 2


@triton.jit
def exponent_units(c_ptr, D: tl.constexpr, BIAS: tl.constexpr):
    """M, F, what a score of one adds to a distance, and what stands for a masked key's score.

    With a bias, scores are exponents. Both stand-ins are so low that a distance from them is weightless, and not so low
    that it leaves 32 bits without a sign.
    """
    mult = tl.load(c_ptr + 6 * D)
    exp_bits = tl.load(c_ptr + 6 * D + 1)
    if BIAS:
        return mult, exp_bits, -1, MASKED
    else:
        return mult, exp_bits, 0 - mult, tl.load(c_ptr + 6 * D + 6)


@triton.jit
def distance_base(top, step, exp_bits, BIAS: tl.constexpr):
    """A row's distance from a score of zero, int32 in units of 2^-F octaves, if ``top`` is its best score.

    The shift of 17 octaves is included, and the 128th of an octave that keeps the largest weight inside a byte.
    """
    base = (SHIFT_OCTAVES << exp_bits) + (1 << (exp_bits - 7)) - top * step
    if BIAS:  # a row without keys: all are far
        base = tl.where(top == MASKED, 0, base)
    return base


@triton.jit
def _intensity(score, base, step, exp_bits, CURVE: tl.constexpr):
    # Plain twin.
    distance = (base + score * step).to(tl.uint32, bitcast=True)
    octaves = distance >> exp_bits.to(tl.uint32)
    fraction = distance << (32 - exp_bits).to(tl.uint32)
    ones = tl.full(distance.shape, 0xFFFFFFFF, tl.uint32)
    g = fraction ^ ones
    if CURVE:
        g = tl.umulhi(g, tl.umulhi(fraction, tl.full(distance.shape, 0x55555555, tl.uint32)) ^ ones)
    count = tl.minimum(octaves, tl.full(octaves.shape, 32, tl.uint32)).to(tl.uint64)
    return ((g.to(tl.uint64) + 4294967296) >> count).to(tl.int32)


@triton.jit
def weights_standard(score, base, step, exp_bits, INTERPRET: tl.constexpr):
    """127 less the weight of each key, int8. score, base: int32, one shape; base from :func:`distance_base`."""
    if INTERPRET:
        return (127 - ((_intensity(score, base, step, exp_bits, False) + 128) >> 8)).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            _STANDARD, "=r" + ",r" * 20, [score, base, step, exp_bits, 1 << (32 - exp_bits)],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def weights_high(score, base, step, exp_bits, INTERPRET: tl.constexpr):
    """Upper and lower plane of 16-bit weights, int8: weight = 256 * (127 - upper) - 1 - lower."""
    if INTERPRET:
        p = _intensity(score, base, step, exp_bits, True) - 1
        upper = (p + 128) >> 8
        return (127 - upper).to(tl.int8), (-1 - (p - (upper << 8))).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            HIGH, "=r,=r" + ",r" * 20, [score, base, step, exp_bits, 1 << (32 - exp_bits)],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def accumulate(
    acc, low, sums, low_sums, score, base, vt, step, exp_bits, W: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add a tile of W keys to the complements' product with V and their row sums; low ones with HIGH only."""
    score = reorder_keys(score, BLOCK_M, W)
    base = reorder_keys(tl.broadcast_to(base[:, None], [BLOCK_M, W]), BLOCK_M, W)
    ones = tl.full([W, 16], 1, tl.int8)  # the row sum rides on the tensor cores
    if HIGH:
        p, p_low = weights_high(score, base, step, exp_bits, INTERPRET)
        low = tl.dot(p_low, tl.trans(vt), low, out_dtype=tl.int32)
        low_sums = tl.dot(p_low, ones, low_sums, out_dtype=tl.int32)
    else:
        p = weights_standard(score, base, step, exp_bits, INTERPRET)
    acc = tl.dot(p, tl.trans(vt), acc, out_dtype=tl.int32)
    sums = tl.dot(p, ones, sums, out_dtype=tl.int32)
    return acc, low, sums, low_sums


@triton.jit
def leading_zeros(x, INTERPRET: tl.constexpr):
    """Leading zero bits of positive int32 x."""
    if INTERPRET:
        n = tl.zeros_like(x)
        for i in tl.static_range(5):
            width: tl.constexpr = 16 >> i
            small = (x >> (32 - width)) == 0
            n += tl.where(small, width, 0)
            x = tl.where(small, x << width, x)
            # An int32 that has its sign bit set shifts in ones; it is nonzero all the same.
        return n
    else:
        return tl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def reciprocal(row_sum, BITS: tl.constexpr, PEAK: tl.constexpr, INTERPRET: tl.constexpr):
    """2^BITS / row_sum within one unit, int32: three Newton steps on high words, from a linear seed."""
    row_sum = tl.maximum(row_sum, PEAK)
    leading = leading_zeros(row_sum, INTERPRET)
    divisor = (row_sum << leading).to(tl.uint32, bitcast=True)
    slope = tl.full(divisor.shape, 2021161080, tl.uint32)
    estimate = tl.full(divisor.shape, 3031741620, tl.uint32) - tl.umulhi(divisor, slope)
    for _ in tl.static_range(3):
        error = tl.full(divisor.shape, 2147483648, tl.uint32) - tl.umulhi(divisor, estimate)
        estimate = (tl.umulhi(estimate, error) << 2) + 2
    return (estimate >> (62 - BITS - leading).to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def multiply_high(a, b):
    """High word of the product of two int32."""
    return ((a.to(tl.int64) * b.to(tl.int64)) >> 32).to(tl.int32)


@triton.jit
def normalise(
    acc, low, row_sum, low_sum, columns, c_ptr, o_d, out_up, KEYS, D: tl.constexpr, HIGH: tl.constexpr,
    INT8_OUT: tl.constexpr, OUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Accumulated complements over KEYS keys -> weighted values over row sums, in the output's units and type.

    columns: V's sum over the keys, int32 [DP].
    """
    acc = (columns * 127)[None, :] - acc
    row_sum = 127 * KEYS - row_sum
    if HIGH:
        low = (0 - columns)[None, :] - low
        acc = (acc << 2) + ((low + 32) >> 6)
        inverse = reciprocal((row_sum << 8) - KEYS - low_sum, 44, 65192, INTERPRET)
    else:
        inverse = reciprocal(row_sum, 36, 255, INTERPRET)
    mask = o_d < D
    if INT8_OUT:
        ratio = tl.load(c_ptr + 5 * D + o_d, mask=mask, other=0)
        out = multiply_high(multiply_high(acc << out_up, inverse[:, None]), ratio[None, :])
        down = out_up + tl.load(c_ptr + 6 * D + 5) - (26 if HIGH else 28)
        out = (out + (1 << (down - 1))) >> down
        return tl.minimum(tl.maximum(out, -127), 127).to(OUT)
    else:
        v_scale = tl.load(c_ptr + 4 * D + o_d, mask=mask, other=0).to(tl.float32, bitcast=True)
        unit: tl.constexpr = 2.0**-38 if HIGH else 2.0**-36
        out = (acc.to(tl.float32) * (inverse.to(tl.float32) * unit)[:, None]) * v_scale[None, :]
        if INTERPRET and OUT == tl.bfloat16:  # the interpreter truncates
            bits = out.to(tl.uint32, bitcast=True)
            out = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return out.to(OUT)
