"""From ranges to constants: what the vectors over channels promise, and what is refused."""

import dataclasses
import math

import pytest
import torch

from qvit import BackendError, CalibrationError, ConfigError, Scales, attention
from qvit import scales as S

SHAPE = (2, 3, 50, 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"granularity": "heads"}, "granularity must be one of .*'tensor', 'head'.* found 'heads'"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive and finite, found 0.0"),
        ({"softmax_scale": -1.0}, "softmax_scale must be positive"),
    ],
    ids=["granularity", "zero", "negative"],
)
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(ConfigError, match=words):
        Scales.from_tensors(*torch.randn(3, 1, 2, 5, 8), **arguments)
    with pytest.raises(ConfigError, match=r"one shape \(B, H, N, D\), found \(2, 5, 8\)"):
        Scales.from_tensors(*torch.randn(3, 2, 5, 8))


def ranges(q, k, v):
    o = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
    return S.Ranges.of(q, k, v, o)


def sample():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *SHAPE)
    gain = torch.logspace(-1, 1, 16)
    return q * gain, k / gain + torch.linspace(-3, 3, 16), v * gain


def test_vectors_use_the_whole_range_of_every_channel():
    q, k, v = sample()
    s = S.build_scales(ranges(q, k, v), softmax_scale=0.25)
    top = lambda x, m, z=0.0: (x * m - z).abs().amax((0, 2))  # noqa: E731
    assert top(v, s.v_mult[:, None]).allclose(torch.full((3, 16), 127.0), rtol=1e-3)
    k_top = top(k, s.k_mult[:, None], s.k_zero[:, None])
    q_top = top(q, s.q_mult[:, None])
    assert k_top.max() <= 127.6 and q_top.max() <= 127.1
    # Balanced: a channel of q uses as much of its range as that channel of k, up to one factor a head.
    ratio = q_top / k_top
    assert (ratio / ratio[:, :1]).allclose(torch.ones(3, 16), rtol=4e-2)


@pytest.mark.parametrize("switch", ["k_offset", "qk_balance", "v_channels"])
def test_each_vector_can_be_switched_off(switch):
    q, k, v = sample()
    s = S.build_scales(ranges(q, k, v), softmax_scale=0.25, **{switch: False})
    spread = {"k_offset": s.k_zero, "qk_balance": s.q_mult, "v_channels": s.v_mult}
    for name, value in spread.items():
        assert (value.amax() == value.amin()) == (name == switch)


def test_granularity_head_gives_each_head_its_own_scale():
    q, k, v = sample()
    v = v * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    plain = {"k_offset": False, "qk_balance": False, "v_channels": False}
    tensor = S.build_scales(ranges(q, k, v), softmax_scale=0.25, granularity="tensor", **plain)
    head = S.build_scales(ranges(q, k, v), softmax_scale=0.25, granularity="head", **plain)
    assert (tensor.v_mult == tensor.v_mult[0, 0]).all()
    assert head.v_mult[0, 0] > 50 * head.v_mult[2, 0]
    assert (head.o_scale[2] / head.o_scale[0]) > 30


def test_clip_moves_the_range():
    q, k, v = sample()
    clip = {name: torch.full((3,), 0.5, dtype=torch.float64) for name in "qkv"}
    r = ranges(q, k, v)
    wide, narrow = (S.build_scales(r, softmax_scale=0.25, clip=c) for c in (None, clip))
    assert (narrow.v_mult / wide.v_mult).allclose(torch.full((3, 16), 2.0), rtol=1e-3)


@pytest.mark.parametrize("limit", [1e-6, 1e-3, 1.0, 100.0])
def test_exponents_never_leave_int32(limit):
    q, k, v = (x * limit for x in sample())
    s = Scales.from_tensors(q, k, v)
    assert (s.exp_bits >= S.MIN_EXP_BITS).all() and (s.exp_bits <= S.MAX_EXP_BITS).all()
    score_range = 2 * 127**2 * 16 * s.exp_mult.long()
    dead, shift = (octaves << s.exp_bits.long() for octaves in (S.DEAD_OCTAVES, S.SHIFT_OCTAVES + 1))
    assert (2 * score_range + dead + shift < 2**31).all()
    assert (s.exp_mult >= 1).all()


@pytest.mark.parametrize("head_dim", [1, 16, 64, 128])
def test_exponents_fit_for_every_span_of_scores(head_dim):
    """M is up to a 64th and a unit more than exact; a bias reaches a span of scores further."""
    spans = torch.logspace(-4, 6.5, 2000, dtype=torch.float64)  # octaves
    score_scale = (spans / (2 * 127**2 * head_dim))[:, None]
    exp_bits, exp_mult, _ = S._exponent_units(score_scale, head_dim)
    units = 2 * 2 * 127**2 * head_dim * exp_mult.long()
    octaves = (S.DEAD_OCTAVES + S.SHIFT_OCTAVES + 1) << exp_bits.long()
    assert (units + octaves < 2**31).all()
    masked = 127**2 * head_dim * exp_mult.long() + (64 << exp_bits.long()) + 2 * exp_mult.long()
    assert (masked + units // 4 + octaves < 2**32).all()


def test_constants_and_dict_come_back_exactly():
    s = Scales.from_tensors(*sample())
    for back in (Scales.from_constants(s.constants(), s.softmax_scale), Scales.from_dict(s.to_dict())):
        assert torch.equal(back.constants(), s.constants())
        assert back.softmax_scale == s.softmax_scale
    assert s.constants().dtype == torch.int32
    assert s.constants().shape == (3, 6 * 16 + 8)
    assert s.constants() is s.constants()


def test_dead_channels_and_dead_heads_are_harmless():
    q, k, v = sample()
    q[..., 3] = 0
    k[..., 5] = 0
    v[..., 7] = 0
    v[:, 1] = 0
    s = S.build_scales(ranges(q, k, v), softmax_scale=0.25, granularity="head")
    for value in (s.q_mult, s.k_mult, s.v_mult, s.o_scale):
        assert torch.isfinite(value).all() and (value > 0).all()


@pytest.mark.parametrize("dead", ["q", "k", "v"])
def test_a_dead_tensor_is_refused_by_name(dead):
    x = dict(zip("qkv", sample(), strict=True))
    x[dead] = torch.zeros_like(x[dead])
    with pytest.raises(CalibrationError, match=f"{dead} is zero"):
        S.build_scales(ranges(**x), softmax_scale=0.25)


def test_bad_values_are_refused():
    q, k, v = sample()
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        S.Ranges.of(q * math.inf, k, v, v)
    with pytest.raises(CalibrationError, match="octaves"):
        Scales.from_tensors(q * 1e4, k * 1e4, v)
    with pytest.raises(CalibrationError, match="keys"):
        Scales.from_dict({"q_mult": [[1.0]]})
    with pytest.raises(BackendError, match="constants must be int32"):
        S.head_dim_of(torch.zeros(3, 17, dtype=torch.int32))


def test_an_output_scale_beyond_all_values_keeps_shifts_in_32_bits():
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    scales = Scales.from_tensors(q, k, v)
    assert 24 <= scales.o_ratio_bits <= 31
    coarse = dataclasses.replace(scales, o_scale=scales.o_scale * 1e6)
    assert coarse.o_ratio_bits == 40
    assert not attention(q, k, v, coarse, out_dtype=torch.int8, backend="reference").any()
