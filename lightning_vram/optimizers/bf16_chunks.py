"""Codecs for what bf16 weights lose, and chunks of weights: large enough for few kernels, small in fp32 memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_vram.core.tensors.codecs import add_compensation_, compensate_, join_, rounded_by_place, split_
from lightning_vram.core.tensors.properties import count, count_writes, stop_counting
from lightning_vram.private_names.dispatcher import copy_each


class WeightCodec:
    """Stores ``rest``, what bf16 weights of a scheme lack: flat, one element per weight, or ``None``.

    master: an fp32 copy, 4 bytes, exact. split: the lower half of the fp32 pattern, 2 bytes, exact. kahan: the rounding
    error in bf16, 2 bytes, 16 significant bits together. stochastic: nothing, weights are stochastically rounded.
    """

    def __init__(self, scheme: str) -> None:
        self.rest: Tensor | None = None
        self._scheme = scheme

    def read(self, weights: Tensor) -> Tensor:
        """Return exact weights: flat fp32, from the bf16 weights in fp32. May work in place."""
        if self.rest is None:
            return weights
        if self._scheme == "bf16+master":
            # A weight that differs from the rounded copy was written by user code.
            return torch.where(weights == self.rest.bfloat16(), self.rest, weights, out=self.rest)
        (join_ if self._scheme == "bf16+split" else add_compensation_)(weights, self.rest)
        return weights

    def write(self, exact: Tensor, seed: int | None) -> Tensor:
        """Store the remainder of exact weights (flat fp32), and return the flat values for the bf16 weights.

        May work in place. ``seed``: of stochastic rounding; ``None``: nothing is random.
        """
        if self._scheme == "bf16+master":
            self.rest = exact
        elif self._scheme == "bf16+stochastic":  # without a seed the copy to bf16 rounds to nearest
            return exact if seed is None else rounded_by_place(exact, 0, seed)
        elif self._scheme == "bf16+split":
            self.rest = torch.empty_like(exact, dtype=torch.int16) if self.rest is None else self.rest
            split_(exact, self.rest)
        else:
            self.rest = torch.empty_like(exact, dtype=torch.bfloat16) if self.rest is None else self.rest
            return compensate_(exact, self.rest)
        return exact


CHUNK_ELEMENTS = 2**22  # 16 MiB in fp32


class WeightChunk:
    """Converts parameters on one device, all frozen or none, to bf16 in place, until :meth:`restore`.

    The remainder of frozen parameters is in host memory, exact for every scheme. Once they are trained, their chunk
    moves to the device at the first step. ``number`` seeds the rounding.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], scheme: str, number: int) -> None:
        self.parameters = tuple(parameters)
        self.number = number
        self._scheme = scheme
        self._dtypes = tuple(parameter.dtype for parameter in parameters)
        self._writes: list[int] = []  # to each parameter, once they are counted
        self.is_resting = not parameters[0].requires_grad
        self._codec = self._resting_codec() if self.is_resting else WeightCodec(scheme)
        exact, _ = upcast_flat(parameters, "cpu" if self.is_resting else parameters[0].device)
        weights = self._codec.write(exact, None)
        for parameter in parameters:
            _change_dtype(parameter, torch.bfloat16)
        self._scatter(weights)

    @property
    def rest(self) -> Tensor | None:
        """Flat remainder of the bf16 weights."""
        return self._codec.rest

    def read(self) -> Tensor:
        """Return exact weights: flat fp32, on the device of the remainder, read-only."""
        device = self.parameters[0].device if self.rest is None else self.rest.device
        return self._codec.read(upcast_flat(self.parameters, device)[0])

    def check(self) -> None:
        """Refuse parameters whose dtype was changed."""
        for parameter in self.parameters:
            if parameter.dtype is not torch.bfloat16:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} is {parameter.dtype} and no longer "
                    "torch.bfloat16: do not convert the module during the fit."
                )

    def read_for_step(self) -> Tensor:
        """Check, and return exact weights on the device of the parameters, to change in place for :meth:`write`."""
        self.check()
        device = self.parameters[0].device
        if self.is_resting:
            exact = self.read().to(device)
            self.is_resting, self._codec = False, WeightCodec(self._scheme)
            self._scatter(self._codec.write(exact, None))
        if self._codec.rest is not None and self._codec.rest.device != device:
            self._codec.rest = self._codec.rest.to(device)  # the module was moved
        return self.read()

    def write(self, exact: Tensor, seed: int, stepped: Collection[nn.Parameter]) -> None:
        """Store stepped weights. Others are not written: a graph may need them."""
        views = views_like(self._codec.write(exact, seed), self.parameters)
        pairs = [pair for pair in zip(self.parameters, views, strict=True) if pair[0] in stepped]
        copy_each([parameter.detach() for parameter, _ in pairs], [view for _, view in pairs])

    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights of some parameters."""
        self.check()
        exact = self.read()
        for parameter, view in zip(self.parameters, views_like(exact, self.parameters), strict=True):
            if parameter in values:
                view.copy_(values[parameter])
        self._scatter(self._codec.write(exact, None))

    def lend(self, values: Sequence[Tensor]) -> Callable[[], None]:
        """Set exact values until the next step, or until the returned function restores the bits from before."""
        weights = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        codec, is_resting = self._codec, self.is_resting
        self._codec, self.is_resting = self._resting_codec(), True
        self._scatter(self._codec.write(upcast_flat(values, "cpu")[0], None))

        def take_back() -> None:
            self._codec, self.is_resting = codec, is_resting
            self._write(weights)

        return take_back

    def find_written(self) -> list[nn.Parameter]:
        """Return the frozen parameters that other code has written since the last call."""
        if not self.is_resting:
            return []
        for parameter in self.parameters:
            count(parameter)
        before, self._writes = self._writes, [count_writes(parameter) for parameter in self.parameters]
        changes = zip(self.parameters, before, self._writes, strict=bool(before))
        return [parameter for parameter, known, now in changes if now != known]

    def restore(self) -> None:
        """Restore dtype and exact weights of the parameters that are still bf16."""
        views = views_like(self.read(), self.parameters)
        for parameter, dtype, values in zip(self.parameters, self._dtypes, views, strict=True):
            stop_counting(parameter)
            if parameter.dtype is torch.bfloat16:
                _change_dtype(parameter, dtype)
                parameter.copy_(values)
        self._codec.rest = None

    def _resting_codec(self) -> WeightCodec:
        """Return the codec for host memory: split rounds ties differently from autocast, which master must not."""
        return WeightCodec("bf16+master" if self._scheme == "bf16+master" else "bf16+split")

    def _scatter(self, flat: Tensor) -> None:
        self._write(views_like(flat, self.parameters))

    def _write(self, values: Sequence[Tensor]) -> None:
        copy_each([parameter.detach() for parameter in self.parameters], values)
        if self._writes:
            self._writes = [count_writes(parameter) for parameter in self.parameters]


def make_chunks(parameters: Iterable[nn.Parameter], scheme: str) -> list[WeightChunk]:
    """Convert floating parameters to bf16, in place, in chunks of ``CHUNK_ELEMENTS`` weights or one larger one."""

    def key(parameter: nn.Parameter) -> tuple[str, bool]:
        return str(parameter.device), parameter.requires_grad

    batches: list[list[nn.Parameter]] = []
    for _, alike in groupby(sorted(parameters, key=key), key):
        num_free = -1
        for parameter in alike:
            if parameter.numel() > num_free:
                batches.append([])
                num_free = CHUNK_ELEMENTS
            batches[-1].append(parameter)
            num_free -= parameter.numel()
    return [WeightChunk(batch, scheme, number) for number, batch in enumerate(batches)]


def list_rests(chunks: Iterable[WeightChunk]) -> list[Tensor]:
    """Return the remainders of chunks."""
    return [chunk.rest for chunk in chunks if chunk.rest is not None]


def upcast_flat(tensors: Sequence[Tensor], device: torch.device | str | None) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors into one flat fp32 tensor on ``device``; return it, and its views."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32, device=device)
    views = views_like(flat, tensors)
    if tensors:
        copy_each(views, [tensor.detach() for tensor in tensors])
    return flat, views


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``flat`` in the shapes of ``tensors``."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _change_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter new, uninitialized memory, and convert its gradient."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    parameter.grad = None if gradient is None else gradient.to(dtype)
