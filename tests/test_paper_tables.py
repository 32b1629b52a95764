"""The tables of the QFlash paper on a CPU: their rows, what cells lack, the figures beside, the page, the gate."""

from __future__ import annotations

import dataclasses
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import qvit
from qvit.baselines import METHODS
from qvit.errors import BackendError, ConfigError
from qvit.evaluation import cores, counters, runner, studies
from qvit.evaluation.published import FIGURES
from qvit.evaluation.results import sqnr_db
from qvit.evaluation.timing import Measurement, Timing
from qvit.evaluation.workloads import PAPER_WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent
GPU_TABLES = ("fig3", "2", "3")


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("paper_tables")


@pytest.fixture
def small(script, monkeypatch):
    """The script on small shapes, with floors that these reach, one draw and no model."""
    shapes = tuple(Workload(w.name, w.windows, 2, 17, 16) for w in PAPER_WORKLOADS)
    monkeypatch.setattr(script, "PAPER_WORKLOADS", shapes)
    monkeypatch.setattr(script, "WORKLOADS", {w.name: w for w in shapes})
    monkeypatch.setattr(script, "TILES", Workload("C1", 1, 1, 200, 16))
    monkeypatch.setattr(script, "FLOORS", {"uniform": {"qvit_standard": (25.0, 25.0), "qvit_high": (30.0, 30.0)}})
    return script


def measure(script, folder, *arguments: str) -> int:
    return script.main(["--device", "cpu", "--draws", "2", "--capture-from", "--output", str(folder), *arguments])


def rows_of(script, folder, name: str) -> dict:
    return {row.key: row for row in script.read_csv(script.file_of(folder, name))}


def uniform_softmax(q, k, v, softmax_scale):
    """Looks nowhere."""
    return v.mean(2, keepdim=True).expand_as(v)


# Rows.


def test_every_table_has_its_rows_without_a_gpu(small, tmp_path, capsys):
    assert measure(small, tmp_path, "--tables", "1", "fig3", "2", "3", "4", "challenges", "ablation") == 0
    printed = capsys.readouterr().out
    assert all(small.TABLES[name].title in printed for name in small.TABLES if name != "5")
    assert rows_of(small, tmp_path, "1")["A4", "Swin-T and Swin-S, stage 1", "scores"].value == 64 * 2 * 17**2
    kernels = {name for name, method in METHODS.items() if method.prepare is not None}
    for name in GPU_TABLES:
        rows = rows_of(small, tmp_path, name)
        assert {key[1] for key in rows} == (set(METHODS) if name == "fig3" else kernels)
        assert {row.text for row in rows.values()} <= {"needs a GPU", "no kernel"}
        assert all(row.value is None for row in rows.values()), "a number without a GPU is made up"
    rows = rows_of(small, tmp_path, "4")
    cases = {f"{w} {kind}" for w in ("A2", "A7") for kind in ("uniform", "Gaussian")}
    assert set(rows) == {
        (case, method, quantity)
        for case in cases
        for method in METHODS
        for quantity in ("SQNR dB", "MSE", "lowest dB", "median dB", "highest dB")
    }
    assert all(row.value is not None and row.seed == 0 and row.gpu == "CPU" for row in rows.values())
    steps = rows_of(small, tmp_path, "ablation")
    assert steps["A2 uniform", "int8 QK", "SQNR dB"].value > steps["A2 uniform", "+ int8 PV", "SQNR dB"].value
    assert steps["A2, batch 1024", "+ integer exponent", "us"].text == "no kernel"


def test_the_challenges(small, tmp_path):
    assert measure(small, tmp_path, "--tables", "challenges") == 0
    tiles = rows_of(small, tmp_path, "c1")
    assert tiles["tile 4", "with ScaleRelease", "largest, bits"].value < 31
    assert tiles["tile 4", "without", "largest, bits"].value > 31
    assert tiles["tile 4", "without", "SQNR dB"].value < 10 < tiles["tile 4", "with ScaleRelease", "SQNR dB"].value
    costs = rows_of(small, tmp_path, "c2")
    assert costs["time", "division", "ps"].text == "needs a GPU"
    scales = rows_of(small, tmp_path, "c3")
    counts = [scales["A2 uniform", f"exact softmax, per {x}", "scales"].value for x in ("tensor", "head", "token")]
    assert counts == [3, 6, 70]
    assert scales["A2, batch 8", "exact softmax, per token", "us to quantize"].text == "needs a GPU"


def test_operands_of_a_model_name_their_layer(script, tmp_path):
    arguments = [
        "--device",
        "cpu",
        "--draws",
        "1",
        "--tables",
        "4",
        "--methods",
        "qvit_high",
        "--output",
        str(tmp_path),
    ]
    assert script.main([*arguments, "--capture-from", "demo_swin", "configs/weights/none.safetensors"]) == 2
    assert script.main([*arguments, "--capture-from", "demo_swin"]) == 0
    found = [row for row in rows_of(script, tmp_path, "4").values() if row.case.startswith("demo_swin")]
    assert {row.quantity for row in found} == {"SQNR dB", "MSE"}
    assert all(row.setting.startswith("layers.0.blocks.3.attn, 4 pictures of demo") for row in found)
    assert all(row.setting.endswith("its bias left out") for row in found)


REPORT = {
    "checkpoint": "weights.safetensors",
    "data": {"pictures": 8, "source": "demo (val)"},
    "attention": [{"layer": "a", "heads": 2, "tokens": 10, "head_dim": 8}],
    "results": {
        name: {"top1": 90.0, "agreement": 99.0, "sqnr_db": None if name == "fp32" else 30.0}
        for name in ("fp32", "qflash", "qvit_standard", "i_bert")
    },
}


def test_table_5_counts_and_names_what_runs(script, tmp_path, monkeypatch):
    options = []
    monkeypatch.setattr(script, "run_evaluation", lambda *given: options.append(given[0]) or REPORT)
    methods = ("qflash", "qvit_standard", "i_bert")
    arguments = ("--tables", "5", "--models", "deit_tiny", "--checkpoint", "x.pth", "--max-samples", "8")
    assert measure(script, tmp_path, *arguments, "--methods", *methods) == 0
    assert options[0].limit == 8 and options[0].checkpoint == "x.pth"
    assert set(options[0].settings) == {"qflash", "qvit_standard"} and set(options[0].cores) == {"i_bert"}
    rows = rows_of(script, tmp_path, "5")
    assert rows["deit_tiny", "fp32", "G BOPs"].value == pytest.approx(2 * 2 * 100 * 8 * 32 * 32 / 1e9)
    assert rows["deit_tiny", "qflash", "G BOPs"].value == pytest.approx(2 * METHODS["qflash"].bops(10, 8) / 1e9)
    assert rows["deit_tiny", "qflash", "Top-1 %"].value == 90
    assert rows["deit_tiny", "qflash", "Top-1 %"].paper == 71.70
    assert rows["deit_tiny", "fp32", "logit SQNR dB"].cell == ""
    assert rows["deit_tiny", "qflash", "integer-only"].text == "yes"
    assert rows["deit_tiny", "fp32", "integer-only"].text == "no"


def test_table_5_is_the_evaluation(script, tmp_path):
    methods = ("--methods", "flash_attention_2", "qvit_high")
    assert measure(script, tmp_path, "--tables", "5", "--models", "demo_deit", "--max-samples", "64", *methods) == 0
    rows = rows_of(script, tmp_path, "5")
    assert {key[1] for key in rows} == {"fp32", "flash_attention_2", "qvit_high"}
    assert rows["demo_deit", "flash_attention_2", "agreement %"].value == 100
    assert rows["demo_deit", "qvit_high", "logit SQNR dB"].value > 40


# The paper's figures.


def test_every_figure_of_the_paper_has_a_row_beside_it(small, tmp_path):
    measure(small, tmp_path, "--tables", "fig3", "2", "3", "4", "ablation")
    for (table, *key), figure in FIGURES.items():
        if table == "5":
            model, method, _ = key
            assert (ROOT / "configs" / f"{model}.yaml").is_file() and method in {*METHODS, "fp32"}
        else:
            row = rows_of(small, tmp_path, table)[tuple(key)]
            assert (row.paper, row.source) == figure
    unknown = rows_of(small, tmp_path, "4")["A2 uniform", "i_bert", "SQNR dB"]
    assert unknown.paper is None and unknown.source == ""


def test_the_paper_is_a_column_only_where_it_is_known(small, tmp_path):
    measure(small, tmp_path, "--tables", "4")
    header, *lines = small.cells_of(small.TABLES["4"], list(rows_of(small, tmp_path, "4").values()))
    assert header[:4] == ["case", "method", "SQNR dB", "paper: SQNR dB"] and "paper: MSE" not in header
    assert [line[3] for line in lines if line[:2] == ["A2 uniform", METHODS["qflash"].title]] == ["32.50"]


# What is measured on a GPU, without one.


class FakeTimer:
    """Microseconds that are given; the first call of each method runs."""

    times: dict[str, float] = {}

    def __init__(self, rounds, seconds) -> None:
        self.names = []

    def add(self, name, calls) -> None:
        if self.times[name] is None:
            raise RuntimeError("no such instruction\nand more")
        self.names.append(name)

    def run(self) -> dict:
        timings = {name: Timing(self.times[name], 0, 0) for name in self.names}
        return {name: Measurement(timing, timing) for name, timing in timings.items()}


@pytest.fixture
def with_gpu(small, monkeypatch):
    """The script as if it had a GPU."""
    monkeypatch.setattr(small.Session, "on_gpu", True)
    monkeypatch.setattr(small, "TurnTimer", FakeTimer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(small, "timed_calls", lambda session, workload, batch, methods: {m: [] for m in methods})
    return small


def test_speed_ups_are_over_i_vit_and_the_best_of_a_family_is_the_largest(with_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeTimer, "times", {"i_vit": 100.0, "qflash": 20.0, "qvit_standard": 5.0, "qvit_high": None})
    methods = ("--methods", "i_vit", "qflash", "qvit_standard", "qvit_high", "i_bert")
    assert measure(with_gpu, tmp_path, "--tables", "fig3", "--batches", "8", *methods) == 0
    rows = rows_of(with_gpu, tmp_path, "fig3")
    best = rows["best of A1-A3, batch 8", "qflash", with_gpu.SPEED_UP]
    assert best.value == 5 and best.paper == 6.73
    assert rows["A2, batch 8", "qvit_standard", with_gpu.SPEED_UP].value == 20
    assert rows["A2, batch 8", "qvit_high", "us"].text == "failed: no such instruction"
    assert rows["A2, batch 8", "i_bert", with_gpu.SPEED_UP].text == "no kernel"
    assert (tmp_path / "paper_fig3.png").exists()


def test_counters_become_cells_or_reasons(with_gpu, tmp_path, monkeypatch):
    commands = []

    def profile(command, actions):
        commands.append(command)
        return [{"IMMA %": 8.5, "HMMA %": 0.0}] * (actions - 1) + [{}]

    energies = {"flash_attention_2": counters.Energy(1000, 600), "qvit_standard": counters.Energy(700, 300)}
    monkeypatch.setattr(counters, "profile", profile)
    monkeypatch.setattr(with_gpu, "measure_energies", lambda session: energies | {"i_vit": "no NVML"})
    methods = ("--methods", "flash_attention_2", "qvit_standard", "i_vit")
    assert measure(with_gpu, tmp_path, "--tables", "2", "3", *methods) == 0
    rows = rows_of(with_gpu, tmp_path, "2")
    assert len(commands) == 1 and set(methods) <= set(commands[0])  # one process counts all
    assert rows["A7, batch 8", "qvit_standard", "IMMA %"].value == 8.5
    assert rows["A7, batch 8", "i_vit", "HMMA %"].text == "failed"
    rows = rows_of(with_gpu, tmp_path, "3")
    assert rows["A2, batch 8", "qvit_standard", "of FlashAttention-2"].value == 0.7
    assert rows["A2, batch 8", "qvit_standard", "uJ above idle"].value == 300
    assert rows["A2, batch 8", "i_vit", "of FlashAttention-2"].text == "no NVML"


def test_no_counters_are_a_reason(with_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert measure(with_gpu, tmp_path, "--tables", "2") == 0
    assert {row.text for row in rows_of(with_gpu, tmp_path, "2").values()} == {"no ncu"}


def test_calls_are_profiled_one_behind_the_other(small, tmp_path, monkeypatch, capsys):
    """A mark before each call; one of a method that fails does nothing, and the others keep their places."""
    log = []

    def prepare(name, fails=False):
        def call():
            log.append(name)
            if fails:
                raise BackendError("no such instruction")

        return lambda *operands: call

    for name in ("qflash", "qvit_high"):
        broken = dataclasses.replace(METHODS[name], prepare=prepare(name, name == "qflash"))
        monkeypatch.setitem(small.METHODS, name, broken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", log.clear)
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("stop"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("mark"))
    assert measure(small, tmp_path, "--tables", "2", "--profiled", "--methods", "i_bert", "qflash", "qvit_high") == 0
    assert log == ["mark", "mark", "qvit_high"] * 2 + ["stop"]
    assert capsys.readouterr().err.count("no such instruction") == 2


PROFILE = """==PROF== Connected to process 1
some output of the program
"ID","Kernel Name","gpu__time_duration.sum","{imma}","{hmma}"
"","","ns","%","%"
"0","at::cuda::<unnamed>::spin_kernel(long)","50","0","0"
"1","a","1,000","30","0"
"2","b","3000","10","4"
"3","at::cuda::<unnamed>::spin_kernel(long)","50","0","0"
"4","at::cuda::<unnamed>::spin_kernel(long)","50","0","0"
"5","a","10","7","0"
"""


def test_a_profile_has_parts_weighted_by_time(monkeypatch):
    (imma,), (hmma, other) = counters.TENSOR_METRICS.values()
    expected = [{"IMMA %": 15, "HMMA %": 3}, {}, {"IMMA %": 7, "HMMA %": 0}]
    assert counters.read_profile(PROFILE.format(imma=imma, hmma=hmma)) == expected
    assert counters.read_profile(PROFILE.format(imma=imma, hmma=other)) == expected
    with pytest.raises(BackendError, match="among .*another_tensor_metric"):
        counters.read_profile(PROFILE.format(imma=imma, hmma="another_tensor_metric"))
    with pytest.raises(BackendError, match="no permission"):
        counters.read_profile("==ERROR== no permission to read\n")
    with pytest.raises(BackendError, match="no kernel"):
        counters.read_profile("")


@pytest.mark.parametrize(("status", "calls", "words"), [(0, 3, None), (0, 4, "3 of 4 calls"), (1, 3, "status 1: lost")])
def test_a_profile_that_lacks_calls_or_was_broken_off_is_a_reason(status, calls, words, monkeypatch):
    text = PROFILE.format(imma=counters.TENSOR_METRICS["IMMA %"][0], hmma=counters.TENSOR_METRICS["HMMA %"][0])
    run = subprocess.CompletedProcess([], status, stdout=text, stderr="lost the device")
    monkeypatch.setattr(counters.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", lambda *arguments, **options: run)
    if words is None:
        assert len(counters.profile(["true"], calls)) == 3
    else:
        with pytest.raises(BackendError, match=words):
            counters.profile(["true"], calls)


def test_a_profile_that_hangs_is_a_reason(monkeypatch):
    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired("ncu", options["timeout"])

    monkeypatch.setattr(counters.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", hang)
    with pytest.raises(BackendError, match="more than 5 s"):
        counters.profile(["true"], 1, timeout=5)


def test_energy_is_counted_per_call_with_and_without_idle(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(counters.time, "perf_counter", lambda: clock["now"])
    counter = type("Counter", (), {"read": lambda self: 300 * clock["now"]})()  # 300 W

    def action() -> None:
        clock["now"] += 0.002  # two calls

    energy = counters.measure_energy(counter, action, 2, 1.0, idle=100.0)
    assert energy.total == pytest.approx(300e3) and energy.above_idle == pytest.approx(200e3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without NVML")
def test_no_energy_counter_without_nvml():
    with pytest.raises(BackendError):
        counters.EnergyCounter()


# The gate and negative controls.


def test_a_broken_method_shows_in_table_4(small, tmp_path, monkeypatch):
    broken = dataclasses.replace(METHODS["qflash"], attention=uniform_softmax)
    monkeypatch.setitem(small.METHODS, "qflash", broken)
    assert measure(small, tmp_path, "--tables", "4") == 0
    rows = rows_of(small, tmp_path, "4")
    low = rows["A2 uniform", "qflash", "SQNR dB"].value
    assert low < 10 < rows["A2 uniform", "qflash_text", "SQNR dB"].value


def test_the_product_under_its_floor_fails_after_the_rows_are_written(small, tmp_path, monkeypatch, capsys):
    broken = dataclasses.replace(METHODS["qvit_high"], attention=uniform_softmax)
    monkeypatch.setitem(small.METHODS, "qvit_high", broken)
    assert measure(small, tmp_path, "--tables", "4") == 1
    assert "qvit_high on A2 uniform" in capsys.readouterr().err
    assert small.file_of(tmp_path, "4").exists()


def test_a_method_that_refuses_says_so(small, tmp_path, monkeypatch):
    def refuse(*operands):
        raise BackendError("not this shape")

    session = small.Session(small.parse_arguments(["--device", "cpu"]), "4")
    operands = small.draw(small.WORKLOADS["A2"], 1, "uniform", session)
    rows = list(small.judge(session, operands, "qattn", refuse, operands.q.double()))
    assert [row.cell for row in rows] == ["not this shape"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tables", "6"], "invalid choice"),
        (["--methods", "nothing"], "invalid choice"),
        (["--tables", "fig3", "--methods", "qflash"], "are to i_vit: name it in --methods"),
        (["--tables", "3", "--methods", "qflash"], "are to flash_attention_2: name it in --methods"),
        (["--device", "cuda:1"], "cpu or cuda"),
        (["--device", "cuda"], "use --device cpu"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--max-samples", "0"], "at least 1"),
        (["--draws", "-3"], "at least 1"),
        (["--energy-seconds", "0"], "above 0"),
        (["--checkpoint", "x.safetensors"], "name it with --models"),
    ],
)
def test_arguments_are_refused(script, usage_error, arguments, message):
    assert message in usage_error(script, arguments)


@pytest.mark.parametrize("name", ["no_such_model", "no_such_file.safetensors"])
def test_a_model_that_is_not_there(script, tmp_path, capsys, name):
    arguments = ["--device", "cpu", "--draws", "1", "--tables", "4", "--output", str(tmp_path), "--capture-from", name]
    assert script.main(arguments) == 2
    assert name.split(".")[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Files.


def test_what_was_not_measured_does_not_replace_what_was(script):
    session = script.Session(script.parse_arguments(["--device", "cpu"]), "fig3")
    old = [session.row("A1", m, "us", x) for m, x in (("i_vit", 5.0), ("gone", 1.0))] + [
        session.row("A9", "x", "us", 2.0)
    ]
    new = [session.row("A1", "i_vit", "us", "needs a GPU"), session.row("A1", "qflash", "us", "needs a GPU")]
    merged = {row.key: row.cell for row in script.merge(old, new)}
    assert merged == {("A9", "x", "us"): "2", ("A1", "i_vit", "us"): "5", ("A1", "qflash", "us"): "needs a GPU"}


def test_an_unwritable_output(small, tmp_path):
    (tmp_path / "file").write_text("")
    assert measure(small, tmp_path / "file", "--tables", "1") == 2


@pytest.mark.parametrize(
    "value", [(3.0, "3"), (32.456, "32.46"), (0.000943, "0.000943"), (2e9, "2e+09"), (-0.05, "-0.05")]
)
def test_numbers_for_people(script, value):
    assert script.format_number(value[0]) == value[1]


# The page.


def test_the_recorded_page_is_of_the_recorded_files(script):
    recorded = script.PAGE.read_text(encoding="utf-8")
    assert recorded == script.make_page(script.RESULTS, script.PAGE)


def test_the_recorded_tables_show_what_they_have_to(script):
    rows = rows_of(script, script.RESULTS, "4")
    script.check_floors(rows.values())
    for worse in (float("nan"), 20.0):
        key = ("A2 uniform", "qvit_high", script.MEDIAN)
        with pytest.raises(script.MismatchError, match="qvit_high on A2 uniform"):
            script.check_floors([dataclasses.replace(rows[key], value=worse)])
    assert abs(rows["A2 uniform", "qflash", "SQNR dB"].value - 32.50) < 0.5
    assert abs(rows["A2 uniform", "int_flash_half", "SQNR dB"].value - 38.19) < 0.5
    assert rows["A2 uniform", "qflash_text", "SQNR dB"].value < rows["A2 uniform", "qflash", "SQNR dB"].value


def test_the_page_says_what_the_files_say(small, tmp_path):
    page = tmp_path / "page.md"
    assert small.main(["--output", str(tmp_path), "--page", str(page)]) == 2  # nothing there yet
    measure(small, tmp_path, "--tables", "1", "fig3", "4")
    assert small.main(["--output", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    row = rows_of(small, tmp_path, "4")["A2 uniform", "qflash", "SQNR dB"]
    assert f"| A2 uniform | {METHODS['qflash'].title} | {row.cell} | 32.50 |" in text
    assert "Not measured yet: no kernel, needs a GPU" in text and "--tables fig3 --device cuda" in text
    assert "![Table 4" in text and "paper_table4.png" in text and "paper_table1.png" not in text
    assert "The challenges." not in text, "a sentence whose numbers are missing"
    file = small.file_of(tmp_path, "4")
    file.write_text(file.read_text().replace(f",{row.value},", ",12.34,"))
    assert "| 12.34 | 32.50 |" in small.make_page(tmp_path, page)


def test_no_other_csv_makes_a_page(script, tmp_path):
    script.file_of(tmp_path, "4").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no CSV file of this benchmark"):
        script.make_page(tmp_path, tmp_path / "page.md")


# Cores of models.


def exact(q, k, v, softmax_scale, bias=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax_scale)


@pytest.mark.parametrize("name", ["demo_deit", "demo_swin"])
def test_a_replaced_core_is_what_the_model_computes_with(name):
    model, images, _ = runner.load_sample(name, ROOT / "configs", None, 8)
    with torch.no_grad():
        logits = model(images)
        quantized = qvit.quantize(deepcopy(model), [images])
        same = cores.replace_core(deepcopy(quantized), exact)(images)
        scaled = cores.replace_core(deepcopy(quantized), lambda q, k, v, s, bias=None: exact(q, k, v, 1.5 * s, bias))
        assert sqnr_db(logits, same) > 100
        assert sqnr_db(logits, scaled(images)) < 40, "the control: another attention gives other logits"
        assert torch.equal(qvit.restore(quantized)(images), logits), "the original is untouched"


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_every_definition_has_the_bias(method):
    q, k, v = torch.randn(3, 4, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(1))
    bias[:, :, :8, 8:] -= 100  # as Swin keeps windows' parts apart
    result = method.attention(q, k, v, 0.25, bias)
    far = v.clone()
    far[:, :, 8:] = -far[:, :, 8:]
    assert torch.equal(method.attention(q, k, far, 0.25, bias)[:, :, :8], result[:, :, :8]), "a masked key counts"
    floor = 8 if method.name in ("fq_vit", "qflash", "qflash_text") else 15
    assert sqnr_db(exact(q, k, v, 0.25, bias), result) > floor
    assert sqnr_db(exact(q, k, v, 0.25, bias), method.attention(q, k, v, 0.25)) < 5, "the control: it matters"


def test_a_bool_mask_becomes_a_bias():
    mask = torch.tensor([[[[True, False]]]])
    assert cores._additive(mask, 2).tolist() == [[[[0, -torch.inf]]]] * 2


# Studies.


def test_the_last_step_of_the_ablation_is_close_to_the_one_before():
    q, k, v = torch.rand(3, 1, 2, 130, 32, generator=torch.Generator().manual_seed(0)) * 8 - 4
    reference = studies.exact_attention(q, k, v, 32**-0.5)
    steps = [
        studies.partly_integer_attention(q, k, v, 32**-0.5),
        studies.partly_integer_attention(q, k, v, 32**-0.5, int8_values=True),
        studies.partly_integer_attention(q, k, v, 32**-0.5, int8_values=True, integer_exponent=True),
        METHODS["qflash"].attention(q, k, v, 32**-0.5),
    ]
    found = [sqnr_db(reference, step) for step in steps]
    assert found == sorted(found, reverse=True) and found[-1] > 30


def test_the_released_accumulator_is_the_reference():
    q, k, v = torch.rand(3, 1, 2, 130, 32, generator=torch.Generator().manual_seed(1)) * 8 - 4
    states = studies.accumulator_over_tiles(q, k, v, 32**-0.5, release=True)
    expected = sqnr_db(studies.exact_attention(q, k, v, 32**-0.5), METHODS["qflash"].attention(q, k, v, 32**-0.5))
    assert len(states) == 3 and states[-1].sqnr_db >= expected > states[-1].sqnr_db - 3  # which rounds its output


@pytest.mark.parametrize("granularity", list(studies.GRANULARITIES))
def test_finer_scales_hold_outliers(granularity):
    q, k, v = torch.randn(3, 2, 2, 20, 16, generator=torch.Generator().manual_seed(0))
    k[:, 0] *= 100
    integers, scale = studies.quantize(k, granularity)
    assert integers.abs().amax() == 127 and scale.dtype == torch.float32
    shape = {"tensor": (1, 1, 1, 1), "head": (1, 2, 1, 1), "token": (2, 2, 20, 1)}
    assert scale.shape == shape[granularity]
    quiet = (integers[:, 1] * scale[:, min(1, scale.shape[1] - 1)] - k[:, 1]).abs().max()
    assert (quiet < 0.05) == (granularity != "tensor")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize("operation", ["multiply-add", "shift", "scale release"])
def test_a_chain_is_what_it_says(operation):
    from qvit.kernels import costs

    x = torch.arange(8, dtype=torch.int32)
    out = torch.empty_like(x)
    costs.chain_kernel[(2,)](x, out, 3, OPERATION=operation, LENGTH=2, BLOCK=4)
    expected = x.long()
    for link in range(2):
        expected = expected * 3 + link
        expected = {"shift": expected >> 3, "scale release": (expected * 3 + (1 << 29)) >> 30}.get(operation, expected)
    assert out.tolist() == expected.tolist()
