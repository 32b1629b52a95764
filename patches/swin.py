"""timm's Swin `WindowAttention` (first version).

Modifications:
- the product of queries and keys, the softmax and the product with the values run in integers (with `skip_slower`,
  where that is not slower);
- the relative position bias is held in exponent units, and renewed whenever its table may have changed;
- training mode, and an input that requires a gradient, are errors;
- a block of the expected kind gives its attention the image as it lies: shift, padding, partition and their reverses
  are addresses of the operator, which gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from timm.layers import register_notrace_module
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import fx, nn

from qvit import ops
from qvit.config import QuantConfig
from qvit.errors import UnsupportedModuleError
from qvit.patches.base import QuantizedModule
from qvit.scales import Scales
from qvit.windows import SHIFT_MASK, WindowPlan, plan_windows


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

    @property
    def layout(self) -> str:
        """What the block gives: "image", as it lies, or "windows"."""
        return "image" if "qvit_image_bias" in self._buffers else "windows"

    def attend_image(self, x: torch.Tensor, rows: torch.Tensor, pattern: torch.Tensor, has_pads: bool) -> torch.Tensor:
        """Attention in an image's windows, x (B, height, width, C), without the projection.

        Args:
            x: The block's normed input.
            rows, pattern: Of the image's :class:`qvit.windows.WindowPlan`.
            has_pads: A window reaches beyond the image.
        """
        self.require_inference(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).flatten(1, 2).unbind(2)
        pad = None
        if has_pads:  # where there is no image, the projection's bias is all that is left
            zeros = q.new_zeros(3, *q.shape[2:])
            pad = zeros if self.qkv.bias is None else self.qkv.bias.to(q.dtype).view_as(zeros)
        settings = self.qvit_settings
        out = torch.ops.qvit.window_attention(
            q, k, v, pad, self.qvit_constants, self.qvit_image_bias, rows, pattern, settings.precision, q.dtype,
            settings.backend, settings.half_exact,
        )  # fmt: skip
        return out.reshape(*x.shape[:3], -1)

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
        self._hold("qvit_bias", self._get_rel_pos_bias().float())
        self._renew_image_bias()

    def _renew_image_bias(self) -> None:
        masks = self._buffers.get("qvit_masks")
        if masks is None or masks.shape[-1] != self.qvit_bias.shape[-1]:
            return  # the block that changed the window makes new ones
        self._hold("qvit_image_bias", ops.pattern_bias(masks, self._get_rel_pos_bias()[0], self.num_heads, SHIFT_MASK))

    def _hold(self, name: str, bias: torch.Tensor) -> None:
        """Keeps a bias in exponent units, in place where that can be: a captured CUDA graph reads its address."""
        bias = ops.exponent_bias(bias, self.qvit_constants)
        held = self._buffers.get(name)
        if held is not None and held.shape == bias.shape and not held.is_inference():
            held.copy_(bias)
        else:
            self.register_buffer(name, bias, persistent=False)


class FoldedSwinTransformerBlock(SwinTransformerBlock):
    """`SwinTransformerBlock` that leaves the moving of windows to the attention operator."""

    @classmethod
    def fold(cls, block: nn.Module) -> None:
        """Turns a block of the expected kind, whose attention is swapped, into this class; leaves any other."""
        if type(block) is not SwinTransformerBlock or {"_attn", "forward"} & vars(block).keys():
            return
        attn, dynamic = block.attn, getattr(block, "dynamic_mask", False)
        if type(attn) is not QuantizedWindowAttention or attn.layout == "image" or dynamic:
            return  # an attention of two blocks reads the image for the first alone
        if attn.qvit_settings.arithmetic != "qvit" or attn.qvit_settings.skip_slower:
            return
        plan = _plan_of(block)
        if plan is not None:
            cls._take(block, plan)
            block.__class__ = cls

    def unfold(self) -> None:
        """Gives the host's class back; call it before the attention's own way back."""
        self.__class__ = SwinTransformerBlock
        for module, names in ((self, ("qvit_rows", "qvit_pattern")), (self.attn, ("qvit_masks", "qvit_image_bias"))):
            for name in names:
                module._buffers.pop(name, None)
        vars(self).pop("qvit_image", None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, plan: WindowPlan) -> None:
        device = self.attn.qvit_constants.device
        rows, pattern, masks = plan.tensors(device)
        self.register_buffer("qvit_rows", rows, persistent=False)
        self.register_buffer("qvit_pattern", pattern, persistent=False)
        self.attn.register_buffer("qvit_masks", masks, persistent=False)
        self.attn._renew_image_bias()
        self.qvit_image = (tuple(self.input_resolution), plan.has_pads)

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        attn = self.attn
        # Another size has other windows; whoever hooks, replaces or restores a part of the attention expects windows.
        if isinstance(x, fx.Proxy) or tuple(x.shape[1:3]) != self.qvit_image[0] or not _is_untouched(attn):
            return super()._attn(x)
        if self.qvit_rows.shape[1] != attn.qvit_bias.shape[-1]:
            return super()._attn(x)  # set_window_size of the attention alone: the host's own error
        return attn.proj_drop(attn.proj(attn.attend_image(x, self.qvit_rows, self.qvit_pattern, self.qvit_image[1])))

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size as the host does, and finds the windows anew; the scales stay as calibrated."""
        super().set_input_size(*args, **kwargs)
        plan = _plan_of(self)
        if plan is None:
            self.unfold()
        else:
            self._take(plan)


def _is_untouched(attn: nn.Module) -> bool:
    """True for a swapped attention as it was swapped, with no one listening."""
    if type(attn) is not QuantizedWindowAttention or "forward" in vars(attn) or type(attn.qkv) is not nn.Linear:
        return False
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in (attn, attn.qkv, attn.proj, attn.proj_drop))


def _plan_of(block: nn.Module) -> WindowPlan | None:
    """The block's windows, where its own mask says the same and the operator takes windows of that size."""
    window = tuple(block.window_size)
    if window[0] * window[1] > ops.MAX_WINDOW:
        return None
    plan = plan_windows(*block.input_resolution, window, tuple(block.shift_size))
    if block.attn_mask is None:
        return None if plan.masks.any() else plan
    mask = plan.masks[plan.pattern] * SHIFT_MASK
    return plan if np.array_equal(block.attn_mask.detach().float().cpu().numpy(), mask) else None


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
