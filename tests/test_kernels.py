"""Kernel against reference, to the bit: on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from qvit import Scales, attention
from qvit import reference as R
from qvit.kernels import launch, numerics

CUDA = torch.cuda.is_available()
HOPPER = CUDA and launch._is_hopper(torch.cuda.current_device())
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(not (CUDA or numerics.INTERPRETED), reason="needs a GPU or Triton's interpreter")

# Small enough for the interpreter; a GPU takes the grid of sequence lengths and head dimensions as well.
SHAPES = [(1, 1, 1, 16), (2, 2, 49, 32), (1, 2, 65, 48), (1, 1, 130, 72), (1, 2, 197, 64), (1, 1, 64, 128)]
GRID_N = (1, 16, 49, 50, 64, 65, 100, 128, 144, 196, 197, 198, 257, 320, 321, 384, 577, 1025, 1370, 1792, 1793, 2305)
GRID_D = (16, 20, 32, 48, 64, 72, 80, 88, 96, 104, 128)
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8]


def named(shape):
    return "B{}_H{}_N{}_D{}".format(*shape)


def operands(shape, dtype, seed=0):
    """q, k, v as views of one packed qkv, and scales for them."""
    torch.manual_seed(seed)
    batch, heads, tokens, dim = shape
    qkv = torch.randn(batch, tokens, 3, heads, dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    scales = Scales.from_tensors(q, k, v)
    if dtype == torch.int8:
        packed = torch.stack([R.quantize_tensor(x)[0].transpose(1, 2) for x in (q, k, v)], 2).permute(2, 0, 3, 1, 4)
    else:
        packed = (qkv * 1.1).to(dtype).permute(2, 0, 3, 1, 4)  # beyond the calibrated range: saturates
    return packed.to(DEVICE).unbind(0), scales


def both(operands, scales, **kwargs):
    move = lambda x, device: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
    cpu = {k: move(v, "cpu") for k, v in kwargs.items()}
    device = {k: move(v, DEVICE) for k, v in kwargs.items()}
    expected = attention(*(x.cpu() for x in operands), scales, backend="reference", **cpu)
    return expected, attention(*operands, scales, backend="triton", **device).cpu()


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_kernel_equals_reference(shape, dtype, precision, poisoned):
    qkv, scales = operands(shape, dtype)
    for out_dtype in {dtype, torch.int8, torch.float16}:
        assert torch.equal(*both(qkv, scales, precision=precision, out_dtype=out_dtype))


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("dtype", TYPES[:3] if CUDA else TYPES[:1], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_a_packed_projection_gives_the_bits_of_its_parts(shape, dtype, precision, poisoned):
    """Also one whose channels do not lie side by side, and none."""
    (q, k, v), scales = operands(shape, dtype)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2).flatten(2)
    expected = attention(q, k, v, scales, precision=precision, backend="reference").flatten(2)
    settings = (q.shape[1], scales.constants(DEVICE), precision)
    for backend in ("reference", "triton"):
        run = torch.ops.qvit.attention_qkvpacked
        assert torch.equal(run(packed, *settings, backend, scales.half_exact), expected)
        assert torch.equal(run(packed.repeat(1, 1, 2)[..., : packed.shape[-1]], *settings, backend, False), expected)
        assert torch.equal(run(packed.mT.contiguous().mT, *settings, backend, False), expected)
        assert run(packed[:0], *settings, backend, False).shape == (0, *expected.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", GRID_D, ids="D{}".format)
@pytest.mark.parametrize("precision", ["standard", "high"])
def test_kernel_equals_reference_over_the_grid(head_dim, precision, poisoned):
    for tokens in GRID_N if head_dim in (32, 64) else (1, 50, 197, 321):
        qkv, scales = operands((2, 3, tokens, head_dim), torch.float16)
        for out_dtype in (torch.float16, torch.int8) if tokens in (50, 197, 577) else (torch.float16,):
            assert torch.equal(*both(qkv, scales, precision=precision, out_dtype=out_dtype)), f"N={tokens} {out_dtype}"


def masks(shape):
    batch, heads, tokens, _ = shape
    torch.manual_seed(1)
    bias = torch.randn(batch, heads, tokens, tokens)
    keep = torch.rand(1, 1, tokens, tokens) > 0.3
    empty_row = keep.clone()
    empty_row[..., tokens // 2, :] = False
    swin = torch.zeros(batch, 1, tokens, tokens)
    swin[..., tokens // 3 :] = -100.0
    return {
        "bias": {"bias": bias},
        "stride0_bias": {"bias": bias[:1, :1].expand(batch, heads, -1, -1)},
        "half_bias": {"bias": bias[:1].half()},
        "bool": {"mask": keep},
        "causal": {"mask": torch.ones(tokens, tokens, dtype=torch.bool).tril()},
        "empty_row": {"mask": empty_row},
        "infinite": {"mask": torch.zeros(tokens, tokens).masked_fill(~keep[0, 0], float("-inf"))},
        "lowest": {"mask": torch.zeros(tokens, tokens).masked_fill(~keep[0, 0], torch.finfo(torch.float32).min)},
        "swin": {"bias": bias + swin},
        "bias_and_mask": {"bias": bias, "mask": empty_row},
    }


@pytest.mark.parametrize("precision", ["standard", "high"])
@pytest.mark.parametrize("name", masks((1, 1, 3, 1)))
@pytest.mark.parametrize("shape", SHAPES[1:5] if CUDA else SHAPES[1:3], ids=named)
def test_bias_and_masks_equal_reference(shape, name, precision, poisoned):
    qkv, scales = operands(shape, torch.float16)
    assert torch.equal(*both(qkv, scales, precision=precision, **masks(shape)[name]))
    assert torch.equal(*both(qkv, scales, precision=precision, out_dtype=torch.int8, **masks(shape)[name]))


@pytest.mark.parametrize("windows", [1, 2, 3, 6])
def test_windows_take_their_own_bias(windows):
    shape = (6, 2, 49, 32)
    (q, k, v), scales = operands(shape, torch.float16)
    constants = scales.constants(DEVICE)
    bias = R.exponent_bias(torch.randn(windows, 2, 49, 49, device=DEVICE), constants)
    run = lambda backend, b: torch.ops.qvit.attention(  # noqa: E731
        q, k, v, constants, b, "standard", torch.float16, backend, True
    )
    assert torch.equal(run("triton", bias), run("triton", bias.repeat(6 // windows, 1, 1, 1)))
    assert torch.equal(run("triton", bias), run("reference", bias))


FUSED = [
    {"block_m": 64, "step": 1},
    {"block_m": 64, "step": 2},
    {"block_m": 64, "step": 4, "num_warps": 8, "num_stages": 2},
    {"block_m": 128, "step": 1, "num_warps": 8},
    {"block_m": 32, "step": 1, "num_warps": 2},
]
PACKED = [
    {"block_m": 16, "num_stages": 1},
    {"block_m": 64, "num_warps": 8, "num_stages": 2},
    {"block_m": 128, "num_warps": 8},
    {"block_m": 128, "num_stages": 2},
]
HOPPERS = [{"step": 1}, {"step": 3}]
HOPPERS_LONG = [{"step": 4, "num_warps": 4}, {"step": 1, "num_warps": 8}, {"step": 1, "num_warps": 16}]
HOPPERS_STREAM = [{"num_warps": 4}, {"num_warps": 8}]
KINDS = {"fused": FUSED, "packed": PACKED}
if HOPPER:
    KINDS |= {"hopper": HOPPERS, "hopper_long": HOPPERS_LONG, "hopper_stream": HOPPERS_STREAM}
CONFIGS = [(kind, config) for kind, configs in KINDS.items() for config in configs]


@pytest.mark.parametrize(
    ("kind", "config"), CONFIGS, ids=lambda x: x if isinstance(x, str) else "_".join(map(str, x.values()))
)
@pytest.mark.parametrize("high", [False, True], ids=["standard", "high"])
def test_launch_configuration_changes_nothing(kind, config, high, poisoned):
    (q, k, v), scales = operands((1, 2, 197, 64), torch.float16)
    expected = attention(q.cpu(), k.cpu(), v.cpu(), scales, precision="high" if high else "standard")
    out = torch.empty(1, 197, 2, 64, dtype=torch.float16, device=DEVICE)
    run = launch.KERNELS[kind]
    run(q, k, v, scales.constants(DEVICE), None, out, high=high, out_up=8, half=True, **config)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.gpu
def test_every_row_of_the_launch_table_changes_nothing():
    for row in launch._table():
        if tuple(row["capability"]) != torch.cuda.get_device_capability():
            continue
        tokens = min(row["tokens"][1], row["tokens"][0] + 9)
        (q, k, v), scales = operands((2, 2, tokens, row["head_dim"]), torch.float16)
        out = torch.empty(2, tokens, 2, row["head_dim"], dtype=torch.float16, device=DEVICE)
        run = launch.KERNELS[row["kind"]]
        run(q, k, v, scales.constants(DEVICE), None, out, high=False, out_up=4, half=True, **row["config"])
        assert torch.equal(out.cpu(), attention(q.cpu(), k.cpu(), v.cpu(), scales)), row


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [65, 100, 197, 257], ids="N{}".format)
def test_both_kernels_of_one_launch_agree(tokens, dtype):
    """Odd head dimensions, rows with a stride, every type: the Hopper kernel against the one for all GPUs."""
    for head_dim in (20, 64):
        (q, k, v), scales = operands((3, 2, tokens, head_dim), dtype)
        for high, out_dtype in ((False, torch.int8), (True, torch.bfloat16)):
            out = [torch.full((3, tokens, 2, head_dim), 77, dtype=out_dtype, device=DEVICE) for _ in range(2)]
            up = R.out_shift(tokens, "high" if high else "standard")
            for run, result in zip((launch.hopper_attention, launch.fused_attention), out, strict=True):
                run(q, k, v, scales.constants(DEVICE), None, result, high=high, out_up=up, half=scales.half_exact)
            assert torch.equal(*out)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [128, 129, 197, 300, 384, 577, 640, 1000], ids="N{}".format)
def test_streamed_tiles_agree(tokens, dtype, poisoned):
    """Every number of turns in the last tile, few tiles, odd head dimensions: against the kernel for all GPUs."""
    for head_dim in (36, 64):
        (q, k, v), scales = operands((2, 2, tokens, head_dim), dtype)
        for high, out_dtype in ((False, torch.int8), (True, torch.bfloat16)):
            out = [torch.empty(2, tokens, 2, head_dim, dtype=out_dtype, device=DEVICE) for _ in range(2)]
            up = R.out_shift(tokens, "high" if high else "standard")
            for run, result in zip((launch.hopper_stream_attention, launch.packed_attention), out, strict=True):
                run(q, k, v, scales.constants(DEVICE), None, result, high=high, out_up=up, half=scales.half_exact)
            assert torch.equal(*out)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 24, 33, 41, 49, 56, 57, 64], ids="N{}".format)
def test_a_warp_for_a_short_sequence_agrees(tokens, dtype, poisoned):
    """However many programs share a sequence, against the kernel for all GPUs."""
    for head_dim in (16, 32):
        (q, k, v), scales = operands((3, 2, tokens, head_dim), dtype)
        for high, out_dtype in ((False, torch.int8), (True, torch.bfloat16), (False, torch.float16)):
            up = R.out_shift(tokens, "high" if high else "standard")
            expected, *results = (torch.empty(3, tokens, 2, head_dim, dtype=out_dtype, device=DEVICE) for _ in range(4))
            arguments = {"high": high, "out_up": up, "half": scales.half_exact}
            launch.fused_attention(q, k, v, scales.constants(DEVICE), None, expected, **arguments)
            for step, result in zip((1, 2, 4), results):
                step = min(step, -(-tokens // 16))
                launch.warp_attention(q, k, v, scales.constants(DEVICE), None, result, step=step, **arguments)
                assert torch.equal(result, expected), (step, out_dtype)


@pytest.mark.parametrize("kind", ["fused_attention", "packed_attention"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_both_kernels_take_a_bias_and_both_ways_to_quantize(kind, half):
    shape = (4, 2, 49, 32)
    (q, k, v), scales = operands(shape, torch.float16)
    bias = R.exponent_bias(torch.randn(2, 2, 49, 49), scales.constants())
    for out_dtype in (torch.float16, torch.int8):
        expected = R.attention(q.cpu(), k.cpu(), v.cpu(), scales.constants(), bias, out_dtype=out_dtype)
        out = torch.empty(4, 49, 2, 32, dtype=out_dtype, device=DEVICE)
        up = R.out_shift(49, "standard")
        run = getattr(launch, kind)
        run(q, k, v, scales.constants(DEVICE), bias.to(DEVICE), out, high=False, out_up=up, half=half)
        assert torch.equal(out.cpu(), expected)


def test_a_long_stride_between_tokens_takes_the_kernel_with_wide_offsets(monkeypatch):
    near = torch.empty(1, 1, 4, 16, device="meta")
    far = torch.empty_strided((1, 1, 4, 16), (0, 0, 2**29, 1), device="meta")
    far_channels = torch.empty_strided((1, 1, 4, 16), (0, 0, 1, 2**27), device="meta")
    used = []
    for name in launch.KERNELS:
        monkeypatch.setitem(launch.KERNELS, name, lambda *a, _name=name, **kw: used.append(_name))
    for q in (near, far, far_channels):
        launch.attention(q, near, near, near, None, near, high=False, out_up=0, half=True)
    assert used == ["fused", "packed", "packed"]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded_rows", "packed"])
def test_strides_are_followed(layout):
    (q, k, v), scales = operands((2, 3, 50, 32), torch.float16)
    views = {
        "contiguous": lambda x: x.contiguous(),
        "transposed": lambda x: x.mT.contiguous().mT,
        "padded_rows": lambda x: torch.nn.functional.pad(x, (0, 13))[..., :32],
        "packed": lambda x: x,
    }[layout]
    expected = attention(q.cpu(), k.cpu(), v.cpu(), scales, backend="reference")
    assert torch.equal(expected, attention(views(q), views(k), views(v), scales, backend="triton").cpu())


def test_bad_values_behave_alike():
    (q, k, v), scales = operands((1, 2, 49, 32), torch.float32)
    q[0, 0, 3, 5], k[0, 1, 7, 2], v[0, 0, 1, 1], v[0, 0, 2, 2] = (float(x) for x in ("nan", "inf", "nan", "-inf"))
    assert torch.equal(*both((q, k, v), scales))


@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[4:5], ids=named)
def test_paper_kernel_equals_reference(shape):
    for limit in (0.01, 0.25, 1.0, 4.0, 64.0):
        (q, k, v), _ = operands(shape, torch.float32)
        (q8, q_scale), (k8, k_scale), (v8, _) = (R.quantize_tensor(x * limit) for x in (q, k, v))
        units = R.paper_constants(q_scale, k_scale, shape[3] ** -0.5, text=False)
        bias = torch.randint(-5000, 5000, (1, shape[1], shape[2], shape[2]), dtype=torch.int32, device=DEVICE)
        for addend in (None, bias):
            run = lambda backend: torch.ops.qvit.attention_paper(q8, k8, v8, units, addend, False, backend)  # noqa: B023, E731
            assert torch.equal(run("reference"), run("triton"))


@pytest.mark.gpu
def test_assembly_equals_its_plain_twin():
    """Every distance near an edge and a million others: the two forms of the exponent, each in its own kernel."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, step, f, p_ptr, l_ptr, HIGH: tl.constexpr, TWIN: tl.constexpr):
        o = tl.program_id(0) * 1024 + tl.arange(0, 1024)
        score = 0 - tl.load(x_ptr + o)
        base = tl.zeros_like(score)
        if HIGH:
            p, low = numerics.weights_high(score, base, step, f, TWIN)
            tl.store(l_ptr + o, low)
        else:
            p = numerics.weights_standard(score, base, step, f, TWIN)
        tl.store(p_ptr + o, p)

    for f in (7, 10, 21, 22):
        edges = ((torch.arange(0, 60)[:, None] << f) + torch.arange(-3, 4)).flatten()
        x = torch.cat([edges, torch.randint(0, 60 << f, ((1 << 20) - len(edges) - 1,)), torch.tensor([2**32 - 1])])
        x = x.clamp_min((17 << f) + (1 << (f - 7))) & 0xFFFFFFFF
        x = ((x + 2**31) % 2**32 - 2**31).int().cuda()
        for high in (False, True):
            results = []
            for twin in (False, True):
                p, low = torch.zeros(2, 1 << 20, dtype=torch.int8, device="cuda")
                kernel[(1024,)](x, -1, f, p, low, HIGH=high, TWIN=twin)
                results.append((p, low))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_gpu_and_cpu_quantize_alike(dtype):
    """The quantize step over values near every half: packed q, k and V^T hold what the definition says."""
    scale = Scales.from_tensors(*torch.randn(3, 1, 1, 64, 64))
    x = torch.cat([torch.randn(1, 1, 4096, 64), torch.arange(-2, 2, 2**-16).reshape(1, 1, -1, 64)], 2).to(dtype)
    out = [attention(x.to(d), x.to(d), x.to(d), scale, out_dtype=torch.int8).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*out)


@pytest.mark.gpu
def test_more_windows_than_a_grid_dimension_and_offsets_past_2_31():
    batch = 70_000
    (q, k, v), scales = operands((8, 1, 16, 16), torch.float16)
    big = [x.repeat(batch // 8, 1, 1, 1) for x in (q, k, v)]
    out = attention(*big, scales)
    assert torch.equal(out[:8], out[-8:])
    (q, k, v), scales = operands((1, 2, 64, 64), torch.float16)
    big = [x.expand(200_000, -1, -1, -1).contiguous() for x in (q, k, v)]  # 1.6e9 elements each, 3.3e9 bytes
    out = attention(*big, scales)
    assert torch.equal(out[:1], attention(q, k, v, scales))
    assert (out == out[:1]).all()


@pytest.mark.gpu
def test_graph_capture_replays_on_new_inputs():
    (q, k, v), scales = operands((4, 3, 197, 64), torch.float16)
    constants = scales.constants("cuda")
    static = [x.clone() for x in (q, k, v)]
    run = lambda: torch.ops.qvit.attention(*static, constants, None, "standard", torch.float16, "auto", True)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in (1, 2):
        fresh, _ = operands((4, 3, 197, 64), torch.float16, seed)
        for a, b in zip(static, fresh, strict=True):
            a.copy_(b)
        graph.replay()
        assert torch.equal(out, attention(*fresh, scales))
