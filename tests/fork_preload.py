"""Module that the fork server of the tests imports before it forks: what commands, their API and their stages need."""

import os

from pipelines.processes import fork_server
from tests.forks import READ_LATE, ROOT

fork_server.READ_LATE = READ_LATE
fork_server.prepare(("tests.pipelines.command_imports", *fork_server.IMPORTS))
_own = os.environ["PYTHONPATH"].removeprefix(ROOT).removeprefix(os.pathsep)
fork_server._began_with.pop("PYTHONPATH")
fork_server._began_with |= {"PYTHONPATH": _own} if _own else {}
