"""Four runs train on two workers of the server profile while one of its parts dies, is cut off or falls asleep.

Whatever it is, every run finishes as if nothing had happened, nobody executes a run beside its owner, and the record,
`rpg runs` and the dashboard say the same.
"""

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import psutil
import pytest
from far_host import address_here, far_host, missing
from live import ELSEWHERE, SPEC, finished
from places import TESTS
from server_profile import BACKENDS, ServerLab, server_profile
from trainers import trainers
from waiting import wait_for

from pipelines.processes.stop import is_cancelled
from specs.machine.files import read_json

pytestmark = [pytest.mark.long, pytest.mark.needs(*BACKENDS)]

SEEDS = 4
STEPS = 40
"""Steps, of 16 responses, each of which is scored in 15 ms: about 12 s of training on an idle machine."""
ROLLOUTS = SEEDS * STEPS * 16
REWARD_SECONDS = (0.015 + number * 1e-6 for number in itertools.count())
"""Seconds of a response, other ones for each experiment: so each trains, and takes nothing of one before it,
while the rewards are the same."""
TAKEN_OVER_SECONDS = 30.0
"""Seconds from the death of a run's process until its flow run is scheduled again."""
CANCEL_SECONDS = 10.0
"""From `rpg cancel` on another host to the end of the run's last process."""
REPRODUCIBLE = """
    select seed, metrics.step, metrics.name, value from metrics join runs using (run_id)
    where experiment = '{experiment}'
    and not starts_with(metrics.name, 'time/') and not starts_with(metrics.name, 'tokens_per_second/')
    and not starts_with(metrics.name, 'memory/') order by all
"""
EVALUATED = """
    select seed, evaluations.step, dataset, metric, value from evaluations join runs using (run_id)
    where experiment = '{experiment}' order by all
"""


class Submitted:
    """An experiment that the server profile has taken."""

    def __init__(self, lab: ServerLab, name: str) -> None:
        self.lab = lab
        self.name = name
        sets = (f"name={name}", f"seeds={list(range(SEEDS))}", f"reward.seconds={next(REWARD_SECONDS)}")
        result = lab.rpg("submit", str(lab.spec), "--json", overrides=sets)
        assert result.code == 0, result.err
        self.flow_run_ids = {entry["run_id"]: entry["flow_run_id"] for entry in json.loads(result.out)}

    @property
    def run_ids(self) -> list[str]:
        return list(self.flow_run_ids)

    def trainers(self) -> dict[int, str]:
        """The processes that train now, and the runs that they train. A stopped one trains nothing."""
        training = {}
        for process in trainers(psutil.process_iter()):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                # What a trainer has just forked, to start another program, still has its command line.
                parent = process.parent()
                is_fork = parent is not None and bool(trainers([parent]))
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and not is_fork:
                    training.update((process.pid, run_id) for run_id in self.run_ids if run_id in words)
        return training

    def wait_until_training(self, runs: int = 2, step: int = 6) -> None:
        def are_training() -> bool:
            return len([1 for run_id in self.trainers().values() if self.lab.progress(run_id) >= step]) >= runs

        wait_for(are_training, timeout=300, what=f"{runs} runs at step {step}")

    def flow_states(self) -> dict[str, str]:
        """Run -> the state in which the dashboard shows it."""
        of_these = {"flow_runs": {"id": {"any_": list(self.flow_run_ids.values())}}}
        states = {each["id"]: each["state"]["type"] for each in self.lab.call("/flow_runs/filter", of_these)}
        return {run_id: states[flow_run_id] for run_id, flow_run_id in self.flow_run_ids.items()}

    def statuses(self) -> dict[str, str]:
        """Run -> its status on record."""
        return {run_id: self.lab.state(run_id).get("status", "") for run_id in self.run_ids}

    def wait_until_finished(self) -> None:
        """Until the dashboard says so of all: a crashed one is to be scheduled again. No run may have two trainers."""

        def all_have_ended() -> bool:
            training = list(self.trainers().values())
            assert len(training) == len(set(training)), f"a run has two trainers: {training}"
            time.sleep(0.5)
            try:
                return set(self.flow_states().values()) <= {"COMPLETED", "FAILED", "CANCELLED"}
            except OSError as error:  # The API is away, or its database is.
                if isinstance(error, HTTPError):
                    error.close()
                return False

        wait_for(all_have_ended, timeout=900, what=f"the end of {self.name}")

    def metrics(self) -> list[Any]:
        """All but times, rates and memory, which differ from run to run."""
        return self.lab.query(REPRODUCIBLE.format(experiment=self.name))

    def evaluations(self) -> list[Any]:
        return self.lab.query(EVALUATED.format(experiment=self.name))

    def leases(self, run_id: str) -> list[dict[str, Any]]:
        """Leases of those who executed a run, not of a worker that wrote down that nobody does."""
        leases = [read_json(path) for path in sorted(self.lab.home.run(run_id).glob("leases/*.json"))]
        return [lease for lease in leases if not lease["settles"]]

    def assert_as(self, undisturbed: "Submitted") -> None:
        """Every run finished, and is in every respect as the undisturbed one of its seed; nothing is left of them."""
        ends = dict.fromkeys(self.run_ids, "finished")
        assert self.statuses() == ends
        listed = json.loads(self.lab.rpg("runs", "--json").out)
        assert {run["run_id"]: run["status"] for run in listed if run["run_id"] in ends} == ends
        recorded = self.lab.query(f"select run_id, status from runs where experiment = '{self.name}'")
        assert dict(recorded) == ends
        assert self.flow_states() == dict.fromkeys(self.run_ids, "COMPLETED")

        of_these = {"flow_runs": {"id": {"any_": list(self.flow_run_ids.values())}}}
        tasks = self.lab.call("/task_runs/filter", of_these)
        assert {task["state"]["type"] for task in tasks} <= {"COMPLETED", "CANCELLED", "CRASHED", "FAILED"}
        for run_id in self.run_ids:
            leases = self.leases(run_id)
            assert leases[-1]["released"]
            for before, after in itertools.pairwise(leases):
                assert before["at"] <= after["since"], f"two held {run_id} at once: {leases}"
            self.assert_attempts_wrote_one_after_another(run_id)
        rows = f"from rollouts join runs using (run_id) where experiment = '{self.name}'"
        counted = self.lab.query(f"select count(*), count(distinct (run_id, rollouts.step, rollout_id)) {rows}")
        assert counted == [(ROLLOUTS, ROLLOUTS)]
        assert self.metrics() == undisturbed.metrics()
        assert self.evaluations() == undisturbed.evaluations() != []
        wait_for(lambda: not self.processes(), timeout=30, what="the end of what executed the runs")

    def assert_attempts_wrote_one_after_another(self, run_id: str) -> None:
        directory = self.lab.home.run(run_id)
        for number in range(2, 1 + len(list(directory.glob("attempts/*.json")))):
            began_at = datetime.fromisoformat(read_json(directory / f"attempts/{number:04}.json")["started_at"])
            before = [path.stat().st_mtime for path in directory.glob(f"segments/*/a{number - 1:04}-*")]
            assert max(before, default=0.0) <= began_at.timestamp(), f"attempt {number - 1} of {run_id} wrote later"

    def processes(self, *run_ids: str) -> list[list[str]]:
        """Command lines of what executes the runs, all of them unless some are named: flows, stages, and the like."""
        left = []
        for process in self.lab.processes():
            with contextlib.suppress(psutil.Error):
                words, flow_run_id = process.cmdline(), process.environ().get("PREFECT__FLOW_RUN_ID")
                for run_id in run_ids or self.run_ids:
                    if flow_run_id == self.flow_run_ids[run_id] or any(run_id in word for word in words):
                        left.append(words)
        return left


@pytest.fixture(scope="module")
def cluster(prepared_home: Path) -> Iterator[ServerLab]:
    """Two workers, and a spec whose reward takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS / "pipelines" / "slow_reward"), prepend=":")
        patch.setenv("RPG_TRUSTED_HOSTS", address_here())
        with server_profile(prepared_home, workers=2) as lab:
            text = SPEC.replace("{type: exact_match}", "{type: slow_match}")
            text = text.replace("steps: 6", f"steps: {STEPS}").replace("every_steps: 2", "every_steps: 5")
            lab.spec.write_text(text)
            yield lab


@pytest.fixture(scope="module")
def undisturbed(cluster: ServerLab) -> Submitted:
    """The runs to which nothing happens."""
    experiment = Submitted(cluster, "undisturbed")
    experiment.wait_until_finished()
    assert set(experiment.statuses().values()) == {"finished"}
    return experiment


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it has started, itself first."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def wait_until_replaced(lab: ServerLab, program: str, killed: set[int]) -> None:
    """Until as many processes of the program run as before, none of them a killed one."""
    count = len(lab.supervisor.states())

    def is_replaced() -> bool:
        states = [state for state in lab.supervisor.states() if state.program == program]
        running = {state.pid for state in states if state.state == "RUNNING"}
        return len(running) == len(states) and not running & killed

    wait_for(is_replaced, timeout=120, what=f"{program} after its kill")
    assert len(lab.supervisor.states()) == count


def flows(lab: ServerLab) -> list[psutil.Process]:
    """The processes that execute flows."""
    notes = [read_json(path) for path in lab.home.prefect.glob("flows/*.json")]
    return [psutil.Process(note["pid"]) for note in notes if psutil.pid_exists(note["pid"])]


def kill_a_worker(lab: ServerLab, _: Submitted) -> None:
    """`rpg worker` alone: its flows outlive it."""
    pid = lab.pids("worker")[0]
    psutil.Process(pid).kill()
    wait_until_replaced(lab, "worker", {pid})


def kill_a_worker_with_all_that_it_started(lab: ServerLab, experiment: Submitted) -> None:
    (pid,) = (pid for pid in lab.pids("worker") if any(flow in tree(pid) for flow in flows(lab)[:1]))
    victims = tree(pid)
    (run_id,) = (experiment.trainers()[each.pid] for each in victims if each.pid in experiment.trainers())
    kill_all(victims)
    killed_at = time.monotonic()
    # An idle machine takes about 6 s.
    wait_for(
        lambda: len(experiment.leases(run_id)) == 2 or experiment.flow_states()[run_id] != "RUNNING",
        timeout=TAKEN_OVER_SECONDS,
        what="the notice of a dead flow",
    )
    print(f"noticed after {time.monotonic() - killed_at:.1f} s")


def kill_a_flow(lab: ServerLab, _: Submitted) -> None:
    """The flow is also what ingests while its run trains."""
    flows(lab)[0].kill()


def kill_a_trainer(_: ServerLab, experiment: Submitted) -> None:
    psutil.Process(next(iter(experiment.trainers()))).kill()


def kill_an_api_process(lab: ServerLab, _: Submitted) -> None:
    pids = lab.pids("api")
    assert len(pids) == 2
    psutil.Process(pids[0]).kill()
    wait_until_replaced(lab, "api", {pids[0]})


def kill_redis(lab: ServerLab, _: Submitted) -> None:
    (pid,) = lab.pids("redis")
    psutil.Process(pid).kill()
    wait_until_replaced(lab, "redis", {pid})


def kill_postgres(lab: ServerLab, _: Submitted) -> None:
    (pid,) = lab.pids("postgres")
    psutil.Process(pid).kill()
    wait_until_replaced(lab, "postgres", {pid})


def kill_ingesters(lab: ServerLab, _: Submitted) -> None:
    """At different moments of their work."""
    program = "import sys; from storage.ingest import ingest; print('begun', flush=True); ingest(sys.argv[1])"
    moments = random.Random(0)
    ends = []
    for _try in range(8):
        ingester = lab.start_program(program, str(lab.root))
        assert ingester.stdout.readline() == "begun\n"
        time.sleep(moments.uniform(0.0, 0.4))
        ingester.kill()
        ends.append(ingester.wait())
    assert ends.count(-9) > 2, f"most had ended before they were killed: {ends}"


@pytest.mark.parametrize(
    "fault",
    [
        kill_a_worker,
        kill_a_worker_with_all_that_it_started,
        kill_a_flow,
        kill_a_trainer,
        kill_an_api_process,
        kill_redis,
        kill_postgres,
        kill_ingesters,
    ],
    ids=lambda fault: fault.__name__.replace("_", "-"),
)
def test_four_runs_finish_as_if_nothing_had_happened(
    cluster: ServerLab, undisturbed: Submitted, fault: Callable[[ServerLab, Submitted], None]
) -> None:
    experiment = Submitted(cluster, fault.__name__.replace("_", "-"))
    experiment.wait_until_training()
    fault(cluster, experiment)
    experiment.wait_until_finished()
    experiment.assert_as(undisturbed)


@contextlib.contextmanager
def worker_elsewhere(lab: ServerLab, *options: str, prefix: tuple[str, ...]) -> Iterator[int]:
    """The process id of a worker that is no program of `rpg up`, and is ready."""
    worker = lab.start_worker(*options, prefix=prefix)
    try:
        assert worker.stdout is not None
        assert any("started!" in line for line in worker.stdout), "the worker has ended"
        yield worker.pid
    finally:
        worker.terminate()
        worker.communicate(timeout=60)


def submitted_to_three(cluster: ServerLab, name: str, pid: int) -> tuple[Submitted, str]:
    """Four runs for the cluster's workers and another one. Returns them when that one trains, and the run it trains."""
    experiment = Submitted(cluster, name)

    def trained() -> list[str]:
        processes = {process.pid for process in tree(pid)}
        training = [run_id for process, run_id in experiment.trainers().items() if process in processes]
        return [run_id for run_id in training if cluster.progress(run_id) >= 6]

    return experiment, wait_for(trained, timeout=300, what="the worker's run")[0]


def test_a_worker_that_sleeps_for_a_minute_finds_its_run_done_by_another_and_changes_nothing(
    cluster: ServerLab, undisturbed: Submitted
) -> None:
    with worker_elsewhere(cluster, prefix=ELSEWHERE) as pid:
        experiment, run_id = submitted_to_three(cluster, "sleeping-worker", pid)
        asleep = tree(pid)
        executing = [flow.pid for flow in flows(cluster)] + list(experiment.trainers())
        ousted = [process for process in asleep if process.pid in executing]
        assert len(ousted) == 2
        for process in asleep:
            process.suspend()
        slept_at = time.monotonic()
        # 20 s without a heartbeat and one round of 5 s.
        wait_for(lambda: experiment.flow_states()[run_id] != "RUNNING", timeout=TAKEN_OVER_SECONDS, what="the notice")
        print(f"noticed after {time.monotonic() - slept_at:.1f} s")
        while time.monotonic() < slept_at + 60 or len(experiment.leases(run_id)) == 1:
            time.sleep(0.5)
        for process in reversed(asleep):
            process.resume()
        _, alive = psutil.wait_procs(ousted, timeout=10)
        assert alive == []
        experiment.wait_until_finished()
        experiment.assert_as(undisturbed)
        assert [lease["host"] == "elsewhere" for lease in experiment.leases(run_id)][:2] == [True, False]


def test_a_worker_that_the_network_cuts_off_for_a_minute_keeps_its_run(
    cluster: ServerLab, undisturbed: Submitted
) -> None:
    if reason := missing():
        pytest.skip(reason)
    address = urlsplit(cluster.url)
    assert address.port is not None
    with far_host(address.port) as host:
        url = f"http://{host.address}:{host.port}{address.path}"
        with worker_elsewhere(cluster, "--profile", url, prefix=host.prefix) as pid:
            experiment, run_id = submitted_to_three(cluster, "cut-off", pid)
            host.cut()
            time.sleep(60)
            host.mend()
            experiment.wait_until_finished()
            experiment.assert_as(undisturbed)
            assert len(experiment.leases(run_id)) == 1


def test_a_run_of_another_host_is_gone_ten_seconds_after_its_cancel_and_goes_on_where_it_was(
    cluster: ServerLab, undisturbed: Submitted
) -> None:
    with worker_elsewhere(cluster, prefix=ELSEWHERE) as pid:
        experiment, run_id = submitted_to_three(cluster, "cancelled-from-here", pid)
        assert experiment.leases(run_id)[-1]["host"] == "elsewhere"
        cancelling = cluster.start("cancel", run_id)
        # A busy machine takes seconds to start the command itself: the clock starts with its request.
        wait_for(lambda: is_cancelled(cluster.home.run(run_id)), timeout=60, what="the request")
        asked_at = time.monotonic()

        def is_gone() -> bool:
            # The command itself waits until the server knows it as well.
            return all(words[-2:] == ["cancel", run_id] for words in experiment.processes(run_id))

        wait_for(is_gone, timeout=CANCEL_SECONDS, what="the run's last process")
        print(f"gone after {time.monotonic() - asked_at:.1f} s")
        cancelled = finished(cancelling)
        assert cancelled.code == 0, cancelled.err
        assert experiment.statuses()[run_id] == "cancelled"
        wait_for(lambda: experiment.flow_states()[run_id] == "CANCELLED", timeout=30, what="the dashboard")
        experiment.wait_until_finished()

    resumed = cluster.rpg("resume", run_id)
    assert resumed.code == 0, resumed.err
    assert set(experiment.statuses().values()) == {"finished"}
    attempts = [read_json(path) for path in sorted(cluster.home.run(run_id).glob("attempts/*.json"))]
    assert [attempt["resumed_from_step"] >= 5 for attempt in attempts] == [False, True]
    assert experiment.metrics() == undisturbed.metrics()
    assert experiment.flow_states()[run_id] == "CANCELLED", "it was; another flow run has done the rest"
