"""One machine's share of a Slurm job: `python -m pipelines.launchers.slurm.node RUN_DIR STRETCH`.

srun starts it as a task, one a node. Its orders and the ranks' exit codes are in files: see `job_files`.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.launchers import problems_file
from pipelines.launchers.network import address_of, interface_of, source_address
from pipelines.launchers.ranks import ENDED_WELL, Processes, Share, log_of, verdict
from pipelines.launchers.slurm.job_files import JobFiles
from specs.errors import Issue
from specs.machine.exit_cause import USER_ERROR, leave_issues
from specs.machine.files import write_json
from specs.secrets import SecretError

_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 1.0


def main(run_dir: Path, stretch: str) -> int:
    """Starts the ranks or engines, waits, and returns their exit code as a shell has it."""
    files, node = JobFiles.of(run_dir), int(os.environ["SLURM_PROCID"])
    share = _share(run_dir, json.loads(files.share(stretch).read_bytes()), node)
    try:
        processes = Processes(share)
    except SecretError as error:
        leave_issues(problems_file(run_dir, share.stage), [Issue(str(error), ("launcher", "environment"))])
        write_json(files.report(stretch, node), {"host": socket.gethostname(), "codes": [USER_ERROR]}, durable=False)
        return USER_ERROR
    # Slurm sends a signal to every process here, ranks included; srun forwards those that the batch script got.
    signal.signal(signal.SIGTERM, lambda *_: processes.stop())
    while not processes.over() and not (share.engines and _ranks_over(files.codes(stretch, share.nodes), share.nodes)):
        time.sleep(_POLL_SECONDS)
    codes = processes.kill(settle_seconds=_SETTLE_SECONDS if processes.over() else 0.0)
    write_json(files.report(stretch, node), {"host": socket.gethostname(), "codes": codes}, durable=False)
    return verdict(codes)


def _ranks_over(codes: Mapping[int, Sequence[int | None]], nodes: int) -> bool:
    """Returns whether, by the nodes' reports, the ranks of all nodes have ended or one has failed."""
    return len(codes) == nodes or any(code not in ENDED_WELL for of_node in codes.values() for code in of_node)


def _share(run_dir: Path, job: dict[str, Any], node: int) -> Share:
    """Returns this node's part of the job's settings for all nodes. Raises ValueError if this machine
    lacks the interface."""
    if interface := job["interface"]:
        address_of(interface)
    log = log_of(run_dir, job["stage"], node, os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    of_this_node = {
        "run_dir": str(run_dir),
        "node": node,
        "log": str(log),
        "interface": interface or interface_of(source_address(job["master_address"])),
    }
    if node < job["nodes"]:
        return Share.parse(job | of_this_node | {"first_rank": node * job["ranks"], "engines": 0})
    of_nodes = job["engines"]
    place = node - job["nodes"]
    its_engines = {
        "ranks": 0,
        "first_engine": sum(of_nodes[:place]),
        "engines": of_nodes[place],
        "gpus": of_nodes[place] * job["gpus_per_engine"],
        "address": address_of(interface) if interface else source_address(job["master_address"]),
    }
    return Share.parse(job | of_this_node | its_engines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
