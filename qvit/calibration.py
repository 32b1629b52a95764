"""Runs the float model on sample batches and turns what its attention modules see into static scales.

Pass 1 finds the range of each channel of q, k and v (after query/key normalisation, where the core reads them) and
of the output. Pass 2, for the methods that clip, finds histograms of the normalised operands. Last, one batch goes
through the integer core of each layer, to state its distance from float. The batches are kept on the CPU, so that a
one-shot generator is enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import length_hint
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from qvit.config import CalibrationConfig, QuantConfig, config_or_default
from qvit.discovery import Site, plan_swap
from qvit.errors import CalibrationError, ConfigError, QvitError
from qvit.fingerprint import fingerprint
from qvit.health import Answers, require_finite
from qvit.patches.base import CoreInputs, Settings, core_bias, for_rows, run_core
from qvit.scales import ChannelGains, Ranges, Scales, build_scales, channel_gains, k_reach, tops

FORMAT = "qvit-calibration"
FORMAT_VERSION = 2  # 1 had no fingerprint
BINS = 2048
SQNR_IMAGES = 8
_IMAGE_KEYS = ("image", "pixel_values")


@dataclass(frozen=True)
class Calibration:
    """Static scales of a model's attention modules.

    Attributes:
        layers: Scales by module name.
        config: What they were made with.
        sqnr: Signal to quantization noise in dB of each layer's integer core against float, on a calibration batch.
        fingerprint: Of the model's weights (:func:`qvit.fingerprint.fingerprint`); the scales fit no others.
    """

    layers: dict[str, Scales]
    config: QuantConfig
    sqnr: dict[str, float]
    fingerprint: dict[str, str]

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON; every number comes back exactly.

        Raises:
            CalibrationError: The file cannot be written.
        """
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "config": self.config.to_dict(),
            "layers": {name: scales.to_dict() for name, scales in self.layers.items()},
            "sqnr": self.sqnr,
            "fingerprint": self.fingerprint,
        }
        try:
            Path(path).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        except OSError as e:
            raise CalibrationError(f"cannot write the calibration {path}: {e}") from e

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            CalibrationError: The file cannot be read, is no calibration, or has another format version.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise CalibrationError(f"cannot read the calibration {path}: {e}") from e
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CalibrationError(f"{path} is not a calibration saved by qvit")
        if document.get("version") != FORMAT_VERSION:
            found = document.get("version")
            raise CalibrationError(
                f"{path} has format version {found!r}, this qvit reads {FORMAT_VERSION}; calibrate the model again"
            )
        try:
            layers = {name: Scales.from_dict(values) for name, values in document["layers"].items()}
            config = QuantConfig.from_dict(document["config"])
            sqnr = {name: float(value) for name, value in document["sqnr"].items()}
            weights = {name: str(value) for name, value in document["fingerprint"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ConfigError) as e:
            raise CalibrationError(f"{path} is damaged: {type(e).__name__}: {e}") from e
        return cls(layers, config, sqnr, weights)


def calibrate(model: nn.Module, calib_loader: Iterable[Any], config: QuantConfig | None = None) -> Calibration:
    """Finds the scales of every attention module that `quantize` would swap; the model is unchanged.

    Args:
        model: A float model in eval mode.
        calib_loader: Any iterable of batches; at most `config.calibration.batches` are read. A batch is a tensor, a
            sequence that begins with one (images, targets), a list of equal images, or a mapping with `image` or
            `pixel_values`. Images are floating and preprocessed; they are moved to the model's device and dtype.
        config: Default `QuantConfig()`.

    Raises:
        UnsupportedModuleError: The model cannot be quantized (see `quantize`).
        CalibrationError: The loader is empty, fails, or gives batches of an unknown structure or a wrong shape; NaN,
            Inf or nothing but zeros in the batches or in a layer.
    """
    return calibrate_with_answers(model, calib_loader, config_or_default(config))[0]


def calibrate_with_answers(
    model: nn.Module, calib_loader: Iterable[Any], config: QuantConfig
) -> tuple[Calibration, Answers]:
    """As `calibrate`, with what the float model answers to the first pictures."""
    with torch.inference_mode(False), torch.no_grad():
        targets = plan_swap(model, config)
        observers = {site.name: _RangeObserver(site) for site in targets}
        batches, answers = [], Answers()

        def note(batch: torch.Tensor, output: Any) -> None:
            require_finite(model, output, lambda: _forward(model, batch))
            batches.append(batch)
            answers.note(model, batch, output)

        observe_cores(model, _read(calib_loader, config.calibration.batches), targets, observers, note)
        if not batches:
            raise CalibrationError("the calibration loader gave no batches")
        if not any(batch.any() for batch in batches):
            raise CalibrationError("every calibration batch is zero everywhere; calibrate on real, preprocessed images")
        ranges = {name: observer.ranges() for name, observer in observers.items()}
        clips = _find_clips(model, batches, targets, ranges, config)
        layers = {s.name: _build(s, ranges[s.name], clips.get(s.name), config) for s in targets}
        meters = {s.name: _SqnrMeter(layers[s.name], config) for s in targets}
        observe_cores(model, [batches[0][:SQNR_IMAGES]], targets, meters)
        sqnr = {name: meter.decibels() for name, meter in meters.items()}
        return Calibration(layers, config, sqnr, fingerprint(model)), answers


def logits_of(model: nn.Module, batches: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The model's outputs for batches of images."""
    return (_forward(model, batch) for batch in batches)


class _RangeObserver:
    """Per-channel ranges of q, k, v and o of one layer."""

    def __init__(self, site: Site) -> None:
        self.name = site.name
        self.scale = site.adapter.scale_of(site.module)
        self.seen: Ranges | None = None

    def __call__(self, core: CoreInputs) -> None:
        try:
            new = Ranges.of(core.q, core.k, core.v, float_attention(core, self.scale))
        except CalibrationError as e:
            raise CalibrationError(f"layer {self.name!r}: {e}") from e
        self.seen = new if self.seen is None else _union(self.seen, new)

    def ranges(self) -> Ranges:
        if self.seen is None:
            raise CalibrationError(f"layer {self.name!r} was never called in the model's forward; exclude it by name")
        return self.seen


class _HistogramObserver:
    """Histograms of |(x - offset) * gain| of q, k and v of one layer, from 0 to the largest magnitude."""

    def __init__(self, ranges: Ranges, gains: ChannelGains, granularity: str) -> None:
        k_absmax = k_reach(ranges, gains.k_offset)
        self.offsets = {"q": None, "k": gains.k_offset, "v": None}
        self.gains = {"q": gains.q_gain, "k": gains.k_gain, "v": gains.v_gain}
        absmax = {"q": ranges.q_absmax, "k": k_absmax, "v": ranges.v_absmax}
        self.per_head = granularity == "head"
        self.tops = {name: tops(absmax[name] * gain, granularity) for name, gain in self.gains.items()}
        self.counts = {name: torch.zeros(len(gain), BINS, dtype=torch.int64) for name, gain in self.gains.items()}

    def __call__(self, core: CoreInputs) -> None:
        for name, x in (("q", core.q), ("k", core.k), ("v", core.v)):
            x = x.float()
            if self.offsets[name] is not None:
                x = x - self.offsets[name].to(x)[:, None]
            x = (x * (self.gains[name] / self.tops[name][:, None]).to(x)[:, None]).abs()
            bins = (x * BINS).long().clamp_(max=BINS - 1)
            heads = x.shape[1]
            bins += (torch.arange(heads, device=x.device) * BINS)[:, None, None]
            self.counts[name] += torch.bincount(bins.flatten(), minlength=heads * BINS).view(heads, BINS).cpu()

    def clip(self, config: CalibrationConfig) -> dict[str, torch.Tensor]:
        """Fractions (H,) of the largest magnitude, by operand; all equal for one scale per tensor."""
        clips = {}
        for name, counts in self.counts.items():
            groups = counts if self.per_head else counts.sum(0, keepdim=True)
            fraction = (
                percentile_fraction(groups, config.percentile)
                if config.method == "percentile"
                else least_mse_fraction(groups)
            )
            clips[name] = fraction.expand(len(counts))
        return clips


class _SqnrMeter:
    """Signal to noise of one layer's integer core, output against output."""

    def __init__(self, scales: Scales, config: QuantConfig) -> None:
        self.constants = scales.constants()
        self.settings = Settings(
            config.arithmetic, config.precision, config.backend, scales.softmax_scale, scales.half_exact
        )
        self.signal = 0.0
        self.noise = 0.0

    def __call__(self, core: CoreInputs) -> None:
        constants = self.constants.to(core.q.device)
        bias = core_bias(core.bias, constants, self.settings.arithmetic)
        integer = run_core(core.q, core.k, core.v, bias, constants, self.settings).double()
        exact = float_attention(core, self.settings.softmax_scale).transpose(1, 2).double()
        self.signal += float(exact.square().sum())
        self.noise += float((integer - exact).square().sum())

    def decibels(self) -> float:
        signal = max(self.signal, 1e-100)
        return 10 * math.log10(signal / max(self.noise, 1e-30 * signal))  # at most 300: JSON holds no infinity


def float_attention(core: CoreInputs, softmax_scale: float) -> torch.Tensor:
    """Float32 softmax attention of the core's operands; returns (B, H, N, D)."""
    bias = core.bias
    if bias is not None:
        bias = for_rows(bias if bias.dtype == torch.bool else bias.float(), len(core.q))
    with torch.autocast(core.q.device.type, enabled=False):
        return F.scaled_dot_product_attention(
            core.q.float(), core.k.float(), core.v.float(), attn_mask=bias, scale=softmax_scale
        )


def percentile_fraction(counts: torch.Tensor, percentile: float) -> torch.Tensor:
    """The smallest bin edge, as a fraction of the range, below which `percentile` percent of a histogram lie.

    Args:
        counts: (G, BINS) integers, one histogram a row.
        percentile: In (0, 100].

    Returns:
        (G,) float64 in (0, 1].
    """
    below = counts.cumsum(1).double()
    reached = below >= below[:, -1:] * (percentile / 100)
    return (reached.double().argmax(1) + 1).double() / counts.shape[1]


def least_mse_fraction(counts: torch.Tensor) -> torch.Tensor:
    """The clipping point, as a fraction of the range, with the least squared error of symmetric 8-bit quantization.

    Args:
        counts: (G, BINS) integers, one histogram a row.

    Returns:
        (G,) float64 in (0, 1]; the largest of equals.
    """
    bins = counts.shape[1]
    centers = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins
    candidates = torch.linspace(1.0, 0.1, 91, dtype=torch.float64)
    step = candidates[:, None] / 127
    quantized = (centers / step).round().clamp_(max=127) * step
    errors = counts.double() @ (quantized - centers).square().T
    return candidates[errors.argmin(1)]


def _union(a: Ranges, b: Ranges) -> Ranges:
    merged = {}
    for field in fields(Ranges):
        merge = torch.minimum if field.name == "k_min" else torch.maximum
        merged[field.name] = merge(getattr(a, field.name), getattr(b, field.name))
    return Ranges(**merged)


def _find_clips(
    model: nn.Module, batches: list[torch.Tensor], targets: list[Site], ranges: dict[str, Ranges], config: QuantConfig
) -> dict[str, dict[str, torch.Tensor]]:
    """Clipping fractions by layer and operand; empty for "absmax", which clips nothing."""
    if config.calibration.method == "absmax":
        return {}
    observers = {}
    for site in targets:
        with _naming_layer(site.name):
            gains = channel_gains(ranges[site.name], **_vectors(config))
        observers[site.name] = _HistogramObserver(ranges[site.name], gains, _granularity(site, config))
    observe_cores(model, tqdm(batches, desc="finding clips", unit="batch", leave=False), targets, observers)
    return {name: observer.clip(config.calibration) for name, observer in observers.items()}


def _build(site: Site, ranges: Ranges, clip: dict[str, torch.Tensor] | None, config: QuantConfig) -> Scales:
    with _naming_layer(site.name):
        return build_scales(
            ranges,
            softmax_scale=site.adapter.scale_of(site.module),
            granularity=_granularity(site, config),
            clip=clip,
            **_vectors(config),
        )


def _granularity(site: Site, config: QuantConfig) -> str:
    return site.adapter.granularity or config.granularity


def _vectors(config: QuantConfig) -> dict[str, bool]:
    return {"k_offset": config.k_offset, "qk_balance": config.qk_balance, "v_channels": config.v_channels}


@contextmanager
def _naming_layer(name: str) -> Iterator[None]:
    try:
        yield
    except CalibrationError as e:
        raise CalibrationError(f"layer {name!r}: {e}") from e


def observe_cores(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    targets: list[Site],
    observers: Mapping[str, Callable[[CoreInputs], None]],
    note: Callable[[torch.Tensor, Any], None] = lambda batch, output: None,
) -> None:
    """Forwards the batches with one observer on the core of each target; the hooks are gone afterwards.

    `note` gets each batch with the model's output.
    """
    hooks, lock = [], Lock()
    try:
        for site in targets:
            hook = _core_hook(site, observers[site.name], lock)
            hooks.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        for batch in batches:
            note(batch, _forward(model, batch))
    finally:
        for hook in hooks:
            hook.remove()


def _core_hook(site: Site, observer: Callable[[CoreInputs], None], lock: Lock) -> Callable[..., None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        core = site.adapter.core_inputs(module, *args, **kwargs)
        with lock:  # nn.DataParallel calls a layer's replicas from several threads
            observer(core)

    return observe


def _forward(model: nn.Module, batch: torch.Tensor) -> Any:
    weight = next(p for p in model.parameters() if p.is_floating_point())
    try:
        return model(batch.to(weight.device, weight.dtype))
    except QvitError:
        raise
    except Exception as e:
        raise CalibrationError(
            f"the model's forward failed on a calibration batch of shape {tuple(batch.shape)}: {type(e).__name__}: {e}"
        ) from e


def _read(loader: Iterable[Any], limit: int) -> Iterator[torch.Tensor]:
    """Yields the images of at most `limit` batches, copied to the CPU."""
    try:
        iterator = None if isinstance(loader, (torch.Tensor, Mapping, str)) else iter(loader)
    except TypeError:
        iterator = None
    if iterator is None:
        raise CalibrationError(
            f"calib_loader must be an iterable of batches, got {type(loader).__name__}; put a single batch in a list"
        )
    try:
        total = min(limit, length_hint(loader, limit))
    except NotImplementedError:  # the __len__ of some data sets
        total = limit
    for index in tqdm(range(limit), desc="calibrating", unit="batch", total=total, leave=False):
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as e:
            raise CalibrationError(f"the calibration loader failed at batch {index}: {type(e).__name__}: {e}") from e
        images = _images_of(batch, index)
        yield images.detach().to("cpu", copy=True)


def _images_of(batch: Any, index: int) -> torch.Tensor:
    images = batch
    if isinstance(batch, Mapping):
        images = next((batch[key] for key in _IMAGE_KEYS if key in batch), None)
    elif isinstance(batch, (list, tuple)) and batch:
        images = torch.stack(tuple(batch)) if _is_list_of_images(batch) else batch[0]
    if not isinstance(images, torch.Tensor):
        raise CalibrationError(
            f"calibration batch {index} is {_describe(batch)}; expected a tensor, (images, targets), a list of equal "
            f"images, or a mapping with one of the keys {', '.join(_IMAGE_KEYS)} that holds a tensor"
        )
    if not images.is_floating_point():
        raise CalibrationError(f"calibration batch {index} is {images.dtype}; expected preprocessed floating images")
    if images.numel() == 0:
        raise CalibrationError(f"calibration batch {index} is empty: shape {tuple(images.shape)}")
    if not torch.isfinite(images).all():
        raise CalibrationError(f"calibration batch {index} holds NaN or Inf")
    return images


def _is_list_of_images(batch: list[Any] | tuple[Any, ...]) -> bool:
    return all(isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape == batch[0].shape for x in batch)


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with the keys {list(batch)}"
    if isinstance(batch, (list, tuple)):
        return f"a {type(batch).__name__} of {[type(x).__name__ for x in batch[:4]]}"
    return f"a {type(batch).__name__}"
