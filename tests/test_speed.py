"""skip_slower: how the recorded times are looked up, what a swapped module computes by them, and what is reported.

Times here are made up, and the CPU stands in for a GPU that has recorded ones.
"""

import configparser
import copy
import inspect
import json
import pickle
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.swin_transformer import WindowAttention
from torch._dynamo.testing import CompileCounterWithBackend

import qvit
from qvit import speed
from qvit.speed import SpeedTable, TimedShape

CAPABILITY = (9, 0)
DIM, HEADS, TOKENS = 48, 3, 20
HEAD_DIM = DIM // HEADS
BATCH = 4


def timed(
    batch, integer_us, float_us, *, heads=HEADS, tokens=TOKENS, head_dim=HEAD_DIM, bias=False, precision="standard"
):
    return TimedShape(tokens, head_dim, heads, batch, bias, precision, integer_us, float_us)


def use_table(monkeypatch, *rows):
    table = SpeedTable(CAPABILITY, rows)
    monkeypatch.setattr(speed, "load_table", lambda: table)


@pytest.fixture
def recorded(monkeypatch):
    """Float is faster up to a batch of 4, integers from 16 on; with a bias likewise, in other microseconds."""
    rows = [timed(4, 20.0, 10.0), timed(16, 30.0, 40.0)]
    rows += [timed(row.batch, row.integer_us + 1, row.float_us + 1, bias=True) for row in rows]
    use_table(monkeypatch, *rows)
    monkeypatch.setattr(speed, "capability_of", lambda device: CAPABILITY)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# The table.


def test_the_table_of_the_package_is_valid():
    document = json.loads(speed.PATH.read_text(encoding="utf-8"))
    assert set(document) == {"source", "gpu", "capability", "versions", "rows"}
    assert document["gpu"] == "NVIDIA H200" and document["capability"] == [9, 0]
    assert not document["rows"] or (document["source"].endswith(".csv") and document["versions"])
    table = speed.load_table()
    assert table is speed.load_table()
    for row, values in zip(table.rows, document["rows"], strict=True):
        assert set(values) == set(TimedShape._fields)
        assert all(type(x) is int and x > 0 for x in (row.tokens, row.head_dim, row.heads, row.batch))
        assert type(row.bias) is bool and row.precision in ("standard", "high")
        assert row.integer_us > 0 and row.float_us > 0
    assert len({row[:6] for row in table.rows}) == len(table.rows)


def test_the_table_is_packaged():
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).resolve().parents[1] / "setup.cfg")
    assert speed.PATH.name in parser["options.package_data"]["qvit"].split()


def look_up(batch=4, **changes):
    asked = {"heads": HEADS, "tokens": TOKENS, "head_dim": HEAD_DIM, "bias": False, "precision": "standard"}
    return speed.recorded_times(**{"capability": CAPABILITY, "batch": batch, **asked, **changes})


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, True),
        ({"capability": (8, 0)}, False),
        ({"capability": (9, 1)}, False),
        ({"capability": None}, False),
        ({"precision": "high"}, False),
        ({"head_dim": 32}, False),
        ({"bias": True}, False),
        ({"tokens": 22}, True),
        ({"tokens": 23}, False),
        ({"tokens": 19}, True),
        ({"tokens": 18}, False),
    ],
    ids=lambda x: None if isinstance(x, bool) else "-".join(f"{k}={v}" for k, v in x.items()) or "the row itself",
)
def test_what_has_to_match(monkeypatch, changes, found):
    use_table(monkeypatch, timed(4, 20.0, 10.0))
    assert look_up(**changes) == ((20.0, 10.0) if found else None)


@pytest.mark.parametrize(
    "tokens, expected",
    [(197, 1.0), (199, 1.0), (200, 1.0), (201, 2.0), (203, 2.0), (215, 2.0)],
    ids=["exact", "nearer to the smaller", "tie", "nearer to the larger", "exact larger", "above both"],
)
def test_the_nearest_recorded_tokens_count(monkeypatch, tokens, expected):
    use_table(monkeypatch, timed(4, 2.0, 9.0, tokens=203), timed(4, 1.0, 9.0, tokens=197))
    assert look_up(tokens=tokens) == (expected, 9.0)


def test_the_nearest_tokens_decide_before_the_size(monkeypatch):
    use_table(monkeypatch, timed(4, 1.0, 1.0, tokens=21), timed(400, 2.0, 2.0, tokens=20))
    assert look_up(tokens=20) is None


@pytest.mark.parametrize(
    "batch, expected",
    [
        (8, (20.0, 10.0)),
        (128, (60.0, 90.0)),
        (16, (30.0, 30.0)),
        (64, (50.0, 70.0)),
        (17, None),
        (63, None),
        (4, (20.0, 10.0)),
        (3, None),
        (256, (120.0, 180.0)),
        (192, (90.0, 135.0)),
        (257, None),
        (0, None),
    ],
    ids=[
        "recorded",
        "recorded, the largest",
        "between, twice the lower",
        "between, half the upper",
        "between, above twice the lower",
        "between, below half the upper",
        "half the smallest: as it is",
        "below half the smallest",
        "twice the largest: in proportion",
        "beyond the largest: in proportion",
        "above twice the largest",
        "no images",
    ],
)
def test_sizes(monkeypatch, batch, expected):
    use_table(monkeypatch, timed(128, 60.0, 90.0), timed(8, 20.0, 10.0))
    assert look_up(batch) == (None if expected is None else pytest.approx(expected))


def test_a_size_is_batch_times_heads(monkeypatch):
    use_table(monkeypatch, timed(4, 20.0, 10.0, heads=6))
    assert look_up(8, heads=3) == (20.0, 10.0)
    assert look_up(4, heads=1) is None


def test_of_two_shapes_of_one_size_the_one_with_as_many_heads_counts(monkeypatch):
    use_table(monkeypatch, *(timed(24 // heads, float(heads), 1.0, heads=heads) for heads in (3, 6, 12)))
    assert [look_up(24 // heads, heads=heads) for heads in (3, 6, 12)] == [(3.0, 1.0), (6.0, 1.0), (12.0, 1.0)]
    assert look_up(24, heads=1) == (12.0, 1.0)


def test_only_an_nvidia_gpu_has_a_capability():
    assert speed.capability_of(torch.device("cpu")) is None
    assert speed.capability_of(torch.device("meta")) is None


def test_an_empty_table_has_times_of_no_device(monkeypatch):
    monkeypatch.setattr(speed, "capability_of", lambda device: CAPABILITY)
    use_table(monkeypatch)
    assert not speed.is_recorded(torch.device("cuda"))
    use_table(monkeypatch, timed(4, 20.0, 10.0))
    assert speed.is_recorded(torch.device("cuda"))
    monkeypatch.setattr(speed, "capability_of", lambda device: (8, 9))
    assert not speed.is_recorded(torch.device("cuda"))


# The modules.


def spread(attn):
    """A float16 module whose scores have some spread, and whose float attention is PyTorch's."""
    attn.fused_attn = True
    attn.qkv.weight.normal_(std=1.4 * DIM**-0.5)
    if hasattr(attn, "relative_position_bias_table"):
        attn.relative_position_bias_table.normal_()
    return attn.eval().half()


def vit_attention():
    return spread(Attention(DIM, HEADS, qkv_bias=True))


def swin_attention():
    return spread(WindowAttention(DIM, HEADS, window_size=(4, 5)))


def inputs(batch):
    return torch.randn(batch, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).half()


def window_mask(windows=2):
    generator = torch.Generator().manual_seed(2)
    return torch.where(torch.rand(windows, TOKENS, TOKENS, generator=generator) > 0.4, 0.0, -100.0).half()


def twins(attn, **config):
    """The module quantized with skip_slower, and without."""
    x = inputs(BATCH)
    return [
        qvit.quantize(copy.deepcopy(attn), [x], qvit.QuantConfig(skip_slower=skip, **config)) for skip in (True, False)
    ]


CALLS = {
    "vit": (vit_attention, {}, {}),
    "vit, bool mask": (vit_attention, {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()}, {}),
    "vit, float mask": (vit_attention, {"attn_mask": window_mask(1)[:, None]}, {}),
    "vit, a mask for each image": (vit_attention, {"attn_mask": window_mask(BATCH)[:, None]}, {}),
    "vit, causal": (vit_attention, {"is_causal": True}, {"atol": 2e-3, "rtol": 1e-3}),
    "swin": (swin_attention, {}, {}),
    "swin, shifted": (swin_attention, {"mask": window_mask()}, {"atol": 2e-3, "rtol": 1e-3}),
}


@pytest.mark.parametrize("make, arguments, tolerance", CALLS.values(), ids=CALLS)
def test_float_where_float_is_faster(recorded, make, arguments, tolerance):
    attn = make()
    if missing := arguments.keys() - inspect.signature(type(attn).forward).parameters:
        pytest.skip(f"this timm's {type(attn).__name__} has no {', '.join(missing)}")
    skipping, integers = twins(attn)
    x = inputs(BATCH)
    expected = attn(x, **arguments)
    torch.testing.assert_close(skipping(x, **arguments), expected, **(tolerance or {"atol": 0, "rtol": 0}))
    assert not torch.allclose(integers(x, **arguments), expected, atol=2e-3, rtol=1e-3)
    biased = bool(arguments) or make is swin_attention
    row = qvit.report(skipping).rows[0]
    assert (row.integer_us, row.float_us, row.attention) == (20.0 + biased, 10.0 + biased, "float")


@pytest.mark.parametrize("batch", [16, 32, 64], ids=["integers are faster", "beyond the largest", "not recorded"])
@pytest.mark.parametrize("make, arguments", [c[:2] for n, c in CALLS.items() if "each image" not in n])
def test_integers_elsewhere(recorded, make, arguments, batch):
    skipping, integers = twins(make())
    x = inputs(batch)
    assert torch.equal(skipping(x, **arguments), integers(x, **arguments))
    row = qvit.report(skipping).rows[0]
    if batch == 64:
        assert (row.integer_us, row.attention) == (None, "integers: no times recorded for this shape or type")
    else:
        assert row.integer_us < row.float_us and row.attention == "integers"


def test_the_softmax_scale_is_the_modules(recorded):
    attn = vit_attention()
    attn.scale, attn.fused_attn = 0.5 * attn.scale, False
    skipping, _ = twins(attn)
    torch.testing.assert_close(skipping(inputs(BATCH)), attn(inputs(BATCH)), atol=2e-3, rtol=1e-3)


def test_equal_times_are_not_slower(recorded, monkeypatch):
    use_table(monkeypatch, timed(BATCH, 10.0, 10.0))
    skipping, integers = twins(vit_attention())
    assert torch.equal(skipping(inputs(BATCH)), integers(inputs(BATCH)))
    assert qvit.report(skipping).rows[0].attention == "integers"


def test_times_are_of_float16_alone(recorded):
    attn = vit_attention().float()
    skipping, integers = (
        qvit.quantize(copy.deepcopy(attn), [inputs(BATCH).float()], qvit.QuantConfig(skip_slower=skip))
        for skip in (True, False)
    )
    x = inputs(BATCH).float()
    assert torch.equal(skipping(x), integers(x))
    assert qvit.report(skipping).rows[0].attention == "integers: no times recorded for this shape or type"


def test_no_gradient_in_either(recorded):
    skipping, _ = twins(vit_attention())
    skipping.requires_grad_(False).proj.requires_grad_(True)  # weights before the core are refused in either
    with torch.enable_grad():
        skipping(inputs(BATCH)).float().sum().backward()
    assert qvit.report(skipping).rows[0].attention == "float"
    assert skipping.qkv.weight.grad is None and skipping.proj.weight.grad is not None


def test_a_cpu_runs_integers():
    skipping, integers = twins(vit_attention())
    assert qvit.report(skipping).rows[0].attention == "integers: no times recorded for cpu"
    assert torch.equal(skipping(inputs(BATCH)), integers(inputs(BATCH)))
    assert qvit.report(skipping).rows[0].attention == "integers: no times recorded for cpu"


@pytest.mark.parametrize("make", [vit_attention, swin_attention])
def test_without_the_switch_nothing_is_looked_up(recorded, monkeypatch, make):
    _, integers = twins(make())

    def fail(*_):
        raise AssertionError("the table was asked")

    for name in ("load_table", "capability_of", "recorded_times", "times_on", "is_recorded"):
        monkeypatch.setattr(speed, name, fail)
    integers(inputs(BATCH))
    row = qvit.report(integers).rows[0]
    assert (row.integer_us, row.float_us, row.attention) == (None, None, "")
    assert "float_us" not in str(qvit.report(integers)) and integers.qvit_choice is None
    with pytest.raises(AssertionError, match="asked"):
        twins(make())[0](inputs(BATCH))


def test_report(recorded):
    model = torch.nn.Sequential(vit_attention(), vit_attention()).eval()
    qvit.quantize(model, [inputs(BATCH)], qvit.QuantConfig(skip_slower=True, exclude=("1",)))
    assert [row.attention for row in qvit.report(model).rows] == ["decided at each call", ""]
    model(inputs(BATCH))
    lines = str(qvit.report(model)).splitlines()
    assert lines[0] == (
        "1 of 2 attention modules run in integers; by skip_slower, 1 of these ran in float at the last forward"
    )
    for column, text in (("integer_us", "20.0 "), ("float_us", "10.0 "), ("attention", "float")):
        assert lines[3][lines[1].index(column) :].startswith(text)
    row = qvit.report(model).to_dict()["rows"][0]
    assert (row["integer_us"], row["float_us"], row["attention"]) == (20.0, 10.0, "float")
    model(inputs(16))
    assert str(qvit.report(model)).splitlines()[0] == "1 of 2 attention modules run in integers"
    assert qvit.report(model).rows[0].attention == "integers"


def test_copies_pickles_checkpoints_and_the_way_back(recorded, tmp_path):
    attn = vit_attention()
    skipping, _ = twins(attn)
    x = inputs(BATCH)
    skipping(x)
    for twin in (copy.deepcopy(skipping), pickle.loads(pickle.dumps(skipping))):
        assert qvit.report(twin).to_dict() == qvit.report(skipping).to_dict()
        assert torch.equal(twin(x), attn(x))
    qvit.save(skipping, tmp_path / "a.qvit.safetensors")
    loaded = qvit.load(copy.deepcopy(attn), tmp_path / "a.qvit.safetensors")
    assert qvit.report(loaded).rows[0].attention == "decided at each call"
    assert torch.equal(loaded(x), attn(x))
    assert sorted(vars(qvit.restore(skipping))) == sorted(vars(attn))


def test_a_calibration_without_the_switch_serves_a_config_with_it(recorded):
    attn, x = vit_attention(), inputs(BATCH)
    calibration = qvit.calibrate(attn, [x])
    skipping = qvit.quantize(copy.deepcopy(attn), calibration, qvit.QuantConfig(skip_slower=True))
    assert torch.equal(skipping(x), attn(x))


# torch.compile.


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("make", [vit_attention, swin_attention])
def test_compiles_without_a_graph_break(recorded, make, dynamic):
    skipping, _ = twins(make())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(skipping, backend=counter, fullgraph=True, dynamic=dynamic)
    biased = make is swin_attention
    frames = []
    for batch, expected in ((4, "float"), (16, "integers"), (4, "float"), (16, "integers")):
        x = inputs(batch)
        result = compiled(x)
        row = qvit.report(skipping).rows[0]
        assert (row.attention, row.float_us) == (expected, (10.0 if batch == 4 else 40.0) + biased)
        torch.testing.assert_close(result, skipping(x), atol=2e-3, rtol=1e-3)
        frames.append(counter.frame_count)
    assert frames[0] < frames[1] == frames[2] == frames[3]


def traced_operators(module, batch):
    """Names of the calls in the graph that dynamo traces."""
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(inputs(batch))
    return names


@pytest.mark.parametrize("make", [vit_attention, swin_attention])
def test_the_choice_leaves_no_trace_in_the_graph(recorded, make):
    skipping, integers = twins(make())
    assert traced_operators(skipping, 16) == traced_operators(integers, 16) == traced_operators(integers, BATCH)
    in_float, in_integers = traced_operators(skipping, BATCH), traced_operators(integers, BATCH)
    assert any("scaled_dot_product_attention" in name for name in in_float)
    assert any("qvit" in name for name in in_integers) and not any("qvit.attention" in name for name in in_float)


def test_compiled_blocks_share_a_graph(recorded, monkeypatch):
    model = (
        timm.create_model("vit_tiny_patch16_224", img_size=48, embed_dim=DIM, num_heads=HEADS, depth=6).eval().half()
    )
    x = torch.randn(BATCH, 3, 48, 48).half()
    use_table(monkeypatch, timed(BATCH, 20.0, 10.0, tokens=10))
    expected = model(x)
    qvit.quantize(model, [x], qvit.QuantConfig(skip_slower=True))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=counter, fullgraph=True)
    torch.testing.assert_close(model(x), expected, atol=5e-3, rtol=1e-2)
    assert counter.frame_count <= 2
    assert {module.qvit_choice for module in model.modules() if hasattr(module, "qvit_choice")} == {
        ((20.0, 10.0), True)
    }


# On a GPU, with a table that prefers float for everything that it has.


@pytest.mark.gpu
@pytest.mark.parametrize("make", [vit_attention, swin_attention])
def test_float_inside_a_cuda_graph(monkeypatch, make):
    capability = torch.cuda.get_device_capability()
    table = SpeedTable(capability, tuple(timed(BATCH, 2.0, 1.0, bias=bias) for bias in (False, True)))
    monkeypatch.setattr(speed, "load_table", lambda: table)
    attn = make().cuda()
    skipping = qvit.quantize(copy.deepcopy(attn), [inputs(BATCH).cuda()], qvit.QuantConfig(skip_slower=True))
    static = inputs(BATCH).cuda()
    skipping(static), torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipping(static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = skipping(static)
    static.copy_(inputs(BATCH).flip(0))
    graph.replay()
    torch.testing.assert_close(out, attn(static), atol=2e-3, rtol=1e-3)
    assert qvit.report(skipping).rows[0].attention == "float"
