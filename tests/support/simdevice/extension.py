"""The compiled part, as a module: loading it makes the device known to PyTorch."""

import torch
from support.simdevice import build

extension = build.load()
torch.utils.rename_privateuse1_backend("sim")
