"""Ways to read a sharded tensor."""

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

NEW = 7.0


def save(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS: dict[str, Callable[[DTensor], Tensor]] = {
    "operator": lambda p: p * 1,
    "second argument": lambda p: torch.mul(torch.ones_like(p), p),
    "list of tensors": lambda p: torch.stack([p, p])[0],
    "foreach": lambda p: torch._foreach_mul([p, p], 1.0)[1],
    "keyword": lambda p: torch.add(input=p, other=0.0),
    "to_local": lambda p: p.to_local(),
    "full_tensor": lambda p: p.full_tensor(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "local tensor": lambda p: p._local_tensor,
    "flatten": lambda p: getattr(p, p.__tensor_flatten__()[0][0]),
    "data": lambda p: p.data.to_local(),
    "detach": lambda p: p.detach().to_local(),
    "clone": lambda p: p.clone(),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": save,
    "copy_ from it": lambda p: torch.zeros_like(p).copy_(p),
    "norm": lambda p: p.norm() / p.numel() ** 0.5,
    "item": lambda p: torch.tensor(p.mean().item()),
    "tolist": lambda p: torch.tensor(p.full_tensor().tolist()),
}


def values_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
