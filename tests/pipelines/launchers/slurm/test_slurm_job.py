"""What a batch job makes of how its nodes end, with an srun of its own."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.launchers.slurm import job

SRUN = """\
#!/bin/sh
echo '{"host": "first", "codes": [0]}' > slurm/7-0-node-0.json
exec sleep 600
"""
"""The node with the rank is done, the one with its engine is dead: srun waits until Slurm notices."""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_node_with_engines_that_is_dead_when_the_ranks_are_over_does_not_keep_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho first second\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm").mkdir()
    settings = {"ranks": 1, "nodes": 1, "interface": "lo", "environment": {}, "restarts": 0}
    engines = {"engines": [1], "gpus_per_engine": 1, "device": "cpu", "threads": 1}
    (tmp_path / "slurm" / "settings.json").write_text(json.dumps(settings | engines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "")
    monkeypatch.setattr(job, "_PEERS_SECONDS", 0.5)
    assert job.Job(tmp_path).run() == 0
    assert json.loads((tmp_path / "slurm" / "ended.json").read_text()) == {"job": "7", "code": 0}
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert [host["host"] for host in launch["hosts"]] == ["first", "second"]
