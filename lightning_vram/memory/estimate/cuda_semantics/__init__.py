"""What CUDA's dispatcher does otherwise than that of a device without kernels, done there: same memory, no card."""

from lightning_vram.memory.estimate.cuda_semantics.semantics import cuda_semantics
from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec

__all__ = ["CudaSpec", "cuda_semantics"]
