"""PyTorch's gloo as a separate backend, whose ranks prove to each other that they have the launch's key.

Gloo accepts the first peer that connects and sends a small number as the expected rank. So all ranks of a group send
each other a proof once they are connected, over the same connections that later carry their tensors. A wrong proof
means that an outsider has connected, and the group is created again. A proof is valid for one direction of one
connection of one attempt, and a rank connects only to addresses from the launch's store, so a proof cannot be relayed.
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
"""Time limit for the proof of a connected rank."""
_ATTEMPTS = 5


class StrangerError(RuntimeError):
    """Error raised if a process without the key took a rank's place in every attempt."""


def _open(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Opens a process group. PyTorch calls it on each rank of the group."""
    if size == 1:
        return ProcessGroupGloo(store, rank, size, timeout=timeout)
    for attempt in range(_ATTEMPTS):
        of_attempt = PrefixStore(str(attempt), store)
        group = ProcessGroupGloo(of_attempt, rank, size, timeout=timeout)
        if not _proved(group, of_attempt):
            of_attempt.add("strangers", 1)
            print(
                f"rank {rank}: a process outside the launch may have taken a rank's place; the ranks connect again",
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
    """Returns whether every peer of this rank's connections has the launch's key.

    Args:
        group: gloo's group; its type does not declare all its methods.
        store: store of this attempt.
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
    except RuntimeError:  # too late, or the connection is closed
        return False
    return all(hmac.compare_digest(received[rank].numpy().tobytes(), proof(rank, own)) for rank in others)


dist.Backend.register_backend(BACKEND, _open, devices=["cpu"])
