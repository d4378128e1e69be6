"""How the command reads arguments and files, and how it ends when they are wrong."""

from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_vram.commands.errors import explain, place_of, where
from lightning_vram.commands.options import fail, is_debugging
from lightning_vram.strategies.fsdp_offload import local_path
from lightning_vram.techniques.sharded_checkpoints import is_sharded_folder, read_values


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


PARSER_MODE = "omegaconf+"


class CommandParser(LightningArgumentParser):
    """Reports what is wrong in one line."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or is_debugging():
            super().error(message, ex)
        fail(explain(message) + (where(ex) if place_of(ex) else ""))
