"""The two evaluation scripts from the command line to the JSON file, on the embedded demo and on made-up data."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import qvit
from qvit.evaluation import runner
from qvit.evaluation.accuracy import Comparison
from qvit.patches.base import QuantizedModule

ROOT = Path(__file__).resolve().parent.parent
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
MAX_DROP = "0.5"


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script("eval_imagenet")


def make_checkpoint(path: Path, num_classes: int = 4, metadata: dict | None = None, **changes) -> Path:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=num_classes, **{**TINY, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_file(model.state_dict(), path, metadata)
    return path


def make_folder(root: Path, names: tuple[str, ...] = ("ant", "bee", "cat", "dog"), count: int = 6) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments for an untrained tiny DeiT on a made-up ImageFolder of 24 pictures."""
    kwargs = json.dumps({**TINY, "num_classes": 4})
    (tmp_path / "tiny.yaml").write_text(f"model: deit_tiny_patch16_224\nkwargs: {kwargs}\nexpected_swapped: 2\n")
    checkpoint = make_checkpoint(tmp_path / "tiny.safetensors")
    data = make_folder(tmp_path / "data")
    arguments = {"--model": tmp_path / "tiny.yaml", "--checkpoint": checkpoint, "--data": data, "--device": "cpu"}
    return [str(part) for pair in arguments.items() for part in pair]


def refused(script, capsys, arguments: list[str]) -> str:
    """Run the script, expect exit status 2 with one paragraph on stderr, and return the message."""
    assert script.main(arguments) == 2
    message = capsys.readouterr().err.split("error: ")[-1]
    assert "Traceback" not in message and message.count("\n") == 1
    return message


def test_a_run_reports_everything(script, tiny, tmp_path, capsys) -> None:
    output = tmp_path / "results.json"
    assert script.main([*tiny, "--output", str(output), "--batch-size", "4", "--workers", "0"]) == 0
    report = json.loads(output.read_text())
    assert list(report["results"]) == ["fp32", "quantized"]
    assert report["baseline"] == "fp32"
    row = report["results"]["quantized"]
    assert set(row) == {
        "top1", "top5", "agreement", "agreement_interval", "lost", "won", "drop", "sqnr_db", "images_per_second",
    }  # fmt: skip
    assert row["sqnr_db"] > 20
    assert row["images_per_second"] > 0
    assert report["results"]["fp32"]["agreement"] == 100
    assert report["modules"]["quantized"] == {"swapped": 2, "total": 2}
    # no training split beside the folder: a quarter of the pictures calibrates and is not evaluated
    assert report["calibration"]["pictures"] == 6 and report["calibration"]["left_out_of_the_evaluation"]
    assert report["data"]["pictures"] == 18
    assert report["data"]["input_size"] == [3, 32, 32]
    assert "Resize" in report["data"]["transform"]
    assert {"torch", "timm", "triton", "qvit", "python"} <= set(report["versions"])
    assert report["gpu"] is None
    assert not report["gates"]["quantized"]["drop"]["enforced"] and report["passed"]
    printed = capsys.readouterr().out
    assert "2/2 attention modules swapped" in printed
    assert "warning: a drop is hard to see" in printed


def test_pictures_that_cannot_be_read_are_counted_and_named(script, tiny, tmp_path, capsys) -> None:
    output, folder = tmp_path / "results.json", tmp_path / "data"
    victims = sorted(folder.rglob("*.png"))[4:6]
    for victim in victims:
        victim.write_bytes(b"")
    calib = make_folder(tmp_path / "calib", count=5)
    sorted(calib.rglob("*.png"))[0].write_bytes(b"")
    arguments = [*tiny, "--calib", str(calib), "--output", str(output)]
    assert script.main(arguments) == 0
    report = json.loads(output.read_text())
    assert report["data"]["pictures"] == 22 and report["results"]["fp32"]["agreement"] == 100
    assert [str(victim) in line for victim, line in zip(victims, report["data"]["unreadable"], strict=True)] == [
        True
    ] * 2
    assert report["calibration"]["pictures"] == 19 and len(report["calibration"]["unreadable"]) == 1
    assert f"warning: 3 pictures left out, the first: cannot read the picture {victims[0]}" in capsys.readouterr().out
    assert "cannot read the picture" in refused(script, capsys, [*arguments, "--strict-data"])


def test_precision_arithmetic_and_calibration_reach_the_quantization(script, tiny, tmp_path) -> None:
    output, calib = tmp_path / "results.json", make_folder(tmp_path / "calib", count=20)
    arguments = ["--precision", "high", "--calib", str(calib), "--calib-batches", "2", "--output", str(output)]
    assert script.main([*tiny, *arguments]) == 0
    high = json.loads(output.read_text())
    assert high["quantization"]["quantized"]["precision"] == "high"
    assert high["quantization"]["quantized"]["calibration"]["batches"] == 2
    assert high["calibration"] == {
        "source": str(calib), "pictures": 64, "batch_size": 32, "left_out_of_the_evaluation": False,
        "unreadable": [],
    }  # fmt: skip
    assert high["data"]["pictures"] == 24
    assert script.main([*tiny, "--arithmetic", "paper", "--output", str(output)]) == 0
    paper = json.loads(output.read_text())
    assert paper["quantization"]["quantized"]["arithmetic"] == "paper"
    assert paper["results"]["quantized"]["sqnr_db"] != high["results"]["quantized"]["sqnr_db"]


def test_transform_changes_the_data_settings(script, tiny, tmp_path, capsys) -> None:
    output = tmp_path / "results.json"
    assert script.main([*tiny, "--transform", "antialias: false, crop_pct: 1.0", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["data"]["transform"].startswith("TensorTransform(size=32")
    assert "'antialiased'" in refused(script, capsys, [*tiny, "--transform", "antialiased: false"])


def test_limit_is_spread_over_the_classes(script, tiny, tmp_path) -> None:
    output = tmp_path / "results.json"
    assert script.main([*tiny, "--limit", "9", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["data"]["pictures"] == 9


def test_nothing_swapped_fails(script, tiny, capsys, monkeypatch) -> None:
    monkeypatch.setattr(qvit, "quantize", lambda model, *_: model)
    assert "0 of 2 attention modules were swapped" in refused(script, capsys, tiny)


def test_fewer_swapped_than_expected_fails(script, tiny, tmp_path, capsys) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(path.read_text() + "quantization: {exclude: ['blocks.1.*']}\n")
    assert "1 of 2 attention modules were swapped, the configuration expects 2" in refused(script, capsys, tiny)


def test_min_sqnr_is_a_gate(script, tiny) -> None:
    assert script.main([*tiny, "--min-sqnr", "20"]) == 0
    assert script.main([*tiny, "--min-sqnr", "90"]) == 1


def test_the_yaml_gates_are_for_information_until_max_drop_is_given(script, tiny, tmp_path, capsys) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(path.read_text() + "min_sqnr: 90\n")
    assert script.main(tiny) == 0
    assert "fail (for information)" in capsys.readouterr().out
    assert script.main([*tiny, "--max-drop", "100"]) == 1
    assert "FAIL: logit SQNR" in capsys.readouterr().out
    assert script.main([*tiny, "--max-drop", "100", "--min-sqnr", "10"]) == 0


def test_max_drop_is_a_gate(script, tiny, monkeypatch) -> None:
    monkeypatch.setattr(runner, "compare", lambda *_: Comparison(50.0, (40.0, 60.0), 9, 0, 50.0, 40.0))
    assert script.main([*tiny, "--max-drop", "0.5"]) == 1  # 9 against 0.1 + 4.95
    assert script.main([*tiny, "--max-drop", "50"]) == 0
    assert script.main(tiny) == 0


def test_data_with_other_classes_is_refused(script, tiny, tmp_path, capsys) -> None:
    data = make_folder(tmp_path / "three", ("ant", "bee", "cat"))
    assert "3 classes, the model 4" in refused(script, capsys, [*tiny, "--data", str(data)])


def test_a_checkpoint_brings_its_classes_and_size(script, tiny, tmp_path) -> None:
    data = make_folder(tmp_path / "three", ("ant", "bee", "cat"))
    metadata = {"num_classes": "3", "img_size": "64", "architecture": "deit_tiny_patch16_224"}
    checkpoint = make_checkpoint(tmp_path / "three.safetensors", 3, metadata, img_size=64)
    output = tmp_path / "results.json"
    arguments = ["--data", str(data), "--checkpoint", str(checkpoint), "--output", str(output)]
    assert script.main([*tiny, *arguments]) == 0
    report = json.loads(output.read_text())
    assert (report["data"]["classes"], report["data"]["input_size"]) == (3, [3, 64, 64])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_pickled_checkpoint(script, tiny, tmp_path, wrapped: bool, prefix: str) -> None:
    """Also of a model in DistributedDataParallel, or compiled."""
    from safetensors.torch import load_file

    state = {prefix + key: value for key, value in load_file(tmp_path / "tiny.safetensors").items()}
    torch.save({"model": state} if wrapped else state, tmp_path / "tiny.pth")
    assert script.main([*tiny, "--checkpoint", str(tmp_path / "tiny.pth")]) == 0


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_checkpoint_without_metadata_has_the_classes_of_its_weights(script, tiny, tmp_path, suffix) -> None:
    """Of any fine-tuned model, with a configuration that says nothing of classes."""
    (tmp_path / "tiny.yaml").write_text(f"model: deit_tiny_patch16_224\nkwargs: {json.dumps(TINY)}\n")
    data = make_folder(tmp_path / "three", ("ant", "bee", "cat"))
    path = make_checkpoint(tmp_path / "three.safetensors", 3)
    if suffix == ".pth":
        from safetensors.torch import load_file

        torch.save(load_file(path), path := tmp_path / "three.pth")
    assert script.main([*tiny, "--data", str(data), "--checkpoint", str(path)]) == 0


class Payload:
    pass


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.safetensors", None, "no checkpoint"),
        ("x.onnx", b"", "neither"),
        ("x.safetensors", b"nothing", "damaged"),
        ("x.pth", b"nothing", "cannot read the weights"),
        ("code.pth", Payload(), "cannot read the weights"),
        ("list.pth", [1, 2], "no state dict"),
    ],
)
def test_bad_checkpoints(script, tiny, tmp_path, capsys, name, content, message) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert message in refused(script, capsys, [*tiny, "--checkpoint", str(path)])


def test_a_checkpoint_of_another_model(script, tiny, tmp_path, capsys) -> None:
    wide = make_checkpoint(tmp_path / "wide.safetensors", embed_dim=64)
    assert "does not fit" in refused(script, capsys, [*tiny, "--checkpoint", str(wide)])
    named = make_checkpoint(tmp_path / "named.safetensors", metadata={"architecture": "vit_small_patch16_224"})
    assert "holds a vit_small_patch16_224" in refused(script, capsys, [*tiny, "--checkpoint", str(named)])


def test_a_broken_picture_stops_the_run(script, tiny, tmp_path, capsys) -> None:
    broken = tmp_path / "data" / "bee" / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    assert "bee/3.png" in refused(script, capsys, [*tiny, "--strict-data"])


def test_no_gpu_is_said(script, tiny, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in refused(script, capsys, [*tiny, "--device", "cuda"])


@pytest.mark.parametrize(
    "option, value",
    [
        *(("--limit", "0"), ("--batch-size", "-1"), ("--workers", "-1"), ("--device", "tpu"), ("--device", "cpu:0")),
        *(("--max-drop", "nan"), ("--max-drop", "inf"), ("--min-sqnr", "nan")),
    ],
)
def test_options_out_of_range(script, tiny, capsys, option, value) -> None:
    assert value in refused(script, capsys, [*tiny, option, value])


@pytest.mark.parametrize("spelling", ["{}/", "{}/../{name}", "{}"])
def test_pictures_that_calibrate_are_left_out_however_they_are_named(script, tiny, tmp_path, spelling) -> None:
    data, output = tmp_path / "data", tmp_path / "results.json"
    calib = spelling.format(data, name=data.name)
    assert script.main([*tiny, "--calib", calib, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert (report["data"]["pictures"], report["calibration"]["left_out_of_the_evaluation"]) == (18, True)


def test_calibration_pictures_of_which_none_can_be_read(script, tiny, tmp_path, capsys) -> None:
    calib = make_folder(tmp_path / "calib")
    for path in calib.rglob("*.png"):
        path.write_bytes(b"")
    assert "no picture of" in refused(script, capsys, [*tiny, "--calib", str(calib)])


def test_a_stream_that_says_its_length_has_to_give_as_many() -> None:
    class Stream:
        def __init__(self, count):
            self.count = count

        def __len__(self):
            if self.count is None:
                raise TypeError
            return self.count

    expected = {(100, None): 100, (100, 30): 30, (100, 300): 100, (None, 30): 30, (None, None): None}
    assert {(n, limit): runner._streamed(Stream(n), limit) for n, limit in expected} == expected


def test_an_unwritable_output_is_known_before_the_evaluation(script, tiny, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(script, "run_evaluation", lambda *_: pytest.fail("evaluated"))
    assert "cannot write" in refused(script, capsys, [*tiny, "--output", str(tmp_path / "no" / "x.json")])


def test_an_untrained_model_on_many_pictures_is_stopped(script, tmp_path, capsys) -> None:
    pytest.importorskip("sklearn")
    kwargs = json.dumps({**TINY, "num_classes": 10})
    (tmp_path / "tiny.yaml").write_text(f"model: deit_tiny_patch16_224\nkwargs: {kwargs}\ndata: {{source: demo}}\n")
    checkpoint = make_checkpoint(tmp_path / "tiny.safetensors", 10)
    arguments = ["--model", str(tmp_path / "tiny.yaml"), "--checkpoint", str(checkpoint), "--device", "cpu"]
    assert "another order" in refused(script, capsys, arguments)


def test_record_accuracy_compares_settings_side_by_side(tiny, tmp_path) -> None:
    output, calib = tmp_path / "record.json", make_folder(tmp_path / "calib", count=20)
    arguments = ["--calib", str(calib), "--output", str(output)]
    assert load_script("record_accuracy").main([*tiny, *arguments]) == 0
    report = json.loads(output.read_text())
    assert list(report["results"]) == ["fp32", "standard", "high", "paper"]
    sqnr = {name: row["sqnr_db"] for name, row in report["results"].items()}
    assert sqnr["fp32"] is None
    assert len({sqnr["standard"], sqnr["high"], sqnr["paper"]}) == 3
    assert report["gates"]["high"]["drop"]["max_drop"] == 0.1


def test_record_accuracy_needs_no_extra_library(tmp_path) -> None:
    """Machines for measurements have no `datasets` and no scikit-learn."""
    code = (
        "import sys\nsys.modules.update({'datasets': None, 'sklearn': None, 'pandas': None})\n"
        "import importlib.util as u\n"
        f"s = u.spec_from_file_location('r', {str(ROOT / 'scripts' / 'record_accuracy.py')!r})\n"
        "m = u.module_from_spec(s)\ns.loader.exec_module(m)\n"
        "from qvit.evaluation.data import open_source\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The demo: the evaluation that runs everywhere, and the proof that its gates can fail.


@pytest.fixture(params=["demo_deit", "demo_swin"])
def demo(request) -> str:
    pytest.importorskip("sklearn")
    return request.param


def demo_arguments(demo: str, output: Path) -> list[str]:
    return ["--model", demo, "--data", "demo", "--device", "cpu", "--output", str(output), "--max-drop", MAX_DROP]


def test_demo_passes_its_gates(script, demo, tmp_path) -> None:
    output = tmp_path / "results.json"
    assert script.main(demo_arguments(demo, output)) == 0
    report = json.loads(output.read_text())
    assert report["results"]["fp32"]["top1"] > 90
    assert report["results"]["quantized"]["agreement"] > 99
    assert report["calibration"]["source"] == "demo (train)"


@pytest.mark.parametrize("factor", [1.5, 1e-3], ids=["scale_times_1.5", "uniform_softmax"])
def test_demo_gates_catch_a_wrong_softmax(script, demo, tmp_path, monkeypatch, factor: float) -> None:
    scale = QuantizedModule.scale_of.__func__
    monkeypatch.setattr(QuantizedModule, "scale_of", classmethod(lambda cls, m: factor * scale(cls, m)))
    output = tmp_path / "results.json"
    assert script.main(demo_arguments(demo, output)) == 1
    gates = json.loads(output.read_text())["gates"]["quantized"]
    assert not gates["sqnr"]["passed"]
    if factor < 1:  # a scale that is wrong by a half costs these models too few pictures to be seen in the Top-1
        assert not gates["drop"]["passed"]
