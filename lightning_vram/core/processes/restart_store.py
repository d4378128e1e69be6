"""A key-value store of this attempt alone, where ``torchrun`` uses one over all restarts."""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_vram.core.processes.lost_peers import LostPeerError

_POLL_SECONDS = 0.01
_MEETING = "lightning_vram/attempt"


def attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a view of ``store`` which holds nothing of an earlier attempt; a collective over all ranks.

    ``torchrun`` restarts its workers, but their store belongs to the agent and lives on: the second attempt finds the
    addresses of the first one's dead processes and connects to them ("Gloo connectFullMesh failed ... Connection
    refused"). Older releases of torch put ``/worker/attempt_N`` before every key; newer ones do not, although the agent
    makes the store once and returns the same one ever after. And N counts the restarts of one agent: that of a node
    which came later counts fewer, so its ranks would wait for ever.

    So rank 0 draws a prefix that nobody used before, and all agree on it. Stale keys mislead no rank, since each answer
    is filed under a number that its reader drew. Without an agent the store is new anyway, and returned as it is.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    meeting = PrefixStore(_MEETING, store)
    prefix = _hand_out(meeting, world_size, timeout) if rank == 0 else _ask(meeting, rank, timeout)
    return PrefixStore(prefix, store)


def _hand_out(store: Store, world_size: int, timeout: timedelta) -> str:
    """Answer every rank until all have confirmed: a hello may be of the dead attempt, and be written anew."""
    prefix = f"{_MEETING}/{uuid.uuid4().hex}"
    answered = dict.fromkeys(range(1, world_size), "")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        for rank, nonce in list(answered.items()):
            if store.check([f"confirmed/{prefix}/{rank}"]):
                del answered[rank]
            elif store.check([f"hello/{rank}"]) and (fresh := store.get(f"hello/{rank}").decode()) != nonce:
                store.set(f"ack/{rank}/{fresh}", prefix)
                answered[rank] = fresh
        if not answered:
            return prefix
        if time.monotonic() > deadline:
            missing = ", ".join(map(str, answered))
            raise LostPeerError(_too_late(0, timeout, f"rank(s) {missing} of {world_size}"))
        time.sleep(_POLL_SECONDS)


def _ask(store: Store, rank: int, timeout: timedelta) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    try:
        store.wait([f"ack/{rank}/{nonce}"], timeout)
    except RuntimeError as error:  # DistStoreError, and DistNetworkError if the agent is gone
        raise LostPeerError(_too_late(rank, timeout, "rank 0")) from error
    prefix = store.get(f"ack/{rank}/{nonce}").decode()
    store.set(f"confirmed/{prefix}/{rank}", nonce)
    return prefix


def _too_late(rank: int, timeout: timedelta, who: str) -> str:
    return (
        f"Rank {rank} waited {timeout.total_seconds():g} s to create the process group, but {who} did not connect. See "
        "the log of that rank; if it only starts slowly, increase `timeout=`."
    )
