"""The embedded data set: scikit-learn's 1,797 hand-written digits, for a machine with no network."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from qvit.errors import DataError

DEMO_MEAN = DEMO_STD = (0.5, 0.5, 0.5)
DEMO_SIZE = 32
_TRAIN = 1198  # two thirds of 1,797
_LARGEST_VALUE = 16  # the digits are stored as 0..16


def demo_split(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Load one split of the digits, the same pictures on every machine.

    Args:
        split: "train" (1,198 pictures) or "val" (the other 599).

    Returns:
        images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        DataError: The split has another name, or scikit-learn is not installed.
    """
    if split not in ("train", "val"):
        raise DataError(f"the demo data has the splits 'train' and 'val', not {split!r}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the demo data is scikit-learn's digits: pip install 'qvit[demo]' (or scikit-learn)") from error
    digits = load_digits()
    # RandomState's stream is frozen by numpy, default_rng's is not: the split must never change.
    order = np.random.RandomState(0).permutation(len(digits.target))
    order = order[:_TRAIN] if split == "train" else order[_TRAIN:]
    grey = torch.from_numpy(digits.images[order])[:, None]
    # Float64 holds every interpolated value exactly, so that the rounding is the same everywhere.
    grey = F.interpolate(grey, size=(DEMO_SIZE, DEMO_SIZE), mode="bilinear", align_corners=False)
    images = (grey * 255 / _LARGEST_VALUE).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    return images, torch.from_numpy(digits.target[order]).long()


def demo_normalise(images: torch.Tensor) -> torch.Tensor:
    """Turn uint8 pictures (n, 3, H, W) into the float32 input of the demo models: mean 0.5, deviation 0.5."""
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (DEMO_MEAN, DEMO_STD))
    return (images.float() / 255 - mean) / std
