"""Windows of an image, as Swin cuts them: shift the image, pad it to whole windows, and cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

OUTSIDE = -1  # a position of a window that lies outside the image
SHIFT_MASK = -100.0  # what Swin adds where two positions meet only because of the shift


@dataclass(frozen=True)
class WindowPlan:
    """Where the windows of an image lie, in NumPy: a plan is kept, and must not be of the device or mode of the day.

    Attributes:
        rows: int32 (windows, N): the position in the flattened image of each position of each window, or -1.
        pattern: int32 (windows,): which mask a window has.
        masks: bool (patterns, N, N): True where two positions meet in a window only because of the shift.
    """

    rows: np.ndarray
    pattern: np.ndarray
    masks: np.ndarray

    @property
    def has_pads(self) -> bool:
        """True where a window reaches beyond the image."""
        return bool((self.rows == OUTSIDE).any())

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows, pattern (int32) and masks (bool) as new tensors on a device."""
        rows, pattern = (torch.tensor(x.tolist(), dtype=torch.int32, device=device) for x in (self.rows, self.pattern))
        return rows, pattern, torch.tensor(self.masks.tolist(), dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=64)
def plan_windows(height: int, width: int, window: tuple[int, int], shift: tuple[int, int] = (0, 0)) -> WindowPlan:
    """The windows of Swin (arXiv 2103.14030, section 3.2) for an image.

    The image is rolled up and left by ``shift``, padded below and to the right to whole windows, and cut row by row.

    Args:
        height, width: Of the image, in tokens.
        window: Height and width of a window.
        shift: How far the image is rolled; less than a window.

    Raises:
        ValueError: A size is not positive, or a shift is not inside a window.
    """
    if min(height, width, *window) < 1 or not all(0 <= s < w for s, w in zip(shift, window, strict=True)):
        raise ValueError(
            f"expected an image and windows of at least one token and a shift inside a window, found an image of "
            f"{height} x {width}, windows of {window}, shift {shift}"
        )
    pads = [(0, -size % w) for size, w in zip((height, width), window, strict=True)]
    image = np.roll(np.arange(height * width).reshape(height, width), (-shift[0], -shift[1]), (0, 1))
    rows = _cut(np.pad(image, pads, constant_values=OUTSIDE), window)
    labels = _cut(_regions(height + pads[0][1], width + pads[1][1], window, shift), window)
    apart = labels[:, None, :] != labels[:, :, None]
    masks, pattern = np.unique(apart, axis=0, return_inverse=True)
    return WindowPlan(rows.astype(np.int32), pattern.reshape(-1).astype(np.int32), masks)


def _cut(image: np.ndarray, window: tuple[int, int]) -> np.ndarray:
    """(H, W) -> (windows, N)."""
    height, width = image.shape
    blocks = image.reshape(height // window[0], window[0], width // window[1], window[1])
    return blocks.swapaxes(1, 2).reshape(-1, window[0] * window[1])


def _regions(height: int, width: int, window: tuple[int, int], shift: tuple[int, int]) -> np.ndarray:
    """Labels of the padded image's parts that were apart before the roll; all one without a shift."""
    parts = []
    for size, w, s in zip((height, width), window, shift, strict=True):
        position = np.arange(size)
        parts.append(1 * (position >= size - w) + (position >= size - s) if any(shift) else position * 0)
    return 3 * parts[0][:, None] + parts[1][None, :]
