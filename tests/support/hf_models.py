"""Models of ``transformers`` with random weights, each as small as its code allows, and a batch for each."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

WIDTH, LENGTH, VOCAB_SIZE = 32, 16, 96
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**TOKENS, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}

Batch = dict[str, Any]


def text(size: int) -> Batch:
    """Token ids to continue: ``input_ids`` and ``labels``, [size, LENGTH]."""
    tokens = torch.randint(3, VOCAB_SIZE, (size, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_text(size: int) -> Batch:
    """The same, the end of the first sequence padded: a real run would leave a mask of ones out, an estimate not."""
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[0, -4:] = 0
    return {**text(size), "attention_mask": mask}


def classified_text(size: int) -> Batch:
    """Token ids and a class for each sequence."""
    return {**masked_text(size), "labels": torch.randint(2, (size,))}


def images(size: int, pixels: int = 32) -> Batch:
    """Pixels and a class for each image."""
    return {"pixel_values": torch.randn(size, 3, pixels, pixels), "labels": torch.randint(2, (size,))}


def captioned_images(size: int) -> Batch:
    """Pixels and text."""
    tokens = masked_text(size)
    return {
        "pixel_values": torch.randn(size, 3, 32, 32),
        "input_ids": tokens["input_ids"],
        "attention_mask": tokens["attention_mask"],
        "return_loss": True,
    }


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**TOKENS, **SIZES, max_position_embeddings=64))


def _roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**TOKENS, **SIZES, max_position_embeddings=64))


def _deberta() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8}
    return hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**TOKENS, **SIZES, **relative))


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TOKENS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64))


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=True))


def _mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=8))


def _qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER))


def _gemma() -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER, head_dim=16))


def _phi() -> nn.Module:
    return hf.PhiForCausalLM(hf.PhiConfig(**DECODER))


def _mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2))


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**TOKENS, **sizes, decoder_start_token_id=0))


PAIR = {
    **{"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1},
}


def _bart() -> nn.Module:
    return hf.BartForConditionalGeneration(hf.BartConfig(**TOKENS, **PAIR, max_position_embeddings=64))


def _whisper() -> nn.Module:
    lengths = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**TOKENS, **PAIR, **lengths))


def _spoken(size: int) -> Batch:
    return {"input_features": torch.randn(size, 8, 32), "labels": text(size)["labels"]}


SPEECH = {
    **SIZES,
    **{"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}


def _wav2vec2() -> nn.Module:
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**SPEECH, mask_time_prob=0.0, layerdrop=0.0))


def waves(size: int) -> Batch:
    return {"input_values": torch.randn(size, 512), "labels": torch.randint(2, (size,))}


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=32, patch_size=8))


def _swin() -> nn.Module:
    sizes = {
        "image_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
    }
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes))


def _convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2))


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


def _segformer() -> nn.Module:
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
    shapes = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2}
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**sizes, **shapes, decoder_hidden_size=16))


def segmented(size: int) -> Batch:
    return {**images(size), "labels": torch.randint(2, (size, 32, 32))}


def _clip() -> nn.Module:
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    config = hf.CLIPConfig(text_config={**TOKENS, **SIZES}, vision_config=vision, projection_dim=16)
    return hf.CLIPModel(config)


def _mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**TOKENS, hidden_size=WIDTH, state_size=4, num_hidden_layers=2))


def _rwkv() -> nn.Module:
    return hf.RwkvForCausalLM(hf.RwkvConfig(**TOKENS, hidden_size=WIDTH, num_hidden_layers=2, context_length=64))


def _vae() -> nn.Module:
    sizes = {"encoder_hidden_size": WIDTH, "image_size": 32, "patch_size": 8, "decoder_hidden_size": WIDTH}
    decoder = {"decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 64}
    return hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**{**SIZES, **sizes, **decoder}))


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    config = hf.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        backbone=None,
        use_pretrained_backbone=False,
        num_queries=6,
        num_labels=3,
        **PAIR,
    )
    return hf.DetrForObjectDetection(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "bert": (_bert, masked_text),
    "roberta": (_roberta, classified_text),
    "deberta": (_deberta, classified_text),
    "gpt2": (_gpt2, text),
    "llama": (_llama, masked_text),
    "mistral": (_mistral, text),
    "qwen2": (_qwen2, text),
    "gemma": (_gemma, text),
    "phi": (_phi, text),
    "mixtral": (_mixtral, text),
    "t5": (_t5, text),
    "bart": (_bart, text),
    "whisper": (_whisper, _spoken),
    "wav2vec2": (_wav2vec2, waves),
    "vit": (_vit, images),
    "vit_mae": (_vae, lambda size: {"pixel_values": torch.randn(size, 3, 32, 32)}),
    "swin": (_swin, images),
    "convnext": (_convnext, images),
    "resnet": (_resnet, images),
    "segformer": (_segformer, segmented),
    "clip": (_clip, captioned_images),
    "mamba": (_mamba, text),
    "rwkv": (_rwkv, text),
    "detr": (_detr, lambda size: {"pixel_values": torch.randn(size, 3, 64, 64)}),
}
