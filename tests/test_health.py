"""quantize judges what it made: layers far from float, answers, NaN and Inf by layer, and faults at any stage."""

import copy
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import qvit
from qvit.errors import CalibrationError, ConfigError

PICTURES = torch.randn(64, 3, 48, 48, generator=torch.Generator().manual_seed(0))
FEW = [PICTURES[:2]]
# One code in two hundred: V is clipped to a small part of its range.
CLIPPED = qvit.CalibrationConfig("percentile", 51.0)
PACKAGES = tuple(str(Path(p).resolve()) for module in ("qvit", "qvit.patches") for p in __import__(module).__path__)


def make(depth=3, **changes):
    torch.manual_seed(0)
    sizes = {"depth": depth, "img_size": 48, "embed_dim": 48, "num_classes": 5, **changes}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def make_swin():
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5, "img_size": 56}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()


def snapshot(model):
    """Everything that a failed call might leave behind, in comparable form."""
    state = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        keys = sorted(vars(module))
        state[name] = (type(module), module.training, hooks, keys, sorted(module._non_persistent_buffers_set))
        for key, t in [*module._parameters.items(), *module._buffers.items()]:
            state[f"{name}.{key}"] = None if t is None else (id(t), t._version, t.detach().numpy().tobytes())
    return state


# ---------------------------------------------------------------- the gate


def test_a_layer_far_from_float_is_refused_by_name():
    model = make()
    before = snapshot(model)
    sqnr = qvit.calibrate(model, FEW, qvit.QuantConfig(calibration=CLIPPED)).sqnr
    floor = sorted(sqnr.values())[1] + 1e-6  # two of three layers are under it
    with pytest.raises(CalibrationError) as error:
        qvit.quantize(model, FEW, qvit.QuantConfig(calibration=CLIPPED, min_sqnr_db=floor))
    assert snapshot(model) == before
    worst = sorted(sqnr, key=sqnr.get)
    text = str(error.value)
    assert "2 of 3" in text and re.findall(r"'(blocks\.\d\.attn)'", text) == worst[:2]
    assert f"({sqnr[worst[0]]:.1f} dB)" in text and "min_sqnr_db" in text and "Calibrate on more" in text


def test_the_default_floor_is_15_db_and_can_be_switched_off(monkeypatch):
    from qvit.calibration import _SqnrMeter

    assert qvit.QuantConfig().min_sqnr_db == 15
    monkeypatch.setattr(_SqnrMeter, "decibels", lambda self: 14.9)
    with pytest.raises(CalibrationError, match=r"3 of 3.*min_sqnr_db = 15"):
        qvit.quantize(make(), FEW)
    for config in (qvit.QuantConfig(min_sqnr_db=None), qvit.QuantConfig(min_sqnr_db=14), qvit.QuantConfig("paper")):
        report = qvit.report(qvit.quantize(make(), FEW, config))
        assert [row.sqnr_db for row in report.rows] == [14.9] * 3


def test_an_integer_core_that_gives_nan_is_refused(monkeypatch):
    import qvit.calibration

    monkeypatch.setattr(qvit.calibration, "run_core", lambda q, *_: torch.full_like(q, torch.nan).transpose(1, 2))
    with pytest.raises(CalibrationError, match="3 of 3"):
        qvit.quantize(make(), FEW)


def test_many_bad_layers_are_counted(monkeypatch):
    from qvit.calibration import _SqnrMeter

    monkeypatch.setattr(_SqnrMeter, "decibels", lambda self: -3.0)
    with pytest.raises(CalibrationError, match=r"7 of 7.*'blocks.4.attn' \(-3.0 dB\) and 2 more"):
        qvit.quantize(make(depth=7), FEW)


def test_a_calibration_is_held_to_the_floor_too(tmp_path):
    model = make()
    qvit.calibrate(model, FEW, qvit.QuantConfig(calibration=CLIPPED)).save(tmp_path / "c.json")
    calibration = qvit.Calibration.load(tmp_path / "c.json")
    with pytest.raises(CalibrationError, match="min_sqnr_db"):
        qvit.quantize(model, calibration, qvit.QuantConfig(calibration=CLIPPED, min_sqnr_db=60.0))
    # What was measured of another precision says nothing of this one.
    qvit.quantize(model, calibration, qvit.QuantConfig(calibration=CLIPPED, min_sqnr_db=60.0, precision="high"))
    assert {row.sqnr_db for row in qvit.report(model).rows} == {None}


@pytest.mark.parametrize("value", ["15", True, float("nan"), float("inf")])
def test_bad_floors(value):
    with pytest.raises(ConfigError, match="min_sqnr_db"):
        qvit.QuantConfig(min_sqnr_db=value)


# ---------------------------------------------------------------- answers


def test_agreement_of_64_pictures_is_reported_and_saved(tmp_path):
    model = make()
    with torch.no_grad():
        for block in model.blocks:  # attention has to reach the logits of a random model
            block.attn.qkv.weight.mul_(20)
        expected = model(PICTURES).argmax(1)
    qvit.quantize(model, list(PICTURES.split(16)), qvit.QuantConfig(min_sqnr_db=None, calibration=CLIPPED))
    with torch.no_grad():
        same = 100 * float((model(PICTURES).argmax(1) == expected).double().mean())
    report = qvit.report(model)
    assert 0 < report.agreement == same < 100
    assert f"{same:.1f} % of the calibration pictures" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["agreement"] == same
    qvit.save(model, tmp_path / "q.safetensors")
    twin = qvit.load(qvit.restore(copy.deepcopy(model)), tmp_path / "q.safetensors")
    assert qvit.report(twin) == report


@pytest.mark.parametrize("loader, classes", [(PICTURES[:63].split(21), 5), (PICTURES.split(16), 0)])
def test_no_agreement_of_few_pictures_or_of_features(loader, classes):
    model = qvit.quantize(make(num_classes=classes), list(loader))
    assert qvit.report(model).agreement is None
    assert "pictures" not in str(qvit.report(model))


def test_answers_that_are_nan_are_refused(monkeypatch):
    from qvit.patches.base import QuantizedModule

    nan = lambda _, qkv: qkv.new_full((*qkv.shape[:2], qkv.shape[2] // 3), torch.nan)  # noqa: E731
    monkeypatch.setattr(QuantizedModule, "attend_packed", nan)
    model = make()
    before = snapshot(model)
    with pytest.raises(CalibrationError, match="quantized model gives NaN"):
        qvit.quantize(model, list(PICTURES.split(16)))
    assert snapshot(model) == before


# ---------------------------------------------------------------- NaN and Inf


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "layer, named",
    [
        ("patch_embed.proj", "blocks.0.attn"),  # attention is the first to look
        ("blocks.0.attn.qkv", "blocks.0.attn"),
        ("blocks.0.mlp.fc1", "blocks.1.attn"),
        ("blocks.2.attn.proj", "blocks.2.attn.proj"),
        ("blocks.2.mlp.fc2", "blocks.2.mlp.fc2"),
        ("norm", "norm"),
        ("head", "head"),
    ],
)
def test_nan_and_inf_name_a_layer(layer, named, value):
    model = make()
    with torch.no_grad():
        model.get_submodule(layer).bias[0] = value
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=f"layer '{named}'.*NaN or Inf"):
        qvit.quantize(model, FEW)
    assert snapshot(model) == before


class Nested(nn.Module):
    """Gives its tensors in a structure, and one of them made by no layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return {"features": [y, (y * torch.inf,)], "size": 3}


def test_nan_of_no_layer_names_the_model():
    with pytest.raises(CalibrationError, match="the model gives NaN or Inf"):
        qvit.quantize(Nested(make()).eval(), FEW)


# ---------------------------------------------------------------- inference mode


@pytest.mark.parametrize("make", [make, make_swin])
def test_quantized_inside_inference_mode_it_loads_and_restored_trains(make):
    model, size = make(), 48 if make is not make_swin else 56
    x = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        qvit.quantize(model, [x])
        model(x)
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    other = make()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.isfinite(model(x)).all()
    qvit.restore(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


# ---------------------------------------------------------------- faults


class Fault(BaseException):
    """No handler for errors may swallow it."""


def calls_until(number, action):
    """Runs an action with a fault at the given call of a function of the package; returns how many calls came."""
    calls = 0

    def profile(frame, event, _):
        nonlocal calls
        code = frame.f_code  # of a generator it may be the close, where Python swallows what is raised
        if event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_flags & inspect.CO_GENERATOR:
            calls += 1
            if calls == number:
                sys.setprofile(None)
                raise Fault

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def assert_every_fault_is_undone(model, action, numbers=None):
    """Faults at the given calls of an action on the model, by default at each; returns how many."""
    action(copy.deepcopy(model))  # fills caches, so that the calls are the same each time
    total = calls_until(0, lambda: action(copy.deepcopy(model)))
    before = snapshot(model)
    numbers = range(1, total + 1) if numbers is None else numbers(total)
    for number in numbers:
        with pytest.raises(Fault):
            calls_until(number, lambda: action(model))
        assert snapshot(model) == before, f"after a fault at call {number} of {total}"
    print(f"{len(numbers)} faults in {total} calls")  # -s shows it
    return len(numbers)


@pytest.mark.parametrize("make", [make, make_swin])
def test_a_fault_at_any_stage_leaves_the_model_alone(make):
    model, size = make(), 48 if make is not make_swin else 56
    pictures = torch.randn(64, 3, size, size)
    loader = [pictures[:32], pictures[32:]]
    config = qvit.QuantConfig(calibration=qvit.CalibrationConfig("mse"))
    with torch.no_grad():
        expected = model(pictures[:2])
    # All through, and more of the end, where the swapped model answers.
    sparse = lambda total: sorted({*range(1, total, total // 14), *range(int(0.9 * total), total, total // 90)})  # noqa: E731
    assert assert_every_fault_is_undone(model, lambda m: qvit.quantize(m, loader, config), sparse) > 20
    with torch.no_grad():
        assert torch.equal(model(pictures[:2]), expected)


@pytest.mark.parametrize("make", [make, make_swin])
def test_a_fault_at_any_call_of_the_swap_or_of_load_leaves_the_model_alone(make, tmp_path):
    model, size = make(), 48 if make is not make_swin else 56
    calibration = qvit.calibrate(model, [torch.randn(2, 3, size, size)])
    assert assert_every_fault_is_undone(model, lambda m: qvit.quantize(m, calibration)) > 50
    path = tmp_path / "q.safetensors"
    qvit.save(qvit.quantize(copy.deepcopy(model), calibration), path)
    assert assert_every_fault_is_undone(model, lambda m: qvit.load(m, path)) > 50
