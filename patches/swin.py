"""timm's Swin `WindowAttention` (first version) and its block.

Modifications:
- the product of queries and keys, the softmax and the product with the values run in integers (with `skip_slower`,
  where that is not slower);
- the relative position bias is held in exponent units, and renewed whenever its table may have changed;
- training mode, and an input that requires a gradient, are errors;
- a block of the expected kind gives its attention the image as it lies: shift, padding, partition and their reverses
  are addresses of the operator, which gives the same bits.
"""

from __future__ import annotations

import torch
from timm.layers import register_notrace_module
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import nn

from qvit.patches.windows import FoldedBlock, QuantizedWindows


@register_notrace_module  # a leaf for symbolic tracing
class QuantizedWindowAttention(QuantizedWindows, WindowAttention):
    """`WindowAttention` with an integer core."""

    host = WindowAttention
    known_children = frozenset({"qkv", "attn_drop", "proj", "proj_drop", "softmax"})
    known_tensors = frozenset({"relative_position_bias_table", "relative_position_index"})

    @staticmethod
    def position_bias(module: nn.Module) -> torch.Tensor:
        """Entries of the table, (H, N, N)."""
        return module._get_rel_pos_bias()[0]

    def attend_image(self, x: torch.Tensor, rows: torch.Tensor, pattern: torch.Tensor, has_pads: bool) -> torch.Tensor:
        """Attention in an image's windows, as its base says; the projection goes into the operator as it is."""
        self.require_inference(x)
        pad = None
        if has_pads:  # where there is no image, the host projects zeros
            pad = self.qkv(x.new_zeros(1, x.shape[-1])).reshape(3, self.num_heads, -1)
        settings = self.qvit_settings
        return torch.ops.qvit.window_attention_qkvpacked(
            self.qkv(x), self.num_heads, pad, self.qvit_constants, self.qvit_image_bias, rows, pattern,
            settings.precision, settings.backend, settings.half_exact,
        )  # fmt: skip


class FoldedSwinTransformerBlock(FoldedBlock, SwinTransformerBlock):
    """`SwinTransformerBlock` that leaves the moving of windows to the attention operator."""

    host, attention = SwinTransformerBlock, QuantizedWindowAttention
    moving, size = "_attn", "input_resolution"

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend_image(x) if self.reads_image(x) else super()._attn(x)
