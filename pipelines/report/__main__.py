"""`python -m pipelines.report RUN_ID`: a run's page in a process of its own, which a time limit can end."""

import sys

from pipelines.home.home import Home
from pipelines.report import write_run_report
from specs.machine.parent import die_with_parent
from storage.ingest import ingest

if __name__ == "__main__":
    die_with_parent()
    home = Home.from_environment()
    ingest(home.root, compact=sys.argv[1], whole=True)
    write_run_report(home, sys.argv[1])
