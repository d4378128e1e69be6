"""Models of ``transformers`` with adapters: those of ``peft``, and a fine-tuning on real text."""

import copy
import re
from typing import Any

import pytest
import torch
import transformers as hf
from support.hf_models import text
from torch import Tensor, nn

from lightning_vram.techniques.quantize_frozen_weights import dequantize_frozen_weights, quantize_frozen_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"
    ),  # peft, on transformers 5
]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **SIZES, num_key_value_heads=2, **changes))


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, **no_dropout, n_embd=128, n_layer=2, n_head=2, n_positions=64))


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(("make", "num_layers"), [(llama, 16), (gpt2, 11)])
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_of_peft_train_on_quantized_layers(make, num_layers, bits):
    peft = pytest.importorskip("peft")  # pip install peft
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules="all-linear"))
    plain, batch = copy.deepcopy(model), text(2)
    quantized = quantize_frozen_weights(model, bits)
    assert len(quantized.names) == num_layers
    for name in quantized.names:
        plain.get_submodule(name).weight.copy_(model.get_submodule(name).weight.dequantize())
    assert torch.equal(gradients(model, batch), gradients(plain, batch))
    model.gradient_checkpointing_enable()
    assert torch.equal(gradients(model, batch), gradients(plain, batch))


LAYERS = {"target_modules": ["q_proj", "down_proj"]}
TUNERS = {  # those that read the frozen weight as a tensor, and one that does not
    "LoRA": ("LoraConfig", {"r": 4} | LAYERS),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True} | LAYERS),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 16} | LAYERS),
    "tokens and LoRA": ("LoraConfig", {"r": 4, "trainable_token_indices": [65]} | LAYERS),
}


def tuned(tuner: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    kind, options = TUNERS[tuner]
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), getattr(peft, kind)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


@pytest.mark.parametrize("tuner", TUNERS)
def test_tuners_of_peft_train_and_merge_as_on_the_decoded_weights(tuner):
    model, plain, loaded = (tuned(tuner) for _ in range(3))
    batch = text(2)
    quantize_frozen_weights(model, 8)
    quantize_frozen_weights(plain, 8).remove()
    assert torch.equal(gradients(model, batch), gradients(plain, batch))
    with pytest.raises(RuntimeError, match=r" is quantized to 8 bits.*: call dequantize_frozen_weights\(model\)"):
        copy.deepcopy(model).merge_and_unload()
    quantize_frozen_weights(loaded, 8)
    loaded.load_state_dict(model.state_dict())
    expected = plain.merge_and_unload().state_dict()
    for one in (model, loaded):
        assert len(dequantize_frozen_weights(one)) == 16
        merged = one.merge_and_unload().state_dict()
        assert merged.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in merged.items())


def test_a_tuner_that_parametrizes_weights_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"])
    model = peft.get_peft_model(llama(), config)
    quantize_frozen_weights(model, 8)
    message = "q_proj.base_layer' is quantized to 8 bits, and 'torch.nn.utils.parametrize' would change it: call "
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model(**text(2))
    left_out = peft.get_peft_model(llama(), config)
    quantize_frozen_weights(left_out, 8, layers=["LlamaMLP"])
    left_out(**text(2))
