"""The command lines that start the trainer's ranks."""

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def local_command(run_dir: Path, ranks: int, port: int, devices: Sequence[str] = ()) -> list[str]:
    """DeepSpeed's launcher on this machine, with one process a rank.

    The launcher exits with a rank's own code when it fails or stops (143 after SIGTERM to the ranks), within a second.
    Sent a SIGTERM itself, it passes it on, waits at most 30 s, and exits with 1.

    Args:
        port: a free TCP port, at which the ranks meet.
        devices: a rank's GPU each, as CUDA_VISIBLE_DEVICES names it; empty: the first ones.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(devices) or list(range(ranks))}).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        *(f"--world_info={world}", f"--master_port={port}", "--log_level=error", "--no_local_rank"),
        *("--module", "rpg.train", str(run_dir)),
    ]
