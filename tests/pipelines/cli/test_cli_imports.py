"""Libraries and number of modules that a verb imports: the cost of a command before it does anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_home import record_two_cells

from pipelines.home.home import Home
from storage import rebuild

HEAVY = {
    *(
        "deepspeed",
        "duckdb",
        "jinja2",
        "matplotlib",
        "mcp",
        "numpy",
        "openai",
        "optuna",
        "pandas",
        "prefect",
        "pyarrow",
    ),
    *("pydantic", "ray", "scipy", "sqlalchemy", "torch", "transformers", "vllm"),
}
"""Libraries that take a tenth of a second or more to import."""
PROGRAM = """\
import sys
try:
    from pipelines.cli import main
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of six recorded runs, all of them in the database."""
    home = Home(tmp_path_factory.mktemp("home"))
    record_two_cells(home)
    for path in home.root.rglob("*"):
        if path.is_dir():
            os.utime(path, (0, 0))  # a directory that has just changed may change again and is read by itself
    rebuild(home.root)
    return home.root


def imported_by(home: Path, *words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=os.environ | {"RPG_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


READS = {"duckdb", "jinja2", "numpy", "pydantic"}
INGESTS = READS | {"pandas", "pyarrow"}
"""What has changed is taken over into the database: DuckDB asks pandas whether a table is one of its own."""
SPEC = "specs/experiments/quickstart.yaml"


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "most", "libraries"),
    [
        (("--help",), 450, set()),
        (("validate", SPEC), 560, {"pydantic"}),
        (("schema", "experiment"), 600, {"pydantic"}),
        (("init", "--help"), 520, {"pydantic"}),
        (("runs",), 1100, INGESTS),
        (("show", "sums-wide-s0"), 1200, INGESTS | {"scipy"}),
        (("sql", "select 1"), 560, {"duckdb", "pydantic"}),
        (("study", "list"), 660, READS),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_verb_imports_what_it_needs(home: Path, words: tuple[str, ...], most: int, libraries: set[str]) -> None:
    imported = imported_by(home, *words)
    assert HEAVY & imported <= libraries
    assert len(imported) <= most
