"""What others have for the same ends, beside which ours is measured: a file for each library.

Nothing of a library is imported before its way is asked whether it can run. One that cannot is a row with the reason.
A part of ours that comes later adds its peers to the suite that it is measured in.
"""

from tests.benchmarks.peers import (
    accelerate,
    bitsandbytes,
    composer,
    deepspeed,
    inplace_abn,
    liger,
    lightning_alone,
    pytorch,
    torchao,
    torchtune,
)
from tests.benchmarks.peers.installed import read_versions
from tests.benchmarks.ways import Suite, Way

__all__ = ["PEERS", "versions_of_peers"]

_ACTIVATIONS = (*pytorch.ACTIVATIONS, *torchtune.ACTIVATIONS, *inplace_abn.ACTIVATIONS, *liger.LOSSES)

PEERS: dict[Suite, tuple[Way, ...]] = {
    "memory": _ACTIVATIONS,
    "speed": (*_ACTIVATIONS, *pytorch.COMPILED),
    "frozen": (*torchao.WEIGHTS, *bitsandbytes.WEIGHTS),
    "offload": (
        *lightning_alone.OFFLOAD,
        *torchao.OFFLOAD,
        *accelerate.OFFLOAD,
        *deepspeed.OFFLOAD,
    ),
    "optimizers": (*torchao.OPTIMIZERS, *torchao.OFFLOAD, *bitsandbytes.OPTIMIZERS),
    "precision": lightning_alone.PRECISION,
    "batches": (*lightning_alone.BATCHES, *composer.BATCHES),
}
"""By what is measured."""


def versions_of_peers() -> dict[str, str]:
    """Return the versions of those that are installed, by the names that pip knows them by; none is imported."""
    ways = [way for several in PEERS.values() for way in several]
    return read_versions(way.pip for way in ways)
