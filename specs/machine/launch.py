"""Message of a launcher to the ranks and engines of one launch, beside what PyTorch reads."""

import os
import secrets

KEY = "RPG_LAUNCH_KEY"
"""Environment variable with the word by which they know each other. It is made anew for each launch, and never written
down."""
ENGINES_ELSEWHERE = "RPG_ENGINES_ELSEWHERE"
"""Environment variable that is set where the engines are on other machines than the ranks, and there alone."""
LOOPBACK = "127.0.0.1"
"""Where processes meet that are all on one machine: nobody elsewhere reaches it."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of such processes: gloo and NCCL listen there too."""


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_hex(32)


def launch_key() -> bytes:
    """This launch's key. Raises RuntimeError where there is none."""
    if key := os.environ.get(KEY):
        return key.encode()
    raise RuntimeError(f"{KEY} is not set: ranks meet only where a launcher has started them and given them one")


def engines_elsewhere() -> bool:
    """Whether the engines of this process's launch are on machines without ranks."""
    return ENGINES_ELSEWHERE in os.environ
