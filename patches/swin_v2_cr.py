"""timm's Swin V2 "CR" `WindowMultiHeadAttention` and its block.

Modifications, besides those of the first version (`qvit.patches.swin`):
- cosines are found in float32 whatever the module's type, and rounded to it;
- the continuous position bias is evaluated once, not in every forward, and renewed whenever its network may have
  changed.
"""

from __future__ import annotations

import torch
from timm.layers import register_notrace_module
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock, WindowMultiHeadAttention
from torch import nn

from qvit.patches.windows import FoldedBlock, QuantizedCosineWindows


@register_notrace_module  # a leaf for symbolic tracing
class QuantizedWindowMultiHeadAttention(QuantizedCosineWindows, WindowMultiHeadAttention):
    """`WindowMultiHeadAttention` with an integer core."""

    host = WindowMultiHeadAttention
    known_children = frozenset({"qkv", "meta_mlp", "attn_drop", "proj", "proj_drop"})
    known_tensors = frozenset({"logit_scale", "relative_coordinates_log"})

    @staticmethod
    def position_bias(module: nn.Module) -> torch.Tensor:
        """What the network makes of two positions' distance, (H, N, N)."""
        return module._relative_positional_encodings()[0]


class FoldedSwinTransformerV2CrBlock(FoldedBlock, SwinTransformerV2CrBlock):
    """`SwinTransformerV2CrBlock` that leaves the moving of windows to the attention operator."""

    host, attention = SwinTransformerV2CrBlock, QuantizedWindowMultiHeadAttention
    moving, size = "_shifted_window_attn", "feat_size"

    def _shifted_window_attn(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend_image(x) if self.reads_image(x) else super()._shifted_window_attn(x)
