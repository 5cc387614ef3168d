"""Commands in the shells, directories and locales that people have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.recording import RecordedRun

LONG = pytest.mark.long
RPG = str(Path(sys.executable).parent / "rpg")
"""The installed command."""
SPEC = """\
name: tiny
question: Wächst es → 東京?
model: {source: scratch, model_type: qwen3, tokenizer: {type: bytes}, config: {hidden_size: 32, intermediate_size: 64,
  num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64}}
data:
  train: [{source: jsonl, path: data.jsonl, columns: {prompt: prompt, answer: answer}}]
  evaluation: [{name: held_out, source: jsonl, path: held_out.jsonl, columns: {prompt: prompt, answer: answer}}]
  prompt: {type: template, template: "{prompt} ="}
  max_prompt_length: 16
reward: {type: exact_match}
rollout: {engine: transformers, max_response_length: 4}
objective: {type: rpg, kl_coef: 1.0e-2}
training: {steps: 3, prompts_per_step: 2, group_size: 4, minibatches: 2, optimizer: {learning_rate: 1.0e-4}}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "home"
    monkeypatch.setenv("RPG_HOME", str(root))
    run = RecordedRun(root, "sums-s0-aaaa1111")
    run.start(1)
    run.steps(1, 3)
    run.evaluate()
    return root


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a spec and its data."""
    directory = tmp_path / "project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    (directory / "spec.yaml").write_text(SPEC, encoding="utf-8")
    for name, numbers in (("data.jsonl", range(9)), ("held_out.jsonl", range(10, 14))):
        problems = [f'{{"prompt": "{n}+{n}", "answer": "{2 * n}"}}\n' for n in numbers]
        (directory / name).write_text("".join(problems), encoding="utf-8")
    return directory


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Returns the output of a line of bash whose pipes end with the first command's exit code."""
    variables = os.environ | {"rpg": RPG} | environment
    return subprocess.run(["bash", "-c", line], env=variables, capture_output=True, encoding="utf-8", timeout=300)


@pytest.mark.more
@pytest.mark.parametrize("path", [pytest.param(None, marks=LONG), ":", pytest.param("lib:", marks=LONG)])
def test_files_of_the_project_stand_in_for_no_module(path: str | None, project: Path) -> None:
    for name in ("transformers", "rpg", "yaml", "torch"):
        (project / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the project')")
    for name in ("specs", "storage"):
        (project / name).mkdir()
    done = shell('"$rpg" validate --deep spec.yaml', **({} if path is None else {"PYTHONPATH": path}))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pyproject.toml", b'[project]\n<<<<<<< HEAD\nversion = "1"\n'),
        pytest.param("pyproject.toml", b"\xff\xfe", marks=LONG),
        pytest.param("prefect.toml", b"a = [\n", marks=LONG),
        pytest.param("pyproject.toml", b'[tool.prefect.api]\nrequest_timeout = "soon"\n', marks=LONG),
    ],
)
def test_a_file_that_prefect_cannot_read_is_named_in_a_line(name: str, content: bytes, project: Path) -> None:
    (project / name).write_bytes(content)
    done = shell('"$rpg" schedules --profile http://127.0.0.1:9/api')
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = (line for line in done.stderr.splitlines() if "Prefect cannot read its settings" in line)
    assert said.startswith(str(project / name))
    assert "Traceback" not in done.stderr


def test_commands_that_need_no_prefect_mind_no_file_of_its(project: Path) -> None:
    (project / "pyproject.toml").write_text("[")
    assert shell('"$rpg" runs').returncode == 0


@pytest.mark.more
@pytest.mark.parametrize("closed", [*(pytest.param(one, marks=LONG) for one in (">&-", "2>&-", "<&-")), ">&- 2>&- <&-"])
def test_a_closed_stream_takes_nothing_and_harms_nothing(closed: str, tmp_path: Path) -> None:
    line = f'"$rpg" sql "select count(*) as n from metrics" -o rows.csv {closed} && "$rpg" runs {closed}'
    done = shell(f"cd '{tmp_path}' && {line}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert (tmp_path / "rows.csv").read_text() == "n\n9\n"


@pytest.mark.parametrize("buffered", ["1", pytest.param("", marks=LONG)])
@pytest.mark.parametrize(
    "words", ["schema", pytest.param("--help", marks=LONG), "sql 'from range(100000)' --format csv"]
)
def test_a_reader_that_has_enough_is_no_error(words: str, buffered: str) -> None:
    done = shell(f'"$rpg" {words} | head -1; exit ${{PIPESTATUS[0]}}', PYTHONUNBUFFERED=buffered)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("buffered", ["1", pytest.param("", marks=LONG)])
def test_a_full_disk_is_said_in_a_line(buffered: str) -> None:
    done = shell('"$rpg" runs > /dev/full', PYTHONUNBUFFERED=buffered)
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: No space left on device\n")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap")
@pytest.mark.parametrize(
    "words", ["runs --profile nothing", *(pytest.param(w, marks=LONG) for w in ("runs", "doctor"))]
)
def test_a_user_without_home_and_account_gets_an_answer(words: str, project: Path) -> None:
    inside = "bwrap --bind / / --dev-bind /dev /dev --proc /proc --ro-bind /dev/null /etc/passwd"
    done = shell(f'{inside} env -u HOME -u USER -u LOGNAME "$rpg" {words}')
    assert done.returncode == (2 if "nothing" in words else 0)
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in project.iterdir()) == ["data.jsonl", "held_out.jsonl", "spec.yaml"]


@pytest.mark.more
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("coding", ["ascii", pytest.param("latin-1", marks=LONG)])
def test_text_is_read_and_written_in_every_locale(coding: str, home: Path, tmp_path: Path) -> None:
    narrow = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if coding == "latin-1":
        made = shell(f"localedef -i en_US -f ISO-8859-1 '{tmp_path}/en_US'")
        if made.returncode > 1:
            pytest.skip("no locale can be made here")
        narrow = {"LOCPATH": str(tmp_path), "LC_ALL": "en_US", "PYTHONUTF8": "0"}
    run = home / "runs/sums-s0-aaaa1111/run.json"
    run.write_text(run.read_text().replace("Does it add?", "Wächst es → 東京?"), encoding="utf-8")
    asked = "select question from runs"
    for words in ("validate spec.yaml", "plan spec.yaml", "show sums-s0-aaaa1111"):
        done = shell(f'"$rpg" {words}', **narrow)
        assert done.returncode == 0, (words, done.stderr)
    assert "Wächst es → 東京?" in shell(f'"$rpg" sql "{asked}" --format json', **narrow).stdout
    assert shell('"$rpg" report sums-s0-aaaa1111', **narrow).returncode == 0
    assert "Wächst es → 東京?" in next(home.rglob("report.html")).read_text(encoding="utf-8")
