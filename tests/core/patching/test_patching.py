"""A swapped module runs something else, looks and is saved as before, and gets its class back."""

import copy
import inspect
import io
import pickle
from abc import ABC
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from support.sharded_nets import Net, assert_same, make, sharded, weights
from torch import Tensor, nn
from torch._functorch import config
from torch.distributed.fsdp import FSDPModule

from lightning_vram.core.patching import (
    HeldSetting,
    MethodPatch,
    compiled_backward_without_autocast,
    mixin_for,
    restore_class,
    swap_class,
    without_fast_path,
)

DOUBLE, ADD = "_double", "_add"


class Double(nn.Module):
    """A class that can be found by name, with a buffer and a signature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, first: Tensor, *, scale: float = 1.0) -> Tensor:
        return first * self.factor * scale


class OwnForward(nn.Linear):
    """A forward on the instance, as patches leave it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.forward = lambda x: x


def run_double(module: nn.Module, state: float, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
    return plain(*args, **kwargs) * state


def run_add(module: nn.Module, state: float, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
    return plain(*args, **kwargs) + state


RUNS = {DOUBLE: run_double, ADD: run_add}


def swap(module: nn.Module, *keys: str, state: float = 2.0) -> nn.Module:
    for key in keys:
        swap_class(module, key, state, RUNS[key])
    return module


def test_the_function_gets_the_module_its_state_its_forward_and_the_arguments() -> None:
    module, calls = Double(), []

    def run(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return args[2](*args[3:], **kwargs)

    state, x = object(), torch.ones(2)
    swap_class(module, "_noted", state, run)
    assert module(x, scale=3.0).tolist() == [6.0, 6.0]
    (((given, given_state, plain, *rest), kwargs),) = calls
    assert given is module
    assert given_state is state
    assert rest == [x]
    assert kwargs == {"scale": 3.0}
    assert plain(x).tolist() == [2.0, 2.0]


def test_keys_names_repr_and_signature_are_those_of_the_plain_module() -> None:
    net, plain = nn.Sequential(nn.Linear(2, 2), Double()), nn.Sequential(nn.Linear(2, 2), Double())
    for member in (net[0], net[1]):
        swap(member, DOUBLE, ADD)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(net) == repr(plain)
    assert isinstance(net[0], nn.Linear)
    for member, original in zip(net, plain, strict=True):
        for name in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(member), name) == getattr(type(original), name)
        assert inspect.signature(member.forward) == inspect.signature(original.forward)


class Counted:
    """A state that copies have of their own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def run_counted(module: nn.Module, state: Counted, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
    return plain(*args, **kwargs) * state.factor


def save_and_load(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle of protocol 2": lambda module: pickle.loads(pickle.dumps(module, protocol=2)),
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("original", [nn.Linear(2, 2), Double()], ids=["torch", "user"])
def test_copies_are_plain(original: nn.Module, make_copy: Any) -> None:
    x = torch.ones(1, 2)
    for keys in ((DOUBLE,), (DOUBLE, ADD)):
        module = swap(copy.deepcopy(original), *keys)
        other = make_copy(module)
        assert type(other) is type(original)
        assert vars(other).keys() == vars(original).keys()
        assert torch.equal(other(x), original(x))
        assert not torch.equal(module(x), original(x))  # itself, it stays swapped


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("keys", [("_kept",), (DOUBLE, "_kept"), ("_kept", DOUBLE)], ids=str)
def test_copies_keep_what_goes_into_copies_and_nothing_else(keys: Any, make_copy: Any) -> None:
    original = Double()
    module, x, state = copy.deepcopy(original), torch.ones(1, 2), Counted(3.0)
    for key in keys:
        if key == "_kept":
            swap_class(module, key, state, run_counted, in_copies=True)
        else:
            swap(module, key)
    other = make_copy(module)
    state.factor = 0.0
    restore_class(module, "_kept")
    assert torch.equal(make_copy(other)(x), original(x) * 3)  # a copy of a copy as well
    assert torch.equal(other(x), original(x) * 3)
    restore_class(other, "_kept")
    assert type(other) is type(original)
    assert vars(other).keys() == vars(original).keys()


@pytest.mark.parametrize("first_off", [0, 1, 2])
def test_the_lowest_runs_below_those_that_came_before(first_off: int) -> None:
    module, x = nn.ReLU(), torch.tensor(3.0)
    module.forward = own = lambda x: x - 1
    swap(module, DOUBLE)
    swap_class(module, "_upper", 1.0, run_add)
    swap_class(module, "_lowest", 10.0, run_add, is_lowest=True)
    assert module(x) == (2 + 10) * 2 + 1
    keys = ["_upper", "_lowest", DOUBLE]
    effects = {"_upper": (2 + 10) * 2, "_lowest": 2 * 2 + 1, DOUBLE: 2 + 10 + 1}
    off = keys.pop(first_off)
    restore_class(module, off)
    assert module(x) == effects[off]
    for key in keys:
        restore_class(module, key)
    assert type(module) is nn.ReLU
    assert vars(module)["forward"] is own


@pytest.mark.parametrize("has_own", [False, True], ids=["class", "instance"])
def test_who_has_wrapped_the_forward_calls_the_plain_one_when_the_class_is_restored(has_own: bool) -> None:
    module, x = nn.ReLU(), torch.tensor(3.0)
    if has_own:
        module.forward = lambda x: x - 1
    plain = module(x)
    swap(module, DOUBLE, ADD)
    inner = module.forward
    module.forward = wrapper = lambda x: inner(x) * 100
    assert module(x) == (plain * 2 + 2) * 100
    restore_class(module, ADD)
    restore_class(module, DOUBLE)
    assert vars(module)["forward"] is wrapper
    assert module(x) == plain * 100


def test_restored_it_is_what_it_was_and_a_second_time_does_nothing() -> None:
    module = nn.ReLU()
    before = vars(module).keys()
    restore_class(module, DOUBLE)  # it never was
    swap(module, DOUBLE)
    for _ in range(2):
        restore_class(module, DOUBLE)
        assert type(module) is nn.ReLU
        assert vars(module).keys() == before
        assert module(torch.tensor(3.0)) == 3
    swap(module, DOUBLE)
    assert module(torch.tensor(3.0)) == 6


@pytest.mark.parametrize(
    ("first", "second", "between"), [(DOUBLE, ADD, 5), (ADD, DOUBLE, 6)], ids=["the lower first", "the upper first"]
)
def test_two_techniques_are_undone_in_any_order(first: str, second: str, between: int) -> None:
    module, x = swap(nn.ReLU(), DOUBLE, ADD), torch.tensor(3.0)
    assert module(x) == 3 * 2 + 2  # the last one is called first, and calls the other
    for _ in range(2):
        restore_class(module, first)
        assert module(x) == between
    restore_class(module, second)
    assert type(module) is nn.ReLU
    assert module(x) == 3


def test_a_class_put_on_top_as_fsdp2_does_stays_above_what_came_before_it_and_below_what_comes_after() -> None:
    module, x = swap(nn.ReLU(), DOUBLE), torch.tensor(3.0)
    fsdp = type("FSDPReLU", (type("FSDPModule", (), {}), type(module)), {})
    module.__class__ = fsdp
    swap(module, ADD)
    assert module(x) == 3 * 2 + 2
    restore_class(module, DOUBLE)
    assert module(x) == 3 + 2
    restore_class(module, ADD)
    assert type(module) is fsdp
    assert module(x) == 3
    swap(module, DOUBLE)
    assert type(module) is fsdp
    assert module(x) == 6


def test_compiled_in_one_graph() -> None:
    module, x = swap(nn.ReLU(), DOUBLE, ADD), torch.tensor([-1.0, 3.0])
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


def test_the_same_key_twice_is_refused() -> None:
    module = swap(nn.ReLU(), DOUBLE, ADD)
    kind = type(module)
    message = r"^module ReLU cannot be changed: it already was\.$"
    with pytest.raises(ValueError, match=message):
        swap(module, DOUBLE, state=5.0)
    assert type(module) is kind
    assert vars(module)[DOUBLE] == 2


@pytest.mark.parametrize("undone", [(DOUBLE, ADD), (ADD, DOUBLE)], ids=str)
def test_a_forward_on_the_instance_is_the_plain_one_and_comes_back(undone: tuple[str, ...]) -> None:
    module, x = OwnForward(), torch.ones(1, 2)
    own = vars(module)["forward"]
    swap(module, DOUBLE, ADD)
    assert torch.equal(module(x), x * 2 + 2)
    twin = copy.deepcopy(module)
    assert type(twin) is OwnForward
    assert torch.equal(twin(x), x)
    for key in undone:
        restore_class(module, key)
    assert type(module) is OwnForward
    assert vars(module)["forward"] is own
    assert torch.equal(module(x), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # that they may still be met is the point
def test_scripted_and_traced_modules_are_refused() -> None:
    for module in (torch.jit.trace(nn.ReLU(), torch.ones(1)), torch.jit.script(nn.ReLU())):
        kind = type(module)
        with pytest.raises(ValueError, match=f"^module {kind.__name__} cannot be changed: it is scripted or traced.$"):
            swap(module, DOUBLE)
        assert type(module) is kind
        assert module(torch.tensor(-1.0)) == 0


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
