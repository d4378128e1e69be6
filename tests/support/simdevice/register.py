"""Makes the device known to PyTorch, at import and for good.

The process is another one then: how the CPU allocates, which accelerator PyTorch names, on which threads backward runs.
"""

import sys

import torch
from support.simdevice import device_module, tensor_data
from support.simdevice.extension import extension

torch._register_device_module("sim", device_module)
sys.modules["torch.sim"] = device_module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)  # Tensor.sim(), Tensor.is_sim, Module.sim()
tensor_data.install()

if torch.distributed.is_available():

    def _make_group(store, rank, size, timeout):
        return extension.make_backend(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))

    torch.distributed.Backend.register_backend("simccl", _make_group, devices=["sim"])
