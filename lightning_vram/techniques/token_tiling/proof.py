"""Does a module treat tokens alone? It is asked by running it on some tokens of its first input.

* In another order, and fewer of them: what comes out must be the same for each token, to the bit or to rounding. This
  finds positions, and what depends on how many tokens there are.
* With one token that is no number (NaN): only what comes of this token may be none. This finds what mixes tokens,
  however little: behind weights that are zero yet, or a scale of 1e-6.
* Random numbers must be drawn for each token: a mask for all tokens would become one for each tile. They are replaced
  by ones, so that runs can be compared.
* Buffers and attributes must stay as they are, with what lists and dicts among them hold, and so must the inputs.
* Where there are gradients, it must compute with none but those of its inputs and parameters, and no graph may stay
  somewhere (a loss in a list of others). The gradient of each token must be the same for fewer of them.

Tensors without values, as in estimates, are proven by their operators instead.

Parameters that are zero are replaced by random numbers, lest a table of positions that is not learned yet looks like
none. Nothing stays of it: random numbers go on from where they were.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.rollback.forward_state import ForwardState, Learned
from lightning_vram.core.tensors.parameter_classes import REAL_TYPES
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.dispatch import without_modes
from lightning_vram.private_names.torch.modules import BUFFERS
from lightning_vram.techniques.token_tiling.cut_call import CutCall
from lightning_vram.techniques.token_tiling.operator_proof import NotAlone, ask_operators
from lightning_vram.techniques.token_tiling.proof_runs import Runs, is_same
from lightning_vram.techniques.token_tiling.tiled_call import Body

_FEW_BITS = 1e-4  # machine epsilons above are of 16 bit
_KINDS = (Tensor, nn.Buffer)
_MAX_ITEMS = 1000  # of a container that is looked into


def prove(module: nn.Module, body: Body, call: CutCall, tensors: list[Tensor]) -> tuple[bool, str]:
    """Return whether ``module`` treats tokens alone, and why not, or how exactly."""
    has_values = all(type(one) in REAL_TYPES and not one.is_meta for one in tensors)
    state = ForwardState((module,), Learned(), (one.device for one in (*tensors, *module.parameters())))
    has_gradients = torch.is_grad_enabled()
    try:
        with torch.no_grad(), without_modes():  # who counts operators sees none of these
            if has_values:
                runs = state.run(lambda: Runs(body, call, tensors))  # draws random numbers
                if has_gradients:
                    runs.look_for_graphs(state)  # first: what keeps a loss somewhere gets but one of these runs
                ask = partial(_ask_values, runs, has_gradients)
            else:
                ask = partial(ask_operators, body, call, tensors)
            return True, state.run(partial(_watch, module, state, has_values, ask))
    except NotAlone as why:
        return False, str(why)
    except Exception as error:  # code of others, on fewer tokens than it may know
        return False, f"fails on a sample of its tokens ({type(error).__name__})"


def _watch(module: nn.Module, state: ForwardState, has_values: bool, ask: Callable[[], str]) -> str:  # noqa: FBT001
    """Return what ``ask`` returns, if the module keeps nothing of the runs and draws no numbers of the host."""
    parts = [(one, _contents(one)) for one in module.modules()]
    held = [*module.named_buffers(), *(pair for one, _ in parts for pair in vars(one).items())]
    tensors = [(name, one.detach()) for name, one in held if has_values and type(one) in _KINDS and not one.is_meta]
    before = [one.clone() for _, one in tensors]
    reason = ask()
    changed = [name for (name, one), copy in zip(tensors, before, strict=True) if not is_same(one, copy)]
    changed += [name for one, then in parts for name in _changed(then, _contents(one))]
    if changed:
        raise NotAlone(f"stores something of its call in {changed[0]!r}")
    if state.settle():
        raise NotAlone("draws random numbers from Python or NumPy")
    return reason


def _ask_values(runs: Runs, has_gradients: bool) -> str:  # noqa: FBT001
    reason = _compare(runs)
    if has_gradients:
        _compare_gradients(runs)
    return reason


def _compare(runs: Runs) -> str:
    num = runs.num_tokens
    every = torch.arange(num, device=runs.device)
    mixed = torch.randperm(num, generator=torch.Generator().manual_seed(0)).to(runs.device)
    whole, num_drawn = runs.run(every)
    half, num_half_drawn = runs.run(every[num // 2 :])
    if [2 * one for one in num_half_drawn] != num_drawn:
        raise NotAlone("draws random numbers for all tokens at once")
    is_exact = _agree([one[num // 2 :] for one in whole], half)
    is_exact &= _agree([one[mixed] for one in whole], runs.run(mixed)[0])
    place = num // 2 - 1
    others = every != place
    for one, other in zip(runs.run(every, place)[0], whole, strict=True):
        if one.is_floating_point() and not torch.equal(one[others].isnan(), other[others].isnan()):
            raise NotAlone("mixes tokens")
    return "exact" if is_exact else "lossless"


def _compare_gradients(runs: Runs) -> None:
    num = runs.num_tokens
    every = torch.arange(num, device=runs.device)
    pairs = zip(runs.gradients(every), runs.gradients(every[num // 2 :]), strict=True)
    both = [(one[num // 2 :], other) for one, other in pairs if one is not None and other is not None]
    _agree([one for one, _ in both], [other for _, other in both], "mixes tokens in its backward", 10)


def _agree(
    ones: list[Tensor], others: list[Tensor], why: str = "mixes tokens, or depends on their positions", slack: int = 1
) -> bool:
    """Whether they are the same to the bit."""
    is_exact = True
    for one, other in zip(ones, others, strict=True):
        if is_same(one, other):
            continue
        is_exact = False
        if not one.is_floating_point() or one.shape != other.shape:
            raise NotAlone(why)
        kind = one.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.get_autocast_dtype(kind)).eps if is_cast else 0)
        tolerance = slack * epsilon * (2 if epsilon > _FEW_BITS else 100)
        difference, size = (one.double() - other.double()).norm(), other.double().norm()
        if not difference <= tolerance * size:
            raise NotAlone(why)
    return is_exact


def _contents(module: nn.Module) -> dict[str, Any]:
    """What tells of an attribute that it was replaced, written to or filled."""
    buffers = {name: id(one) for name, one in module.named_buffers(recurse=False)}  # their values are compared
    return buffers | {name: _content(value) for name, value in vars(module).items() if name != BUFFERS}


def _content(value: Any, depth: int = 3) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if depth and isinstance(value, dict | list | tuple | set | deque) and len(value) <= _MAX_ITEMS:
        items = value.values() if isinstance(value, dict) else value
        return id(value), [_content(item, depth - 1) for item in items]
    return id(value), len(value) if isinstance(value, dict | list | set | deque) else 0


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if name not in before or now[name] != before[name]]
