"""Full or sharded checkpoints of a run: saved, opened and removed by all ranks, at once or in a thread.

After an interrupted save, the last good checkpoint of that name can be loaded. An error of one rank is raised on all.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_vram.core.ranks import current_rank, gather_objects, num_ranks, on_all_ranks
from lightning_vram.techniques.sharded_checkpoints import folder, states


class CheckpointStore:
    """Full or sharded checkpoints. All ranks make the same calls.

    With ``asynchronous``, a thread saves a copy in host memory; its error is raised by the next call. ``timeout``: of
    ranks in that thread; ``None``: as ``torch.distributed``. ``verify``: compare checksums when opening. ``remote``:
    the ``CheckpointIO`` for addresses that are no local path.
    """

    def __init__(
        self,
        *,
        sharded: bool,
        asynchronous: bool,
        timeout: timedelta | None = None,
        verify: bool = True,
        remote: Any = None,
    ) -> None:
        self._sharded, self._verify, self._remote = sharded, verify, remote
        self._jobs: list[Future[None]] = []  # the pending save, and removals after it
        self._states: dict[str, Any] = {}  # of the opened folder
        self._read: Callable[[states.Pairs], None] = states.read_whole  # tensors of the opened checkpoint
        self._threads = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        # Two threads on one gloo group mix up their messages and abort the process.
        is_distributed = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if asynchronous and is_distributed else None

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module for :meth:`save`. A collective."""
        return states.sharded_module_state(module) if self._sharded else states.gather_module_state(module)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer for :meth:`save`. A collective."""
        if self._sharded:
            return states.sharded_optimizer_state(module, optimizer)
        return states.gather_optimizer_state(optimizer)

    def save(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Save a checkpoint of Lightning at rank 0's path, with states of this store. A collective."""
        self.wait()
        location = gather_objects(str(path))[0]
        if self._sharded and folder.local_path(location) is None:
            raise ValueError(f"Sharded checkpoints need a local path, got {location!r}. Save full checkpoints there.")
        if self._threads is None:
            self._write(checkpoint, location)
            return
        gathered = () if self._sharded else (*folder.MODULE_STATES, "optimizer_states")  # which are copies
        copied = on_all_ranks(
            lambda: {key: value if key in gathered else states.snapshot(value) for key, value in checkpoint.items()},
            f"The checkpoint {location} could not be copied",
        )
        self._jobs = [self._threads.submit(self._write, copied, location)]

    def _write(self, checkpoint: Mapping[str, Any], location: str) -> None:
        """Replace the checkpoint there. On error, nothing changes. A collective."""
        failed, path = f"The checkpoint {location} could not be saved", folder.local_path(location)

        def on_main(action: Callable[..., None], *args: Any) -> None:
            on_all_ranks(partial(action, *args) if current_rank() == 0 else lambda: None, failed, self._group)

        if path is None:
            on_main(self._remote.save_checkpoint, dict(checkpoint), location)
            return
        on_main(folder.prepare_path, path)
        if self._sharded:
            on_all_ranks(partial(folder.write_folder, checkpoint, path, self._group), failed, self._group)
        else:
            on_main(folder.write_file, dict(checkpoint), path)

    def open(self, path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, its tensors mapped from the file; of a folder, all but the states. A collective."""
        self.wait()
        self._states, self._read = {}, states.read_whole
        location = gather_objects(str(path))[0]
        failed, local = f"The checkpoint {location} could not be read", folder.local_path(location)
        if local is None:
            # By default, Lightning reads http addresses with weights_only=False.
            load = partial(self._remote.load_checkpoint, location, weights_only=weights_only is not False)
            read = partial(folder.explained, load, location)
        else:
            on_all_ranks(lambda: folder.recover(local) if current_rank() == 0 else None, failed)
            if local.is_dir():
                opened = folder.ShardedFolder(local, weights_only=weights_only, verify=self._verify)
                rest = opened.read_rest()
                self._states, self._read = opened.read_states(), opened.read_tensors
                return {**rest, "optimizer_states": []} if "optimizer_states" in self._states else rest
            if self._verify:
                on_all_ranks(lambda: folder.check_archive(local, current_rank(), num_ranks()), failed)
            read = partial(folder.read_values, local, weights_only=weights_only)
        checkpoint: dict[str, Any] = on_all_ranks(read, failed)
        return checkpoint

    def load_module(
        self, checkpoint: Mapping[str, Any], module: nn.Module, *, strict: bool, key: str = "state_dict"
    ) -> None:
        """Load a module in place from the opened checkpoint; on error nothing changes. A collective."""
        state = (self._states or checkpoint).get(key)
        if not isinstance(state, Mapping):
            raise ValueError("The file is not a Trainer checkpoint: it has no state_dict.")
        states.load_module_state(module, state, strict=strict, read=self._read)

    def load_optimizers(
        self,
        checkpoint: Mapping[str, Any],
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_elementwise: Callable[[type[Optimizer]], bool],
    ) -> None:
        """Load optimizers, in the saved order, from the opened checkpoint; on error nothing changes. A collective.

        ``is_elementwise``: whether the states of a class have the shapes of their parameters, which is then checked.
        """
        saved = (self._states or checkpoint).get("optimizer_states") or []
        if len(saved) != len(optimizers):
            raise ValueError(
                f"The checkpoint has {len(saved)} optimizers (save_weights_only=True: none), the run {len(optimizers)}."
            )
        matched = [states.match_parameters(module, *pair) for pair in zip(optimizers, saved, strict=True)]
        for index, (optimizer, state) in enumerate(zip(optimizers, matched, strict=True)):
            if is_elementwise(type(optimizer)):
                states.check_shapes(module, optimizer, state, index)
        for optimizer, state in zip(optimizers, matched, strict=True):
            states.load_optimizer_state(optimizer, state, read=self._read)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint if it exists; after the pending save, if that succeeds."""
        if current_rank() != 0:
            return
        if self._jobs and self._threads is not None:
            self._jobs.append(self._threads.submit(self._remove, str(path), self._jobs[0]))
        else:
            self._remove(str(path))

    def _remove(self, location: str, save: Future[None] | None = None) -> None:
        if save is not None and save.exception() is not None:
            return
        path = folder.local_path(location)
        try:
            if path is None:
                self._remote.remove_checkpoint(location)
            else:
                folder.remove(path)
        except OSError as error:
            warnings.warn(f"The checkpoint {location} could not be removed: {error}.", stacklevel=3)

    def wait(self) -> None:
        """Wait for a pending save, and raise its error."""
        jobs, self._jobs = self._jobs, []
        for job in reversed(jobs):  # removals first: they never fail
            job.result()
