"""timm's shared `Attention`: ViT, DeiT, DINOv2, CLIP, SigLIP, hybrids and more.

Modifications:
- the product of queries and keys, the softmax and the product with the values run in integers (with `skip_slower`,
  where that is not slower);
- `attn_mask` and `is_causal` become a bias in exponent units; giving both is an error;
- training mode, and an input that requires a gradient, are errors.
Query/key normalisation, the normalisation and the gate before the output projection, and all projections stay float.
"""

from __future__ import annotations

import torch
from timm.layers import register_notrace_module
from timm.models.vision_transformer import Attention
from torch import nn

from qvit.patches.base import QuantizedModule, apply, attention_mask, is_idle, same_dtype


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
        q_norm, k_norm = (module._modules.get(name) for name in ("q_norm", "k_norm"))  # older hosts have none
        return same_dtype(apply(q_norm, q), apply(k_norm, k), v)

    @classmethod
    def float_bias(
        cls, module: nn.Module, q: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor | None:
        """The mask arguments as one bias."""
        return attention_mask(q, attn_mask, is_causal, cls.host)

    @staticmethod
    def is_biased(attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> bool:
        """True with a mask."""
        return attn_mask is not None or is_causal

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Attention of x (B, N, C); returns (B, N, dim_out) in the dtype of the projections.

        Raises:
            UnsupportedModuleError: Training mode, an input that requires a gradient, or a mask that does not fit.
        """
        self.require_inference(x)
        children = self._modules  # older hosts have fewer
        plain = attn_mask is None and not is_causal
        if plain and is_idle(children.get("q_norm")) and is_idle(children.get("k_norm")):
            out = self.attend_packed(self.qkv(x))
        else:
            out = self.attend(*self.project(self, x), attn_mask, is_causal)
        out = apply(children.get("norm"), out)
        gate = children.get("gate")
        if gate is not None:
            out = out * gate(x).sigmoid()
        return apply(self.proj_drop, self.proj(out))
