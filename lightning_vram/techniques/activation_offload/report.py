"""What an offloading did in a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadReport:
    """What an ``ActivationOffloading`` did since it was entered last."""

    offloaded_bytes: int  # bytes of the device that were sent away. Each storage counts once.
    kept_bytes: int  # bytes that were large enough and stayed: needed again at once, or more than may travel
    num_offloaded: int  # storages that were sent away
    host_bytes: int  # host memory taken so far, whether in use or not
    disk_bytes: int  # size of the file
