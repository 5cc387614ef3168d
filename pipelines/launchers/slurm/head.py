"""Waits for a run's batch job: `python -m pipelines.launchers.slurm.head RUN_DIR [STAGE]`, started by the supervisor.

If a job for the same work is in the queue, it waits for that one; else it submits a new one. Exit codes are the ranks'.
"""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pipelines.launchers import LaunchedStage, job_file, launched_stage
from pipelines.launchers.slurm.job_files import JobFiles
from pipelines.launchers.slurm.queue import (
    ALIVE,
    JOB_MODULE,
    batch_log,
    excluded_nodes,
    job_state,
    sbatch,
    slurm,
    submitted_job,
)
from pipelines.processes.supervisor import log_size, log_tail
from specs.machine.exit_cause import STOPPED
from specs.machine.files import now, read_json, write_json
from specs.machine.liveness import place_of
from specs.machine.parent import die_with_parent
from specs.reading.recorded import recorded_spec
from specs.schema.launchers import SlurmLauncher

_POLL_SECONDS = 0.2
_ASK_SECONDS = 5.0
"""Seconds between two queries to Slurm's controller."""
_LATE_SECONDS = 30.0
"""How long a shared file system may take to show what an ended job has written."""
_SETTINGS_OF_LAUNCHER = ("nodes", "interface", "environment", "restarts", "srun_options", "srun_python")
"""Keys of the launcher's section that the job needs."""


class SlurmHead:
    """The process that waits for one run's job."""

    def __init__(self, run_directory: Path, stage: LaunchedStage) -> None:
        self._run = run_directory
        self._stage = stage
        self._files = JobFiles.of(run_directory)
        self._log = batch_log(run_directory, stage)
        self._spec = recorded_spec(run_directory)
        assert isinstance(self._spec.launcher, SlurmLauncher)
        self._launcher = self._spec.launcher
        self._stopping = self._asked_to_stop = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Waits until the job has ended for good; returns its exit code."""
        self._files.directory.mkdir(exist_ok=True)
        self._log.parent.mkdir(exist_ok=True)
        log_began = {log: log_size(log) for log in self._log.parent.iterdir()}
        job = self._running_job() or self._submit()
        return self._wait(job, log_began) if job else 1

    def _running_job(self) -> str:
        """Returns the job that a killed command left for the same work, if there is one; ends a job for other work."""
        job = submitted_job(self._run)
        if not job or job_state(job) not in ALIVE:
            return ""
        submitted, work = read_json(self._files.submitted), self._work()
        if self._files.stop.exists() or {name: submitted.get(name) for name in work} != work:
            _say(f"ends job {job}, which is for other work or of another version of this code")
            slurm("scancel", job)
            while job_state(job) in ALIVE and not self._stopping:
                time.sleep(_POLL_SECONDS)
            return ""
        _say(f"continues with job {job}, which is {job_state(job)}")
        return job

    def _work(self) -> dict[str, object]:
        """Returns the purpose of a job. It contains the module, because a job of another version of this code would not
        start; and `out`, because an evaluation left by a killed command writes to a directory that no longer exists.
        """
        if self._stage == "train":
            result = {"fingerprint": read_json(self._run / "inputs.json").get("fingerprint")}
        else:
            job = read_json(job_file(self._run, self._stage))
            result = {name: job[name] for name in ("fingerprint", "out")}
        return {
            **result,
            "ranks": self._spec.training.ranks,
            "launcher": self._launcher.model_dump(mode="json"),
            "module": JOB_MODULE,
        }

    def _submit(self) -> str:
        """Returns the number of a new job; empty if Slurm refuses it."""
        for path in self._files.directory.iterdir():
            path.unlink()
        settings = {
            "stage": self._stage,
            "ranks": self._spec.training.ranks,
            **{name: getattr(self._launcher, name) for name in _SETTINGS_OF_LAUNCHER},
            "engines": self._launcher.engines_of_nodes(self._spec.samplers),
            "gpus_per_engine": self._spec.rollout.gpus_per_sampler,
            **{name: getattr(self._spec.resources, name) for name in ("device", "threads")},
        }
        write_json(self._files.settings, settings)
        answer = sbatch(self._spec, self._run, self._stage)
        if answer.returncode:
            _say(f"sbatch refused: {answer.stderr.strip()}")
            return ""
        job = answer.stdout.strip().partition(";")[0]
        about = {"job": job, "submitted_at": now(), "place": place_of(self._files.directory)}
        write_json(self._files.submitted, {**about, **self._work()})
        _say(f"job {job} is submitted")
        return job

    def _wait(self, job: str, log_began: Mapping[Path, int]) -> int:
        asked_at, gone_at, state = 0.0, 0.0, ""
        while True:
            if ended := read_json(self._files.ended):
                return self._ended(int(ended["code"]), log_began)
            if self._stopping and not self._asked_to_stop:
                self._ask_to_stop(job)
            if time.monotonic() - asked_at > _ASK_SECONDS:
                asked_at, before, state = time.monotonic(), state, job_state(job)
                if state != before:
                    _say(f"job {job}: {state}")
                    if state == "PENDING":  # Slurm changes the nodes of no other job
                        self._exclude_failed(job)
                if state == "PENDING" and before not in ("", "PENDING"):
                    # Slurm waits two minutes before it considers a job that was queued again; in the first seconds it
                    # would refuse it ("Job credential revoked").
                    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+10")
                gone_at = (gone_at or time.monotonic()) if state not in (*ALIVE, "UNKNOWN") else 0.0
            if gone_at and (self._stopping or time.monotonic() - gone_at > _LATE_SECONDS):
                _say(f"job {job} ended without reporting an exit code: {state}")
                return STOPPED if self._stopping else self._ended(1, log_began)
            time.sleep(_POLL_SECONDS)

    def _exclude_failed(self, job: str) -> None:
        """Excludes the nodes that failed from those that Slurm may give the job, as far as enough others are left."""
        failed: list[str] = read_json(self._files.failed).get("hosts", [])
        hosts, before = failed, excluded_nodes(job) if failed else ""
        while hosts:
            excluded = ",".join(filter(None, [before, *(host for host in hosts if host not in before.split(","))]))
            answer = sbatch(self._spec, self._run, self._stage, "--test-only", excluding=excluded)
            if answer.returncode == 0:
                answer = slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}")
                _say(f"job {job}: excludes {excluded}, {answer.stderr.strip() or 'where a loss began'}")
                return
            hosts = hosts[1:]  # rather the last node that failed than none
        if failed:
            _say(f"job {job}: {', '.join(failed)} failed, but too few other nodes are left")

    def _ended(self, code: int, log_began: Mapping[Path, int]) -> int:
        """Prints the ends of the job's logs if it failed: users look for the cause in this process's output. Returns
        the code.

        Args:
            log_began: the length of each log at the beginning; 0 for a log that did not exist.
        """
        if code not in (0, STOPPED):
            for log in [self._log, *sorted(self._log.parent.glob(f"{self._stage}-[0-9]*.log"))]:
                _say(f"the end of {log.name}:\n{log_tail(log, since=log_began.get(log, 0))}")
        return code

    def _ask_to_stop(self, job: str) -> None:
        """Asks the ranks to save their state and end, and keeps the job from being queued again."""
        self._asked_to_stop = True
        self._files.stop.touch()
        if job_state(job) == "PENDING":
            slurm("scancel", job)
        else:
            slurm("scancel", "--signal=TERM", job)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(SlurmHead(Path(sys.argv[1]), launched_stage(sys.argv[2:])).run())
