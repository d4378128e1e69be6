"""Numbers that code reads of sharded tensors: those of the whole tensor on every rank, and not of the rank's own part.

PyTorch gives out the rank's part of a sum that is yet to be added up, so that ranks decide differently.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from lightning_vram.core.processes.agreement import RankAgreement, RankAgreementError
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part, read_numbers_by
from lightning_vram.private_names.torch.dispatch import DispatchKey, is_key_excluded

_INSIDE = ("torch", "lightning_vram")


class WholeNumbers:
    """Has ``item()``, ``float()``, ``bool()`` and ``torch.tensor([...])`` of sharded tensors be collectives.

    Until :meth:`remove`. A vote before each finds ranks that do not take part. Making one is a collective, too.

    Args:
        timeout: How long ranks wait for each other.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._agreement = RankAgreement(timeout)
        read_numbers_by(self._read)

    def remove(self) -> None:
        """Let each rank read its own part again."""
        read_numbers_by(None)
        self._agreement.close()

    def _read(self, tensor: Any) -> Any:
        if is_key_excluded(DispatchKey.Python):
            # torch.tensor([...]) turns DTensor's operators off, for its own thread alone.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._read, tensor).result()
        is_whole = all(place.is_replicate() for place in tensor.placements) or self._agreement.is_alone
        if is_whole:
            return local_part(tensor).item()
        self._meet()
        return tensor.detach().full_tensor().item()

    def _meet(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
            frame = frame.f_back
        line = frame.f_lineno
        try:
            if self._agreement.largest(line, -line) == (line, -line):
                return
            cause = None
        except RankAgreementError as error:
            cause = error
        raise RuntimeError(
            f"Only some ranks read a value of a sharded tensor in {frame.f_code.co_filename}:{line}, but each rank "
            "holds a shard of it. Read it on every rank, for example norm = float(gradient.norm()), before code that "
            "only rank 0 runs, for example logger.log_metrics({'norm': norm})."
        ) from cause
