import pytest
import torch
from support.devices import DEVICE

pytestmark = pytest.mark.device


def test_sum():
    assert torch.ones(3, device=DEVICE).sum().item() == 3
