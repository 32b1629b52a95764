"""Swin blocks whose attention reads the image as it lies: the same bits as with windows that are moved."""

import copy
import pickle

import pytest
import timm
import torch

import qvit
from qvit.patches.swin import FoldedSwinTransformerBlock

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMALL = {"embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 10}
MODELS = {
    "even": {"img_size": 56},
    "padded": {"img_size": 72},
    "smaller_than_a_window": {"img_size": 24},
    "always_partition": {"img_size": 24, "always_partition": True},
    "oblong": {"img_size": (56, 88), "window_size": (7, 11)},
    "no_qkv_bias": {"img_size": 72, "qkv_bias": False},
}


def create(name="even", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", **SMALL, **MODELS[name], **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention shows in what comes out
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(DEVICE)


def images(model, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, *model.patch_embed.img_size, generator=generator).to(DEVICE)


def blocks(model):
    return [m for m in model.modules() if isinstance(m, FoldedSwinTransformerBlock)]


def moved(model, x):
    """The forward with windows that are moved: a hook on an attention expects them."""
    hooks = [block.attn.register_forward_hook(lambda *a: None) for block in blocks(model)]
    try:
        return model(x)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_with_moved_windows(name, precision):
    model = create(name)
    x = images(model)
    floats = model(x)
    qvit.quantize(model, [x], qvit.QuantConfig(precision=precision))
    assert len(blocks(model)) == 4
    assert {row.layout for row in qvit.report(model).rows} == {"image"}
    result = model(x)
    assert torch.equal(result, moved(model, x))
    assert 0 < (result - floats).norm() / floats.norm() < 0.1


@torch.no_grad()
def test_blocks_of_another_kind_keep_their_windows():
    x = images(create())
    dynamic = create()
    for block in dynamic.modules():
        if hasattr(block, "shift_size"):
            block.dynamic_mask = True
    qvit.quantize(dynamic, [x])
    assert not blocks(dynamic) and {row.layout for row in qvit.report(dynamic).rows} == {"windows"}
    strange = create()
    strange.layers[0].blocks[1].attn_mask = strange.layers[0].blocks[1].attn_mask * 2  # not the mask that it knows
    qvit.quantize(strange, [x])
    assert [row.layout for row in qvit.report(strange).rows] == ["image", "windows", "image", "image"]
    faster = qvit.quantize(create(), [x], qvit.QuantConfig(skip_slower=True))
    assert not blocks(faster)


@torch.no_grad()
def test_the_way_back_leaves_nothing():
    model = create("padded")
    before, keys = copy.deepcopy(model), list(model.state_dict())
    x = images(model)
    floats = model(x)
    qvit.restore(qvit.quantize(model, [x]))
    assert torch.equal(model(x), floats) and list(model.state_dict()) == keys
    for a, b in zip(model.modules(), before.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys() and a._buffers.keys() == b._buffers.keys()


@torch.no_grad()
def test_another_input_size_finds_its_windows():
    model = create()
    x = images(model)
    qvit.quantize(model, [x])
    model.set_input_size((72, 72))
    y = torch.randn(1, 3, 72, 72, device=DEVICE)
    assert len(blocks(model)) == 4 and blocks(model)[0].qvit_image[0] == (18, 18)
    assert torch.equal(model(y), moved(model, y))


@torch.no_grad()
def test_the_bias_is_never_stale():
    model, other = create(), create()
    x = images(model)
    qvit.quantize(model, [x])
    for module in other.modules():
        if hasattr(module, "relative_position_bias_table"):
            module.relative_position_bias_table.normal_()
    before = model(x)
    model.load_state_dict(other.state_dict())
    assert not torch.equal(model(x), before)
    assert torch.equal(model(x), moved(model, x))


@torch.no_grad()
def test_copies_pickles_and_checkpoints_fold_too(tmp_path):
    model = create("padded")
    floats = copy.deepcopy(model)
    x = images(model)
    qvit.quantize(model, [x])
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(blocks(twin)) == 4 and torch.equal(twin(x), expected)
    qvit.save(model, tmp_path / "scales.safetensors")
    loaded = qvit.load(floats, tmp_path / "scales.safetensors")
    assert len(blocks(loaded)) == 4 and torch.equal(loaded(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_reach_the_pads(dtype):
    model = create("padded")
    x = images(model)
    qvit.quantize(model, [x])
    with torch.autocast(DEVICE, dtype):
        assert torch.equal(model(x), moved(model, x))
    model.to(dtype).eval()  # renews the biases, from the rounded tables
    assert torch.equal(model(x.to(dtype)), moved(model, x.to(dtype)))


@torch.no_grad()
def test_one_graph_without_a_break():
    torch._dynamo.reset()
    model = create("padded")
    x = images(model)
    qvit.quantize(model, [x])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@torch.no_grad()
def test_who_touches_the_attention_gets_moved_windows():
    """Hooks on its parts or on all modules, a forward of its own, one attention restored: as if nothing were folded."""
    model = create("padded")
    x = images(model)
    floats = copy.deepcopy(model)
    qvit.quantize(model, [x])
    attn = blocks(model)[1].attn
    shapes = []
    note = lambda module, args, *rest: shapes.append(tuple(args[0].shape))  # noqa: E731
    for part in (attn, attn.qkv, attn.proj):
        shapes.clear()
        hook = part.register_forward_hook(note)
        model(x)
        hook.remove()
        assert len(shapes) == 1 and len(shapes[0]) == 3, part
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


@torch.no_grad()
def test_an_attention_of_two_blocks_reads_the_image_for_one():
    model = create()
    plain, shifted = model.layers[0].blocks
    shifted.attn = plain.attn
    x = images(model)
    qvit.quantize(model, [x])
    assert [type(block).__name__ for block in (plain, shifted)] == [
        "FoldedSwinTransformerBlock",
        "SwinTransformerBlock",
    ]
    assert torch.equal(model(x), moved(model, x))
