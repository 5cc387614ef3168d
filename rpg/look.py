"""`python -m rpg.look JOB.json FOUND.json`: looks at data and model of the JOB's `spec` in a process of its own.

What `rpg.preflight.examine` finds goes to FOUND. The model itself is looked at where the JOB's `model` is true.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rpg.preflight import examine
from specs.document import experiment_of
from specs.machine.files import write_json
from specs.machine.parent import die_with_parent


def main(job_file: str, found: str) -> None:
    """Looks, and writes what it has found."""
    die_with_parent()
    job = json.loads(Path(job_file).read_text())
    write_json(Path(found), asdict(examine(experiment_of(job["spec"], {}), model=job["model"])), durable=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
