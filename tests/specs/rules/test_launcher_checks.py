"""Allowed sections of launchers, and the errors of one that cannot work."""

import pytest
from spec_text import GOOD, message, write

from specs.loader import load_experiment


def spec(launcher: str, ranks: int = 4) -> str:
    return GOOD + f"  ranks: {ranks}\nlauncher: {launcher}\n"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "error"),
    [
        (
            "{type: ssh, hosts: [{host: a}]}",
            "launcher.type: unknown type\n    25 | launcher: {type: ssh, hosts: [{host: a}]}\n"
            '  given: "ssh"    allowed: local, slurm, ray\n  hint: several machines are a Ray cluster: `ray start` on '
            "each, then launcher: {type: ray} (docs/clusters.md)\n",
        ),
        ("{type: ray, nodes: 3}", "launcher.nodes: the ranks do not divide"),
        ("{type: ray, min_ranks: 9}", "launcher.min_ranks: is more than training.ranks"),
        (
            "{type: ray, address: 'ray://head:10001'}",
            "launcher.address: is not the address of a cluster with this machine as a node",
        ),
        ("{type: ray, address: head}", "launcher.address: is not the address"),
        ("{type: ray, resources: {GPU: 1}}", "launcher.resources.GPU: has a key of its own"),
        ("{type: ray, resources: {a: 0}}", "launcher.resources.a: must be above 0"),
        ("{type: slurm, nodes: 3}", "launcher.nodes: the ranks do not divide"),
        ("{type: slurm, time_limit_minutes: 2}", "launcher.stop_before_seconds: no time is left for training"),
        ("{type: slurm, options: [--nodes=2]}", "launcher.options.0: the launcher sets it"),
        ("{type: slurm, options: [-N2]}", "launcher.options.0: the launcher sets it"),
        ('{type: slurm, options: ["--account lab"]}', "launcher.options.0: is not an option"),
        ("{type: slurm, srun_options: [--ntasks=2]}", "launcher.srun_options.0: the launcher sets it"),
        ("{type: slurm, srun_options: [--mpi=none, -N2]}", "launcher.srun_options.1: the launcher sets it"),
        ("{type: slurm, srun_options: [container]}", "launcher.srun_options.0: is not an option"),
        ("{type: slurm, options: [-]}", "launcher.options.0: is not an option"),
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
