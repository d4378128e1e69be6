"""Pickles of what a method is replaced on know nothing of it."""

import copy
import pickle
from functools import partial

from torch import nn

from lightning_vram.core.patching import MethodPatch


def answer(inner, *args):
    return "stand-in"


def test_a_pickle_needs_no_class_of_this_package():
    owner = nn.Linear(2, 2)
    shadow = MethodPatch(owner, "extra_repr", partial(partial, answer))
    assert owner.extra_repr() == "stand-in"
    pickled = pickle.dumps(owner)
    assert b"lightning_vram" not in pickled
    for other in (pickle.loads(pickled), copy.deepcopy(owner)):
        assert other.extra_repr() == "in_features=2, out_features=2, bias=True"
    shadow.remove()
    assert "extra_repr" not in vars(owner)
