"""A parameter while it is gathered. What is written to it is counted, so that its shard gets it when it is dropped."""

from torch import Tensor

from lightning_vram.core.tensors.counted_parameter import CountedParameter
from lightning_vram.core.tensors.parameter_classes import add_parameter_class
from lightning_vram.techniques.sharding.gathered.settable_shards import set_values


class GatheredParameter(CountedParameter):
    """What its class is. Its memory is FSDP2's: ``parameter.data = values`` copies into it."""

    @property
    def data(self) -> Tensor:
        """As of any parameter."""
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        set_values(self.data, values)


add_parameter_class(GatheredParameter)
