"""Settings that a launcher passes to the ranks and engines of one launch, in addition to those that PyTorch reads."""

import os
import secrets

KEY = "RPG_LAUNCH_KEY"
"""Environment variable with the key by which the processes of a launch authenticate each other. Each launch has a new
key, which is never written to disk."""
ENGINES_ELSEWHERE = "RPG_ENGINES_ELSEWHERE"
"""Environment variable that is set only if engines and ranks are on different machines."""
LOOPBACK = "127.0.0.1"
"""Address at which processes meet if all are on one machine. Other machines cannot reach it."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of such processes, with which gloo and NCCL also listen only there."""


def new_key() -> str:
    """Returns a key that cannot be guessed."""
    return secrets.token_hex(32)


def launch_key() -> bytes:
    """Returns this launch's key. Raises RuntimeError if it is not set."""
    if key := os.environ.get(KEY):
        return key.encode()
    raise RuntimeError(f"{KEY} is not set: ranks can connect only if a launcher started them and gave them a key")


def engines_elsewhere() -> bool:
    """Returns whether the engines of this process's launch are on machines without ranks."""
    return ENGINES_ELSEWHERE in os.environ
