"""The errors of qvit: one root class, and the few children that a caller would catch apart."""


class QvitError(Exception):
    """Root of every error that qvit raises on purpose."""


class ConfigError(QvitError):
    """A configuration key or value that does not exist or does not fit."""


class CalibrationError(QvitError):
    """Calibration could not produce usable scales: bad loader, bad values, uncalibrated module."""


class UnsupportedModuleError(QvitError):
    """A model or attention module that cannot be swapped, or is in the wrong state for it."""


class BackendError(QvitError):
    """An operator call that no backend can serve: wrong shapes, dtypes, devices or a missing backend."""


class CheckpointError(QvitError):
    """A saved quantization that cannot be read or does not belong to the model."""


class DataError(QvitError):
    """Evaluation data that is missing, incomplete or in the wrong order."""
