"""Record what the models keep under CUDA's own dispatcher: fake "cuda" tensors need a torch built for it, and no GPU.

    PYTHONPATH=.:tests python -m support.cuda_parity FILE

There attention would find no card, so the kernels of one are called by name: flash for halves, else efficient.
"""

import itertools
import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from support.cuda_parity_models import MODELS, batch_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as no_mode
from torch.nn import functional as F

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import efficient_attention, flash_attention

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return flash_attention(*(t.to(dtype) for t in (q, k, v)), dropout_p, is_causal)[0]
    return efficient_attention(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal)[0]


@contextmanager
def autocast(dtype):
    """``torch.autocast("cuda")`` lets itself not be entered without a GPU."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def put(model, device):
    """Let the model have fake tensors there; shared ones stay shared."""
    fakes = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                fake = torch.nn.Parameter(fake) if isinstance(tensor, torch.nn.Parameter) else fake
                tensors[name] = fakes.setdefault(id(tensor), fake)
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def measure(name, precision, device, autocast=autocast):
    """Return the bytes kept at the end of a forward and the most alive in it, without parameters."""
    make, kind = MODELS[name]
    with no_mode():
        model = make()
    if kind == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    put(model, device)
    x, y = batch_of(kind, device)
    dtype = PRECISIONS[precision]
    with track_memory() as tracker, autocast(dtype) if dtype else nullcontext():
        loss = model(x, y)
    assert loss.requires_grad
    timeline = tracker.timeline.on(str(x.device))
    return [timeline.saved_for_backward_bytes, timeline.peak_bytes]


def main(path):
    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = fused_attention
    record = {}
    for case in itertools.product(MODELS, PRECISIONS):
        with FakeTensorMode(allow_non_fake_inputs=True):
            record["-".join(case)] = measure(*case, torch.device("cuda", 0))
    lines = [f"{json.dumps(name)}: {numbers}" for name, numbers in record.items()]
    Path(path).write_text("{\n " + ",\n ".join([f'"torch": "{torch.__version__}"', *lines]) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
