"""Commands and a real Ray cluster: their messages before anything is queued, studies, and cancel."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import Lab, finished
from ray_cluster import RayCluster
from waiting import wait_for

from specs.machine.files import read_json
from tests.pipelines.launchers.ray.test_ray import WHY_NOT, nothing_left, of
from tests.pipelines.launchers.ray.test_ray import cluster as cluster  # the fixture
from tests.pipelines.studies.test_study_live import STUDY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def write(lab: Lab, cluster: RayCluster, *, training: dict[str, Any] | None = None, **launcher: Any) -> None:
    """The lab's spec, with ranks on the cluster."""
    spec = yaml.safe_load(lab.spec.read_text())
    spec["training"] |= training or {}
    lab.spec.write_text(yaml.safe_dump(spec | {"launcher": cluster.section(**launcher)}, sort_keys=False))


def test_a_run_that_another_shell_cancels_leaves_no_actor_and_no_placement_group(lab: Lab, cluster: RayCluster) -> None:
    write(lab, cluster, nodes=2, training={"ranks": 2, "steps": 400})
    command = lab.start("run", str(lab.spec), prefix=cluster.prefix(0))
    wait_for(lambda: any(lab.progress(run) >= 2 for run in lab.run_ids()), timeout=400, what="a step")
    (run_id,) = lab.run_ids()
    assert len(of(cluster, "ray::Carrier")) == 2
    cancelled = lab.rpg("cancel", run_id)
    assert cancelled.code == 0, cancelled.err
    ended = finished(command, timeout=120)
    assert lab.state(run_id)["status"] == "cancelled", ended.err
    assert list(lab.home.run(run_id).glob("checkpoints/step-*")), "its state is saved"
    wait_for(lambda: nothing_left(cluster) and not of(cluster, "ray::Carrier"), timeout=60, what="the end of all")


def test_a_study_of_eight_trials_runs_four_at_a_time(lab: Lab, cluster: RayCluster) -> None:
    write(lab, cluster)
    study = lab.spec.with_name("study.yaml")
    study.write_text(STUDY.replace("training.steps: 4", "training.steps: 2"))
    done = lab.rpg("study", "run", str(study), "--parallel", "4", prefix=cluster.prefix(0), timeout=1700)
    assert done.code == 0, done.err
    trials = read_json(lab.home.study("clips") / "study.json")["trials"]
    assert [trial["state"] for trial in trials] == ["finished"] * 8
    spans = [
        (
            read_json(lab.home.run(trial["run_id"]) / "launch.json")["started_at"],
            lab.state(trial["run_id"])["stages"]["train"]["ended_at"],
        )
        for trial in trials
    ]
    assert max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans) == 4, spans
    wait_for(lambda: nothing_left(cluster), timeout=60, what="the end of every process")


LACKS_A_NODE = "no node has 3 CPU; nodes have 2 CPU; 2 CPU"


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize(
    ("training", "launcher", "said"),
    [
        ({"ranks": 3}, {}, LACKS_A_NODE),
        (
            {},
            {"resources": {"accelerator_type:H100": 0.5}},
            "no node has 0.5 accelerator_type:H100, 1 CPU; nodes have 2 CPU; 2 CPU",
        ),
        ({"ranks": 6, "prompts_per_step": 6}, {"nodes": 3}, "6 CPU are needed, the cluster has 4 CPU"),
        (
            {},
            {"address": "127.0.0.1:1"},
            "no Ray cluster accepts this command at 127.0.0.1:1: [Errno 111] Connection refused",
        ),
    ],
)
def test_a_cluster_that_cannot_hold_a_run_is_told_of_before_anything_is_queued(
    lab: Lab, cluster: RayCluster, verb: str, training: dict[str, Any], launcher: dict[str, Any], said: str
) -> None:
    write(lab, cluster, training=training, **launcher)
    done = lab.rpg(verb, str(lab.spec), prefix=cluster.prefix(0))
    assert said in done.err
    assert f"{lab.spec}:" in done.err, "the file and its line"
    assert done.code == (2 if verb == "run" else 0)
    assert not lab.run_ids()


def test_a_cluster_of_another_version_of_ray_is_told_of(lab: Lab, cluster: RayCluster) -> None:
    write(lab, cluster)
    was = cluster.pretend_version("2.9.0")
    try:
        planned = lab.rpg("plan", str(lab.spec), prefix=cluster.prefix(0))
        examined = lab.rpg("doctor", str(lab.spec), "--json", prefix=cluster.prefix(0))
    finally:
        cluster.pretend_version(was)
    assert "Ray: 2.9.0" in planned.err
    (found,) = (each for each in json.loads(examined.out) if each["name"] == "ray cluster")
    assert found["status"] == "broken"
    assert "Ray: 2.9.0" in found["message"]


@pytest.mark.parametrize(
    ("ranks", "status", "said"), [(2, "ok", "1 CPU; 1 CPU"), (6, "broken", "no node has 3 CPU; nodes have 2 CPU")]
)
def test_the_doctor_holds_a_clusters_resources_against_the_runs_and_asks_every_node(
    lab: Lab, cluster: RayCluster, ranks: int, status: str, said: str
) -> None:
    write(lab, cluster, nodes=2, training={"ranks": ranks, "prompts_per_step": 6})
    examined = json.loads(lab.rpg("doctor", str(lab.spec), "--json", prefix=cluster.prefix(0)).out)
    (room,) = (each for each in examined if each["name"] == "room for the run")
    assert (room["status"], said in room["message"]) == (status, True), room
    hosts = [each["status"] for each in examined if each["name"].startswith("host ")]
    assert hosts == (["ok", "ok"] if status == "ok" else [])


def test_nodes_that_do_not_share_the_home_are_named_by_doctor_and_refused_by_run(
    lab: Lab, cluster: RayCluster, tmp_path: Path
) -> None:
    write(lab, cluster, nodes=2, training={"ranks": 2})
    (tmp_path / "another").mkdir()
    cluster.restart(1, "mount", "--bind", str(tmp_path / "another"), str(lab.root))
    try:
        examined = json.loads(lab.rpg("doctor", str(lab.spec), "--json", prefix=cluster.prefix(0)).out)
        done = lab.rpg("run", str(lab.spec), prefix=cluster.prefix(0))
    finally:
        cluster.restart(1)
    broken = [each["message"] for each in examined if each["status"] == "broken"]
    assert broken == ["does not see this home; RPG_HOME must be the same directory on all hosts"]
    assert done.code == 2
    assert "does not see the run's directory" in done.err
    assert "launcher ray needs RPG_HOME on a file system that all hosts share, at the same path" in done.err
