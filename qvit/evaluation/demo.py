"""The embedded data set: scikit-learn's hand-written digits in clutter, for a machine with no network.

Each picture is a canvas with one whole digit at a place of its own and fragments of other digits around it, so that a
model has to look in the right place: one whose attention is broken loses, as it would on real pictures.
"""

from __future__ import annotations

import numpy as np
import torch

from qvit.errors import DataError

DEMO_MEAN = DEMO_STD = (0.5, 0.5, 0.5)
DEMO_SIZE = 32
_TRAIN = 1198  # two thirds of the 1,797 digits
_VAL_PLACES = 2  # each digit of the other third is shown at two places: 1,198 pictures
_DIGIT = 16  # edge of a digit on the canvas, twice what scikit-learn stores
_FRAGMENT = 6
_FRAGMENTS = 4
_DIGIT_GRID, _FRAGMENT_GRID = 8, 4  # they start on multiples of these
_LARGEST_VALUE = 16  # the digits are stored as 0..16


def demo_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Load the plain digits of one split.

    Args:
        split: "train" (1,198 digits) or "val" (the other 599).

    Returns:
        digits (n, 16, 16) float64 in 0..1 and labels (n,) int64.

    Raises:
        DataError: The split has another name, or scikit-learn is not installed.
    """
    if split not in ("train", "val"):
        raise DataError(f"the demo data has the splits 'train' and 'val', not {split!r}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the demo data is scikit-learn's digits: pip install 'qvit[demo]' (or scikit-learn)") from error
    stored = load_digits()
    # RandomState's stream is frozen by numpy, default_rng's is not: the split must never change.
    order = np.random.RandomState(0).permutation(len(stored.target))
    order = order[:_TRAIN] if split == "train" else order[_TRAIN:]
    digits = stored.images[order] / _LARGEST_VALUE
    return _double(_double(digits, axis=1), axis=2), stored.target[order].astype(np.int64)


def demo_canvas(digits: np.ndarray, rng: np.random.RandomState) -> torch.Tensor:
    """Put each digit somewhere on a canvas, among fragments of the others.

    Args:
        digits: (n, 16, 16) float64 in 0..1, as `demo_digits` returns them.
        rng: Draws the places; the same state gives the same pictures everywhere.

    Returns:
        Pictures (n, 3, 32, 32) uint8, grey.
    """
    canvas = np.zeros((len(digits), DEMO_SIZE, DEMO_SIZE))
    for _ in range(_FRAGMENTS):
        others = digits[rng.randint(len(digits), size=len(digits), dtype=np.int64)]
        cut = _windows(rng, len(digits), _DIGIT, _FRAGMENT, grid=1)
        _paste(canvas, _windows(rng, len(digits), DEMO_SIZE, _FRAGMENT, _FRAGMENT_GRID), others[cut])
    canvas[_windows(rng, len(digits), DEMO_SIZE, _DIGIT, _DIGIT_GRID)] = digits
    # All values are multiples of 1/256 in float64, hence exact, so that they round the same everywhere.
    pictures = torch.from_numpy((canvas * 255).round().astype(np.uint8))
    return pictures[:, None].expand(-1, 3, -1, -1).contiguous()


def demo_split(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one split of the demo data, the same pictures on every machine.

    Args:
        split: "train" (1,198 pictures) or "val" (1,198 pictures of 599 other digits, each at two places).

    Returns:
        images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        DataError: The split has another name, or scikit-learn is not installed.
    """
    digits, labels = demo_digits(split)
    if split == "val":
        digits, labels = np.tile(digits, (_VAL_PLACES, 1, 1)), np.tile(labels, _VAL_PLACES)
    return demo_canvas(digits, np.random.RandomState(1)), torch.from_numpy(labels)


def demo_normalise(images: torch.Tensor) -> torch.Tensor:
    """Turn uint8 pictures (n, 3, H, W) into the float32 input of the demo models: mean 0.5, deviation 0.5."""
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (DEMO_MEAN, DEMO_STD))
    return (images.float() / 255 - mean) / std


def _double(x: np.ndarray, axis: int) -> np.ndarray:
    """Double the length of one axis by linear interpolation between pixel centres."""
    x = np.moveaxis(x, axis, -1)
    before = np.concatenate([x[..., :1], x[..., :-1]], axis=-1)
    after = np.concatenate([x[..., 1:], x[..., -1:]], axis=-1)
    both = np.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], axis=-1)
    return np.moveaxis(both.reshape(*x.shape[:-1], -1), -1, axis)


def _windows(rng: np.random.RandomState, count: int, canvas: int, edge: int, grid: int) -> tuple[np.ndarray, ...]:
    """Draw one square window for each picture, as an index (picture, row, column) of shape (count, edge, edge)."""
    corner = rng.randint((canvas - edge) // grid + 1, size=(count, 2, 1), dtype=np.int64) * grid
    lines = corner + np.arange(edge)  # (count, 2, edge)
    return np.arange(count)[:, None, None], lines[:, 0, :, None], lines[:, 1, None, :]


def _paste(canvas: np.ndarray, window: tuple[np.ndarray, ...], fragments: np.ndarray) -> None:
    """Draw fragments (n, edge, edge) onto canvas (n, H, W), keeping the brighter value."""
    canvas[window] = np.maximum(canvas[window], fragments)
