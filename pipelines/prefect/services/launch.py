"""Replaces its process by a program of `rpg up`: `python -m pipelines.prefect.services.launch NAME`, which supervisord
starts.

Its command, environment, user and directory are in services/programs.json. A supervisord configuration could not hold
them: it takes ` #` and ` ;` for comments, `%` for its own variables, and leaves quotes in values.
"""

import json
import os
import pwd
import signal
import sys
from pathlib import Path

from specs.machine.parent import die_with_parent


def main() -> None:
    """Reads services/programs.json below the working directory, which is the home, and executes the program."""
    program = json.loads(Path("services/programs.json").read_text(encoding="utf-8"))[sys.argv[1]]
    command = program["command"]
    os.chdir(program["directory"])
    if program["user"]:
        user = pwd.getpwnam(program["user"])
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    # After the change of user, which would reset it.
    die_with_parent(number=signal.Signals[program["stop_signal"]])
    os.execvpe(command[0], command, os.environ | program["environment"])


if __name__ == "__main__":
    main()
