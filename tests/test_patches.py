"""The quantized classes against their float hosts, at the output of the attention module.

Logits of randomly initialised models hardly see attention, so weights here give scores of some spread, and each
accuracy floor has a negative control that must fall below it. What an older timm's float module does not do is asked of
that module, and replaced by what it does or skipped.
"""

import copy
import inspect
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.vision_transformer import Attention
from torch import nn

import qvit
from qvit.discovery import find_attention
from qvit.errors import UnsupportedModuleError
from qvit.patches import ADAPTERS
from qvit.patches.swin import QuantizedWindowAttention
from qvit.patches.swin_v2 import QuantizedWindowAttentionV2
from qvit.patches.swin_v2_cr import QuantizedWindowMultiHeadAttention
from qvit.patches.vit import QuantizedAttention

FLOOR_DB = {"standard": 27.0, "high": 32.0}
DIM, HEADS, TOKENS = 48, 3, 21


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def sqnr_db(value, reference):
    noise = (value.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise.clamp_min(1e-30)))


def spread(attn):
    """Weights whose scores have a standard deviation of about two, and biases that are not zero."""
    for name, p in attn.named_parameters():
        if name == "qkv.weight":
            p.normal_(std=1.4 * p.shape[1] ** -0.5)
        elif name.endswith("weight") and p.ndim == 2:
            p.normal_(std=p.shape[1] ** -0.5)
        elif name.endswith("bias"):
            p.normal_(std=0.3)
        elif name == "relative_position_bias_table":
            p.normal_()
        elif name == "logit_scale":  # factors from 3 to 20
            p.uniform_(1.0, 3.0)
        elif name.endswith("weight"):
            p.uniform_(0.5, 1.5)
    return attn.eval()


def vit_attention(**changes):
    missing = changes.keys() - inspect.signature(Attention).parameters.keys()
    if missing:
        pytest.skip(f"this timm's Attention has no {', '.join(sorted(missing))}")
    return spread(
        Attention(**{"dim": DIM, "num_heads": HEADS, "qkv_bias": True, "norm_layer": nn.LayerNorm, **changes})
    )


def swin_attention(window=(3, 4)):
    return spread(WindowAttention(dim=DIM, num_heads=HEADS, window_size=window))


def swin_v2_attention(window=(3, 4), **changes):
    return spread(WindowAttentionV2(dim=DIM, num_heads=HEADS, window_size=window, **changes))


def swin_v2_cr_attention(window=(3, 4)):
    return spread(WindowMultiHeadAttention(dim=DIM, num_heads=HEADS, window_size=window))


def quantized(attn, x, **config):
    return qvit.quantize(copy.deepcopy(attn), [x], qvit.QuantConfig(**config))


def sharper(attn):
    """The negative control: the float module with its scores times 1.5."""
    control = copy.deepcopy(attn)
    if hasattr(control, "logit_scale"):
        control.logit_scale.add_(math.log(1.5))
        return control
    control.fused_attn = False
    control.scale = control.scale * 1.5
    return control


VARIANTS = {
    "plain": {},
    "no_qkv_bias": {"qkv_bias": False},
    "no_proj_bias": {"proj_bias": False},
    "qk_norm": {"qk_norm": True},
    "scale_norm": {"scale_norm": True},
    "gated": {"gated": True},
    "wide_heads": {"attn_head_dim": 40},
    "narrow_heads": {"attn_head_dim": 10},
    "dim_out": {"dim_out": 20},
    "dropout_in_eval": {"attn_drop": 0.9, "proj_drop": 0.9},
    "all": {
        "qkv_bias": False,
        "proj_bias": False,
        "qk_norm": True,
        "scale_norm": True,
        "gated": True,
        "attn_head_dim": 24,
        "dim_out": 20,
    },
}


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_attention(changes, fused, precision):
    attn = vit_attention(**changes)
    attn.fused_attn = fused
    x = torch.randn(4, TOKENS, DIM)
    expected = attn(x)
    quant = quantized(attn, x, precision=precision)
    assert type(quant) is QuantizedAttention
    assert quant(x).shape == expected.shape
    assert sqnr_db(quant(x), expected) > FLOOR_DB[precision]
    assert sqnr_db(sharper(attn)(x), expected) < FLOOR_DB[precision] - 5


@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 32, 48, 64, 72, 80, 88, 96, 104, 128])
def test_head_dimensions(head_dim):
    attn = vit_attention(dim=HEADS * head_dim)
    x = torch.randn(2, TOKENS, HEADS * head_dim)
    expected = attn(x)
    assert sqnr_db(quantized(attn, x)(x), expected) > FLOOR_DB["standard"]
    assert sqnr_db(sharper(attn)(x), expected) < FLOOR_DB["standard"] - 5


@pytest.mark.parametrize("tokens", [1, 2, 50, 197])
def test_any_number_of_tokens_after_calibration(tokens):
    attn = vit_attention()
    quant = quantized(attn, torch.randn(4, 100, DIM))
    x = torch.randn(2, tokens, DIM)
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"] - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules(dtype):
    attn = vit_attention(qk_norm=True).to(dtype)
    x = torch.randn(2, TOKENS, DIM, dtype=dtype)
    quant = quantized(attn, x)
    assert quant(x).dtype == dtype
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"]


def test_cast_after_quantize_leaves_the_constants_alone():
    attn = vit_attention()
    x = torch.randn(2, TOKENS, DIM)
    quant = quantized(attn, x)
    constants = quant.qvit_constants.clone()
    quant.half()
    assert torch.equal(quant.qvit_constants, constants)
    assert sqnr_db(quant(x.half()), attn(x)) > FLOOR_DB["standard"]


def test_autocast_with_normalised_queries():
    attn = vit_attention(qk_norm=True)
    x = torch.randn(2, TOKENS, DIM)
    quant = quantized(attn, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = quant(x)
        assert out.dtype == torch.bfloat16
        assert sqnr_db(out, attn(x)) > FLOOR_DB["standard"]


def test_custom_scale_follows_the_float_module():
    x = torch.randn(2, TOKENS, DIM)
    attn = vit_attention()
    attn.scale = 0.5 * attn.scale
    attn.fused_attn = False
    quant = quantized(attn, x)
    assert quant.qvit_settings.softmax_scale == attn.scale
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"]
    attn.fused_attn = True  # the fused host never reads its scale
    quant = quantized(attn, x)
    assert quant.qvit_settings.softmax_scale == attn.head_dim**-0.5
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"]


def test_older_hosts_without_newer_attributes():
    x = torch.randn(2, TOKENS, DIM)
    attn = vit_attention()
    expected, calibration = attn(x), qvit.calibrate(attn, [x])
    for name in ("norm", "q_norm", "k_norm", "gate", "attn_dim", "head_dim"):
        if hasattr(attn, name):  # the installed one may be older itself
            delattr(attn, name)
    assert sqnr_db(qvit.quantize(attn, calibration)(x), expected) > FLOOR_DB["standard"]


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


MASKS = {
    "bool_2d": lambda: causal(TOKENS),
    "bool_per_image": lambda: causal(TOKENS).expand(4, 1, TOKENS, TOKENS) & (torch.rand(4, 1, 1, TOKENS) > -1),
    "keys_only": lambda: (torch.arange(TOKENS) % 3 > 0).expand(4, 1, 1, TOKENS),
    "float_per_head": lambda: 2 * torch.randn(HEADS, TOKENS, TOKENS),
    "float_inf": lambda: torch.zeros(TOKENS, TOKENS).masked_fill(~causal(TOKENS), float("-inf")),
    "float_min": lambda: torch.zeros(4, 1, TOKENS, TOKENS).masked_fill(~causal(TOKENS), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("arithmetic", ["qvit", "paper"])
def test_masks(mask, arithmetic):
    attn = vit_attention()
    x = torch.randn(4, TOKENS, DIM)
    mask = mask()
    floor = FLOOR_DB["standard"] if arithmetic == "qvit" else 10.0
    quant = quantized(attn, x, arithmetic=arithmetic)
    assert sqnr_db(quant(x, attn_mask=mask), attn(x, attn_mask=mask)) > floor
    assert sqnr_db(quant(x), attn(x, attn_mask=mask)) < floor - 5


def test_is_causal():
    attn = vit_attention()
    x = torch.randn(2, TOKENS, DIM)
    quant = quantized(attn, x)
    has_argument = "is_causal" in inspect.signature(Attention.forward).parameters  # older ones take the mask alone
    expected = attn(x, is_causal=True) if has_argument else attn(x, attn_mask=causal(TOKENS))
    assert sqnr_db(quant(x, is_causal=True), expected) > FLOOR_DB["standard"]
    assert torch.equal(quant(x, is_causal=True), quant(x, attn_mask=causal(TOKENS)))
    assert sqnr_db(quant(x), expected) < 15


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": causal(TOKENS), "is_causal": True},
        {"attn_mask": causal(TOKENS + 1)},
        {"attn_mask": causal(TOKENS).long()},
        {"attn_mask": causal(TOKENS).expand(2, HEADS + 1, TOKENS, TOKENS)},
        {"attn_mask": causal(TOKENS).expand(1, 2, 1, TOKENS, TOKENS)},
    ],
    ids=["both", "size", "dtype", "heads", "rank"],
)
def test_masks_that_do_not_fit(arguments):
    x = torch.randn(2, TOKENS, DIM)
    quant = quantized(vit_attention(), x)
    with pytest.raises(UnsupportedModuleError, match="attn_mask"):
        quant(x, **arguments)


def test_training_and_gradients_are_refused():
    x = torch.randn(2, TOKENS, DIM)
    quant = quantized(vit_attention(), x)
    with torch.enable_grad():
        with pytest.raises(UnsupportedModuleError, match="no_grad"):
            quant(x.clone().requires_grad_())
        with pytest.raises(UnsupportedModuleError, match="a weight before its core requires one.*no_grad"):
            quant(x)
        quant.requires_grad_(False)
        quant.proj.requires_grad_(True)
        quant(x).sum().backward()  # behind the core there are gradients
        assert quant.proj.weight.grad.any()
    quant(x.clone().requires_grad_())
    quant.train()
    with pytest.raises(UnsupportedModuleError, match="eval"):
        quant(x)


class Scaled(Attention):
    pass


def refused(change):
    attn = vit_attention()
    change(attn)
    return find_attention(attn)[0].reason


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.add_module("rope", nn.Linear(2, 2)), "unknown_attribute:rope"),
        (lambda m: m.register_parameter("q_bias", nn.Parameter(torch.zeros(2))), "unknown_attribute:q_bias"),
        (lambda m: m.register_buffer("table", torch.zeros(2)), "unknown_attribute:table"),
        (lambda m: setattr(m, "attn_drop", nn.ReLU()), "unknown_attribute:attn_drop"),
        (lambda m: setattr(m, "forward", lambda x: x), "forward_overridden"),
        (lambda m: setattr(m, "qkv", nn.Sequential(m.qkv)), "qkv_not_linear"),
        (lambda m: torch.nn.utils.parametrizations.weight_norm(m.qkv), "qkv_not_linear"),
        (lambda m: setattr(m, "qkv", nn.Linear(DIM, 129 * 3 * HEADS)), "head_dim_above_128"),
        (lambda m: setattr(m, "qkv", nn.Linear(DIM, DIM)), "unsupported_layout"),
        (lambda m: (setattr(m, "scale", -1.0), setattr(m, "fused_attn", False)), "unsupported_scale"),
        (lambda m: setattr(m, "__class__", Scaled), "subclass_of_Attention"),
        (lambda m: None, ""),
    ],
)
def test_refusals_are_named(change, reason):
    assert refused(change) == reason


def test_unknown_forward_argument(monkeypatch):
    monkeypatch.setattr(Attention, "forward", lambda self, x, rope=None: x)
    assert refused(lambda m: None) == "unknown_argument:rope"


def test_head_dim_above_128_is_left_with_an_error():
    attn = spread(Attention(dim=258, num_heads=2))
    with pytest.raises(UnsupportedModuleError, match="head_dim_above_128"):
        qvit.quantize(attn, [torch.randn(1, 4, 258)])
    assert type(attn) is Attention


every_window = pytest.mark.parametrize("make", [swin_attention, swin_v2_attention, swin_v2_cr_attention])


def windows(images=2, num_windows=4, tokens=12):
    x = torch.randn(images * num_windows, tokens, DIM)
    mask = torch.where(torch.rand(num_windows, tokens, tokens) > 0.4, 0.0, -100.0)
    mask.diagonal(dim1=1, dim2=2).zero_()
    return x, mask


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("arithmetic, floor", [("qvit", 27.0), ("paper", 20.0)])
def test_swin(arithmetic, floor, fused):
    attn = swin_attention()
    attn.fused_attn = fused
    x, mask = windows()
    quant = quantized(attn, x, arithmetic=arithmetic)
    assert type(quant) is QuantizedWindowAttention
    for m in (None, mask):
        assert sqnr_db(quant(x, mask=m), attn(x, mask=m)) > floor
    control = copy.deepcopy(attn)
    control.relative_position_bias_table.zero_()
    assert sqnr_db(control(x), attn(x)) < floor - 2
    assert sqnr_db(attn(x, mask=mask.flip(0)), attn(x, mask=mask)) < floor - 2


COSINE = {
    "v2": swin_v2_attention,
    "v2_no_bias": lambda: swin_v2_attention(qkv_bias=False),
    "v2_separate_bias": lambda: swin_v2_attention(qkv_bias_separate=True),
    "v2_other_pretrained_window": lambda: swin_v2_attention(pretrained_window_size=(6, 6)),
    "v2_cr": swin_v2_cr_attention,
}
every_cosine = pytest.mark.parametrize("make", COSINE.values(), ids=COSINE)


@every_cosine
@pytest.mark.parametrize(("precision", "floor"), [("standard", 33.0), ("high", 36.0)])
def test_cosine_windows(make, precision, floor):
    attn = make()
    x, mask = windows()
    quant = quantized(attn, x, precision=precision)
    assert type(quant) in (QuantizedWindowAttentionV2, QuantizedWindowMultiHeadAttention)
    for m in (None, mask):
        assert sqnr_db(quant(x, mask=m), attn(x, mask=m)) > floor
        assert sqnr_db(sharper(attn)(x, mask=m), attn(x, mask=m)) < floor - 10
    assert sqnr_db(attn(x, mask=mask.flip(0)), attn(x, mask=mask)) < floor - 10
    flat = copy.deepcopy(attn)
    for name, p in flat.named_parameters():
        if name.startswith(("cpb_mlp", "meta_mlp")):
            p.zero_()
    assert sqnr_db(flat(x), attn(x)) < floor - 10


@pytest.mark.parametrize("make", [swin_v2_attention, swin_v2_cr_attention])
def test_paper_arithmetic_on_cosines(make):
    attn = make()
    x, mask = windows()
    quant = quantized(attn, x, arithmetic="paper")
    for m in (None, mask):
        assert sqnr_db(quant(x, mask=m), attn(x, mask=m)) > 20
        assert sqnr_db(sharper(attn)(x, mask=m), attn(x, mask=m)) < 18


@pytest.mark.parametrize("make", [swin_v2_attention, swin_v2_cr_attention])
def test_the_logit_scale_stops_at_a_hundred(make):
    attn = make()
    attn.logit_scale.fill_(math.log(100.0))
    beyond = copy.deepcopy(attn)
    beyond.logit_scale.add_(2.0)
    below = copy.deepcopy(attn)
    below.logit_scale.sub_(0.5)
    x, _ = windows()
    results = [quantized(module, x)(x) for module in (attn, beyond, below)]
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert sqnr_db(results[1], beyond(x)) > 20


@pytest.mark.parametrize("make", [swin_v2_attention, swin_v2_cr_attention])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_heads_of_cosine_windows_have_scales_of_their_own(make, granularity, monkeypatch):
    """Whatever the config says: one head's scores reach to 100, the others' to e."""
    attn = make()
    attn.logit_scale.fill_(1.0).view(-1)[0] = 4.6
    x, _ = windows()
    config = {"granularity": granularity, "precision": "high"}
    assert sqnr_db(quantized(attn, x, **config)(x), attn(x)) > 30
    monkeypatch.setattr(ADAPTERS[type(attn)], "granularity", None)  # the control
    assert (sqnr_db(quantized(attn, x, **config)(x), attn(x)) > 30) == (granularity == "head")


@every_cosine
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_cosines(make, dtype):
    attn = make().to(dtype)
    x, mask = windows()
    quant = quantized(attn, x.to(dtype))
    exact = attn.float()
    for m in (None, mask):
        out = quant(x.to(dtype), mask=None if m is None else m.to(dtype))
        assert out.dtype == dtype
        assert sqnr_db(out, exact(x, mask=m)) > FLOOR_DB["standard"]
        assert sqnr_db(sharper(exact)(x, mask=m), exact(x, mask=m)) < FLOOR_DB["standard"] - 5


def test_a_key_of_zeros_is_no_nan_in_float16():
    """The second version's keys have no bias: those of pads are zero, and the host's epsilon is zero in float16."""
    attn = swin_v2_attention()
    x, _ = windows()
    x[:, -1] = 0
    expected, half = attn(x), copy.deepcopy(attn).half()
    assert half(x.half()).isnan().any()
    assert sqnr_db(quantized(attn, x).half()(x.half()), expected) > FLOOR_DB["standard"]


def changes_window(attn, window):
    """True where the float module can; older ones resize the table of a square alone, or keep a buffer's size."""
    try:
        copy.deepcopy(attn).set_window_size(window)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("make", [swin_v2_attention, swin_v2_cr_attention])
def test_continuous_bias_is_never_stale(make):
    """Its source is a child, and a module's own loading comes before its children's."""
    attn, other = make(), make()
    x, mask = windows()
    quant = quantized(attn, torch.randn(64, 12, DIM))  # enough to hold for another window too
    network = next(name for name in ("cpb_mlp", "meta_mlp") if hasattr(attn, name))
    expected = copy.deepcopy(attn)
    getattr(expected, network).load_state_dict(getattr(other, network).state_dict())
    quant.load_state_dict(expected.state_dict())
    assert sqnr_db(quant(x), expected(x)) > FLOOR_DB["standard"]
    assert sqnr_db(attn(x), expected(x)) < FLOOR_DB["standard"] - 5

    getattr(quant, network).load_state_dict(getattr(attn, network).state_dict())  # the child's own: not seen yet
    assert sqnr_db(quant(x), attn(x)) < FLOOR_DB["standard"] - 5
    quant.eval()
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"]

    window = (4, 5) if changes_window(attn, (4, 5)) else (2, 6)
    for module in (quant, attn):
        module.set_window_size(window)
    tokens = math.prod(window)
    x, mask = windows(tokens=tokens)
    assert quant.qvit_bias.shape == (1, HEADS, tokens, tokens)
    for m in (None, mask):
        assert sqnr_db(quant(x, m), attn(x, m)) > FLOOR_DB["standard"] - 1
    assert sorted(quant.state_dict()) == sorted(attn.state_dict())


def test_swin_bias_is_never_stale():
    window = (3, 4) if changes_window(swin_attention(), (4, 5)) else (4, 4)
    attn, other = swin_attention(window), swin_attention(window)
    x, _ = windows(tokens=math.prod(window))
    quant = quantized(attn, torch.randn(64, math.prod(window), DIM))  # enough to hold for another window too
    before = quant.qvit_bias
    quant.load_state_dict({**quant.state_dict(), "relative_position_bias_table": other.relative_position_bias_table})
    expected = copy.deepcopy(attn)
    expected.relative_position_bias_table.copy_(other.relative_position_bias_table)
    assert quant.qvit_bias is before
    assert sqnr_db(quant(x), expected(x)) > FLOOR_DB["standard"]
    assert sqnr_db(attn(x), expected(x)) < FLOOR_DB["standard"] - 5

    quant.relative_position_bias_table.copy_(attn.relative_position_bias_table)
    quant.train().eval()
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"]

    for module in (quant, attn):
        module.set_window_size((4, 5))
    x, mask = windows(tokens=20)
    assert quant.qvit_bias.shape == (1, HEADS, 20, 20)
    assert sqnr_db(quant(x), attn(x)) > FLOOR_DB["standard"] - 3
    assert sqnr_db(quant(x, mask), attn(x, mask)) > FLOOR_DB["standard"] - 3
    assert sorted(quant.state_dict()) == sorted(attn.state_dict())


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(3, 12, 12), torch.zeros(4, 12, 13), torch.zeros(12, 12), torch.ones(4, 12, 12, dtype=torch.bool)],
    ids=["windows", "tokens", "rank", "dtype"],
)
@every_window
def test_window_masks_that_do_not_fit(make, mask):
    x, _ = windows()
    attn = make()
    quant = quantized(attn, x)
    with pytest.raises(UnsupportedModuleError, match=f"{type(attn).__name__} got a mask"):
        quant(x, mask=mask)


@every_window
def test_window_refusals(make):
    attn = make()
    attn.softmax = nn.Identity()
    assert find_attention(attn)[0].reason == "unknown_attribute:softmax"
    attn = make()
    attn.register_parameter("temperature", nn.Parameter(torch.zeros(1)))
    assert find_attention(attn)[0].reason == "unknown_attribute:temperature"
    attn = make()
    assert find_attention(attn)[0].reason == ""


@pytest.mark.parametrize("make", [vit_attention, swin_attention, swin_v2_attention, swin_v2_cr_attention])
def test_swap_survives_copy_and_pickle(make):
    attn = make()
    x = torch.randn(4, 12, DIM)
    quant = quantized(attn, x)
    for twin in (copy.deepcopy(quant), pickle.loads(pickle.dumps(quant))):
        assert type(twin) is type(quant)
        assert torch.equal(twin(x), quant(x))
        assert twin.qkv.weight.data_ptr() != quant.qkv.weight.data_ptr()
        qvit.restore(twin)
        assert torch.equal(twin(x), attn(x))


def test_registry_is_by_exact_type():
    for host, adapter in ADAPTERS.items():
        assert adapter.host is host
        assert issubclass(adapter, host)
        assert adapter not in ADAPTERS


@every_window
def test_float_core_of_the_observers_is_the_hosts(make):
    from qvit.calibration import float_attention

    attn = make()
    x, mask = windows()
    adapter = ADAPTERS[type(attn)]
    core = adapter.core_inputs(attn, x, mask=mask)
    out = float_attention(core, adapter.scale_of(attn)).transpose(1, 2).flatten(2)
    assert torch.allclose(F.linear(out, attn.proj.weight, attn.proj.bias), attn(x, mask=mask), atol=1e-5)
