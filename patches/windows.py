"""What the window attentions of the Swin family share, and what their blocks do.

- The position bias is held in exponent units, and made anew where its source may have changed: when a state_dict is
  loaded into the attention or into what it is a part of, the window changes, or `eval()` is called. Who writes to the
  source by other means calls `model.eval()` after that.
- A block of the expected kind gives its attention the image as it lies: shift, padding, partition and their reverses
  are addresses of the operator, which gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from qvit import ops
from qvit.config import QuantConfig
from qvit.errors import UnsupportedModuleError
from qvit.patches.base import QuantizedModule, apply, same_dtype
from qvit.reference import split_heads
from qvit.scales import Scales
from qvit.windows import SHIFT_MASK, WindowPlan, plan_windows

_MAX_LOGIT_SCALE = math.log(100)  # of Swin V2, arXiv 2111.09883, section 3.2: cosines are divided by no less than 0.01


class QuantizedWindows(QuantizedModule):
    """Mixin of window attentions. Rows of the batch are windows; row r uses mask r % num_windows.

    A subclass says what its host's position bias is.
    """

    known_arguments = frozenset({"self", "x", "mask"})

    @staticmethod
    def position_bias(module: nn.Module) -> torch.Tensor:
        """The bias of a window's positions as the host makes it, (H, N, N)."""
        raise NotImplementedError

    @classmethod
    def window_bias(cls, module: nn.Module) -> torch.Tensor:
        """`position_bias` in float32, under autocast the same as without: a held one knows of no autocast."""
        device = next(module.parameters()).device  # not of a weight by name: whoever packs a linear layer hides it
        with torch.autocast(device.type, enabled=False):
            return cls.position_bias(module).float()

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Returns the reason why this module must stay float, or None."""
        if type(getattr(module, "softmax", None)) not in (nn.Softmax, type(None)):
            return "unknown_attribute:softmax"
        return super().refuse(module)

    @classmethod
    def float_bias(cls, module: nn.Module, q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The position bias, with the mask if there is one; float32 (1 or num_windows, H, N, N)."""
        bias = cls.window_bias(module)[None]
        return bias if mask is None else bias + _window_mask(q, mask, cls.host)

    def integer_bias(self, q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The bias as the operator takes it; without a mask, the one that is held."""
        if mask is None and self.qvit_settings.arithmetic == "qvit":
            return self.qvit_bias
        # Exponent units are relative to each row's maximum, so the sum has to be made in float.
        return super().integer_bias(q, mask)

    @staticmethod
    def is_biased(mask: torch.Tensor | None = None) -> bool:
        """True: there is always the position bias."""
        return True

    @classmethod
    def build_buffers(cls, module: nn.Module, scales: Scales, config: QuantConfig) -> dict[str, torch.Tensor]:
        """The constants, and for "qvit" the position bias in exponent units, int32 (1, H, N, N)."""
        buffers = super().build_buffers(module, scales, config)
        if config.arithmetic == "qvit":
            buffers["qvit_bias"] = ops.exponent_bias(cls.window_bias(module)[None], buffers["qvit_constants"])
        return buffers

    def after_loading(self) -> None:
        """Takes notice of a state_dict that was loaded, and renews the bias."""
        super().after_loading()
        self.renew_bias()

    @property
    def layout(self) -> str:
        """What the block gives: "image", as it lies, or "windows"."""
        return "image" if "qvit_image_bias" in self._buffers else "windows"

    def attend_image(self, x: torch.Tensor, rows: torch.Tensor, pattern: torch.Tensor, has_pads: bool) -> torch.Tensor:
        """Attention in an image's windows, x (B, height, width, C), without the projection.

        Args:
            x: The attention's input.
            rows, pattern: Of the image's :class:`qvit.windows.WindowPlan`.
            has_pads: A window reaches beyond the image.
        """
        self.require_inference(x)
        q, k, v = (y.transpose(1, 2) for y in self.project(self, x.flatten(1, 2)))
        pad = None
        if has_pads:  # where there is no image, the host projects zeros
            pad = torch.cat(self.project(self, x.new_zeros(1, 1, x.shape[-1]))).squeeze(2)
        settings = self.qvit_settings
        out = torch.ops.qvit.window_attention(
            q, k, v, pad, self.qvit_constants, self.qvit_image_bias, rows, pattern, settings.precision, q.dtype,
            settings.backend, settings.half_exact,
        )  # fmt: skip
        return out.reshape(*x.shape[:3], out.shape[2] * out.shape[3])  # no -1, for B may be 0

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
        self.renew_bias()

    def train(self, mode: bool = True) -> nn.Module:
        """Renews the bias on the way back to inference, for its source may have been trained or written to."""
        super().train(mode)
        self.renew_bias()
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew_bias(self) -> None:
        """Makes the held biases anew; not in training, where a dropout may be in their way, and no one reads them."""
        if self.training or "qvit_bias" not in self._buffers:
            return
        bias = self.window_bias(self)
        self._hold("qvit_bias", ops.exponent_bias(bias[None], self.qvit_constants))
        masks = self._buffers.get("qvit_masks")
        if masks is None:
            return
        if masks.shape[-1] == bias.shape[-1]:
            bias = ops.pattern_bias(masks, bias, self.num_heads, SHIFT_MASK)
            self._hold("qvit_image_bias", ops.window_bias(bias, self.qvit_constants))
        elif self.layout == "image":  # another window than the block's, until that one changes as well
            del self.qvit_image_bias

    def _hold(self, name: str, bias: torch.Tensor) -> None:
        """Keeps a bias, in place where that can be: a captured CUDA graph reads its address."""
        held = self._buffers.get(name)
        if held is not None and held.shape == bias.shape and not held.is_inference():
            held.copy_(bias)
        else:
            self.register_buffer(name, bias, persistent=False)


class QuantizedCosineWindows(QuantizedWindows):
    """Mixin of window attentions by cosine: queries and keys of length one, times a learned scale of each head.

    The scale is the queries', so that the core's own is 1.
    """

    granularity = "head"  # the learned scales of heads are up to a hundred times apart

    @classmethod
    def scale_of(cls, module: nn.Module) -> float:
        """1: cosine attention leaves no other factor to the scores."""
        return 1.0

    @staticmethod
    def packed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The projection of x (B, N, C) as the host makes it, (B, N, 3 * H * D)."""
        return module.qkv(x)

    @classmethod
    def project(cls, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys (both normalised, the queries times their head's scale) and values of x, each (B, H, N, D).

        In float32 whatever the module's type: in float16 the host's epsilon is zero, and a key of zeros is NaN.
        """
        qkv = split_heads(cls.packed(module, x), module.num_heads)
        q, k = F.normalize(qkv[:2].float(), dim=-1)
        logit_scale = module.logit_scale.float().clamp(max=_MAX_LOGIT_SCALE).exp()
        return same_dtype(q * logit_scale.view(-1, 1, 1), k, qkv[2])


class FoldedBlock:
    """Mixin of blocks that leave the moving of windows to the attention operator. A subclass names the host's parts."""

    host: ClassVar[type[nn.Module]]
    attention: ClassVar[type[QuantizedWindows]]
    moving: ClassVar[str]  # the host's method that moves windows; the subclass overrides it
    size: ClassVar[str]  # the host's attribute for the image's size

    @classmethod
    def fold(cls, block: nn.Module) -> None:
        """Turns a block of the host's class, whose attention is swapped, into this class; leaves an unusual one."""
        if {cls.moving, "forward"} & vars(block).keys():
            return
        attn, dynamic = block.attn, getattr(block, "dynamic_mask", False)
        if type(attn) is not cls.attention or attn.layout == "image" or dynamic:
            return  # an attention of two blocks reads the image for the first alone
        if attn.qvit_settings.arithmetic != "qvit" or attn.qvit_settings.skip_slower:
            return
        plan = cls._plan_of(block)
        if plan is not None:
            block.__class__ = cls  # first: what fails from here on, `unfold` undoes
            cls._take(block, plan)

    def unfold(self) -> None:
        """Gives the host's class back; call it before the attention's own way back."""
        self.__class__ = self.host
        for module, names in ((self, ("qvit_rows", "qvit_pattern")), (self.attn, ("qvit_masks", "qvit_image_bias"))):
            for name in names:
                if name in module._buffers:
                    delattr(module, name)
        vars(self).pop("qvit_image", None)

    def reads_image(self, x: torch.Tensor) -> bool:
        """True where the attention can take x (B, height, width, C) as it lies."""
        # Another size has other windows; whoever hooks, replaces or restores a part of the attention expects windows.
        return not isinstance(x, fx.Proxy) and tuple(x.shape[1:3]) == self.qvit_image[0] and self.is_untouched()

    def attend_image(self, x: torch.Tensor) -> torch.Tensor:
        """What the host's method gives for x (B, height, width, C)."""
        attn = self.attn
        parts = attn._modules
        out = attn.attend_image(x, self.qvit_rows, self.qvit_pattern, self.qvit_image[1])
        return apply(parts["proj_drop"], parts["proj"](out))

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size as the host does, and finds the windows anew; the scales stay as calibrated."""
        # An older host stops midway at a size that its windows do not divide: until it has one, windows are its own.
        self.qvit_image = (None, False)
        super().set_input_size(*args, **kwargs)
        plan = self._plan_of(self)
        if plan is None:
            self.unfold()
        else:
            self._take(self, plan)

    @classmethod
    def _plan_of(cls, block: nn.Module) -> WindowPlan | None:
        """The block's windows, where its own mask says the same and the operator takes windows of that size."""
        window = tuple(block.window_size)
        if window[0] * window[1] > ops.MAX_WINDOW:
            return None
        plan = plan_windows(*getattr(block, cls.size), window, tuple(block.shift_size))
        if block.attn_mask is None:
            return None if plan.masks.any() else plan
        mask = plan.masks[plan.pattern] * SHIFT_MASK
        return plan if np.array_equal(block.attn_mask.detach().float().cpu().numpy(), mask) else None

    def is_untouched(self) -> bool:
        """True where the swapped attention is as it was swapped, with no one listening.

        Each look is a guard of compiled code as well, so there are no more than it takes.
        """
        attn, listeners = self.attn, torch.nn.modules.module
        # Not vars(attn), which torch 2.8 does not compile.
        if type(attn) is not self.attention or "forward" in attn.__dict__:
            return False
        if listeners._global_forward_hooks or listeners._global_forward_pre_hooks:
            return False
        if "qvit_image_bias" not in attn._buffers:  # after set_window_size of the attention alone: the host's own error
            return False
        parts = attn._modules  # each attribute of a module takes as long as the rest of a look
        for part in (attn, parts["qkv"], parts["proj"], parts["proj_drop"]):  # any() of a generator takes longer
            if part._forward_hooks or part._forward_pre_hooks:
                return False
        return type(parts["qkv"]) is nn.Linear

    @classmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(cls, block: nn.Module, plan: WindowPlan) -> None:
        rows, pattern, masks = plan.tensors(block.attn.qvit_constants.device)
        block.register_buffer("qvit_rows", rows, persistent=False)
        block.register_buffer("qvit_pattern", pattern, persistent=False)
        block.qvit_image = (tuple(getattr(block, cls.size)), plan.has_pads)
        block.attn.register_buffer("qvit_masks", masks, persistent=False)
        block.attn.renew_bias()


def _window_mask(q: torch.Tensor, mask: torch.Tensor, host: type[nn.Module]) -> torch.Tensor:
    """A mask (num_windows, N, N) as an additive float32 bias (num_windows, 1, N, N)."""
    B, _, N, _ = q.shape
    fits = mask.is_floating_point() and mask.ndim == 3 and tuple(mask.shape[1:]) == (N, N)
    if not fits or B % mask.shape[0]:
        raise UnsupportedModuleError(
            f"{host.__name__} got a mask of {mask.dtype} {tuple(mask.shape)} for {B} windows of {N} tokens; "
            f"expected floating (num_windows, {N}, {N}) with a whole number of images"
        )
    return mask.float().unsqueeze(1)
