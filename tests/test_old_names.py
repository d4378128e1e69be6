"""What 0.1 saved, before modules were moved, is loaded and trained on."""

import importlib
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from support.saved_run import NUM_STEPS, SAVED_AFTER, compute, train

from lightning_vram.old_names import NEW_NAMES

SAVED = Path(__file__).parent / "saved_by_0_1"
OLD_NAME = (
    r"^lightning_vram\..* is now lightning_vram\..*\. Import it from there, or save the loaded file "
    r"again: .* removed in 0\.3\.$"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # VRAMMonitor writes
    for name in NEW_NAMES:
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)


def load(name):
    with pytest.warns(DeprecationWarning, match=OLD_NAME):
        return torch.load(SAVED / name, weights_only=False)


def test_a_module_that_was_saved_whole_computes_and_trains_as_it_did():
    output, gradients = torch.load(SAVED / "computed.pt")
    net = load("module.pt")
    actual, actual_gradients = compute(net)
    assert actual.dtype == output.dtype
    torch.testing.assert_close(actual, output)
    torch.testing.assert_close(actual_gradients, gradients)
    plain = torch.nn.Sequential(*map(pickle.loads, map(pickle.dumps, net)))
    plain[0] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    plain.load_state_dict(net.state_dict())
    assert not torch.equal(compute(plain)[0], actual)  # the float32 layer and the norm are more than their weights


def test_saved_again_it_has_the_new_names(tmp_path):
    net = load("module.pt")
    torch.save(net, tmp_path / "again.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = torch.load(tmp_path / "again.pt", weights_only=False)
    for one, other in zip(compute(again)[1], compute(net)[1], strict=True):
        assert torch.equal(one, other)


def test_a_run_that_was_saved_goes_on_as_it_did():
    with pytest.warns(DeprecationWarning, match=OLD_NAME):
        resumed = train(ckpt_path=SAVED / "run.pt")
    assert resumed.trainer.global_step == NUM_STEPS > SAVED_AFTER
    torch.testing.assert_close(dict(resumed.state_dict()), dict(torch.load(SAVED / "end.pt")))


@pytest.mark.parametrize("old", NEW_NAMES)
def test_an_old_name_hands_on_what_the_new_one_has(old):
    with pytest.warns(DeprecationWarning, match=OLD_NAME):
        module = importlib.import_module(old)
    new = importlib.import_module(NEW_NAMES[old])
    names = [name for name in vars(new) if not name.startswith("__")]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)
    assert not hasattr(module, "no_such_name")


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'lightning_vram\.techniques\.no_such_name'$"):
        importlib.import_module("lightning_vram.techniques.no_such_name")
