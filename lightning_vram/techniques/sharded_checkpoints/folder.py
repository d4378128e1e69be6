"""A sharded checkpoint on disk, read piece by piece: by any number of ranks, each its own part, on the host."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.ranks import current_rank, gather_objects, num_ranks, on_all_ranks
from lightning_vram.core.tensors.codecs import decoded
from lightning_vram.private_names.fsdp2 import read_metadata
from lightning_vram.techniques.sharded_checkpoints.files import (
    CheckedWriter,
    check_folder,
    explained,
    read_values,
    save_values,
    write_checksums,
)
from lightning_vram.techniques.sharded_checkpoints.states import (
    check_fit,
    clean_name,
    count_bytes,
    is_sharded_state,
    map_leaves,
    names_in_optimizer,
    parameters_by_name,
)

REST_FILE = "meta.pt"
MODULE_STATES = ("state_dict", "current_model_state")
"""Keys of a checkpoint that hold states of modules: the second that of the module, where the first has its average."""
Path_ = tuple[str | int, ...]  # of a value in the nested state
# of a module, its optimizer, what was saved for each parameter, the saved groups, which optimizer it is
StateCheck = Callable[[nn.Module, Optimizer, Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], int], None]


def is_sharded_folder(path: Path) -> bool:
    """Whether this is a complete sharded checkpoint."""
    return (path / REST_FILE).is_file() and (path / METADATA_FILE).is_file()


class ShardedFolder:
    """A folder as ``write_folder`` writes it. All calls are collectives.

    Args:
        folder: The same for all ranks.
        weights_only: For all that is no tensor: see ``torch.load``.
        verify: Whether to compare its files with their checksums first, if it has them.

    Raises:
        CheckpointError: If a rank cannot read the folder, or it is damaged; on every rank.
    """

    def __init__(self, folder: Path, *, weights_only: bool | None = None, verify: bool = True) -> None:
        self._folder = folder
        self._weights_only = weights_only
        if verify:
            self._read(lambda: check_folder(folder, current_rank(), num_ranks()))
        self._metadata: Metadata = self._read(lambda: read_index(folder))
        self._paths: dict[str, Path_] = dict(self._metadata.planner_data or {})

    @property
    def has_optimizers(self) -> bool:
        """Whether states of optimizers were saved."""
        return self.has_state("optimizer_0")

    def has_state(self, key: str) -> bool:
        """Whether a state was saved under this key."""
        return any(path[0] == key for path in self._paths.values())

    def read_rest(self) -> dict[str, Any]:
        """Read everything but states of modules and optimizers.

        Returns:
            What was written as ``rest``.

        Raises:
            CheckpointError: If a rank cannot read it; on every rank.
            pickle.UnpicklingError: If it holds what ``weights_only`` does not allow; on every rank.
        """
        rest: dict[str, Any] = self._read(
            lambda: read_values(self._folder / REST_FILE, weights_only=self._weights_only)
        )
        return rest

    def read_states(self, on_progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
        """Read all states of modules and optimizers as whole tensors, without a module. For one process.

        Args:
            on_progress: Called with the share of their bytes that was read.

        Returns:
            ``state_dict``, and ``optimizer_0``, ... with names of parameters for numbers.

        Raises:
            CheckpointError: If it cannot be read.
            pickle.UnpicklingError: If it holds what ``weights_only`` does not allow.
        """
        return self._load({key: self._make_target(key) for key in self._paths}, on_progress)

    def load_module(self, module: nn.Module, *, strict: bool, key: str = "state_dict") -> None:
        """Load a module's parameters and buffers in place.

        Args:
            module: Its parameters may be sharded tensors.
            strict: Whether it must have the same names as the checkpoint.
            key: Of the module's state.

        Raises:
            ValueError: If they do not fit; on every rank and before anything has changed.
            CheckpointError: If a rank cannot read its part; on every rank.
        """
        own = module.state_dict()
        own_keys, own_state = {clean_name(key): key for key in own}, {clean_name(key): own[key] for key in own}
        stored = {stored_key: path for stored_key, path in self._paths.items() if path[0] == key}
        entries = {
            clean_name(str(path[1])): self._entry(stored_key) if len(path) == 2 else None
            for stored_key, path in stored.items()
        }
        shapes: dict[str, Sequence[int] | None] = {
            name: tuple(entry.size) if entry is not None else None for name, entry in entries.items()
        }
        shapes |= {name: None for name, value in own_state.items() if value == {}}  # of which nothing is stored
        check_fit(own_state, shapes, strict=strict)
        wanted = {}
        for stored_key, path in stored.items():
            name = clean_name(str(path[1]))
            if name in own_state:
                own_value = own_state[name]
                wanted[stored_key] = own_value if isinstance(own_value, Tensor) else self._make_target(stored_key)
        loaded = self._load(wanted).get(key, {})
        state = {clean_name(str(name)): value for name, value in loaded.items()}
        state |= {name: value for name, value in own_state.items() if value == {}}
        module.load_state_dict({own_keys[name]: value for name, value in state.items()}, strict=strict)

    def load_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer], *, check_states: StateCheck) -> None:
        """Load the states of a module's optimizers.

        Args:
            module: Has their parameters.
            optimizers: In the order in which they were saved. Their states become sharded as the parameters are.
            check_states: Raises if states are not those of an optimizer's parameters. Sees all before one is loaded.

        Raises:
            ValueError: If they are others; on every rank and before anything has changed.
            CheckpointError: If a rank cannot read its part; on every rank.
        """
        own_names = [names_in_optimizer(module, optimizer) for optimizer in optimizers]
        roots = [f"optimizer_{index}" for index in range(len(optimizers))]
        parts = {key: path for key, path in self._paths.items() if path[0] in roots}
        others = self._load({key: self._make_target(key) for key, path in parts.items() if path[1] != "state"})
        for index, (root, names) in enumerate(zip(roots, own_names, strict=True)):
            self._check_groups(index, others.get(root), names)
            saved_states = self._find_states(index, names)
            check_states(module, optimizers[index], saved_states, others[root]["param_groups"], index)
        aliases = parameters_by_name(module)
        states = self._load(
            {
                key: self._make_state(key, path, aliases, optimizers[roots.index(str(path[0]))])
                for key, path in parts.items()
                if path[1] == "state"
            }
        )
        for root, names, optimizer in zip(roots, own_names, optimizers, strict=True):
            state = states.get(root, {}).get("state", {})
            optimizer.load_state_dict(_to_integers({**others[root], "state": state}, names))

    def _check_groups(self, index: int, saved: dict[str, Any] | None, names: list[list[str]]) -> None:
        if saved is None or "param_groups" not in saved:
            raise ValueError(
                f"The checkpoint {self._folder} has no state of optimizer {index}: it was saved with fewer, or "
                "with save_weights_only=True. Use it for validate, test and predict."
            )
        saved_names = [sorted(map(clean_name, group["params"])) for group in saved["param_groups"]]
        if saved_names != [sorted(group) for group in names]:
            raise ValueError(
                f"Optimizer {index} has {[len(group) for group in saved_names]} parameters in {self._folder}, and "
                f"{[len(group) for group in names]} or other ones in configure_optimizers. Return the optimizer "
                "that the checkpoint was saved with."
            )

    def _find_states(self, index: int, names: list[list[str]]) -> list[dict[str, Any]]:
        """Return what the folder says of the state of each parameter, in the order of ``names``."""
        states: dict[str, dict[str, Any]] = {}
        for key, path in self._paths.items():
            if path[:2] == (f"optimizer_{index}", "state") and len(path) == 4:
                states.setdefault(clean_name(str(path[2])), {})[str(path[3])] = self._entry(key)
        return [states.get(name, {}) for group in names for name in group]

    def _entry(self, key: str) -> TensorStorageMetadata | None:
        """Return what the folder says of a tensor; ``None`` for a pickled value."""
        entry = self._metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def _make_target(self, key: str) -> Tensor | None:
        entry = self._entry(key)
        return None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)

    def _make_state(
        self, key: str, path: Path_, parameters: dict[str, nn.Parameter], optimizer: Optimizer
    ) -> Tensor | None:
        entry, parameter = self._entry(key), parameters.get(clean_name(str(path[2])))
        if parameter is not None and entry is not None:
            current = optimizer.state.get(parameter, {}).get(path[3]) if len(path) == 4 else None
            if is_sharded_state(entry.size, parameter, current):
                return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        return self._make_target(key)

    def _load(self, flat: dict[str, Any], on_progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
        """Read into the tensors of a flat state; returns it nested."""
        planner = _LoadPlanner(count_bytes(flat), on_progress, weights_only=self._weights_only)
        self._read(lambda: read_entries(self._folder, self._metadata, flat, planner))
        nested: dict[Any, Any] = {}
        for key, value in flat.items():
            inner, (*path, last) = nested, self._paths[key]
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = value
        result: dict[str, Any] = _with_lists(nested)
        return result

    def _read(self, action: Any) -> Any:
        return on_all_ranks(action, f"The checkpoint {self._folder} could not be read")


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}


def _to_integers(saved: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Number the parameters of a state dict as the optimizer does."""
    numbers: dict[str, int] = {}
    groups = []
    for group, own_names in zip(saved["param_groups"], names, strict=True):
        own_numbers = range(len(numbers), len(numbers) + len(own_names))
        numbers.update(zip(own_names, own_numbers, strict=True))
        groups.append({**group, "params": list(own_numbers)})
    state = {numbers.get(clean_name(str(key)), key): values for key, values in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


METADATA_FILE = ".metadata"


def read_index(folder: Path) -> Metadata:
    """Read what is where in a folder.

    Raises:
        CheckpointError: If it is not what such a folder has.
    """

    def read() -> Metadata:
        with (folder / METADATA_FILE).open("rb") as file:
            index = read_metadata(file)
        if set(index.planner_data or ()) - set(index.state_dict_metadata):
            raise KeyError("an entry is not described")
        return index

    return explained(read, METADATA_FILE)


def read_entries(folder: Path, index: Metadata, entries: dict[str, Any], planner: DefaultLoadPlanner) -> None:
    """Read entries of a folder, in place. A collective.

    Args:
        folder: It.
        index: Its.
        entries: By key, each with the tensor to read into; ``None`` for what is no tensor, whose place it takes.
        planner: Puts them there.

    Raises:
        CheckpointError: If one is damaged; on every rank, as all other errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read a folder
        explained(
            lambda: load(
                entries,
                storage_reader=_Reader(folder, index),
                planner=planner,
            ),
            "one of its files",
        )


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index  # torch would unpickle it, whatever it runs


class _LoadPlanner(DefaultLoadPlanner):
    """For a state that is flat already."""

    def __init__(self, num_bytes: int, on_progress: Callable[[float], None], *, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_bytes, self._read_bytes, self._on_progress = num_bytes, 0, on_progress
        self._weights_only = weights_only

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._read_bytes += tensor.nbytes
        self._on_progress(self._read_bytes / max(1, self._num_bytes))

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = explained(lambda: torch.load(value, weights_only=self._weights_only), key)


# States of a sharded module and its optimizers in a folder to which each rank writes its own part.
#
# No rank ever holds more than its part, and any number of ranks can read the folder. It is laid out as Lightning's
# ``ModelParallelStrategy`` does: ``torch.distributed.checkpoint`` with the keys ``state_dict``, ``optimizer_0``, ...
# and ``meta.pt`` with all the rest; ``checksums.json``, written last, is ours. What is the same on all ranks, such as
# buffers, is rank 0's.


def sharded_module_state(module: nn.Module) -> dict[str, Any]:
    """Take a module's state without collecting it: its own tensors, under the names of a plain module."""
    return {clean_name(key): value for key, value in module.state_dict().items()}


def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Take an optimizer's state without collecting it, and without making one where there is none yet.

    Args:
        module: Has the optimizer's parameters.
        optimizer: Its states may be sharded tensors.

    Returns:
        ``optimizer.state_dict()`` with clean parameter names for integers. Its tensors are the optimizer's own.

    Raises:
        ValueError: If the module does not have one of the parameters.
    """
    packed = optimizer.state_dict()
    names: dict[Any, str] = {}
    groups = []
    for group, own_names in zip(packed["param_groups"], names_in_optimizer(module, optimizer), strict=True):
        names.update(zip(group["params"], own_names, strict=True))
        groups.append({**group, "params": own_names})
    state = {names.get(key, key): values for key, values in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


class _SavePlanner(DefaultSavePlanner):
    """Writes what is kept in 8 bit as float32, one tensor after the other."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return decoded(super().lookup_object(index))


def write_folder(
    state: Mapping[str, Any], rest: Mapping[str, Any], folder: Path, process_group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint. A collective.

    Args:
        state: ``state_dict`` and ``optimizer_0``, ... as the functions above give them.
        rest: Everything else; rank 0's is written.
        folder: Exists, is empty, and is the same for all ranks.
        process_group: Of all ranks; ``None`` takes the default one. A thread needs one of its own.

    Raises:
        CheckpointException: If a rank cannot write its part; on every rank.
        OSError: If rank 0 cannot write the rest; on rank 0.
    """
    writer = CheckedWriter(folder)
    save(
        map_leaves(dict(state), lambda leaf: leaf),  # dicts of its own: it may flatten them
        storage_writer=writer,
        planner=_SavePlanner(dedup_save_to_lowest_rank=True),
        process_group=process_group,
    )
    of_ranks = gather_objects(writer.files.checksums, process_group)
    if current_rank() == 0:
        with writer.files.create_stream(folder / REST_FILE, "wb") as file:
            save_values(dict(rest), file)
        of_ranks.append(writer.files.checksums)  # with that of the rest
        write_checksums(folder, {name: checksum for each in of_ranks for name, checksum in each.items()})
