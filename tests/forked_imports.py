"""The process from which a command's stages are forked, as a fork of one that has imported what they need.

    python -m tests.forked_imports REQUEST

Its output is the socket through which it is asked. REQUEST is a JSON file, its environment.
"""

import json
import os
import sys
from pathlib import Path

from pipelines.processes import fork_server


def main() -> None:
    """Serves as `pipelines.processes.fork_server` does; in a fork, runs that fork's program."""
    environment = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[1]).unlink()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(1, 0)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(environment | {"PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"})
    fork_server.main()


if __name__ == "__main__":
    main()
