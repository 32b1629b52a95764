"""Host families: which attention classes are swapped and which blocks folded, by exact type, and with what.

Imported on the first quantize, load or report, for it loads timm.
"""

from __future__ import annotations

from torch import nn

from qvit.patches.base import QuantizedModule
from qvit.patches.swin import FoldedSwinTransformerBlock, QuantizedWindowAttention
from qvit.patches.swin_v2 import FoldedSwinTransformerV2Block, QuantizedWindowAttentionV2
from qvit.patches.swin_v2_cr import FoldedSwinTransformerV2CrBlock, QuantizedWindowMultiHeadAttention
from qvit.patches.vit import QuantizedAttention
from qvit.patches.windows import FoldedBlock

ADAPTERS: dict[type[nn.Module], type[QuantizedModule]] = {
    adapter.host: adapter
    for adapter in (
        QuantizedAttention,
        QuantizedWindowAttention,
        QuantizedWindowAttentionV2,
        QuantizedWindowMultiHeadAttention,
    )
}

# The hosts whose parent helps.
FOLDED: dict[type[nn.Module], type[FoldedBlock]] = {
    folded.host: folded
    for folded in (FoldedSwinTransformerBlock, FoldedSwinTransformerV2Block, FoldedSwinTransformerV2CrBlock)
}
