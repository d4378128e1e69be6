"""Who hears a hook while it is quiet, and that all is as before afterwards."""

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback
from support.helpers import LitTiny, TinyCNN

from lightning_vram.callbacks.micro_batching.callback import quiet_hooks

HOOKS = ("on_before_backward", "on_after_backward")


class Listener(Callback):
    def __init__(self, heard) -> None:
        self.heard = heard

    def on_before_backward(self, trainer, pl_module, loss):
        self.heard.append((type(self).__name__, "before"))

    def on_after_backward(self, trainer, pl_module):
        self.heard.append((type(self).__name__, "after"))

    def on_train_batch_end(self, *args):
        self.heard.append((type(self).__name__, "end"))


class Chosen(Listener):
    pass


class LitListening(LitTiny):
    def __init__(self, heard) -> None:
        super().__init__(TinyCNN())
        self.heard = heard

    def on_before_backward(self, loss):
        self.heard.append(("module", "before"))

    def on_after_backward(self):
        self.heard.append(("module", "after"))


class QuietBackward(LitListening):
    def backward(self, loss):
        # Within the backward of the trainer, on_before_backward has been called and on_after_backward has not.
        with quiet_hooks(self.trainer, HOOKS, lambda callback: isinstance(callback, Chosen)):
            self.trainer.strategy.precision_plugin.pre_backward(loss, self)
            self.trainer.strategy.precision_plugin.post_backward(loss, self)
            self.heard.append("loud")
        super().backward(loss)


def fit(make_trainer, make_module):
    heard = []
    functions = {"on_after_backward": lambda *_: heard.append(("lambda", "after"))}
    callbacks = [Listener(heard), Chosen(heard), LambdaCallback(**functions), Callback()]
    trainer = make_trainer(callbacks=callbacks, max_steps=1, limit_val_batches=0)
    trainer.fit(make_module(heard))
    return heard


def test_only_chosen_callbacks_hear_and_afterwards_everybody_does(make_trainer):
    plain = fit(make_trainer, LitListening)
    assert ("lambda", "after") in plain
    heard = fit(make_trainer, QuietBackward)
    middle = heard.index("loud")
    assert heard[middle - 2 : middle] == [("Chosen", "before"), ("Chosen", "after")]
    assert heard[: middle - 2] + heard[middle + 1 :] == plain


def test_everything_is_put_back_after_an_error(make_trainer):
    heard = []
    listener, function = Listener(heard), LambdaCallback(on_after_backward=lambda *_: None)
    module = LitListening(heard)
    trainer = make_trainer(callbacks=[listener, function])
    trainer.strategy.connect(module)
    callbacks, items = trainer.callbacks, list(trainer.callbacks)
    before = [dict(vars(owner)) for owner in (module, *items)]

    def fail():
        with quiet_hooks(trainer, HOOKS, lambda callback: callback is function):
            trainer.callbacks[items.index(listener)].on_after_backward(trainer, module)
            module.on_after_backward()
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert not heard
    assert trainer.callbacks is callbacks
    assert trainer.callbacks == items
    assert [dict(vars(owner)) for owner in (module, *items)] == before
    module.on_after_backward()
    assert heard == [("module", "after")]
