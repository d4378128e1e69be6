"""Models of ``transformers`` and ``timm`` with random weights, as small as their code allows, and batches for them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

WIDTH, LENGTH, VOCAB_SIZE = 32, 16, 96
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**TOKENS, **SIZES, "max_position_embeddings": 64}
PADDED_BY_ONE = {**ENCODER, "pad_token_id": 1}
DECODER = {**ENCODER, "num_key_value_heads": 2}
GPT = {**TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_positions": 64}
PAIR = {
    **{"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1},
}
TRANSLATOR = {**TOKENS, **PAIR, "max_position_embeddings": 64}
T5 = {
    **{**TOKENS, "d_model": WIDTH, "d_kv": 16, "d_ff": 64},
    **{"num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
}
SPEECH = {
    **SIZES,
    **{"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}
SWIN = {
    **{"image_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16},
    **{"depths": [2, 2], "num_heads": [2, 2]},
}

Batch = dict[str, Any]
Model = tuple[Callable[[], nn.Module], Callable[[int], Batch]]


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
    return {**masked_text(size), "labels": torch.randint(2, (size,))}


def images(size: int, pixels: int = 32) -> Batch:
    return {"pixel_values": torch.randn(size, 3, pixels, pixels), "labels": torch.randint(2, (size,))}


def only_images(size: int, pixels: int = 32) -> Batch:
    return {"pixel_values": torch.randn(size, 3, pixels, pixels)}


def segmented(size: int) -> Batch:
    return {**images(size), "labels": torch.randint(2, (size, 32, 32))}


def captioned_images(size: int) -> Batch:
    tokens = masked_text(size)
    return {
        **only_images(size),
        **{name: tokens[name] for name in ("input_ids", "attention_mask")},
        "return_loss": True,
    }


def seen_text(size: int) -> Batch:
    tokens = torch.randint(VOCAB_SIZE, (size, LENGTH))
    return {"pixel_values": torch.randn(size, 1, 3, 32, 32), "input_ids": tokens, "labels": torch.randint(2, (size,))}


def waves(size: int) -> Batch:
    return {"input_values": torch.randn(size, 512), "labels": torch.randint(2, (size,))}


def spoken(size: int) -> Batch:
    return {"input_features": torch.randn(size, 8, 32), "labels": text(size)["labels"]}


def from_config(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(hf, name)  # imports its module
        return kind(kind.config_class(**sizes))

    return make


def _of(name: str, make_batch: Callable[[int], Batch], **sizes: Any) -> Model:
    return from_config(name, **sizes), make_batch


def _causal(name: str, **sizes: Any) -> Model:
    return _of(f"{name}ForCausalLM", text, **(sizes or DECODER))


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    own = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    return hf.DetrForObjectDetection(
        hf.DetrConfig(**PAIR, **own, backbone_config=backbone, num_queries=6, num_labels=3)
    )


MODELS: dict[str, Model] = {
    "bert": _of("BertForMaskedLM", masked_text, **ENCODER),
    "roberta": _of("RobertaForSequenceClassification", classified_text, **ENCODER),
    "deberta": _of(
        "DebertaV2ForSequenceClassification",
        classified_text,
        **{**TOKENS, **SIZES, "relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8},
    ),
    "gpt2": _of("GPT2LMHeadModel", text, **GPT, n_head=2),
    "llama": _of("LlamaForCausalLM", masked_text, **DECODER, tie_word_embeddings=True),
    "mistral": _causal("Mistral", **DECODER, sliding_window=8),
    "qwen2": _causal("Qwen2"),
    "gemma": _causal("Gemma", **DECODER, head_dim=16),
    "phi": _causal("Phi"),
    "mixtral": _causal("Mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2),
    "t5": _of("T5ForConditionalGeneration", text, **T5),
    "bart": _of("BartForConditionalGeneration", text, **TRANSLATOR),
    "whisper": _of(
        "WhisperForConditionalGeneration",
        spoken,
        **{**TOKENS, **PAIR, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
    ),
    "wav2vec2": _of("Wav2Vec2ForSequenceClassification", waves, **SPEECH, mask_time_prob=0.0, layerdrop=0.0),
    "vit": _of("ViTForImageClassification", images, **PATCHES),
    "vit_mae": _of(
        "ViTMAEForPreTraining",
        only_images,
        **{**PATCHES, "encoder_hidden_size": WIDTH, "decoder_hidden_size": WIDTH, "decoder_num_attention_heads": 2},
        **{"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 64},
    ),
    "swin": _of("SwinForImageClassification", images, **SWIN),
    "convnext": _of("ConvNextForImageClassification", images, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    "resnet": _of("ResNetForImageClassification", images, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]),
    "segformer": _of(
        "SegformerForSemanticSegmentation",
        segmented,
        **{"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2},
        decoder_hidden_size=16,
    ),
    "clip": (
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config={**TOKENS, **SIZES}, vision_config=PATCHES, projection_dim=16)),
        captioned_images,
    ),
    "mamba": _causal("Mamba", **TOKENS, hidden_size=WIDTH, state_size=4, num_hidden_layers=2),
    "rwkv": _causal("Rwkv", **TOKENS, hidden_size=WIDTH, num_hidden_layers=2, context_length=64),
    "detr": (_detr, partial(only_images, pixels=64)),
}

MORE: dict[str, Model] = {
    "albert": _of("AlbertForMaskedLM", masked_text, **ENCODER, embedding_size=16),
    "electra": _of("ElectraForSequenceClassification", classified_text, **ENCODER, embedding_size=16),
    "distilbert": _of(
        "DistilBertForMaskedLM",
        masked_text,
        **{**TOKENS, "dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64},
    ),
    "deberta1": _of("DebertaForMaskedLM", masked_text, **ENCODER, relative_attention=True, pos_att_type="c2p|p2c"),
    "mpnet": _of("MPNetForMaskedLM", masked_text, **PADDED_BY_ONE),
    "xlm_roberta": _of("XLMRobertaForMaskedLM", masked_text, **PADDED_BY_ONE),
    "modernbert": _of("ModernBertForMaskedLM", masked_text, **ENCODER, cls_token_id=1, sep_token_id=2),
    "gpt_neox": _causal("GPTNeoX", **ENCODER),
    "gpt_neo": _causal(
        "GPTNeo",
        **{**TOKENS, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64},
        **{"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "gptj": _causal("GPTJ", **GPT, n_head=2, rotary_dim=8),
    "opt": _of(
        "OPTForCausalLM",
        masked_text,
        **{**TOKENS, "hidden_size": WIDTH, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"word_embed_proj_dim": WIDTH, "max_position_embeddings": 64},
    ),
    "bloom": _of("BloomForCausalLM", masked_text, **TOKENS, hidden_size=WIDTH, n_layer=2, n_head=2),
    "falcon": _causal("Falcon", **TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2),
    "mpt": _causal("Mpt", **TOKENS, d_model=WIDTH, n_layers=2, n_heads=2, max_seq_len=64),
    "codegen": _causal("CodeGen", **GPT, n_head=4, rotary_dim=4),
    "qwen3": _causal("Qwen3", **DECODER, head_dim=16),
    "qwen2_moe": _causal(
        "Qwen2Moe",
        **{**DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "gemma2": _causal("Gemma2", **DECODER, head_dim=16, sliding_window=8),
    "gemma3": _causal("Gemma3", **DECODER, head_dim=16, sliding_window=8),
    "phi3": _causal("Phi3"),
    "starcoder2": _causal("Starcoder2"),
    "olmo2": _causal("Olmo2"),
    "cohere": _causal("Cohere"),
    "stablelm": _causal("StableLm"),
    "granite": _causal("Granite"),
    "mamba2": _causal(
        "Mamba2",
        **{**TOKENS, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4},
        **{"head_dim": 16, "n_groups": 1, "chunk_size": 8},
    ),
    "xlnet": _of("XLNetLMHeadModel", text, **TOKENS, d_model=WIDTH, n_layer=2, n_head=2, d_inner=64),
    "fnet": _of("FNetForMaskedLM", text, **ENCODER),
    "funnel": _of(
        "FunnelForMaskedLM",
        masked_text,
        **{"vocab_size": VOCAB_SIZE, "block_sizes": [1, 1], "d_model": WIDTH, "n_head": 2, "d_head": 16, "d_inner": 64},
    ),
    "convbert": _of("ConvBertForMaskedLM", masked_text, **ENCODER, embedding_size=WIDTH, conv_kernel_size=3),
    "longformer": _of("LongformerForMaskedLM", masked_text, **PADDED_BY_ONE, attention_window=8),
    "bigbird": _of("BigBirdForMaskedLM", text, **ENCODER, attention_type="original_full"),
    "led": _of(
        "LEDForConditionalGeneration",
        text,
        **{**TOKENS, **PAIR, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        attention_window=8,
    ),
    "marian": _of("MarianMTModel", text, **TRANSLATOR),
    "pegasus": _of("PegasusForConditionalGeneration", text, **TRANSLATOR),
    "mbart": _of("MBartForConditionalGeneration", text, **TRANSLATOR),
    "m2m100": _of("M2M100ForConditionalGeneration", text, **TRANSLATOR),
    "mt5": _of("MT5ForConditionalGeneration", text, **T5),
    "hubert": _of("HubertForSequenceClassification", waves, **SPEECH, mask_time_prob=0.0, layerdrop=0.0),
    "wav2vec2_masks": _of("Wav2Vec2ForSequenceClassification", waves, **SPEECH, mask_time_length=4),
    "deit": _of("DeiTForImageClassification", images, **PATCHES),
    "beit": _of("BeitForImageClassification", images, **PATCHES),
    "dinov2": _of("Dinov2ForImageClassification", images, **PATCHES),
    "swinv2": _of("Swinv2ForImageClassification", images, **SWIN),
    "mobilevit": _of(
        "MobileViTForImageClassification",
        images,
        **{"image_size": 32, "hidden_sizes": [8] * 3, "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2},
    ),
    "poolformer": _of("PoolFormerForImageClassification", images, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4),
    "regnet_hf": _of(
        "RegNetForImageClassification",
        images,
        **{"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "groups_width": 4},
    ),
    "dpt": _of(
        "DPTForSemanticSegmentation",
        segmented,
        **{**PATCHES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4},
        **{"fusion_hidden_size": 8, "is_hybrid": False, "auxiliary_loss_weight": 0.0},
    ),
    "siglip": (
        lambda: hf.SiglipModel(
            hf.SiglipConfig(text_config={**ENCODER, "max_position_embeddings": 16}, vision_config=PATCHES)
        ),
        captioned_images,
    ),
    "vilt": _of(
        "ViltForImagesAndTextClassification",
        seen_text,
        **{**ENCODER, **PATCHES, "num_images": 1, "modality_type_vocab_size": 3},
    ),
}

TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "efficientnet_b0": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {
        **{"img_size": 56, "window_size": 7, "embed_dim": 24},
        **{"depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 4)},
    },
    "regnety_002": {},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "maxvit_pico_rw_256": {"img_size": 64},
    "mobilenetv3_small_050": {},
    "deit_tiny_patch16_224": {"img_size": 64},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "mobilevit_xxs": {},
    "poolformer_s12": {},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "pvt_v2_b0": {},
    "efficientvit_b0": {},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "ghostnet_050": {},
    "repvgg_a0": {},
    "edgenext_xx_small": {},
}


class ClassifiesImages(nn.Module):
    """A model of ``timm``, called as those of ``transformers`` are."""

    def __init__(self, name: str) -> None:
        import timm  # in no extra: it needs a torchvision built for the torch that is installed

        super().__init__()
        self.net = timm.create_model(name, pretrained=False, num_classes=10, **TIMM[name])

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> ImageClassifierOutput:
        outputs = self.net(pixel_values)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return ImageClassifierOutput(loss=nn.functional.cross_entropy(logits, labels))


def timm_model(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    return partial(ClassifiesImages, name), partial(images, pixels=TIMM[name].get("img_size", 64))
