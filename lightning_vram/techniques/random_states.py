"""The states of all generators that a training draws from by default, as plain values that a checkpoint may hold.

``torch.load(weights_only=True)`` reads them: numbers, strings, lists and tensors.
"""

import random
import sys
from typing import Any

import torch


def read_random_states(device: torch.device) -> dict[str, Any]:
    """Read the global generators of Python, NumPy and PyTorch.

    Args:
        device: Its generator as well, if it is an accelerator that is in use.

    Returns:
        For :func:`restore_random_states`.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")  # torch works without it
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]
    module, arguments = _device_module(device)
    if module is not None:
        states[device.type] = module.get_rng_state(*arguments)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put generators into the states that were read; those of other kinds of devices are left alone.

    Args:
        states: From :func:`read_random_states`.
        device: As there.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    module, arguments = _device_module(device)
    if module is not None and device.type in states:
        module.set_rng_state(states[device.type], *arguments)


def _device_module(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    if device.type in ("cpu", "meta"):
        return None, ()
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return None, ()
    return module, () if device.type == "mps" else (device,)  # has one device and takes no name for it
