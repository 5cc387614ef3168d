"""The house: imports run one way, the schema stays light, files stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "specs": {"torch", "prefect", "duckdb", "optuna", "transformers", "rpg", "storage", "pipelines"},
    "rpg": {"prefect", "duckdb", "optuna", "storage", "pipelines"},
    "storage": {"torch", "prefect", "optuna", "transformers", "rpg", "pipelines"},
}
MOST_LINES = 300


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names that a module imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        wrong = imported(ast.parse(path.read_text())) & FORBIDDEN[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_objectives_know_nothing_of_ours_but_the_schema() -> None:
    for path in sources("rpg/objectives"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rpg"):
                assert node.module.startswith("rpg.objectives"), f"{path.relative_to(ROOT)} imports {node.module}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import specs.loader, specs.document", {"torch", "prefect", "duckdb", "optuna", "transformers", "pyarrow"}),
        ("import pipelines.cli", {"torch", "prefect", "duckdb", "optuna", "transformers", "pyarrow", "pydantic"}),
        (
            "import pipelines.planning.plan, pipelines.planning.memory",
            {"torch", "prefect", "duckdb", "optuna", "transformers"},
        ),
        ("import storage", {"torch", "prefect", "optuna", "transformers"}),
    ],
)
def test_a_light_import_stays_light(statement: str, absent: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not absent & set(loaded.split())


@pytest.mark.parametrize("package", ["specs", "rpg", "storage", "pipelines", "tests", "benchmarks"])
def test_no_file_is_longer_than_a_reader_wants(package: str) -> None:
    for path in sources(package):
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines"


def test_names_say_what_a_module_holds() -> None:
    for package in ("specs", "rpg", "storage", "pipelines"):
        for path in sources(package):
            assert path.stem not in {"utils", "common", "helpers", "manager"}, path
