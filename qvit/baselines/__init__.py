"""The attention operators that this library is measured against, one file a method, in one table.

Each has a definition in PyTorch, which any device runs; those that the QFlash paper times have a kernel too, but for
I-BERT, FQ-ViT and QAttn.
"""

from qvit.baselines import flash_attention, fq_vit, i_bert, i_vit, int_flash, product, qattn, qflash
from qvit.baselines.base import Call, Method

__all__ = ["METHODS", "Call", "Method"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        flash_attention.FLASH_ATTENTION_2,
        i_bert.I_BERT,
        fq_vit.FQ_VIT,
        i_vit.I_VIT,
        qattn.QATTN,
        int_flash.FULL,
        int_flash.HALF,
        qflash.QFLASH,
        qflash.QFLASH_TEXT,
        product.STANDARD,
        product.HIGH,
    )
}
