"""Gradients that are kept for nothing: their bytes."""

import torch
from torch import nn

from lightning_vram.techniques.early_release import gradient_bytes


def test_bytes_are_those_of_storages_each_counted_once():
    bucket = torch.zeros(100)
    one, other, third = (nn.Parameter(torch.zeros(10)) for _ in range(3))
    assert gradient_bytes([one, other]) == 0
    one.grad, other.grad = bucket[:10], bucket[10:20]  # as DDP has it
    third.grad = torch.zeros(10)
    assert gradient_bytes([one, other, third]) == 400 + 40
