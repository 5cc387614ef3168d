"""Whatever a spec's values hold, a shell takes them for words in the script for sbatch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.launchers import read_launch, sent_along, write_launch
from pipelines.launchers.ranks import Processes, Share
from pipelines.launchers.slurm.queue import batch_script
from specs.errors import RpgError
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC

HOSTILE = {
    "SPACES": "a  b\tc",
    "QUOTES": 'it\'s "quoted" `touch X`',
    "DOLLARS": "$(touch X) ${HOME} $$ \\$1",
    "LINES": "first\ntouch X\nexport Y=1",
    "SIGNS": "; touch X & | > X < * ? [a] {a,b} ~ # !",
    "UNICODE": "\u00e9 \u2028 \U0001f600",
    "HYPHEN": "-n",
    "EMPTY": "",
}


def slurm(environment: dict[str, str], python: str = "") -> Experiment:
    launcher = {"type": "slurm", "environment": environment, "python": python}
    return Experiment.model_validate(SPEC | {"launcher": launcher})


def showing_environment(directory: Path) -> Path:
    """An interpreter, in a path that a shell would take apart, that writes its words and its variables."""
    program = directory / "it's; touch X" / "python $HOME"
    program.parent.mkdir()
    code = f"import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open({str(directory / 'seen')!r}, 'w'))"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    return program


def test_hostile_values_reach_a_batch_job_as_they_are_and_nothing_else_happens(tmp_path: Path) -> None:
    program, run = showing_environment(tmp_path), tmp_path / "run; touch X $(touch X)"
    script = batch_script(slurm(HOSTILE, str(program)), run)
    (tmp_path / "work").mkdir()
    subprocess.run(["sh"], input=script, text=True, cwd=tmp_path / "work", check=True)
    words, variables = json.loads((tmp_path / "seen").read_text())
    assert words[-1] == str(run)
    assert {name: variables[name] for name in HOSTILE} == HOSTILE
    assert "Y" not in variables
    assert list((tmp_path / "work").iterdir()) == []


def test_a_name_that_is_none_does_not_reach_a_batch_job_even_from_a_document_that_no_loader_has_checked() -> None:
    with pytest.raises(ValueError, match="is not the name of a variable"):
        batch_script(slurm({"A=1; touch X; export B": "x"}), Path("run"))


REFERENCES = {"PLAIN": "x", "WEBHOOK": "env:MY_WEBHOOK", "OTHER": "env:NOT_HERE", "FROM_FILE": "file:/run/secret"}


def test_a_batch_script_which_slurm_keeps_holds_no_reference_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WEBHOOK", "canary")
    script = batch_script(slurm(REFERENCES), Path("run"))
    assert "export PLAIN=x\n" in script
    assert not [word for word in ("canary", "WEBHOOK", "OTHER", "FROM_FILE") if word in script]


def test_what_env_references_name_here_goes_to_another_machine_and_the_record_has_names_alone(tmp_path: Path) -> None:
    here = {"MY_WEBHOOK": "canary-of-the-webhook", "UNRELATED": "y"}
    assert sent_along(REFERENCES, here) == {"PLAIN": "x", "MY_WEBHOOK": "canary-of-the-webhook"}
    write_launch(tmp_path, "ray", environment=REFERENCES | {"HF_TOKEN": "canary-of-the-hub"})
    assert read_launch(tmp_path)["environment"] == REFERENCES | {"HF_TOKEN": "(hidden)"}


def share(tmp_path: Path, environment: dict[str, str]) -> Share:
    return Share(
        run_dir=str(tmp_path / "no-run"),
        first_rank=0,
        ranks=1,
        world_size=1,
        node=0,
        nodes=1,
        master_address="127.0.0.1",
        master_port=1,
        log=str(tmp_path / "log"),
        environment=environment,
    )


def test_ranks_get_the_secret_that_a_reference_names_on_their_machine_and_their_log_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("canary-1f2e3d\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import os; print('rank has', os.environ['WEBHOOK'], flush=True)\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['WEBHOOK']); os._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ranks = Processes(share(tmp_path, {"WEBHOOK": f"file:{tmp_path / 'secret'}"}))
    assert ranks.kill(settle_seconds=60) == [0]
    assert (tmp_path / "seen").read_text() == "canary-1f2e3d"
    assert "rank has (hidden)" in (tmp_path / "log").read_text()


def test_ranks_do_not_start_without_a_secret_that_they_need(tmp_path: Path) -> None:
    with pytest.raises(RpgError, match="WEBHOOK is env:NOT_HERE, and there is no variable NOT_HERE on this machine"):
        Processes(share(tmp_path, {"WEBHOOK": "env:NOT_HERE"}))
