"""`python -m pipelines.sinks RUN SINK`: sends a run's records until it ends, in a process beside it.

SINK is a sink of the spec, as JSON. Exits 1 if the sink fails, with the reason noted in the run's directory.
"""

import os
import sys

from pydantic import TypeAdapter

from pipelines.home.home import Home
from pipelines.sinks.sending import SinkError, send
from specs.machine.parent import die_with_parent
from specs.schema.execution import Sink

_NICENESS = 10
"""Training has priority."""

if __name__ == "__main__":
    die_with_parent()
    os.nice(_NICENESS)
    sink: Sink = TypeAdapter(Sink).validate_json(sys.argv[2])
    try:
        send(Home.from_environment(), sys.argv[1], sink, follow=True)
    except SinkError as error:
        sys.exit(str(error))
