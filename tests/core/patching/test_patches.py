"""Settings of the process and methods of modules that are replaced for a while."""

import copy
import pickle
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch._functorch import config

from lightning_vram.core.patching import HeldSetting, MethodPatch, compiled_backward_without_autocast, without_fast_path


@pytest.mark.parametrize("is_first_in_first_out", [True, False])
def test_the_last_holder_puts_it_back(is_first_in_first_out):
    values = ["before"]
    setting = HeldSetting(lambda: values[-1], values.append, "held")
    one, other = ExitStack(), ExitStack()
    one.enter_context(setting.hold())
    other.enter_context(setting.hold())
    assert values == ["before", "held"]
    stacks = [one, other] if is_first_in_first_out else [other, one]
    stacks[0].close()
    assert values[-1] == "held"
    stacks[1].close()
    assert values == ["before", "held", "before"]


def test_it_is_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), without_fast_path():
        raise ZeroDivisionError
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_of_attention_is_off():
    with without_fast_path():
        assert not torch.backends.mha.get_fastpath_enabled()


def test_backwards_are_compiled_without_autocast():
    before = config.backward_pass_autocast
    with compiled_backward_without_autocast():
        assert config.backward_pass_autocast == "off"
    assert config.backward_pass_autocast == before != "off"


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
