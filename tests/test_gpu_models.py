"""Whole models on a GPU: the swap in half precision, fullgraph compilation, graph capture, no wait for the device."""

import pytest
import timm
import torch

import qvit

pytestmark = pytest.mark.gpu

SMALL_SWIN = {"window_size": 7, "depths": (2, 2), "num_heads": (3, 6), "num_classes": 10}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2, "num_classes": 10}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {"depth": 2, "num_classes": 10}),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (2, 2), "num_heads": (3, 6), "num_classes": 10}),
    "swin_v2": ("swinv2_tiny_window8_256", {"img_size": 224, **SMALL_SWIN}),
    "swin_v2_cr": ("swinv2_cr_tiny_224", SMALL_SWIN),
}


def build(name, dtype=torch.float16):
    torch.manual_seed(0)
    architecture, kwargs = MODELS[name]
    model = timm.create_model(architecture, **kwargs).eval().cuda().to(dtype)
    # Attention must reach the logits of a random model.
    for key, parameter in model.named_parameters():
        if "qkv.weight" in key:
            parameter.data.mul_(4)
        elif key.endswith("norm1.weight") and not parameter.any():  # a new Swin V2 adds nothing to its input
            parameter.data.fill_(1)
    return model


def images(batch, seed=1):
    return torch.randn(batch, 3, 224, 224, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def attention_outputs(model, x):
    seen = []
    hooks = [m.register_forward_hook(lambda _m, _a, out: seen.append(out)) for n, m in model.named_modules()
             if n.endswith(".attn")]  # fmt: skip
    with torch.inference_mode():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("arithmetic", ["qvit", "paper"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_swapped_model_is_near_float_and_comes_back(name, dtype, arithmetic):
    model, x = build(name, dtype), images(4).to(dtype)
    expected = attention_outputs(model, x)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    qvit.quantize(model, [x], qvit.QuantConfig(arithmetic=arithmetic, precision="high"))
    assert all(row.backend == "triton" for row in qvit.report(model).rows if row.status == "swapped")
    got = attention_outputs(model, x)
    floor = 10 if arithmetic == "paper" else 24  # later layers see the noise of the earlier ones
    for a, b in zip(expected, got, strict=True):
        assert 10 * torch.log10(a.double().square().sum() / (a.double() - b.double()).square().sum()) > floor
        if arithmetic == "qvit":  # a wrong score scale must not pass
            assert not torch.equal(a, b)
    qvit.restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(expected, attention_outputs(model, x), strict=True))


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2", "swin_v2_cr"])
def test_fullgraph_compilation_equals_eager(name):
    model = qvit.quantize(build(name), [images(4).half()])
    with torch.inference_mode():
        for backend, exact in (("aot_eager", True), ("inductor", False)):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            for batch in (2, 4):
                x = images(batch).half()
                a, b = model(x), compiled(x)
                # Inductor keeps float32 between fused float operators, so only its attention is the same to the bit.
                assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2", "swin_v2_cr"])
@pytest.mark.parametrize("arithmetic", ["qvit", "paper"])
def test_graph_capture_replays_and_never_waits(name, arithmetic):
    model = qvit.quantize(build(name), [images(4).half()], qvit.QuantConfig(arithmetic=arithmetic))
    static = images(4).half()
    with torch.inference_mode():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
        for seed in (2, 3):
            static.copy_(images(4, seed))
            graph.replay()
            assert torch.equal(out, model(static.clone()))
