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

from qvit.patches.base import packed_heads
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

    @staticmethod
    def project_image(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of x (B, N, C), each (B, N, H, D), with no step that the host can be spared."""
        return packed_heads(module.qkv(x), module.num_heads).unbind(2)


class FoldedSwinTransformerBlock(FoldedBlock, SwinTransformerBlock):
    """`SwinTransformerBlock` that leaves the moving of windows to the attention operator."""

    host, attention = SwinTransformerBlock, QuantizedWindowAttention
    moving, size = "_attn", "input_resolution"

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend_image(x) if self.reads_image(x) else super()._attn(x)
