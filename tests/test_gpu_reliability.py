"""What only a GPU can show: other devices, casts and moves, capture in a fresh process, streams, and a soak.

QVIT_SOAK_SECONDS sets how long the soak runs; 20 seconds without it.
"""

import os
import random
import subprocess
import sys
import time

import pytest
import timm
import torch

import qvit
from qvit import Scales, attention

pytestmark = pytest.mark.gpu


def build():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).eval()
    for key, p in model.named_parameters():
        if key.endswith("qkv.weight"):
            p.data.mul_(4)
    return model.cuda().half()


def images(batch=4, seed=1, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(batch, 3, 224, 224, device=device, generator=generator).half()


@torch.inference_mode()
def test_to_the_cpu_and_back_loses_nothing():
    model = qvit.quantize(build(), [images()])
    expected = model(images())
    constants = [block.attn.qvit_constants.cpu() for block in model.blocks]
    model.to("cpu")
    assert {row.backend for row in qvit.report(model).rows} == {"reference"}
    assert torch.isfinite(model.float()(images().cpu().float())).all()
    model.half().cuda()
    assert all(torch.equal(a, block.attn.qvit_constants.cpu()) for a, block in zip(constants, model.blocks))
    assert torch.equal(model(images()), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.inference_mode()
def test_another_device_than_the_current_one():
    model = qvit.quantize(build(), [images()])
    expected = model(images())
    assert torch.cuda.current_device() == 0
    assert torch.equal(model.to("cuda:1")(images().to("cuda:1")).cpu(), expected.cpu())
    other = qvit.quantize(qvit.restore(model), [images()])
    assert torch.equal(other(images().to("cuda:1")).cpu(), expected.cpu())


@torch.inference_mode()
def test_max_autotune_without_a_break():
    model = qvit.quantize(build(), [images()])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="max-autotune")
    for seed in (1, 2, 3):  # the later calls replay CUDA graphs
        torch.testing.assert_close(compiled(images(seed=seed)), model(images(seed=seed)), atol=0.03, rtol=0.03)


FRESH = """
import sys, torch
sys.path.append(sys.argv[1])
import test_gpu_reliability as t, qvit
model = t.build()
qvit.load(model, sys.argv[2])
static = t.images()
with torch.inference_mode():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model(static)  # compiles the kernels; nothing of it may be left to the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    for seed in (2, 3):
        static.copy_(t.images(seed=seed))
        graph.replay()
        assert torch.equal(out, model(t.images(seed=seed)))
torch.save(out.cpu(), sys.argv[3])
"""


@torch.inference_mode()
def test_capture_in_a_fresh_process_gives_the_bits_of_this_one(tmp_path):
    model = qvit.quantize(build(), [images()])
    path, out = str(tmp_path / "q.safetensors"), str(tmp_path / "logits.pt")
    qvit.save(model, path)
    subprocess.run([sys.executable, "-c", FRESH, os.path.dirname(__file__), path, out], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(out), model(images(seed=3)).cpu())


@torch.inference_mode()
def test_a_profiled_forward_waits_for_nothing():
    model, x = qvit.quantize(build(), [images()]), images()
    model(x)
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        model(x)
    # The profiler itself waits for the device when it stops.
    waits = {"cudaStreamSynchronize", "cudaMemcpy", "aten::item", "aten::_local_scalar_dense"}
    assert not waits & {event.key for event in profile.key_averages()}


SHORT_AND_LONG = [(4, 3, 49, 32), (2, 6, 197, 64), (1, 2, 577, 64), (1, 1, 1700, 48)]  # a kernel of its own for each


def test_soak():
    """Random types, masks, streams and values in some random shapes, against the reference on the same GPU, to the bit.

    Not more shapes, for each is compiled anew.
    """
    rng, lost, runs = random.Random(0), 0, 0
    shapes = [(rng.randint(1, 8), rng.randint(1, 6), rng.randint(1, 700), rng.randint(1, 128)) for _ in range(12)]
    cases = [(shape, rng.choice([torch.float16, torch.bfloat16, torch.float32])) for shape in shapes + SHORT_AND_LONG]
    streams = [torch.cuda.Stream() for _ in range(3)]
    end = time.monotonic() + float(os.environ.get("QVIT_SOAK_SECONDS", "20"))
    while time.monotonic() < end:
        shape, dtype = rng.choice(cases)
        stream = rng.choice(streams)
        with torch.cuda.stream(stream):
            qkv = torch.randn(3, *shape, device="cuda") * 10 ** rng.uniform(-3, 1)
            scales = Scales.from_tensors(*qkv)
            mask = None
            if rng.random() < 0.5:
                mask = torch.rand(1, 1, shape[2], shape[2], device="cuda") > 0.3
            kwargs = {"mask": mask, "precision": rng.choice(["standard", "high"])}
            found, wanted = (attention(*qkv.to(dtype), scales, backend=b, **kwargs) for b in ("triton", "reference"))
        stream.synchronize()
        runs += 1
        lost += not torch.equal(found, wanted)
    print(f"soak: {runs} runs, {lost} lost")
    assert runs > 0 and lost == 0
