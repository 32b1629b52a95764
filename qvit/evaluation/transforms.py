"""From a PIL picture to the model's input: timm's evaluation transform, or one without antialiasing."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from qvit.errors import ConfigError
from qvit.evaluation.config import DataSettings


def build_transform(model: nn.Module, settings: DataSettings) -> tuple[Callable, dict]:
    """Make the evaluation transform of a timm model.

    Args:
        model: A timm model; its own data settings fill whatever `settings` leaves out.
        settings: The `data` section of the model's configuration.

    Returns:
        The transform (RGB picture -> float32 tensor (3, S, S)) and the settings as they were resolved.

    Raises:
        ConfigError: The picture size does not fit the model.
    """
    from timm.data import create_transform, resolve_model_data_config

    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = settings.input_size or (own_size[0] if own_size else None)
    if own_size and size != own_size[0] and getattr(model.patch_embed, "strict_img_size", True):
        raise ConfigError(f"data.input_size is {size}, the model takes {own_size[0]}: set kwargs.img_size to match")
    changes = {key: getattr(settings, key) for key in ("interpolation", "crop_pct", "crop_mode", "mean", "std")}
    changes = {key: value for key, value in changes.items() if value is not None}
    if size:
        changes["input_size"] = (3, size, size)
    resolved = resolve_model_data_config(model, args=changes)
    if settings.antialias:
        transform = create_transform(**resolved, is_training=False)
    else:
        transform = TensorTransform(
            size=resolved["input_size"][-1],
            interpolation=resolved["interpolation"],
            crop_pct=resolved["crop_pct"],
            crop_mode=resolved["crop_mode"],
            mean=resolved["mean"],
            std=resolved["std"],
        )
    return transform, {**resolved, "antialias": settings.antialias, "transform": " ".join(str(transform).split())}


class TensorTransform:
    """Resize without antialiasing, clamp to 0..1, centre crop and normalise, all on tensors.

    PIL always antialiases, so a model that was trained on `torch.nn.functional.interpolate`'s pictures needs this.
    """

    def __init__(
        self,
        *,
        size: int,
        interpolation: str,
        crop_pct: float,
        crop_mode: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self.size, self.interpolation, self.crop_pct, self.crop_mode = size, interpolation, crop_pct, crop_mode
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        """Transform an RGB picture into a float32 tensor (3, size, size)."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
        height, width = self._resized(*pixels.shape[-2:])
        corners = {} if self.interpolation == "nearest" else {"align_corners": False}
        pixels = F.interpolate(pixels, size=(height, width), mode=self.interpolation, **corners).clamp(0, 1)[0]
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return (pixels[:, top : top + self.size, left : left + self.size] - self.mean) / self.std

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        short = floor(self.size / self.crop_pct)
        if self.crop_mode == "squash":
            return short, short
        scale = short / min(height, width)
        return max(short, round(height * scale)), max(short, round(width * scale))

    def __repr__(self) -> str:
        mean, std = (tuple(round(v, 4) for v in t.flatten().tolist()) for t in (self.mean, self.std))
        return (
            f"TensorTransform(size={self.size}, interpolation={self.interpolation}, antialias=False, clamp=(0, 1), "
            f"crop_pct={self.crop_pct}, crop_mode={self.crop_mode}, mean={mean}, std={std})"
        )
