"""Documents of another shape in a home: they stop only their own unit, and `rpg db check` names them."""

import copy
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unpacked_home import unpack

Call = Callable[..., tuple[int, str, str]]
OTHERS = ("finished-s0-5c295933", "finished-s0-791d367e")
"""Runs that are left as they are; the documents of every other run, experiment and study change."""
ROWS = (
    "select run_id, count(*) as n, sum(value) as total from metrics where run_id like 'finished%' group by 1 order by 1"
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**30,
    float("nan"),
    "",
    "x",
    "../..",
    "\x1b]0;",
    "2026-11-22",
    [],
    [1, 2],
)
VALUES += ([None], [[]], {}, {"": {}}, {"a": [1]}, [{"run_id": 5}], "\ud800")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of nine runs and two studies, with the documents that earlier versions lacked."""
    place = tmp_path_factory.mktemp("recorded")
    unpack(place)
    home = place / "home"
    for run in home.glob("runs/*"):
        lease = {"number": 1, "host": "elsewhere", "pid": 5, "pid_started": "a:1", "at": "2026-11-22T01:00:00+00:00"}
        origins = [[["training", "steps"], "file", "spec.yaml", 3], [["model", "seed"], "default", None, None]]
        freed = {"tokens": {"freed_at": "2026-11-22T01:00:00+00:00", "keep_days": 3}}
        for name, document in (("leases/0001", lease), ("provenance", {"origins": origins}), ("freed", freed)):
            if name != "freed" or run.name not in OTHERS:
                (run / name).parent.mkdir(exist_ok=True)
                (run / f"{name}.json").write_text(json.dumps(document))
    return home


@pytest.fixture
def home(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, to be changed."""
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    return Path(shutil.copytree(recorded, tmp_path / "home", symlinks=True))


def documents(home: Path) -> list[Path]:
    """Those that may change."""
    found = [*home.glob("runs/**/*.json"), *home.glob("experiments/*/*.json"), *home.glob("studies/*/study.json")]
    found += home.glob("artifacts/*/*/manifest.json")
    kept = [*OTHERS, "finished", "weights", "checkpoints"]
    of_others = set(json.loads((home / "runs" / OTHERS[0] / "run.json").read_text())["fingerprints"].values())
    kept += [fingerprint[:16] for fingerprint in of_others]
    return sorted(path for path in found if not {*path.relative_to(home).parts} & {*kept})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: what holds it, and the key or index there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def mutate(path: Path, draws: random.Random) -> None:
    """Makes one of many changes to a document: its bytes, a value's type, a key that is gone, an object nested anew."""
    document = json.loads(path.read_text())
    match draws.randrange(8):
        case 0:
            path.write_bytes(path.read_bytes()[: draws.randrange(200)] + b"\xff")
        case 1:
            path.write_text(draws.choice(["[]", "5", "null", '"x"', "{}", "[" * 100_000, "1" + "0" * 5000]))
        case _:
            for _ in range(draws.randint(1, 4)):
                holder, key = draws.choice([*places(document)] or [(document, "added")])
                match draws.randrange(6):
                    case 0 if key in holder or isinstance(holder, list):
                        del holder[key]
                    case 1:
                        holder[key] = {"": holder.get(key)} if isinstance(holder, dict) else [holder[key]]
                    case _:
                        holder[key] = copy.deepcopy(draws.choice(VALUES))
                if not [*places(document)]:
                    break
            path.write_text(json.dumps(document))


def answers(call: Call, home: Path) -> dict[str, Any]:
    """What commands say of the runs that are as they were."""
    said: dict[str, Any] = {}
    one, two = OTHERS
    for command in (("sql", "select 1"), ("sql", ROWS), ("show", one, "--json"), ("compare", one, two, "--json")):
        code, out, err = call(*command)
        assert code == 0, err
        said[" ".join(command)] = out.replace(str(home), "HOME")
    code, out, err = call("runs", "--json")
    assert code == 0, err
    said["runs"] = [row for row in json.loads(out) if row["run_id"] in OTHERS]
    code, out, err = call("report", one)
    assert code == 0, err
    page = Path(out.strip()).read_text().replace(str(home), "HOME")
    said["report"] = re.sub(r"Written \S+ \S+ UTC", "", page)
    return said


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The answers before anything was changed; the first test fills them in."""
    return {}


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_documents_of_another_shape_change_no_answer_about_other_runs(
    home: Path, call: Call, expected: dict[str, Any], seed: int
) -> None:
    if not expected:
        expected |= answers(call, home)
        (home / "experiments.duckdb").unlink(missing_ok=True)
    draws, changed = random.Random(seed), []
    for path in documents(home):
        if draws.random() < 0.7:
            mutate(path, draws)
            changed.append(path)
    assert answers(call, home) == expected
    assert call("db", "rebuild")[0] == 0
    assert answers(call, home) == expected
    call("db", "check")
    for run in sorted((home / "runs").iterdir())[:: 3 if seed == 0 else 1]:
        for command in (("show", run.name), ("show", run.name, "--origin"), ("logs", run.name), ("report", run.name)):
            call(*command)
        call("compare", run.name, OTHERS[0])
    for name in ("clips", "halfway", "stopped"):
        call("report", name)
        call("compare", name)
        call("study", "show", name)
    call("gc")
    call("runs", "--disk")
    call("rm", "clips", "--yes")
