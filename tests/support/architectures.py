"""Fourteen networks, each the smallest of its kind: what is promised for any model is tested on all of them.

None has dropout, and each loss is a mean over samples of one size: the mean of the losses of the halves of a batch is
the loss of the batch, on however many ranks. Not so where batch norms look at the whole batch: conv_bn and resnet.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from support.hf_models import from_config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

WIDTH = 16
VOCAB_SIZE = 64
LENGTH = 8
NUM_CLASSES = 5
IMAGE = (3, 32, 32)

Inputs = dict[str, Tensor]


class Block(nn.Module):
    """Pre-norm feed-forward block: [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class TinyLM(nn.Module):
    """Language model over single tokens: input_ids [B, T] -> logits [B, T, VOCAB_SIZE]."""

    def __init__(self, *, is_tied: bool = False, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class TinyTranslator(nn.Module):
    """``nn.Transformer`` with its embeddings and head: input_ids [B, S], labels [B, T] -> logits [B, T, VOCAB_SIZE]."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(VOCAB_SIZE, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(input_ids), self.target(labels)))


class MLP(nn.Sequential):
    """Values [B, WIDTH] -> logits [B, NUM_CLASSES]."""

    def __init__(self) -> None:
        hidden = (layer for _ in range(3) for layer in (nn.Linear(4 * WIDTH, 4 * WIDTH), nn.ReLU()))
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), *hidden, nn.Linear(4 * WIDTH, NUM_CLASSES))


class ConvNet(nn.Module):
    """Convolutions and batch norms: images [B, 3, H, W] -> logits [B, NUM_CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        stages = ((nn.Conv2d(i, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU()) for i in (3, WIDTH, WIDTH))
        self.features = nn.Sequential(*(layer for stage in stages for layer in stage))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


_SIZES = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {**_TOKENS, **_SIZES, "max_position_embeddings": LENGTH}


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "tiny_lm": TinyLM,
    "tied_lm": lambda: TinyLM(is_tied=True),
    "nn_transformer": TinyTranslator,
    "mlp": MLP,
    "conv_bn": ConvNet,
    "llama": from_config("LlamaForCausalLM", **_LLAMA, tie_word_embeddings=False),
    "tied_llama": from_config("LlamaForCausalLM", **_LLAMA, tie_word_embeddings=True),
    "mixtral": from_config(
        "MixtralForCausalLM",
        **{**_TOKENS, **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
        **{"router_aux_loss_coef": 0.0, "output_router_logits": False, "router_jitter_noise": 0.0},
    ),
    "gpt2": from_config(
        "GPT2LMHeadModel",
        **{**_TOKENS, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": LENGTH},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "t5": from_config(
        "T5ForConditionalGeneration",
        **{"vocab_size": VOCAB_SIZE, "d_model": WIDTH, "d_kv": 8, "d_ff": 4 * WIDTH, "num_layers": 2, "num_heads": 2},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "bert": from_config(
        "BertForMaskedLM", **{**_SIZES, **_NO_DROPOUT, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 8}
    ),
    "vit": from_config(
        "ViTForImageClassification",
        **{**_SIZES, **_NO_DROPOUT, "image_size": IMAGE[1], "patch_size": 8, "num_labels": NUM_CLASSES},
    ),
    "resnet": from_config(
        "ResNetForImageClassification",
        **{"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": NUM_CLASSES},
    ),
    "whisper": from_config(
        "WhisperForConditionalGeneration",
        **{**_TOKENS, "d_model": WIDTH, "num_mel_bins": 4, "dropout": 0.0, "decoder_start_token_id": 1},
        **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 8},
        **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "max_target_positions": LENGTH},
    ),
}

_OWN = ("tiny_lm", "tied_lm", "nn_transformer", "mlp", "conv_bn")  # these return logits, the others a loss
_CLASSIFIERS = {"mlp": (WIDTH,), "conv_bn": IMAGE, "vit": IMAGE, "resnet": IMAGE}  # shapes of a sample


def make_model(name: str, seed: int = 0) -> nn.Module:
    """Build an architecture; the same seed gives the same weights and leaves the random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ARCHITECTURES[name]().train()


def make_inputs(name: str, num_samples: int = 4, seed: int = 0) -> Inputs:
    """Random samples: ``labels``, and inputs under the names that the model knows; each [num_samples, ...]."""
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(3, VOCAB_SIZE, (num_samples, LENGTH), generator=generator)

    if name in _CLASSIFIERS:
        values = torch.randn(num_samples, *_CLASSIFIERS[name], generator=generator)
        labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        return {"pixel_values": values, "labels": labels}
    if name == "whisper":
        return {"input_features": torch.randn(num_samples, 4, 16, generator=generator), "labels": tokens()}
    inputs = tokens()
    return {"input_ids": inputs, "labels": tokens() if name in ("t5", "bert", "nn_transformer") else inputs}


def compute_loss(name: str, model: nn.Module, inputs: Inputs) -> Tensor:
    """The mean over the samples; scalar."""
    if name not in _OWN:
        return model(**inputs).loss
    labels = inputs["labels"]
    if name in _CLASSIFIERS:
        return F.cross_entropy(model(inputs["pixel_values"]), labels)
    if name == "nn_transformer":
        logits, labels = model(inputs["input_ids"], labels[:, :-1]), labels[:, 1:]
    else:
        logits, labels = model(inputs["input_ids"][:, :-1]), labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Samples(Dataset[Inputs]):
    def __init__(self, name: str, num_samples: int, seed: int) -> None:
        self._inputs = make_inputs(name, num_samples, seed)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Inputs:
        return {key: value[index] for key, value in self._inputs.items()}


class LitArchitecture(pl.LightningModule):
    """Trains an architecture; weights and samples are the same every time.

    ``batch_size`` is that of one process: with as many ranks as fit in a batch, give each its part. Samples come in
    order; Lightning's own sampler must be off (``use_distributed_sampler=False``) and :meth:`rank_samples` says whose
    turn it is.
    """

    def __init__(self, name: str, *, batch_size: int = 4, num_samples: int = 12, lr: float = 1e-3) -> None:
        super().__init__()
        self.architecture, self.batch_size, self.num_samples, self.lr = name, batch_size, num_samples, lr
        self.model = make_model(name)

    def training_step(self, batch: Inputs, batch_idx: int) -> Tensor:
        loss = compute_loss(self.architecture, self.model, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Inputs, batch_idx: int) -> None:
        self.log("val_loss", compute_loss(self.architecture, self.model, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._load(seed=0)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._load(seed=1)

    def rank_samples(self) -> list[int]:
        """The samples of this rank: of every batch over all ranks its slice, so that more ranks make the same steps."""
        rank, num_ranks = (self.trainer.global_rank, self.trainer.world_size) if self._trainer else (0, 1)
        starts = range(rank * self.batch_size, self.num_samples, num_ranks * self.batch_size)
        return [index for start in starts for index in range(start, min(start + self.batch_size, self.num_samples))]

    def _load(self, seed: int) -> DataLoader[Any]:
        samples = Samples(self.architecture, self.num_samples, seed)
        return DataLoader(samples, batch_size=self.batch_size, sampler=self.rank_samples())
