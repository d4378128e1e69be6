"""Llama 3.1 8B with LoRA on a card of 24 GB, as ``examples/situations/lora.md`` has it: memory, and seconds to tell."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_vram import ActivationCheckpointing, ChunkedLoss, QuantizeFrozenWeights
from lightning_vram.estimation import estimate_memory
from lightning_vram.memory.units import GIB
from lightning_vram.planner import plan_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]
MOST_SECONDS_OF_ESTIMATE, MOST_SECONDS_OF_PLAN = 60, 180
TOKENS = torch.zeros(1, 2048, dtype=torch.int64)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
LEAN = (lambda: QuantizeFrozenWeights(bits=4), ActivationCheckpointing, ChunkedLoss)


class Llama8B(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        config = hf.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            use_cache=False,
        )
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model = peft.get_peft_model(hf.LlamaForCausalLM(config).to(torch.bfloat16), lora)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def make_case(precision: str, num_callbacks: int) -> tuple[pl.LightningModule, dict[str, Any]]:
    with torch.device("meta"):
        module = Llama8B()
    return module, {"precision": precision, "callbacks": [one() for one in LEAN[:num_callbacks]]}


@pytest.mark.parametrize(
    ("precision", "num_callbacks", "gib"),
    [
        ("bf16-true", 0, 28.20),
        ("bf16-true", 1, 17.64),
        ("bf16-true", 3, 7.12),
        ("bf16-mixed", 0, 29.85),
        ("bf16-mixed", 1, 19.31),
        ("bf16-mixed", 3, 7.25),
    ],
)
def test_an_estimate_takes_less_than_a_minute(precision, num_callbacks, gib):
    module, trainer = make_case(precision, num_callbacks)
    start = time.process_time()
    estimate = estimate_memory(module, BATCH, device="rtx4090", trainer=trainer, find_limits=False)
    assert time.process_time() - start <= MOST_SECONDS_OF_ESTIMATE
    assert estimate.needed_bytes / GIB == pytest.approx(gib, abs=0.01)
    assert estimate.fits is (gib < 24)


@pytest.mark.minutes
def test_a_plan_takes_less_than_three_minutes():
    module, trainer = make_case("bf16-true", 1)
    start = time.process_time()
    plan = plan_memory(module, BATCH, device="rtx4090", budget="16GiB", allow="any", trainer=trainer)
    assert time.process_time() - start <= MOST_SECONDS_OF_PLAN
    assert plan.is_needed
    assert plan.peak_bytes <= 16 * GIB
