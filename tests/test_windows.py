"""Attention in shifted windows on the image as it lies: the plan, the definition, and kernel against definition."""

import itertools

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformerBlock, window_partition, window_reverse
from torch._subclasses.fake_tensor import FakeTensorMode

from qvit import Scales
from qvit import reference as R
from qvit.errors import BackendError
from qvit.ops import pattern_bias, window_attention, window_bias
from qvit.windows import plan_windows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

# height, width, window, shift
IMAGES = [
    (14, 14, (7, 7), (0, 0)),
    (14, 14, (7, 7), (3, 3)),
    (50, 50, (7, 7), (3, 3)),
    (10, 23, (7, 7), (3, 3)),
    (5, 9, (7, 7), (3, 3)),
    (7, 21, (7, 10), (0, 5)),
    (12, 12, (12, 12), (0, 0)),
    (6, 6, (2, 3), (1, 1)),
]


def named(image):
    height, width, window, shift = image
    return f"{height}x{width}_window{window[0]}x{window[1]}_shift{shift[0]}x{shift[1]}"


def block_of(height, width, window, shift, **kwargs):
    block = SwinTransformerBlock(
        32, (height, width), num_heads=2, window_size=window, shift_size=0, always_partition=True, **kwargs
    )
    block.shift_size = shift
    block.register_buffer("attn_mask", block.get_attn_mask(), persistent=False)  # as the block's own, of that shift
    return block.eval()


def moved(x, window, shift):
    """Roll, pad and partition as the host does; (B * windows, N, C)."""
    x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
    pads = [-size % w for size, w in zip(x.shape[1:3], window, strict=True)]
    x = torch.nn.functional.pad(x, (0, 0, 0, pads[1], 0, pads[0]))
    return window_partition(x, window).reshape(-1, window[0] * window[1], x.shape[-1]), x.shape[1:3]


def moved_back(x, window, shift, padded, size):
    """The way back to the image; (B, height, width, C)."""
    x = window_reverse(x.reshape(-1, *window, x.shape[-1]), window, *padded)
    return torch.roll(x[:, : size[0], : size[1]], shift, (1, 2))


def operands(image, dtype=torch.float32, heads=2, dim=16, batch=2):
    height, width, window, _ = image
    torch.manual_seed(0)
    qkv = torch.randn(batch, height, width, 3, heads, dim)
    pad = torch.randn(3, heads, dim)
    bias = torch.randn(heads, window[0] * window[1], window[0] * window[1])
    scales = Scales.from_tensors(*qkv.flatten(1, 2).permute(2, 0, 3, 1, 4).unbind(0))
    return qkv.to(dtype).to(DEVICE), pad.to(dtype).to(DEVICE), bias.to(DEVICE), scales


def test_a_packed_bias_lies_as_a_warp_reads_it():
    bias = torch.arange(2 * 3 * 49 * 49, dtype=torch.int32).reshape(2, 3, 49, 49)
    packed = R.pack_window_bias(bias)
    assert packed.shape == (2, 3, 64 * 64)
    assert torch.equal(R.unpack_window_bias(packed, 49), bias)
    fragments = packed.reshape(2, 3, 4, 8, 32, 2, 2)  # block, tile of keys, thread, half of the rows, key
    for block, tile, thread, half, key in [(0, 0, 0, 0, 0), (1, 5, 17, 1, 1), (2, 6, 4, 0, 0), (3, 0, 3, 0, 1)]:
        row, column = 16 * block + 8 * half + thread // 4, 8 * tile + 2 * (thread % 4) + key
        assert torch.equal(fragments[:, :, block, tile, thread, half, key], bias[:, :, row, column])


SMALL = [image for image in IMAGES if image[2][0] * image[2][1] <= 64]
EIGHT = (16, 24, (8, 8), (4, 4))


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8][:: 1 if CUDA else 3], ids=str
)
@pytest.mark.parametrize("image", [*SMALL, EIGHT] if CUDA else [SMALL[1], SMALL[4]], ids=named)
@pytest.mark.parametrize("dim", [16, 32] if CUDA else [32], ids="D{}".format)
def test_a_packed_bias_gives_the_bits_of_the_one_that_is_packed(image, dim, dtype, precision, poisoned, monkeypatch):
    """Also without a pad, where positions outside of the image are zeros, and with several programs a window."""
    qkv, pad, bias, scales = operands(image, dim=dim)
    if dtype == torch.int8:
        qkv, pad = ((x * 30).clamp(-127, 127).round() for x in (qkv, pad))
    qkv, pad = qkv.to(dtype), pad.to(dtype)
    plan = plan_windows(*image)
    rows, pattern, masks = plan.tensors(DEVICE)
    constants = scales.constants(DEVICE)
    float_bias = pattern_bias(masks, bias, 2, -100.0)
    run = lambda pad, b, backend: torch.ops.qvit.window_attention(  # noqa: E731
        *qkv.flatten(1, 2).unbind(2), pad, constants, b, rows, pattern, precision, dtype, backend, scales.half_exact
    )
    packed = window_bias(float_bias, constants)
    assert packed.ndim == 3
    for padding in (pad, None):
        expected = run(padding, window_bias(float_bias, constants, finite=False), "reference")
        assert torch.equal(run(padding, packed, "reference"), expected)
        assert torch.equal(run(padding, packed, "triton"), expected)
    for step in (1, 2, 4) if CUDA else ():
        monkeypatch.setattr("qvit.kernels.dispatch._kept", {})
        monkeypatch.setattr("qvit.kernels.launch.warp_step", lambda *_: min(step, -(-rows.shape[1] // 16)))  # noqa: B023
        assert torch.equal(run(None, packed, "triton"), expected)


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32][:: 1 if CUDA else 3], ids=str)
@pytest.mark.parametrize("image", IMAGES if CUDA else [SMALL[1], SMALL[4]], ids=named)
def test_a_packed_projection_gives_the_bits_of_its_parts(image, dtype, precision, poisoned):
    """Whatever the bias, with a pad or without; also one whose channels do not lie side by side, and none."""
    qkv, pad, bias, scales = operands(image, dtype=dtype)
    packed = qkv.flatten(3)
    rows, pattern, masks = plan_windows(*image).tensors(DEVICE)
    constants = scales.constants(DEVICE)
    float_bias = pattern_bias(masks, bias, 2, -100.0)
    biases = [None, window_bias(float_bias, constants), window_bias(float_bias, constants, finite=False)]
    biases.append(biases[-1][:, :1])  # one for all heads
    for padding, units in itertools.product((pad, None), biases):
        tables, half = (padding, constants, units, rows, pattern, precision), scales.half_exact
        parts = qkv.flatten(1, 2).unbind(2)
        expected = torch.ops.qvit.window_attention(*parts, *tables, dtype, "reference", half)
        expected = expected.reshape(*qkv.shape[:3], -1)
        run = torch.ops.qvit.window_attention_qkvpacked
        for backend in ("reference", "triton"):
            assert torch.equal(run(packed, 2, *tables, backend, half), expected)
            assert torch.equal(run(packed.mT.contiguous().mT, 2, *tables, backend, half), expected)
            assert run(packed[:0], 2, *tables, backend, half).shape == (0, *expected.shape[1:])
            if padding is not None:
                apart = padding.mT.contiguous().mT
                assert torch.equal(run(packed, 2, apart, *tables[1:], backend, half), expected)
                assert torch.equal(
                    torch.ops.qvit.window_attention(*parts, apart, *tables[1:], dtype, backend, half).flatten(2),
                    expected.flatten(1, 2),
                )


def test_a_bias_that_masks_a_key_is_not_packed():
    _, _, bias, scales = operands(IMAGES[0])
    constants = scales.constants(DEVICE)
    bias = bias[None]
    assert window_bias(bias, constants).ndim == 3
    bias[..., 3] = float("-inf")
    assert window_bias(bias, constants).ndim == 4
    assert window_bias(torch.zeros(1, 2, 65, 65, device=DEVICE), constants).ndim == 4


@pytest.mark.parametrize("image", IMAGES, ids=named)
def test_the_plan_is_the_hosts_own(image):
    height, width, window, shift = image
    plan = plan_windows(*image)
    ids = torch.arange(1, 1 + height * width).reshape(1, height, width, 1).float()
    rows, pattern, masks = plan.tensors("cpu")
    assert torch.equal(rows, moved(ids, window, shift)[0][..., 0].int() - 1)
    mask = block_of(*image).attn_mask
    expected = torch.zeros(len(rows), *masks.shape[1:]) if mask is None else mask
    assert torch.equal(masks[pattern.long()] * -100.0, expected)
    inside = rows[rows >= 0]
    assert torch.equal(inside.sort().values, torch.arange(height * width, dtype=torch.int32))
    assert len(masks) <= 4 or min(image[:2]) < 2 * max(window)


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("image", IMAGES, ids=named)
def test_the_definition_is_attention_on_the_hosts_windows(image, precision):
    """To the bit: the operator on the image, and the attention operator on windows that are really cut."""
    height, width, window, shift = image
    qkv, pad, bias, scales = operands(image)
    result = window_attention(
        qkv, scales, window=window, shift=shift, pad=pad, bias=bias, precision=precision, backend="reference"
    )
    plan = plan_windows(*image)
    # Pads hold the pad's q, k and v: add them to the zeros that the host's padding leaves.
    ones, _ = moved(torch.ones(2, height, width, 1, device=DEVICE), window, shift)
    cut, padded = moved(qkv.flatten(3), window, shift)
    cut = (cut + (1 - ones) * pad.flatten()).reshape(*cut.shape[:2], 3, 2, -1)
    q, k, v = cut.permute(2, 0, 3, 1, 4).unbind(0)
    _, pattern, masks = plan.tensors(DEVICE)
    mask = masks[pattern.long()].float() * -100.0
    constants = scales.constants(DEVICE)
    addend = R.exponent_bias(bias[None] + mask[:, None], constants)
    out = R.attention(q, k, v, constants, addend, precision=precision)
    assert torch.equal(result, moved_back(out.flatten(2), window, shift, padded, (height, width)))


@pytest.mark.parametrize("image", IMAGES[:5], ids=named)
def test_against_the_float_host_window_by_window(image):
    """50 x 50 with a large qkv bias among them: positions outside the image attend, and hold the bias."""
    height, width, window, shift = image
    torch.manual_seed(0)
    block = block_of(*image)
    with torch.no_grad():
        block.attn.qkv.weight.mul_(5)
        block.attn.qkv.bias.normal_(std=2.0)
        block.attn.relative_position_bias_table.normal_()
    block.attn.proj = torch.nn.Identity()  # compare at the attention's own output
    x = torch.randn(2, height, width, 32)
    with torch.no_grad():
        expected = block._attn(x)
        qkv = block.attn.qkv(x).reshape(2, height, width, 3, 2, 16)
    pad = block.attn.qkv.bias.detach().reshape(3, 2, 16)
    everything = torch.cat([qkv.flatten(1, 2), pad.expand(2, 1, -1, -1, -1)], 1)
    scales = Scales.from_tensors(*everything.permute(2, 0, 3, 1, 4).unbind(0))
    kwargs = {"window": window, "shift": shift, "bias": block.attn._get_rel_pos_bias()[0].detach()}

    def worst(result):
        """SQNR of the worst window, dB."""
        signal, noise = (moved(x.square(), window, shift)[0].sum((1, 2)) for x in (expected, result - expected))
        return 10 * torch.log10(signal / noise).min()

    assert worst(window_attention(qkv, scales, pad=pad, precision="high", **kwargs)) > 25
    if plan_windows(*image).has_pads:  # the control: zeros outside the image
        assert worst(window_attention(qkv, scales, precision="high", **kwargs)) < 10


@pytest.mark.parametrize("limit", [1e-3, 0.25, 4.0, 64.0])
def test_masked_keys_weigh_nothing_at_every_scale(limit):
    """V that differs only where the shift's mask forbids must not change a bit of the result."""
    image = (14, 14, (7, 7), (3, 3))
    qkv, _, _, _ = operands(image)
    qkv[..., :2, :, :] *= limit
    scales = Scales.from_tensors(*qkv.cpu().flatten(1, 2).permute(2, 0, 3, 1, 4).unbind(0))
    other = qkv.clone()
    other[:, :3, :, 2] = other[:, :3, :, 2].flip(2).neg()  # rows that the roll brings below the others
    apart = slice(10, 14)  # in the last windows, these rows and the rolled ones are apart
    for mask in [float("-inf")] + [-100.0] * (limit < 10):  # 100 is little beside scores of thousands, in float too
        run = lambda x: window_attention(  # noqa: E731
            x,
            scales,
            window=(7, 7),
            shift=(3, 3),
            shift_mask=mask,  # noqa: B023
            precision="high",
        )
        a, b = run(qkv), run(other)
        assert torch.equal(a[:, apart], b[:, apart]) and not torch.equal(a[:, :3], b[:, :3])


def triton_runs():
    numerics = pytest.importorskip("qvit.kernels.numerics")
    if not (CUDA or numerics.INTERPRETED):
        pytest.skip("needs a GPU or Triton's interpreter")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "standard"), (torch.float16, "high"), (torch.float32, "standard"), (torch.int8, "high")],
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("image", [IMAGES[1], IMAGES[4], IMAGES[5], IMAGES[6], IMAGES[7]], ids=named)
def test_kernel_equals_definition(image, dtype, precision, poisoned):
    triton_runs()
    _, _, window, shift = image
    qkv, pad, bias, scales = operands(image, batch=1)
    if dtype == torch.int8:
        qkv, pad = ((x * 30).round().clamp(-127, 127) for x in (qkv, pad))
    qkv, pad = qkv.to(dtype), pad.to(dtype)
    common = {"window": window, "shift": shift, "precision": precision}
    zeros = {"pad": pad} if dtype == torch.int8 else {}
    for kwargs in ({"bias": bias, "pad": pad}, {"pad": pad}, {"bias": bias, "out_dtype": torch.int8} | zeros):
        expected = window_attention(qkv, scales, backend="reference", **common, **kwargs)
        assert torch.equal(window_attention(qkv, scales, backend="triton", **common, **kwargs), expected)


@pytest.mark.parametrize("dim", [20, 32], ids="D{}".format)
def test_strides_and_head_dimensions_are_followed(dim, poisoned):
    triton_runs()
    qkv, pad, bias, scales = operands((9, 9, (5, 5), (2, 2)), torch.float16, heads=3, dim=dim)
    wide = torch.nn.functional.pad(qkv, (0, 5))[..., :dim]
    kwargs = {"window": (5, 5), "shift": (2, 2), "pad": pad, "bias": bias}
    expected = window_attention(qkv, scales, backend="reference", **kwargs)
    assert torch.equal(window_attention(wide, scales, backend="triton", **kwargs), expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_q_k_v_apart_give_the_packed_bits(backend, poisoned):
    """Each with strides of its own: heads outside the rows, rows wider than a head, channels not side by side."""
    if backend == "triton":
        triton_runs()
    qkv, pad, bias, scales = operands(IMAGES[4], torch.float16)
    q, k, v = qkv.unbind(3)
    heads_outside = q.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    wide_rows = torch.nn.functional.pad(k, (0, 5))[..., : k.shape[-1]]
    channels_apart = v.mT.contiguous().mT
    kwargs = {"window": (7, 7), "shift": (3, 3), "pad": pad, "bias": bias, "backend": backend}
    packed = window_attention(qkv, scales, **kwargs)
    assert torch.equal(window_attention((heads_outside, wide_rows, channels_apart), scales, **kwargs), packed)
    assert not torch.equal(window_attention((k, q, v), scales, **kwargs), packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (0, 7)}, "at least one token"),
        ({"shift": (7, 0)}, "shift inside a window"),
        ({"pad": torch.zeros(3, 2, 8)}, "pad must be"),
        ({"bias": torch.zeros(3, 49, 49, device=DEVICE)}, "bias of shape"),
        ({"window": (32, 32)}, "the most is"),
        ({"window": 7}, "window must be two integers, height and width; found 7"),
        ({"shift": (1, 2, 3)}, "shift must be two integers"),
        ({"bias": torch.zeros(2, 49, 49, dtype=torch.bool)}, "must be a float tensor"),
    ],
    ids=["window", "shift", "pad", "bias", "too_large", "one_number", "three_numbers", "bool_bias"],
)
def test_what_does_not_fit_is_refused(change, message):
    qkv, _, _, scales = operands((14, 14, (7, 7), (3, 3)))
    with pytest.raises(BackendError, match=message):
        window_attention(qkv, scales, **({"window": (7, 7), "shift": (3, 3)} | change))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: q,
        lambda q, k, v: (q, k),
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q, k.transpose(1, 2), v),  # the same number of rows, in another image
    ],
    ids=["one", "two", "rank", "image"],
)
def test_operands_of_another_form_are_refused(change):
    qkv, _, _, scales = operands((5, 9, (7, 7), (0, 0)))
    with pytest.raises(BackendError, match="or q, k and v"):
        window_attention(change(*qkv.unbind(3)), scales, window=(7, 7))


def test_int8_beyond_the_image_needs_a_pad():
    qkv, pad, _, scales = operands((5, 9, (7, 7), (0, 0)))
    with pytest.raises(BackendError, match="int8 operands need pad"):
        window_attention(qkv.to(torch.int8), scales, window=(7, 7))


def test_a_plan_made_in_any_mode_serves_all():
    plan_windows.cache_clear()
    with torch.inference_mode(), torch.device("meta"), FakeTensorMode():
        plan_windows(6, 6, (3, 3), (1, 1))
    rows, _, masks = plan_windows(6, 6, (3, 3), (1, 1)).tensors("cpu")
    assert not rows.is_inference() and masks.shape == (4, 9, 9)


def test_an_image_without_rows_gives_none():
    qkv, _, _, scales = operands((14, 14, (7, 7), (0, 0)))
    assert window_attention(qkv[:0], scales, window=(7, 7)).shape == (0, 14, 14, 32)


def test_all_stages_of_a_swin_are_planned():
    model = timm.create_model("swin_tiny_patch4_window7_224")
    for block in model.modules():
        if isinstance(block, SwinTransformerBlock):
            plan = plan_windows(*block.input_resolution, block.window_size, block.shift_size)
            assert len(plan.masks) == (4 if any(block.shift_size) else 1)
