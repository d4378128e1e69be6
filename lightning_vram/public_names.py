"""All public names, imported: what ``lightning_vram`` gives, and the ``lightning-vram`` command loads on demand."""

import importlib.util
from typing import TYPE_CHECKING

from lightning_vram.memory.device.accelerators import configure_allocator as configure_allocator
from lightning_vram.memory.estimate.device_spec import DeviceSpec as DeviceSpec
from lightning_vram.memory.tracking.tracker import track_memory as track_memory
from lightning_vram.techniques.activation_checkpointing import SavePolicy as SavePolicy
from lightning_vram.techniques.quantization_aware_training import load_quantized as load_quantized
from lightning_vram.techniques.quantize_frozen_weights import dequantize_frozen_weights as dequantize_frozen_weights

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning_vram.callbacks.accumulation_scheduler import AccumulationScheduler as AccumulationScheduler
    from lightning_vram.callbacks.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from lightning_vram.callbacks.activation_compression import ActivationCompression as ActivationCompression
    from lightning_vram.callbacks.activation_offload import ActivationOffload as ActivationOffload
    from lightning_vram.callbacks.auto_vram import AutoVRAM as AutoVRAM
    from lightning_vram.callbacks.chunked_loss import ChunkedLoss as ChunkedLoss
    from lightning_vram.callbacks.early_release import EarlyRelease as EarlyRelease
    from lightning_vram.callbacks.empty_cache import EmptyCache as EmptyCache
    from lightning_vram.callbacks.in_place_fusion import InPlaceFusion as InPlaceFusion
    from lightning_vram.callbacks.leak_detector import LeakDetector as LeakDetector
    from lightning_vram.callbacks.low_bit_optimizer import LowBitOptimizer as LowBitOptimizer
    from lightning_vram.callbacks.memory_budget import MemoryBudget as MemoryBudget
    from lightning_vram.callbacks.metric_offload import MetricOffload as MetricOffload
    from lightning_vram.callbacks.micro_batching import MicroBatching as MicroBatching
    from lightning_vram.callbacks.moments_in_bf16 import MomentsInBF16 as MomentsInBF16
    from lightning_vram.callbacks.optimizer_in_backward import OptimizerInBackward as OptimizerInBackward
    from lightning_vram.callbacks.quantization_aware_training import (
        QuantizationAwareTraining as QuantizationAwareTraining,
    )
    from lightning_vram.callbacks.quantization_aware_training import quantize_after_fit as quantize_after_fit
    from lightning_vram.callbacks.quantize_frozen_weights import QuantizeFrozenWeights as QuantizeFrozenWeights
    from lightning_vram.callbacks.slurm_requeue import SlurmRequeue as SlurmRequeue
    from lightning_vram.callbacks.token_tiling import TokenTiling as TokenTiling
    from lightning_vram.callbacks.vram_monitor import VRAMMonitor as VRAMMonitor
    from lightning_vram.checkpoint_io import StreamedCheckpointIO as StreamedCheckpointIO
    from lightning_vram.precision import LeanMixedPrecision as LeanMixedPrecision
    from lightning_vram.report.estimate import estimate_memory as estimate_memory
    from lightning_vram.report.plan import plan_memory as plan_memory
    from lightning_vram.strategies.fsdp_offload import FSDPOffloadStrategy as FSDPOffloadStrategy
    from lightning_vram.strategies.fsdp_offload import register_strategies

    register_strategies()
    del register_strategies
