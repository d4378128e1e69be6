"""Small real models and data for the quickstart, the examples and the tests. Nothing is downloaded."""

from lightning_vram.demos.byte_gpt import ByteGPT
from lightning_vram.demos.digits_data import DigitsData
from lightning_vram.demos.digits_resnet import DigitsResNet
from lightning_vram.demos.source_text import SourceText

__all__ = ["ByteGPT", "DigitsData", "DigitsResNet", "SourceText"]
