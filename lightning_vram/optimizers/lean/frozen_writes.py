"""Refuse to keep frozen parameters in bf16 that are moved by hand: averages of others, as momentum encoders are.

They move by less than half a unit in the last place of bf16 at a time, and so not at all. Weights that are written once
in a while (loaded, or copied from others) are right in bf16.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from torch import nn

from lightning_vram.core.tensors.counted_parameter import count, count_writes, stop_counting

_NUM_WRITES = 3
_NUM_LOOKS = 8


class FrozenWrites:
    """Counts in how many of the last looks a parameter had been written to. ``names`` are for messages."""

    def __init__(self, names: Mapping[str, nn.Parameter]) -> None:
        self._names = names
        self._num_looks = 0
        self._seen: dict[nn.Parameter, int] = {}
        self._writes: dict[nn.Parameter, deque[int]] = {}

    def look(self, parameters: Iterable[nn.Parameter]) -> None:
        """Look at frozen parameters before a step. The first look at one is not held against it.

        Raises:
            RuntimeError: If one was written before three of eight looks.
        """
        self._num_looks += 1
        for parameter in parameters:
            count(parameter)
            mark = count_writes(parameter)
            known = self._seen.get(parameter)
            if mark == known:
                continue
            self._seen[parameter] = mark
            if known is not None:
                self._note_write(parameter)

    def pass_over(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hold nothing against parameters that was written to them since the last look."""
        self._seen |= {parameter: count_writes(parameter) for parameter in parameters if parameter in self._seen}

    def stop(self) -> None:
        """Let all parameters that were looked at be ordinary ones again."""
        for parameter in self._seen:
            stop_counting(parameter)

    def _note_write(self, parameter: nn.Parameter) -> None:
        writes = self._writes.setdefault(parameter, deque(maxlen=_NUM_WRITES))
        writes.append(self._num_looks)
        if len(writes) == _NUM_WRITES and writes[-1] - writes[0] < _NUM_LOOKS:
            names = [name for name, known in self._names.items() if known is parameter]
            raise RuntimeError(
                f"The frozen parameter {names[0] if names else f'of shape {tuple(parameter.shape)}'} is written at "
                "almost every step, and bfloat16 loses small changes: name its module in fp32_modules=[...]."
            )
