"""Programs whose steps read values of tensors: each a small LightningModule, and what makes a batch for it.

All have the same blocks over ``[B, T, D]``, so that activations are most of what a step needs. What a program reads
follows from its batch, or changes little from step to step.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Optimizer

WIDTH, LENGTH, SIZE, NUM_CLASSES, NUM_BLOCKS = 64, 32, 32, 8, 6
END = 0
Batch = dict[str, Tensor]


def make_batch(size: int = SIZE) -> Batch:
    """Make a batch, the same each time: about two thirds of its tokens are valid, a third of its samples is loud."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (size,), generator=generator)
    lengths[0] = LENGTH
    loudness = torch.where(torch.arange(size) % 3 == 0, 3.0, 0.5)
    return {
        "x": torch.randn(size, LENGTH, WIDTH, generator=generator) * loudness[:, None, None],
        "target": torch.randn(size, LENGTH, generator=generator),
        "label": torch.randint(1, NUM_CLASSES, (size, LENGTH), generator=generator),
        "lengths": lengths,
        "valid": torch.arange(LENGTH) < lengths[:, None],
    }


def make_graphs(size: int = SIZE) -> Batch:
    """Make as many graphs as one batch, whose nodes and edges have no dimension for samples."""
    batch = make_batch(size)
    graph, _ = batch["valid"].nonzero(as_tuple=True)
    edges = torch.randint(len(graph), (2, 4 * len(graph)), generator=torch.Generator().manual_seed(0))
    return {"x": batch["x"][batch["valid"]], "edges": edges, "graph": graph, "target": batch["target"][:, 0]}


class Block(nn.Module):
    """Saves 2 MiB for the backward of a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Program(pl.LightningModule):
    """Blocks and a head. The programs write ``loss_of``, or the whole step."""

    num_outputs = NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, self.num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return self.loss_of(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


# --- distributions, which check their arguments ---


class NormalLikelihood(Program):
    num_outputs = 2

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        mean, spread = self(x).unbind(-1)
        return -distributions.Normal(mean, F.softplus(spread), validate_args=True).log_prob(target).mean()


class LogNormalLikelihood(Program):
    num_outputs = 2

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        mean, spread = self(x).unbind(-1)
        return -distributions.LogNormal(mean, spread.exp(), validate_args=True).log_prob(target.exp()).mean()


class MixtureLikelihood(Program):
    num_outputs = 3 * 4

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        logits, means, spreads = self(x).chunk(3, dim=-1)
        parts = distributions.Normal(means, spreads.exp(), validate_args=True)
        weights = distributions.Categorical(logits=logits, validate_args=True)
        mixture = distributions.MixtureSameFamily(weights, parts, validate_args=True)
        return -mixture.log_prob(target).mean()


class PolicyGradient(Program):
    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        policy = distributions.Categorical(logits=self(x), validate_args=True)
        action = policy.sample()
        reward = (action == label).float()
        return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()


# --- shapes that depend on values ---


class MaskedSelect(Program):
    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        outputs = self(x).squeeze(-1)
        return F.smooth_l1_loss(outputs.masked_select(valid), target.masked_select(valid))


class Nonzero(Program):
    def loss_of(self, x: Tensor, label: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        positions = valid.flatten().nonzero().squeeze(-1)
        outputs = self(x.flatten(0, 1).index_select(0, positions))
        return F.cross_entropy(outputs, label.flatten()[positions])


class Unpadded(Program):
    """Runs its blocks on valid tokens only."""

    def loss_of(self, x: Tensor, label: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self(x[valid]), label[valid])


class MaskedTokens(Program):
    """Writes a learned vector where tokens are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))

    def loss_of(self, x: Tensor, label: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        masked = target > 0.5
        x = x.clone()
        x[masked] = self.mask_token
        return F.cross_entropy(self(x)[masked], label[masked])


class UniqueIds(Program):
    """Computes each distinct row once, as embeddings of recommenders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, WIDTH)

    def loss_of(self, target: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        ids = (target.sigmoid() * 2048).long()
        distinct, places, counts = ids.unique(return_inverse=True, return_counts=True)
        outputs = self(self.embedding(distinct) / counts.sqrt().unsqueeze(-1))
        return F.cross_entropy(outputs[places].flatten(0, 1), label.flatten())


class ClassWeights(Program):
    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        counts = torch.bincount(label.flatten(), minlength=NUM_CLASSES)
        weights = label.numel() / (NUM_CLASSES * counts.clamp(min=1))
        return F.cross_entropy(self(x).flatten(0, 1), label.flatten(), weight=weights)


class LengthRegulator(Program):
    """Repeats each token for its duration, as speech synthesis does."""

    def loss_of(self, x: Tensor, lengths: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        spread = self(x.mean(1).repeat_interleave(lengths, dim=0))
        wanted = label[:, 0].repeat_interleave(lengths)
        return F.cross_entropy(spread, wanted)


class SplitByLengths(Program):
    def loss_of(self, x: Tensor, lengths: Tensor, valid: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        documents = self(x[valid]).split(lengths.tolist())
        pooled = torch.stack([document.amax(0).sum() for document in documents])
        return F.mse_loss(pooled, target[:, 0])


class MaskedError(Program):
    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        outputs = self(x).squeeze(-1)
        if not valid.any():
            return outputs.sum() * 0.0
        return ((outputs - target)[valid] ** 2).mean()


class MixtureOfExperts(nn.Module):
    """Sends each token to the expert that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = torch.where(chosen == number)
            outputs[places] = expert(x[places]) * gates[places].unsqueeze(-1)
        return x + outputs


class Experts(Program):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MixtureOfExperts() for _ in range(4)))

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), label.flatten())


class PaddedAttention(nn.Module):
    """Leaves out its mask where nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), Block()

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        queries, keys, values = self.inputs(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = queries @ keys.mT
        if not valid.all():
            scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        return self.outputs(x + (scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class Attention(Program):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PaddedAttention() for _ in range(4))

    def loss_of(self, x: Tensor, label: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, valid)
        return F.cross_entropy(self.head(x[:, 0]), label[:, 0])


class Graphs(Program):
    """Message passing, and a readout of as many graphs as the last node names."""

    num_outputs = 1

    def loss_of(self, x: Tensor, edges: Tensor, graph: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x) + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] / 4)
        num_graphs = int(graph.max().item()) + 1
        sums = x.new_zeros(num_graphs, WIDTH).scatter_add(0, graph.unsqueeze(-1).expand_as(x), x)
        return F.mse_loss(self.head(sums).squeeze(-1), target)


class PackedSequences(Program):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def loss_of(self, x: Tensor, lengths: Tensor, label: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.blocks(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        return F.cross_entropy(self.head(outputs)[valid], label[valid])


class SpeechRecognition(Program):
    def loss_of(self, x: Tensor, label: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
        chances = self(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, label[:, : LENGTH // 4], lengths, lengths // 4, zero_infinity=True)


# --- branches and loops on values ---


class LargeLoss(Program):
    """Tames a loss that is large."""

    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        loss = F.mse_loss(self(x).squeeze(-1), 4 * target)
        if loss > 3:
            loss = 3 + (loss - 2).log()
        return loss


class WeighedLosses(Program):
    """Gives more weight to the loss that is larger, and none to one that is small."""

    def loss_of(self, x: Tensor, label: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        outputs = self(x)
        losses = F.cross_entropy(outputs.flatten(0, 1), label.flatten()), F.mse_loss(outputs[..., 0], target)
        weights = torch.tensor([loss.detach() for loss in losses], device=x.device)
        weights = weights / weights.sum()
        if weights.min() < 0.05:
            return losses[int(weights.argmax())]
        return (weights * torch.stack(losses)).sum()


class FixedPoint(Program):
    """Iterates one cell until its output changes no more, as equilibrium models do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        state, change = torch.zeros_like(x), float("inf")
        while change > 1e-2:
            last, state = state, torch.tanh(0.5 * self.cell(state) + x)
            change = (state - last).norm() / state.norm()
        return F.cross_entropy(self(state).flatten(0, 1), label.flatten())


class AdaptiveDepth(Program):
    """Uses as many blocks as the hardest sample asks for."""

    def loss_of(self, x: Tensor, lengths: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        depth = 1 + int((lengths.float().mean() / LENGTH * NUM_BLOCKS).item())
        for block in self.blocks[:depth]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), label.flatten())


class EarlyExit(Program):
    """Stops at the first block after which its head is confident enough; later ones are sharper."""

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            outputs = (1 + number) * self.head(x)
            if outputs.softmax(-1).amax(-1).mean() > 0.5:
                break
        return F.cross_entropy(outputs.flatten(0, 1), label.flatten())


class TopK(Program):
    """Averages as many of the largest errors as there are invalid tokens."""

    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        errors = (self(x).squeeze(-1) - target).square().flatten()
        return errors.topk(int((~valid).sum())).values.mean()


class Curriculum(Program):
    """Learns from samples that are easy by now."""

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        with torch.no_grad():
            losses = F.cross_entropy(self.head(x).transpose(1, 2), label, reduction="none").mean(1)
        easy = losses < 2.5
        if easy.sum() < 2:
            easy = torch.ones_like(easy)
        return F.cross_entropy(self(x[easy]).transpose(1, 2), label[easy])


class HardExamples(Program):
    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        losses = F.cross_entropy(self(x).flatten(0, 1), label.flatten(), reduction="none")
        return losses[losses > losses.mean()].mean()


class GreedyDecoding(Program):
    """Decodes until all sequences have ended, with noise in the place of a sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(NUM_CLASSES, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        state = self.blocks(x).mean(1)
        token, ended, losses = torch.ones_like(x[:, 0, 0]).long(), torch.zeros_like(x[:, 0, 0]).bool(), []
        falling = torch.linspace(1, -1, NUM_CLASSES, device=x.device)
        while not ended.all() and len(losses) < LENGTH:
            state = self.cell(self.embedding(token), state)
            outputs = self.head(state)
            token = (outputs + target[:, len(losses), None] * falling).argmax(-1)
            losses.append(F.cross_entropy(outputs, token))
            ended |= token == END
        return torch.stack(losses).mean()


class KeptBoxes(Program):
    """Learns from the boxes that non-maximum suppression keeps."""

    num_outputs = 3

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        outputs, kept = self(x), []
        for image in outputs:
            score, start, extent = image.unbind(-1)
            stop, order = start + 1 + extent.exp(), score.argsort(descending=True)
            while order.numel() > 0:
                best, order = order[0], order[1:]
                kept.append(score[best])
                overlaps = torch.minimum(stop[order], stop[best]) - torch.maximum(start[order], start[best])
                order = order[overlaps < 0.5]
        return F.softplus(-torch.stack(kept)).mean() + F.mse_loss(outputs[..., 1], target)


# --- NumPy, SciPy, linear algebra ---


class RankWeights(Program):
    """Weights errors by the ranks that SciPy finds."""

    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        errors = (self(x).squeeze(-1) - target).square()
        ranks = scipy.stats.rankdata(errors.detach().cpu().numpy(), axis=1)
        return (errors * torch.from_numpy(ranks).to(errors)).mean() / LENGTH


class HungarianMatching(Program):
    """Assigns predictions to targets at the least cost, as DETR does."""

    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
        outputs, losses = self(x).squeeze(-1), []
        for one, wanted, length in zip(outputs, target, lengths.tolist(), strict=True):
            costs = torch.cdist(one[:, None], wanted[:length, None])
            rows, columns = scipy.optimize.linear_sum_assignment(costs.detach().cpu().numpy())
            losses.append(F.l1_loss(one[torch.as_tensor(rows)], wanted[torch.as_tensor(columns)]))
        return torch.stack(losses).mean()


class GaussianLikelihood(Program):
    """Has a full covariance: its Cholesky decomposition is checked."""

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        factors = self(x)
        covariance = factors @ factors.mT + torch.eye(LENGTH, device=x.device)
        scale = torch.linalg.cholesky(covariance)
        return -distributions.MultivariateNormal(target.new_zeros(LENGTH), scale_tril=scale).log_prob(target).mean()


class RidgeRegression(Program):
    """Fits its last layer in closed form."""

    def loss_of(self, x: Tensor, target: Tensor, **_: Tensor) -> Tensor:
        features = self(x)
        gram = features.mT @ features + torch.eye(NUM_CLASSES, device=x.device)
        weights = torch.linalg.solve(gram, features.mT @ target.unsqueeze(-1))
        return F.mse_loss((features @ weights).squeeze(-1), target)


class Whitening(Program):
    """Inverts a covariance, with a ridge if its rank is low."""

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        outputs = self(x).flatten(0, 1)
        covariance = outputs.mT @ outputs / len(outputs)
        if torch.linalg.matrix_rank(covariance.detach()) < NUM_CLASSES:
            covariance = covariance + 1e-3 * torch.eye(NUM_CLASSES)
        return F.cross_entropy(outputs @ torch.linalg.inv(covariance), label.flatten())


# --- optimizers ---


class SkippingGAN(Program):
    """Leaves its discriminator as it is while that one is ahead."""

    num_outputs = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        generator, judge = self.optimizers()
        made = self(batch["x"])
        judged = F.softplus(-self.judge(batch["x"])).mean() + F.softplus(self.judge(made.detach())).mean()
        if judged.item() > 1.1:
            judge.zero_grad()
            self.manual_backward(judged)
            judge.step()
        generator.zero_grad()
        self.manual_backward(F.softplus(-self.judge(made)).mean())
        generator.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam([*self.blocks.parameters(), *self.head.parameters()], lr=1e-4),
            torch.optim.Adam(self.judge.parameters(), lr=1e-2),
        ]


class ClippedByHand(Program):
    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), label.flatten())

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if norm.item() > 0.1:
            for gradient in gradients:
                gradient.mul_(0.1 / norm)


PROGRAMS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[..., Batch]]] = {
    "adaptive depth": (AdaptiveDepth, make_batch),
    "attention without padding": (Attention, make_batch),
    "class weights by bincount": (ClassWeights, make_batch),
    "clipped by hand": (ClippedByHand, make_batch),
    "curriculum": (Curriculum, make_batch),
    "early exit": (EarlyExit, make_batch),
    "experts": (Experts, make_batch),
    "fixed point": (FixedPoint, make_batch),
    "gan": (SkippingGAN, make_batch),
    "gaussian with cholesky": (GaussianLikelihood, make_batch),
    "graphs": (Graphs, make_graphs),
    "greedy decoding": (GreedyDecoding, make_batch),
    "hard examples": (HardExamples, make_batch),
    "hungarian matching": (HungarianMatching, make_batch),
    "large loss": (LargeLoss, make_batch),
    "length regulator": (LengthRegulator, make_batch),
    "log normal": (LogNormalLikelihood, make_batch),
    "masked error": (MaskedError, make_batch),
    "masked select": (MaskedSelect, make_batch),
    "masked tokens": (MaskedTokens, make_batch),
    "mixture": (MixtureLikelihood, make_batch),
    "non-maximum suppression": (KeptBoxes, make_batch),
    "nonzero": (Nonzero, make_batch),
    "normal": (NormalLikelihood, make_batch),
    "packed sequences": (PackedSequences, make_batch),
    "policy gradient": (PolicyGradient, make_batch),
    "rank weights by scipy": (RankWeights, make_batch),
    "ridge regression": (RidgeRegression, make_batch),
    "speech recognition": (SpeechRecognition, make_batch),
    "split by lengths": (SplitByLengths, make_batch),
    "top k": (TopK, make_batch),
    "unique ids": (UniqueIds, make_batch),
    "unpadded": (Unpadded, make_batch),
    "weighed losses": (WeighedLosses, make_batch),
    "whitening": (Whitening, make_batch),
}
