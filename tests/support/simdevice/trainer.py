"""Lightning: ``Trainer(accelerator="sim", devices=1)`` once this is imported, ``precision="16-mixed"`` as well."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from support.simdevice import register  # noqa: F401


class SimAccelerator(Accelerator):
    """The simulated accelerator in a Trainer."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == "sim"

    def teardown(self) -> None:
        torch.sim.empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return devices if isinstance(devices, list) else list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return torch.sim.memory_stats(device)


AcceleratorRegistry.register("sim", SimAccelerator, description="Simulated accelerator", override=True)

# To a device that is neither CUDA's nor MPS's Lightning gives the CPU's strategy, and autocast of CUDA.

_choose_strategy = _AcceleratorConnector._choose_strategy
_choose_precision = _AcceleratorConnector._check_and_init_precision


def _is_sim(connector: _AcceleratorConnector) -> bool:
    return connector._accelerator_flag == "sim" or isinstance(connector._accelerator_flag, SimAccelerator)


def _strategy_of(self: _AcceleratorConnector) -> Any:
    return SingleDeviceStrategy(device=self._parallel_devices[0]) if _is_sim(self) else _choose_strategy(self)


def _precision_of(self: _AcceleratorConnector) -> Any:
    is_chosen_here = self._precision_plugin_flag is None and self._precision_flag in ("16-mixed", "bf16-mixed")
    if _is_sim(self) and is_chosen_here and isinstance(self.strategy, SingleDeviceStrategy):
        return MixedPrecision(self._precision_flag, "sim")
    return _choose_precision(self)


_AcceleratorConnector._choose_strategy = _strategy_of
_AcceleratorConnector._check_and_init_precision = _precision_of
