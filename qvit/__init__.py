"""qvit: integer-only attention for timm vision transformers.

Importing the package loads torch and nothing else; each public name loads its module on first use.
"""

from __future__ import annotations

import importlib

_EXPORTS = {
    "quantize": "surgery",
    "restore": "surgery",
    "calibrate": "calibration",
    "Calibration": "calibration",
    "QuantConfig": "config",
    "CalibrationConfig": "config",
    "Scales": "scales",
    "attention": "ops",
    "report": "reporting",  # a submodule of the same name would take its place
    "save": "serialization",
    "load": "serialization",
    "QvitError": "errors",
    "ConfigError": "errors",
    "CalibrationError": "errors",
    "UnsupportedModuleError": "errors",
    "BackendError": "errors",
    "CheckpointError": "errors",
    "DataError": "errors",
}

__all__ = [*_EXPORTS, "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qvit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"qvit.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
