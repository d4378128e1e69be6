"""What torch takes a device for: one that an extension adds, one to keep off, one whose convolutions have a format."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

BACKEND_NAMES = (
    (torch._C, "_get_privateuse1_backend_name", True),
    (backend_registration, "_privateuse1_backend_name", False),
)
"""Where its name stands, and whether by a function."""
INITIALISATION = (FakeTensorMode, "avoid_device_init")
"""Where it stands whether fake tensors keep off their device."""
CONVOLUTION_FORMAT = (torch._C, "_conv_determine_backend_memory_format")
"""Where the function is that gives the memory format of a fake convolution, of input, weight and backend."""
