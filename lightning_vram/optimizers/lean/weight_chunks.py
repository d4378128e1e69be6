"""Parameters that are read and written together: enough for few kernels, few enough for small transients."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_vram.core.tensors.bit_patterns import add_compensation_, compensate_, join_, round_randomly_, split_
from lightning_vram.private_names.torch.operators import copy_each


class WeightCodec(ABC):
    """Keeps ``rest``: a flat tensor of as many elements as there are weights, or ``None``."""

    rest: Tensor | None = None

    @abstractmethod
    def read(self, weights: Tensor) -> Tensor:
        """Make exact weights of ``weights``: flat, fp32, what the bf16 weights hold now. May work in place."""

    @abstractmethod
    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the rest of ``exact``: flat, fp32. Without a generator nothing is random. May work in place."""


class MasterCodec(WeightCodec):
    """An fp32 copy: 4 bytes per weight, exact."""

    def read(self, weights: Tensor) -> Tensor:
        """Where a weight is no longer the copy rounded, the weight is right: somebody wrote to it."""
        assert self.rest is not None
        return torch.where(weights == self.rest.bfloat16(), self.rest, weights, out=self.rest)

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep all of it: what was read is this very tensor."""
        self.rest = exact
        return exact


class SplitCodec(WeightCodec):
    """The lower half of the fp32 pattern: 2 bytes per weight, exact.

    What is computed with is the conversion to bf16 but for one weight of 131072, which is a half between two: see
    :func:`~lightning_vram.core.tensors.bit_patterns.split_`.
    """

    def read(self, weights: Tensor) -> Tensor:
        """Join both halves."""
        assert self.rest is not None
        join_(weights, self.rest)
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the lower halves."""
        if self.rest is None:
            self.rest = torch.empty_like(exact, dtype=torch.int16)
        split_(exact, self.rest)
        return exact


class KahanCodec(WeightCodec):
    """What rounding took, rounded itself: 2 bytes per weight, 16 significant bits together."""

    def read(self, weights: Tensor) -> Tensor:
        """Add both."""
        assert self.rest is not None
        add_compensation_(weights, self.rest)
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the compensation."""
        if self.rest is None:
            self.rest = torch.empty_like(exact, dtype=torch.bfloat16)
        return compensate_(exact, self.rest)


class StochasticCodec(WeightCodec):
    """Nothing: the weights are rounded at random."""

    def read(self, weights: Tensor) -> Tensor:
        """There is no more to know."""
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Round; without a generator the copy to bf16 does, to the nearest."""
        if generator is not None:
            round_randomly_(exact, generator)
        return exact


CODECS: dict[str, type[WeightCodec]] = {
    "bf16+master": MasterCodec,
    "bf16+split": SplitCodec,
    "bf16+kahan": KahanCodec,
    "bf16+stochastic": StochasticCodec,
}


CHUNK_ELEMENTS = 2**22  # 16 MiB in fp32


class WeightChunk:
    """Turns its parameters into bf16, in place, until :meth:`restore`.

    What a parameter that is frozen lacks is kept in host memory, all of it whatever the scheme: it does not change.
    When it is trained after all, its chunk moves to the device at its first step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], scheme: str, number: int) -> None:
        self.parameters = tuple(parameters)
        self.number = number
        self._scheme = scheme
        self._dtypes = tuple(parameter.dtype for parameter in parameters)
        self._lent: tuple[list[Tensor], WeightCodec, bool] | None = None
        self.is_resting = not parameters[0].requires_grad
        self._codec: WeightCodec = self._resting_codec() if self.is_resting else CODECS[scheme]()
        weights = self._codec.write(self._gather("cpu" if self.is_resting else parameters[0].device), None)
        for parameter in parameters:
            _change_dtype(parameter, torch.bfloat16)
        self._scatter(weights)

    @property
    def rest(self) -> Tensor | None:
        """What is kept beside the bf16 weights: flat; ``None`` if nothing is."""
        return self._codec.rest

    def read(self) -> Tensor:
        """Return the exact weights: flat, fp32; on the device of what is kept beside them, not to be written to.

        What is no longer bf16 is taken as it is, with a rest that is not its own.
        """
        return self._codec.read(self._gather(self.parameters[0].device if self.rest is None else self.rest.device))

    def check(self) -> None:
        """Refuse to go on with parameters whose dtype somebody has changed."""
        for parameter in self.parameters:
            if parameter.dtype is not torch.bfloat16:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} is {parameter.dtype} and no longer "
                    "torch.bfloat16: do not convert the module during the fit."
                )

    def read_for_step(self) -> Tensor:
        """As :meth:`read`, after :meth:`check`, where the parameters are; to be changed in place, for :meth:`write`."""
        self.check()
        device = self.parameters[0].device
        if self.is_resting:
            exact = self.read().to(device)
            self.is_resting, self._codec = False, CODECS[self._scheme]()
            self._scatter(self._codec.write(exact, None))
        if self._codec.rest is not None and self._codec.rest.device != device:
            self._codec.rest = self._codec.rest.to(device)  # the module was moved
        return self.read()

    def write(self, exact: Tensor, generator: torch.Generator, stepped: Collection[nn.Parameter]) -> None:
        """Take over what became of the weights in a step. A graph may yet need the others: they are not touched."""
        flat = self._codec.write(exact, generator)
        pairs = [pair for pair in zip(self.parameters, self.views(flat), strict=True) if pair[0] in stepped]
        copy_each([parameter.detach() for parameter, _ in pairs], [view for _, view in pairs])

    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights of some parameters. The others stay what they are."""
        exact = self.read()
        for parameter, view in zip(self.parameters, self.views(exact), strict=True):
            if parameter in values:
                view.copy_(values[parameter])
        self._scatter(self._codec.write(exact, None))

    def lend(self, values: Sequence[Tensor]) -> None:
        """Let the parameters be exactly these values, whatever the scheme, until :meth:`take_back` or the next step."""
        weights = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        self._lent = weights, self._codec, self.is_resting
        self._codec, self.is_resting = self._resting_codec(), True
        self._scatter(self._codec.write(widened(values, "cpu")[0], None))

    def take_back(self) -> None:
        """Let the parameters have the bits that they had before they were lent."""
        assert self._lent is not None
        (weights, self._codec, self.is_resting), self._lent = self._lent, None
        copy_each([parameter.detach() for parameter in self.parameters], weights)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in ``flat``, in its shape."""
        return _views_like(flat, self.parameters)

    def restore(self) -> None:
        """Give the parameters back their dtype, with the exact weights. Frees what was kept.

        Parameters that somebody has converted meanwhile are left alone.
        """
        exact = self.read()
        for parameter, dtype, values in zip(self.parameters, self._dtypes, self.views(exact), strict=True):
            if parameter.dtype is torch.bfloat16:
                _change_dtype(parameter, dtype)
                parameter.copy_(values)
        self._codec.rest = self._lent = None

    def _resting_codec(self) -> WeightCodec:
        """Of weights in host memory: that of split rounds halves otherwise than autocast, which master must not."""
        return MasterCodec() if self._scheme == "bf16+master" else SplitCodec()

    def _gather(self, device: torch.device | str) -> Tensor:
        return widened(self.parameters, device)[0]

    def _scatter(self, flat: Tensor) -> None:
        copy_each([parameter.detach() for parameter in self.parameters], self.views(flat))


def make_chunks(parameters: Iterable[nn.Parameter], scheme: str) -> list[WeightChunk]:
    """Turn floating parameters into bf16, in place. One of more than ``CHUNK_ELEMENTS`` makes a chunk of its own."""

    def key(parameter: nn.Parameter) -> tuple[str, bool]:
        return str(parameter.device), parameter.requires_grad

    batches: list[list[nn.Parameter]] = []
    for _, alike in groupby(sorted(parameters, key=key), key):
        room = -1
        for parameter in alike:
            if parameter.numel() > room:
                batches.append([])
                room = CHUNK_ELEMENTS
            batches[-1].append(parameter)
            room -= parameter.numel()
    return [WeightChunk(batch, scheme, number) for number, batch in enumerate(batches)]


def list_rests(chunks: Iterable[WeightChunk]) -> list[Tensor]:
    """Return what is kept beside the weights of chunks."""
    return [chunk.rest for chunk in chunks if chunk.rest is not None]


def widened(tensors: Sequence[Tensor], device: torch.device | str | None) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors into one flat fp32 tensor on ``device``, and return it and the views of each in it."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32, device=device)
    views = _views_like(flat, tensors)
    if tensors:
        copy_each(views, [tensor.detach() for tensor in tensors])
    return flat, views


def _views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _change_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Swap the memory of a parameter for new memory, not yet written, and convert its gradient."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    parameter.grad = None if gradient is None else gradient.to(dtype)
