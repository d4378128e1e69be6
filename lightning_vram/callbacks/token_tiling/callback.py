"""Run MLPs, norms and whatever treats tokens alone some tokens at a time, in the forward and in the backward."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_moved_parameters, refuse_several
from lightning_vram.core.layers import check_layers, show_names
from lightning_vram.techniques.token_tiling import TilingHandle, apply_token_tiling


class TokenTiling(FitTechnique):
    """Run modules that treat each token independently in tiles along the sequence, such as MLPs and norms.

    TiledMLP of ALST (Bekman et al. 2025, https://arxiv.org/abs/2506.13996). Only a module's input and output are whole;
    the backward recomputes each tile. The first call of a module checks on 64 tokens that no token depends on another.
    Modules that mix tokens (attention, convolutions, batch norms, positions), get or return several tensors, draw one
    mask for all tokens, write to inputs or buffers, store something of a call, or use weights of other modules are not
    tiled.
    Lossless: kernels may round differently for fewer rows, and weight gradients are accumulated in float32 in another
    order. Dropout draws other masks than the baseline.

    Args:
        layers: ``"auto"``: the outermost modules that pass the check and run several operators. Or class names, module
            names, globs or classes, one or a list, as for
            :func:`~lightning_vram.core.layers.select_layers`; one of them that mixes tokens raises an error.
        tile: Number of tokens per sequence in a tile. ``"auto"``: as many tokens of the batch as the hidden size, at
            least 1,024.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``tile`` is less than 1.
        MisconfigurationException: If a named layer cannot be tiled.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import TokenTiling
        >>> trainer = pl.Trainer(callbacks=[TokenTiling()], logger=False)
    """

    def __init__(
        self,
        layers: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto",
        tile: int | Literal["auto"] = "auto",
    ) -> None:
        check_layers("TokenTiling(layers)", layers)
        if tile != "auto":
            check_positive_int("TokenTiling(tile)", tile)
        self.layers = layers
        self.tile = tile
        self._handle: TilingHandle | None = None
        self._has_reported = False

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("TokenTiling", trainer, "tiles are computed with")
        refuse_several(trainer, TokenTiling, "Two TokenTiling in one Trainer: pass all layers to one.")

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        model = trainer.lightning_module
        try:
            self._handle = apply_token_tiling(model, self.layers, self.tile, error=MisconfigurationException)
        except ValueError as error:
            raise MisconfigurationException(f"TokenTiling: {error}") from None

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._has_reported or self._handle is None:
            return
        self._has_reported = True
        verdicts = self._handle.verdicts()
        tiled = {name: how for name, (is_alone, how) in verdicts.items() if is_alone}
        if not tiled:
            rank_zero_info(
                "TokenTiling has no effect: no module that treats each token independently got more tokens than one "
                "tile. Name layers, or use a smaller tile."
            )
            return
        how = "exact" if set(tiled.values()) == {"exact"} else "lossless"
        rank_zero_info(
            f"TokenTiling runs {show_names(list(tiled))} in tiles; on a sample of tokens the results are {how}. "
            f"{len(verdicts) - len(tiled)} other modules that were checked are not tiled."
        )

    @override
    def _undo(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._has_reported = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": None, "_has_reported": False}  # a copy is not part of any run
