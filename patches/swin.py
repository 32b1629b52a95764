"""timm's Swin `WindowAttention` (first version).

Modifications:
- the product of queries and keys, the softmax and the product with the values run in integers (with `skip_slower`,
  where that is not slower);
- the relative position bias is held in exponent units, and renewed whenever its table may have changed;
- training mode, and an input that requires a gradient, are errors.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models.swin_transformer import WindowAttention
from torch import nn

from qvit import ops
from qvit.config import QuantConfig
from qvit.errors import UnsupportedModuleError
from qvit.patches.base import QuantizedModule
from qvit.scales import Scales


@register_notrace_module  # a leaf for symbolic tracing
class QuantizedWindowAttention(QuantizedModule, WindowAttention):
    """`WindowAttention` with an integer core. Rows of the batch are windows; row r uses mask r % num_windows."""

    host = WindowAttention
    known_children = frozenset({"qkv", "attn_drop", "proj", "proj_drop", "softmax"})
    known_tensors = frozenset({"relative_position_bias_table", "relative_position_index"})
    known_arguments = frozenset({"self", "x", "mask"})

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Returns the reason why this module must stay float, or None."""
        if type(module.softmax) is not nn.Softmax:
            return "unknown_attribute:softmax"
        return super().refuse(module)

    @classmethod
    def float_bias(cls, module: nn.Module, q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The relative position bias, with the mask if there is one; float32 (1 or num_windows, H, N, N)."""
        bias = module._get_rel_pos_bias().float()
        return bias if mask is None else bias + _window_mask(q, mask)

    def integer_bias(self, q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The bias as the operator takes it; without a mask, the one that is held."""
        if mask is None and self.qvit_settings.arithmetic == "qvit":
            return self.qvit_bias
        # Exponent units are relative to each row's maximum, so the sum has to be made in float.
        return super().integer_bias(q, mask)

    @staticmethod
    def is_biased(mask: torch.Tensor | None = None) -> bool:
        """True: there is always the relative position bias."""
        return True

    @classmethod
    def build_buffers(cls, module: nn.Module, scales: Scales, config: QuantConfig) -> dict[str, torch.Tensor]:
        """The constants, and for "qvit" the relative position bias in exponent units, int32 (1, H, N, N)."""
        buffers = super().build_buffers(module, scales, config)
        if config.arithmetic == "qvit":
            bias = module._get_rel_pos_bias().float()
            buffers["qvit_bias"] = ops.exponent_bias(bias, buffers["qvit_constants"])
        return buffers

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention inside windows.

        Args:
            x: (B * num_windows, N, C).
            mask: None, or additive floating (num_windows, N, N).

        Raises:
            UnsupportedModuleError: Training mode, an input that requires a gradient, or a mask that does not fit.
        """
        self.require_inference(x)
        q, k, v = self.project(self, x)
        return self.proj_drop(self.proj(self.attend(q, k, v, mask)))

    def set_window_size(self, window_size: Any) -> None:
        """Changes the window as the host does, and renews the bias; the scales stay as calibrated."""
        super().set_window_size(window_size)
        self._renew_bias()

    def train(self, mode: bool = True) -> nn.Module:
        """Renews the bias on the way back to inference, for the table may have been trained or written to."""
        super().train(mode)
        if not mode:
            self._renew_bias()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._renew_bias()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _renew_bias(self) -> None:
        if "qvit_bias" not in self._buffers:
            return
        bias = ops.exponent_bias(self._get_rel_pos_bias().float(), self.qvit_constants)
        if bias.shape == self.qvit_bias.shape and not self.qvit_bias.is_inference():
            self.qvit_bias.copy_(bias)  # in place: a captured CUDA graph reads this address
        else:
            self.qvit_bias = bias


def _window_mask(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mask (num_windows, N, N) as an additive float32 bias (num_windows, 1, N, N)."""
    B, _, N, _ = q.shape
    fits = mask.is_floating_point() and mask.ndim == 3 and tuple(mask.shape[1:]) == (N, N)
    if not fits or B % mask.shape[0]:
        raise UnsupportedModuleError(
            f"WindowAttention got a mask of {mask.dtype} {tuple(mask.shape)} for {B} windows of {N} tokens; "
            f"expected floating (num_windows, {N}, {N}) with a whole number of images"
        )
    return mask.float().unsqueeze(1)
