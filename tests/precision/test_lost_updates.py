"""``check_updates=True`` logs the share of updates that are lost, and changes nothing."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
from support.helpers import LitManual, LitTiny, TinyGPT

from lightning_vram import LeanMixedPrecision


class Noting(pl.Callback):
    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        if "vram/lost_updates" in trainer.callback_metrics:
            self.shares.append(float(trainer.callback_metrics["vram/lost_updates"]))


@pytest.mark.parametrize(("parameters", "kind"), [("bf16+kahan", LitTiny), ("bf16+stochastic", LitManual)])
def test_the_share_is_logged_and_results_are_the_same(parameters, kind, same_as_baseline):
    checked, plain = (LeanMixedPrecision("bf16", parameters=parameters, check_updates=check) for check in (True, False))
    noting, silent = Noting(), Noting()
    baseline = {"plugins": [plain], "callbacks": [silent]}
    same_as_baseline(lambda: kind(TinyGPT()), noting, plugins=[checked], log_every_n_steps=1, baseline=baseline)
    assert not silent.shares
    assert noting.shares
    assert all(0 <= share <= 1 for share in noting.shares)


@pytest.mark.parametrize("parameters", ["fp32", "bf16+master", "bf16+split"])
def test_it_is_refused_where_nothing_is_lost(parameters: str) -> None:
    message = (
        "LeanMixedPrecision(check_updates=True) needs parameters='bf16+kahan' or 'bf16+stochastic', which lose "
        f"updates, got {parameters!r}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LeanMixedPrecision("bf16", parameters=parameters, check_updates=True)
