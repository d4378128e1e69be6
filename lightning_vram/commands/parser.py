"""How the command reads arguments and files, and how it ends when they are wrong."""

from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_vram.commands.errors import explain, place_of, where
from lightning_vram.commands.options import fail, is_debugging
from lightning_vram.strategies.fsdp_offload import local_path
from lightning_vram.techniques.sharded_checkpoints import is_sharded_folder, read_values

_MOST_VALUES = 100_000


def check_aliases(text: str) -> None:
    """Refuse YAML whose aliases (``*name``) stand for more than a configuration holds, or for themselves."""
    if "&" not in text or "*" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return
    num_values = _count_values(root, {})
    if num_values > _MOST_VALUES:
        raise ValueError(f"aliases (*name) make {num_values} values of this file; {_MOST_VALUES} are allowed.")


def check_checkpoint_path(path: str | None) -> None:
    """Refuse a path that exists and is no checkpoint; it may also be an address, or a word such as "last"."""
    local = local_path(str(path))
    if path is None or not local.exists() or is_sharded_folder(local):
        return
    if local.is_dir():
        raise MisconfigurationException(
            f"ckpt_path={path!r} is a folder without .metadata and meta.pt, which a sharded checkpoint has. Name a "
            "checkpoint."
        )
    found = read_values(local, weights_only=True)  # mapped into memory: tensors are not read
    if not isinstance(found, dict):
        raise MisconfigurationException(f"ckpt_path={path!r} is no checkpoint: it holds a {type(found).__name__}.")


def _count_values(node: Any, known: dict[int, int]) -> int:
    """Count the values of a tree whose nodes are used several times."""
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("an alias (*name) refers to itself.")
        return known[id(node)]
    known[id(node)] = 0  # not known yet
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for pair in inner for part in pair] if isinstance(node, yaml.MappingNode) else inner
    known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


PARSER_MODE = "omegaconf+"


class CommandParser(LightningArgumentParser):
    """Reports what is wrong in one line."""

    @override
    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        try:
            check_aliases(content)
        except ValueError as error:
            self.error(str(error), error)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or is_debugging():
            super().error(message, ex)
        fail(explain(message) + (where(ex) if place_of(ex) else ""))
