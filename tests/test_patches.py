"""The quantized classes against their float hosts, at the output of the attention module.

Logits of randomly initialised models hardly see attention, so weights here give scores of some spread, and each
accuracy floor has a negative control that must fall below it.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import nn

import qvit
from qvit.discovery import find_attention
from qvit.errors import UnsupportedModuleError
from qvit.patches import ADAPTERS
from qvit.patches.swin import QuantizedWindowAttention
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
        elif name.endswith("weight"):
            p.uniform_(0.5, 1.5)
    return attn.eval()


def vit_attention(**changes):
    return spread(
        Attention(**{"dim": DIM, "num_heads": HEADS, "qkv_bias": True, "norm_layer": nn.LayerNorm, **changes})
    )


def swin_attention(window=(3, 4)):
    return spread(WindowAttention(dim=DIM, num_heads=HEADS, window_size=window))


def quantized(attn, x, **config):
    return qvit.quantize(copy.deepcopy(attn), [x], qvit.QuantConfig(**config))


def sharper(attn):
    """The negative control: the float module with its scores times 1.5."""
    control = copy.deepcopy(attn)
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
    attn = vit_attention(attn_head_dim=head_dim)
    x = torch.randn(2, TOKENS, DIM)
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
    assert sqnr_db(quant(x, is_causal=True), attn(x, is_causal=True)) > FLOOR_DB["standard"]
    assert torch.equal(quant(x, is_causal=True), quant(x, attn_mask=causal(TOKENS)))
    assert sqnr_db(quant(x), attn(x, is_causal=True)) < 15


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
        quant(x)  # no gradient is asked for
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


def test_swin_bias_is_never_stale():
    attn, other = swin_attention(), swin_attention()
    x, mask = windows()
    quant = quantized(attn, x)
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
def test_swin_masks_that_do_not_fit(mask):
    x, _ = windows()
    quant = quantized(swin_attention(), x)
    with pytest.raises(UnsupportedModuleError, match="mask"):
        quant(x, mask=mask)


def test_swin_refusals():
    attn = swin_attention()
    attn.softmax = nn.Identity()
    assert find_attention(attn)[0].reason == "unknown_attribute:softmax"
    attn = swin_attention()
    attn.register_parameter("logit_scale", nn.Parameter(torch.zeros(1)))
    assert find_attention(attn)[0].reason == "unknown_attribute:logit_scale"


@pytest.mark.parametrize("make", [vit_attention, swin_attention])
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


def test_float_core_of_the_observers_is_the_hosts():
    from qvit.calibration import float_attention

    attn = swin_attention()
    x, mask = windows()
    core = QuantizedWindowAttention.core_inputs(attn, x, mask=mask)
    out = float_attention(core, attn.scale).transpose(1, 2).flatten(2)
    assert torch.allclose(F.linear(out, attn.proj.weight, attn.proj.bias), attn(x, mask=mask), atol=1e-5)
