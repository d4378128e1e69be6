"""How the command reads arguments and files, and how it ends when they are wrong."""

from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_vram.commands.checks import check_aliases
from lightning_vram.commands.hints import explain
from lightning_vram.commands.mistakes import place_of, where
from lightning_vram.commands.program import fail, is_debugging

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
