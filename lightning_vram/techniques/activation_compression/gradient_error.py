"""Measure what lossy saved tensors do to the gradient: one cosine, for one batch."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_vram.techniques.activation_compression.stage import CompressionStage


def gradient_cosine(stage: CompressionStage, loss: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the cosine between the exact gradient and the one that ``stage`` gives.

    The same graph is run backward twice, with the exact numbers and with the stored ones: it costs two backwards and,
    for that batch, the memory of the exact numbers. The graph stays usable, no ``.grad`` is touched, no random number
    is drawn. Hooks on tensors run, those on the accumulation of gradients (as of DDP) do not. Not for sharded
    parameters (FSDP), whose hooks move them, nor with reentrant checkpointing, and not for DDP with
    ``static_graph=True``, which counts the backwards.

    Args:
        stage: What compressed the graph of ``loss``, entered within
            :meth:`~lightning_vram.techniques.activation_compression.stage.CompressionStage.keeping_exact_too`.
        loss: A scalar, scaled as for the backward: gradients in float16 vanish otherwise.
        parameters: The gradient is that with respect to all of them together; those without one are left out.

    Returns:
        A number from -1 to 1. 0.0 if one gradient is zero, NaN if both are, or one is not finite. The parts of complex
        numbers count as numbers.

    Raises:
        RuntimeError: If the run did not keep the exact numbers.
        ValueError: If no parameter requires a gradient.
    """
    if not stage.has_exact:
        raise RuntimeError(
            "gradient_cosine(stage) has no exact gradient to compare with: enter the stage inside "
            "stage.keeping_exact_too()."
        )
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        raise ValueError("gradient_cosine(parameters) must hold one that requires a gradient, got none.")
    stored = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    with stage.giving_exact():
        exact = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        sums = torch.zeros(3, dtype=_widest(loss.device), device=loss.device)
        for one, other in zip(exact, stored, strict=True):
            if one is not None:  # an unused parameter has neither
                sums += _products(one, other).to(sums.device)
        product, exact_square, stored_square = sums.tolist()  # one wait for the device
    if exact_square == 0.0 or stored_square == 0.0:
        return math.nan if exact_square == stored_square else 0.0
    cosine = product / (exact_square**0.5 * stored_square**0.5)
    return cosine if cosine != cosine else max(-1.0, min(1.0, float(cosine)))


def _products(one: Tensor, other: Tensor) -> Tensor:
    a, b = _numbers_of(one), _numbers_of(other)
    return torch.stack([a @ b, a @ a, b @ b])


def _numbers_of(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense().resolve_conj()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1).to(_widest(gradient.device))


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64
