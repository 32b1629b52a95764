"""timm's shared `Attention`: ViT, DeiT, DINOv2, CLIP, SigLIP, hybrids and more.

Modifications:
- the product of queries and keys, the softmax and the product with the values run in integers;
- `attn_mask` and `is_causal` become a bias in exponent units; giving both is an error;
- training mode, and an input that requires a gradient, are errors.
Query/key normalisation, the normalisation and the gate before the output projection, and all projections stay float.
"""

from __future__ import annotations

import torch
from timm.layers import register_notrace_module
from timm.models.vision_transformer import Attention
from torch import nn

from qvit.patches.base import CoreInputs, QuantizedModule, attention_mask, core_bias, same_dtype


@register_notrace_module  # a leaf for symbolic tracing
class QuantizedAttention(QuantizedModule, Attention):
    """`Attention` with an integer core."""

    host = Attention
    known_children = frozenset({"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"})
    known_arguments = frozenset({"self", "x", "attn_mask", "is_causal"})

    @staticmethod
    def project(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys (both normalised) and values of x (B, N, C), each (B, H, N, D)."""
        q, k, v = QuantizedModule.project(module, x)
        return same_dtype(_optional(module, "q_norm", q), _optional(module, "k_norm", k), v)

    @classmethod
    def core_inputs(
        cls, module: nn.Module, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> CoreInputs:
        """Operands of the core for the arguments of `forward`."""
        q, k, v = cls.project(module, x)
        return CoreInputs(q, k, v, attention_mask(q, attn_mask, is_causal, cls.host))

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Attention of x (B, N, C); returns (B, N, dim_out) in the dtype of the projections.

        Raises:
            UnsupportedModuleError: Training mode, an input that requires a gradient, or a mask that does not fit.
        """
        self.require_inference(x)
        q, k, v, mask = self.core_inputs(self, x, attn_mask, is_causal)
        out = self.attend(q, k, v, core_bias(mask, self.qvit_constants, self.qvit_settings.arithmetic))
        out = _optional(self, "norm", out)
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def _optional(module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """Applies a child that older versions of the host do not have."""
    child = getattr(module, name, None)
    return x if child is None else child(x)
