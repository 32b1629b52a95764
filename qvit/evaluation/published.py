"""The figures of the QFlash paper (arXiv 2604.25306) that are known here, each with where it is from.

The paper's own text was not at hand: most come from summaries of it by others, which agree with each other and, where
they overlap, with the authors' README. What no source gives is not here.
"""

from __future__ import annotations

from typing import NamedTuple

README = "authors' README"
ABSTRACT = "abstract"
SUMMARY = "summaries of the paper by others"


class Figure(NamedTuple):
    """A number of the paper and its source."""

    value: float
    source: str


def _figures(source: str, quantity: str, table: str, values: dict[tuple[str, str], float]) -> dict:
    return {(table, case, method, quantity): Figure(value, source) for (case, method), value in values.items()}


_SPEED_UP = "speed-up over I-ViT"

# By table, case, method and quantity.
FIGURES: dict[tuple[str, str, str, str], Figure] = {
    **_figures(SUMMARY, _SPEED_UP, "fig3", {
        ("best of A1-A3, batch 1", "qflash"): 4.54,
        ("best of A4-A7, batch 1", "qflash"): 7.69,
    }),
    **_figures(ABSTRACT, _SPEED_UP, "fig3", {
        ("best of A1-A3, batch 8", "qflash"): 6.73,
        ("best of A4-A7, batch 8", "qflash"): 8.69,
    }),
    **_figures(SUMMARY, "IMMA %", "2", {("A2, batch 8", "qflash"): 8.00, ("A7, batch 8", "qflash"): 2.55}),
    **_figures(SUMMARY, "HMMA %", "2", {("A2, batch 8", "flash_attention_2"): 13.08,
                                        ("A7, batch 8", "flash_attention_2"): 4.69}),
    **_figures(SUMMARY, "uJ a call", "3", {
        ("A2, batch 8", "flash_attention_2"): 929.6,
        ("A2, batch 8", "qflash"): 754.6,
    }),
    **_figures(README, "SQNR dB", "4", {("A2 uniform", "qflash"): 32.50, ("A7 uniform", "qflash"): 31.02}),
    **_figures(SUMMARY, "SQNR dB", "4", {
        ("A2 uniform", "i_vit"): 25.80,
        ("A7 uniform", "i_vit"): 25.22,
        ("A2 uniform", "int_flash_half"): 38.19,
        ("A7 uniform", "int_flash_half"): 39.07,
    }),
    **_figures(README, "Top-1 %", "5", {
        ("vit_small", "fp32"): 81.38, ("vit_small", "qflash"): 82.24,
        ("vit_base", "fp32"): 85.10, ("vit_base", "qflash"): 86.84,
        ("deit_tiny", "fp32"): 72.21, ("deit_tiny", "qflash"): 71.70,
        ("deit_small", "fp32"): 79.85, ("deit_small", "qflash"): 79.46,
        ("deit_base", "fp32"): 81.85, ("deit_base", "qflash"): 81.59,
        ("swin_tiny", "fp32"): 81.35, ("swin_tiny", "qflash"): 80.06,
        ("swin_small", "fp32"): 83.20, ("swin_small", "qflash"): 81.86,
    }),
    **_figures(SUMMARY, "Top-1 %", "5", {("swin_tiny", "i_vit"): 80.83, ("swin_small", "i_vit"): 82.81}),
    **_figures(SUMMARY, "speed-up over float", "ablation", {
        ("A2, batch 1024", "float"): 1.00,
        ("A2, batch 1024", "int8 QK"): 1.41,
        ("A2, batch 1024", "+ int8 PV"): 1.46,
        ("A2, batch 1024", "+ integer exponent"): 1.61,
        ("A2, batch 1024", "+ integer accumulation"): 1.62,
    }),
}  # fmt: skip
