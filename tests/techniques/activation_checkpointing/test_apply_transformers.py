"""Models of transformers, with their own checkpointing on and off, and with key-value caches."""

import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCAB_SIZE = 20
TOKENS = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}

MODELS = {
    "llama": lambda: (LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, attention_dropout=0.1, **SIZES)), TOKENS),
    "vit": lambda: (
        ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SIZES)),
        {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])},
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def train_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor | None], int]:
    model.train().zero_grad()
    torch.manual_seed(1)
    with track_memory(model, inputs=batch) as tracker:
        model(**batch).loss.backward()
    return [p.grad for p in model.parameters()], tracker.timeline.saved_for_backward_bytes


def compare_with_plain(name: str, *, is_enabled: bool) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    plain, plain_bytes = train_step(copy.deepcopy(model), batch)
    if is_enabled:
        model.gradient_checkpointing_enable()
    before = [vars(module).get("gradient_checkpointing") for module in model.modules()]
    handle = apply_activation_checkpointing(model)
    assert not any(vars(module).get("gradient_checkpointing") for module in model.modules())
    checkpointed, checkpointed_bytes = train_step(model, batch)
    for one, other in zip(checkpointed, plain, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert checkpointed_bytes < 0.5 * plain_bytes
    handle.remove()
    assert [vars(module).get("gradient_checkpointing") for module in model.modules()] == before


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_model():
    # On some processors MKL multiplies the same small matrices otherwise at other addresses. It can be told not to, but
    # only before it is first used.
    environment = {**os.environ, "MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, check=True)


def test_a_filled_cache_is_refused():
    model, batch = MODELS["llama"]()
    apply_activation_checkpointing(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=batch["input_ids"], past_key_values=cache, use_cache=True)
    with pytest.raises(RuntimeError, match=r"^layer LlamaDecoderLayer reads a filled key-value cache"):
        model(input_ids=batch["input_ids"], past_key_values=cache)


if __name__ == "__main__":
    for model, uses_own in itertools.product(MODELS, (False, True)):
        compare_with_plain(model, is_enabled=uses_own)
