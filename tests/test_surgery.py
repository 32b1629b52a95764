"""quantize, restore and report on whole models: what is swapped, what is left and why, and that nothing else changes.

Accuracy is judged at the outputs of the attention modules, with the float model's inputs.
"""

import copy
import math
import pickle
import warnings
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import qvit
from qvit.discovery import find_attention
from qvit.errors import BackendError, ConfigError, UnsupportedModuleError
from qvit.patches import ADAPTERS

SMALL = {"img_size": 48, "embed_dim": 48, "num_classes": 5}
SMALL_SWIN = {"window_size": 7, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2)}
# The padded ones are not strict, so that they find their masks in the forward: older Swins V2 have no others with pads.
MODELS = {
    "vit": ("vit_tiny_patch16_224", {**SMALL, "depth": 2}),
    "test_vit": ("test_vit", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {**SMALL, "depth": 2}),
    "deit3": ("deit3_small_patch16_224", {**SMALL, "depth": 2}),
    "dinov2_reg": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 42, "depth": 2}),
    "siglip_pool": ("vit_base_patch16_siglip_224", {"img_size": 48, "embed_dim": 48, "num_heads": 3, "depth": 2}),
    "parallel_things": ("vit_small_patch16_36x1_224", {**SMALL, "depth": 1}),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2)}),
    "swin_padded": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 64, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2), "strict_img_size": False},
    ),
    "swin_v2": ("swinv2_tiny_window8_256", {"img_size": 56, **SMALL_SWIN}),
    "swin_v2_padded": ("swinv2_tiny_window8_256", {"img_size": 64, "strict_img_size": False, **SMALL_SWIN}),
    "swin_v2_cr": ("swinv2_cr_tiny_224", {"img_size": 56, **SMALL_SWIN}),
    "swin_v2_cr_padded": ("swinv2_cr_tiny_ns_224", {"img_size": 64, "strict_img_size": False, **SMALL_SWIN}),
}


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def create(name):
    architecture, sizes = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, **sizes).eval()
    for module in model.modules():
        if type(module) in ADAPTERS:  # scores of some spread, and a branch that counts
            module.qkv.weight.normal_(std=1.4 * module.qkv.in_features**-0.5)
    for name, p in model.named_parameters():
        if name.endswith("gamma") or name.endswith("relative_position_bias_table"):
            p.normal_()
        elif name.endswith("logit_scale"):
            p.uniform_(2.5, 3.5)
        elif name.endswith("norm1.weight"):  # zero in new Swins V2, whose branches then add nothing
            p.uniform_(0.5, 1.5)
    return model


def images(model, batch=2):
    size = model.patch_embed.img_size
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


def attention_calls(model, x):
    """Arguments and output of each attention module of a float model, by name."""
    calls, hooks = {}, []
    for name, module in model.named_modules():
        if type(module) in ADAPTERS:
            record = lambda _, args, kwargs, out, name=name: calls.update({name: (args, kwargs, out)})  # noqa: E731
            hooks.append(module.register_forward_hook(record, with_kwargs=True))
    model(x)
    for hook in hooks:
        hook.remove()
    return calls


def sqnr_db(value, reference):
    noise = (value.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


def sharper(module):
    control = copy.deepcopy(module)
    if hasattr(control, "logit_scale"):
        control.logit_scale.add_(math.log(1.5))
        return control
    control.fused_attn = False
    control.scale = control.scale * 1.5
    return control


@pytest.mark.parametrize("name", MODELS)
def test_every_attention_of_a_model(name):
    model = create(name)
    x = images(model)
    calls = attention_calls(model, x)
    before, expected = copy.deepcopy(model), model(x)
    assert qvit.quantize(model, [x]) is model
    report = qvit.report(model)
    assert report.swapped == len(calls) > 0
    for name, (args, kwargs, out) in calls.items():
        assert sqnr_db(model.get_submodule(name)(*args, **kwargs), out) > 25, name
        assert sqnr_db(sharper(before.get_submodule(name))(*args, **kwargs), out) < 18, name
        row = next(row for row in report.rows if row.name == name)
        assert 25 < row.sqnr_db < 60
    assert model(x).shape == expected.shape
    assert torch.isfinite(model(x)).all()


def flat_state(model):
    return {k: (type(model.get_submodule(k.rpartition(".")[0])), v.clone()) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2", "swin_v2_cr"])
def test_restore_gives_the_float_model_back(name):
    model = create(name)
    x = images(model)
    expected, pristine = model(x), copy.deepcopy(model)
    state, attributes = flat_state(model), {n: sorted(vars(m)) for n, m in model.named_modules()}
    parameters = {n: id(p) for n, p in model.named_parameters()}
    qvit.quantize(model, [x])
    assert not torch.equal(model(x), expected)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k][1]) for k, v in model.state_dict().items())
    pristine.load_state_dict(model.state_dict(), strict=True)
    assert qvit.restore(model) is model
    assert torch.equal(model(x), expected)
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert [k for k, (t, _) in flat_state(model).items() if state[k][0] is not t] == []
    assert not [n for n, _ in model.named_buffers() if "qvit" in n]
    qvit.restore(model)  # nothing to do is fine
    qvit.quantize(model, [x])


def test_calibrate_leaves_the_model_alone():
    model = create("swin")
    x = images(model)
    expected = model(x)
    qvit.calibrate(model, [x], qvit.QuantConfig(calibration=qvit.CalibrationConfig("mse")))
    assert torch.equal(model(x), expected)
    assert not any(m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())
    assert qvit.report(model).swapped == 0


def test_hooks_stay_and_fire():
    model = create("vit")
    fired = []
    model.blocks[0].attn.register_forward_hook(lambda *_: fired.append("attn"))
    model.blocks[0].attn.register_forward_pre_hook(lambda *_: fired.append("pre"))
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: fired.append("qkv"))
    x = images(model)
    qvit.quantize(model, [x])
    fired.clear()
    model(x)
    assert fired == ["pre", "qkv", "attn"]


def test_a_calibration_gives_the_same_model_as_its_loader():
    model = create("vit")
    x = images(model)
    calibration = qvit.calibrate(model, [x])
    expected = qvit.quantize(copy.deepcopy(model), [x])(x)
    assert torch.equal(qvit.quantize(model, calibration)(x), expected)


def test_copies_and_pickles():
    model = create("swin")
    x = images(model)
    qvit.quantize(model, [x])
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        assert qvit.report(twin).to_dict() == qvit.report(model).to_dict()
        qvit.restore(twin)
    assert torch.equal(model(x), expected)


def test_inside_inference_mode_no_inference_tensor_stays():
    model = create("swin")
    x = images(model)
    with torch.inference_mode():
        qvit.quantize(model, [x])
        model(x)
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])


def test_attention_module_as_the_model():
    attn = timm.layers.Attention(32, 2).eval()
    x = torch.randn(2, 9, 32)
    qvit.quantize(attn, [x])
    assert qvit.report(attn).rows[0].name == ""
    assert "1 of 1" in str(qvit.report(attn))
    assert type(qvit.restore(attn)) is timm.layers.Attention


def test_set_input_size_of_a_quantized_swin():
    model = create("swin")
    x = images(model)
    qvit.quantize(model, [x])
    model.set_input_size((64, 64), window_size=4)
    reference = qvit.restore(copy.deepcopy(model))
    calls = attention_calls(reference, torch.randn(2, 3, 64, 64))
    for name, (args, kwargs, out) in calls.items():
        assert args[0].shape[1] == 16
        assert sqnr_db(model.get_submodule(name)(*args, **kwargs), out) > 20
        assert sqnr_db(sharper(reference.get_submodule(name))(*args, **kwargs), out) < 18


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2"])
@pytest.mark.parametrize("arithmetic", ["qvit", "paper"])
def test_compiles_without_a_graph_break(name, arithmetic):
    model = create(name)
    x = images(model)
    qvit.quantize(model, [x], qvit.QuantConfig(arithmetic=arithmetic))
    expected = model(x)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_compiled_blocks_share_a_graph():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, depth=6).eval()
    x = images(model)
    qvit.quantize(model, [x])
    expected = model(x)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=counter, fullgraph=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_feature_extraction_sees_leaves():
    model = create("vit")
    x = images(model)
    qvit.quantize(model, [x])
    expected = model.forward_features(x)
    graph = timm.layers._fx.create_feature_extractor(model, ["norm"])
    assert torch.equal(graph(x)["norm"], expected)
    assert torch.allclose(
        timm.layers._fx.create_feature_extractor(model, ["blocks.0"])(x)["blocks.0"],
        model.blocks[0](model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))),
    )


# What is left, and why.
LEFT = {
    "vit_base_patch16_siglip_224": {"AttentionPoolLatent": "pooling_head"},
    "cait_xxs24_224": {"TalkingHeadAttn": "talking_heads", "ClassAttn": "class_attention"},
    "xcit_nano_12_p16_224": {"XCA": "channel_attention", "ClassAttn": "class_attention"},
    "davit_tiny": {"WindowAttention": "not_in_registry", "ChannelAttention": "channel_attention"},
    "edgenext_xx_small": {"CrossCovarianceAttn": "channel_attention"},
    "vit_huge_patch14_xp_224": {"ParallelScalingBlock": "fused_parallel_block"},
    "vit_dpwee_patch16_reg1_gap_256": {"DiffParallelScalingBlock": "differential_attention"},
    "vit_dwee_patch16_reg1_gap_256": {"DiffAttention": "differential_attention"},
    "samvit_base_patch16": {"Attention": "query_dependent_bias"},
    "hiera_tiny_224": {"MaskUnitAttention": "pooled_query"},
    "mvitv2_tiny": {"MultiScaleAttention": "pooled_query"},
    "pvt_v2_b0": {"Attention": "kv_reduction"},
    "twins_svt_small": {"GlobalSubSampleAttn": "kv_reduction", "LocallyGroupedAttn": "not_in_registry"},
    "levit_128s": {"Attention": "unsupported_layout", "AttentionDownsample": "unsupported_layout"},
    "tiny_vit_5m_224": {"Attention": "unsupported_layout"},
    "efficientformer_l1": {"Attention": "unsupported_layout"},
    "maxvit_nano_rw_256": {"AttentionCl": "unsupported_layout"},
    "crossvit_tiny_240": {"CrossAttention": "class_attention"},
    "eva02_tiny_patch14_224": {"EvaAttention": "not_in_registry"},
    "beit_base_patch16_224": {"Attention": "not_in_registry"},
    "vit_relpos_small_patch16_224": {"RelPosAttention": "not_in_registry"},
    "convit_tiny": {"MHSA": "not_in_registry", "GPSA": "not_in_registry"},
    "volo_d1_224": {
        "OutlookAttention": "not_in_registry",
        "Attention": "not_in_registry",
        "ClassAttention": "class_attention",
    },
    "resnest14d": {"SplitAttn": "no_token_softmax"},
    "shvit_s1": {"SHSA": "not_in_registry"},
}


@pytest.fixture
def structure(monkeypatch):
    """Builds a model on "meta", for only the structure counts.

    Older timm reads rates of dropped paths back from a tensor: that one lies on the CPU.
    """
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))

    def build(architecture):
        if not timm.is_model(architecture):
            pytest.skip(f"this timm has no {architecture}")
        with torch.device("meta"):
            return timm.create_model(architecture)

    return build


@pytest.mark.parametrize("architecture", LEFT)
def test_left_with_a_reason(architecture, structure):
    model = structure(architecture)
    left = {site.type_name: site.reason for site in find_attention(model) if site.adapter is None}
    assert left == LEFT[architecture]


@pytest.mark.parametrize(
    "architecture",
    ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "swinv2_cr_huge_224"],
)
def test_nothing_of_a_swin_is_left(architecture, structure):
    sites = find_attention(structure(architecture))
    assert len(sites) >= 12 and all(site.adapter is not None for site in sites)


@pytest.mark.parametrize(
    "architecture, left",
    [
        ("vit_b_16", {"MultiheadAttention": "torch_multihead_attention"}),
        ("swin_t", {"ShiftedWindowAttention": "torchvision_swin"}),
        ("swin_v2_t", {"ShiftedWindowAttentionV2": "torchvision_swin"}),
        ("maxvit_t", {"RelativePositionalMultiHeadAttention": "torchvision_maxvit"}),
    ],
)
def test_torchvision_is_left_with_a_reason(architecture, left):
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = getattr(torchvision.models, architecture)().eval()
    assert {site.type_name: site.reason for site in find_attention(model)} == left
    with pytest.raises(UnsupportedModuleError, match=next(iter(left.values()))):
        qvit.quantize(model, [torch.randn(1, 3, 224, 224)])


def test_no_model_of_convolutions_is_listed():
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    assert find_attention(model) == []
    with pytest.raises(UnsupportedModuleError, match=r"no attention module that qvit knows.*swin_transformer_v2\."):
        qvit.quantize(model.eval(), [torch.zeros(1)])


class AttentionWrapper(nn.Module):
    """A container whose name looks like attention."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class MyAttention(timm.layers.Attention):
    """A user's subclass may change the mathematics."""


class LinearSelfAttn(nn.Module):
    """Unknown attention of a user."""


def test_containers_subclasses_and_strangers():
    model = nn.Sequential(
        AttentionWrapper(timm.layers.Attention(16, 2)),
        MyAttention(16, 2),
        LinearSelfAttn(),
        AttentionWrapper(nn.ReLU()),
    )
    found = [(site.name, site.reason) for site in find_attention(model)]
    assert found == [
        ("0.inner", ""),
        ("1", "subclass_of_Attention"),
        ("2", "not_in_registry"),
        ("3", "not_in_registry"),
    ]


def test_strict_names_what_would_be_left():
    model = create("siglip_pool")
    x = images(model)
    with pytest.raises(UnsupportedModuleError, match="attn_pool.*AttentionPoolLatent: pooling_head"):
        qvit.quantize(model, [x], strict=True)
    assert qvit.report(model).swapped == 0
    with pytest.raises(UnsupportedModuleError, match="excluded_by_config"):
        qvit.quantize(create("vit"), [x], qvit.QuantConfig(exclude=("blocks.0.*",)), strict=True)
    qvit.quantize(create("vit"), [x], strict=True)


def test_exclude_everything():
    model = create("vit")
    with pytest.raises(UnsupportedModuleError, match="excluded_by_config"):
        qvit.quantize(model, [images(model)], qvit.QuantConfig(exclude=("*",)))


def test_report_of_a_quantized_model():
    model = create("siglip_pool")
    qvit.quantize(model, [images(model)], qvit.QuantConfig(precision="high", exclude=("blocks.1.attn",)))
    report = qvit.report(model)
    assert (report.swapped, report.left, report.total) == (1, 2, 3)
    swapped, excluded, pool = report.rows
    assert (swapped.name, swapped.type, swapped.status) == ("blocks.0.attn", "Attention", "swapped")
    assert (swapped.heads, swapped.head_dim, swapped.precision, swapped.backend) == (3, 16, "high", "reference")
    assert (excluded.status, excluded.reason) == ("left", "excluded_by_config")
    assert (pool.name, pool.reason) == ("attn_pool", "pooling_head")
    lines = str(report).splitlines()
    assert lines[0] == "1 of 3 attention modules run in integers"
    assert all(text in lines[3] for text in ("blocks.0.attn", "swapped", "reference", "high"))
    assert lines[5].endswith("pooling_head")
    assert lines[1].index("reason") == lines[5].index("pooling_head") == lines[4].index("excluded_by_config")
    assert report.to_dict()["rows"][2]["reason"] == "pooling_head"


def test_the_report_of_parts_that_were_quantized_one_by_one():
    """No figure of one part is passed off as that of all, and what any part left out has its reason."""
    vit = create("vit")
    model = nn.ModuleList([vit, copy.deepcopy(vit)]).eval()
    for part, config in zip(model, (qvit.QuantConfig(), qvit.QuantConfig(exclude=("blocks.1.*",)))):
        qvit.quantize(part, [torch.randn(64, 3, 48, 48)], config)
        assert qvit.report(part).agreement is not None
    model[0].blocks[0].attn.qvit_record = replace(model[0].blocks[0].attn.qvit_record, agreement=1.0)
    assert qvit.report(model).agreement is None


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2"])
def test_other_weights_in_a_quantized_model_are_heard(name):
    """Their scales are of the weights before, and so were the figures of the report."""
    model = create(name)
    weights, x = copy.deepcopy(model.state_dict()), images(model)
    qvit.quantize(model, [x])
    expected, figures = model(x), [row.sqnr_db for row in qvit.report(model).rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(weights)
        assert torch.equal(model(x), expected)
        model.half().load_state_dict(weights)  # rounded, they are the same
    assert [row.sqnr_db for row in qvit.report(model).rows] == figures
    with pytest.warns(UserWarning, match="other weights were loaded into a quantized .* qvit.restore"):
        model.load_state_dict({key: 2 * value if "qkv" in key else value for key, value in weights.items()})
    assert {row.sqnr_db for row in qvit.report(model).rows} == {None}
    hooks = [module._load_state_dict_post_hooks for module in qvit.restore(model).modules()]
    assert not any(hooks)


def test_wrong_arguments_say_what_was_expected():
    model = create("vit")
    for config in ({"precision": "high"}, "high", qvit.CalibrationConfig()):
        for call in (qvit.quantize, qvit.calibrate):
            with pytest.raises(ConfigError, match=f"config must be a QuantConfig, found {type(config).__name__}"):
                call(model, [images(model)], config)
    calibration = qvit.calibrate(model, [images(model)])
    with pytest.raises(ConfigError, match="must be a QuantConfig"):
        qvit.quantize(model, calibration, {"precision": "high"})
    with pytest.raises(BackendError, match="must be a qvit.Scales, found Calibration"):
        qvit.attention(*torch.randn(3, 1, 3, 5, 16), calibration)
    assert qvit.report(model).swapped == 0


def test_report_of_a_float_model():
    report = qvit.report(create("vit"))
    assert (report.swapped, report.total) == (0, 2)
    assert {row.reason for row in report.rows} == {"not_quantized"}
    assert str(qvit.report(nn.ReLU())) == "0 of 0 attention modules run in integers"


@pytest.mark.parametrize("arithmetic", ["paper", "paper_text"])
def test_published_arithmetic(arithmetic):
    model = create("vit")
    x = images(model)
    calls = attention_calls(model, x)
    qvit.quantize(model, [x], qvit.QuantConfig(arithmetic=arithmetic))
    for name, (args, kwargs, out) in calls.items():
        assert sqnr_db(model.get_submodule(name)(*args, **kwargs), out) > 15
    assert {row.precision for row in qvit.report(model).rows} == {arithmetic}
