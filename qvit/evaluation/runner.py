"""One evaluation from options to report: the float model and its quantized copies on the same pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import nn

import qvit
from qvit.errors import BackendError, CheckpointError, ConfigError, DataError, UnsupportedModuleError
from qvit.evaluation.accuracy import FEW_PICTURES, Comparison, Result, compare, drop_test, evaluate
from qvit.evaluation.config import DataSettings, ModelConfig, load_model_config, read_yaml
from qvit.evaluation.cores import Attention, capture_cores, replace_core
from qvit.evaluation.data import (
    DemoSource,
    HubSource,
    PictureLoader,
    Source,
    check_source,
    first_pictures,
    make_loader,
    open_source,
    spread,
    training_sibling,
)
from qvit.evaluation.models import build_model, load_weights, read_checkpoint
from qvit.evaluation.transforms import build_transform

CALIBRATION_BATCH = 32
SETTINGS = {
    "standard": {"arithmetic": "qvit", "precision": "standard"},
    "high": {"arithmetic": "qvit", "precision": "high"},
    "paper": {"arithmetic": "paper"},
    "paper_text": {"arithmetic": "paper_text"},
}


@dataclass(frozen=True)
class EvaluationOptions:
    """What one run evaluates.

    Attributes:
        model: Short name of a YAML in configs/, or the path of one.
        settings: Quantized models by name: changes to the YAML's `quantization` section.
        cores: More models by name: other definitions of the attention core, as :func:`replace_core` takes them.
        data: Source of the pictures, by default the YAML's.
        checkpoint: File of weights, by default the YAML's, or else timm's weights.
        device: "cuda" or "cpu".
        batch_size: Pictures in a batch.
        workers: Processes that decode pictures; None chooses.
        limit: Evaluate so many pictures, evenly spread over the set (of a stream: the first).
        streaming: Stream a Hub data set.
        calib: Source of calibration pictures; by default the training split that belongs to `data`, and without one
            a quarter of the pictures at most, which are then left out of the evaluation.
        calib_batches: Batches of 32 pictures for calibration, by default the configuration's.
        transform: YAML mapping that changes the `data` section, such as "antialias: false, crop_pct: 1.0".
        max_drop: Allowed drop of Top-1 in percentage points; None only reports the YAML's. Where it is given, the
            YAML's `min_sqnr` must hold as well: on a small set a real fault may cost few pictures, but many dB.
        min_sqnr: Required SQNR of the logits in dB, instead of the YAML's.
        strict_data: Stop at a picture that cannot be read; else it is left out, and the report counts and names it.
    """

    model: str
    settings: dict[str, dict] = field(default_factory=lambda: {"quantized": {}})
    cores: dict[str, Attention] = field(default_factory=dict)
    data: str | None = None
    checkpoint: str | None = None
    device: str = "cpu"
    batch_size: int = 64
    workers: int | None = None
    limit: int | None = None
    streaming: bool = False
    calib: str | None = None
    calib_batches: int | None = None
    transform: str | None = None
    max_drop: float | None = None
    min_sqnr: float | None = None
    strict_data: bool = False

    def __post_init__(self) -> None:
        for key in ("batch_size", "limit", "calib_batches"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key} must be at least 1, not {value}")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers must not be negative, not {self.workers}")
        for key in ("max_drop", "min_sqnr"):
            value = getattr(self, key)
            if value is not None and not isfinite(value):
                raise ConfigError(f"{key} must be a finite number, not {value}")
        if self.device == "cpu":
            return
        if self.device.split(":")[0] != "cuda":
            raise ConfigError(f"device must be cpu or cuda, not {self.device}")
        if not torch.cuda.is_available():
            raise BackendError("--device cuda, but torch sees no CUDA device here: use --device cpu")


_SHARED = (
    "model",
    "data",
    "checkpoint",
    "device",
    "batch_size",
    "workers",
    "limit",
    "calib",
    "max_drop",
    "strict_data",
)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every evaluating script has; :func:`shared_options` reads them back."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="short name of a YAML in configs/, or the path of one")
    parser.add_argument("--data", help="demo, a folder or file of parquet or arrow, an ImageFolder, or a Hub name")
    parser.add_argument("--checkpoint", help=".safetensors, .pth or .pt file instead of timm's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, help="processes that decode pictures")
    parser.add_argument("--limit", type=int, help="evaluate so many pictures, evenly spread over the set")
    parser.add_argument("--calib", help="source of calibration pictures; default: the training split beside --data")
    help_text = "allowed drop of Top-1 in points, by the paired test; with it, the YAML's min_sqnr counts too"
    parser.add_argument("--max-drop", type=float, help=help_text)
    parser.add_argument("--strict-data", action="store_true", help="stop at a picture that cannot be read")
    return parser


def shared_options(arguments: argparse.Namespace) -> dict:
    """Those of `EvaluationOptions` that :func:`argument_parser` asked for, by name."""
    return {name: getattr(arguments, name) for name in _SHARED}


def run_evaluation(options: EvaluationOptions, config_folder: Path) -> dict:
    """Evaluate the float model and its quantized copies; the report is JSON-safe.

    Args:
        options: What to evaluate.
        config_folder: Where the short model names are looked up.

    Raises:
        QvitError: The configuration, the data, the checkpoint or the quantization failed; the message says how.
    """
    start = time.perf_counter()
    config = _configure(options, config_folder)
    quantizations = {name: _quantization(config, changes, options) for name, changes in options.settings.items()}
    checkpoint = read_checkpoint(config.checkpoint) if config.checkpoint else None
    model = build_model(config, checkpoint)
    transform, resolved = build_transform(model, config.data)
    # Everything about the data that can be wrong is known before weights are downloaded or a picture is decoded.
    source = open_source(config.data.source, streaming=options.streaming)
    check_source(source, model.num_classes, limited=options.limit is not None)
    pictures = CALIBRATION_BATCH * max(q.calibration.batches for q in quantizations.values())
    split = _split(source, options, config.data.source, pictures)
    calibration_loader = _calibration_loader(split, transform, options.strict_data)
    calibration = list(first_pictures(calibration_loader, split.description["pictures"]))
    if not calibration:
        raise DataError(f"no picture of {split.calibration.name} could be read, so that nothing calibrates the model")
    model = load_weights(model, config, checkpoint)
    shapes = _shapes(model, calibration)
    models, reports = _models(model, quantizations, calibration, options.device, config.expected_swapped)
    floats = [name for name in models if name not in quantizations]
    models |= _with_cores(models[next(iter(quantizations))], options.cores)

    workers = _workers(options, source)
    loader = make_loader(
        source,
        transform,
        split.indices,
        batch_size=options.batch_size,
        workers=workers,
        pin_memory=options.device != "cpu",
        strict=options.strict_data,
    )
    baseline = floats[-1]
    total = _streamed(source, options.limit) if split.indices is None else len(split.indices)
    batches = first_pictures(loader, options.limit)
    results = evaluate(models, batches, options.device, baseline=baseline, total=total)
    count = results[baseline].count
    if total is not None and count + len(loader.unreadable) < total:
        raise DataError(f"{source.name} gave {count} pictures instead of {total}: the stream ended early, run again")

    comparisons = {name: compare(result, results[baseline]) for name, result in results.items()}
    gates = {name: _gates(comparisons[name], count, options, config) for name in quantizations}
    report = {
        "model": config.model,
        "checkpoint": _file_name(config.checkpoint),
        "config": {**config.to_dict(), "checkpoint": _file_name(config.checkpoint)},
        "quantization": {name: quantization.to_dict() for name, quantization in quantizations.items()},
        "data": {
            "source": source.name,
            "pictures": count,
            "classes": model.num_classes,
            "limit": options.limit,
            "unreadable": loader.unreadable,
            **resolved,
        },
        "calibration": {
            **split.description,
            "pictures": sum(len(labels) for _, labels in calibration),
            "unreadable": calibration_loader.unreadable,
        },
        "modules": reports,
        "attention": shapes,
        "baseline": baseline,
        "results": {name: _row(result, comparisons[name]) for name, result in results.items()},
        "gates": gates,
        "passed": all(gate["passed"] for gates_ in gates.values() for gate in gates_.values() if gate["enforced"]),
        "batch_size": options.batch_size,
        "workers": workers,
        "seconds": time.perf_counter() - start,
        **_environment(options.device),
    }
    return _json_safe(report)


def load_sample(name: str, folder: Path, data: str | None, pictures: int) -> tuple[nn.Module, torch.Tensor, str]:
    """A float model with its weights, and some pictures as it sees them.

    Args:
        name: A configuration, as `EvaluationOptions.model` names it, a file of weights whose metadata has the
            architecture, or a timm name.
        folder: Where the short names are looked up.
        data: Source of the pictures; by default the configuration's, and the embedded demo without one.
        pictures: How many.

    Returns:
        The model, the pictures (n, 3, S, S), and the name of their source, without its folder.

    Raises:
        QvitError: The model, its weights or the data cannot be had.
    """
    checkpoint = None
    if name.endswith((".safetensors", ".pth", ".pt")):
        checkpoint = read_checkpoint(name)
        if checkpoint.architecture is None:
            raise CheckpointError(f"{name} does not say its architecture: add it to the metadata")
        config = ModelConfig(checkpoint.architecture, data=DataSettings(source="demo"))
    elif name.endswith((".yaml", ".yml")) or (folder / f"{name}.yaml").is_file():
        config = load_model_config(name, folder)
        checkpoint = read_checkpoint(config.checkpoint) if config.checkpoint else None
    else:
        config = ModelConfig(name, data=DataSettings(source="demo"))
    model = build_model(config, checkpoint)
    transform, _ = build_transform(model, config.data)
    source = open_source(data or config.data.source)
    loader = make_loader(
        source, transform, spread(len(source), pictures), batch_size=pictures, workers=0, pin_memory=False
    )
    images, _ = next(iter(loader))
    return load_weights(model, config, checkpoint), images, Path(source.name).name


def _file_name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def _configure(options: EvaluationOptions, folder: Path) -> ModelConfig:
    config = load_model_config(options.model, folder)
    changes = {}
    if options.transform is not None:
        changes.update(read_yaml("{" + options.transform.strip().strip("{}") + "}", "--transform"))
    if options.data is not None:
        changes["source"] = options.data
    config = replace(config, data=config.data.override(changes))
    return config if options.checkpoint is None else replace(config, checkpoint=options.checkpoint)


def _quantization(config: ModelConfig, changes: dict, options: EvaluationOptions) -> qvit.QuantConfig:
    quantization = qvit.QuantConfig.from_dict({**config.quantization, **changes})
    if options.calib_batches is None:
        return quantization
    return replace(quantization, calibration=replace(quantization.calibration, batches=options.calib_batches))


@dataclass(frozen=True)
class _Split:
    """Which pictures are evaluated (None: a stream's) and which calibrate."""

    indices: np.ndarray | None
    calibration: Source
    calibration_indices: np.ndarray | None
    description: dict


def _streamed(source: Source, limit: int | None) -> int | None:
    """How many pictures a stream has to give, as far as that is known."""
    try:
        return min(len(source), limit or len(source))
    except TypeError:
        return limit


def _same(a: str, b: str) -> bool:
    """Whether two names are of one source, however a path is spelt."""
    paths = [Path(x).expanduser() for x in (a, b)]
    return a == b or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def _split(source: Source, options: EvaluationOptions, spec: str, wanted: int) -> _Split:
    if options.calib is None:
        calibration = training_sibling(spec)
    elif _same(options.calib, spec):
        calibration = None
    else:
        calibration = training_sibling(options.calib) or open_source(options.calib)
    streamed = isinstance(source, HubSource) and source.streaming
    evaluated = None if streamed else np.arange(len(source))
    held_out = calibration is None
    if held_out:
        if streamed:
            raise DataError(f"{source.name} is streamed and cannot give up pictures for calibration: give --calib")
        # Pictures that set the scales would be judged too kindly, so they are not judged.
        calibration, wanted = source, max(1, min(wanted, len(source) // 4))
        chosen = spread(len(source), wanted)
        evaluated = np.setdiff1d(evaluated, chosen)
    elif isinstance(calibration, HubSource) and calibration.streaming:
        chosen = None
    else:
        chosen = spread(len(calibration), wanted)
    if evaluated is not None and options.limit is not None:
        evaluated = evaluated[spread(len(evaluated), options.limit)]
    description = {
        "source": calibration.name,
        "pictures": wanted if chosen is None else len(chosen),
        "batch_size": CALIBRATION_BATCH,
        "left_out_of_the_evaluation": held_out,
    }
    return _Split(evaluated, calibration, chosen, description)


def _calibration_loader(split: _Split, transform: Callable, strict: bool) -> PictureLoader:
    return make_loader(
        split.calibration,
        transform,
        split.calibration_indices,
        batch_size=CALIBRATION_BATCH,
        workers=0,
        pin_memory=False,
        strict=strict,
    )


def _models(
    model: nn.Module, quantizations: dict[str, qvit.QuantConfig], calibration: list, device: str, expected: int
) -> tuple[dict[str, nn.Module], dict[str, dict]]:
    """The float models (FP32, and FP16 on a GPU) and the quantized copies of the last of them."""
    models = {"fp32": model.to(device)}
    if device != "cpu":
        models["fp16"] = deepcopy(model).half()
    host, reports = list(models.values())[-1], {}
    for name, quantization in quantizations.items():
        quantized = qvit.quantize(deepcopy(host), calibration, quantization)
        report = qvit.report(quantized)
        if report.swapped < max(1, expected):
            left = ", ".join(f"{row.name} ({row.reason})" for row in report.rows if row.status == "left")
            raise UnsupportedModuleError(
                f"{report.swapped} of {report.total} attention modules were swapped, the configuration expects "
                f"{expected}: this would not measure the quantized model. Left in float: {left or 'none known'}"
            )
        models[name], reports[name] = quantized, {"swapped": report.swapped, "total": report.total}
    return models, reports


def _shapes(model: nn.Module, calibration: list) -> list[dict]:
    """Name and shape of each attention core, for one picture; windows count as heads."""
    cores = capture_cores(model, calibration[0][0][:1])
    return [
        {"layer": x.layer, "heads": len(x.core.q) * x.core.q.shape[1], "tokens": x.core.q.shape[2],
         "head_dim": x.core.q.shape[3]}
        for x in cores
    ]  # fmt: skip


def _with_cores(quantized: nn.Module, cores: dict[str, Attention]) -> dict[str, nn.Module]:
    """Copies of a quantized model that attend by other definitions; they share its weights."""
    weights = {id(x): x for x in (*quantized.parameters(), *quantized.buffers())}
    return {name: replace_core(deepcopy(quantized, dict(weights)), attention) for name, attention in cores.items()}


def _workers(options: EvaluationOptions, source: Source) -> int:
    if options.workers is not None:
        return options.workers
    if isinstance(source, DemoSource):  # nothing to decode
        return 0
    cores = os.cpu_count() or 1
    return min(4, cores // 4) if options.device == "cpu" else min(16, cores)  # on a CPU the model needs the cores


def _gates(comparison: Comparison, count: int, options: EvaluationOptions, config: ModelConfig) -> dict:
    max_drop = config.allowed_drop if options.max_drop is None else options.max_drop
    drop = drop_test(comparison.lost, comparison.won, count, max_drop)
    enforced = options.max_drop is not None
    gates = {"drop": {**drop.to_dict(), "enforced": enforced}}
    min_sqnr = config.min_sqnr if options.min_sqnr is None else options.min_sqnr
    if min_sqnr is not None:
        passed = comparison.sqnr_db >= min_sqnr  # false for nan
        gates["sqnr"] = {"passed": passed, "min_sqnr": min_sqnr, "enforced": enforced or options.min_sqnr is not None}
    return gates


def _row(result: Result, comparison: Comparison) -> dict:
    return {
        "top1": result.top1,
        "top5": result.top5,
        **asdict(comparison),
        "images_per_second": result.images_per_second,
    }


def _environment(device: str) -> dict:
    versions = {"python": platform.python_version(), "qvit": qvit.__version__, "cuda": torch.version.cuda}
    for package in ("torch", "triton", "timm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.get_device_name(device) if device != "cpu" else None
    return {"device": device, "gpu": gpu, "threads": torch.get_num_threads(), "versions": versions}


def _json_safe(value: object) -> object:
    """Replace what JSON has no word for: nan and infinities (equal logits have no SQNR) become null."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def format_report(report: dict) -> str:
    """The report as a table and a few lines for people."""
    columns = ("Top-1 %", "Top-5 %", "agree %", "lost", "won", "drop", "SQNR dB", "images/s")
    keys = ("top1", "top5", "agreement", "lost", "won", "drop", "sqnr_db", "images_per_second")
    formats = (".2f", ".2f", ".2f", "d", "d", ".2f", ".1f", ".0f")
    lines = [f"{'model':<12}" + "".join(f"{c:>10}" for c in columns)]
    for name, row in report["results"].items():
        cells = ["-" if row[key] is None else format(row[key], spec) for key, spec in zip(keys, formats)]
        lines.append(f"{name:<12}" + "".join(f"{cell:>10}" for cell in cells))
    data, versions = report["data"], report["versions"]
    calibration = report["calibration"]
    lines += [
        f"agreement, drop and SQNR against {report['baseline']}; {data['pictures']} pictures of {data['source']}",
        f"calibrated on {calibration['pictures']} pictures of {calibration['source']}"
        + (", left out of the evaluation" if calibration["left_out_of_the_evaluation"] else ""),
        f"transform: {data['transform']}",
        f"{report['gpu'] or 'CPU'}, torch {versions['torch']}, triton {versions['triton']}, timm {versions['timm']}, "
        f"qvit {versions['qvit']}, python {versions['python']}",
    ]
    unreadable = [*data["unreadable"], *calibration["unreadable"]]
    if unreadable:
        lines.append(f"warning: {len(unreadable)} pictures left out, the first: {unreadable[0]}")
    for name, modules in report["modules"].items():
        lines.append(f"{name}: {modules['swapped']}/{modules['total']} attention modules swapped")
    lines += [_verdict(name, kind, gate) for name, gates in report["gates"].items() for kind, gate in gates.items()]
    if data["pictures"] < FEW_PICTURES:
        lines.append(
            f"warning: a drop is hard to see on fewer than {FEW_PICTURES} pictures; the SQNR is the better gate"
        )
    return "\n".join(lines)


def _verdict(name: str, kind: str, gate: dict) -> str:
    word = "pass" if gate["passed"] else "FAIL" if gate["enforced"] else "fail (for information)"
    if kind == "sqnr":
        return f"{name}: {word}: logit SQNR at least {gate['min_sqnr']:g} dB"
    net = gate["lost"] - gate["won"]
    return (
        f"{name}: {word}: drop of at most {gate['max_drop']:g} points (lost - won = {net}, limit {gate['bound']:.1f})"
    )


def check_output(path: str) -> None:
    """Refuse a file that could not be written, before an evaluation takes its time.

    Raises:
        ConfigError: There is no such folder.
    """
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"cannot write the results to {path}: there is no such folder")


def write_report(report: dict, path: str) -> None:
    """Write the report as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {path}: {error}") from error
