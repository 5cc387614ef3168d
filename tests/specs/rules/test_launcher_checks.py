"""What a launcher's section may say, and the errors of one that cannot work."""

from pathlib import Path

import pytest
from spec_text import GOOD, message, write

from specs.loader import load_experiment
from specs.schema.launchers import parse_hostfile


def spec(launcher: str, ranks: int = 4) -> str:
    return GOOD + f"  ranks: {ranks}\nlauncher: {launcher}\n"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_hosts_and_a_hostfile_say_the_same():
    Path("hosts").write_text("# the rack\nworker-1 slots=2\n\nroot@10.0.0.2   slots=2  # new\n")
    listed = load_experiment(
        write(spec("{type: ssh, hosts: [{host: worker-1, slots: 2}, {host: root@10.0.0.2, slots: 2}]}"))
    )
    from_file = load_experiment(write(spec("{type: ssh, hostfile: hosts}")))
    assert listed.launcher.read_hosts() == from_file.launcher.read_hosts()
    assert Path(from_file.launcher.hostfile).is_absolute()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("worker-1", "line 1 is not"),
        ("worker-1 slots=0", "line 1 is not"),
        ("-oProxyCommand=x slots=1", "line 1 is not"),
        ("a slots=1\na slots=2", "line 2 names a again"),
        ("# nobody", "there is no host in it"),
    ],
)
def test_a_hostfile_with_something_wrong_is_refused_with_its_line(text, why):
    with pytest.raises(ValueError, match=why):
        parse_hostfile(text)


def test_a_hostfile_that_is_none_is_a_problem_of_the_spec():
    Path("hosts").write_text("worker-1\n")
    text = message(spec("{type: ssh, hostfile: hosts}"))
    assert "launcher.hostfile: is no hostfile: line 1 is not `NAME slots=N`: worker-1" in text
    assert "launcher.hostfile: cannot be read" in message(spec("{type: ssh, hostfile: nowhere}"))


@pytest.mark.parametrize(
    ("launcher", "error"),
    [
        ("{type: ssh}", "launcher: needs hosts or a hostfile, one of the two"),
        ("{type: ssh, hosts: [{host: a, slots: 3}]}", "launcher.hosts: the hosts have too few slots"),
        ("{type: ssh, hosts: [{host: a, slots: 4}, {host: a}]}", "launcher.hosts.1.host: the host is named twice"),
        ("{type: ssh, hosts: [{host: -oProxyCommand=x}]}", "launcher.hosts.0.host"),
        ("{type: ssh, hosts: [{host: a, slots: 4}], min_ranks: 5}", "launcher.min_ranks: is more than training.ranks"),
        (
            "{type: ssh, hosts: [{host: a, slots: 4}], engine_hosts: [{host: b}, {host: a}]}",
            "launcher.engine_hosts.1.host: the host is named twice",
        ),
        ("{type: ray, nodes: 3}", "launcher.nodes: the ranks do not divide"),
        ("{type: ray, min_ranks: 9}", "launcher.min_ranks: is more than training.ranks"),
        (
            "{type: ray, address: 'ray://head:10001'}",
            "launcher.address: is no address of a cluster that this machine is a node of",
        ),
        ("{type: ray, address: head}", "launcher.address: is no address"),
        ("{type: ray, resources: {GPU: 1}}", "launcher.resources.GPU: has a key of its own"),
        ("{type: ray, resources: {a: 0}}", "launcher.resources.a: must be above 0"),
        ("{type: slurm, nodes: 3}", "launcher.nodes: the ranks do not divide"),
        ("{type: slurm, time_limit_minutes: 2}", "launcher.stop_before_seconds: no time is left to train in"),
        ("{type: slurm, options: [--nodes=2]}", "launcher.options.0: the launcher sets it"),
        ("{type: slurm, options: [-N2]}", "launcher.options.0: the launcher sets it"),
        ('{type: slurm, options: ["--account lab"]}', "launcher.options.0: is no option"),
        ("{type: local, nodes: 2}", "launcher.nodes: unknown field"),
        ("{type: pdsh}", "launcher.type"),
    ],
)
def test_a_launcher_that_cannot_work_is_refused_at_its_line(launcher, error):
    text = message(spec(launcher))
    assert error in text
    assert text.startswith("spec.yaml:25: ")


def test_a_launcher_is_no_part_of_what_a_run_is():
    from pipelines.planning.fingerprint import train_identity

    here = load_experiment(write(GOOD))
    there = load_experiment(write(spec("{type: slurm, nodes: 2, options: [--account=lab]}")))
    assert train_identity(here) == train_identity(there)
