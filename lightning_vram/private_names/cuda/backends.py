"""What torch takes a device for: one that an extension adds, one to keep off, one whose convolutions have a format.

* ``torch._C._get_privateuse1_backend_name``: its name | 2.11 - | optimizers take too little memory in estimates
* ``torch.utils.backend_registration._privateuse1_backend_name``: the same | 2.11 - | ``torch.norm`` takes too much
  memory in estimates
* ``torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init``: whether constants stay on the host | 2.11 - |
  tensors made of numbers on a device that is not there fail
* ``torch._C._conv_determine_backend_memory_format``: the memory format of a fake convolution's result | 2.11 - |
  channels last is lost in estimates
"""

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
"""Where the function is of input, weight and backend that tells the memory format of a fake convolution's result."""
