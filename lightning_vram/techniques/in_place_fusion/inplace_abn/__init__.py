"""Batch norm and an invertible activation keep one map instead of three. May import: core, memory."""

from lightning_vram.techniques.in_place_fusion.inplace_abn.pairs import InPlaceABNHandle, apply_inplace_abn_where_safe

__all__ = ["InPlaceABNHandle", "apply_inplace_abn_where_safe"]
