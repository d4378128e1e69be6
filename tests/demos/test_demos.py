"""The demos learn, and refuse what cannot work."""

import sys

import lightning.pytorch as pl
import pytest

from lightning_vram.demos import ByteGPT, DigitsData, DigitsResNet, SourceText, read_sources


@pytest.mark.slow
def test_digits_resnet_learns_digits(make_trainer):
    pl.seed_everything(0, verbose=False)
    trainer = make_trainer(max_epochs=5)
    trainer.fit(DigitsResNet(), DigitsData())
    assert trainer.callback_metrics["val_accuracy"] > 0.93


def test_windows_overlap_by_the_byte_to_predict(tmp_path):
    (tmp_path / "a.py").write_bytes(bytes(range(200)))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("left out")
    data = SourceText(batch_size=2, sequence_length=4, path=str(tmp_path))
    data.setup("fit")
    windows = data.train_dataloader().dataset
    assert windows[0].tolist() == [0, 1, 2, 3, 4]
    assert windows[1].tolist() == [4, 5, 6, 7, 8]
    assert data.val_dataloader().dataset[0][0] == 190  # the last twentieth


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ByteGPT(width=10, num_heads=3), ValueError, r"^ByteGPT\(num_heads\) must divide width=10, got 3\.$"),
        (
            lambda: SourceText(sequence_length=10**9).setup("fit"),
            ValueError,
            r"^SourceText\(sequence_length\) is 1000000000",
        ),
    ],
)
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    expected = "^DigitsData needs scikit-learn, which is not installed: pip install scikit-learn$"
    with pytest.raises(ModuleNotFoundError, match=expected):
        DigitsData().setup("fit")


def test_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^SourceText\(path\): no \*\.py file in "):
        read_sources(tmp_path)
