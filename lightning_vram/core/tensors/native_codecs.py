"""Codecs of low-precision moments in C, and AdamW between them: one pass over memory in place of a dozen, bit-exact.

Compiled in less than a second, after operators have spent as much time; without a C compiler operators do the work.
"""

import ctypes
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_vram.private_names.dispatcher import FakeTensor, without_dispatch

PATIENCE = 2**29  # numbers that operators code before anything is compiled: it takes them about as long
LANES = 16  # of the widest vectors; torch's kernel rounds a remainder differently
LEAST = 2**12  # fewer numbers at once are left to operators
_SOURCE = Path(__file__).with_suffix(".c")
_OPTIONS = (("-march=native", "-fopenmp"), ("-march=native",))  # the first that works
_SIGNATURES = {
    "round_by_place": (c_void_p, c_void_p, c_int64, c_uint32, c_int),
    "step_adamw": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int),
    "step_split": (
        *(c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_void_p),
        *(c_void_p, c_void_p, c_int64, c_void_p, c_int),
    ),
    "decode_low_bit": (c_void_p, c_void_p, c_int64, c_int, c_int, c_int64, c_int),
    "encode_low_bit": (c_void_p, c_void_p, c_int64, c_int, c_int, c_int64, c_int),
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdamWStep:
    """The arguments of a step of AdamW; the first step has ``number`` 1."""

    number: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers for the kernel, computed as torch's does."""
        first, second = self.betas
        root, rate = math.sqrt(1 - second**self.number), -(self.lr / (1 - first**self.number))
        return 1 - self.lr * self.weight_decay, 1 - first, second, 1 - second, root, self.eps, rate


class NativeCodecs:
    """The codecs of a library. All tensors are ordinary ones, on the host and contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, c_int64 if name == "step_split" else None
        self.has_step = self._steps_as_torch()

    def round_by_place(self, numbers: Tensor, draw: int, kept: Tensor) -> None:
        """Round float32 numbers to bf16, the first of them with this draw of 16 bits."""
        place, target = numbers.data_ptr(), kept.data_ptr()
        self._library.round_by_place(place, target, numbers.numel(), draw, torch.get_num_threads())

    def decode_low_bit(self, records: Tensor, numbers: Tensor, bits: int, *, is_positive: bool) -> None:
        """Write what is in records of numbers of so many bits and a scale to float32, as many as are wanted."""
        size, places = (records.shape[1] - 4) * 8 // bits, (records.data_ptr(), numbers.data_ptr())
        self._library.decode_low_bit(*places, numbers.numel(), bits, is_positive, size, torch.get_num_threads())

    def encode_low_bit(self, numbers: Tensor, records: Tensor, bits: int, *, is_positive: bool) -> None:
        """Write float32 numbers to such records, the last of which is filled up with zeros."""
        size, places = (records.shape[1] - 4) * 8 // bits, (numbers.data_ptr(), records.data_ptr())
        self._library.encode_low_bit(*places, numbers.numel(), bits, is_positive, size, torch.get_num_threads())

    def step_adamw(
        self, step: AdamWStep, tensors: Sequence[Tensor], bits: int, draws: tuple[int, int] = (0, 0)
    ) -> None:
        """Step flat float32 weights, with moments in so many ``bits``: float32, bf16, or records.

        ``tensors``: weights, gradient, and both moments, rounded by ``draws``.
        """
        settings, both = (c_float * 7)(*step.numbers()), (c_uint32 * 2)(*draws)
        places, count = (one.data_ptr() for one in tensors), tensors[0].numel()
        self._library.step_adamw(*places, count, bits, settings, both, torch.get_num_threads())

    def step_split(
        self,
        step: AdamWStep,
        tensors: Sequence[Tensor],
        bits: int,
        draws: tuple[int, int] = (0, 0),
        *,
        factor: float = 1.0,
        odd: tuple[Any, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Step flat weights that are split into bf16 weights and a 16-bit remainder; return the new ``odd``.

        ``tensors``: the bf16 weights, the remainder (int16), gradient in float32, or in bf16 to be scaled by
        ``factor``, and moments in so many ``bits``, rounded by ``draws``. ``odd``: places (int32) of weights that the
        remainder does not distinguish, and their upper halves (int16).
        """
        upper, lower, gradient, average, square = tensors
        settings, both = (c_float * 7)(*step.numbers()), (c_uint32 * 2)(*draws)
        found = torch.empty(upper.numel(), 2, dtype=torch.int32, device="cpu")  # memory that nobody touches
        num_found = self._library.step_split(
            *(upper.data_ptr(), lower.data_ptr(), gradient.data_ptr(), gradient.dtype == torch.bfloat16, factor),
            *(average.data_ptr(), square.data_ptr(), upper.numel(), bits, settings, both),
            *(odd[0].data_ptr(), odd[1].data_ptr(), odd[0].numel(), found.data_ptr(), torch.get_num_threads()),
        )
        return found[:num_found, 0].clone(), found[:num_found, 1].to(torch.int16)

    def _steps_as_torch(self) -> bool:
        """Whether a step has the bits of torch's kernel, as that was compiled for this machine."""
        generator = torch.Generator().manual_seed(0)
        count, step = 2**16, AdamWStep(7, 1e-2, (0.9, 0.999), 1e-8, 0.1)
        with without_dispatch(), torch.no_grad():
            made = torch.empty(4, count, dtype=torch.float32, device="cpu").normal_(generator=generator)
            spread = made[3].mul_(3).sub_(5).exp_()
            theirs = [made[0], made[1] * spread, made[2] * spread, spread.square()]
            ours = [tensor.clone() for tensor in theirs]
            self.step_adamw(step, ours, 32)  # the other one has the same arithmetic
            weights, gradients, averages, squares = ([tensor] for tensor in theirs)
            counts = [torch.tensor(step.number - 1.0, dtype=torch.float32, device="cpu")]
            adamw(
                *(weights, gradients, averages, squares, [], counts),
                fused=True,
                amsgrad=False,
                beta1=step.betas[0],
                beta2=step.betas[1],
                lr=step.lr,
                weight_decay=step.weight_decay,
                eps=step.eps,
                maximize=False,
            )
            return all(map(torch.equal, ours, theirs))


_num_coded = [0]


def _ask(count: int) -> NativeCodecs | None:
    """Return them to code so many numbers; ``None`` as long as operators do it."""
    _num_coded[0] += count
    return _compile_once() if _num_coded[0] > PATIENCE else None


@cache
def _compile_once() -> NativeCodecs | None:
    return compile_codecs()


def native_codecs(numbers: Tensor, *others: Tensor) -> NativeCodecs | None:
    """Return codecs that can be used on these tensors; ``None`` if there are none."""
    count = numbers.numel()
    if count < LEAST or not is_codable(numbers, *others):
        return None
    return _ask(count * len(others))


def native_step(count: int) -> NativeCodecs | None:
    """Return codecs that step AdamW as torch does, for so many numbers; ``None`` if there are none."""
    native = _ask(count)
    return native if native is not None and native.has_step else None


def compile_codecs() -> NativeCodecs | None:
    """Compile the codecs. Without a suitable compiler, log a warning, and return ``None``."""
    compiler = os.environ.get("CC", "cc")
    reason = "no such compiler; set the environment variable CC to another one"
    with tempfile.TemporaryDirectory(prefix="lightning_vram_") as folder:
        for options in _OPTIONS if shutil.which(compiler) else ():
            try:
                return NativeCodecs(_compile(compiler, options, Path(folder, f"codecs{len(options)}")))
            except (OSError, subprocess.SubprocessError) as error:
                reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
    _log.warning(
        f"Optimizer steps with low-precision moments on the host are slow: {compiler} cannot compile their codecs "
        f"({reason})."
    )
    return None


def _compile(compiler: str, options: tuple[str, ...], path: Path) -> ctypes.CDLL:
    made, library = path.with_suffix(".o"), path.with_suffix(".so")
    begin = [compiler, "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
    for command in (
        [*begin, *options, "-c", str(_SOURCE), "-o", str(made)],
        # Not linked with OpenMP: that would be a second thread pool, in addition to that of PyTorch.
        [*begin, "-shared", str(made), "-o", str(library)],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return ctypes.CDLL(str(library))


def is_codable(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors, on the host and contiguous."""
    return all(
        type(one) is Tensor and not isinstance(one, FakeTensor) and one.device.type == "cpu" and one.is_contiguous()
        for one in tensors
    )
