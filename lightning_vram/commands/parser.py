"""How the command reads arguments and files, and how it ends when they are wrong."""

import os
import sys
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_vram.commands.checks import check_aliases
from lightning_vram.report.one_line import condense_error

PROGRAM = "lightning-vram"
DEBUG_VARIABLE = "LIGHTNING_VRAM_DEBUG"
PARSER_MODE = "omegaconf+"
_EXIT_USAGE = 2


class CommandParser(LightningArgumentParser):
    """Says what is wrong in one line."""

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
        if not self.exit_on_error or os.environ.get(DEBUG_VARIABLE):
            super().error(message, ex)
        fail(condense_error(message))


def fail(message: str) -> NoReturn:
    """Say what is wrong on stderr, and end."""
    sys.stderr.write(f"{PROGRAM}: error: {message}\n")
    sys.exit(_EXIT_USAGE)
