"""What an estimate says of a run, and what is left of it."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_vram as lv
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.tracking.timeline import Category

TINY = lv.DeviceSpec("tiny", memory_bytes=400 * 2**20, capability=(8, 0), context_bytes=0, workspace_bytes=0)
TOKENS = torch.zeros(4, 33, dtype=torch.int64)


class Wide(pl.LightningModule):
    """One weight of 16 MiB, one product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2048, 2048, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def a_gpt():
    return ByteGPT(num_layers=2, width=64, num_heads=2, sequence_length=32)


def test_bytes_of_a_step_are_worked_out_by_hand():
    estimate = lv.estimate_memory(Wide(), torch.zeros(256, 2048), device="rtx4090", find_limits=False)
    weight, rows = 2048 * 2048 * 4, 256 * 2048 * 4
    # In the backward: weight, its gradient, the input, and the gradient of the sum expanded, which takes 4 bytes.
    assert estimate.by_category[Category.PARAMETERS] == weight
    assert estimate.by_category[Category.GRADIENTS] <= weight
    assert 2 * weight + rows <= estimate.peak_bytes <= 2 * weight + 2 * rows + 1024
    assert estimate.allocated_bytes >= estimate.peak_bytes
    assert estimate.reserved_bytes >= estimate.allocated_bytes
    assert estimate.needed_bytes == estimate.reserved_bytes + estimate.context_bytes
    assert estimate.fits
    assert set(estimate.stages) == {"first step", "train"}
    assert estimate.batch_size == 256


def test_what_does_not_fit_says_so_and_how_much_would():
    fitting = lv.estimate_memory(Wide(), torch.zeros(8, 2048), device=TINY)
    assert fitting.fits
    assert fitting.max_sequence_length is None
    most = fitting.max_batch_size
    for size, fits in ((most, True), (most + most // 64, False)):
        estimate = lv.estimate_memory(Wide(), torch.zeros(size, 2048), device=TINY, find_limits=False)
        assert estimate.fits is fits
        assert str(estimate).startswith("Fits" if fits else "Does not fit")


@pytest.mark.slow
def test_the_longest_sequence_fits_and_one_much_longer_does_not():
    module = ByteGPT(num_layers=2, width=64, num_heads=2, sequence_length=1 << 16)

    def estimate(length, *, find_limits=False):
        tokens = torch.zeros(4, length, dtype=torch.int64)
        return lv.estimate_memory(module, tokens, device=TINY, find_limits=find_limits)

    longest = estimate(513, find_limits=True).max_sequence_length
    assert estimate(longest).fits
    assert not estimate(longest + longest // 32).fits


@pytest.mark.slow
def test_parts_lower_the_estimate_as_they_lower_the_step():
    tokens = torch.zeros(8, 33, dtype=torch.int64)

    def peak(**trainer):
        return lv.estimate_memory(a_gpt(), tokens, device="a10", trainer=trainer, find_limits=False).peak_bytes

    plain = peak()
    assert peak(callbacks=[lv.ActivationCheckpointing()]) < plain
    assert peak(callbacks=[lv.MicroBatching(2)]) < plain
    assert peak(precision="bf16-mixed") < plain
    assert peak(strategy="fsdp_offload") < plain


@pytest.mark.slow
def test_more_ranks_take_less_of_the_host():
    def host(devices):
        estimate = lv.estimate_memory(
            a_gpt(), TOKENS, device="a10", trainer={"strategy": "fsdp_offload"}, devices=devices, find_limits=False
        )
        assert estimate.world_size == devices
        return estimate.host_bytes

    assert host(4) < host(2) < host(1)


def test_a_module_without_weights_is_estimated():
    with torch.device("meta"):
        module = ByteGPT(num_layers=2, width=1024, num_heads=2, sequence_length=32)
    estimate = lv.estimate_memory(module, TOKENS, device="rtx4090", find_limits=False)
    assert estimate.by_category[Category.PARAMETERS] == sum(parameter.nbytes for parameter in module.parameters())
    assert next(module.parameters()).is_meta


def test_the_host_is_a_device_too_and_progress_is_told():
    told = []
    estimate = lv.estimate_memory(
        a_gpt(), TOKENS, device="cpu", find_limits=False, on_progress=lambda stage, done: told.append((stage, done))
    )
    assert told == [("tracing the step", 0.0), ("done", 1.0)]
    assert estimate.device.name == "cpu"
    assert estimate.peak_bytes == estimate.reserved_bytes
    assert estimate.context_bytes == 0
    assert set(estimate.stages) == {"first step", "train", "validation"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "rtx9999"}, ValueError, "device 'rtx9999' is unknown"),
        ({"device": 3}, TypeError, "must be a name or a DeviceSpec, got 3 of type int"),
        ({"device": "a10", "devices": 0}, ValueError, r"estimate_memory\(devices\) must be"),
        ({"device": "a10", "trainer": {"callback": []}}, TypeError, "got 'callback', which is not one"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        lv.estimate_memory(a_gpt(), TOKENS, **arguments)


def test_a_module_that_never_steps_is_refused(monkeypatch):
    class Never(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    monkeypatch.setattr("lightning_vram.estimation.traced_fit._MOST_BATCHES", 4)
    with pytest.raises(ValueError, match="No optimizer has stepped twice within 4 batches"):
        lv.estimate_memory(Never(), torch.zeros(2, 2048), device="a10", find_limits=False)


@pytest.mark.slow
def test_weights_that_are_cast_again_are_so_in_checkpointed_layers_too():
    def estimate(**arguments):
        trainer = {
            "plugins": [lv.LeanMixedPrecision("bf16", **arguments)],
            "callbacks": [lv.ActivationCheckpointing()],
        }
        return lv.estimate_memory(a_gpt(), TOKENS, device="a10", trainer=trainer, find_limits=False)

    cast_again = estimate(recast_in_backward=True)
    assert not any("real steps" in note for note in cast_again.notes)
    assert cast_again.peak_bytes <= estimate().peak_bytes
