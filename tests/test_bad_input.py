"""Bad input to quantize: a clear error of the project's own, and a model that is the same bit for bit."""

import pytest
import timm
import torch
from torch import nn

import qvit
from qvit.errors import CalibrationError, ConfigError, UnsupportedModuleError

IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def make_vit():
    return variant()


def variant(**changes):
    torch.manual_seed(0)
    sizes = {"img_size": 48, "depth": 2, "embed_dim": 48, "num_classes": 5, **changes}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def make_swin():
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=48, **sizes).eval()


def snapshot(model):
    """Everything that a failed call might leave behind, in comparable form."""
    state = {}
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        keys = sorted(key for key in vars(module) if not key.endswith("_hooks"))
        state[name] = (type(module), module.training, hooks, keys, sorted(module._non_persistent_buffers_set))
        for key, t in tensors:
            state[f"{name}.{key}"] = (
                None if t is None else (id(t), t.dtype, t._version, t.detach().clone().numpy().tobytes())
            )
    return state


def assert_unchanged(model, before):
    after = snapshot(model)
    assert after.keys() == before.keys()
    changed = [name for name, old in before.items() if after[name] != old]
    assert not changed


def failing_generator():
    yield IMAGES
    raise OSError("the disk is gone")


def with_value(value):
    images = IMAGES.clone()
    images[1, 2, 3, 4] = value
    return images


BAD_LOADERS = {
    "empty": (lambda: [], CalibrationError, "no batches"),
    "zeros": (lambda: [torch.zeros_like(IMAGES)] * 2, CalibrationError, "zero"),
    "nan": (lambda: [IMAGES, with_value(float("nan"))], CalibrationError, "batch 1 holds NaN or Inf"),
    "inf": (lambda: [with_value(float("inf"))], CalibrationError, "batch 0 holds NaN or Inf"),
    "overflow": (lambda: [IMAGES * 1e38], CalibrationError, "NaN or Inf"),
    "shape": (lambda: [torch.randn(2, 3, 50, 48)], CalibrationError, r"\(2, 3, 50, 48\)"),
    "channels": (lambda: [IMAGES[:, :1]], CalibrationError, r"\(2, 1, 48, 48\)"),
    "rank": (lambda: [IMAGES[0, 0]], CalibrationError, r"\(48, 48\)"),
    "raises": (failing_generator, CalibrationError, "batch 1: OSError: the disk is gone"),
    "bytes": (lambda: [IMAGES.byte()], CalibrationError, "uint8"),
    "keys": (lambda: [{"img": IMAGES}], CalibrationError, r"\['img'\].*pixel_values"),
    "strings": (lambda: [("a.png", "b.png")], CalibrationError, "str"),
    "pictures": (lambda: [[object()]], CalibrationError, "object"),
    "no_rows": (lambda: [IMAGES[:0]], CalibrationError, "empty"),
    "none": (lambda: [None], CalibrationError, "NoneType"),
    "empty_batch": (lambda: [()], CalibrationError, "tuple"),
    "bare_tensor": (lambda: IMAGES, CalibrationError, "put a single batch in a list"),
    "not_iterable": (lambda: 3, CalibrationError, "int"),
}


@pytest.mark.parametrize("make", [make_vit, make_swin], ids=["vit", "swin"])
@pytest.mark.parametrize("loader, error, words", BAD_LOADERS.values(), ids=BAD_LOADERS)
@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_bad_loader(make, loader, error, words, method):
    if (make, words) == (make_swin, r"\(2, 3, 50, 48\)"):
        loader = lambda: [torch.randn(2, 3, 40, 48)]  # noqa: E731
        words = r"\(2, 3, 40, 48\)"
    model = make()
    before = snapshot(model)
    with pytest.raises(error, match=words):
        qvit.quantize(model, loader(), qvit.QuantConfig(calibration=qvit.CalibrationConfig(method)))
    assert_unchanged(model, before)


def test_causes_are_kept():
    with pytest.raises(CalibrationError) as error:
        qvit.quantize(make_vit(), failing_generator())
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(CalibrationError) as error:
        qvit.quantize(make_vit(), [IMAGES[:, :1]])
    assert isinstance(error.value.__cause__, RuntimeError)


def poison(value):
    def change(model):
        with torch.no_grad():
            model.blocks[1].attn.qkv.weight.fill_(value)
            model.blocks[1].attn.qkv.bias.zero_()

    return change


@pytest.mark.parametrize("value, words", [(float("nan"), "NaN or Inf"), (0.0, "zero")])
def test_bad_layer_is_named(value, words):
    model = make_vit()
    poison(value)(model)
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=f"'blocks.1.attn'.*{words}"):
        qvit.quantize(model, [IMAGES])
    assert_unchanged(model, before)


def test_layer_that_is_never_called_is_named():
    model = make_vit()
    model.spare = timm.layers.Attention(16, 2).eval()
    before = snapshot(model)
    with pytest.raises(CalibrationError, match="'spare' was never called"):
        qvit.quantize(model, [IMAGES])
    assert_unchanged(model, before)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)


def trained_attention(model):
    model.blocks[0].attn.attn_drop.train()
    return model


def compiled_block(model):
    model.blocks[0].compile(backend="eager")
    return model


def too_wide():
    return timm.create_model("vit_tiny_patch16_224", depth=1, img_size=48, embed_dim=258, num_heads=2).eval()


BAD_MODELS = {
    "training": (lambda: make_vit().train(), "training mode"),
    "training_inside": (lambda: trained_attention(make_vit()), "'blocks.0.attn' is in training mode"),
    "compiled": (lambda: torch.compile(make_vit(), backend="eager"), "compiled"),
    "compiled_block": (lambda: compiled_block(make_vit()), "'blocks.0' is compiled"),
    "no_attention": (lambda: Plain().eval(), "Plain has no attention"),
    "head_dim": (too_wide, "head_dim_above_128"),
    "traced": (lambda: torch.fx.symbolic_trace(Plain()).eval(), "GraphModule"),
}


@pytest.mark.parametrize("make, words", BAD_MODELS.values(), ids=BAD_MODELS)
def test_bad_model(make, words):
    model = make()
    before = snapshot(model)
    with pytest.raises(UnsupportedModuleError, match=words):
        qvit.quantize(model, [IMAGES])
    assert_unchanged(model, before)


def test_not_a_module():
    with pytest.raises(UnsupportedModuleError, match="str"):
        qvit.quantize("deit_tiny", [IMAGES])


def test_already_quantized():
    model = qvit.quantize(make_vit(), [IMAGES])
    before = snapshot(model)
    with pytest.raises(UnsupportedModuleError, match="already quantized.*restore"):
        qvit.quantize(model, [IMAGES])
    assert_unchanged(model, before)


def test_exclude_that_matches_nothing():
    model = make_vit()
    before = snapshot(model)
    with pytest.raises(ConfigError, match="block.0"):
        qvit.quantize(model, [IMAGES], qvit.QuantConfig(exclude=("block.0.*",)))
    assert_unchanged(model, before)


def test_calibration_of_another_model():
    calibration = qvit.calibrate(make_vit(), [IMAGES])
    others = {
        "depth": variant(depth=3),
        "shallow": variant(depth=1),
        "heads": variant(num_heads=6),
        "family": make_swin(),
    }
    for model in others.values():
        before = snapshot(model)
        with pytest.raises(CalibrationError, match="blocks"):
            qvit.quantize(model, calibration)
        assert_unchanged(model, before)


def test_config_against_calibration():
    model = make_vit()
    calibration = qvit.calibrate(model, [IMAGES])
    before = snapshot(model)
    with pytest.raises(ConfigError, match="granularity"):
        qvit.quantize(model, calibration, qvit.QuantConfig(granularity="head"))
    assert_unchanged(model, before)
    qvit.quantize(model, calibration, qvit.QuantConfig(precision="high", exclude=("blocks.0.*",)))
    assert [row.status for row in qvit.report(model).rows] == ["left", "swapped"]


def test_swap_that_fails_half_way_is_undone(monkeypatch):
    from qvit.patches.vit import QuantizedAttention

    model = make_vit()
    before = snapshot(model)
    swap = QuantizedAttention.swap.__func__

    def failing(cls, module, *args):
        if module is model.blocks[1].attn:
            raise MemoryError
        swap(cls, module, *args)

    monkeypatch.setattr(QuantizedAttention, "swap", classmethod(failing))
    with pytest.raises(MemoryError):
        qvit.quantize(model, [IMAGES])
    assert_unchanged(model, before)


def test_the_snapshot_sees_changes():
    model = make_vit()
    before = snapshot(model)
    changes = [
        lambda: model.blocks[0].attn.register_forward_hook(lambda *_: None),
        lambda: model.blocks[0].attn.register_buffer("x", torch.zeros(1), persistent=False),
        lambda: model.blocks[0].attn.qkv.weight.data.add_(1e-7),
        lambda: setattr(model.blocks[0].attn, "x", 1),
    ]
    for change in changes:
        model = make_vit()
        before = snapshot(model)
        change()
        with pytest.raises(AssertionError):
            assert_unchanged(model, before)


def test_grad_with_an_input_that_requires_it():
    model = qvit.quantize(make_vit(), [IMAGES])
    with torch.enable_grad(), pytest.raises(UnsupportedModuleError, match="inference_mode"):
        model(IMAGES.requires_grad_())
