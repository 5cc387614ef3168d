"""The documentation says what the code does: reference pages are current, links lead somewhere, examples validate."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specs.errors import SpecError, render
from specs.loader import load_experiment, load_study_document

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_reference_pages_are_current() -> None:
    command = [sys.executable, "tools/write_reference.py", "--check"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_examples_marked_as_whole_specs_validate(page: Path, tmp_path: Path) -> None:
    for index, text in enumerate(re.findall(r"```yaml\n(# spec\n.*?)```", page.read_text(), re.DOTALL)):
        path = tmp_path / f"example-{index}.yaml"
        path.write_text(text)
        load_experiment(path)


def test_the_study_in_the_docs_validates_without_a_warning(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(# study\n.*?)```", (ROOT / "docs/studies.md").read_text(), re.DOTALL)
    (tmp_path / "experiments").symlink_to(ROOT / "specs/experiments")
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "example.yaml"
    path.write_text(text)
    assert load_study_document(path).warnings == ()


def test_commands_named_in_the_docs_exist() -> None:
    from typer.main import get_command

    from pipelines.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        for verb in re.findall(r"`rpg ([a-z]+)", page.read_text()):
            assert verb in known, f"{page.name} names `rpg {verb}`"


def test_the_readmes_slips_are_named_as_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text()
    spec = re.search(r"```yaml\n(# spec\n.*?)```", readme, re.DOTALL)
    shown = re.search(r"\$ rpg validate spec\.yaml\n(.*?)```", readme, re.DOTALL)
    assert spec
    assert shown
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(spec[1].replace("high: 0.28", "hi: 0.28").replace("size: 16", 'size: "16"'))
    with pytest.raises(SpecError) as refused:
        load_experiment("spec.yaml")
    assert render(refused.value.issues) == shown[1].rstrip()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_the_docs_runs(page: Path, tmp_path: Path) -> None:
    """Blocks of one page run one after another, in a directory of their own; `>>>` examples are compared too."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if not blocks:
        return
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    command = (
        [sys.executable, "-m", "doctest", str(script)]
        if ">>> " in script.read_text()
        else [sys.executable, str(script)]
    )
    path = {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **path})
    assert finished.returncode == 0, finished.stdout + finished.stderr
