"""The house: packages import one way, the rooms inside them stand on floors, and the schema stays light."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import pytest
from places import ROOT

from specs.schema.execution import Sink
from specs.schema.fields import members
from specs.schema.launchers import Launcher
from storage.record import SERVERS

FORBIDDEN = {
    "specs": {"torch", "prefect", "duckdb", "optuna", "transformers", "rpg", "storage", "pipelines"},
    "rpg": {"prefect", "duckdb", "optuna", "storage", "pipelines"},
    "storage": {"torch", "prefect", "optuna", "transformers", "rpg", "pipelines"},
    "pipelines": set[str](),
}
FLOORS = {
    "specs": [
        {"loader", "json_schema"},
        {"study_document", "evaluation_document", "origins"},
        {"document"},
        {"cells"},
        {"published"},
        {"rules", "reading"},
        {"study_space", "model_evaluation"},
        {"schema"},
        {"extensions", "machine"},
        {"secrets"},
        {"bounds", "documents", "errors", "labels", "metrics", "records", "segment_names"},
    ],
    "rpg": [
        {"train", "stage", "engine", "scoring_model"},
        {"trainer"},
        {"run_recorder"},
        {"rollouts"},
        {"components", "replay", "preflight"},
        {"evaluation", "base", "reference"},
        {"rollouters", "samplers", "learner", "metrics", "stopwatch", "control"},
        {"recording", "guards"},
        {"batches", "checkpoints"},
        {"rewards", "tools"},
        {"data", "certificate", "advantages", "processes", "sandbox"},
        {"routing"},
        {"objectives", "messages", "types", "statistics", "pretrained", "fused"},
    ],
    "storage": [
        {"record"},
        {"store", "verify", "export", "growth"},
        {"statements"},
        {"ingest", "snapshot"},
        {"merging", "relations", "units"},
        {"provenance", "contents"},
        {"catalogue", "database", "documentation", "segments"},
        {"columns", "errors"},
    ],
    "pipelines": [
        {"api", "cli"},
        {"jobs", "doctor", "web"},
        {"studies"},
        {"exchange", "prefect"},
        {"running"},
        {"launchers", "replay", "sinks"},
        {"planning", "processes", "remote", "report"},
        {"home", "terminal"},
    ],
}
"""The rooms of each package, from the roof down: a room imports from its own floor or from one below, never upward."""
GROUND = "specs.machine"
"""What every package needs of a machine. `rpg` and `storage` share it, beside the schema and the rows."""
BELOW_GROUND = {"bounds", "documents", "errors", "secrets"}
"""The rooms of `specs` that it imports: they import no more than the standard library and each other."""
MOST_MODULES = 18
"""In a folder. The command line has one a verb."""


def sources(package: str) -> list[Path]:
    """Its modules; programs beside the shipped experiments are their users'."""
    return sorted(path for path in (ROOT / package).rglob("*.py") if path.parent.name != "experiments")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in FORBIDDEN for path in sources(package)}


def imported(text: str) -> set[str]:
    """What a module imports, inside functions and by `import_module` too.

    Modules of ours by their whole name, others as they are written.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in whole}
        elif isinstance(node, ast.Call) and (name := named_in(node)):
            names.add(name)
    return names


def named_in(call: ast.Call) -> str:
    """The module that `import_module` or `__import__` is given as a text; empty for any other call."""
    match call:
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return module
    return ""


IMPORTS = {name: imported(path.read_text()) for name, path in MODULES.items()}


def room_of(module: str) -> tuple[str, str]:
    """Returns the package, and the file or folder directly below it; the room of a package's own __init__ is empty."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def cycle_in(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """A cycle, or nothing."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_one_way(package: str) -> None:
    for module, names in IMPORTS.items():
        if room_of(module)[0] == package:
            wrong = {name.partition(".")[0] for name in names} & FORBIDDEN[package]
            assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import storage.record", "storage.record"),
        ("from storage import record as r", "storage.record"),
        ("def f():\n    from storage.record import open_record", "storage.record"),
        ("importlib.import_module('pipelines.cli.reading').open_server", "pipelines.cli.reading"),
        ("__import__('storage.record')", "storage.record"),
    ],
)
def test_every_way_to_import_is_seen(line: str, module: str) -> None:
    assert module in imported(line)


def test_the_ground_floor_stands_on_rooms_that_need_nothing() -> None:
    ground = {name for name in MODULES if name.startswith(f"{GROUND}.")}
    below = {name for name in MODULES if room_of(name) in {("specs", room) for room in BELOW_GROUND}}
    for module in ground | below:
        others = {name for name in IMPORTS[module] & MODULES.keys() if name not in (ground if module in ground else ())}
        assert others <= below, f"{module} imports {', '.join(sorted(others - below))}"


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_its_floor(package: str) -> None:
    rooms = {room for module in MODULES for owner, room in [room_of(module)] if owner == package and room}
    assert rooms == set().union(*FLOORS[package])


@pytest.mark.parametrize("package", FLOORS)
def test_no_room_imports_from_a_room_above(package: str) -> None:
    height = {room: -depth for depth, floor in enumerate(FLOORS[package]) for room in floor}
    for module, names in IMPORTS.items():
        owner, room = room_of(module)
        if owner != package or not room:
            continue
        for name in names & MODULES.keys():
            target, other = room_of(name)
            above = target == package and other and height[other] > height[room]
            assert not above, f"{module} imports {name}, which stands above it"


def test_the_pipelines_are_a_house_that_a_reader_can_keep_in_mind() -> None:
    floors = FLOORS["pipelines"]
    assert (len(set().union(*floors)) <= 18, len(floors) <= 9) == (True, True)


def test_neither_interface_stands_on_the_other() -> None:
    """Shared parts of the command line and the Python API are in `pipelines.jobs`."""
    for module, names in IMPORTS.items():
        for one, other in (("api", "cli"), ("cli", "api")):
            found = {name for name in names if room_of(name) == ("pipelines", other)}
            assert room_of(module) != ("pipelines", one) or not found, f"{module} imports {', '.join(found)}"


SPEC_READERS = {"specs.reading.recorded", "rpg.recording.run_directory", "storage.provenance"}
"""The reader of specs on record; the trainer's, through the schema too; and the table that lists values, whose keys it
does not know."""
READS = {
    "read_json",
    "read_document",
    "read_checked",
    "loads",
    "model_validate_json",
    "read_text",
    "read_bytes",
}


def reads_of_a_spec(text: str) -> list[int]:
    """The lines of a module that read spec.json as what it says, or keep its path under a name for that."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in READS:
                inside: ast.AST = node
            case ast.Assign(value=ast.BinOp()) | ast.NamedExpr(value=ast.BinOp()):
                inside = node.value
            case _:
                continue
        if any(isinstance(each, ast.Constant) and each.value == "spec.json" for each in ast.walk(inside)):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "line",
    [
        'read_json(home.run(run_id) / "spec.json")["training"]',
        'Experiment.model_validate_json((run / "spec.json").read_bytes())',
        'json.loads((run / "spec.json").read_text(encoding="utf-8"))',
        'path = run / "spec.json"',
    ],
)
def test_every_way_to_read_a_spec_by_its_keys_is_seen(line: str) -> None:
    assert reads_of_a_spec(line)


def test_specs_on_record_are_read_through_the_schema() -> None:
    """A renamed key is an error of the type checker, or reported; never a default."""
    found = {
        f"{module}:{line}": "read it by specs.reading.recorded.recorded_spec"
        for module, path in MODULES.items()
        if module not in SPEC_READERS
        for line in reads_of_a_spec(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_there_is_no_cycle_of_files() -> None:
    assert not cycle_in({module: names & MODULES.keys() - {module} for module, names in IMPORTS.items()})


def test_there_is_no_cycle_of_rooms() -> None:
    arrows: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        here = ".".join(room_of(module))
        there = {".".join(room_of(name)) for name in names & MODULES.keys()}
        arrows.setdefault(here, set()).update(there - {here})
    assert not cycle_in(arrows)


def test_a_module_named_in_a_text_exists() -> None:
    """Commands with `-m`, programs with `-c`, Prefect's entrypoints, docstrings: no import says that these are gone."""
    name_in_text = re.compile(rf"(?<![\w./-])(?:{'|'.join(FORBIDDEN)})(?:\.[a-z_]+){{2,}}\b(?![/-])")
    files = {name for name, path in MODULES.items() if path.stem != "__init__"}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in name_in_text.findall(node.value):
                    parents = {name.rsplit(".", number)[0] for number in range(1, 3)}
                    assert name in MODULES or parents & files, f"{module} names {name}"


def test_what_the_package_registers_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    for group, entries in groups.items():
        for name, value in entries.items():
            assert callable(EntryPoint(name, value, group).load()), f"{group}: {name} = {value}"
    assert list(groups) == ["console_scripts", SERVERS]


def test_an_extra_that_a_message_or_a_page_names_exists() -> None:
    named = {sink.extra for sink in members(Sink)} | {launcher.package for launcher in members(Launcher)}
    for path in [*MODULES.values(), *(ROOT / "docs").glob("*.md")]:
        named |= set(re.findall(r"rpg-experiments\[(\w+)\]", path.read_text()))
    assert named - {""} <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_objectives_know_nothing_of_ours_but_the_schema() -> None:
    for module, names in IMPORTS.items():
        if room_of(module) == ("rpg", "objectives"):
            others = {name for name in names if name.startswith("rpg") and room_of(name) != ("rpg", "objectives")}
            assert not others, f"{module} imports {others}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import specs.loader, specs.document", {"torch", "prefect", "duckdb", "optuna", "transformers", "pyarrow"}),
        ("import pipelines.cli", {"torch", "prefect", "duckdb", "optuna", "transformers", "pyarrow", "pydantic"}),
        (
            "import pipelines.planning.plan, pipelines.planning.memory",
            {"torch", "prefect", "duckdb", "optuna", "transformers"},
        ),
        ("import storage", {"torch", "prefect", "optuna", "transformers", "pyarrow", "numpy", "pandas"}),
        (
            f"import {', '.join(name for name in MODULES if name.startswith(GROUND))}",
            {"torch", "prefect", "pydantic", "duckdb", "optuna", "transformers", "pyarrow", "numpy", "rpg", "storage"},
        ),
        ("import rpg.sandbox.keeper", {"specs", "storage", "pipelines", "pydantic"}),  # a seal shows this package alone
        # What runs on the nodes of a cluster, beside the trainer.
        ("import pipelines.launchers.ray.node", {"torch", "prefect", "pydantic", "duckdb", "rpg", "storage"}),
        ("import pipelines.launchers.slurm.node", {"torch", "prefect", "pydantic", "duckdb", "rpg", "storage"}),
    ],
)
def test_a_light_import_stays_light(statement: str, absent: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not absent & set(loaded.split())


def test_a_folder_holds_no_more_than_a_reader_takes_in() -> None:
    folders = {path.parent for path in MODULES.values()} - {ROOT / "pipelines" / "cli" / "verbs"}
    for folder in folders:
        modules = [path for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(modules) <= MOST_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"


def test_every_room_says_what_lives_there() -> None:
    for path in MODULES.values():
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        least = 60 if path.stem == "__init__" else 1
        assert len(said) >= least, f"{path.relative_to(ROOT)} does not say what it holds"


NO_SUBJECT = re.compile(r"\s*(As|Of|The same|What (is|are))\b")
"""Openings of a docstring that say of what, like what, but not what."""


def texts_alone(text: str) -> list[str]:
    """Docstrings of a module and of all in it, and those below a field or a constant."""
    nodes = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("folder", [*FORBIDDEN, "benchmarks", "tests", "tools"])
def test_a_docstring_begins_with_its_subject(folder: str) -> None:
    for path in sources(folder):
        for said in texts_alone(path.read_text()):
            assert not NO_SUBJECT.match(said), f"{path.relative_to(ROOT)}: {said.splitlines()[0]}"


def test_tests_lie_in_the_room_that_they_are_of() -> None:
    """Above rooms lie tests of modules without one, of several rooms, and what tests share."""
    for package in FORBIDDEN:
        for path in (ROOT / "tests" / package).rglob("test_*.py"):
            room = path.parent.relative_to(ROOT / "tests")
            assert (ROOT / room / "__init__.py").exists(), f"{path.relative_to(ROOT)}: there is no room {room}"


def test_names_say_what_a_module_holds() -> None:
    for path in MODULES.values():
        assert path.stem not in {"utils", "common", "helpers", "manager"}, path


def test_whoever_sends_a_signal_that_may_be_ignored_has_it_arrive() -> None:
    """What `nohup` and a script's `&` ignore is ignored by all that a test starts, but for the fixture."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        lines = path.read_text().splitlines()
        is_sent = any(re.search(r"\bsignal\.SIG(INT|HUP)\b", line) and "SIG_IGN" not in line for line in lines)
        assert not is_sent or 'usefixtures("signals_arrive")' in path.read_text(), path.relative_to(ROOT)


def test_no_process_finds_modules_in_its_working_directory() -> None:
    """A user's transformers.py, or a directory called specs, would replace the installed package."""
    starts = {"-P", "-I"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        for word, following in pairwise([*node.elts, ast.Constant("")])
        if "sys.executable" in ast.unparse(word) and isinstance(word, ast.Attribute | ast.BoolOp)
        if not (isinstance(following, ast.Constant) and following.value in starts)
    ]
    assert not found


def test_text_is_read_and_written_in_an_encoding_that_is_named() -> None:
    """What ruff's PLW1514 does not see: methods of paths that it cannot tell, and the output of other programs."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (named := {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}).get("text") == "True"
        or (node.func.attr in ("read_text", "write_text") and "encoding" not in named and not _of_package(node))
    ]
    assert not found


def _of_package(call: ast.Call) -> bool:
    """Whether it reads the metadata of an installed package, which are UTF-8."""
    return ast.unparse(call).startswith("package.read_text")


def test_what_modules_read_beside_them_is_installed_with_them() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    beside = [
        path
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.*")
        if not any(part.startswith((".", "__")) for part in path.relative_to(ROOT).parts)
    ]
    lost = [
        path.relative_to(ROOT)
        for path in beside
        if path.suffix not in (".py", ".toml", ".yaml")
        and path.is_file()
        and not any(path.match(pattern) for pattern in declared["*"])
    ]
    assert lost == []


WITHOUT_TORCH = {
    *("pipelines.prefect.server.api_process", "pipelines.prefect.server.outage_log"),
    *(
        "pipelines.prefect.services.launch",
        "pipelines.prefect.flows.workers.flow_process",
        "pipelines.prefect.flows.parallel",
    ),
    *("pipelines.prefect.flows.workers.process_worker", "pipelines.sinks.__main__", "pipelines.web.__main__"),
    "pipelines.web.on_demand",
    *("pipelines.launchers.slurm.head", "pipelines.launchers.slurm.job"),
    *("pipelines.launchers.slurm.node", "pipelines.launchers.ray.node", "pipelines.launchers.ray.examination"),
    *(
        "pipelines.launchers.ray.head",
        "pipelines.report.__main__",
        "pipelines.studies.web",
        "pipelines.studies.workers",
    ),
    *("rpg.sandbox.keeper", "rpg.sandbox.enter"),
    # Their environment comes from the process that starts them, with the same variables.
    *("rpg.rewards.worker", "rpg.tools.function_worker", "rpg.base.shape"),
}
"""Programs of ours that compile nothing."""


def test_each_program_that_computes_keeps_compiled_code_in_the_users_own_cache() -> None:
    programs = {
        name: path.read_text() for name, path in MODULES.items() if '__name__ == "__main__"' in path.read_text()
    }
    assert programs.keys() >= WITHOUT_TORCH
    forgotten = {name for name, text in programs.items() if "before_torch()" not in text} - WITHOUT_TORCH
    assert not forgotten, f"{forgotten}: call specs.machine.parent.before_torch first, or name it in WITHOUT_TORCH"
