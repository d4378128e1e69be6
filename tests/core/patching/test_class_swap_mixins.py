"""Modules whose first base keeps no attributes, such as ABC, can be sharded as any other."""

import copy
from abc import ABC
from typing import Generic, TypeVar

import pytest
from support.sharded_nets import Net, assert_same, make, sharded, weights
from torch.distributed.fsdp import FSDPModule

from lightning_vram.core.patching import mixin_for

T = TypeVar("T")


class AbstractFirst(ABC, Net):
    pass


class GenericLast(Net, Generic[T]):
    pass


class Derived(AbstractFirst):
    pass


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [AbstractFirst, GenericLast, Derived])
def test_a_module_is_sharded_and_gets_its_class_back(mesh, kind):
    for _ in range(2):  # the second time the class that it gets is there
        net = make(kind)
        before = weights(net)
        with sharded(net):
            assert isinstance(net, FSDPModule)
            assert isinstance(net, kind)
            with pytest.raises(AssertionError, match=r"^FSDP does not support deepcopy\."):
                copy.deepcopy(net)
        assert type(net) is kind
        assert_same(weights(net), before)


def test_a_class_laid_out_as_usual_takes_the_mixin_itself():
    class Mixin:
        pass

    for kind in (Net, GenericLast):
        assert mixin_for(Mixin, kind) is Mixin
