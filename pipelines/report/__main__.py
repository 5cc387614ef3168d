"""`python -m pipelines.report RUN_ID`: writes a run's page in its own process, which a time limit can end."""

import sys

from pipelines.home.home import Home
from pipelines.report import write_run_report
from specs.machine.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    write_run_report(Home.from_environment(), sys.argv[1])
