"""Serves an engine on a machine without ranks: `python -m rpg.engine NUMBER ADDRESS`, started by a launcher.

It serves the one rank that holds it and ends when the connection to that rank ends. NUMBER is the engine's number,
from 0; ADDRESS is the address at which the rank reaches this machine. The environment holds the launch's key and the
address of the ranks' rendezvous.
"""

import os
import sys

from specs.machine.launch import KEY
from specs.machine.parent import before_torch, die_with_parent
from specs.machine.timed_output import time_output


def main(number: int, address: str) -> None:
    """Waits for the rank that uses the engine, and serves it."""
    die_with_parent()
    before_torch()
    from rpg.processes.store import launch_store
    from rpg.samplers.vllm.engine_process import prepare, serve
    from rpg.samplers.vllm.meeting import await_rank

    store, key = launch_store(keeps=False), os.environ.pop(KEY)
    prepare()
    serve(await_rank(number, address, key.encode(), store))


if __name__ == "__main__":
    time_output()
    main(int(sys.argv[1]), sys.argv[2])
