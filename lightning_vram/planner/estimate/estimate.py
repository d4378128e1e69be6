"""Will it fit: runs the step, replays the allocator, and looks for the largest batch that fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.memory.estimate.caching_allocator.replay import AllocatorReplay, replay
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings
from lightning_vram.memory.estimate.fake_device import HOST
from lightning_vram.memory.estimate.known_devices import DeviceSpec, find_device
from lightning_vram.memory.estimate.result import StageEstimate
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.planner.estimate.batches import (
    batch_size_of,
    first_batch,
    sequence_length_of,
    with_batch_size,
    with_sequence_length,
)
from lightning_vram.planner.estimate.limits import largest_that_fits
from lightning_vram.planner.estimate.traced_fit import FitRun, TracedFit, trace_fit
