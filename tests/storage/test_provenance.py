"""The origins of a run's settings, and its code, packages and machine, as rows."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage import Store
from storage.provenance import provenance_rows
from tests.storage.recording import SPEC, RecordedRun, write_json

ATTEMPT = {
    "attempt": 2,
    "resumed_from_step": 4,
    "code": {"version": "0.1.0", "commit": "c" * 40, "diff": ""},
    "packages": ["numpy==2.4.0", "torch==2.13.0", "zipp==4.0"],
    "lock": "f" * 64,
    "machine": {"cpu": "EPYC", "cpus": 2},
    "environment": {"OMP_NUM_THREADS": "1"},
}


def record(root: Path) -> RecordedRun:
    run = RecordedRun(root, "sums-s0")
    run.start(1)
    spec = SPEC | {
        "objective": {"type": "rpg", "kl_coef": 0.5},
        "seeds": [0],
        "launcher": {"environment": {"A_TOKEN": "hf_0123456789abcdefgh"}},
    }
    write_json(run.path / "spec.json", spec)
    origins = [
        [["objective", "type"], "default", "", 0],
        [["objective", "kl_coef"], "file", "sums.yaml", 7],
        [["seeds"], "matrix", "sums.yaml", 2],
        [["launcher", "environment", "A_TOKEN"], "set", "", 0],
        [["gone"], "file", "sums.yaml", 9],
    ]
    write_json(run.path / "provenance.json", {"origins": origins})
    write_json(run.path / "attempts" / "0002.json", ATTEMPT)
    write_json(run.path / "certificate.json", {"holds": True})
    files = {"train.parquet": {"sha256": "1" * 64, "bytes": 3}, "prompt.txt": "2" * 64}
    write_json(root / "artifacts" / "data" / ("d" * 16) / "manifest.json", {"files": files})
    return run


def test_each_value_stands_with_its_origin_and_each_attempt_with_what_it_ran_on(tmp_path: Path) -> None:
    run = record(tmp_path)
    rows = provenance_rows(tmp_path, run.path)
    assert {row["run_id"] for row in rows} == {"sums-s0"}

    def of(kind: str) -> list[tuple[Any, ...]]:
        names = ("name", "value", "origin", "file", "line", "attempt")
        return [tuple(row.get(name) for name in names) for row in rows if row["kind"] == kind]

    assert of("spec") == [
        ("objective.type", "rpg", "default", None, None, None),
        ("objective.kl_coef", "0.5", "file", "sums.yaml", 7, None),
        ("seeds", "[0]", "matrix", "sums.yaml", 2, None),
        ("launcher.environment.A_TOKEN", "(hidden)", "set", None, None, None),
        ("gone", None, "file", "sums.yaml", 9, None),
    ]
    assert of("data") == [("prompt.txt", "2" * 64, *[None] * 4), ("train.parquet", "1" * 64, *[None] * 4)]
    digest = hashlib.sha256((run.path / "certificate.json").read_bytes()).hexdigest()
    assert of("certificate") == [("sha256", digest, *[None] * 4)]
    assert [row[:2] for row in of("code")] == [("version", "0.1.0"), ("commit", "c" * 40), ("diff", "")]
    assert of("package") == [("numpy", "2.4.0", *[None] * 3, 2), ("torch", "2.13.0", *[None] * 3, 2)]
    assert of("lock") == [("sha256", "f" * 64, *[None] * 3, 2)]
    assert of("machine") == [("cpu", "EPYC", *[None] * 3, 2), ("cpus", "2", *[None] * 3, 2)]
    assert of("environment") == [("OMP_NUM_THREADS", "1", *[None] * 3, 2)]


@pytest.mark.parametrize(
    ("claims", "rows"), [(["never"], ["none"]), (["always", "on_policy"], ["always", "on_policy"])]
)
def test_what_the_certificate_claims_is_among_the_rows(claims: list[str], rows: list[str], tmp_path: Path) -> None:
    run = record(tmp_path)
    of_policies = [{"policy": policy, "reference": "apart"} for policy in ("on_policy", "off_policy")]
    figures = {"error": 0.0, "cosine": 1.0, "variance": 1.0, "divergence_error": {}, "divergence_gradient_of": ""}
    shared = {"claimed": "expected reward", "holds": True, "tolerance": 1e-10, "num_cases": 96}
    shared["findings"] = [each | figures for each in of_policies]
    certificates = [{"claim": claim, **shared} for claim in claims]
    steps = {"steps": {str(step): each for step, each in enumerate(certificates, 1)}}
    write_json(run.path / "certificate.json", steps if len(claims) > 1 else certificates[0])
    found = [row["value"] for row in provenance_rows(tmp_path, run.path) if row["name"] == "claim"]
    assert found == rows


@pytest.mark.parametrize("content", ["", "[]", "null", '{"origins": null}', '{"packages": null, "code": null}'])
def test_documents_of_any_content_give_rows(tmp_path: Path, content: str) -> None:
    run = record(tmp_path)
    for name in ("run.json", "spec.json", "provenance.json", "attempts/0002.json"):
        (run.path / name).write_text(content)
    (tmp_path / "artifacts" / "data" / ("d" * 16) / "manifest.json").write_text(content)
    assert {row["kind"] for row in provenance_rows(tmp_path, run.path)} == {"certificate"}


def test_it_is_asked_by_sql_before_and_after_ingesting_and_goes_with_its_run(tmp_path: Path) -> None:
    run = record(tmp_path)
    rows = provenance_rows(tmp_path, run.path)
    asked = (
        "select kind, name, value, origin, file, line, attempt from provenance where run_id = 'sums-s0' order by all"
    )
    names = ("kind", "name", "value", "origin", "file", "line", "attempt")
    expected = {tuple(row.get(name) for name in names) for row in rows}
    with Store.open(tmp_path) as store:
        assert set(store.query(asked).rows) == expected
        assert len(store.query(asked).rows) == len(rows)
        store.ingest()
        store.refresh()
        assert set(store.query(asked).rows) == expected
        write_json(run.path / "certificate.json", {"holds": False})
        store.refresh()
        assert len(store.query(asked).rows) == len(rows)
        assert set(store.query(asked).rows) != expected, "the certificate has another digest"
        shutil.rmtree(run.path)
        store.ingest()
        store.refresh()
        assert store.query(asked).rows == []
