"""The settings of a quantization: two frozen dataclasses that validate themselves.

Everything that changes results is here; YAML and dicts only fill these classes, and an unknown key is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from qvit.errors import ConfigError

METHODS = ("absmax", "percentile", "mse")
ARITHMETICS = ("qvit", "paper", "paper_text")
PRECISIONS = ("standard", "high")
GRANULARITIES = ("tensor", "head")
BACKENDS = ("auto", "triton", "reference")


@dataclass(frozen=True)
class CalibrationConfig:
    """How ranges become scales.

    Attributes:
        method: "absmax" (nothing is clipped), "percentile" or "mse" (clip by a histogram of a second pass).
        percentile: share of the values, in percent, that "percentile" keeps inside the range; above 50, at most 100.
        batches: at most so many batches of the loader are read.

    Raises:
        ConfigError: a value does not fit.
    """

    method: str = "absmax"
    percentile: float = 99.99
    batches: int = 8

    def __post_init__(self) -> None:
        _require_choice("calibration.method", self.method, METHODS)
        _require(
            _is_number(self.percentile) and 50 < self.percentile <= 100,
            "calibration.percentile",
            self.percentile,
            "a number above 50 and at most 100",
        )
        _require(
            isinstance(self.batches, int) and not isinstance(self.batches, bool) and self.batches >= 1,
            "calibration.batches",
            self.batches,
            "an integer of at least 1",
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CalibrationConfig:
        """Builds the config from a mapping.

        Raises:
            ConfigError: an unknown key, or a value that does not fit.
        """
        return cls(**_known_keys(cls, values, "calibration."))


def config_or_default(config: QuantConfig | None) -> QuantConfig:
    """The config, or without one the default.

    Raises:
        ConfigError: Something else was given.
    """
    if config is None:
        return QuantConfig()
    if not isinstance(config, QuantConfig):
        found = type(config).__name__
        raise ConfigError(f"config must be a QuantConfig, found {found}; QuantConfig.from_dict makes one of a mapping")
    return config


@dataclass(frozen=True)
class QuantConfig:
    """What is quantized, and how.

    Attributes:
        arithmetic: "qvit" (the product), "paper" (close to QFlash's code, scales found on every batch) or
            "paper_text" (the published algorithm as printed; reference backend only).
        precision: "standard" (8 bits of the attention weights) or "high" (16 bits); used by "qvit" only.
        granularity: one scale per "tensor" or per "head"; attention by cosine (Swin V2) always has one per head.
        k_offset: subtract the middle of each of K's channels before quantizing (softmax does not see it).
        qk_balance: share the ranges of Q's and K's channels out between the two.
        v_channels: one scale per channel of V.
        backend: "auto" (by device), "triton" or "reference".
        skip_slower: a module computes in float where the recorded times (`qvit.speed`) say that float is faster for
            the device and the batch; `qvit.report` says which ran. For "qvit" on Triton, whose times are recorded.
        min_sqnr_db: `qvit.quantize` refuses a layer whose integer attention is further from float than this SQNR on a
            calibration batch; None refuses none. For "qvit": the published arithmetics are there to be measured.
        exclude: fnmatch patterns of module names that stay float.
        calibration: how ranges become scales.

    Raises:
        ConfigError: a value does not fit.
    """

    arithmetic: str = "qvit"
    precision: str = "standard"
    granularity: str = "tensor"
    k_offset: bool = True
    qk_balance: bool = True
    v_channels: bool = True
    backend: str = "auto"
    skip_slower: bool = False
    min_sqnr_db: float | None = 15.0
    exclude: tuple[str, ...] = ()
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        _require_choice("arithmetic", self.arithmetic, ARITHMETICS)
        _require_choice("precision", self.precision, PRECISIONS)
        _require_choice("granularity", self.granularity, GRANULARITIES)
        _require_choice("backend", self.backend, BACKENDS)
        for key in ("k_offset", "qk_balance", "v_channels", "skip_slower"):
            _require(isinstance(getattr(self, key), bool), key, getattr(self, key), "true or false")
        is_floor = self.min_sqnr_db is None or (_is_number(self.min_sqnr_db) and isfinite(self.min_sqnr_db))
        _require(is_floor, "min_sqnr_db", self.min_sqnr_db, "a finite number of dB, or None")
        is_list = isinstance(self.exclude, (list, tuple)) and all(isinstance(item, str) for item in self.exclude)
        _require(is_list, "exclude", self.exclude, "a list of module name patterns")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        is_config = isinstance(self.calibration, CalibrationConfig)
        _require(is_config, "calibration", self.calibration, "a CalibrationConfig")
        if self.arithmetic == "paper_text":
            _require(self.backend != "triton", "backend", self.backend, "'auto' or 'reference' for paper_text")
        timed = self.arithmetic == "qvit" and self.backend != "reference"
        expected = "false with a paper arithmetic or the reference backend, of which no times are recorded"
        _require(timed or not self.skip_slower, "skip_slower", self.skip_slower, expected)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantConfig:
        """Builds the config from a mapping; `calibration` may be a nested mapping.

        Raises:
            ConfigError: an unknown key, or a value that does not fit.
        """
        known = _known_keys(cls, values, "")
        if isinstance(known.get("calibration"), Mapping):
            known["calibration"] = CalibrationConfig.from_dict(known["calibration"])
        return cls(**known)

    @classmethod
    def from_yaml(cls, path: str | Path) -> QuantConfig:
        """Reads the config from a YAML file that holds these keys and no others (an empty file: the defaults).

        Raises:
            ConfigError: not YAML, not a mapping, an unknown key, or a value that does not fit.
        """
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as e:
            raise ConfigError(f"cannot read the configuration {path}: {e}") from e
        return cls.from_dict({} if values is None else values)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON-safe values; `QuantConfig.from_dict` gives the config back."""
        return {**asdict(self), "exclude": list(self.exclude)}


def _known_keys(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        where = prefix.rstrip(".") or "the configuration"
        raise ConfigError(f"{where} must be a mapping of keys to values, got {type(values).__name__}: {values!r}")
    names = [f.name for f in fields(cls)]
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
            raise ConfigError(f"unknown configuration key {prefix}{key}{hint}; known keys: {', '.join(names)}")
    return dict(values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    _require(isinstance(value, str) and value in choices, key, value, f"one of {', '.join(choices)}")


def _require(fits: bool, key: str, value: object, expected: str) -> None:
    if not fits:
        raise ConfigError(f"configuration key {key} is {value!r}, expected {expected}")
