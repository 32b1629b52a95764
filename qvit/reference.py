"""Integer attention in plain PyTorch: the definition of the numerics, bit for bit, and the CPU backend.

``docs/numerics.md`` is the specification in words. Products of int8 matrices run as floating-point matrix multiplies
inside the bounds where these are exact (float32 on the CPU, float64 elsewhere), so nothing here depends on the order
of a sum.
"""

from __future__ import annotations

import math

import torch

from qvit import scales as S

MASKED = -(2**31)  # exponent of a masked key
BLOCK_SCORES = 1 << 18  # scores worked on at a time on the CPU, so that the passes stay in the cache
PEAK = {"standard": 255, "high": 65192}  # smallest weight of a row's best key
RECIPROCAL_BITS = {"standard": 36, "high": 44}
ACC_PEAK = {"standard": 255, "high": 1020}  # largest weight of a key in units of the accumulator
MAX_TOKENS = {"standard": 66_000, "high": 16_500}


def split_heads(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """A packed projection (B, N, 3 * H * D) as (3, B, H, N, D); a view where its strides allow it."""
    batch, tokens, channels = qkv.shape
    # No -1, for the batch may be 0.
    return qkv.reshape(batch, tokens, 3, heads, channels // (3 * heads)).permute(2, 0, 3, 1, 4)


# ---------------------------------------------------------------- the steps of the arithmetic


def quantize_operand(x: torch.Tensor, mult: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """The quantize step: integers in -127..127, held in float32; NaN saturates below.

    Args:
        x: (B, H, N, D) float. The product with 11 bits is exact in float64, so there is one rounding, as a fused
            multiply-add does it.
        mult: (H, D) float32.
        zero: (H, D) float32 integers, or None.
    """
    y = x.double() * mult[:, None, :].double()
    if zero is not None:
        y.sub_(zero[:, None, :])
    return y.clamp_(-S.QMAX, S.QMAX).round_().nan_to_num_(-S.QMAX).float()


def intensity(distance: torch.Tensor, exp_bits: torch.Tensor, *, curve: bool) -> torch.Tensor:
    """The 16-bit intensity of a key: 2^16 * 2^-distance, int64, at least 1.

    Args:
        distance: int64, non-negative, units of 2^-F octaves.
        exp_bits: F, broadcastable to it.
        curve: 2^-g by 1 - g (2/3 - g/6) instead of the line 1 - g/2.
    """
    octaves = distance >> exp_bits
    complement = 0xFFFFFFFF - ((distance << (32 - exp_bits)) & 0xFFFFFFFF)
    if curve:
        slope = 0xFFFFFFFF - ((0xFFFFFFFF - complement) * 0x55555555 >> 32)
        # A product of two 32-bit numbers needs 64 bits without a sign: take it in two halves of the slope.
        complement = (complement * (slope >> 16) + (complement * (slope & 0xFFFF) >> 16)) >> 16
    return (complement + 2**32) >> (octaves + S.SHIFT_OCTAVES).clamp_max(32)


def reciprocal(row_sum: torch.Tensor, precision: str) -> torch.Tensor:
    """Fixed-point reciprocal of a row sum (int64): within one unit of 2^36 / sum (standard), 2^44 / sum (high).

    Three Newton steps on the high words of 32-bit products, from a linear seed, then one shift; no division.
    """
    row_sum = row_sum.clamp_min(PEAK[precision])
    leading = 32 - torch.frexp(row_sum.double()).exponent.long()
    divisor = row_sum << leading  # [2^31, 2^32)
    estimate = 3031741620 - (divisor * 2021161080 >> 32)  # 48/17 - 32/17 d, times 2^30
    for _ in range(3):
        error = 2**31 - (divisor * estimate >> 32)
        estimate = ((estimate * error >> 32) << 2) + 2
    return estimate >> (62 - RECIPROCAL_BITS[precision] - leading)


def out_shift(num_keys: int, precision: str) -> int:
    """Bits that an accumulator can be moved up without leaving int32, for the int8 output."""
    return 31 - (num_keys * ACC_PEAK[precision] * S.QMAX).bit_length()


def out_rounding_shift(num_keys: int, precision: str, ratio_bits: int | torch.Tensor) -> int | torch.Tensor:
    """Bits by which the int8 output is rounded at the end; without one, nothing is left to round.

    Args:
        num_keys: Tokens.
        precision: "standard" or "high".
        ratio_bits: Of the output ratio's integer, :attr:`qvit.Scales.o_ratio_bits`.
    """
    return out_shift(num_keys, precision) + ratio_bits - (28 if precision == "standard" else 26)


# ---------------------------------------------------------------- attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    precision: str = "standard",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Integer attention by the product's arithmetic.

    Args:
        q, k, v: (B, H, N, D), float16, bfloat16, float32 or int8, any strides.
        constants: int32 (H, 6 * D + 8), from :meth:`qvit.scales.Scales.constants`.
        bias: int32 in exponent units (:func:`exponent_bias`), (G, H or 1, N, N) with B a multiple of G, or None.
        precision: "standard" or "high".
        out_dtype: Type of the result; default that of q.

    Returns:
        (B, N, H, D), contiguous.
    """
    batch, heads, tokens, head_dim = q.shape
    out = torch.empty(batch, tokens, heads, head_dim, dtype=out_dtype or q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    vectors = constants[:, : S.VECTORS * head_dim].unflatten(1, (S.VECTORS, head_dim))
    mult = [vectors[:, i].contiguous().view(torch.float32) for i in (S.Q_MULT, S.K_MULT, S.V_MULT, S.K_ZERO)]
    group = 1 if bias is None else bias.shape[0]
    images = max(1, BLOCK_SCORES // (heads * tokens * tokens)) if q.device.type == "cpu" else batch
    rows = tokens if images > 1 else max(1, min(tokens, 4 * BLOCK_SCORES // (heads * tokens)))
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        for start in range(0, batch, images):
            span = slice(start, start + images)
            block = [_operand(x[span], m) for x, m in ((q, mult[0]), (v, mult[2]))]
            key = _operand(k[span], mult[1], mult[3])
            index = torch.arange(start, min(start + images, batch), device=q.device) % group
            for row in range(0, tokens, rows):
                part = slice(row, row + rows)
                addend = None if bias is None else bias[index, :, part]
                acc, row_sum = _accumulate(block[0][:, :, part], key, block[1], constants, addend, precision)
                out[span, part] = _normalise(acc, row_sum, constants, tokens, precision, out.dtype).transpose(1, 2)
    return out


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pad: torch.Tensor | None,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    pattern: torch.Tensor,
    *,
    precision: str = "standard",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`attention` in windows of an image; the definition is the copy that it makes of every window.

    Args:
        q, k, v: (B, L, H, D), float or int8, any strides.
        pad: (3, H, D), the q, k and v of a position outside the image, or None: zeros.
        constants: int32 (H, 6 * D + 8).
        bias: int32 (patterns, H or 1, N, N) in exponent units, that or :func:`pack_window_bias` of it, or None.
        rows: int32 (windows, N): the image's position of each position of a window, -1 outside.
        pattern: int32 (windows,): the bias that a window takes.
        precision, out_dtype: As for :func:`attention`.

    Returns:
        (B, L, H, D), contiguous.
    """
    batch, length, heads, head_dim = q.shape
    # One row more than the image has is what a position outside it reads, and where its result goes.
    index = torch.where(rows < 0, length, rows).long()
    pads = q.new_zeros(3, heads, head_dim) if pad is None else pad
    q, k, v = (_cut(x, last, index) for x, last in zip((q, k, v), pads, strict=True))
    if bias is not None:
        bias = unpack_window_bias(bias, rows.shape[1]) if bias.ndim == 3 else bias.expand(-1, heads, -1, -1)
        bias = bias[pattern.long()]
    out = attention(q, k, v, constants, bias, precision=precision, out_dtype=out_dtype)
    image = torch.empty(batch, length + 1, heads, head_dim, dtype=out.dtype, device=out.device)
    image[:, index.flatten()] = out.reshape(batch, index.numel(), heads, head_dim)
    return image[:, :length].contiguous()


def _cut(x: torch.Tensor, last: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x (B, L, H, D), and after them the row ``last``, for index (windows, N): (B * windows, H, N, D)."""
    rows = torch.cat([x, last.to(x.dtype).expand(len(x), 1, -1, -1)], 1)
    return rows[:, index].flatten(0, 1).transpose(1, 2)


def _operand(x: torch.Tensor, mult: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    return x.float() if x.dtype == torch.int8 else quantize_operand(x, mult, zero)


def _per_head(constants: torch.Tensor, index: int) -> torch.Tensor:
    head_dim = S.head_dim_of(constants)
    return constants[:, S.VECTORS * head_dim + index, None, None]


def _exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for integer-valued float32 tensors whose sums stay under 2^24."""
    return a @ b if a.device.type == "cpu" else (a.double() @ b.double()).float()


def _accumulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulator P V and row sum of P, int64, from quantized operands (float32 integers)."""
    exp_bits = _per_head(constants, S.EXP_BITS)
    distance, masked = _distances(_exact_product(q, k.mT), constants, bias)
    if precision == "standard":
        # What the kernels shift into place, float32's own bits hold: 2^-g by the line is the mantissa, and one unit
        # less in the last place is the complement's missing one. The nearest integer is then the same byte.
        bits = distance.mul_(-1 << (23 - exp_bits)).add_(((127 + 8) << 23) - 1)
        planes = [bits.view(torch.float32).round_()]
    else:
        weight = intensity(distance.long(), exp_bits.long(), curve=True) - 1
        upper = (weight + 128) >> 8
        planes = [upper.float(), (weight - (upper << 8)).float()]
    if masked is not None:
        planes = [p.masked_fill_(masked, 0.0) for p in planes]
    acc, sums = zip(*((_value_product(p, v), p.sum(-1).long()) for p in planes), strict=True)
    if precision == "standard":
        return acc[0], sums[0]
    return (acc[0] << 2) + ((acc[1] + 32) >> 6), (sums[0] << 8) + sums[1]


def _distances(
    scores: torch.Tensor, constants: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Distances from the row's maximum, int32 in units of 2^-F octaves, past 40 octaves all alike; and masked keys.

    ``scores`` (float32, overwritten) are exact integers; the peak's offset of 1/128 octave is included.
    """
    mult, exp_bits = _per_head(constants, S.EXP_MULT), _per_head(constants, S.EXP_BITS)
    limit, peak = 40 << exp_bits, 1 << (exp_bits - S.MIN_EXP_BITS)
    if bias is None:
        far = torch.div(limit, mult, rounding_mode="floor") + 1
        scores.sub_(scores.amax(-1, keepdim=True)).neg_().clamp_(max=far.float())
        return scores.int().mul_(mult).add_(peak).clamp_(max=limit), None
    masked = bias == MASKED
    exponent = torch.where(masked, MASKED, scores.int() * mult + bias)
    return (exponent.amax(-1, keepdim=True) + peak - exponent).clamp_(max=limit), masked


def _value_product(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact P V, int64: float32 matrix products over at most 512 keys each."""
    tokens = v.shape[2]
    parts = (_exact_product(weights[..., i : i + 512], v[:, :, i : i + 512]).long() for i in range(0, tokens, 512))
    return sum(parts)


def _normalise(
    acc: torch.Tensor,
    row_sum: torch.Tensor,
    constants: torch.Tensor,
    tokens: int,
    precision: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """acc / row_sum in the output's units, by the row's reciprocal."""
    head_dim = acc.shape[-1]
    inverse = reciprocal(row_sum, precision)[..., None]
    if out_dtype == torch.int8:
        ratio = constants[:, None, S.O_RATIO * head_dim : (S.O_RATIO + 1) * head_dim].long()
        down = out_rounding_shift(tokens, precision, _per_head(constants, S.O_RATIO_BITS).long())
        scaled = (((acc << out_shift(tokens, precision)) * inverse) >> 32) * ratio >> 32
        return ((scaled + (1 << (down - 1))) >> down).clamp(-S.QMAX, S.QMAX).to(torch.int8)
    v_scale = constants[:, None, S.V_SCALE * head_dim : (S.V_SCALE + 1) * head_dim].contiguous().view(torch.float32)
    unit = 2.0 ** -(36 if precision == "standard" else 38)
    return ((acc.float() * (inverse.float() * unit)) * v_scale).to(out_dtype)


def exponent_bias(bias: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """An additive bias or mask in exponent units.

    Args:
        bias: (..., H or 1, N, N); bool (True takes part), or float in natural-log units. Finite values are a bias,
            and so far below the row's largest that the key cannot count they are held there; -inf masks a key, as
            do NaN and +inf, which mean nothing.
        constants: int32 (H, 6 * D + 8), on the same device.

    Returns:
        int32 (..., H, N, N); each row's maximum is 0, masked keys hold -2^31.
    """
    mult = _per_head(constants, S.BIAS_MULT).contiguous().view(torch.float32)
    floor = _per_head(constants, S.BIAS_FLOOR)
    if bias.dtype == torch.bool:
        return torch.where(bias, 0, MASKED).int().expand(*bias.shape[:-3], len(constants), *bias.shape[-2:])
    masked = ~torch.isfinite(bias)
    if not bias.numel():  # a row without keys has no largest
        return masked.int().expand(*bias.shape[:-3], len(constants), *bias.shape[-2:])
    bias = bias.float().masked_fill(masked, -math.inf)
    top = bias.amax(-1, keepdim=True)
    below = (bias - torch.where(torch.isfinite(top), top, 0.0)).double() * mult.double()
    units = torch.maximum(below, floor.double()).round().int()
    return torch.where(masked, MASKED, units)


# The order of a packed bias: 16 rows a block, in it tiles of 8 keys, in them 8 rows, 4 lanes, both halves of the rows,
# 2 neighbouring keys. So the accumulators of a product of 16 x 64 lie in a warp, 16 bytes of a thread side by side.
PACKED_KEYS = 64
_PACKED = (0, 1, 2, 5, 4, 6, 3, 7)  # from patterns, heads, block, half, row, tile, lane, key
_UNPACKED = (0, 1, 2, 6, 4, 3, 5, 7)  # and back


def pack_window_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias of windows in the order in which a warp reads it.

    Args:
        bias: int32 (patterns, H, N, N) in exponent units, N up to 64; no key is masked, for which the kernel that
            reads the packed form does not look.

    Returns:
        int32 (patterns, H, 64 times N rounded up to whole blocks of 16 rows), contiguous.
    """
    patterns, heads, tokens, _ = bias.shape
    blocks = -(-tokens // 16)
    wide = bias.new_zeros(patterns, heads, 16 * blocks, PACKED_KEYS)
    wide[:, :, :tokens, :tokens] = bias
    wide = wide.reshape(patterns, heads, blocks, 2, 8, 8, 4, 2).permute(_PACKED)
    return wide.reshape(patterns, heads, -1).contiguous()


def unpack_window_bias(packed: torch.Tensor, tokens: int) -> torch.Tensor:
    """What was given to :func:`pack_window_bias`, int32 (patterns, H, tokens, tokens)."""
    patterns, heads, _ = packed.shape
    wide = packed.reshape(patterns, heads, -1, 8, 8, 4, 2, 2).permute(_UNPACKED)
    return wide.reshape(patterns, heads, -1, PACKED_KEYS)[:, :, :tokens, :tokens]


# ---------------------------------------------------------------- the published arithmetic (QFlash, arXiv 2604.25306)

PAPER_KEY_TILE = 64  # part of the arithmetic: the running maximum moves from tile to tile
PAPER_MIN = -(2**20)  # "minus infinity" of the published code; Algorithm 1 prints -2^21


def quantize_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic symmetric per-tensor quantization: int8 values and the scale (a float32 scalar tensor)."""
    scale = x.abs().amax().float() / S.QMAX
    return (x.float() / scale).round().clamp(-S.QMAX, S.QMAX).nan_to_num(0.0).to(torch.int8), scale


def paper_constants(q_scale: torch.Tensor, k_scale: torch.Tensor, softmax_scale: float, *, text: bool) -> torch.Tensor:
    """int32 (5,): R, M_e, M_r, its shift, M of the scale release (paper, equations of Algorithm 1), on the device."""
    s = q_scale.double() * k_scale.double() * (softmax_scale * S.LOG2E)
    one = torch.round(1 / s)
    if text:
        ratio = S.QMAX * s
        shift = 8 - torch.floor(torch.log2(ratio))
        requant = torch.floor(ratio * torch.exp2(shift))
    else:
        shift = torch.full_like(s, 16)
        requant = torch.round(S.QMAX * s * 2**16)
    values = torch.stack([one, torch.round(-s * 2**16), requant, shift, torch.round(2**30 / one)])
    return values.nan_to_num(0.0).clamp(-(2**31) + 1, 2**31 - 1).int()


def paper_bias(bias: torch.Tensor, q_scale: torch.Tensor, k_scale: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """An additive float bias in units of the integer score, int32; -inf is the published finite minimum."""
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, -math.inf)
    units = bias.double() / (q_scale.double() * k_scale.double() * softmax_scale)
    return units.clamp(PAPER_MIN, 2**20).nan_to_num(0.0).round().int()


def wrap_int32(x: torch.Tensor) -> torch.Tensor:
    """int64 to what an int32 would hold."""
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31


def shift_exp2(x: torch.Tensor, one: torch.Tensor, exp_mult: torch.Tensor) -> torch.Tensor:
    """ShiftExp2 of the paper: 2^(x s) in units of R = 1/s, for x <= 0."""
    octaves = wrap_int32(x * exp_mult) >> 16
    remainder = wrap_int32(x + octaves * one)
    return wrap_int32((remainder >> 1) + one) >> octaves.clamp(0, 31)


def scale_release(x: torch.Tensor, factor: torch.Tensor, mult: torch.Tensor) -> torch.Tensor:
    """ScaleRelease of the paper: x * factor / R, rounded."""
    return wrap_int32((x * factor * mult + (1 << 29)) >> 30)


def attention_paper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    text: bool = False,
) -> torch.Tensor:
    """QFlash close to its published code (docs/numerics.md, section 6), or with ``text`` as Algorithm 1 prints it.

    Args:
        q, k, v: (B, H, N, D) int8.
        constants: From :func:`paper_constants`.
        bias: int32 in score units (G, H or 1, N, N), B a multiple of G, or None.
        text: Floor where the print floors, and start the maximum at -2^21.

    Returns:
        (B, N, H, D) int8, at V's scale.
    """
    one, exp_mult, requant, shift, release = constants.long().unbind()
    rounding = 0 if text else 1 << 15
    product = lambda a, b: _exact_product(a.float(), b.float()).long()  # noqa: E731
    tokens = q.shape[2]
    top = torch.full_like(q[..., :1], 0, dtype=torch.long) + (2 * PAPER_MIN if text else PAPER_MIN)
    row_sum = torch.zeros_like(top)
    acc = torch.zeros(q.shape, dtype=torch.long, device=q.device)
    for start in range(0, tokens, PAPER_KEY_TILE):
        keys = slice(start, start + PAPER_KEY_TILE)
        score = product(q, k[:, :, keys].mT)
        if bias is not None:
            score = (score.unflatten(0, (-1, len(bias))) + bias[..., keys]).flatten(0, 1)
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        pad = (-score.shape[-1]) % PAPER_KEY_TILE
        if pad and not text:  # the code's padded keys are ordinary scores of -2^20, and can leak
            score = torch.nn.functional.pad(score, (0, pad), value=PAPER_MIN)
        weight = (wrap_int32(shift_exp2(score - new_top, one, exp_mult) * requant + rounding) >> shift).clamp_max(
            S.QMAX
        )
        weight = weight.to(torch.int8).long()
        alpha = shift_exp2(top - new_top, one, exp_mult)
        row_sum = scale_release(row_sum, alpha, release) + weight.sum(-1, keepdim=True)
        acc = scale_release(acc, alpha, release) + product(weight[..., : v[:, :, keys].shape[2]], v[:, :, keys])
        top = new_top
    mode = "floor" if text else "trunc"
    row_sum = torch.where(row_sum == 0, 1, row_sum)
    out = torch.div(acc, row_sum, rounding_mode=mode).clamp(-S.QMAX - 1, S.QMAX)
    return out.to(torch.int8).transpose(1, 2).contiguous()
