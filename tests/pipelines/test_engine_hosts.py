"""Engines on a host without ranks, which ssh reaches: they sample what they would on the host of their rank."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import SshHosts

from tests.pipelines.test_ssh import WHY_NOT, head
from tests.pipelines.test_ssh import hosts as hosts  # the fixture: two of them
from tests.rpg.test_resume import recorded
from tests.rpg.tiny_run import finish, make_inputs, make_run, train

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory, head_dim=32)
    return directory


def apart(hosts: SshHosts, **more: Any) -> dict[str, Any]:
    """The launcher's section: a rank on the first host, its engine on the second."""
    first, second = hosts.hosts
    return {
        "type": "ssh",
        "hosts": [{"host": first.address, "slots": 2}],
        "engine_hosts": [{"host": second.address, "slots": 2}],
        "ssh": hosts.ssh,
        "lost_after_seconds": 5,
        "connect_seconds": 60,
        **more,
    }


def make(inputs: Path, run: Path, *, steps: int = 2, **more: Any) -> Path:
    """A run with a dedicated engine; `more`: changes of other sections and of these."""
    training, rollout = more.pop("training", {}), more.pop("rollout", {})
    engine = {"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25}
    return make_run(inputs, run, training={"steps": steps, **training}, rollout={**engine, **rollout}, **more)


def test_an_engine_on_a_host_of_its_own_samples_what_it_does_beside_its_rank(
    hosts: SshHosts, inputs: Path, tmp_path: Path
) -> None:
    beside, run = make(inputs, tmp_path / "beside"), make(inputs, tmp_path / "apart", launcher=apart(hosts))
    train(beside)
    output = finish(head(run))
    assert f"1 ranks on {hosts.hosts[0].address}, 1 engines on {hosts.hosts[1].address}" in output
    ours, theirs = recorded(run, "tokens"), recorded(beside, "tokens")
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert [ours[key][name] for name in ("token_id", "rollout_logprob")] == [
            theirs[key][name] for name in ("token_id", "rollout_logprob")
        ], key
    launch = json.loads((run / "launch.json").read_text())
    assert [(host.get("ranks"), host.get("engines")) for host in launch["hosts"]] == [("0-0", None), (None, "0-0")]
    assert not any(host.processes() for host in hosts.hosts)
