"""The attention benchmark, all but the clock: workloads, operands, refusals, rows, tables; the timer's arithmetic."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from qvit import speed
from qvit.errors import ConfigError
from qvit.evaluation import timing
from qvit.evaluation.timing import Measurement, Timing, TurnTimer, count_sets, quantile, repeats, summarize

MACHINE = {
    "gpu": "H200",
    "driver": None,
    "torch": "2.8.0",
    "triton": "3.4.0",
    "qvit": "0.1.0",
    "seed": 0,
    "date": "2025-01-01",
}


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("bench_attention")


class FakeTimer:
    """Takes a microsecond for the first operator that is added, two for the second, and so on."""

    def __init__(self, rounds: int, seconds=0.3) -> None:
        self.names = []

    def add(self, name, calls, context=nullcontext) -> None:
        with context():
            assert all(call().isfinite().all() for call in calls)
        self.names.append(name)

    def run(self, progress) -> dict:
        progress()
        return {
            n: Measurement(Timing(i, i - 0.5, i + 0.5), Timing(2 * i, i, 3 * i)) for i, n in enumerate(self.names, 1)
        }


@pytest.fixture
def on_cpu(script, monkeypatch):
    """The script on small workloads, with the CPU in the place of a GPU and a made-up clock."""
    small = (
        script.Workload("A1", 1, 2, 17, 32),
        script.Workload("A4", 3, 1, 9, 32),
        script.ShiftedWorkload("A4s", 4, 2, 9, 32, side=6, shift=1),
        script.ShiftedWorkload("A7s", 1, 2, 9, 32, side=3, shift=0),
    )
    monkeypatch.setattr(script, "DEVICE", "cpu")
    monkeypatch.setattr(script, "WORKLOADS", {workload.name: workload for workload in small})
    monkeypatch.setattr(script, "TurnTimer", FakeTimer)
    monkeypatch.setattr(script, "choose_sets", lambda *_: 2)
    monkeypatch.setattr(script, "describe_machine", lambda seed: {**MACHINE, "seed": seed})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for package in script.OPTIONAL:
        monkeypatch.setitem(sys.modules, package, None)
    return script


def fake_rows(script, times: dict[str, float | None], workload: str = "A1", batch: int = 8) -> list:
    outcomes = {m: script.Outcome(note="refused") for m in times}
    for method, time in times.items():
        if time is not None:
            timings = Timing(time, time - 1, time + 1), Timing(2 * time, time, 3 * time)
            outcomes[method] = script.Outcome(30.126, True, Measurement(*timings))
    shape = script.WORKLOADS[workload]
    return [script.make_row(shape, batch, 3, method, outcome, MACHINE) for method, outcome in outcomes.items()]


TIMES = {"qvit fp16 high": 10.0, "sdpa flash": 20.0, "sdpa cudnn": None, "sdpa math": 90.0, "paper kernel": 40.0}


# The clock's arithmetic.


def test_quantiles_are_linear_between_neighbours() -> None:
    assert [quantile([5, 1, 3, 2, 4], f) for f in (0, 0.2, 0.5, 0.8, 1)] == pytest.approx([1, 1.8, 3, 4.2, 5])
    assert quantile([7], 0.2) == 7


def test_a_timing_takes_medians_of_rounds_and_pools_quantiles() -> None:
    timing = summarize([[1, 2, 9], [4, 4, 4], [3, 3, 3]])
    assert timing.median == 3
    assert (timing.p20, timing.p80) == (quantile([1, 2, 9, 4, 4, 4, 3, 3, 3], 0.2), 4)


@pytest.mark.parametrize("each, expected", [(1.0, 7), (0.01, 10), (1e-6, 1000)])
def test_repeats_stay_in_their_bounds(each: float, expected: int) -> None:
    assert repeats(each, 0.1, 7, 1000) == expected


@pytest.mark.parametrize(
    "smallest, total, memory, expected",
    [(1, 2, 10**9, 64), (10, 20, 10**9, 41), (1000, 2000, 10**9, 3), (10, 20, 200, 10), (10, 20, 1, 3)],
)
def test_sets_exceed_the_cache_as_far_as_memory_goes(smallest, total, memory, expected) -> None:
    assert count_sets(smallest, total, 100, memory) == expected


def test_operators_take_turns_and_times_are_by_call(monkeypatch) -> None:
    class Graph:
        def replay(self) -> None: ...

    log = []
    monkeypatch.setattr(timing, "capture", lambda calls, pool: Graph())
    monkeypatch.setattr(timing, "event_times", lambda action, count: [8.0] * count)
    timer = TurnTimer(rounds=2, seconds=4e-4)
    for name in "ab":
        timer.add(name, [lambda name=name: log.append(name)] * 4)
    assert log == list("aaaabbbb")
    turns = []
    result = timer.run(lambda: turns.append(1))
    assert len(turns) == 4
    assert result["a"] == Measurement(Timing(2, 2, 2), Timing(2, 2, 2))
    operator = timer._operators["a"]
    assert [len(samples) for samples in operator.graph_rounds] == [25, 25]
    assert [len(samples) for samples in operator.eager_rounds] == [8, 8]


@pytest.mark.gpu
def test_the_timer_on_a_gpu() -> None:
    small, large = (torch.randn(n, n, device="cuda") for n in (256, 4096))
    timer = TurnTimer(rounds=2, seconds=0.02)
    for name, x in {"small": small, "large": large}.items():
        timer.add(name, [lambda x=x: x @ x] * 3)
    result = timer.run()
    assert 0 < result["small"].graph.median < result["large"].graph.median
    assert all(0 < m.graph.p20 <= m.graph.median <= m.graph.p80 for m in result.values())
    assert result["small"].eager.median > result["small"].graph.median


# Workloads and operands.


def test_workloads(script) -> None:
    shapes = {w.name: (w.windows, w.heads, w.tokens, w.head_dim) for w in script.WORKLOADS.values()}
    shifted = {name: shapes.pop(name) for name in list(shapes) if name.endswith("s")}
    assert list(shapes.items())[:7] == [
        ("A1", (1, 3, 197, 64)), ("A2", (1, 6, 197, 64)), ("A3", (1, 12, 197, 64)), ("A4", (64, 3, 49, 32)),
        ("A5", (16, 6, 49, 32)), ("A6", (4, 12, 49, 32)), ("A7", (1, 24, 49, 32)),
    ]  # fmt: skip
    assert {name: shapes[name] for name in list(shapes)[7:]} == {
        f"N{n}": (1, 6, n, 64) for n in (257, 577, 1025, 1370, 4096)
    }
    assert script.WORKLOADS["A4"].elements(8) == 512 * 3 * 49 * 32
    assert script.WORKLOADS["A4"].scores(8) == 512 * 3 * 49 * 49
    assert shifted == {f"{name}s": shapes[name] for name in ("A4", "A5", "A6", "A7")}
    images = [(w.side, w.window, w.across, w.shift) for w in script.WORKLOADS.values() if w.name in shifted]
    assert images == [(56, 7, 8, 3), (28, 7, 4, 3), (14, 7, 2, 3), (7, 7, 1, 0)]
    assert sorted(name for names in script.PANELS.values() for name in names) == sorted(script.WORKLOADS)


def test_operands_are_views_of_one_packed_tensor(on_cpu) -> None:
    case = on_cpu.draw_case(on_cpu.WORKLOADS["A4"], 4, 2, seed=0)
    assert case.scored_images == 2 and len(case.head(case.floats[0][0])) == 6
    for operands, dtype in ((case.floats[1], torch.float16), (case.integers[1], torch.int8)):
        assert len({x.untyped_storage().data_ptr() for x in operands}) == 1
        assert all(x.shape == (12, 1, 9, 32) and x.stride() == (864, 32, 96, 1) for x in operands)
        assert operands[0].dtype == dtype
    # int8 operands are what the operator quantizes itself
    scales, (q, k, v) = case.scales, case.floats[1]
    assert torch.equal(
        on_cpu.qvit.attention(q, k, v, scales), on_cpu.qvit.attention(*case.integers[1], scales, out_dtype=q.dtype)
    )


def test_inputs_follow_the_seed(on_cpu) -> None:
    first, again, other = (on_cpu.draw_case(on_cpu.WORKLOADS["A1"], 1, 2, seed).packed for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_what_needs_too_much_memory_is_skipped(script) -> None:
    workload, limit = script.WORKLOADS["N4096"], 24 << 30
    assert script.excess(workload, 256, "sdpa flash", limit) == ""
    assert script.excess(workload, 8, "sdpa math", limit) == ""
    assert script.excess(workload, 64, "eager", limit).startswith("skipped: operands and scores of 27.9 GiB")
    assert script.excess(workload, 256, "sdpa flash", 1 << 30).startswith("skipped: operands of")


# Shifted windows.


@pytest.fixture
def shifted(on_cpu):
    return on_cpu.draw_case(on_cpu.WORKLOADS["A4s"], 3, 1, seed=0)


def test_windows_bias_and_mask_are_those_of_swin(on_cpu, shifted) -> None:
    from timm.models.swin_transformer import SwinTransformerBlock

    block = SwinTransformerBlock(64, (6, 6), num_heads=2, window_size=3, shift_size=1).eval().double()
    block.attn.proj = torch.nn.Identity()
    block.attn.relative_position_bias_table.data.normal_()
    x = torch.randn(3, 6, 6, 64, dtype=torch.float64)
    packed = block.attn.qkv(x).reshape(3, 36, 3, 2, 32)
    case = dataclasses.replace(shifted, packed=[packed], bias=block.attn._get_rel_pos_bias()[0].half())
    windows = case.attend(*case.floats[0])
    assert torch.allclose(on_cpu.reverse(windows, case.workload, 3).flatten(2), block._attn(x).flatten(1, 2), atol=2e-3)


@pytest.mark.parametrize("form", ["windows", "folded"])
@pytest.mark.parametrize("name", ["A4s", "A7s"])
def test_every_form_of_sdpa_gives_the_attention(on_cpu, name, form) -> None:
    case = on_cpu.draw_case(on_cpu.WORKLOADS[name], 3, 1, seed=0)
    for build in (on_cpu.masked_sdpa, on_cpu.moved_sdpa):
        outcome = on_cpu.judge("sdpa", case, build(case, on_cpu.SDPBackend.MATH, form))
        assert outcome.sqnr_db > 55 and outcome.note


def test_the_moves_are_those_of_the_plan(on_cpu, shifted) -> None:
    image = shifted.packed[0][:, :, 0]
    windows = on_cpu.partition(image.flatten(2), shifted.workload)
    assert torch.equal(windows, shifted.cut(image).flatten(2))
    result = windows.unflatten(-1, (2, 32)).transpose(1, 2)  # as attention gives it
    for form in (result, result.unflatten(0, (3, 4)).flatten(1, 2)):
        assert torch.equal(on_cpu.reverse(form, shifted.workload, 3), image)


def test_masks_need_no_copy_in_the_backends(shifted) -> None:
    for mask in (shifted.window_mask, shifted.folded_mask):
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    assert shifted.folded_mask.stride(0) == 0 and shifted.window_mask.shape == (12, 2, 9, 9)


def test_shifted_windows_without_their_mask_are_seen(on_cpu, shifted) -> None:
    exact = shifted.exact
    vars(shifted)["additive"] = shifted.bias.expand(4, -1, -1, -1)
    operator = on_cpu.masked_sdpa(shifted, on_cpu.SDPBackend.MATH, "folded")
    assert on_cpu.sqnr_db(exact, operator.decode(shifted.head(operator.calls[0]()))) < 10


SHIFTED_TIMES = {"qvit fp16 high": 10.0, "sdpa cudnn windows": 50.0, "sdpa efficient folded": 20.0, "eager": 1.0}
MOVED_TIMES = {"sdpa efficient folded + moves": 50.0, "sdpa efficient windows + moves": 45.0}


def test_shifted_windows_have_a_table_of_their_own(script) -> None:
    rows = fake_rows(script, TIMES) + fake_rows(script, {**SHIFTED_TIMES, **MOVED_TIMES}, "A6s")
    _, _, plain, _, first, _, header, _, line = script.format_markdown(rows).splitlines()
    assert plain.startswith("| workload |") and first.startswith("| A1 ")
    assert header.startswith("| shifted windows | batch | best SDPA | the same with moves | qvit fp16 standard |")
    assert line == (
        "| A6s 4x12x49x32 | 8 | efficient folded 20.0 | efficient windows 45.0 | - | 10.0 (2.00x, 4.50x) | - | - |"
    )


# A whole run.


def test_a_run_writes_every_method(on_cpu, tmp_path, capsys) -> None:
    plain = ["--workloads", "A1", "A4"]
    arguments = [*plain, "--batches", "1", "3", "--output", str(tmp_path / "new"), "--seed", "5"]
    assert on_cpu.main(arguments) == 0
    rows = on_cpu.read_csv(tmp_path / "new" / "bench_attention.csv")
    assert [row.case for row in rows[:: len(on_cpu.METHODS)]] == [("A1", 1), ("A1", 3), ("A4", 1), ("A4", 3)]
    assert [row.method for row in rows[:10]] == list(on_cpu.METHODS)
    assert all(row.seed == 5 and row.gpu == "H200" and row.driver is None and row.sets == 2 for row in rows)
    for row in rows:
        if row.method in on_cpu.PRODUCT:
            assert row.equal is True and row.note == "" and row.sqnr_db > 25
        else:
            assert row.equal is None
    by_method = {row.method: row for row in rows[:10]}
    assert by_method["eager"].sqnr_db > 55 and by_method["sdpa flash"].sqnr_db > 55
    assert 5 < by_method["paper kernel"].sqnr_db < by_method["qvit int8 high"].sqnr_db
    assert by_method["qvit fp16 high"].graph_us == 2 and by_method["qvit fp16 high"].eager_us == 4
    # the CPU has no cuDNN: no time, and the reason
    assert by_method["sdpa cudnn"].graph_us is None and "No viable backend" in by_method["sdpa cudnn"].note
    printed = capsys.readouterr().out
    assert "A1 1x2x17x32  3      flash 5.0" in printed
    assert "1.0 (5.00x)" in printed


def test_a_run_on_shifted_windows_writes_every_method(on_cpu, tmp_path, capsys) -> None:
    assert on_cpu.main(["--workloads", "A4s", "A7s", "--batches", "3", "--output", str(tmp_path)]) == 0
    rows = on_cpu.read_csv(tmp_path / "bench_attention.csv")
    assert [row.method for row in rows] == 2 * list(on_cpu.SHIFTED_METHODS)
    assert [(row.windows, row.heads, row.tokens, row.head_dim) for row in rows[::15]] == [(4, 2, 9, 32), (1, 2, 9, 32)]
    for row in rows:
        if row.method in on_cpu.PRODUCT:
            assert row.equal is True and row.note == "" and row.sqnr_db > 24
        elif row.method in ("eager", "sdpa math windows", "sdpa math folded"):
            assert row.equal is None and row.note == on_cpu.SPARED and row.sqnr_db > 55
        else:  # the CPU has neither backend
            assert row.graph_us is None and "backend" in row.note
    printed = capsys.readouterr().out
    assert "shifted windows  batch  best SDPA" in printed and "A4s 4x2x9x32     3      math windows 5.0" in printed
    assert on_cpu.SHIFTED_PRODUCT.keys() == on_cpu.PRODUCT.keys()


def test_missing_rivals_are_named_and_have_no_rows(on_cpu, tmp_path, capsys) -> None:
    assert on_cpu.main(["--workloads", "A1", "--batches", "1", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for package in ("sageattention", "flash_attn"):
        assert sum(line.startswith(f"{package}: not installed") for line in lines) == 1
    assert {row.method for row in on_cpu.read_csv(tmp_path / "bench_attention.csv")} == set(on_cpu.METHODS)


@pytest.mark.parametrize("batch", [1, 2], ids=["in the check", "while measuring"])
def test_a_wrong_kernel_ends_the_run(on_cpu, tmp_path, capsys, monkeypatch, batch: int) -> None:
    right = on_cpu.PRODUCT["qvit int8 high"]

    def wrong(case):
        operator = right(case)
        if case.batch != batch or case.workload.name != "A4":
            return operator
        return dataclasses.replace(operator, reference=lambda: operator.reference().index_fill(0, torch.tensor(0), 99))

    monkeypatch.setitem(on_cpu.PRODUCT, "qvit int8 high", wrong)
    monkeypatch.setitem(on_cpu.METHODS, "qvit int8 high", wrong)
    output = tmp_path / "new"
    assert on_cpu.main(["--batches", "1", "2", "--output", str(output)]) == 1
    captured = capsys.readouterr()
    assert f"workload A4, batch {batch}: qvit int8 high differs from the reference in" in captured.err
    assert "x)" not in captured.out and not output.exists()


def failing(error: Exception):
    def build(case):
        raise error

    return build


def test_a_rival_may_refuse_and_the_product_may_not(on_cpu) -> None:
    case = on_cpu.draw_case(on_cpu.WORKLOADS["A1"], 1, 1, 0)
    error = RuntimeError("no such shape\nand a long trace")
    assert on_cpu.enter("eager", failing(error), case, FakeTimer(1)).note == "no such shape"
    with pytest.raises(RuntimeError, match="no such shape"):
        on_cpu.enter("qvit int8 high", failing(error), case, FakeTimer(1))
    outcome = on_cpu.enter("qvit int8 high", failing(torch.OutOfMemoryError("x")), case, FakeTimer(1))
    assert outcome.note == "out of memory" and outcome.measurement is None


def test_a_refusal_is_what_pytorch_warned(script) -> None:
    messages = [
        "Flash attention kernel not used because: (Triggered internally at a.cpp:1.)",
        "Expected query to be half,\n but found float (Triggered internally at a.cpp:2.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at a.cpp:3.)",
    ]
    assert (
        script.refusal(RuntimeError("No available kernel."), messages) == "Expected query to be half, but found float"
    )
    assert script.refusal(RuntimeError("No available kernel."), messages[:1]) == "No available kernel."


def test_append_keeps_the_other_cases(on_cpu, tmp_path) -> None:
    arguments = ["--output", str(tmp_path), "--append", "--batches", "1", "--workloads"]
    assert on_cpu.main([*arguments, "A4"]) == 0
    assert on_cpu.main([*arguments, "A4", "A1", "--seed", "2"]) == 0
    rows = on_cpu.read_csv(tmp_path / "bench_attention.csv")
    assert len(rows) == 20 and rows[0].workload == "A1" and {row.seed for row in rows} == {2}
    assert on_cpu.main([*arguments, "A1", "--seed", "3"]) == 0
    assert {(row.workload, row.seed) for row in on_cpu.read_csv(tmp_path / "bench_attention.csv")} == {
        ("A1", 3),
        ("A4", 2),
    }


# Files and tables.


def test_csv_comes_back(script, tmp_path) -> None:
    rows = fake_rows(script, TIMES)
    script.write_csv(rows, tmp_path / "x.csv")
    assert script.read_csv(tmp_path / "x.csv") == rows
    header = (tmp_path / "x.csv").read_text().splitlines()[0].split(",")
    assert header[:14] == [
        "workload", "windows", "heads", "tokens", "head_dim", "batch", "method", "graph_us", "graph_us_p20",
        "graph_us_p80", "eager_us", "sqnr_db", "equal", "note",
    ]  # fmt: skip
    assert {"gpu", "driver", "torch", "triton", "qvit", "seed", "date"} <= set(header)


@pytest.mark.parametrize("content", [None, "a,b\n1,2\n", ""])
def test_other_files_are_refused(script, tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "x.csv").write_text(content)
    with pytest.raises(ConfigError, match="x.csv"):
        script.read_csv(tmp_path / "x.csv")


def test_markdown_needs_no_gpu(script, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script.write_csv(fake_rows(script, TIMES), tmp_path / "x.csv")
    assert script.main(["--markdown", str(tmp_path / "x.csv")]) == 0
    *_, legend, empty, header, rule, line = capsys.readouterr().out.splitlines()
    assert "H200, driver unknown, torch 2.8.0" in legend and empty == ""
    assert header == (
        "| workload | batch | best SDPA | qvit fp16 standard | qvit fp16 high | qvit int8 standard | qvit int8 high "
        "| paper kernel |"
    )
    assert rule == "|" + " --- |" * 8
    assert line == "| A1 1x3x197x64 | 8 | flash 20.0 | - | 10.0 (2.00x) | - | - | 40.0 (0.50x) |"


def test_without_a_rival_there_is_no_ratio(script) -> None:
    (table,) = script.tables(fake_rows(script, {"sdpa flash": None, "qvit fp16 high": 10.0}))
    assert table[1][2:5] == ["-", "-", "10.0"]


def test_the_plot_is_a_picture(script, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row for name in ("A1", "A4", "N577") for row in fake_rows(script, TIMES, name)]
    script.write_plot(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_rows_are_written_all_the_same(script, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    script.write_results(fake_rows(script, TIMES), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bench_attention.csv"]
    assert "matplotlib is not installed" in capsys.readouterr().err


# The speed table.


SPEED_MACHINE = {**MACHINE, "gpu": "NVIDIA H200", "driver": "580.1"}
SPEED_TIMES = {
    "qvit fp16 standard": 9.0,
    "qvit fp16 high": 12.5,
    "qvit int8 standard": 7.0,
    "sdpa flash": 20.0,
    "sdpa cudnn": 11.0,
    "sdpa math": 90.0,
    "eager": 1.0,
    "paper kernel": 2.0,
}


def speed_rows(script, times=None, **changes) -> list:
    rows = fake_rows(script, SPEED_TIMES if times is None else times, changes.pop("workload", "A5"))
    return [dataclasses.replace(row, **SPEED_MACHINE, **changes) for row in rows]


def test_a_speed_table_needs_no_gpu_and_is_read_back(script, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = speed_rows(script) + speed_rows(script, {"qvit fp16 standard": 4.0, "sdpa flash": 3.0}, workload="A2")
    script.write_csv(rows, tmp_path / "x.csv")
    assert script.main(["--speed-table", str(tmp_path / "x.csv"), "--output", str(tmp_path / "speed.json")]) == 0
    assert capsys.readouterr().out == f"3 rows in {tmp_path / 'speed.json'}\n"
    swin = {"tokens": 49, "head_dim": 32, "heads": 6, "batch": 8 * 16, "bias": False}
    vit = {"tokens": 197, "head_dim": 64, "heads": 6, "batch": 8, "bias": False}
    assert json.loads((tmp_path / "speed.json").read_text()) == {
        "source": "x.csv",
        "gpu": "NVIDIA H200",
        "capability": [9, 0],
        "versions": {"driver": "580.1", "torch": "2.8.0", "triton": "3.4.0", "qvit": "0.1.0"},
        "rows": [
            {**swin, "precision": "standard", "integer_us": 9.0, "float_us": 11.0},
            {**swin, "precision": "high", "integer_us": 12.5, "float_us": 11.0},
            {**vit, "precision": "standard", "integer_us": 4.0, "float_us": 3.0},
        ],
    }
    monkeypatch.setattr(speed, "PATH", tmp_path / "speed.json")
    monkeypatch.setattr(speed, "load_table", speed.load_table.__wrapped__)
    assert speed.recorded_times((9, 0), "high", 128, 6, 49, 32, False) == (12.5, 11.0)


def test_a_speed_table_goes_into_the_package_by_default(script) -> None:
    assert script.parse_arguments(["--speed-table", "x.csv"]).output == speed.PATH
    assert speed.PATH == Path(script.qvit.__file__).parent / "speed.json"


BAD_SPEED_ROWS = {
    "two GPUs": (lambda s: speed_rows(s) + [dataclasses.replace(r, gpu="B200") for r in speed_rows(s)], "several"),
    "two versions": (lambda s: speed_rows(s) + [dataclasses.replace(r, torch="2.9") for r in speed_rows(s)], "several"),
    "unknown GPU": (lambda s: fake_rows(s, SPEED_TIMES), "'H200'"),
    "no integer times": (lambda s: speed_rows(s, {"qvit int8 high": 9.0, "sdpa flash": 9.0}), "no case"),
    "no float times": (lambda s: speed_rows(s, {"qvit fp16 high": 9.0, "sdpa flash": None, "eager": 3.0}), "no case"),
}


@pytest.mark.parametrize("make, message", BAD_SPEED_ROWS.values(), ids=BAD_SPEED_ROWS)
def test_what_makes_no_speed_table(script, tmp_path, capsys, make, message) -> None:
    script.write_csv(make(script), tmp_path / "x.csv")
    assert script.main(["--speed-table", str(tmp_path / "x.csv"), "--output", str(tmp_path / "speed.json")]) == 2
    error = capsys.readouterr().err
    assert "x.csv" in error and message in error and not (tmp_path / "speed.json").exists()


def test_shifted_windows_stay_out_of_the_speed_table(script) -> None:
    times = {"qvit fp16 standard": 9.0, "sdpa efficient folded": 20.0}
    rows = speed_rows(script, times, workload="A5s")
    rows = [dataclasses.replace(row, torch="2.9") for row in rows]  # measured later
    assert len(script.make_speed_table(speed_rows(script) + rows, "x.csv")["rows"]) == 2
    with pytest.raises(ConfigError, match="no case"):
        script.make_speed_table(rows, "x.csv")


def test_an_unwritable_speed_table(script, tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot write the speed table"):
        script.write_speed_table({"rows": []}, tmp_path)


# The command line.


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no CUDA device"),
        (["--batches", "0"], "at least 1"),
        (["--workloads", "B1"], "invalid choice"),
        (["--markdown", "x.csv", "--speed-table", "x.csv"], "not allowed with"),
    ],
)
def test_arguments_are_refused(script, usage_error, arguments, message) -> None:
    assert message in usage_error(script, arguments)


def test_an_unwritable_output(script, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        script.write_results(fake_rows(script, TIMES), tmp_path / "file")


def test_the_readme_shows_rows_of_the_recorded_results(script):
    root = Path(__file__).resolve().parents[1]
    rows = script.read_csv(root / "docs" / "results" / "bench_attention.csv")
    shown = [line for line in (root / "README.md").read_text(encoding="utf-8").splitlines() if line.count("|") == 9]
    assert len(shown) > 10 and set(shown) <= set(script.format_markdown(rows).splitlines())
