"""Swaps the attention modules of a model for their quantized classes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from qvit.calibration import Calibration, calibrate_with_answers, logits_of
from qvit.config import QuantConfig, config_or_default
from qvit.discovery import Site, plan_swap
from qvit.errors import CalibrationError, ConfigError
from qvit.fingerprint import fingerprint, same_weights
from qvit.health import require_sqnr
from qvit.patches import FOLDED
from qvit.patches.base import QuantizedModule
from qvit.patches.windows import FoldedBlock
from qvit.scales import Scales

_MEASURED_WITH = ("arithmetic", "precision")
_FIXED_BY_CALIBRATION = ("granularity", "k_offset", "qk_balance", "v_channels", "calibration")


def quantize(
    model: nn.Module,
    calib_loader: Iterable[Any] | Calibration,
    config: QuantConfig | None = None,
    *,
    strict: bool = False,
) -> nn.Module:
    """Calibrates the model and swaps every supported attention module in place.

    Weights are never written, and names, hooks and `state_dict` keys stay. If anything fails, the model is unchanged.

    Every layer's integer attention is compared with float on a calibration batch, and under `config.min_sqnr_db`
    refused; `qvit.report` has the figures. Where the model classifies and calibration saw 64 pictures or more, the
    report also says how many of them get the float model's answer. A `Calibration` holds the figures of its own
    arithmetic and precision; with others, nothing is compared.

    Args:
        model: A model in eval mode with timm's `Attention`, or the window attention of Swin, Swin V2 or V2-CR.
        calib_loader: Batches as `calibrate` takes them, or a `Calibration` made before.
        config: Default: the calibration's own config, or `QuantConfig()`.
        strict: Raise where anything that computes attention would stay float.

    Returns:
        The same model.

    Raises:
        UnsupportedModuleError: The model is compiled, quantized, in training mode, has nothing to swap, or `strict`.
        CalibrationError: The loader gave nothing usable, the calibration belongs to another model, a layer is further
            away from float than the config allows, or gives NaN or Inf.
        ConfigError: The config is none, or contradicts the calibration.
    """
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(calib_loader, Calibration):
            calibration = calib_loader
            config = _agreeing_config(config, calibration.config)
            targets, answers = plan_swap(model, config, strict=strict), None
        else:
            config = config_or_default(config)
            targets = plan_swap(model, config, strict=strict)
            calibration, answers = calibrate_with_answers(model, calib_loader, config)
        _require_same_layers(targets, calibration, config)
        if calibration is calib_loader:
            _require_same_weights(model, calibration)
        sqnr = {site.name: _measured(calibration, site.name, config) for site in targets}
        require_sqnr(sqnr, config)
        with all_or_nothing(model):
            swap_all(model, targets, calibration.layers, config, sqnr)
            if answers is not None:
                record_agreement(targets, answers.agreement(logits_of(model, answers.batches)))
    return model


def restore(model: nn.Module) -> nn.Module:
    """Gives every quantized module its float class back and removes what `quantize` added; returns the model."""
    for module in model.modules():  # a block comes before its attention
        if isinstance(module, FoldedBlock):
            module.unfold()
        elif isinstance(module, QuantizedModule):
            module.unswap()
    return model


def swap_all(
    model: nn.Module,
    targets: list[Site],
    scales: Mapping[str, Scales],
    config: QuantConfig,
    sqnr: Mapping[str, float],
) -> None:
    """Swaps the targets, inside of `all_or_nothing`; `scales` and `sqnr` go by module name."""
    for site in targets:
        site.adapter.swap(site.module, scales[site.name], config, sqnr.get(site.name))
    for module in model.modules():
        if type(module) in FOLDED:
            FOLDED[type(module)].fold(module)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Gives the float model back where the body fails, or is interrupted."""
    try:
        yield
    except BaseException:
        restore(model)
        raise


def _measured(calibration: Calibration, name: str, config: QuantConfig) -> float | None:
    same = all(getattr(config, key) == getattr(calibration.config, key) for key in _MEASURED_WITH)
    return calibration.sqnr.get(name) if same else None


def record_agreement(targets: list[Site], agreement: float | None) -> None:
    """Writes a model's agreement where the report and the checkpoint find it: in each swapped module."""
    for site in targets:
        site.module.qvit_record = replace(site.module.qvit_record, agreement=agreement)


def _agreeing_config(config: QuantConfig | None, calibrated: QuantConfig) -> QuantConfig:
    if config is None:
        return calibrated
    config = config_or_default(config)
    for key in _FIXED_BY_CALIBRATION:
        ours, theirs = getattr(config, key), getattr(calibrated, key)
        if ours != theirs:
            raise ConfigError(f"configuration key {key} is {ours!r}, but the calibration was made with {theirs!r}")
    return config


def _require_same_layers(targets: list[Site], calibration: Calibration, config: QuantConfig) -> None:
    names = {site.name for site in targets}
    for name in calibration.layers:
        if name not in names and not any(fnmatchcase(name, pattern) for pattern in config.exclude):
            raise CalibrationError(f"the calibration has a layer {name!r} that the model has not, or cannot swap")
    for site in targets:
        scales = calibration.layers.get(site.name)
        if scales is None:
            raise CalibrationError(f"the calibration has no layer {site.name!r}; it has {_few(calibration.layers)}")
        ours = (site.adapter.heads_of(site.module), site.adapter.head_dim_of(site.module))
        theirs = (scales.num_heads, scales.head_dim)
        if ours != theirs:
            raise CalibrationError(
                f"{site.name!r} has (heads, head_dim) {ours}, but the calibration was made for {theirs}"
            )
        if site.adapter.scale_of(site.module) != scales.softmax_scale:
            raise CalibrationError(
                f"{site.name!r} scales its scores by {site.adapter.scale_of(site.module)}, but the calibration was "
                f"made for {scales.softmax_scale}"
            )


def _require_same_weights(model: nn.Module, calibration: Calibration) -> None:
    if not same_weights(calibration.fingerprint, fingerprint(model)):
        raise CalibrationError(
            "the calibration was made with other weights of this architecture, and its scales and SQNR are theirs; "
            "calibrate this model"
        )


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
