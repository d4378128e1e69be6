"""Private names of Lightning's command line."""

import logging
import warnings
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningCLI


def read_argument(cli: LightningCLI, name: str) -> Any:
    """Return an argument of the subcommand, as it was configured."""
    return cli._get(cli.config, name)


def method_arguments(cli: LightningCLI, subcommand: str) -> dict[str, Any]:
    """Return what the trainer's method of this name is called with."""
    return cli._prepare_subcommand_kwargs(subcommand)


class QuietlySeeded(LightningCLI):
    """A LightningCLI that does not print the seed, which would stand above each mistake in a configuration."""

    def _set_seed(self) -> None:
        log = logging.getLogger(seed_everything.__module__)
        was_disabled, log.disabled = log.disabled, True
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="No seed found")
                super()._set_seed()
        finally:
            log.disabled = was_disabled
