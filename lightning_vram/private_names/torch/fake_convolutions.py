"""Where fake convolutions ask for the memory format of their result.

* ``torch._C._conv_determine_backend_memory_format``: tells it, for a backend | 2.11 - | channels last is lost in
  estimates
"""

import torch

MEMORY_FORMAT = (torch._C, "_conv_determine_backend_memory_format")
"""Where the function of input, weight and backend is."""
