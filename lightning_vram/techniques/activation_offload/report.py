"""What an offloading did in a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadReport:
    """What an ``ActivationOffloading`` did since it was entered last.

    Args:
        offloaded_bytes: Bytes of the device that were sent away. Each storage counts once.
        kept_bytes: Bytes that were large enough and stayed: needed again at once, or more than may travel.
        num_offloaded: Storages that were sent away.
        host_bytes: Host memory taken so far, whether in use or not.
        disk_bytes: Size of the file.
    """

    offloaded_bytes: int
    kept_bytes: int
    num_offloaded: int
    host_bytes: int
    disk_bytes: int
