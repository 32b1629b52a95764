"""timm's Swin V2 `WindowAttention` and its block.

Modifications, besides those of the first version (`qvit.patches.swin`):
- cosines are found in float32 whatever the module's type, and rounded to it;
- the continuous position bias is evaluated once, not in every forward, and renewed whenever its network may have
  changed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, WindowAttention
from torch import nn

from qvit.patches.windows import FoldedBlock, QuantizedCosineWindows


@register_notrace_module  # a leaf for symbolic tracing
class QuantizedWindowAttentionV2(QuantizedCosineWindows, WindowAttention):
    """`WindowAttention` of Swin V2 with an integer core."""

    host = WindowAttention
    known_children = frozenset({"qkv", "cpb_mlp", "attn_drop", "proj", "proj_drop", "softmax"})
    known_tensors = frozenset(
        {"logit_scale", "q_bias", "k_bias", "v_bias", "relative_coords_table", "relative_position_index"}
    )

    @staticmethod
    def packed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The projection of x (B, N, C); its biases lie beside `qkv`, which the host calls only where it must."""
        if module.q_bias is None:
            return module.qkv(x)
        bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
        if module.qkv_bias_separate:
            return module.qkv(x) + bias
        return F.linear(x, module.qkv.weight, bias)

    @staticmethod
    def position_bias(module: nn.Module) -> torch.Tensor:
        """16 times the sigmoid of what the network makes of two positions' distance, (H, N, N)."""
        table = module.cpb_mlp(module.relative_coords_table).flatten(0, 2)
        return 16 * table[module.relative_position_index].permute(2, 0, 1).float().sigmoid()


class FoldedSwinTransformerV2Block(FoldedBlock, SwinTransformerV2Block):
    """`SwinTransformerV2Block` that leaves the moving of windows to the attention operator."""

    host, attention = SwinTransformerV2Block, QuantizedWindowAttentionV2
    moving, size = "_attn", "input_resolution"

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend_image(x) if self.reads_image(x) else super()._attn(x)
