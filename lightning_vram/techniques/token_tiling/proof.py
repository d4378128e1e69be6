"""Does a module treat tokens alone? It is asked by running it on some tokens of its first input.

* In another order, and fewer of them: what comes out must be the same for each token, to the bit or to rounding. This
  finds positions, and what depends on how many tokens there are.
* With one token that is no number (NaN): only what comes of this token may be none. This finds what mixes tokens,
  however little: behind weights that are zero yet, or a scale of 1e-6.
* Random numbers must be drawn for each token: a mask for all tokens would become one for each tile. They are replaced
  by ones, so that runs can be compared.
* Buffers and attributes must stay as they are, and so must the inputs.

Tensors without values, as in estimates, are proven by their operators instead.

Parameters that are zero are replaced by random numbers, lest a table of positions that is not learned yet looks like
none. Nothing stays of it: random numbers go on from where they were.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.random_state.surroundings import Surroundings
from lightning_vram.core.rollback.attribute_state import AttributeState
from lightning_vram.core.tensors.parameter_classes import REAL_TYPES
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode, without_modes
from lightning_vram.private_names.torch.operators import TO_COPY
from lightning_vram.techniques.token_tiling.cut_call import CutCall
from lightning_vram.techniques.token_tiling.operator_proof import DRAWS, NotAlone, ask_operators
from lightning_vram.techniques.token_tiling.tiled_call import Body

_NUM_TOKENS = 64  # that are looked at
_FEW_BITS = 1e-4  # machine epsilons above are of 16 bit
_DROPOUT = torch.ops.aten.native_dropout.default


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by ones, and counts them; lets no index come of what is no number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_drawn: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and not kwargs.get("dtype", torch.float32).is_floating_point:
            args = (args[0].nan_to_num(0, 0, 0) if args[0].is_floating_point() else args[0], *args[1:])
        name = func.overloadpacket.__name__
        if "attention" in name:  # of which some say that they draw
            raise NotAlone("has attention inside")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is _DROPOUT:
            self.num_drawn.append(args[0].numel())
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in DRAWS:
            raise NotAlone(f"draws random numbers by {name}")
        result = func(*args, **kwargs)
        self.num_drawn.append(result.numel())
        return result.fill_(1)


def prove(module: nn.Module, body: Body, call: CutCall, tensors: list[Tensor]) -> tuple[bool, str]:
    """Return whether ``module`` treats tokens alone, and why not, or how exactly.

    Args:
        module: Any module.
        body: What runs it.
        call: How its call is cut.
        tensors: Of its call.
    """
    has_values = all(type(one) in REAL_TYPES and not one.is_meta for one in tensors)
    states = [(one, dict(vars(one)), AttributeState(one)) for one in module.modules()]
    buffers = [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers() if has_values]
    surroundings = Surroundings({one.device for one in (*tensors, *module.parameters())})
    try:
        with torch.no_grad(), surroundings.as_they_were(), without_modes():  # who counts operators sees none of these
            reason = _compare(_Runs(body, call, tensors)) if has_values else ask_operators(body, call, tensors)
        changed = [name for one, before, _ in states for name in _changed(before, vars(one))]
        written = [name for name, buffer, before in buffers if not _is_same(buffer, before)]
        if changed or written:
            return False, f"keeps something of its call, {(changed + written)[0]!r}"
    except NotAlone as why:
        return False, str(why)
    except Exception as error:  # code of others, on fewer tokens than it may know
        return False, f"does not run on some of its tokens alone ({type(error).__name__})"
    else:
        return True, reason
    finally:
        for _, buffer, before in buffers:
            if not _is_same(buffer, before):
                with torch.no_grad():
                    buffer.copy_(before)
        for *_, state in states:
            state.restore()


class _Runs:
    """Runs of a module on some tokens."""

    def __init__(self, body: Body, call: CutCall, tensors: list[Tensor]) -> None:
        self._body, self._call = body, call
        self.num_tokens = min(call.num_tokens, _NUM_TOKENS) // 2 * 2
        self.device = next(one.device for one, is_cut in zip(tensors, call.is_cut, strict=True) if is_cut)
        chosen = torch.linspace(0, call.num_tokens - 1, self.num_tokens, device=self.device).long()
        self._tensors = call.cut(tensors, lambda one: one.index_select(call.dim, chosen.to(one.device)))
        self._parameters = {
            name: one if one.any() else torch.randn_like(one) for name, one in body.parameters_by_name.items()
        }

    def run(self, order: Tensor, nan_at: int | None = None) -> tuple[list[Tensor], list[int]]:
        """Return results for the tokens at ``order``, tokens first, and how many random numbers were drawn."""
        dim, num = self._call.dim, len(order)
        tensors = self._call.cut(self._tensors, lambda one: one.index_select(dim, order))
        tensors = [one.clone() for one in tensors]
        if nan_at is not None:
            for one in self._call.cut(tensors, lambda one: one.select(dim, nan_at)):
                if one.is_floating_point() and not any(one is whole for whole in tensors):
                    one.fill_(torch.nan)
        before = [(one.clone(), version_of(one)) for one in tensors]
        with _Watch() as watch:
            results, _ = self._body.having(self._parameters, lambda: self._body.run(self._call.arguments(tensors)))
        if not all(
            version_of(one) == then and _is_same(one, copy) for one, (copy, then) in zip(tensors, before, strict=True)
        ):
            raise NotAlone("writes into its input")
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns something else than tensors")
        if any(one.dim() <= dim or one.shape[dim] != num for one in results):
            raise NotAlone("returns a tensor that has not as many tokens as its input")
        return [one.movedim(dim, 0) for one in results], watch.num_drawn


def _compare(runs: _Runs) -> str:
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
    return "to the bit" if is_exact else "to rounding"


def _agree(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they are the same to the bit."""
    is_exact = True
    for one, other in zip(ones, others, strict=True):
        if _is_same(one, other):
            continue
        is_exact = False
        if not one.is_floating_point() or one.shape != other.shape:
            raise NotAlone("mixes tokens, or reads their places")
        kind = one.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        epsilon = max(torch.finfo(one.dtype).eps, torch.finfo(torch.get_autocast_dtype(kind)).eps if is_cast else 0)
        tolerance = epsilon * (2 if epsilon > _FEW_BITS else 100)
        difference, size = (one.double() - other.double()).norm(), other.double().norm()
        if not difference <= tolerance * size:
            raise NotAlone("mixes tokens, or reads their places")
    return is_exact


def _is_same(one: Tensor, other: Tensor) -> bool:
    is_float = one.is_floating_point()
    return torch.equal(one, other) or (is_float and one.shape == other.shape and one.allclose(other, 0, 0, True))  # noqa: FBT003


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if name not in before or now[name] is not before[name]]
