"""Train for deployment in 4 bits. Run: python examples/quantization_aware_training.py [--fast_dev_run]."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl

from lightning_vram import QuantizationAwareTraining, load_quantized, quantize_after_fit
from lightning_vram.demos import DigitsData, DigitsResNet

with TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        max_epochs=3,
        fast_dev_run="--fast_dev_run" in sys.argv,
        callbacks=[QuantizationAwareTraining("int4", start_epoch=1, save=None)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsResNet(), DigitsData())
    path = Path(folder) / "digits.pt"
    print(quantize_after_fit(trainer, path))
    deployed = load_quantized(DigitsResNet(), path)
print(sum(tensor.nbytes for tensor in deployed.state_dict().values()), "bytes")
