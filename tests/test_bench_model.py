"""The benchmark of whole models, all but the clock: the comparison before it, order, rows, resuming, tables."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from qvit.errors import ConfigError
from qvit.evaluation.timing import Measurement, Timing

MACHINE = {"gpu": "H200", "driver": None, "torch": "2.8.0", "triton": "3.4.0", "qvit": "0.1.0", "date": "2025-01-01"}
SMALL = {
    "deit_tiny_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 5},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (2,), "num_heads": (1,), "num_classes": 5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("bench_model")


class FakeTimer:
    """Takes a millisecond for the first subject that is added, two for the second; graphs take half."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self.names = []

    def add(self, name, calls, context=nullcontext) -> None:
        with context():
            assert all(call().isfinite().all() for call in calls)
        self.names.append(name)

    def run(self, progress) -> dict:
        progress()
        times = {name: 1000 * i for i, name in enumerate(self.names, 1)}
        return {
            name: Measurement(Timing(t / 2, t / 4, t), Timing(t, t - 100, t + 100)) for name, t in times.items()
        }  # fmt: skip


@pytest.fixture
def on_cpu(script, monkeypatch):
    """The script on small models, with the CPU in the place of a GPU, a made-up clock and nothing compiled."""
    create = script.timm.create_model
    monkeypatch.setattr(script.timm, "create_model", lambda name: create(name, **SMALL[name]))
    monkeypatch.setattr(script, "DEVICE", "cpu")
    monkeypatch.setattr(script, "TurnTimer", FakeTimer)
    monkeypatch.setattr(script, "compile_model", lambda model, kind: model)
    monkeypatch.setattr(script.results, "describe_machine", lambda seed: {**MACHINE, "seed": seed})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 20)
    return script


def run(script, folder, *arguments: str) -> int:
    return script.main(["--output", str(folder), *arguments])


def rows_in(script, folder) -> list:
    return script.read_csv(folder / "bench_model.csv")


SWIN = ("--models", "swin_tiny", "--batches", "2")
DEIT = ("--models", "deit_tiny", "--batches", "1")


# Models.


def test_the_models_are_the_papers_and_swin_v2(script) -> None:
    assert set(script.MODELS) == {
        *("vit_small", "vit_base", "deit_tiny", "deit_small", "deit_base", "swin_tiny", "swin_small", "swinv2_tiny")
    }
    assert all(script.timm.is_model(name) for name in script.MODELS.values())
    assert {model for model, _ in script.FIRST} <= set(script.MODELS)
    assert set(script.QUICK["models"]) <= set(script.MODELS)


def test_float_models_share_their_weights_and_leave_no_switch_behind(on_cpu) -> None:
    single, half, fused = on_cpu.float_subjects("swin_tiny", 0)
    assert [s.precision for s in (single, half, fused)] == ["float32", "float16", "float16 fused"]
    assert all(torch.equal(a, b) for a, b in zip(half.model.parameters(), fused.model.parameters()))
    assert fused.model.layers[0].blocks[0].attn.fused_attn and not half.model.layers[0].blocks[0].attn.fused_attn
    assert [s.precision for s in on_cpu.float_subjects("deit_tiny", 0)] == ["float32", "float16"]
    images = on_cpu.draw_images(half.model, 2, 3)
    with torch.inference_mode():
        assert torch.allclose(half.model(images), fused.model(images), atol=0.02)


def test_attention_is_not_flat(on_cpu) -> None:
    model = on_cpu.float_subjects("deit_tiny", 0)[0].model
    attn = model.blocks[0].attn
    with torch.inference_mode():
        q, k, _ = attn.qkv(torch.randn(1, 5, 64)).reshape(1, 5, 3, 2, 32).permute(2, 0, 3, 1, 4)
        assert (q @ k.mT * 32**-0.5).std() > 0.1


@pytest.mark.parametrize("name", ["deit_tiny", "swin_tiny"])
def test_each_attention_is_compared_where_its_block_calls_it(on_cpu, name, monkeypatch) -> None:
    half = on_cpu.float_subjects(name, 0)[1].model
    called = []
    operator = "window_attention_qkvpacked" if name == "swin_tiny" else "attention_qkvpacked"
    real = getattr(torch.ops.qvit, operator)
    monkeypatch.setattr(torch.ops.qvit, operator, lambda *args: called.append(1) or real(*args))
    (subject,) = on_cpu.quantized_subjects(half, ["standard"], 0)
    before = len(called)
    found = on_cpu.compare_attention(half, subject.model, on_cpu.draw_images(half, 2, 9))
    assert len(called) - before == len(found) == subject.swapped > 1 and subject.left == 0
    assert min(found.values()) > 20 and subject.sqnr_db > 20
    assert not any({"_attn", "forward"} & vars(module).keys() for module in half.modules())


# The comparison before anything is timed.


def test_nothing_is_timed_when_a_patched_model_disagrees(on_cpu, tmp_path, capsys, monkeypatch) -> None:
    real = on_cpu.qvit.quantize

    def broken(*args):
        model = real(*args)
        model.layers[1].blocks[1].attn.qkv.weight.data.neg_()
        return model

    monkeypatch.setattr(on_cpu.qvit, "quantize", broken)
    monkeypatch.setattr(on_cpu, "measure", lambda *_: pytest.fail("timed"))
    assert run(on_cpu, tmp_path / "new", *SWIN) == 1
    error = capsys.readouterr().err
    assert "swin_tiny, precision standard: an attention layer agrees with float to" in error
    assert "expected at least 15 dB; nothing is timed" in error and not (tmp_path / "new").exists()


def test_the_floor_is_an_argument(on_cpu, tmp_path) -> None:
    assert run(on_cpu, tmp_path, *DEIT, "--min-sqnr", "90") == 1
    assert run(on_cpu, tmp_path, *DEIT, "--min-sqnr", "20") == 0


def test_no_number_is_no_agreement(script) -> None:
    subject = script.Subject("qvit", "standard", None, sqnr_db=float("nan"))
    with pytest.raises(script.MismatchError, match="nan dB"):
        script.require_agreement("deit_tiny", subject, 15)


# A whole run.


def test_a_run_writes_every_mode(on_cpu, tmp_path, capsys) -> None:
    arguments = (*SWIN, "--precision", "standard", "high", "--seed", "5", "--modes", *on_cpu.MODES)
    assert run(on_cpu, tmp_path / "new", *arguments) == 0
    rows = rows_in(on_cpu, tmp_path / "new")
    by_key = {row.key[2:]: row for row in rows}
    halves = [("float", "float16"), ("float", "float16 fused"), ("qvit", "standard"), ("qvit", "high")]
    expected = {(mode, *subject) for mode in on_cpu.ALL_MODES for subject in halves}
    expected |= {(mode, "float", "float32") for mode in ("eager", "graph")}
    assert by_key.keys() == expected and len(rows) == len(expected)
    patched = by_key["eager", "qvit", "standard"]
    assert (patched.ms, patched.ms_p20, patched.ms_p80, patched.images_per_s) == (4.0, 3.9, 4.1, 500.0)
    assert by_key["graph", "qvit", "standard"].ms == 2.0
    assert (patched.swapped, patched.left) == (4, 0) and patched.sqnr_db > 20
    assert (by_key["eager", "float", "float16"].swapped, by_key["eager", "float", "float16"].left) == (0, 4)
    weights = sum(x.numel() * x.element_size() for x in on_cpu.build("swin_tiny", 5).parameters()) / 2
    assert patched.peak_mib > 3 + weights / on_cpu.MIB
    assert all(row.seed == 5 and row.timm == on_cpu.timm.__version__ and row.note == "" for row in rows)
    printed = capsys.readouterr().out
    assert "swin_tiny x 2 compiled: ready in" in printed and "built and compared in" in printed
    assert "2.00 / 4.00 (0.50x)" in printed


def test_a_model_that_is_not_swapped_has_float_rows_and_the_reason(on_cpu, tmp_path, monkeypatch) -> None:
    def refuse(*_):
        raise on_cpu.UnsupportedModuleError("nothing to swap")

    monkeypatch.setattr(on_cpu.qvit, "calibrate", refuse)
    assert run(on_cpu, tmp_path, "--models", "swinv2_tiny", "--batches", "1", "--modes", "eager") == 0
    rows = rows_in(on_cpu, tmp_path)
    assert all(row.ms is not None for row in rows if row.method == "float")
    patched = [row for row in rows if row.method == "qvit"]
    assert len(patched) == 2 and {row.note for row in patched} == {"not swapped: nothing to swap"}
    assert all(row.ms is None and row.swapped == 0 for row in patched)


@pytest.mark.parametrize("dtype, method, status", [(torch.float32, "float", 0), (None, "qvit", 1)])
def test_what_fails_is_noted_and_the_rest_goes_on(on_cpu, tmp_path, capsys, monkeypatch, dtype, method, status) -> None:
    real = on_cpu.measure_peak

    def fail(model, call):
        is_patched = on_cpu.qvit.report(model).swapped > 0
        if (dtype is None and is_patched) or model.head.weight.dtype == dtype:
            raise RuntimeError("no such\nkernel")
        return real(model, call)

    monkeypatch.setattr(on_cpu, "measure_peak", fail)
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "eager") == status
    failed = {row.method for row in rows_in(on_cpu, tmp_path) if row.note == "failed: no such kernel"}
    assert failed == {method}
    assert ("qvit failed in deit_tiny x 1 eager, deit_tiny x 1 graph" in capsys.readouterr().err) == (status == 1)


def test_rows_are_written_as_they_come(on_cpu, tmp_path, monkeypatch) -> None:
    real, done = on_cpu.measure, []

    def interrupted(task, *args):
        if done:
            raise KeyboardInterrupt
        done.append(task)
        return real(task, *args)

    monkeypatch.setattr(on_cpu, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(on_cpu, tmp_path, *DEIT)
    assert {row.mode for row in rows_in(on_cpu, tmp_path)} == {"eager", "graph"}
    assert [path.name for path in tmp_path.iterdir()] == ["bench_model.csv"]


def test_a_run_is_resumed(on_cpu, tmp_path, monkeypatch) -> None:
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "eager") == 0
    first = rows_in(on_cpu, tmp_path)
    tasks, real = [], on_cpu.measure
    monkeypatch.setattr(on_cpu, "measure", lambda task, *args: tasks.append(str(task)) or real(task, *args))
    for _ in range(2):
        assert run(on_cpu, tmp_path, "--models", "deit_tiny", "--batches", "1", "2", "--resume") == 0
    assert tasks == ["deit_tiny x 2 eager", "deit_tiny x 1 compiled", "deit_tiny x 2 compiled"]
    assert rows_in(on_cpu, tmp_path)[: len(first)] == first
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "compiled") == 0  # begins anew
    assert {row.mode for row in rows_in(on_cpu, tmp_path)} == {"compiled", "compiled graph"}


def test_what_failed_is_measured_again(on_cpu, tmp_path, monkeypatch) -> None:
    real = on_cpu.measure_peak

    def fail_all(model, call):
        swapped = any("qvit" in name for name, _ in model.named_buffers())
        raise on_cpu.qvit.BackendError("no bits") if swapped else RuntimeError("no memory")

    monkeypatch.setattr(on_cpu, "measure_peak", fail_all)
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "eager") == 1
    notes = {row.precision: row.note for row in rows_in(on_cpu, tmp_path)}
    failed = "failed: no memory"
    assert notes == {"float32": failed, "float16": failed, "standard": "failed: no bits"}
    monkeypatch.setattr(on_cpu, "measure_peak", real)
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "eager", "--resume") == 0
    assert all(row.ms and not row.note for row in rows_in(on_cpu, tmp_path))


def test_a_lean_model_is_compiled_without_reuse_of_buffers(script, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: kwargs)
    assert script.compile_model(None, "compiled") == {"dynamic": False}
    assert script.compile_model(None, "lean") == {"dynamic": False, "options": {"allow_buffer_reuse": False}}


def test_rows_of_another_machine_are_not_continued(on_cpu, tmp_path, capsys) -> None:
    assert run(on_cpu, tmp_path, *DEIT, "--modes", "eager") == 0
    assert run(on_cpu, tmp_path, *DEIT, "--resume", "--seed", "1") == 2
    assert "has rows with seed 0, this run has 1" in capsys.readouterr().err
    other = [dataclasses.replace(row, driver="1.2") for row in rows_in(on_cpu, tmp_path)]
    on_cpu.write_csv(other, tmp_path / "bench_model.csv")
    assert run(on_cpu, tmp_path, *DEIT, "--resume", "--modes", "eager") == 0


def test_the_most_important_tasks_come_first(script) -> None:
    order = [str(t) for t in script.plan_tasks(["deit_small", "swin_tiny"], [1, 256], ["compiled", "eager"])]
    assert order == [
        "swin_tiny x 256 eager", "swin_tiny x 256 compiled", "deit_small x 256 eager", "deit_small x 256 compiled",
        "deit_small x 1 eager", "swin_tiny x 1 eager", "deit_small x 1 compiled", "swin_tiny x 1 compiled",
    ]  # fmt: skip


# Tables and the plot.


def fake_rows(script) -> list:
    times = {
        ("eager", "float", "float32"): 50.0, ("graph", "float", "float32"): 49.0,
        ("eager", "float", "float16"): 30.0, ("eager", "float", "float16 fused"): 20.0,
        ("eager", "qvit", "standard"): 16.0, ("graph", "float", "float16"): 18.0, ("graph", "qvit", "standard"): None,
        ("compiled", "float", "float16"): 12.0, ("compiled", "qvit", "standard"): 8.0,
        ("lean", "float", "float16"): 7.0, ("lean", "qvit", "standard"): 6.0,  # not of the table
    }  # fmt: skip
    task, machine = script.Task("swin_tiny", 8, "eager"), {**MACHINE, "timm": "1.0.29", "seed": 0}
    rows = []
    for (mode, method, precision), ms in times.items():
        (row, _) = script.make_rows(task, script.Subject(method, precision, None), script.Outcome(), machine)
        rows.append(dataclasses.replace(row, mode=mode, ms=ms))
    return rows


def test_ratios_are_to_the_faster_float16_of_the_same_mode(script, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = fake_rows(script)
    script.write_csv(rows, tmp_path / "x.csv")
    assert script.read_csv(tmp_path / "x.csv") == rows
    assert script.main(["--markdown", str(tmp_path / "x.csv")]) == 0
    legend, _, header, _, line = capsys.readouterr().out.splitlines()
    assert "random weights" in legend and "timm 1.0.29, qvit 0.1.0, seed 0, 2025-01-01:" in legend
    assert header == (
        "| model | batch | precision | float32 eager | eager | graph | compiled | compiled graph | best |"
    )
    assert line == (
        "| swin_tiny | 8 | standard | 50.00 | 20.00 / 16.00 (1.25x) | 18.00 / - | 12.00 / 8.00 (1.50x) | - "
        "| 12.00 / 8.00 (1.50x) |"
    )


def test_the_plot_is_a_picture(script, tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script.write_csv(fake_rows(script), tmp_path / "x.csv")
    assert script.main(["--plot", str(tmp_path / "x.csv")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    script.write_csv([row for row in fake_rows(script) if row.method == "float"], tmp_path / "x.csv")
    assert script.main(["--plot", str(tmp_path / "x.csv")]) == 2
    assert "no row of a patched model" in capsys.readouterr().err


# The command line.


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no CUDA device"),
        (["--models", "resnet"], "invalid choice"),
        (["--modes", "graph"], "invalid choice"),
        (["--batches", "0"], "at least 1"),
        (["--precision", "paper"], "invalid choice"),
        (["--markdown", "x.csv", "--plot", "x.csv"], "not allowed with"),
    ],
)
def test_arguments_are_refused(script, usage_error, arguments, message) -> None:
    assert message in usage_error(script, arguments)


def test_quick_is_a_small_run_unless_told_otherwise(script, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = script.parse_arguments(["--quick", "--batches", "2"])
    assert (args.models, args.batches, args.rounds) == (["deit_tiny", "swin_tiny"], [2], 1)
    assert script.parse_arguments([]).batches == [1, 8, 64, 256]


def test_files_that_cannot_be_used(script, tmp_path, capsys) -> None:
    assert script.main(["--markdown", str(tmp_path / "x.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        script.save(tmp_path / "file", fake_rows(script))


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(script, tmp_path) -> None:
    assert run(script, tmp_path, "--quick", "--modes", "eager", "--batches", "2") == 0
    assert all(row.ms > 0 and row.peak_mib > 0 for row in rows_in(script, tmp_path))


def test_the_readme_shows_rows_of_the_recorded_results(script) -> None:
    root = Path(__file__).resolve().parents[1]
    rows = script.read_csv(root / "docs" / "results" / "bench_model.csv")
    shown = [line for line in (root / "README.md").read_text(encoding="utf-8").splitlines() if line.count("|") == 10]
    assert len(shown) > 5 and set(shown) <= set(script.format_markdown(rows).splitlines())
