"""Swin blocks whose attention reads the image as it lies: the same bits as with windows that are moved.

Older timm's Swins V2 fail in float where windows do not divide the image. What only shows there is then skipped; all
else takes an image that they divide. The float host alone decides: see `pads`.
"""

import copy
import dataclasses
import pickle
from functools import cache
from unittest.mock import Mock

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock

import qvit
from qvit.fingerprint import fingerprint
from qvit.patches import FOLDED
from qvit.patches.windows import FoldedBlock
from qvit.windows import plan_windows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMALL = {"window_size": 7, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 10}
FAMILIES = {
    "swin": ("swin_tiny_patch4_window7_224", SwinTransformerBlock),
    "swin_v2": ("swinv2_tiny_window8_256", SwinTransformerV2Block),
    "swin_v2_cr": ("swinv2_cr_tiny_224", SwinTransformerV2CrBlock),
}
MODELS = {
    "even": {"img_size": 56},
    "padded": {"img_size": 72},
    "smaller_than_a_window": {"img_size": 24},
    "always_partition": {"img_size": 24, "always_partition": True},
    "oblong": {"img_size": (56, 88), "window_size": (7, 11)},
    "no_qkv_bias": {"img_size": 72, "qkv_bias": False},
}
PADDED = {"padded", "always_partition", "no_qkv_bias"}
CASES = [(family, name) for family in FAMILIES for name in MODELS if (family, name) != ("swin_v2_cr", "no_qkv_bias")]
BIAS_SOURCES = ("relative_position_bias_table", "cpb_mlp", "meta_mlp")
every_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def pads(host):
    """True where the float block takes an image that its shifted windows do not divide."""
    try:
        block = host(32, num_heads=2, window_size=7, shift_size=3, **{FOLDED[host].size: (10, 10)})
        block.eval()(torch.zeros(1, 10, 10, 32))
    except RuntimeError:
        return False
    return True


def skip_unless_it_pads(host):
    if not pads(host):
        pytest.skip(f"this timm's {host.__name__} takes no image that its windows do not divide")


def padded(family):
    """For what any image shows: the case with pads, where the family's float model can have them."""
    return "padded" if pads(FAMILIES[family][1]) else "even"


def create(name="even", family="swin", **kwargs):
    architecture, host = FAMILIES[family]
    if name in PADDED:
        skip_unless_it_pads(host)
    torch.manual_seed(0)
    model = timm.create_model(architecture, **{**SMALL, **MODELS[name], **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention shows in what comes out
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(DEVICE)


def normal(*size, generator=None):
    """Drawn on the CPU, so that bounds meet the same numbers on any device."""
    return torch.randn(*size, generator=generator).to(DEVICE)


def images(model, count=2, seed=0):
    return normal(count, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(seed))


def blocks(model):
    return [m for m in model.modules() if isinstance(m, FoldedBlock)]


def hosts(model):
    return [m for m in model.modules() if isinstance(m, tuple(FOLDED))]


def moved(model, x):
    """The forward with windows that are moved: a hook on an attention expects them."""
    hooks = [block.attn.register_forward_hook(lambda *a: None) for block in blocks(model)]
    try:
        return model(x)
    finally:
        for hook in hooks:
            hook.remove()


def same(a, b):
    """True where what came of the image as it lies is what came of moved windows: on the CPU, to the bit.

    On a GPU the projections before the operator are matrix products of other row counts, which cuBLAS may round
    otherwise, and some of their integers are then neighbours. The operator's own bits are held in test_windows.py.
    """
    return bool((a - b).norm() <= 0.01 * b.norm()) if CUDA else torch.equal(a, b)


def with_weights_of(calibration, model):
    """The same scales, passed off as those of a model with other weights."""
    return dataclasses.replace(calibration, fingerprint=fingerprint(model))


@torch.no_grad()
@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_same_bits_as_with_moved_windows(family, name, precision):
    model = create(name, family)
    x = images(model)
    floats = model(x)
    qvit.quantize(model, [x], qvit.QuantConfig(precision=precision))
    assert len(blocks(model)) == 4
    assert {row.layout for row in qvit.report(model).rows} == {"image"}
    result = model(x)
    assert same(result, moved(model, x))
    assert 0 < (result - floats).norm() / floats.norm() < 0.1


# height, width, window, shift
IMAGES = [
    (14, 14, (7, 7), (3, 3)),
    (50, 50, (7, 7), (3, 3)),
    (10, 23, (7, 7), (3, 3)),
    (5, 9, (7, 7), (3, 3)),
    (7, 21, (7, 10), (0, 5)),
]


def without_pad(operator, place):
    """An operator whose pad is zeros."""
    return lambda *args: operator(*args[:place], args[place] * 0, *args[place + 1 :])


# Scores of the first version spread wider here, and in a corner of 50 x 50 all but one position are pads.
WORST_WINDOW_DB = {"SwinTransformerBlock": 21, "SwinTransformerV2Block": 35, "SwinTransformerV2CrBlock": 38}


def block_of(host, height, width, window, shift):
    """A float block whose scores spread and whose biases are large."""
    torch.manual_seed(0)
    size = {FOLDED[host].size: (height, width)}
    block = host(32, num_heads=2, window_size=window, always_partition=True, **size)
    block.shift_size = shift
    block.register_buffer("attn_mask", block.get_attn_mask(), persistent=False)
    for name, parameter in block.attn.named_parameters():
        if name == "qkv.weight":
            parameter.mul_(3)
        elif name == "logit_scale":
            parameter.uniform_(1, 3)
        elif name in ("qkv.bias", "q_bias", "v_bias"):
            parameter.normal_(std=1.5)
        elif name.startswith(BIAS_SOURCES):
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0)
    block.attn.proj = torch.nn.Identity()  # compare at the attention's own output
    return block.eval().to(DEVICE)


def worst_window(result, expected, plan):
    """SQNR in dB of the window that is furthest off."""
    rows, _, _ = plan.tensors(result.device)
    inside = rows >= 0

    def power(x):
        return (x.square().sum(-1).flatten(1)[:, rows.clamp_min(0).long()] * inside).sum(-1)

    return float(10 * torch.log10(power(expected) / power(result - expected)).min())


@torch.no_grad()
@pytest.mark.parametrize("image", IMAGES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("host", FOLDED, ids=lambda host: host.__name__)
def test_against_the_float_host_window_by_window(host, image, monkeypatch):
    """Positions outside the image attend, and hold what the host makes of zeros."""
    plan = plan_windows(*image)
    if plan.has_pads:
        skip_unless_it_pads(host)
    block, x = block_of(host, *image), normal(2, *image[:2], 32)
    attention = FOLDED[host].moving
    expected = getattr(block, attention)(x)
    qvit.quantize(block, [x], qvit.QuantConfig(precision="high"))
    assert type(block) is FOLDED[host]
    floor = WORST_WINDOW_DB[host.__name__]
    assert worst_window(getattr(block, attention)(x), expected, plan) > floor
    if plan.has_pads:  # the control: zeros outside the image
        for name, place in (("window_attention", 3), ("window_attention_qkvpacked", 2)):
            monkeypatch.setattr(torch.ops.qvit, name, without_pad(getattr(torch.ops.qvit, name), place))
        assert worst_window(getattr(block, attention)(x), expected, plan) < floor - 8


@torch.no_grad()
@every_family
def test_features_only(family):
    name = padded(family)
    model = create(name, family, features_only=True)
    x = normal(2, 3, *[MODELS[name]["img_size"]] * 2)
    floats = model(x)
    qvit.quantize(model, [x])
    assert len(blocks(model)) == 4
    for result, apart, exact in zip(model(x), moved(model, x), floats, strict=True):
        assert same(result, apart) and 0 < (result - exact).norm() / exact.norm() < 0.1


@torch.no_grad()
@every_family
def test_blocks_of_another_kind_keep_their_windows(family):
    x = images(create(family=family))
    dynamic = create(family=family, strict_img_size=False)
    other = normal(2, 3, 72, 64)
    floats = dynamic(other)
    qvit.quantize(dynamic, [x])
    assert not blocks(dynamic) and {row.layout for row in qvit.report(dynamic).rows} == {"windows"}
    assert 0 < (dynamic(other) - floats).norm() / floats.norm() < 0.1
    strange = create(family=family)
    hosts(strange)[1].attn_mask = hosts(strange)[1].attn_mask * 2  # not the mask that it knows
    qvit.quantize(strange, [x])
    assert [row.layout for row in qvit.report(strange).rows] == ["image", "windows", "image", "image"]
    faster = qvit.quantize(create(family=family), [x], qvit.QuantConfig(skip_slower=True))
    assert not blocks(faster)


@torch.no_grad()
@every_family
def test_windows_too_large_for_the_operator_are_moved(family):
    size = 80 if pads(FAMILIES[family][1]) else 72
    model = create(family=family, img_size=size, window_size=18)  # 324 tokens, and 100 or 81 in the second stage
    x = images(model)
    floats = model(x)
    qvit.quantize(model, [x])
    assert [row.layout for row in qvit.report(model).rows] == ["windows", "windows", "image", "image"]
    assert 0 < (model(x) - floats).norm() / floats.norm() < 0.1


@torch.no_grad()
@every_family
def test_the_way_back_leaves_nothing(family):
    model = create(padded(family), family)
    before, keys = copy.deepcopy(model), list(model.state_dict())
    x = images(model)
    floats = model(x)
    qvit.quantize(model, [x])
    assert list(model.state_dict()) == keys and not torch.equal(model(x), floats)
    qvit.restore(model)
    assert torch.equal(model(x), floats) and list(model.state_dict()) == keys
    for a, b in zip(model.modules(), before.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys() and a._buffers.keys() == b._buffers.keys()
        assert a._load_state_dict_post_hooks == b._load_state_dict_post_hooks


@cache
def other_size(family):
    """An image size and a window that the family's float model can change to, of one stage with pads if there is."""
    for size, window in ((72, 6), (96, 6), (112, 7)):  # some older hosts cannot pad, or change the window
        model = create(family=family).cpu()
        try:
            model.set_input_size((size, size), window_size=window)
            model(torch.zeros(1, 3, size, size))
        except RuntimeError:
            continue
        return size, window
    raise AssertionError(f"the float {family} changes its input size to none of those")


@torch.no_grad()
@every_family
def test_another_input_size_finds_its_windows(family, monkeypatch):
    """The same bits as a model that had the size before it was quantized, with the scales of the first size.

    A host that stops midway, as older ones do where they cannot pad, moves its own windows until it has a size.
    """
    size, window = other_size(family)
    model, other = create(family=family), create(family=family)
    calibration = qvit.calibrate(model, [images(model)])
    qvit.quantize(model, calibration)
    y = normal(1, 3, size, size)
    for m in (model, other):  # the host itself resizes tables on the CPU only
        m.cpu().set_input_size((size, size), window_size=window)
        m.to(DEVICE)
    floats = other(y)
    assert len(blocks(model)) == 4 and blocks(model)[0].qvit_image[0] == (size // 4, size // 4)
    assert blocks(model)[0].attn.qvit_bias.shape[-1] == window**2
    result = model(y)
    assert same(result, moved(model, y)) and 0 < (result - floats).norm() / floats.norm() < 0.1
    assert torch.equal(result, qvit.quantize(other, with_weights_of(calibration, other))(y))
    block = blocks(model)[1]
    x = normal(1, *block.qvit_image[0], 32)
    resize = lambda: block.set_input_size(tuple(x.shape[1:3]), window_size=(window, window))  # noqa: E731
    assert block.reads_image(x)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="midway"):
        patch.setattr(FAMILIES[family][1], "get_attn_mask", Mock(side_effect=RuntimeError("midway")))
        resize()
    assert not block.reads_image(x)
    resize()
    assert block.reads_image(x)


@torch.no_grad()
@every_family
def test_the_bias_is_never_stale(family):
    """After other weights are loaded or written: the bits of a model that had them when it was quantized, in place."""
    model, other = create(family=family), create(family=family)
    x = images(model)
    calibration = qvit.calibrate(model, [x])
    qvit.quantize(model, calibration)
    weights = copy.deepcopy(model.state_dict())
    for name, parameter in other.named_parameters():
        if any(source in name for source in BIAS_SOURCES):
            parameter.copy_(torch.randn(parameter.shape))
    changed = other.state_dict()
    before, expected = model(x), qvit.quantize(other, with_weights_of(calibration, other))(x)
    addresses = [block.attn.qvit_image_bias.data_ptr() for block in blocks(model)]
    assert not torch.equal(before, expected)
    model.load_state_dict(changed)
    assert torch.equal(model(x), expected) and same(expected, moved(model, x))
    model.train().load_state_dict(weights)
    assert torch.equal(model.eval()(x), before)
    for name, parameter in model.named_parameters():
        parameter.copy_(changed[name])
    assert torch.equal(model.eval()(x), expected)
    assert [block.attn.qvit_image_bias.data_ptr() for block in blocks(model)] == addresses


@torch.no_grad()
@every_family
def test_copies_pickles_and_checkpoints_fold_too(tmp_path, family):
    model = create(padded(family), family)
    floats = copy.deepcopy(model)
    x = images(model)
    qvit.quantize(model, [x])
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(blocks(twin)) == 4 and torch.equal(twin(x), expected)
        assert torch.equal(qvit.restore(twin)(x), floats(x))
    qvit.save(model, tmp_path / "scales.safetensors")
    loaded = qvit.load(floats, tmp_path / "scales.safetensors")
    assert len(blocks(loaded)) == 4 and torch.equal(loaded(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_family
def test_half_precision_and_autocast_reach_the_pads(family, dtype):
    """In float16 as well, where the host of the second version makes NaN of a pad's key."""
    model = create(padded(family), family)
    x = images(model)
    qvit.quantize(model, [x])
    exact = model(x)
    with torch.autocast(DEVICE, dtype):
        result = model(x)
        assert same(result, moved(model, x)) and (result - exact).norm() / exact.norm() < 0.02
    model.to(dtype).eval()  # renews the biases, from the rounded source
    result = model(x.to(dtype))
    assert same(result, moved(model, x.to(dtype))) and (result - exact).norm() / exact.norm() < 0.02


@torch.no_grad()
@every_family
def test_one_graph_without_a_break(family):
    torch._dynamo.reset()
    model = create(padded(family), family)
    x = images(model)
    qvit.quantize(model, [x])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@torch.no_grad()
@every_family
def test_who_touches_the_attention_gets_moved_windows(family):
    """Hooks on its parts or on all modules, a forward of its own, one attention restored: as if nothing were folded."""
    model = create(padded(family), family)
    x = images(model)
    floats = copy.deepcopy(model)
    qvit.quantize(model, [x])
    attn = blocks(model)[1].attn
    shapes = []
    note = lambda module, args, *rest: shapes.append(tuple(args[0].shape))  # noqa: E731
    for part in (attn, attn.proj, *[attn.qkv] * (family != "swin_v2")):  # that one's host never calls it
        shapes.clear()
        hook = part.register_forward_hook(note)
        assert [row.layout for row in qvit.report(model).rows if "blocks.1" in row.name][0] == "windows"
        model(x)
        hook.remove()
        assert len(shapes) == 1 and len(shapes[0]) == 3, part
        assert {row.layout for row in qvit.report(model).rows} == {"image"}
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: shapes.append("attention") if module is attn else None
    )
    model(x)
    hook.remove()
    assert shapes[-1] == "attention"
    attn.forward = lambda x, mask=None: shapes.append("own") or type(attn).forward(attn, x, mask)
    model(x)
    del attn.forward
    assert shapes[-1] == "own"
    expected = model(x)
    for module in [block.attn for block in blocks(model)]:
        qvit.restore(module)
    assert torch.allclose(model(x), floats(x), atol=1e-5) and not torch.equal(expected, model(x))
    assert torch.equal(qvit.restore(model)(x), floats(x))


# Older versions of torch look for hooks that come later only when asked, in float models too.
@torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
@torch.no_grad()
@every_family
def test_who_touches_a_compiled_attention_gets_moved_windows(family):
    """Hooks that come after the compiler, and go again, and a window that changes without the block."""
    torch._dynamo.reset()
    model = create(family=family)
    x = images(model)
    qvit.quantize(model, [x])
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    attn = blocks(model)[1].attn
    shapes = []
    for part in (attn, attn.proj, attn.proj_drop, *[attn.qkv] * (family != "swin_v2")):
        shapes.clear()
        hook = part.register_forward_hook(lambda module, args, out: shapes.append(args[0].ndim))
        assert same(compiled(x), expected) and shapes == [3], part
        hook.remove()
        assert torch.equal(compiled(x), expected) and shapes == [3], part
    if family == "swin" and not CUDA:  # the host itself resizes tables on the CPU only
        attn.set_window_size((6, 6))
        assert attn.layout == "windows"
        for run in (model, compiled):
            with pytest.raises(RuntimeError):
                run(x)
        attn.set_window_size((7, 7))
        assert attn.layout == "image"
        compiled(x)


class Packed(torch.nn.Module):
    """A linear layer whose weight is no tensor of that name, as torch's dynamic quantization leaves it."""

    def __init__(self, linear):
        super().__init__()
        self.call, self.weight = linear.forward, lambda: linear.weight

    def forward(self, x):
        return self.call(x)


@torch.no_grad()
def test_linear_layers_of_another_kind_beside_integer_attention():
    model = create()
    x = images(model)
    expected = qvit.quantize(model, [x])(x)
    for attn in [block.attn for block in blocks(model)]:
        attn.qkv, attn.proj = Packed(attn.qkv), Packed(attn.proj)
    assert same(model.eval()(x), expected)


@torch.no_grad()
def test_an_attention_of_two_blocks_reads_the_image_for_one():
    model = create()
    plain, shifted = model.layers[0].blocks
    shifted.attn = plain.attn
    x = images(model)
    qvit.quantize(model, [x])
    assert [isinstance(block, FoldedBlock) for block in (plain, shifted)] == [True, False]
    assert same(model(x), moved(model, x))
