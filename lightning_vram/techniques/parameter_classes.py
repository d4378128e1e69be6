"""Classes of ordinary parameters: what computes with one need not know more."""

from torch import nn

PARAMETER_CLASSES: set[type] = {nn.Parameter}
"""Those of ours that only watch what is done with a parameter add themselves."""
