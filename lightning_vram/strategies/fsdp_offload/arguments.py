"""Arguments of ``FSDPOffloadStrategy``, and what it refuses before training, the same on every rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from lightning_vram.argument_checks import check_bool, check_positive_int
from lightning_vram.memory.units import parse_bytes
from lightning_vram.optimizers.stepping.state_forms import HostState

Master = Literal["fp32", "split"]
Offload = Literal["params", "optimizer", "none"]
OffloadPart = Literal["parameters", "gradients", "optimizer"]
DeviceBytes = int | float | str | None
Shard = Literal["full", "grad_op", "hybrid"]
StateDictType = Literal["full", "sharded"]
Wrap = str | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
NAME = "FSDPOffloadStrategy"
_CHOICES: dict[str, Any] = {
    "offload": Offload,
    "master": Master,
    "host_state": HostState,
    "shard": Shard,
    "state_dict_type": StateDictType,
}
_PARTS: dict[frozenset[str], Offload] = {
    frozenset(("parameters", "gradients", "optimizer")): "params",
    frozenset(("gradients", "optimizer")): "optimizer",
    frozenset(): "none",
}


@dataclass(frozen=True)
class OffloadArguments:
    """Checked arguments of the strategy."""

    offload: Offload
    device_bytes: DeviceBytes
    master: Master
    host_state: HostState
    shard: Shard
    wrap: Wrap
    min_params: int
    data_parallel_replicate_size: int | None
    reshard_after_forward: bool
    pin_memory: bool | None
    nvme_path: Path | None
    cpu_threads: int | None
    bind_to_numa_node: bool | None
    narrow_transfers: bool
    state_dict_type: StateDictType
    async_save: bool
    verify: bool
    init_on_meta: bool
    timeout: timedelta


def check_arguments(**given: Any) -> OffloadArguments:
    """Check each argument, and combinations."""
    given["offload"] = _read_offload(given["offload"])
    for key, kind in _CHOICES.items():
        if given[key] not in get_args(kind):
            raise ValueError(
                f"{NAME}({key}) must be one of {', '.join(map(repr, get_args(kind)))}, got {given[key]!r}."
            )
    _check_wrap(given["wrap"])
    check_positive_int(f"{NAME}(min_params)", given["min_params"])
    for key in ("cpu_threads", "data_parallel_replicate_size"):
        if given[key] is not None:
            check_positive_int(f"{NAME}({key})", given[key])
    for key in ("narrow_transfers", "async_save", "verify", "init_on_meta"):
        check_bool(f"{NAME}({key})", given[key])
    for key in ("bind_to_numa_node", "pin_memory", "reshard_after_forward"):
        if given[key] is not None:
            check_bool(f"{NAME}({key})", given[key])
    _check_together(given)
    return OffloadArguments(
        **given
        | {
            "reshard_after_forward": _choose_reshard(given["shard"], given["reshard_after_forward"]),
            "device_bytes": _read_device_bytes(given["device_bytes"], given["offload"]),
            "nvme_path": _check_path(given["nvme_path"], given["offload"]),
            "timeout": _read_timeout(given["timeout"]),
        }
    )


def _read_offload(offload: Any) -> Any:
    """Convert a list of offloaded tensors to a mode."""
    if not isinstance(offload, set | frozenset | list | tuple):
        return offload
    mode = _PARTS.get(frozenset(offload)) if all(isinstance(part, str) for part in offload) else None
    if mode is None:
        known = ", ".join(f"[{', '.join(map(repr, parts))}]" for parts in (sorted(one) for one in _PARTS))
        raise ValueError(
            f"{NAME}(offload) as a list must be one of {known}, in any order, got {offload!r}: offloading "
            "parameters offloads gradients, and offloading gradients offloads the optimizer."
        )
    return mode


def _read_device_bytes(device_bytes: Any, offload: str) -> Any:
    if device_bytes is None:
        return None
    if offload != "params":
        raise ValueError(
            f"{NAME}(device_bytes={device_bytes!r}) chooses what stays on the device: it needs the default "
            f"offload='params', got offload={offload!r}."
        )
    if isinstance(device_bytes, float):
        if not 0 <= device_bytes <= 1:
            raise ValueError(
                f"{NAME}(device_bytes) as a float is a share of the model state, from 0.0 to 1.0, got {device_bytes}."
            )
        return device_bytes
    return "auto" if device_bytes == "auto" else parse_bytes(device_bytes, f"{NAME}(device_bytes)")


def _check_wrap(wrap: Any) -> None:
    is_list = isinstance(wrap, list | tuple) and all(isinstance(one, str | type) for one in wrap) and len(wrap) > 0
    if wrap != "auto" and not is_list and not (callable(wrap) and not isinstance(wrap, type)):
        raise TypeError(
            f"{NAME}(wrap) must be 'auto', a list of classes or class names, or a function of a module's name and the "
            f"module, got {wrap!r}."
        )


def _check_together(given: dict[str, Any]) -> None:
    if given["data_parallel_replicate_size"] is not None and given["shard"] != "hybrid":
        raise ValueError(
            f"{NAME}(data_parallel_replicate_size={given['data_parallel_replicate_size']}) needs shard='hybrid', got "
            f"shard={given['shard']!r}."
        )
    if given["pin_memory"] and given["offload"] == "none":
        raise ValueError(f"{NAME}(pin_memory=True) pins offloaded tensors, but offload='none' offloads none.")
    if given["bind_to_numa_node"] and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(bind_to_numa_node=True) binds the threads of optimizer steps on the host, but offload='none' has "
            "none."
        )
    if given["master"] == "split" and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(master='split') is a format of weights on the host, but offload='none' keeps them on the device."
        )
    if given["host_state"] != "fp32" and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(host_state={given['host_state']!r}) is a format of moments on the host, but offload='none' keeps "
            "them on the device. Use MomentsInBF16 or LowBitOptimizer there."
        )
    if given["master"] == "split" and not given["narrow_transfers"]:
        raise ValueError(
            f"{NAME}(master='split') needs 16-bit transfers, got narrow_transfers=False. Leave one of them out."
        )


def _choose_reshard(shard: str, reshard_after_forward: Any) -> bool:
    if shard == "grad_op" and reshard_after_forward:
        raise ValueError(
            f"{NAME}(shard='grad_op') keeps layers whole after the forward, but reshard_after_forward=True shards "
            "them. Leave one of them out."
        )
    return shard != "grad_op" if reshard_after_forward is None else bool(reshard_after_forward)


def _check_path(path: Any, offload: str) -> Path | None:
    if path is None:
        return None
    if offload == "none":
        raise ValueError(f"{NAME}(nvme_path) stores optimizer state of steps on the host, but offload='none' has none.")
    if not isinstance(path, str | Path):
        raise TypeError(f"{NAME}(nvme_path) must be a path or None, got {path!r} of type {type(path).__name__}.")
    return Path(path)


def _read_timeout(timeout: Any) -> timedelta:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    period = timedelta(seconds=timeout) if is_number else timeout
    if not isinstance(period, timedelta) or period <= timedelta():
        raise ValueError(f"{NAME}(timeout) must be a positive number of seconds or a timedelta, got {timeout!r}.")
    return period
