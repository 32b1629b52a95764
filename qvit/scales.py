"""The arithmetic of quantization: from observed ranges to the constants of the integer kernels. Host-side and pure.

Everything symmetric and static. Inside a head, each channel may have its own multiplier as long as the products
``q_mult * k_mult`` agree, so that all scores of a head keep one scale; K may lose its middle, which softmax does not
see. ``docs/numerics.md`` states the arithmetic that these constants feed.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from qvit.config import GRANULARITIES
from qvit.errors import BackendError, CalibrationError, ConfigError

LOG2E = math.log2(math.e)
QMAX = 127  # symmetric int8: -128 is never used
MULT_BITS = 11  # significant bits of a multiplier, as many as a float16 has
MAX_EXP_BITS = 22  # fraction bits of the exponent; the CPU backend reads them as a float32 mantissa
MIN_EXP_BITS = 7  # the peak's offset is 2^(F - 7)
SHIFT_OCTAVES = 17  # constant shift that leaves a 16-bit intensity
DEAD_OCTAVES = 17  # beyond this distance from the row's maximum, a weight is 0 in both precisions
_PAIR_SLACK = 1 / 64  # room in the product of q's and k's multipliers to choose them in
_MIN_RANGE = 1e-30  # a smaller absolute maximum is a dead tensor
_DEAD_CHANNEL = 1e-6  # a channel this far below the tensor's maximum takes part in no balance
_MAX_O_RATIO = 63  # of V's scale to the output's; the integer that stores it holds 64, and multipliers are rounded
_LEAST_K_RANGE = 1 / 64  # of K's middle: half precision resolves little below, and zero points stay under 2^13

# Layout of a row of constants, after the six vectors over channels.
Q_MULT, K_MULT, K_ZERO, V_MULT, V_SCALE, O_RATIO = range(6)
VECTORS = 6
EXP_MULT, EXP_BITS, BIAS_MULT, BIAS_FLOOR, O_SCALE, O_RATIO_BITS, MASKED_SCORE = range(7)
SCALARS = 8


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What calibration observed at one attention module.

    Attributes:
        q_absmax: (H, D), largest magnitude of each channel of the query.
        k_min: (H, D), smallest value of each channel of the key.
        k_max: (H, D), largest value of each channel of the key.
        v_absmax: (H, D), largest magnitude of each channel of the value.
        o_absmax: (H,), largest magnitude of the attention output of each head.
    """

    q_absmax: torch.Tensor
    k_min: torch.Tensor
    k_max: torch.Tensor
    v_absmax: torch.Tensor
    o_absmax: torch.Tensor

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name).detach().to("cpu", torch.float64)
            if not torch.isfinite(value).all():
                raise CalibrationError(f"{field.name} holds NaN or Inf: the activations seen in calibration did too")
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> Ranges:
        """Ranges of float tensors q, k, v (B, H, N, D) and of the attention output o (B, H, N, D)."""
        return cls(
            q_absmax=q.abs().amax((0, 2)),
            k_min=k.amin((0, 2)),
            k_max=k.amax((0, 2)),
            v_absmax=v.abs().amax((0, 2)),
            o_absmax=o.abs().amax((0, 2, 3)),
        )


@dataclasses.dataclass(frozen=True)
class ChannelGains:
    """The per-channel part of the quantize step, float64 (H, D): a normalised tensor is ``(x - offset) * gain``."""

    q_gain: torch.Tensor
    k_offset: torch.Tensor
    k_gain: torch.Tensor
    v_gain: torch.Tensor


def channel_gains(ranges: Ranges, *, k_offset: bool, qk_balance: bool, v_channels: bool) -> ChannelGains:
    """The vectors over channels that cost nothing at run time.

    Args:
        ranges: What calibration observed.
        k_offset: Take the middle of each channel of K away before quantizing; softmax does not see it.
        qk_balance: Multiply q and divide k by the square root of their ranges' ratio, channel by channel.
        v_channels: Give each channel of V a scale of its own, undone at the output.

    Raises:
        CalibrationError: q, k or v is zero everywhere.
    """
    for name, value in (("q", ranges.q_absmax), ("k", torch.maximum(ranges.k_max, -ranges.k_min))):
        if value.max() < _MIN_RANGE:
            raise CalibrationError(f"{name} is zero on every calibration input; calibrate on real data")
    if ranges.v_absmax.max() < _MIN_RANGE:
        raise CalibrationError("v is zero on every calibration input; calibrate on real data")
    middle = (ranges.k_min + ranges.k_max) / 2 if k_offset else torch.zeros_like(ranges.k_min)
    k_absmax = k_reach(ranges, middle)
    ones = torch.ones_like(k_absmax)
    balance = v_gain = ones
    if qk_balance and k_absmax.max() > 0:
        alive = (ranges.q_absmax > _DEAD_CHANNEL * ranges.q_absmax.max()) & (k_absmax > _DEAD_CHANNEL * k_absmax.max())
        balance = torch.where(alive, k_absmax / ranges.q_absmax.clamp_min(_MIN_RANGE), ones).clamp_min(1e-12).sqrt()
        # A dead channel follows its head; the geometric mean of a head's gains is one, so that q and k share the range.
        mean = torch.where(alive, balance.log(), 0 * ones).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_min(
            1
        )
        balance = torch.where(alive, balance / mean.exp(), ones)
    if v_channels:
        v_gain = 1 / ranges.v_absmax.clamp_min(_DEAD_CHANNEL * ranges.v_absmax.max())
    return ChannelGains(balance, middle, 1 / balance, v_gain)


def k_reach(ranges: Ranges, offset: torch.Tensor) -> torch.Tensor:
    """(H, D) largest distance of K from an offset, and not less than a part of the offset itself."""
    reach = torch.maximum(ranges.k_max - offset, offset - ranges.k_min)
    return torch.maximum(reach, offset.abs() * _LEAST_K_RANGE)


def tops(absmax: torch.Tensor, granularity: str) -> torch.Tensor:
    """(H,) largest magnitude that shares a scale, of those of channels (H, D).

    Not zero: a constant K (its middle removed) has no range, nor has a head that is dead beside live ones.
    """
    top = absmax.amax(1) if granularity == "head" else absmax.max().expand(len(absmax))
    return top.clamp_min(_DEAD_CHANNEL * top.max()).clamp_min(_MIN_RANGE)


def build_scales(
    ranges: Ranges,
    *,
    softmax_scale: float,
    granularity: str = "tensor",
    k_offset: bool = True,
    qk_balance: bool = True,
    v_channels: bool = True,
    clip: dict[str, torch.Tensor] | None = None,
) -> Scales:
    """Static scales from observed ranges.

    Args:
        ranges: What calibration observed.
        softmax_scale: Factor of the scores, usually head_dim ** -0.5.
        granularity: "tensor" (one base scale for all heads) or "head".
        k_offset, qk_balance, v_channels: See :func:`channel_gains`.
        clip: Fractions (H,) in (0, 1] for "q", "k", "v": where the normalised tensor is clipped, as a part of its
            largest magnitude.

    Raises:
        ConfigError: An argument does not fit.
        CalibrationError: A range is zero, or the scores span more octaves than the exponent can hold.
    """
    if granularity not in GRANULARITIES:
        raise ConfigError(f"granularity must be one of {GRANULARITIES}, found {granularity!r}")
    if not 0 < softmax_scale < math.inf:
        raise ConfigError(f"softmax_scale must be positive and finite, found {softmax_scale!r}")
    gains = channel_gains(ranges, k_offset=k_offset, qk_balance=qk_balance, v_channels=v_channels)
    observed = {
        "q": ranges.q_absmax * gains.q_gain,
        "k": k_reach(ranges, gains.k_offset) * gains.k_gain,
        "v": ranges.v_absmax * gains.v_gain,
    }
    base = {}
    for name, value in observed.items():
        top = tops(value, granularity)
        if clip is not None:
            top = top * clip[name].to(top)
        base[name] = top[:, None] / QMAX  # (H, 1), scale of the normalised tensor
    o_scale = ranges.o_absmax if granularity == "head" else ranges.o_absmax.max().expand(len(ranges.o_absmax))
    # An output far smaller than V, whose values cancel, gets the finest int8 that the output ratio can hold.
    o_scale = torch.maximum(o_scale / QMAX, (base["v"] / gains.v_gain).amax(1) / _MAX_O_RATIO)
    exp_bits, exp_mult, shrink = _exponent_units(
        base["q"] * base["k"] * softmax_scale * LOG2E, ranges.q_absmax.shape[1]
    )
    q_mult, k_mult = _multiplier_pairs(gains.q_gain / base["q"], gains.k_gain / base["k"], shrink)
    zero = (gains.k_offset * k_mult).round()
    return Scales(
        q_mult=q_mult,
        k_mult=k_mult,
        k_zero=_HALF_ROUNDER - (_HALF_ROUNDER - zero).half().double(),
        v_mult=gains.v_gain / base["v"],
        o_scale=o_scale,
        exp_bits=exp_bits,
        exp_mult=exp_mult,
        softmax_scale=softmax_scale,
    )


def _exponent_units(score_scale: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fraction bits F, integer multiplier M, and the factor that the product of multipliers takes to make M exact.

    ``score_scale``: (H, 1), octaves per unit of the integer score. With the bias's reach, every difference of two
    exponents, the constant shift included, stays under 2^31 units of 2^-F octaves.
    """
    score_range = 2 * QMAX**2 * head_dim * score_scale[:, 0]
    # M is up to a 64th and one unit more than exact.
    span = 2 * score_range * (1 + _PAIR_SLACK) + DEAD_OCTAVES + SHIFT_OCTAVES + 2
    exp_bits = torch.floor(torch.log2((2**31 - 1 - 4 * QMAX**2 * head_dim) / span))
    if (exp_bits < MIN_EXP_BITS).any():
        raise CalibrationError(
            f"the scores span up to {score_range.max():.3g} octaves, more than the {2**23} that the exponent holds: "
            "the largest values of q and k are beyond what int8 attention can represent"
        )
    exp_bits = exp_bits.clamp_max(MAX_EXP_BITS)
    exact = score_scale[:, 0] * 2**exp_bits
    exp_mult = torch.ceil(exact * (1 + _PAIR_SLACK))
    return exp_bits.int(), exp_mult.int(), (exact / exp_mult)[:, None]


def _multiplier_pairs(
    q_mult: torch.Tensor, k_mult: torch.Tensor, shrink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multipliers of q and k with few bits whose product is ``q_mult * k_mult * shrink``, to about 4e-5.

    Two roundings to 11 bits would leave 3e-4, which large scores show. Of 32 neighbouring values for q, take the one
    whose partner for k rounds best; ``shrink`` leaves both the room.
    """
    target = q_mult * k_mult * shrink
    steps = 1 - torch.arange(32, dtype=torch.float64) * 2.0**-MULT_BITS
    start = q_mult * shrink.sqrt() * (1 + _PAIR_SLACK / 2)
    q = _round_significant(start[..., None] * steps, MULT_BITS)
    k = _round_significant(target[..., None] / q, MULT_BITS)
    best = (q * k / target[..., None] - 1).abs().argmin(-1, keepdim=True)
    return q.gather(-1, best)[..., 0], k.gather(-1, best)[..., 0]


_HALF_ROUNDER = 1536  # 1.5 * 2^10: added to a float16 below 512 it rounds to an integer; less a zero point, likewise


def _round_significant(x: torch.Tensor, bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(mantissa * 2**bits), exponent - bits)


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """Constants of one attention: a frozen value, on the CPU.

    ``x_i8 = clamp(round_half_even(x * mult - zero), -127, 127)``, exact up to its one rounding, with a zero point for K
    alone. Multipliers are rounded to 11 significant bits when the value is made, so that a fused multiply-add in
    float16 can do it.

    Attributes:
        q_mult: (H, D) float32.
        k_mult: (H, D) float32; q_mult * k_mult is constant inside a head.
        k_zero: (H, D) float32, integers.
        v_mult: (H, D) float32.
        o_scale: (H,) float32, scale of an int8 output: real = int * o_scale.
        exp_bits: (H,) int32, fraction bits F of an exponent.
        exp_mult: (H,) int32, M: an integer score times M is its exponent in units of 2^-F octaves.
        softmax_scale: Factor of the scores in the float model.
    """

    q_mult: torch.Tensor
    k_mult: torch.Tensor
    k_zero: torch.Tensor
    v_mult: torch.Tensor
    o_scale: torch.Tensor
    exp_bits: torch.Tensor
    exp_mult: torch.Tensor
    softmax_scale: float

    def __post_init__(self):
        for name in ("q_mult", "k_mult", "v_mult"):
            object.__setattr__(self, name, _round_significant(getattr(self, name), MULT_BITS).float())
        for name in ("k_zero", "o_scale"):
            object.__setattr__(self, name, getattr(self, name).float())
        for name in ("q_mult", "k_mult", "v_mult", "o_scale"):
            value = getattr(self, name)
            if not (torch.isfinite(value).all() and (value > 0).all()):
                raise CalibrationError(f"{name} must be positive and finite, found {value.min()} to {value.max()}")

    @property
    def num_heads(self) -> int:
        return self.q_mult.shape[0]

    @property
    def head_dim(self) -> int:
        return self.q_mult.shape[1]

    @functools.cached_property
    def half_exact(self) -> bool:
        """Multipliers and zero points are exact in float16, so that float16 operands can be quantized in it."""
        mults = torch.stack([self.q_mult, self.k_mult, self.v_mult])
        rounder = _HALF_ROUNDER - self.k_zero
        return bool((mults >= 2**-14).all() and (mults == mults.half()).all() and (rounder == rounder.half()).all())

    @functools.cached_property
    def o_ratio_bits(self) -> int:
        """p: the output ratio v_scale / o_scale is stored as an integer times 2^-p; at most 40, for 32-bit shifts."""
        ratio = float((1 / self.v_mult.double() / self.o_scale.double()[:, None]).max())
        return min(40, 30 - math.ceil(math.log2(ratio)))

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        granularity: str = "tensor",
        channels: bool = True,
    ) -> Scales:
        """Scales for float q, k, v (B, H, N, D), by their own largest magnitudes.

        Args:
            q, k, v: Sample operands.
            softmax_scale: Default head_dim ** -0.5.
            granularity: "tensor" or "head".
            channels: Use the per-channel vectors (K's middle, q-k balance, V's channels).

        Raises:
            ConfigError: An argument does not fit.
            CalibrationError: q, k or v is zero everywhere, or holds NaN or Inf, or no int8 scales exist for them.
        """
        if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ConfigError(f"q, k and v must have one shape (B, H, N, D), found {shapes}")
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        q, k, v = (x.detach().double() for x in (q, k, v))
        o = torch.softmax(q @ k.mT * scale, -1) @ v
        return build_scales(
            Ranges.of(q, k, v, o),
            softmax_scale=scale,
            granularity=granularity,
            k_offset=channels,
            qk_balance=channels,
            v_channels=channels,
        )

    def constants(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """All constants in one int32 tensor (H, 6 * D + 8), built once a device; float32 values are stored as bits."""
        built = self.__dict__.setdefault("_built", {})
        device = torch.device(device)
        if device not in built:
            built[device] = (self._constants() if device.type == "cpu" else self.constants()).to(device)
        return built[device]

    def _constants(self) -> torch.Tensor:
        v_scale = (1 / self.v_mult.double()).float()
        bits = self.o_ratio_bits
        if bits < 24:
            raise CalibrationError(
                f"values are up to {2 ** (30 - bits)} times larger than the attention output's scale; an int8 output "
                "cannot be represented, recalibrate on data with larger outputs"
            )
        o_ratio = torch.round(v_scale.double() / self.o_scale.double()[:, None] * 2**bits).int()
        vectors = [self.q_mult, self.k_mult, self.k_zero, self.v_mult, v_scale]
        bias_mult = (LOG2E * torch.exp2(self.exp_bits.double())).float()
        score_range = 2 * QMAX**2 * self.head_dim * self.exp_mult.long()
        bias_floor = (-score_range - (DEAD_OCTAVES << self.exp_bits.long())).int()
        # Below every score by 64 octaves: without weight, and its distance from any score fits into 32 bits.
        masked = -(QMAX**2) * self.head_dim - (64 << self.exp_bits.long()) // self.exp_mult - 1
        o_bits = torch.full_like(self.exp_bits, bits)
        scalars = [
            self.exp_mult,
            self.exp_bits,
            _bits(bias_mult),
            bias_floor,
            _bits(self.o_scale),
            o_bits,
            masked.int(),
        ]
        scalars += [torch.zeros_like(o_bits)] * (SCALARS - len(scalars))
        return torch.cat([*map(_bits, vectors), o_ratio, torch.stack(scalars, 1)], 1).contiguous()

    @classmethod
    def from_constants(cls, constants: torch.Tensor, softmax_scale: float) -> Scales:
        """The inverse of :meth:`constants`."""
        head_dim = head_dim_of(constants)
        constants = constants.cpu()
        vector = lambda i: constants[:, i * head_dim : (i + 1) * head_dim].contiguous()  # noqa: E731
        scalar = lambda i: constants[:, VECTORS * head_dim + i].contiguous()  # noqa: E731
        return cls(
            *(vector(i).view(torch.float32) for i in (Q_MULT, K_MULT, K_ZERO, V_MULT)),
            o_scale=scalar(O_SCALE).view(torch.float32),
            exp_bits=scalar(EXP_BITS),
            exp_mult=scalar(EXP_MULT),
            softmax_scale=softmax_scale,
        )

    def to_dict(self) -> dict:
        """A dictionary of plain lists that JSON holds exactly."""
        return {
            f.name: v.tolist() if isinstance(v := getattr(self, f.name), torch.Tensor) else v
            for f in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: dict) -> Scales:
        """The inverse of :meth:`to_dict`."""
        names = {f.name for f in dataclasses.fields(cls)}
        if set(data) != names:
            raise CalibrationError(f"scales need the keys {sorted(names)}, found {sorted(data)}")
        ints = ("exp_bits", "exp_mult")
        tensor = lambda k, v: torch.tensor(v, dtype=torch.int32 if k in ints else torch.float32)  # noqa: E731
        return cls(**{k: v if k == "softmax_scale" else tensor(k, v) for k, v in data.items()})


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.contiguous().view(torch.int32)


def head_dim_of(constants: torch.Tensor) -> int:
    """The head dimension D of a tensor of constants (H, 6 * D + 8).

    Raises:
        BackendError: Not an int32 matrix of that width.
    """
    head_dim, rest = divmod(constants.shape[-1] - SCALARS, VECTORS)
    if constants.dtype != torch.int32 or constants.ndim != 2 or rest or head_dim < 1:
        raise BackendError(
            f"constants must be int32 (H, {VECTORS} * head_dim + {SCALARS}), found {constants.dtype} "
            f"{tuple(constants.shape)}; make them with Scales.constants()"
        )
    return head_dim
