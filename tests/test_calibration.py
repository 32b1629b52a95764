"""Calibration: batches of any structure, ranges where the core reads, clipping, the SQNR, and the JSON file."""

import copy
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

import qvit
from qvit.calibration import BINS, least_mse_fraction, observe_cores, percentile_fraction
from qvit.discovery import plan_swap
from qvit.errors import CalibrationError
from qvit.scales import Ranges, build_scales

IMAGES = torch.randn(6, 3, 48, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def vit():
    torch.manual_seed(0)
    sizes = {"depth": 2, "img_size": 48, "embed_dim": 48, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", qk_norm=True, **sizes).eval()


def same_scales(a, b):
    return a.layers.keys() == b.layers.keys() and all(
        torch.equal(a.layers[n].constants(), b.layers[n].constants()) for n in a.layers
    )


def config(method="absmax", **changes):
    batches = changes.pop("batches", 8)
    return qvit.QuantConfig(calibration=qvit.CalibrationConfig(method, batches=batches), **changes)


def generator(*batches):
    yield from batches


class UserDict(dict):
    """As the mappings of other libraries."""


LOADERS = {
    "tensor": lambda: [IMAGES],
    "pair": lambda: [(IMAGES, torch.zeros(6))],
    "list": lambda: [[IMAGES, torch.zeros(6)]],
    "images": lambda: [list(IMAGES)],
    "image_key": lambda: [{"image": IMAGES, "label": torch.zeros(6)}],
    "pixel_values": lambda: [UserDict(pixel_values=IMAGES)],
    "generator": lambda: generator(IMAGES[:4], IMAGES[4:]),
    "data_loader": lambda: DataLoader(TensorDataset(IMAGES, torch.zeros(6)), batch_size=2),
    "float64": lambda: [IMAGES.double()],
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
def test_batches_of_any_structure(vit, loader, method):
    expected = qvit.calibrate(vit, [IMAGES], config(method))
    found = qvit.calibrate(vit, loader(), config(method))
    for name, scales in found.layers.items():
        # Batches of another size go through other matrix kernels, which may round the last bit of a range otherwise.
        for field in ("q_mult", "k_mult", "v_mult", "o_scale"):
            torch.testing.assert_close(getattr(scales, field), getattr(expected.layers[name], field), rtol=2e-3, atol=0)


def test_the_number_of_batches_is_bounded(vit):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield IMAGES[:2] * (1 if len(taken) < 4 else 100)

    found = qvit.calibrate(vit, endless(), config(batches=3))
    assert len(taken) == 3
    assert same_scales(found, qvit.calibrate(vit, [IMAGES[:2]]))


def test_loader_that_reuses_its_buffer(vit):
    def reusing():
        buffer = torch.empty(2, 3, 48, 48)
        for start in (0, 2, 4):
            yield buffer.copy_(IMAGES[start : start + 2])

    parts = [IMAGES[:2], IMAGES[2:4], IMAGES[4:]]
    assert same_scales(qvit.calibrate(vit, reusing(), config("mse")), qvit.calibrate(vit, parts, config("mse")))


def test_ranges_are_of_normalised_queries_and_keys(vit):
    seen = {}

    def record(module, args):
        x = args[0]
        q, k, v = module.qkv(x).reshape(*x.shape[:2], 3, 3, 16).permute(2, 0, 3, 1, 4)
        q, k = module.q_norm(q), module.k_norm(k)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        seen[module] = Ranges.of(q, k, v, o)

    attn = vit.blocks[1].attn
    hook = attn.register_forward_pre_hook(record)
    with torch.no_grad():
        vit(IMAGES)
    hook.remove()
    for granularity in ("tensor", "head"):
        found = qvit.calibrate(vit, [IMAGES], config(granularity=granularity)).layers["blocks.1.attn"]
        expected = build_scales(seen[attn], softmax_scale=attn.scale, granularity=granularity)
        for field in ("q_mult", "k_mult", "v_mult", "k_zero", "o_scale"):
            torch.testing.assert_close(getattr(found, field), getattr(expected, field), rtol=1e-3, atol=1e-5)


def test_sqnr_tells_a_good_core_from_a_bad_one(vit):
    high = qvit.calibrate(vit, [IMAGES], config(precision="high")).sqnr
    assert high.keys() == {"blocks.0.attn", "blocks.1.attn"}
    assert all(35 < value < 80 for value in high.values())
    clipped = dataclasses.replace(config("percentile"), calibration=qvit.CalibrationConfig("percentile", 51.0))
    assert all(value < 20 for value in qvit.calibrate(vit, [IMAGES], clipped).sqnr.values())


def test_percentile_fraction():
    counts = torch.zeros(2, BINS, dtype=torch.int64)
    counts[0, :1000] = 1  # 1,000 values up to bin 999, then nothing but the largest
    counts[0, -1] = 1
    counts[1, 0] = 5
    assert percentile_fraction(counts, 100.0).tolist() == [1.0, 1 / BINS]
    assert percentile_fraction(counts, 99.0).tolist() == [991 / BINS, 1 / BINS]


def quantization_error(x, clip):
    step = clip / 127
    return float(((x / step).round().clamp(-127, 127) * step - x).square().mean())


@pytest.mark.parametrize("shape, clips", [("uniform", False), ("laplace", True)])
def test_least_mse_fraction(shape, clips):
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(200_000, generator=generator, dtype=torch.float64)
    x = u if shape == "uniform" else -torch.log(u)
    x = x / x.max()
    counts = torch.bincount((x * BINS).long().clamp_max(BINS - 1), minlength=BINS)[None]
    fraction = float(least_mse_fraction(counts))
    assert (fraction < 0.9) == clips
    best = min(quantization_error(x, f / 100) for f in range(20, 101, 2))
    assert quantization_error(x, fraction) < 1.02 * best


@pytest.mark.parametrize("method", ["percentile", "mse"])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_clipping_only_raises_multipliers(vit, method, granularity):
    full = qvit.calibrate(vit, [IMAGES], config(granularity=granularity))
    clipped = qvit.calibrate(vit, [IMAGES], config(method, granularity=granularity))
    for name, scales in clipped.layers.items():
        for field in ("q_mult", "k_mult", "v_mult"):
            ratio = getattr(scales, field) / getattr(full.layers[name], field)
            assert (ratio > 0.98).all()  # the pairs of q's and k's multipliers move by up to 0.8 %
            per_head = ratio.mean(1)
            if granularity == "tensor":
                torch.testing.assert_close(per_head, per_head[:1].expand(3), rtol=1e-2, atol=0)


def test_a_loader_that_does_not_know_its_length(vit):
    class Endless:
        def __iter__(self):
            return iter([IMAGES])

        def __len__(self):
            raise NotImplementedError

    assert same_scales(qvit.calibrate(vit, Endless()), qvit.calibrate(vit, [IMAGES]))


def test_a_file_that_cannot_be_written(vit, tmp_path):
    with pytest.raises(CalibrationError, match="cannot write the calibration"):
        qvit.calibrate(vit, [IMAGES]).save(tmp_path / "no" / "folder.json")


def test_json_round_trip_is_exact(vit, tmp_path):
    found = qvit.calibrate(vit, [IMAGES], config("mse", precision="high", exclude=("blocks.0.*",)))
    found.save(tmp_path / "c.json")
    again = qvit.Calibration.load(tmp_path / "c.json")
    assert same_scales(found, again)
    assert (again.config, again.sqnr, again.fingerprint) == (found.config, found.sqnr, found.fingerprint)
    assert list(again.layers) == ["blocks.1.attn"]


def broken(document, **changes):
    return {**document, **changes}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: "{", "cannot read"),
        (lambda d: json.dumps([d]), "not a calibration"),
        (lambda d: json.dumps(broken(d, format="other")), "not a calibration"),
        (lambda d: json.dumps(broken(d, version=99)), "99"),
        (lambda d: json.dumps(broken(d, layers={"a": {}})), "damaged|keys"),
        (lambda d: json.dumps(broken(d, layers=[1])), "damaged"),
        (lambda d: json.dumps(broken(d, config={"precision": "x"})), "precision"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "sqnr"}), "sqnr"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "fingerprint"}), "fingerprint"),
        (lambda d: json.dumps(broken(d, fingerprint="abc")), "damaged"),
    ],
)
def test_damaged_json(vit, tmp_path, change, words):
    path = tmp_path / "c.json"
    qvit.calibrate(vit, [IMAGES]).save(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(CalibrationError, match=words):
        qvit.Calibration.load(path)


def test_missing_json(tmp_path):
    with pytest.raises(CalibrationError, match="nothing.json"):
        qvit.Calibration.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("part", ["blocks.0.attn.qkv.weight", "patch_embed.proj.weight"])
def test_a_calibration_of_other_weights_is_refused(vit, part):
    found = qvit.calibrate(vit, [IMAGES])
    twin, other = copy.deepcopy(vit).half(), copy.deepcopy(vit)
    other.get_parameter(part).data.mul_(1.5)
    kinds = [type(m) for m in other.modules()]
    with pytest.raises(CalibrationError, match="other weights of this architecture"):
        qvit.quantize(other, found)
    assert [type(m) for m in other.modules()] == kinds
    assert qvit.report(qvit.quantize(twin, found)).swapped == 2  # a copy of another type is no other model


@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
@pytest.mark.parametrize("part", range(3), ids="qkv")
def test_a_dead_head_beside_live_ones(method, part):
    """Its magnitudes have no range of their own to be a part of."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=48, num_classes=5).eval()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(3)
        model.blocks[0].attn.qkv.weight[192 * part : 192 * part + 64] = 0
        model.blocks[0].attn.qkv.bias[192 * part : 192 * part + 64] = 0
    found = qvit.calibrate(model, [IMAGES], config(method, granularity="head"))
    assert found.sqnr["blocks.0.attn"] > 25


def test_observers_take_turns_where_replicas_run_in_threads(vit):
    """As under nn.DataParallel; an update that another thread interrupts would lose a batch."""

    class Counter:
        def __init__(self):
            self.count = 0

        def __call__(self, core):
            before = self.count
            time.sleep(0.002)
            self.count = before + 1

    class Replicas(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = vit

        def forward(self, x):
            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(self.inner, [x] * 8))

    model = Replicas()
    targets = plan_swap(model.eval(), config())
    observers = {site.name: Counter() for site in targets}
    with torch.no_grad():
        observe_cores(model, [IMAGES[:1]], targets, observers)
    assert [observer.count for observer in observers.values()] == [8, 8]


def test_progress_bar(vit, capsys):
    qvit.calibrate(vit, [IMAGES])
    assert "calibrating" in capsys.readouterr().err
