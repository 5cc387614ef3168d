"""The documentation matches the code: reference pages are current, links resolve, and examples run."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import typer
from documentation import PAGES, ROOT, Block, blocks, build_site
from ruamel.yaml import YAML

from pipelines.cli import app, main
from pipelines.home.home import Home
from specs import extensions
from specs.errors import SpecError, render
from specs.loader import load_evaluation, load_experiment, load_study_document
from specs.machine.exit_cause import Cause
from specs.metrics import METRICS
from specs.schema.execution import Sink
from specs.schema.fields import literal_of, members
from specs.schema.launchers import Launcher
from specs.schema.study import SearchSampler
from storage import Store
from tests import needs
from tests.pipelines.recorded_home import record_conversation, record_run
from tests.pipelines.unpacked_home import unpack

NOT_RUN = {
    "installs": "CI does so on a bare machine, by .ci/run",
    "minutes": "the specs are trained in small by test_sanity_checks.py and test_execute.py,"
    " models are measured by test_evaluated_models.py",
    "many GPUs": "test_paper_specs.py trains the specs in small",
    "a server": "test_server_profile.py and test_submit_to_server.py start one, at ports of their own",
    "several machines": "two homes stand for them in test_server_record.py",
    "two machines": "test_ray.py starts such a cluster, in two network namespaces",
    "Docker": "nothing: test_compose.py holds the file against Compose's schema, as the page says",
    "Kubernetes": "nothing: there is none here, as the page says",
    "own files": "test_cli_specs.py writes such files and validates the specs",
    "a crash": "test_kill.py kills the command and the trainer, and gives the same command again",
    "a Hub": "test_push.py pushes to one of its own",
    "another home": "docs/sql.md asks the recorded home the same",
    "another program": "test_documentation.py opens the index without this package's code",
    "a tracker": "test_sinks.py reads what it would show, with its own library",
    "a judge": "test_judge.py, test_scoring_models.py and test_model_user.py have models and addresses of their own",
    "an installed package": "test_installed_packages.py installs it",
}
"""Reason why a block is only shown, from the comment above it -> its replacement."""
NAMES = {
    "RUN": "finished-s0-5c295933",
    "EXPERIMENT": "finished",
    "STUDY": "clips",
    "FILE": "specs/experiments/quickstart.yaml",
    "'quickstart'": "'finished'",
    "step-000060": "step-000004",
    "'clip-bounds'": "'clips'",
}
"""Name on the pages -> name in the recorded home, in which their commands run."""
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Has `pip install` ask no network and build with what is here: of PIP_NO_BUILD_ISOLATION 0 means without isolation."""
KINDS = {"python", "yaml", "toml", "sql", "sh", "console", "text", "mermaid", "math"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to look around in: a home `.rpg` with runs and a study, and the specs that come with the product."""
    return make_workplace(tmp_path_factory.mktemp("recorded"))


def make_workplace(place: Path) -> Path:
    unpack(place)
    (place / "home").rename(place / ".rpg")
    (place / "home").symlink_to(".rpg")  # as the home's own files name it
    for folder in ("experiments", "studies", "evaluations"):
        (place / "specs" / folder).symlink_to(ROOT / "specs" / folder)
    return place


def named(text: str) -> str:
    """Returns the text with the names of the recorded home."""
    for name, real in NAMES.items():
        text = re.sub(rf"(?<![\w-]){name}(?![\w-])", real, text)
    return text


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in KINDS
    assert not block.not_run or block.not_run in NOT_RUN
    if block.language == "console" and not block.not_run:
        assert "$ rpg validate spec.yaml" in block.text, "only this output is compared"


def test_no_reason_to_run_nothing_is_left_over() -> None:
    assert set(NOT_RUN) == {block.not_run for block in blocks()} - {""}


@pytest.mark.more
@pytest.mark.parametrize("block", blocks("sql"), ids=str)
def test_queries_have_an_answer(block: Block, recorded: Path) -> None:
    with Store.open(recorded / ".rpg") as store:
        assert store.query(named(block.text)).rows or "Empty where" in block.text


@pytest.mark.more
@pytest.mark.parametrize("block", [block for block in blocks("sql") if "from turns" in block.text], ids=str)
def test_queries_of_turns_have_an_answer_where_there_are_turns(block: Block, tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "calls-s0")
    calls = {"sampled": False, "tool": "calculator", "seconds": 0.5}
    record_conversation(
        home,
        "calls-s0",
        [
            {"text": "[2*3]", "sampled": True, "reward": 0.5},
            {"text": "(6)", **calls},
            {"text": "[0/0]", "sampled": True},
            {"text": "(error: no)", "error": "no", **calls},
            {"text": "6", "sampled": True},
            {"text": "6?", "sampled": False, "restart": True},
            {"text": "6", "sampled": True},
        ],
    )
    with Store.open(home.root) as store:
        assert store.query(block.text).rows


@pytest.mark.parametrize("table", [name for (name,) in Store(ROOT / "nothing").query("show tables").rows])
def test_the_cookbook_asks_every_table(table: str) -> None:
    assert any(re.search(rf"(from|join) {table}\b", block.text) for block in blocks("sql"))


@pytest.mark.more
@pytest.mark.usefixtures("modules_forgotten")
@pytest.mark.parametrize("page", sorted({block.page for block in blocks("sh")}), ids=lambda path: path.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of one page, one after another: `rpg` within this process, blocks with other programs in a shell.

    Each finds the files that the page has shown. What a page installs lies beside the workplace."""
    monkeypatch.chdir(make_workplace(tmp_path))
    monkeypatch.delenv("RPG_HOME", raising=False)
    for name, value in PIP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    for block in (block for block in blocks() if block.page == page and not block.not_run):
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(named(block.text))
        if block.language != "sh":
            continue
        lines = shell_lines(named(block.text))
        if not all(line.startswith("rpg ") for line in lines):
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            packages = f"{ROOT}:{tmp_path / 'installed'}"
            environment = {**os.environ, "PATH": path, "PYTHONPATH": packages}
            shell = ["bash", "-euo", "pipefail", "-c", named(block.text)]
            finished = subprocess.run(shell, env=environment, capture_output=True, text=True)
            assert finished.returncode == 0, f"{block}\n{finished.stdout}{finished.stderr}"
            # As for a process that begins now, what was installed is there.
            importlib.invalidate_caches()
            extensions._entry_points.cache_clear()
            continue
        for line in lines:
            monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code, f"{block}: {line}"


def shell_lines(text: str) -> list[str]:
    """Its commands, without comments; one that goes over several lines is one."""
    joined = re.sub(r"\\\n\s*|\n\s+", " ", text)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def commands_named() -> list[tuple[str, list[str]]]:
    """Each `rpg ...` on a page: where, and its words."""
    shown = [
        (str(block), line.removeprefix("$ "))
        for block in blocks()
        if block.language in ("sh", "console")
        for line in shell_lines(block.text)
        if line.removeprefix("$ ").startswith("rpg ")
    ]
    inline = [(page.name, code) for page in PAGES for code in re.findall(r"`(rpg [a-z][^`]*)`", page.read_text())]
    return [(where, shlex.split(re.sub(r"(?<=\w)'s\b", "s", line), comments=True)) for where, line in shown + inline]


def test_commands_and_options_named_in_the_docs_exist() -> None:
    rpg = typer.main.get_command(app)
    for where, (_, *words) in commands_named():
        command = rpg
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        shown = f"{where} names `rpg {' '.join(words)}`"
        assert not words or words[0].startswith("-") or not hasattr(command, "commands"), shown
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        named_options = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
        assert named_options <= known, shown


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "yaml"], ids=str)
def test_yaml_is_yaml(block: Block) -> None:
    assert YAML(typ="safe", pure=True).load(block.text)


@pytest.mark.parametrize("block", [block for block in blocks() if block.file and not block.not_run], ids=str)
def test_a_file_that_a_page_shows_is_used_by_its_commands(block: Block) -> None:
    commands = [other.text for other in blocks("sh") if other.page == block.page and other.line > block.line]
    assert any(re.search(rf"\b{word}\b", text) for text in commands for word in (block.file, block.file.split("/")[0]))


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if not block.file], ids=str)
def test_specs_and_parts_of_specs_validate(block: Block, tmp_path: Path) -> None:
    """A part of a spec is laid over the quickstart's; a study stands beside the specs that come with the product."""
    (tmp_path / "experiments").symlink_to(ROOT / "specs/experiments")
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "example.yaml"
    whole = block.text.startswith(("# spec", "# study", "# evaluation"))
    path.write_text(block.text if whole else f"extends: ../experiments/quickstart.yaml\n{block.text}")
    if block.text.startswith("# study"):
        assert load_study_document(path).warnings == ()
    elif block.text.startswith("# evaluation"):
        assert load_evaluation(path, weights_of=lambda _model: "a/run").warnings == ()
    else:
        load_experiment(path)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    assert "WARNING" not in build_site(tmp_path)


@pytest.mark.more
def test_the_reference_pages_are_current() -> None:
    command = [sys.executable, "tools/write_reference.py", "--check"]
    this_checkout = os.environ | {"PYTHONPATH": str(ROOT)}  # the environment may belong to another one
    finished = subprocess.run(command, cwd=ROOT, env=this_checkout, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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


@pytest.mark.more
@pytest.mark.parametrize("page", sorted({block.page for block in blocks("python")}), ids=lambda path: path.name)
def test_python_in_the_docs_runs(page: Path, tmp_path: Path, recorded: Path) -> None:
    """Blocks of one page run one after another, beside the recorded home; `>>>` examples are compared too."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.text for block in blocks("python") if block.page == page))
    doctest = ["-m", "doctest"] if ">>> " in script.read_text() else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *doctest, str(script)]
    finished = subprocess.run(command, cwd=recorded, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_names_that_newcomers_are_given_exist() -> None:
    """Right-hand columns of the tables in docs/coming-from.md: dotted names are keys, those with a slash metrics."""
    page = (ROOT / "docs/coming-from.md").read_text()
    keys = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/spec.md").read_text(), re.MULTILINE))
    metrics = {metric.name for metric in METRICS}
    ours = [
        code for row in re.findall(r"^\|[^|]+\|([^|]+)\|", page, re.MULTILINE) for code in re.findall("`([^`]+)`", row)
    ]
    assert len(ours) > 60
    for code in ours:
        path = re.fullmatch(r"(?:\w+\.)+(\w+)", code)
        assert not path or path[1] in keys, code
        assert "/" not in code or code in metrics or code.isupper() or "RUN" in code, code


def test_every_metric_is_read_on_its_page() -> None:
    page = (ROOT / "docs/reading-metrics.md").read_text()
    assert {metric.name for metric in METRICS} - set(re.findall(r"`([\w/]+)`", page)) == set()


EXPLAINED: dict[str, tuple[str, list[str]]] = {
    "studies.md": (r"^\| `{}` \|", [*literal_of(SearchSampler.model_fields["type"])]),
    "trackers.md": (r"type: {}\b", [name for sink in members(Sink) for name in literal_of(sink.model_fields["type"])]),
    "clusters.md": (
        r"^\| `{}` \|",
        [name for launcher in members(Launcher) for name in literal_of(launcher.model_fields["type"])],
    ),
}
"""Page -> what stands there for each name of a choice, and the names."""


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, (_, names) in EXPLAINED.items() for name in names])
def test_every_choice_is_explained_on_its_page(page: str, name: str) -> None:
    assert re.search(EXPLAINED[page][0].format(name), (ROOT / "docs" / page).read_text(), re.MULTILINE)


TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def texts_in_the_sources() -> list[str]:
    """Every text in the packages, with … for what is put into it."""
    files = [path for package in ("specs", "rpg", "storage", "pipelines") for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    whole = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return whole + [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]


@pytest.mark.more
@pytest.mark.parametrize("message", re.findall(r"^### `(.*)`$", TROUBLE, re.MULTILINE))
def test_quoted_messages_are_those_of_the_sources(message: str, texts_in_the_sources: list[str]) -> None:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
    assert any(pattern.search(text) for text in texts_in_the_sources)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_debian_packages_that_tests_need_are_listed(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert ", ".join(f"`{package}`" for package in sorted(needs.CHECKS)) in text


def test_every_cause_is_explained() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TROUBLE, re.MULTILINE)) == set(get_args(Cause))
