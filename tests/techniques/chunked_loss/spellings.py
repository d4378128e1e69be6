"""Losses on logits [2, 9, V], as people write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.nn import functional as F

VOCAB_SIZE, WIDTH, SHAPE = 60, 8, (4, 9)
Loss = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A body and a head: tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, *, is_tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=bias)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def _fixed(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


TARGET = torch.randint(VOCAB_SIZE, SHAPE, generator=torch.Generator().manual_seed(1))
MASKED = TARGET.masked_fill(_fixed(*SHAPE) > 0.3, -100)
WEIGHT = _fixed(VOCAB_SIZE).abs() + 0.5
TEACHER = _fixed(*SHAPE, VOCAB_SIZE).softmax(-1)


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.size(-1))


def _picked(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _dpo(logits: Tensor) -> Tensor:
    chosen, rejected = logits.chunk(2)
    margin = _picked(chosen, TARGET[:2]).sum(-1) - _picked(rejected, TARGET[2:]).sum(-1)
    return -F.logsigmoid(0.1 * margin).mean()


def _jensen_shannon(logits: Tensor) -> Tensor:
    one = logits.softmax(-1)
    middle = 0.5 * (one + TEACHER)
    first = (one * (one.log() - middle.log())).sum(-1)
    second = (TEACHER * (TEACHER.log() - middle.log())).sum(-1)
    return 0.5 * (first + second).mean()


IN_CHUNKS: dict[str, Loss] = {
    "view": lambda x: F.cross_entropy(x.view(-1, VOCAB_SIZE), MASKED.view(-1)),
    "module, float": lambda x: nn.CrossEntropyLoss()(_rows(x).float(), MASKED.flatten()),
    "shift, classes first": lambda x: F.cross_entropy(x[:, :-1].transpose(1, 2), MASKED[:, 1:]),
    "mT, of each": lambda x: (F.cross_entropy(x.mT, MASKED, reduction="none") * _fixed(*SHAPE)).sum(),
    "temperature, soft cap": lambda x: F.cross_entropy(_rows(torch.tanh(x / 0.7 / 3) * 3), TARGET.flatten()),
    "masked": lambda x: F.cross_entropy(
        _rows(x.masked_fill(WEIGHT > 1.5, -30.0).masked_fill(TEACHER > 0.05, -9.0)), TARGET.flatten()
    ),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(_rows(x), dim=-1), MASKED.flatten(), WEIGHT.to(x.dtype)),
    "log-probabilities": lambda x: -_picked(x, TARGET).mean(),
    "selective": lambda x: (x.gather(-1, TARGET[..., None]).squeeze(-1) - x.logsumexp(-1)).pow(2).mean(),
    "by index": lambda x: -_rows(x.log_softmax(-1))[torch.arange(TARGET.numel()), TARGET.flatten()].mean(),
    "chosen tokens": lambda x: F.cross_entropy(x[MASKED != -100], MASKED[MASKED != -100]),
    "z-loss": lambda x: F.cross_entropy(_rows(x), TARGET.flatten()) + 0.1 * torch.logsumexp(x, -1).square().mean(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "largest": lambda x: x.max(dim=-1)[0].mean() + x.topk(3).values.mean() + x.amin(-1).sum() + x.mean(),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), TEACHER.to(x.dtype), reduction="batchmean"),
    "reverse": lambda x: F.kl_div(TEACHER.log().to(x.dtype), x.softmax(-1), reduction="sum"),
    "jensen-shannon": _jensen_shannon,
    "dpo": _dpo,
    "last tokens": lambda x: F.cross_entropy(x[torch.arange(SHAPE[0]), TARGET[:, 0] % SHAPE[1]], TARGET[:, 0]),
    "one by one": lambda x: torch.stack([F.cross_entropy(*pair) for pair in zip(x, TARGET, strict=True)]).mean(),
    "distilled": lambda x: F.cross_entropy(_rows(x), _rows((x.detach() / 2).softmax(-1))),
}
WHOLE: dict[str, Loss] = {
    "cumsum": lambda x: x.cumsum(-1).mean(),
    "in place": lambda x: F.cross_entropy(_rows(x.div_(2.0)), TARGET.flatten()),
    "written": lambda x: _written(x),
    "categorical": lambda x: kl_divergence(*(torch.distributions.Categorical(logits=y) for y in (x, x * 2))).mean(),
}


def _written(logits: Tensor) -> Tensor:
    logits[..., 0] = -1e4
    return F.cross_entropy(_rows(logits), TARGET.flatten())
