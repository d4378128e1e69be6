"""``check_updates=True`` logs the share of updates that are lost, and changes nothing."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
from support.helpers import LitManual, LitTiny, TinyGPT, assert_equal_weights

from lightning_vram import LeanMixedPrecision


class Noting(pl.Callback):
    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        if "vram/lost_updates" in trainer.callback_metrics:
            self.shares.append(float(trainer.callback_metrics["vram/lost_updates"]))


def fit(make_trainer: Any, parameters: str, kind: Any, *, check_updates: bool, **options: Any) -> Any:
    pl.seed_everything(0, verbose=False)
    model, noting = kind(TinyGPT()), Noting()
    plugin = LeanMixedPrecision("bf16", parameters=parameters, check_updates=check_updates)
    make_trainer(plugins=[plugin], callbacks=[noting], **options).fit(model)
    return model, noting.shares


@pytest.mark.parametrize("kind", [LitTiny, LitManual])
@pytest.mark.parametrize("parameters", ["bf16+kahan", "bf16+stochastic"])
def test_the_share_is_logged_and_results_are_the_same(parameters, kind, make_trainer):
    checked, shares = fit(make_trainer, parameters, kind, check_updates=True, log_every_n_steps=1)
    plain, none = fit(make_trainer, parameters, kind, check_updates=False)
    assert_equal_weights(checked, plain)
    assert not none
    assert shares
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("parameters", ["fp32", "bf16+master", "bf16+split"])
def test_it_is_refused_where_nothing_is_lost(parameters: str) -> None:
    message = (
        "LeanMixedPrecision(check_updates=True) needs parameters='bf16+kahan' or 'bf16+stochastic', which lose "
        f"updates, got {parameters!r}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LeanMixedPrecision("bf16", parameters=parameters, check_updates=True)
