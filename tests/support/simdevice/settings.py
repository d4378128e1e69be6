"""How hostile the device is, and what it notes."""

from typing import Any

from support.simdevice.extension import extension

races = extension.races
clear_races = extension.clear_races
pending = extension.pending


class settings:  # noqa: N801 - a context, as torch.no_grad
    """Change how the device behaves: at once, and back at the end of a ``with`` block.

    Args:
        **values: Of these:
            ``capacity``: bytes of the device.
            ``fail_after``: number of allocations after which one fails for want of memory; -1: none does.
            ``lazy``: whether queued copies are done as late as allowed, or at once.
            ``patience``: how often ``query()`` of something unfinished says no before it lets it happen.
            ``poison``: whether fresh memory and targets of queued copies are filled with NaN.
            ``races``: accesses without order are 0 not looked for, 1 noted in ``torch.sim.races()``, 2 raised.
    """

    def __init__(self, **values: Any):
        self._before = {name: getattr(extension.settings, name) for name in values}
        self._set(values)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        self._set(self._before)

    @staticmethod
    def _set(values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(extension.settings, name, value)
