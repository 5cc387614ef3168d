"""PyTorch's gloo, as a backend of its own name, whose ranks prove to each other that they have the launch's key.

Gloo takes whoever connects first and names a small number for the rank that it waits for. So all ranks of a group send
each other a proof once they are connected: over the very connections that carry their tensors afterwards. Where one is
not what was expected, a stranger sits there, and the group is made anew. A proof holds for one direction of one
connection of one such attempt, and a rank connects to addresses of the launch's store alone: nobody can pass it on.
"""

import hmac
import secrets
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from specs.machine.launch import launch_key

BACKEND = "proved_gloo"
_PROOF_SECONDS = 10.0
"""How long a rank that is connected may take to prove itself."""
_ATTEMPTS = 5


class StrangerError(RuntimeError):
    """Someone who is not of the launch took a rank's place, each time."""


def _open(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Opens a process group on each of its ranks, called by PyTorch."""
    if size == 1:
        return ProcessGroupGloo(store, rank, size, timeout=timeout)
    for attempt in range(_ATTEMPTS):
        of_attempt = PrefixStore(str(attempt), store)
        group = ProcessGroupGloo(of_attempt, rank, size, timeout=timeout)
        if not _proved(group, of_attempt):
            of_attempt.add("strangers", 1)
            print(
                f"rank {rank}: another process than the launch's may have taken a rank's place; they meet again",
                file=sys.stderr,
                flush=True,
            )
        if of_attempt.add("done", 1) == size:
            of_attempt.set("verdict", str(of_attempt.add("strangers", 0)))
        of_attempt.wait(["verdict"], timeout)
        if of_attempt.get("verdict") == b"0":
            return group
    raise StrangerError(
        f"ranks cannot meet: a process without the launch's key connected in the place of a rank, {_ATTEMPTS} times in"
        " a row. Look for other programs on this machine or network that connect to its ports"
    )


def _proved(group: Any, store: Store) -> bool:
    """Whether every other rank at the other end of this one's connections has the launch's key.

    Args:
        group: gloo's, whose type does not tell of all that it can do.
        store: of this attempt to meet.
    """
    own, key = group.rank(), launch_key()
    if own == 0:
        store.set("nonce", secrets.token_hex(16))
    nonce = store.get("nonce").decode()

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(key, f"gloo {nonce} {sender} {receiver}".encode(), "sha256")

    others = [rank for rank in range(group.size()) if rank != own]
    received = {rank: torch.zeros(32, dtype=torch.uint8) for rank in others}
    patience = timedelta(seconds=_PROOF_SECONDS)
    try:
        sent = {rank: torch.frombuffer(bytearray(proof(own, rank)), dtype=torch.uint8) for rank in others}
        works = [group.send([sent[rank]], rank, 0) for rank in others]
        works += [group.recv([received[rank]], rank, 0) for rank in others]
        for work in works:
            work.wait(patience)
    except RuntimeError:  # too late, or the connection has ended
        return False
    return all(hmac.compare_digest(received[rank].numpy().tobytes(), proof(rank, own)) for rank in others)


dist.Backend.register_backend(BACKEND, _open, devices=["cpu"])
