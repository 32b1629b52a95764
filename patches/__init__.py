"""Host families: which attention classes are swapped, by exact type, and with what.

Imported on the first quantize, load or report, for it loads timm.
"""

from __future__ import annotations

from torch import nn

from qvit.patches.base import QuantizedModule
from qvit.patches.swin import FoldedSwinTransformerBlock, QuantizedWindowAttention
from qvit.patches.vit import QuantizedAttention

FOLDED = FoldedSwinTransformerBlock  # the one host whose parent helps

ADAPTERS: dict[type[nn.Module], type[QuantizedModule]] = {
    QuantizedAttention.host: QuantizedAttention,
    QuantizedWindowAttention.host: QuantizedWindowAttention,
}
