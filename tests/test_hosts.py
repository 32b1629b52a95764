"""A quantized model in everything that its users do with a model: compile, export, copy, cast, extract, share."""

import copy
import pickle
import threading

import pytest
import timm
import torch
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import qvit
from qvit import Scales
from qvit import reference as R
from qvit.errors import UnsupportedModuleError
from qvit.reporting import _backend
from qvit.windows import plan_windows

MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 48, "embed_dim": 48, "depth": 3}),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 56, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)}),
    "swin_v2": (
        "swinv2_tiny_window8_256",
        {"img_size": 56, "window_size": 7, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)},
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _no_grad():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield


def create(name, seed=0, **changes):
    architecture, sizes = MODELS[name]
    torch.manual_seed(seed)
    model = timm.create_model(architecture, **{"num_classes": 5, **sizes, **changes}).eval()
    for key, p in model.named_parameters():
        if key.endswith("qkv.weight"):  # attention of some spread, that counts
            p.normal_(std=1.4 * p.shape[1] ** -0.5)
        elif key.endswith("norm1.weight"):  # zero in new Swins V2, whose branches then add nothing
            p.uniform_(0.5, 1.5)
    return model


def images(name, batch=2, seed=1):
    size = MODELS[name][1]["img_size"]
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def quantized(name, **config):
    return qvit.quantize(create(name), [images(name, 4)], qvit.QuantConfig(**config))


def constants_of(model):
    return {name: b.clone() for name, b in model.named_buffers() if "qvit_" in name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---------------------------------------------------------------- torch.library

OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def operator_calls():
    """Arguments of each operator, with and without what is optional."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 17, 16)
    scales = Scales.from_tensors(q, k, v)
    constants = scales.constants()
    bias = R.exponent_bias(torch.randn(1, 2, 17, 17), constants)
    for addend, dtype in ((None, torch.float16), (bias, torch.int8)):
        yield "attention", (q, k, v, constants, addend, "standard", dtype, "reference", True)
    yield "attention_qkvpacked", (torch.randn(2, 17, 96), 2, constants, "standard", "reference", True)
    rows, pattern, masks = plan_windows(5, 6, (3, 3), (1, 1)).tensors("cpu")
    qkv = [torch.randn(2, 30, 2, 16) for _ in range(3)]
    bias = R.exponent_bias(torch.randn(len(masks), 2, 9, 9), constants)
    for addend in (None, R.pack_window_bias(bias)):
        pad = torch.randn(3, 2, 16)
        yield "window_attention", (*qkv, pad, constants, addend, rows, pattern, "high", torch.float32, "auto", False)
        packed = torch.stack(qkv, 2).reshape(2, 5, 6, -1)
        yield "window_attention_qkvpacked", (packed, 2, pad, constants, addend, rows, pattern, "high", "auto", False)
    q8, k8, v8 = (R.quantize_tensor(x)[0] for x in (q, k, v))
    units = R.paper_constants(torch.tensor(0.01), torch.tensor(0.01), 0.25, text=False)
    for text in (False, True):
        yield "attention_paper", (q8, k8, v8, units, None, text, "reference")


def test_opcheck_of_every_operator():
    qvit.attention  # noqa: B018  registers the operators
    checked = set()
    for name, args in operator_calls():
        operator = getattr(torch.ops.qvit, name).default
        assert set(torch.library.opcheck(operator, args, test_utils=OPCHECKS).values()) == {"SUCCESS"}
        checked.add(f"qvit::{name}")
    registered = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("qvit::")}
    assert checked == registered


# ---------------------------------------------------------------- compilers


def test_the_default_compiler_without_a_break():
    x = images("vit")
    model = qvit.quantize(create("vit", depth=1), [x])
    # Inductor may round float operators otherwise; int8 codes that flip cost a little more than that.
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-2, atol=1e-2)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_one_more_graph_serves_every_batch_size(name):
    model = quantized(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in range(2, 7):
        x = images(name, batch)
        assert torch.equal(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


def test_layers_and_batch_sizes_share_the_graphs_of_a_block():
    model = quantized("vit")
    expected = {batch: model(images("vit", batch)) for batch in range(2, 7)}
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for batch, logits in expected.items():
        assert torch.equal(model(images("vit", batch)), logits)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_export_with_a_free_batch(name):
    model = quantized(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (images(name),), dynamic_shapes=({0: batch},))
    for size in (2, 5):
        x = images(name, size)
        assert torch.equal(program.module()(x), model(x))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(target.startswith("qvit.") for target in targets) and not any("scaled_dot" in t for t in targets)


# ---------------------------------------------------------------- copies and types


@every_model
def test_copies_pickles_and_files_of_whole_models(name, tmp_path):
    model, x = quantized(name), images(name)
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model), read):
        assert torch.equal(twin(x), model(x)) and same(constants_of(twin), constants_of(model))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double_and_back", "to_cpu", "to_bfloat16"])
@every_model
def test_casts_leave_the_constants_alone(name, cast):
    model, x = quantized(name), images(name)
    expected, before = model(x), constants_of(model)
    moves = {
        "half": lambda: model.half(),
        "bfloat16": lambda: model.bfloat16(),
        "double_and_back": lambda: model.double().float(),
        "to_cpu": lambda: model.to("cpu"),
        "to_bfloat16": lambda: model.to(device="cpu", dtype=torch.bfloat16),
    }
    moves[cast]()
    assert same(constants_of(model), before)
    dtype = next(model.parameters()).dtype
    out = model(x.to(dtype))
    assert out.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


@every_model
def test_autocast_and_channels_last(name):
    model, x = quantized(name), images(name)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-2, atol=1e-2)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- edges of a module's input


@pytest.mark.parametrize("arithmetic", ["qvit", "paper", "paper_text"])
@pytest.mark.parametrize("shape", [(0, 9, 48), (2, 0, 48), (2, 1, 48)], ids=str)
def test_empty_batches_and_sequences_pass_a_module(shape, arithmetic):
    attn = timm.layers.Attention(48, 3).eval()
    qvit.quantize(attn, [torch.randn(2, 9, 48)], qvit.QuantConfig(arithmetic))
    x = torch.randn(shape)
    for causal in (False, True):
        assert attn(x, is_causal=causal).shape == shape


def test_an_empty_batch_passes_a_model():
    assert quantized("vit")(images("vit")[:0]).shape == (0, 5)


def test_nan_in_the_mask_of_a_module_masks_that_key():
    attn = timm.layers.Attention(48, 3).eval()
    x = torch.randn(2, 9, 48)
    qvit.quantize(attn, [x])
    keep = torch.rand(9, 9) > 0.3
    for value in (float("nan"), float("inf")):
        mask = torch.zeros(9, 9).masked_fill(~keep, value)
        assert torch.equal(attn(x, attn_mask=mask), attn(x, attn_mask=keep))


# ---------------------------------------------------------------- features, sizes, hooks, threads


@every_model
def test_intermediates_are_those_of_the_quantized_model(name):
    model, x = quantized(name), images(name)
    last, features = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    assert all(torch.isfinite(f).all() for f in features)
    twin = create(name)
    assert not any(torch.equal(a, b) for a, b in zip(features, twin.forward_intermediates(x)[1]))


@every_model
def test_features_only(name):
    float_model = create(name, features_only=True)
    x = images(name)
    expected = float_model(x)
    model = qvit.quantize(float_model, [x])
    assert qvit.report(model).swapped == qvit.report(quantized(name)).swapped
    for found, wanted in zip(model(x), expected, strict=True):
        noise = (found - wanted).double().square().sum()
        assert 15 < 10 * torch.log10(wanted.double().square().sum() / noise) < 80


def test_another_image_size():
    model = quantized("vit")
    model.set_input_size((64, 64))
    x = torch.randn(2, 3, 64, 64)
    reference = qvit.restore(copy.deepcopy(model))
    torch.testing.assert_close(model(x), reference(x), rtol=0.1, atol=0.1)
    assert not torch.equal(model(x), reference(x))


@every_model
def test_hooks_on_every_module_fire_and_change_no_result(name):
    """All that fire on the float model do, but for the parts that the integer core has no use for."""
    x, fired = images(name), []
    for model in (create(name), quantized(name)):
        expected, seen = model(x), set()
        for key, module in model.named_modules():
            module.register_forward_hook(lambda *_, key=key, seen=seen: seen.add(key))
        assert torch.equal(model(x), expected)
        fired.append(seen)
    on_float, on_integers = fired
    assert {key for key, m in model.named_modules() if hasattr(m, "qvit_record")} <= on_integers
    unused = {"attn_drop", "softmax", "cpb_mlp"}
    assert all(unused & set(key.split(".")) for key in on_float - on_integers)


IDLE = [("vit", part) for part in ("q_norm", "k_norm", "norm", "proj_drop")] + [("swin", "proj_drop")]
LISTENERS = {
    "forward": lambda child, hear: setattr(child, "forward", lambda x: hear() or x),
    "hook": lambda child, hear: child.register_forward_hook(lambda *_: hear()),
    "pre_hook": lambda child, hear: child.register_forward_pre_hook(lambda *_: hear()),
    "everywhere": lambda child, hear: register_module_forward_hook(
        lambda module, *_: hear() if module is child else None
    ),
    "everywhere_before": lambda child, hear: register_module_forward_pre_hook(
        lambda module, *_: hear() if module is child else None
    ),
}


@pytest.mark.parametrize("listen", LISTENERS.values(), ids=LISTENERS)
@pytest.mark.parametrize(("name", "part"), IDLE)
def test_a_child_that_does_nothing_is_called_where_someone_listens(name, part, listen):
    model, x, heard = quantized(name), images(name), []
    expected = model(x)
    child = next(module for key, module in model.named_modules() if key.endswith(f"attn.{part}"))
    handle = listen(child, lambda: heard.append(1))  # append gives None, so that nothing is changed
    try:
        assert torch.equal(model(x), expected) and heard
    finally:
        if handle is not None:  # a hook of all modules would be heard in the tests to come
            handle.remove()


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_gradient_behind_the_core_is_heard_by_dropout(name):
    model, heard = quantized(name).requires_grad_(False), []
    attn = next(module for module in model.modules() if hasattr(module, "qvit_record"))
    attn.proj.requires_grad_(True)
    attn.proj_drop.register_full_backward_hook(lambda *_: heard.append(1))
    block = next(module for module in model.modules() if getattr(module, "attn", None) is attn)
    size = (2, 10, 48) if name == "vit" else (2, 14, 14, 16)
    with torch.enable_grad():
        block(torch.randn(size)).sum().backward()
    assert heard and attn.proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_layer_with_other_heads_than_it_was_calibrated_with_is_refused(name):
    model, x = quantized(name), images(name)
    attn = next(module for module in model.modules() if getattr(module, "num_heads", 1) > 1)
    channels = attn.qkv.in_features
    fewer = channels // attn.num_heads * (attn.num_heads - 1)
    attn.qkv, attn.num_heads = torch.nn.Linear(channels, 3 * fewer), attn.num_heads - 1
    attn.proj = torch.nn.Linear(fewer, channels)
    with pytest.raises(qvit.BackendError, match=f"{3 * fewer} channels for .* quantize it again"):
        model(x)
    attn.num_heads += 1
    with pytest.raises(qvit.BackendError, match="quantize it again"):
        model(x)


def test_two_models_in_two_threads():
    """Each thread quantizes a model of its own and runs it, over and over; the results are those of one thread."""

    def work(model, name):
        qvit.quantize(model, [images(name, 4)])
        return [model(images(name, 2, seed)) for seed in range(5)]

    jobs = [(0, "vit"), (1, "swin"), (2, "vit"), (3, "swin")]
    models = {job: create(job[1]) for job in jobs}  # here, for torch's seed is everyone's
    expected = {name: work(create(name), name) for name in ("vit", "swin")}
    results, errors, start = {}, [], threading.Barrier(4)

    def run(index, name):
        try:
            with torch.no_grad():  # the grad mode is a thread's own
                start.wait(30)
                results[index, name] = work(models[index, name], name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 4
    for (_, name), found in results.items():
        assert all(torch.equal(a, b) for a, b in zip(found, expected[name], strict=True))


# ---------------------------------------------------------------- hardware


@pytest.fixture
def fresh_backends(monkeypatch):
    from qvit import ops

    ops.select_backend.cache_clear()
    yield monkeypatch
    ops.select_backend.cache_clear()


def turing(patch):
    patch.setattr(torch.version, "hip", None)
    patch.setattr(torch.cuda, "get_device_capability", lambda index=None: (7, 5))
    patch.setattr(torch.cuda, "get_device_name", lambda index=None: "Turing")


def without_triton(patch):
    import sys

    patch.setitem(sys.modules, "triton", None)


UNSERVED = {
    "turing": ("cuda", turing, r"Turing has compute capability \(7, 5\), the kernels need 8.0"),
    "rocm": ("cuda", lambda patch: patch.setattr(torch.version, "hip", "6.4"), "need an NVIDIA GPU, not cuda or ROCm"),
    "no_triton": ("cuda", without_triton, "no Triton"),
}


@pytest.mark.parametrize("device, change, words", UNSERVED.values(), ids=UNSERVED)
def test_a_gpu_that_the_kernels_cannot_serve_is_refused(device, change, words, fresh_backends):
    change(fresh_backends)
    with pytest.raises(qvit.BackendError, match=f'{words}.*backend="reference"'):
        qvit.ops.select_backend(device)
    assert qvit.ops.select_backend(device, "reference") == "reference"


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_take_the_reference_and_never_triton(device, fresh_backends):
    assert qvit.ops.select_backend(device) == "reference"
    with pytest.raises(qvit.BackendError, match=f"NVIDIA GPU, not {device}"):
        qvit.ops.select_backend(device, "triton")


@pytest.mark.parametrize("change", [turing, without_triton])
def test_the_report_states_what_serves_a_device(change, fresh_backends):
    model = quantized("vit")
    assert {row.backend for row in qvit.report(model).rows} == {"reference"}
    change(fresh_backends)
    assert _backend(torch.device("cuda"), qvit.QuantConfig()) == "none on cuda"
    assert _backend(torch.device("cuda"), qvit.QuantConfig(backend="reference")) == "reference"


def test_without_triton_a_model_runs_on_the_reference(fresh_backends):
    without_triton(fresh_backends)
    model, x = quantized("vit"), images("vit")
    assert torch.isfinite(model(x)).all() and {row.backend for row in qvit.report(model).rows} == {"reference"}
    with pytest.raises(qvit.BackendError, match="no Triton"):
        quantized("vit", backend="triton")


def test_training_is_refused_wherever_the_model_was_cast():
    model = quantized("vit").half().train()
    with pytest.raises(UnsupportedModuleError, match="cannot train"):
        model(images("vit").half())
