"""The YAML files in configs/: one model each, with its data settings and what its evaluation must show.

Keys (an unknown one is an error; `model` is the only one without a default):

    model: deit_small_patch16_224.fb_in1k   # timm name; with a tag, timm's pretrained weights are the default
    kwargs: {img_size: 32}                  # for timm.create_model
    checkpoint: weights/x.safetensors       # instead of timm's weights; relative to the YAML file
    data:                                   # whatever is left out is the model's own setting in timm
      source: ILSVRC/imagenet-1k            # the default of --data
      input_size: 224                       # side of the square that the model sees
      interpolation: bicubic                # or bilinear, nearest
      antialias: true                       # false: resize as torch.nn.functional.interpolate does, then clamp
      crop_pct: 0.9                         # input_size / crop_pct is the short side before the centre crop
      crop_mode: center                     # or squash, border (border: timm's, antialiased only)
      mean: [0.5, 0.5, 0.5]
      std: [0.5, 0.5, 0.5]
    quantization: {precision: high}         # the fields of qvit.QuantConfig
    expected_swapped: 12                    # the evaluation fails when fewer modules were swapped
    allowed_drop: 0.5                       # percentage points of Top-1; for information, --max-drop is the gate
    min_sqnr: 37.0                          # optional, dB of the logits against the float model's; part of the gate
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import yaml

from qvit.errors import ConfigError

IMAGENET = "ILSVRC/imagenet-1k"


@dataclass(frozen=True)
class DataSettings:
    """The `data` section: where the pictures are, and how they become the model's input."""

    source: str = IMAGENET
    input_size: int | None = None
    interpolation: str | None = None
    antialias: bool = True
    crop_pct: float | None = None
    crop_mode: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _expect(isinstance(self.source, str), "data.source", self.source, "a text")
        _expect(self.input_size is None or _is_count(self.input_size), "data.input_size", self.input_size, "a number")
        _expect(isinstance(self.antialias, bool), "data.antialias", self.antialias, "true or false")
        choices = (None, "bicubic", "bilinear", "nearest")
        _expect(self.interpolation in choices, "data.interpolation", self.interpolation, f"one of {choices[1:]}")
        crop = self.crop_pct
        _expect(crop is None or (_is_number(crop) and 0 < crop <= 1), "data.crop_pct", crop, "above 0 and at most 1")
        choices = (None, "center", "squash") if not self.antialias else (None, "center", "squash", "border")
        _expect(self.crop_mode in choices, "data.crop_mode", self.crop_mode, f"one of {choices[1:]}")
        for key in ("mean", "std"):
            value = getattr(self, key)
            good = value is None or (
                isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))
            )
            _expect(good, f"data.{key}", value, "three numbers")
            object.__setattr__(self, key, None if value is None else tuple(float(v) for v in value))

    def override(self, changes: dict) -> DataSettings:
        """The same settings with some of them changed; an unknown key raises `ConfigError`."""
        _known_keys(changes, DataSettings, "data")
        return replace(self, **changes)

    def to_dict(self) -> dict:
        """The settings as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ModelConfig:
    """One YAML file, validated; the module's docstring has the keys."""

    model: str
    kwargs: dict = field(default_factory=dict)
    checkpoint: str | None = None
    data: DataSettings = field(default_factory=DataSettings)
    quantization: dict = field(default_factory=dict)
    expected_swapped: int = 1
    allowed_drop: float = 0.5
    min_sqnr: float | None = None

    def __post_init__(self) -> None:
        _expect(isinstance(self.model, str) and bool(self.model), "model", self.model, "a timm model name")
        _expect(isinstance(self.checkpoint, str | None), "checkpoint", self.checkpoint, "a path")
        for key in ("kwargs", "quantization"):
            _expect(isinstance(getattr(self, key), dict), key, getattr(self, key), "a mapping")
        _expect(_is_count(self.expected_swapped), "expected_swapped", self.expected_swapped, "at least 1")
        drop, sqnr = self.allowed_drop, self.min_sqnr
        _expect(_is_number(drop) and drop >= 0, "allowed_drop", drop, "percentage points, not negative")
        _expect(sqnr is None or _is_number(sqnr), "min_sqnr", sqnr, "decibels")

    @property
    def architecture(self) -> str:
        """The timm name without the tag of its weights."""
        return self.model.split(".")[0]

    def to_dict(self) -> dict:
        """The configuration as plain values, for JSON."""
        return asdict(self)


def load_model_config(name: str, folder: Path) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        name: Short name of a YAML in `folder`, such as "deit_small", or the path of a YAML file.
        folder: Where the short names are looked up.

    Raises:
        ConfigError: There is no such file, it is no YAML mapping, or a key or value does not fit.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"no model configuration {name!r}: give the path of a YAML file or one of: {known}")
    values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    _known_keys(values, ModelConfig, str(path))
    data = values.pop("data", None) or {}
    _expect(isinstance(data, dict), "data", data, "a mapping")
    _expect("model" in values, "model", None, "a timm model name")
    config = ModelConfig(data=DataSettings().override(data), **values)
    if config.checkpoint is not None:
        config = replace(config, checkpoint=str(path.parent / config.checkpoint))
    return config


def read_yaml(text: str, where: str) -> dict:
    """Parse a YAML mapping, safely; `ConfigError` names `where` it came from."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {type(values).__name__}")
    return values


def _known_keys(values: dict, cls: type, where: str) -> None:
    known = [f.name for f in fields(cls)]
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise ConfigError(f"{where} has no key {', '.join(map(repr, unknown))}; the keys are {', '.join(known)}")


def _expect(good: bool, key: str, value: object, wanted: str) -> None:
    if not good:
        raise ConfigError(f"{key} must be {wanted}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
