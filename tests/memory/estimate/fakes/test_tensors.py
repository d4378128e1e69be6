"""Fake parameters: their class, and who goes by it."""

import torch
from torch import nn

from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, REAL_TYPES
from lightning_vram.memory.estimate.fake_device import FAKE_GPU, FakeParameter, fake_device
from lightning_vram.private_names.torch import FOREACH_TYPES


def test_parameters_are_of_a_class_of_their_own_wherever_they_go() -> None:
    with fake_device(num_bytes=2**30, allocated_bytes=lambda: 0, on_pin=lambda tensor: None):
        layer = nn.Linear(2, 2)
        kinds = {type(parameter) for parameter in layer.parameters()}
        moved = {(type(parameter), parameter.device) for parameter in layer.to(FAKE_GPU).parameters()}
        result = type(layer(torch.ones(1, 2, device=FAKE_GPU)))

    assert kinds == {FakeParameter}
    assert moved == {(FakeParameter, FAKE_GPU)}
    assert result is not FakeParameter
    assert FakeParameter in PARAMETER_CLASSES - REAL_TYPES


def test_a_parameter_of_real_numbers_is_an_ordinary_one_and_nothing_is_left_behind() -> None:
    before = nn.Parameter.__dict__["__new__"], [list(types) for types in FOREACH_TYPES]
    real = torch.ones(2)

    with fake_device(num_bytes=2**30, allocated_bytes=lambda: 0, on_pin=lambda tensor: None):
        assert type(nn.Parameter(real)) is nn.Parameter
        assert all(FakeParameter in types for types in FOREACH_TYPES)

    assert (nn.Parameter.__dict__["__new__"], [list(types) for types in FOREACH_TYPES]) == before
    assert type(nn.Linear(1, 1).weight) is nn.Parameter
