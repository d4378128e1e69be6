"""Float32 tensors of codes by a map: their bytes, and that what a kernel has written is read and written again."""

import pytest
import torch

from lightning_vram.core.tensors.codecs import CodeMap, MappedTensor, empty_mapped


@pytest.mark.parametrize(("size", "num_bytes"), [(256, 5000 + 4 * 40), (16, 2500 + 4 * 40)])
@pytest.mark.parametrize("is_positive", [False, True])
def test_what_a_kernel_has_written_is_written_again_to_the_same_values(is_positive, size, num_bytes):
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(0.01 if is_positive else -0.9929687, 1, size)
    if not is_positive:
        values[values.abs().argmin()] = 0  # of which the missing end of the last block is made
    made = empty_mapped(torch.empty(50, 100), CodeMap(values, 128))
    assert (made.bits, made.is_positive, made.nbytes) == (8 if size == 256 else 4, is_positive, num_bytes)
    assert not made.any()
    numbers = torch.randn(40, 128, generator=generator) * 10 ** torch.randn(40, 1, generator=generator)
    numbers = numbers.abs() if is_positive else numbers
    numbers.view(-1)[5000:] = 0
    made.scales.copy_(numbers.abs().amax(1))
    codes = (numbers / made.scales.view(-1, 1)).flatten()[:5000].view(-1, 1).sub(values).abs().argmin(1)
    made.records.copy_(codes[::2] << 4 | codes[1::2] if size == 16 else codes)
    read = made.decode()
    assert (read.flatten() - numbers.flatten()[:5000]).abs().max() < numbers.abs().max() * 2 / size
    again = empty_mapped(made, made.code_map)
    again.copy_(read)
    assert torch.equal(again.decode(), read)
    for moved in (again.clone(), again.to("cpu", copy=True), again.view(-1)):
        assert isinstance(moved, MappedTensor)
        assert torch.equal(moved.flatten(), read.flatten())
