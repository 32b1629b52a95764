"""The attention operators that this library is measured against, one file a method, in one table.

Each has a definition in PyTorch, which any device runs; those that the QFlash paper times have a kernel too.
"""

from qvit.baselines import product, qflash
from qvit.baselines.base import Call, Method

__all__ = ["METHODS", "Call", "Method"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        qflash.QFLASH,
        qflash.QFLASH_TEXT,
        product.STANDARD,
        product.HIGH,
    )
}
