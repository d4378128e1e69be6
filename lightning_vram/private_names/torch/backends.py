"""The device that an extension adds to torch.

* ``torch._C._get_privateuse1_backend_name``: its name | 2.11 - | optimizers take too little memory in estimates
* ``torch.utils.backend_registration._privateuse1_backend_name``: the same | 2.11 - | ``torch.norm`` takes too much
  memory in estimates
* ``torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init``: whether constants stay on the host | 2.11 - |
  tensors made of numbers on a device that is not there fail
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
