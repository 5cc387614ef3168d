"""Cost of writing a large answer: `rpg sql` against DuckDB's own COPY of the same rows, in turns.

    python benchmarks/answers.py [--rows 1000000] [--rounds 3] [--dir DIR]

Writes a run of so many token rows and ingests it. Prints the median CPU seconds of each command, its start included (of
which `select 1` shows the share), and the ratio to COPY's.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from store import write_run

from storage.ingest import ingest

STEPS = 100
QUERY = "from tokens"
RPG = "from pipelines.cli import main; main()"
COPY = """
import sys
from pathlib import Path
from storage.snapshot import Snapshot
snapshot = Snapshot(Path(sys.argv[1]))
snapshot.provide_all()
snapshot.connection.execute(f"COPY ({sys.argv[2]}) TO '{sys.argv[3]}' (FORMAT {sys.argv[4]})")
"""


def main() -> None:
    """Parses the arguments, writes the home, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to make the home; default: a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        home = Path(directory)
        write_run(home, "run-0", STEPS, arguments.rows // STEPS)
        ingest(home)
        print(f"select 1: {cpu_seconds(home, rpg('select 1', 'csv')):.2f} s")
        for kind in ("csv", "json"):
            measure(home, kind, arguments.rounds)


def measure(home: Path, kind: str, rounds: int) -> None:
    """Prints one format's figures."""
    file = home / f"rows.{kind}"
    commands = {
        "COPY": [COPY, str(home), QUERY, str(file), kind],
        "to a pipe": rpg(QUERY, kind),
        "to a file": [*rpg(QUERY, kind), "-o", str(file)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            seconds[name].append(cpu_seconds(home, command))
    copied = statistics.median(seconds.pop("COPY"))
    print(f"{kind}  DuckDB's COPY {copied:.2f} s")
    for name, measured in seconds.items():
        print(f"{kind}  {name} {statistics.median(measured):.2f} s, {statistics.median(measured) / copied:.2f} times")


def rpg(query: str, kind: str) -> list[str]:
    """The code and arguments of `rpg sql`."""
    return [RPG, "sql", query, "--format", kind]


def cpu_seconds(home: Path, command: list[str]) -> float:
    """CPU seconds of a Python process that runs a command's code; its output is read and dropped."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "RPG_HOME": str(home)}
    with subprocess.Popen([sys.executable, "-c", *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout
        while process.stdout.read(1 << 20):
            pass
    assert process.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
