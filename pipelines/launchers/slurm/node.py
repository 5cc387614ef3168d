"""One machine's share of a Slurm job: `python -m pipelines.launchers.slurm.node RUN_DIR TAG`.

srun starts it as a task, one a node. What to start is in RUN_DIR/slurm/TAG.json; how the ranks ended goes to
RUN_DIR/slurm/TAG-node-N.json.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from pipelines.launchers.ranks import Ranks, Share, address_of, interface_of, log_of, verdict

DIRECTORY = "slurm"
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 1.0


def main(run_dir: Path, tag: str) -> int:
    """Starts the ranks, waits, and returns their exit code as a shell has it."""
    node = int(os.environ["SLURM_PROCID"])
    job = json.loads((run_dir / DIRECTORY / f"{tag}.json").read_bytes())
    ranks = Ranks(_share(run_dir, job, node))
    # Slurm sends a signal to all that runs here, ranks included; srun passes on one that the batch script got.
    signal.signal(signal.SIGTERM, lambda *_: ranks.stop())
    while not ranks.over():
        time.sleep(_POLL_SECONDS)
    codes = ranks.kill(settle_seconds=_SETTLE_SECONDS)
    report = run_dir / DIRECTORY / f"{tag}-node-{node}.json"
    aside = report.with_suffix(".partial")
    aside.write_text(json.dumps({"host": socket.gethostname(), "codes": codes}))
    aside.replace(report)
    return verdict(codes)


def _share(run_dir: Path, job: dict[str, object], node: int) -> Share:
    share = Share.parse({**job, "run_dir": str(run_dir), "node": node, "first_rank": 0, "log": "", "interface": ""})
    interface = str(job["interface"]) or interface_of(source_address(share.master_address))
    if job["interface"]:
        address_of(interface)  # raises where there is none of that name
    log = log_of(run_dir, node, os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    return Share.parse(
        {**job, "run_dir": str(run_dir), "node": node, "first_rank": node * share.ranks, "log": str(log)}
        | {"interface": interface}
    )


def source_address(peer: str) -> str:
    """The address of this machine from which a peer is reached; no packet is sent. Raises OSError for a bad name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
