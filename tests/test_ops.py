"""The operator's contract: masks by SDPA's semantics, refusals by name, torch.library's own checks."""

import math

import pytest
import torch

import qvit
from qvit import BackendError, Scales, attention
from qvit import reference as R

SHAPE = (2, 3, 49, 32)


def operands(shape=SHAPE, limit=1.0):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape) * limit
    return q, k, v, Scales.from_tensors(q, k, v)


def exact(q, k, v, bias=None):
    score = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    score = score if bias is None else score + bias.double()
    return (torch.softmax(score, -1) @ v.double()).transpose(1, 2)


def sqnr(expected, got):
    return 10 * math.log10(expected.square().sum() / (expected - got.double()).square().sum())


# ---------------------------------------------------------------- bias and masks


@pytest.mark.parametrize(("precision", "floor"), [("standard", 28.0), ("high", 35.0)])
@pytest.mark.parametrize("where", ["(1,1,N,N)", "(1,H,N,N)", "(B,1,N,N)", "(B,H,N,N)", "(N,N)", "(1,1,1,N)"])
def test_a_bias_is_added_after_scaling(where, precision, floor):
    q, k, v, scales = operands()
    size = dict(zip("BHN", SHAPE[:3], strict=True))
    bias = 2 * torch.randn([size.get(s, 1) for s in where.strip("()").split(",")])
    assert sqnr(exact(q, k, v, bias), attention(q, k, v, scales, bias=bias, precision=precision)) > floor
    assert sqnr(exact(q, k, v, bias), attention(q, k, v, scales, precision=precision)) < floor  # dropped: fails
    assert sqnr(exact(q, k, v, bias), attention(q, k, v, scales, bias=1.5 * bias, precision=precision)) < floor


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("limit", [1e-3, 0.25, 0.5, 1.0, 4.0, 30.0], ids="absmax_{}".format)
@pytest.mark.parametrize("value", ["bool", -math.inf, torch.finfo(torch.float32).min, -1e30, -1e5])
def test_masked_keys_weigh_exactly_nothing(value, limit, precision):
    q, k, v, scales = operands(limit=limit)
    v = torch.zeros_like(v)
    v[:, :, 30:] = limit  # V is 1 on masked keys and 0 elsewhere, so any leak shows
    keep = (torch.arange(49) < 30).expand(49, 49)
    mask = keep if value == "bool" else torch.zeros(49, 49).masked_fill(~keep, value)
    assert (attention(q, k, v, scales, mask=mask, precision=precision) == 0).all()
    assert (attention(q, k, v, scales, precision=precision) != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_float_type_of_mask(dtype):
    q, k, v, scales = operands()
    mask = torch.where(torch.rand(49, 49) > 0.5, 0.0, -100.0).to(dtype)
    assert torch.equal(attention(q, k, v, scales, mask=mask), attention(q, k, v, scales, mask=mask.float()))
    assert sqnr(exact(q, k, v, mask), attention(q, k, v, scales, mask=mask)) > 29


def test_a_fully_masked_row_is_zero_and_an_even_one_is_softmax():
    q, k, v, scales = operands()
    keep = torch.ones(49, 49, dtype=torch.bool)
    keep[7] = False
    out = attention(q, k, v, scales, mask=keep)
    assert (out[:, 7] == 0).all()
    plain = attention(q, k, v, scales)
    rest = [i for i in range(49) if i != 7]
    assert torch.equal(out[:, rest], plain[:, rest])
    even = torch.zeros(49, 49)
    even[7] = torch.finfo(torch.float32).min  # the same finite value on every key shifts nothing
    assert torch.equal(attention(q, k, v, scales, mask=even), plain)


def test_causal_and_combined_masks():
    q, k, v, scales = operands()
    causal = torch.ones(49, 49, dtype=torch.bool).tril()
    bias = torch.randn(1, 3, 49, 49)
    expected = exact(q, k, v, bias.masked_fill(~causal, -math.inf))
    assert sqnr(expected, attention(q, k, v, scales, bias=bias, mask=causal)) > 29
    additive = torch.zeros(49, 49).masked_fill(~causal, -math.inf)
    both = [attention(q, k, v, scales, bias=bias, mask=m) for m in (causal, additive)]
    assert torch.equal(*both)


def test_stride_zero_and_strided_masks():
    q, k, v, scales = operands()
    bias = torch.randn(1, 1, 49, 49)
    expanded = bias.expand(2, 3, 49, 49)
    transposed = bias.mT.contiguous().mT
    outs = [attention(q, k, v, scales, bias=b) for b in (expanded.contiguous(), expanded, transposed, bias)]
    assert all(torch.equal(outs[0], out) for out in outs)


# ---------------------------------------------------------------- refusals


def refused(match, *args, **kwargs):
    with pytest.raises(BackendError, match=match):
        attention(*args, **kwargs)


def test_operands_that_do_not_go_together():
    q, k, v, scales = operands()
    refused("one shape", q, k[:, :, :48], v, scales)
    refused("one shape", q[0], k[0], v[0], scales)
    refused("share a type", q, k.half(), v, scales)
    refused("share a type", *(x.double() for x in (q, k, v)), scales)
    refused("one device", q, k.to("meta"), v, scales)
    refused("out_dtype", q, k, v, scales, out_dtype=torch.int32)
    refused("precision", q, k, v, scales, precision="low")
    refused("backend must be", q, k, v, scales, backend="cuda")
    refused("scales are for 3 heads", q[:, :2], k[:, :2], v[:, :2], scales)
    refused("no gradient", q.requires_grad_(), k, v, scales)
    with torch.no_grad():
        assert attention(q, k, v, scales).isfinite().all()


def test_shapes_beyond_the_bounds():
    big = torch.zeros(1, 1, 2, 136)
    scales = Scales.from_tensors(*torch.randn(3, 1, 1, 2, 136))
    refused("above 128", big, big, big, scales)
    scales = Scales.from_tensors(*torch.randn(3, 1, 1, 2, 1))
    long = torch.zeros(1, 1, R.MAX_TOKENS["high"] + 1, 1)
    refused("int32 up to 16500", long, long, long, scales, precision="high")
    with pytest.raises(BackendError, match="int32 up to 16500"):  # as modules call it
        qvit.ops.run_attention(long, long, long, scales.constants(), softmax_scale=1.0, precision="high")


def test_masks_that_mean_nothing():
    q, k, v, scales = operands()
    refused("NaN", q, k, v, scales, bias=torch.full((49, 49), math.nan))
    refused("NaN", q, k, v, scales, mask=torch.full((49, 49), math.inf))
    refused("broadcast", q, k, v, scales, mask=torch.ones(48, 49, dtype=torch.bool))
    refused("float tensor", q, k, v, scales, bias=torch.ones(49, 49, dtype=torch.bool))
    refused("float tensor", q, k, v, scales, mask=torch.ones(49, 49, dtype=torch.int32))
    refused("mask is on meta", q, k, v, scales, mask=torch.ones(49, 49, dtype=torch.bool, device="meta"))


def test_empty_inputs_give_empty_outputs():
    q, k, v, scales = operands()
    assert attention(q[:0], k[:0], v[:0], scales).shape == (0, 49, 3, 32)
    assert attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], scales).shape == (2, 0, 3, 32)


def test_the_backend_of_a_device():
    from qvit.kernels import numerics

    assert qvit.ops.select_backend("cpu") == "reference"
    assert qvit.ops.select_backend("cuda", "reference") == "reference"
    if numerics.INTERPRETED:
        assert qvit.ops.select_backend("cpu", "triton") == "triton"
    else:
        with pytest.raises(BackendError, match="need an NVIDIA GPU"):
            qvit.ops.select_backend("cpu", "triton")


# ---------------------------------------------------------------- torch.library


def test_fullgraph_compilation():
    q, k, v, scales = operands()
    constants = scales.constants()

    def f(q, k, v):
        return torch.ops.qvit.attention(q * 1.0, k, v, constants, None, "standard", torch.float32, "auto", False) + 1

    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v), f(q, k, v))


def test_autocast_changes_nothing():
    q, k, v, scales = operands()
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, k, v, scales)
    assert torch.equal(inside, attention(q, k, v, scales))


@pytest.mark.parametrize("precision", ["standard", "high"])
def test_an_int8_output_without_bits_is_refused(precision):
    """Flat attention over many keys is small beside V: at 2048 tokens a bit is left to round by, at 4096 none."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 4096, 64) * torch.tensor([0.1, 1.0, 1.0]).view(3, 1, 1, 1, 1)
    scales = Scales.from_tensors(q, k, v)
    assert scales.o_ratio_bits == 24  # the least: the output's scale is 1/64 of V's
    with pytest.raises(BackendError, match="int8 output of 4096 tokens.* up to 64 times .* floating out_dtype"):
        attention(q, k, v, scales, out_dtype=torch.int8, precision=precision)
    q8 = torch.zeros(1, 1, 4096, 64, dtype=torch.int8)
    with pytest.raises(BackendError, match="int8 output of 4096 tokens"):
        attention(q8, q8, q8, scales, precision=precision)
    q, k, v = (x[:, :, :2048] for x in (q, k, v))
    found = attention(q, k, v, scales, out_dtype=torch.int8, precision=precision).float() * scales.o_scale
    assert sqnr(exact(q, k, v), found) > 35
    assert attention(q8, q8, q8, scales, out_dtype=torch.float32, precision=precision).isfinite().all()
