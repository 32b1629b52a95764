"""save and load: the same integers come back, and a file meets only the model and the weights it was made for."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import qvit
from qvit.errors import CheckpointError, UnsupportedModuleError
from qvit.serialization import _checksum

IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def make(architecture="vit_tiny_patch16_224", seed=0, **changes):
    torch.manual_seed(seed)
    if architecture.startswith("vit"):
        changes = {"depth": 2, "embed_dim": 48, **changes}
    else:
        changes = {"depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2), **changes}
    return timm.create_model(architecture, img_size=48, num_classes=5, **changes).eval()


SWIN = "swin_tiny_patch4_window7_224"
CONFIG = qvit.QuantConfig(precision="high", granularity="head", calibration=qvit.CalibrationConfig("mse", batches=2))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "vit.qvit.safetensors"
    qvit.save(qvit.quantize(make(), [IMAGES], CONFIG), path)
    return path


def rewrite(path, change_document=None, change_tensors=None):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["qvit"])
    tensors = load_file(path)
    document = change_document(document) if change_document else document
    tensors = change_tensors(tensors) if change_tensors else tensors
    text = json.dumps(document)
    save_file(tensors, path, metadata={"qvit": text, "sha256": _checksum(text, tensors)})


@pytest.mark.parametrize("architecture", ["vit_tiny_patch16_224", SWIN])
@pytest.mark.parametrize("arithmetic", ["qvit", "paper"])
@torch.no_grad()
def test_round_trip(tmp_path, architecture, arithmetic):
    path = tmp_path / "q.safetensors"
    model = make(architecture)
    config = qvit.QuantConfig(arithmetic=arithmetic, exclude=["*.0.*.1.attn"] if architecture == SWIN else [])
    qvit.quantize(model, [IMAGES], config)
    qvit.save(model, path)
    twin = make(architecture)
    assert qvit.load(twin, path) is twin
    assert torch.equal(twin(IMAGES), model(IMAGES))
    assert qvit.report(twin).to_dict() == qvit.report(model).to_dict()
    buffers = dict(twin.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers() if value is not None)
    assert {site.qvit_record.config for site in twin.modules() if hasattr(site, "qvit_record")} == {config}
    qvit.restore(twin)
    assert torch.equal(twin(IMAGES), make(architecture)(IMAGES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saved_half", [True, False])
@torch.no_grad()
def test_half_precision_copies_know_each_other(tmp_path, dtype, saved_half):
    path = tmp_path / "q.safetensors"
    model, twin = make().to(dtype), make()
    if not saved_half:
        model, twin = twin, model
    qvit.save(qvit.quantize(model, [IMAGES]), path)
    qvit.load(twin, path)
    for a, b in zip(model.blocks, twin.blocks):
        assert torch.equal(a.attn.qvit_constants, b.attn.qvit_constants)


def test_save_of_a_float_model(tmp_path):
    with pytest.raises(CheckpointError, match="quantize"):
        qvit.save(make(), tmp_path / "q.safetensors")
    assert not list(tmp_path.iterdir())


def test_save_where_nothing_can_be_written(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        qvit.save(qvit.quantize(make(), [IMAGES]), tmp_path / "no" / "folder.safetensors")


@torch.no_grad()
def test_a_compiled_model_is_saved_by_its_own_names(tmp_path):
    model = qvit.quantize(make(), [IMAGES])
    qvit.save(torch.compile(model, backend="eager"), tmp_path / "q")
    assert torch.equal(
        qvit.load(make(), tmp_path / "q").blocks[0].attn.qvit_constants, model.blocks[0].attn.qvit_constants
    )


def assert_not_saved(model, path, words):
    with pytest.raises(CheckpointError, match=words):
        qvit.save(model, path)
    assert not path.exists()


def test_save_of_several_configurations(tmp_path):
    """A file has one configuration; before, the others' layers came back with the first one's."""
    model = make()
    qvit.quantize(model.blocks[0], [torch.randn(1, 10, 48)], qvit.QuantConfig(precision="high"))
    qvit.quantize(model.blocks[1], [torch.randn(1, 10, 48)])
    assert_not_saved(
        model, tmp_path / "q", "'blocks.1.attn' was quantized with another configuration than 'blocks.0.attn'"
    )


def test_save_of_a_model_that_is_float_in_part(tmp_path):
    model = qvit.quantize(make(), [IMAGES])
    qvit.restore(model.blocks[1])
    assert_not_saved(model, tmp_path / "q", "'blocks.1.attn' is float.*QuantConfig.exclude")
    excluded = qvit.quantize(make(), [IMAGES], qvit.QuantConfig(exclude=("blocks.1.*",)))
    qvit.save(excluded, tmp_path / "q")
    qvit.load(make(), tmp_path / "q")


@pytest.mark.parametrize("architecture", ["vit_tiny_patch16_224", SWIN])
def test_save_of_weights_that_were_not_quantized(tmp_path, architecture):
    model = qvit.quantize(make(architecture), [IMAGES])
    qvit.save(model.half().float(), tmp_path / "rounded")  # the weights that were quantized, all the same
    model.load_state_dict(make(architecture, seed=1).state_dict())
    assert_not_saved(model, tmp_path / "q", "weights of layer .* have changed since it was quantized")


def assert_refused(model, path, words, error=CheckpointError):
    kinds = [type(m) for m in model.modules()]
    names = [sorted(vars(m)) for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(error, match=words):
        qvit.load(model, path)
    assert [type(m) for m in model.modules()] == kinds
    assert [sorted(vars(m)) for m in model.modules()] == names
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not [n for n, _ in model.named_buffers() if "qvit" in n]


@pytest.mark.parametrize(
    "other, words",
    [
        ({"depth": 3}, "'blocks.2.attn'"),
        ({"depth": 1}, "'blocks.1.attn'"),
        ({"num_heads": 6}, "heads"),
        ({"architecture": SWIN}, "layers.0"),
        ({"seed": 1}, "other weights"),
    ],
)
def test_another_model(saved, other, words):
    assert_refused(make(**other), saved, words)


def test_excluded_layer_that_the_model_has_not(tmp_path):
    path = tmp_path / "q.safetensors"
    qvit.save(qvit.quantize(make(), [IMAGES], qvit.QuantConfig(exclude=("blocks.1.*",))), path)
    assert_refused(make(depth=1), path, "blocks.1")


@torch.no_grad()
def test_one_changed_weight(saved):
    model = make()
    model.blocks[1].attn.proj.weight[3, 4] += 0.01
    assert_refused(model, saved, "other weights")


def test_another_scale(saved):
    model = make()
    for block in model.blocks:
        block.attn.fused_attn, block.attn.scale = False, 0.5
    assert_refused(model, saved, "softmax_scale")


@pytest.mark.parametrize("keep", [0, 4, 100, 1000, -1])
def test_truncated_file(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    assert_refused(make(), saved, "cannot read")


def test_missing_file(tmp_path):
    assert_refused(make(), tmp_path / "nothing.safetensors", "nothing.safetensors")


def test_pickles_are_not_opened(tmp_path):
    path = tmp_path / "evil.safetensors"
    torch.save({"qvit": 1}, path)
    assert_refused(make(), path, "cannot read")


def test_foreign_safetensors(tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    assert_refused(make(), path, "not one saved by qvit")


def without(key):
    return lambda d: {k: v for k, v in d.items() if k != key}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: {**d, "format_version": 99}, "99"),
        (without("config"), "damaged.*config"),
        (without("layers"), "damaged.*layers"),
        (without("fingerprint"), "damaged.*fingerprint"),
        (without("sqnr_db"), "damaged.*sqnr_db"),
        (lambda d: {**d, "fingerprint": {}}, "other weights"),
        (lambda d: {**d, "fingerprint": 3}, "damaged"),
        (lambda d: {**d, "sqnr_db": None}, "damaged"),
        (lambda d: {**d, "layers": {}}, "does not fit"),
        (lambda d: {**d, "layers": {"x": {}}}, "damaged"),
        (lambda d: {**d, "config": {"precision": "low"}}, "damaged.*precision"),
        (lambda d: [d], "not one saved by qvit"),
    ],
)
def test_damaged_metadata(saved, change, words):
    rewrite(saved, change_document=change)
    assert_refused(make(), saved, words)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.float(),
        lambda t: t[:, :-1].contiguous(),
        lambda t: t[:2].contiguous(),
        lambda t: torch.zeros_like(t),
        lambda t: t[0].contiguous(),
    ],
    ids=["dtype", "width", "heads", "zeros", "rank"],
)
def test_damaged_constants(saved, change):
    rewrite(saved, change_tensors=lambda tensors: {k: change(v) for k, v in tensors.items()})
    assert_refused(make(), saved, "damaged")


def test_missing_constants(saved):
    rewrite(saved, change_tensors=lambda tensors: dict(list(tensors.items())[:1]))
    assert_refused(make(), saved, "damaged")


def test_model_in_the_wrong_state(saved):
    assert_refused(make().train(), saved, "training", UnsupportedModuleError)
    model = qvit.load(make(), saved)
    with pytest.raises(UnsupportedModuleError, match="already quantized"):
        qvit.load(model, saved)


# ---------------------------------------------------------------- hostile and damaged files


@torch.no_grad()
def test_weights_outside_of_attention_count_too(saved):
    model = make()
    model.blocks[0].mlp.fc1.weight[3, 4] += 0.01  # what the next attention sees has other ranges
    assert_refused(model, saved, "other weights")


@pytest.fixture(scope="module")
def swapped_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("flips") / "vit.qvit.safetensors"
    qvit.save(qvit.quantize(make(), [IMAGES]), path)
    return path


@pytest.fixture(scope="module")
def untouched():
    return make()


def refuses(model, path):
    """True where a file is refused by qvit's own error and the model keeps its classes and buffers."""
    before = [(type(m), sorted(vars(m)), list(m._buffers)) for m in model.modules()]
    with pytest.raises(CheckpointError):
        qvit.load(model, path)
    return [(type(m), sorted(vars(m)), list(m._buffers)) for m in model.modules()] == before


def header_bytes(content):
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("part", ["length", "header", "constants"])
def test_every_kind_of_bit_flip_is_refused(part, swapped_file, untouched, tmp_path):
    content = swapped_file.read_bytes()
    spans = {"length": (0, 8), "header": (8, header_bytes(content)), "constants": (header_bytes(content), len(content))}
    low, high = spans[part]
    path = tmp_path / "flipped.safetensors"

    @settings(max_examples=64 if part == "length" else 600, deadline=None, derandomize=True, database=None)
    @given(st.integers(8 * low, 8 * high - 1))
    def check(bit):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert refuses(untouched, path)

    check()
    path.write_bytes(content)
    qvit.restore(qvit.load(untouched, path))  # the control: unchanged it loads


def test_every_kind_of_damage_is_refused(swapped_file, untouched, tmp_path):
    content = swapped_file.read_bytes()
    path = tmp_path / "damaged.safetensors"
    spans = st.tuples(st.integers(0, len(content) - 1), st.integers(1, 4096)).map(lambda s: slice(s[0], s[0] + s[1]))

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(["cut", "drop", "zero", "noise", "repeat"]), spans, st.binary(min_size=1, max_size=64))
    def check(kind, span, noise):
        before, middle, after = content[: span.start], content[span], content[span.stop :]
        middle = {"cut": b"", "drop": b"", "zero": bytes(len(middle)), "noise": noise, "repeat": 2 * middle}[kind]
        damaged = before + middle + (b"" if kind == "cut" else after)
        path.write_bytes(damaged)
        assert damaged == content or refuses(untouched, path)

    check()


def test_a_loaded_file_is_never_unpickled(tmp_path, untouched):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    path = tmp_path / "bomb.safetensors"
    for write in (lambda: path.write_bytes(pickle.dumps(Bomb())), lambda: torch.save({"qvit": Bomb()}, path)):
        write()
        assert refuses(untouched, path)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))  # the control
    assert (tmp_path / "exploded").exists()


def test_metadata_nested_beyond_reason(saved, untouched):
    text = "[" * 100_000 + "]" * 100_000
    tensors = load_file(saved)
    save_file(tensors, saved, metadata={"qvit": text, "sha256": _checksum(text, tensors)})
    assert refuses(untouched, saved)


def test_a_newer_format_says_so_before_anything_else(saved, untouched):
    rewrite(saved, change_document=lambda d: {"format_version": 2, "all": "different"})
    assert_refused(untouched, saved, "format version 2, this qvit reads 1; use the qvit that wrote it")


NEW_PROCESS = """
import sys, timm, torch, qvit
images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
for name, architecture, sizes in eval(sys.argv[1]):
    torch.manual_seed(0)
    model = timm.create_model(architecture, img_size=48, num_classes=5, **sizes).eval()
    qvit.load(model, f"{name}.safetensors")
    with torch.inference_mode():
        torch.save(model(images), f"{name}.pt")
"""


def test_a_new_process_gives_the_same_logits_to_the_bit(tmp_path):
    swin = {"depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2)}
    models = [("vit", "vit_tiny_patch16_224", {"depth": 2, "embed_dim": 48}), ("swin", SWIN, swin)]
    expected = {}
    for name, architecture, sizes in models:
        model = qvit.quantize(make(architecture, **sizes), [IMAGES])
        qvit.save(model, tmp_path / f"{name}.safetensors")
        with torch.inference_mode():
            expected[name] = model(IMAGES)
    subprocess.run([sys.executable, "-c", NEW_PROCESS, repr(models)], check=True, cwd=tmp_path)
    for name, logits in expected.items():
        assert torch.equal(torch.load(tmp_path / f"{name}.pt"), logits)
