"""More models of ``transformers`` and some of ``timm``, with random weights, for estimates of any architecture."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from support.hf_models import (
    DECODER,
    LENGTH,
    PAIR,
    SIZES,
    SPEECH,
    TOKENS,
    VOCAB_SIZE,
    WIDTH,
    Batch,
    captioned_images,
    classified_text,
    images,
    masked_text,
    segmented,
    text,
    waves,
)
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

_ENCODER = {**TOKENS, **SIZES, "max_position_embeddings": 64}
_TRANSLATOR = {**TOKENS, **PAIR, "max_position_embeddings": 64}


def _of(model: str, config: str, make_batch: Callable[[int], Batch], **sizes: Any) -> Any:
    return (lambda: getattr(hf, model)(getattr(hf, config)(**sizes))), make_batch


def _seen_text(size: int) -> Batch:
    tokens = torch.randint(VOCAB_SIZE, (size, LENGTH))
    return {"pixel_values": torch.randn(size, 1, 3, 32, 32), "input_ids": tokens, "labels": torch.randint(2, (size,))}


MORE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "albert": _of("AlbertForMaskedLM", "AlbertConfig", masked_text, **_ENCODER, embedding_size=16),
    "electra": _of("ElectraForSequenceClassification", "ElectraConfig", classified_text, **_ENCODER, embedding_size=16),
    "distilbert": _of(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        masked_text,
        **TOKENS,
        dim=WIDTH,
        hidden_dim=64,
        n_layers=2,
        n_heads=2,
        max_position_embeddings=64,
    ),
    "deberta1": _of(
        "DebertaForMaskedLM", "DebertaConfig", masked_text, **_ENCODER, relative_attention=True, pos_att_type="c2p|p2c"
    ),
    "mpnet": _of("MPNetForMaskedLM", "MPNetConfig", masked_text, **{**_ENCODER, "pad_token_id": 1}),
    "xlm_roberta": _of("XLMRobertaForMaskedLM", "XLMRobertaConfig", masked_text, **{**_ENCODER, "pad_token_id": 1}),
    "modernbert": _of(
        "ModernBertForMaskedLM", "ModernBertConfig", masked_text, **_ENCODER, cls_token_id=1, sep_token_id=2
    ),
    "gpt_neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", text, **_ENCODER),
    "gpt_neo": _of(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        text,
        **TOKENS,
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=8,
    ),
    "gptj": _of(
        "GPTJForCausalLM",
        "GPTJConfig",
        text,
        **TOKENS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=64,
        rotary_dim=8,
    ),
    "opt": _of(
        "OPTForCausalLM",
        "OPTConfig",
        masked_text,
        **TOKENS,
        hidden_size=WIDTH,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=64,
    ),
    "bloom": _of("BloomForCausalLM", "BloomConfig", masked_text, **TOKENS, hidden_size=WIDTH, n_layer=2, n_head=2),
    "falcon": _of(
        "FalconForCausalLM",
        "FalconConfig",
        text,
        **TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
    "mpt": _of("MptForCausalLM", "MptConfig", text, **TOKENS, d_model=WIDTH, n_layers=2, n_heads=2, max_seq_len=64),
    "codegen": _of(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        text,
        **TOKENS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
    ),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", text, **DECODER, head_dim=16),
    "qwen2_moe": _of(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        text,
        **DECODER,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "gemma2": _of("Gemma2ForCausalLM", "Gemma2Config", text, **DECODER, head_dim=16, sliding_window=8),
    "gemma3": _of("Gemma3ForCausalLM", "Gemma3TextConfig", text, **DECODER, head_dim=16, sliding_window=8),
    "phi3": _of("Phi3ForCausalLM", "Phi3Config", text, **DECODER),
    "starcoder2": _of("Starcoder2ForCausalLM", "Starcoder2Config", text, **DECODER),
    "olmo2": _of("Olmo2ForCausalLM", "Olmo2Config", text, **DECODER),
    "cohere": _of("CohereForCausalLM", "CohereConfig", text, **DECODER),
    "stablelm": _of("StableLmForCausalLM", "StableLmConfig", text, **DECODER),
    "granite": _of("GraniteForCausalLM", "GraniteConfig", text, **DECODER),
    "mamba2": _of(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        text,
        **TOKENS,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        chunk_size=8,
    ),
    "xlnet": _of("XLNetLMHeadModel", "XLNetConfig", text, **TOKENS, d_model=WIDTH, n_layer=2, n_head=2, d_inner=64),
    "fnet": _of("FNetForMaskedLM", "FNetConfig", text, **_ENCODER),
    "funnel": _of(
        "FunnelForMaskedLM",
        "FunnelConfig",
        masked_text,
        vocab_size=96,
        block_sizes=[1, 1],
        d_model=WIDTH,
        n_head=2,
        d_head=16,
        d_inner=64,
    ),
    "convbert": _of(
        "ConvBertForMaskedLM", "ConvBertConfig", masked_text, **_ENCODER, embedding_size=WIDTH, conv_kernel_size=3
    ),
    "longformer": _of(
        "LongformerForMaskedLM", "LongformerConfig", masked_text, **{**_ENCODER, "pad_token_id": 1}, attention_window=8
    ),
    "bigbird": _of("BigBirdForMaskedLM", "BigBirdConfig", text, **_ENCODER, attention_type="original_full"),
    "led": _of(
        "LEDForConditionalGeneration",
        "LEDConfig",
        text,
        **TOKENS,
        **PAIR,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=8,
    ),
    "marian": _of("MarianMTModel", "MarianConfig", text, **_TRANSLATOR),
    "pegasus": _of("PegasusForConditionalGeneration", "PegasusConfig", text, **_TRANSLATOR),
    "mbart": _of("MBartForConditionalGeneration", "MBartConfig", text, **_TRANSLATOR),
    "m2m100": _of("M2M100ForConditionalGeneration", "M2M100Config", text, **_TRANSLATOR),
    "mt5": _of(
        "MT5ForConditionalGeneration",
        "MT5Config",
        text,
        **TOKENS,
        d_model=WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "hubert": _of(
        "HubertForSequenceClassification",
        "HubertConfig",
        waves,
        **SPEECH,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    "wav2vec2_masks": _of(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        waves,
        **SPEECH,
        mask_time_length=4,
    ),
    "deit": _of("DeiTForImageClassification", "DeiTConfig", images, **SIZES, image_size=32, patch_size=8),
    "beit": _of("BeitForImageClassification", "BeitConfig", images, **SIZES, image_size=32, patch_size=8),
    "dinov2": _of("Dinov2ForImageClassification", "Dinov2Config", images, **SIZES, image_size=32, patch_size=8),
    "swinv2": _of(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        images,
        image_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
    ),
    "mobilevit": _of(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        images,
        image_size=32,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 8],
        num_attention_heads=2,
    ),
    "poolformer": _of(
        "PoolFormerForImageClassification", "PoolFormerConfig", images, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]
    ),
    "regnet_hf": _of(
        "RegNetForImageClassification",
        "RegNetConfig",
        images,
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        groups_width=4,
    ),
    "dpt": _of(
        "DPTForSemanticSegmentation",
        "DPTConfig",
        segmented,
        **{**SIZES, "num_hidden_layers": 4},
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        auxiliary_loss_weight=0.0,
    ),
    "siglip": (
        lambda: hf.SiglipModel(
            hf.SiglipConfig(
                text_config={**TOKENS, **SIZES, "max_position_embeddings": 16},
                vision_config={**SIZES, "image_size": 32, "patch_size": 8},
            )
        ),
        captioned_images,
    ),
    "vilt": _of(
        "ViltForImagesAndTextClassification",
        "ViltConfig",
        _seen_text,
        **_ENCODER,
        image_size=32,
        patch_size=8,
        num_images=1,
        modality_type_vocab_size=3,
    ),
}

TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "efficientnet_b0": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56,
        "window_size": 7,
        "embed_dim": 24,
        "depths": (1, 1, 2, 1),
        "num_heads": (2, 2, 4, 4),
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
    """Return what makes a model of ``timm`` and a batch of it."""
    return partial(ClassifiesImages, name), partial(images, pixels=TIMM[name].get("img_size", 64))
