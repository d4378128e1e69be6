"""Classes of ordinary tensors and parameters: what computes with one need not know more."""

from torch import Tensor, nn

from lightning_vram.private_names.dispatch import FakeTensor

PARAMETER_CLASSES: set[type] = {nn.Parameter}
PLAIN_TYPES: set[type] = {Tensor, nn.Parameter, nn.Buffer, FakeTensor}


def add_parameter_class(kind: type[nn.Parameter]) -> None:
    """Take a class of ours, which only watches what is done with a parameter, for an ordinary one."""
    PARAMETER_CLASSES.add(kind)
    PLAIN_TYPES.add(kind)
