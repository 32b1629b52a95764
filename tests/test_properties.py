"""The operator on whatever hypothesis finds: sizes, layouts, types, magnitudes, outliers and masks.

The noise that is judged is that of the integer softmax and products: the reference is float64 attention on the same
int8 operands. What rounding them to int8 costs depends on the input, and `test_reference.py` has its floors.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from qvit import BackendError, CalibrationError, Scales, attention
from qvit import reference as R
from qvit import scales as S
from qvit.ops import _triton_problem

FLOOR_DB = {"standard": 28.0, "high": 45.0}
# Beside one token that takes most of the attention, standard precision rounds small weights to none.
OUTLIER_FLOOR_DB = {"standard": 12.0, "high": 45.0}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["reference"] + ["triton"] * (_triton_problem(DEVICE, None) is None)
TYPES = [torch.float32, torch.float16, torch.bfloat16]
MASK_TYPES = [*TYPES, torch.float64]
CI = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

sizes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.one_of(st.integers(1, 70), st.sampled_from([197, 321])),
    st.one_of(st.sampled_from([1, 16, 32, 64, 80, 128]), st.integers(1, 128)),
)
magnitudes = st.floats(-4, 3).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**31)


# ---------------------------------------------------------------- operands


def plain(x):
    return x.contiguous()


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def padded_rows(x):
    wide = x.new_full((*x.shape[:3], x.shape[3] + 5), math.nan)
    wide[..., : x.shape[3]] = x
    return wide[..., : x.shape[3]]


def unaligned(x):
    flat = x.new_full((x.numel() + 1,), math.nan)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def every_second_channel(x):
    return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(3)[..., ::2]


LAYOUTS = [plain, transposed, padded_rows, unaligned, every_second_channel]


def draw_operands(shape, seed, magnitude, outlier):
    """Normal q, k and v, with a token or a channel of twenty times the size where asked for."""
    generator = torch.Generator().manual_seed(seed)
    qkv = magnitude * torch.randn(3, *shape, generator=generator)
    if outlier == "token":
        qkv[..., seed % shape[2], :] *= 20
    elif outlier == "channel":
        qkv[..., seed % shape[3]] *= 20
    return qkv.unbind(0)


def exact(q, k, v, scales, bias):
    """Float64 attention on the operands as int8 holds them, (B, N, H, D); a row without keys gives 0.

    And its energy as if no values cancelled: noise in the weights does not shrink where the values' sum does.
    """
    operands = [
        R.quantize_operand(x, mult, zero).double()
        for x, mult, zero in ((q, scales.q_mult, None), (k, scales.k_mult, scales.k_zero), (v, scales.v_mult, None))
    ]
    unit = scales.exp_mult.double() * torch.exp2(-scales.exp_bits.double()) / S.LOG2E
    score = operands[0] @ operands[1].mT * unit[:, None, None]
    if bias is not None:
        top = bias.amax(-1, keepdim=True)  # beside finfo.min, even float64 would lose the score
        score = score + (bias - torch.where(torch.isfinite(top), top, 0.0))
    weights = torch.softmax(score, -1).nan_to_num(0.0)
    v = operands[2] / scales.v_mult[:, None].double()
    return (weights @ v).transpose(1, 2), float((weights.square() @ v.square()).sum())


# ---------------------------------------------------------------- masks


def draw_mask(kind, shape, dims, dtype, seed):
    """A mask or bias with a size of one where `dims` says so, and its additive float64 twin."""
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = shape[2]
    size = [n if wide else 1 for n, wide in zip((*shape[:2], tokens, tokens), dims)]
    if kind == "causal":
        keep = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    else:
        keep = torch.rand(size, generator=generator) > 0.4
    if kind == "empty_rows":
        keep = keep.expand(*size[:2], tokens, size[3]).clone()
        keep[..., seed % tokens, :] = False
    if kind in ("bool", "causal", "empty_rows"):
        return keep, torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -math.inf)
    if kind == "bias":
        mask = (3 * torch.randn(size, generator=generator)).to(dtype)
    else:
        low = torch.finfo(dtype).min if kind == "lowest" else float(kind)
        mask = torch.zeros(size, dtype=dtype).masked_fill(~keep, low)
    return mask, mask.double()


kinds = st.sampled_from([None, "bool", "causal", "empty_rows", "bias", "lowest", "-inf", "-1e4", "-100"])
broadcasts = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


@settings(CI, max_examples=250)
@given(sizes, seeds, magnitudes, st.sampled_from(["", "token", "channel"]), st.sampled_from(TYPES),
       st.sampled_from(["standard", "high"]), st.sampled_from(LAYOUTS), kinds, broadcasts, st.sampled_from(MASK_TYPES),
       st.booleans())  # fmt: skip
def test_attention_of_anything(
    shape, seed, magnitude, outlier, dtype, precision, layout, kind, dims, mask_type, expand
):
    q, k, v = (x.to(dtype) for x in draw_operands(shape, seed, magnitude, outlier))
    assume(all(torch.isfinite(x).all() for x in (q, k, v)))
    try:
        scales = Scales.from_tensors(q, k, v)
    except CalibrationError as error:
        assert "octaves" in str(error) and magnitude >= 1  # scores beyond what the exponent holds
        event("refused: scores too large")
        return
    mask, bias = (None, None) if kind is None else draw_mask(kind, shape, dims, mask_type, seed)
    given_mask = mask.expand(*shape[:2], shape[2], shape[2]) if kind is not None and expand else mask
    out = attention(*map(layout, (q, k, v)), scales, mask=given_mask, precision=precision)
    assert out.shape == (shape[0], shape[2], shape[1], shape[3]) and out.dtype == dtype and out.is_contiguous()
    assert torch.isfinite(out).all()
    assert torch.equal(out, attention(q, k, v, scales, mask=mask, precision=precision))  # whatever the layout
    full = attention(q, k, v, scales, mask=mask, precision=precision, out_dtype=torch.float32)
    expected, signal = exact(q, k, v, scales, bias)
    noise = float((expected - full.double()).square().sum())
    db = 10 * math.log10(signal / max(noise, 1e-300)) if signal else 300
    assert db > (OUTLIER_FLOOR_DB if outlier == "token" else FLOOR_DB)[precision]
    if kind is not None:
        keys = torch.isfinite(bias).expand(*shape[:2], shape[2], shape[2]).any(-1)
        assert (out.transpose(1, 2)[~keys] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@settings(CI, max_examples=30)
@given(sizes=st.tuples(*[st.integers(1, 4)] * 2), position=st.integers(0, 10**6), dtype=st.sampled_from(MASK_TYPES))
def test_a_mask_with_nan_or_inf_is_refused(value, sizes, position, dtype):
    q, k, v = draw_operands((*sizes, 5, 8), position, 1.0, "")
    mask = torch.zeros(5, 5, dtype=dtype)
    mask.view(-1)[position % 25] = value
    for name in ("mask", "bias"):
        with pytest.raises(BackendError, match=f"{name} holds NaN or .inf"):
            attention(q, k, v, Scales.from_tensors(q, k, v), **{name: mask})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("kind", [None, "causal", "bias", "-inf"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16), (0, 2, 0, 16), (2, 2, 1, 16)], ids=str)
def test_none_and_one(shape, kind, precision, backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape)
    scales = Scales.from_tensors(*((q, k, v) if q.numel() else torch.randn(3, 1, 2, 5, 16)))
    mask = None if kind is None else draw_mask(kind, shape, (False, False, True, True), torch.float32, 3)[0]
    out = attention(q, k, v, scales, mask=mask, precision=precision, backend=backend)
    assert out.shape == (shape[0], shape[2], shape[1], shape[3])
    if kind in (None, "causal", "bias"):  # a single key, that none of these masks, has all the weight
        assert torch.allclose(out, v.transpose(1, 2), atol=0.05)


# ---------------------------------------------------------------- the kernel under Triton's interpreter


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs a GPU or Triton's interpreter")
@settings(CI, max_examples=16)
@given(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 20), st.integers(1, 40)), seeds, magnitudes,
       st.sampled_from(["", "token", "channel"]), st.sampled_from([*TYPES, torch.int8]),
       st.sampled_from(["standard", "high"]), st.sampled_from(LAYOUTS[:-1]), kinds, broadcasts,
       st.sampled_from(MASK_TYPES))  # fmt: skip
def test_the_kernel_equals_the_definition(
    shape, seed, magnitude, outlier, dtype, precision, layout, kind, dims, mask_type
):
    operands = draw_operands(shape, seed, magnitude, outlier)
    try:
        scales = Scales.from_tensors(*operands)
    except CalibrationError:
        return
    if dtype == torch.int8:
        operands = [R.quantize_tensor(x)[0] for x in operands]
        layout = plain if layout in (padded_rows, unaligned) else layout  # no NaN of int8
    q, k, v = (layout(x.to(dtype)).to(DEVICE) for x in operands)
    mask = None if kind is None else draw_mask(kind, shape, dims, mask_type, seed)[0].to(DEVICE)
    for out_dtype in (None, torch.int8):
        found, wanted = (
            attention(q, k, v, scales, mask=mask, precision=precision, out_dtype=out_dtype, backend=backend)
            for backend in ("triton", "reference")
        )
        assert torch.equal(found, wanted)
