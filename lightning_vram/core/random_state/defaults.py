"""The states of all generators that a training draws from by default, as plain values that a checkpoint may hold."""

from typing import Any

import torch

from lightning_vram.core.random_state.generators import State, read_global_states, write_global_states


def read_random_states(device: torch.device) -> State:
    """Read the global generators of Python, NumPy and PyTorch.

    Args:
        device: Its generator as well, if it is an accelerator that is in use.

    Returns:
        For :func:`restore_random_states`.
    """
    states = read_global_states()
    module, arguments = device_generator(device)
    if module is not None:
        states[device.type] = module.get_rng_state(*arguments)
    return states


def restore_random_states(states: State, device: torch.device) -> None:
    """Put generators into the states that were read; those of other kinds of devices are left alone.

    Args:
        states: From :func:`read_random_states`.
        device: As there.
    """
    write_global_states(states)
    module, arguments = device_generator(device)
    if module is not None and device.type in states:
        module.set_rng_state(states[device.type].cpu(), *arguments)


def device_generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return who has the generator of an accelerator that is in use, and with which arguments; else ``None``."""
    if device.type in ("cpu", "meta"):
        return None, ()
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return None, ()
    return module, () if device.type == "mps" else (device,)  # has one device and takes no name for it
