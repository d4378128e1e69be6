"""What logits that are not there can do, by the names of torch's functions."""

from lightning_vram.techniques.chunked_loss.losses import LOSSES
from lightning_vram.techniques.chunked_loss.row_functions import ROW_FUNCTIONS
from lightning_vram.techniques.chunked_loss.shapes import SHAPES, Function

FUNCTIONS: dict[str, Function] = {**SHAPES, **ROW_FUNCTIONS, **LOSSES}
