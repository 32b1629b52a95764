"""QuantConfig and CalibrationConfig: values are checked, keys are known, dict and YAML round trips are exact."""

import dataclasses

import pytest

from qvit.config import CalibrationConfig, QuantConfig
from qvit.errors import ConfigError, QvitError


def test_defaults():
    config = QuantConfig()
    assert (config.arithmetic, config.precision, config.granularity, config.backend) == (
        "qvit",
        "standard",
        "tensor",
        "auto",
    )
    assert config.k_offset and config.qk_balance and config.v_channels
    assert config.skip_slower is False
    assert config.calibration == CalibrationConfig(method="absmax", percentile=99.99, batches=8)


def test_frozen_and_hashable():
    config = QuantConfig(exclude=["blocks.0.*"])
    assert config.exclude == ("blocks.0.*",)
    hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.precision = "high"


@pytest.mark.parametrize(
    "values, words",
    [
        ({"arithmetic": "int4"}, ["arithmetic", "int4", "paper_text"]),
        ({"precision": "low"}, ["precision", "low", "high"]),
        ({"granularity": "token"}, ["granularity", "token", "head"]),
        ({"backend": "cuda"}, ["backend", "cuda", "triton"]),
        ({"k_offset": 1}, ["k_offset", "1"]),
        ({"qk_balance": "yes"}, ["qk_balance", "yes"]),
        ({"v_channels": None}, ["v_channels", "None"]),
        ({"skip_slower": 1}, ["skip_slower", "1"]),
        ({"skip_slower": True, "arithmetic": "paper"}, ["skip_slower", "True", "paper"]),
        ({"skip_slower": True, "backend": "reference"}, ["skip_slower", "True", "reference"]),
        ({"exclude": "blocks.0.*"}, ["exclude", "blocks.0.*"]),
        ({"exclude": [1]}, ["exclude"]),
        ({"calibration": 3}, ["calibration", "3"]),
        ({"arithmetic": "paper_text", "backend": "triton"}, ["backend", "triton", "paper_text"]),
        ({"calibration": {"method": "kl"}}, ["calibration.method", "kl", "mse"]),
        ({"calibration": {"percentile": 0}}, ["calibration.percentile", "0"]),
        ({"calibration": {"percentile": float("nan")}}, ["calibration.percentile", "nan"]),
        ({"calibration": {"batches": 0}}, ["calibration.batches", "0"]),
        ({"calibration": {"batches": True}}, ["calibration.batches", "True"]),
        ({"calibration": {"batches": 2.5}}, ["calibration.batches", "2.5"]),
        ({"presision": "high"}, ["presision", "did you mean precision"]),
        ({"calibration": {"batch": 4}}, ["calibration.batch", "calibration.batches"]),
        ([], ["mapping"]),
    ],
)
def test_bad_values_are_named(values, words):
    with pytest.raises(ConfigError) as error:
        QuantConfig.from_dict(values)
    assert isinstance(error.value, QvitError)
    for word in words:
        assert word in str(error.value)


def test_dict_round_trip():
    config = QuantConfig(
        arithmetic="paper", precision="high", exclude=("a.*",), calibration=CalibrationConfig("mse", 99.0, 3)
    )
    assert QuantConfig.from_dict(config.to_dict()) == config
    assert QuantConfig.from_dict({}) == QuantConfig()


def test_skip_slower_round_trips_and_older_files_lack_it(tmp_path):
    config = QuantConfig(skip_slower=True)
    values = config.to_dict()
    assert values["skip_slower"] is True and QuantConfig.from_dict(values) == config
    del values["skip_slower"]
    assert QuantConfig.from_dict(values) == QuantConfig()
    (tmp_path / "c.yaml").write_text("skip_slower: true\n")
    assert QuantConfig.from_yaml(tmp_path / "c.yaml") == config


def test_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("precision: high\nexclude: [blocks.1.attn]\ncalibration:\n  method: percentile\n  batches: 2\n")
    config = QuantConfig.from_yaml(path)
    assert config == QuantConfig(
        precision="high", exclude=("blocks.1.attn",), calibration=CalibrationConfig("percentile", batches=2)
    )
    path.write_text("")
    assert QuantConfig.from_yaml(path) == QuantConfig()


@pytest.mark.parametrize(
    "text", ["[" * 1_500, "precision: [", "- a\n- b\n", "precision: lowest\n", "x: !!python/object:os.system 1"]
)
def test_bad_yaml(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        QuantConfig.from_yaml(path)


def test_missing_yaml(tmp_path):
    with pytest.raises(ConfigError, match="nothing.yaml"):
        QuantConfig.from_yaml(tmp_path / "nothing.yaml")
