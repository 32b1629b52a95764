"""Windows of an image, as Swin cuts them: shift the image, pad it to whole windows, and cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

OUTSIDE = -1  # a position of a window that lies outside the image


@dataclass(frozen=True)
class WindowPlan:
    """Where the windows of an image lie.

    Attributes:
        rows: int32 (windows, N): the position in the flattened image of each position of each window, or -1.
        pattern: int32 (windows,): which mask a window has.
        masks: bool (patterns, N, N): True where two positions meet in a window only because of the shift.
    """

    rows: torch.Tensor
    pattern: torch.Tensor
    masks: torch.Tensor

    @property
    def has_pads(self) -> bool:
        """True where a window reaches beyond the image."""
        return bool((self.rows == OUTSIDE).any())


@functools.lru_cache(maxsize=64)
def plan_windows(height: int, width: int, window: tuple[int, int], shift: tuple[int, int] = (0, 0)) -> WindowPlan:
    """The windows of Swin (arXiv 2103.14030, section 3.2) for an image, on the CPU.

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
    pads = [-size % w for size, w in zip((height, width), window, strict=True)]
    image = torch.arange(height * width, dtype=torch.int32).reshape(height, width).roll((-shift[0], -shift[1]), (0, 1))
    rows = _cut(F.pad(image, (0, pads[1], 0, pads[0]), value=OUTSIDE), window)
    labels = _cut(_regions(height + pads[0], width + pads[1], window, shift), window)
    masks, pattern = torch.unique(labels[:, None, :] != labels[:, :, None], dim=0, return_inverse=True)
    return WindowPlan(rows.contiguous(), pattern.int(), masks)


def _cut(image: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
    """(H, W) -> (windows, N)."""
    blocks = image.unflatten(1, (-1, window[1])).unflatten(0, (-1, window[0]))
    return blocks.transpose(1, 2).reshape(-1, window[0] * window[1])


def _regions(height: int, width: int, window: tuple[int, int], shift: tuple[int, int]) -> torch.Tensor:
    """Labels of the padded image's parts that were apart before the roll; all one without a shift."""
    parts = []
    for size, w, s in zip((height, width), window, shift, strict=True):
        position = torch.arange(size)
        parts.append((position >= size - w).int() + (position >= size - s).int() if any(shift) else position * 0)
    return 3 * parts[0][:, None] + parts[1][None, :]
