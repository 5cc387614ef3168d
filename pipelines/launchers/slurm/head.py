"""Waits for a run's batch job: `python -m pipelines.launchers.slurm.head RUN_DIR`, started by the supervisor.

A job that is in the queue for the same work is waited for; else a new one is submitted. Exit codes are the trainer's.
"""

import signal
import sys
import time
from pathlib import Path

from pipelines.launchers.slurm import DIRECTORY, STATES_OF_THE_LIVING, job_state, slurm, submitted_job
from pipelines.launchers.slurm.batch import batch_log, batch_options, batch_script
from pipelines.processes.supervisor import log_size, log_tail
from pipelines.state import read_json, write_json
from rpg.files import now
from rpg.processes.exit_cause import STOPPED
from rpg.processes.parent import die_with_parent
from specs.schema.experiment import Experiment
from specs.schema.launchers import SlurmLauncher

_POLL_SECONDS = 0.2
_ASK_SECONDS = 5.0
"""Between two questions to Slurm's controller."""
_LATE_SECONDS = 30.0
"""How long a shared file system may take to show what an ended job has written."""


class SlurmHead:
    """One run's job."""

    def __init__(self, run_directory: Path) -> None:
        self._run = run_directory
        self._directory = run_directory / DIRECTORY
        self._log = batch_log(run_directory)
        self._spec = Experiment.model_validate_json((run_directory / "spec.json").read_bytes())
        assert isinstance(self._spec.launcher, SlurmLauncher)
        self._launcher = self._spec.launcher
        self._stopping = self._told = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Until the job has ended for good; returns its exit code."""
        self._directory.mkdir(exist_ok=True)
        self._log.parent.mkdir(exist_ok=True)
        began = log_size(self._log)
        job = self._running_job() or self._submit()
        return self._wait(job, began) if job else 1

    def _running_job(self) -> str:
        """The job that a killed command left for the same work; one for other work is ended."""
        job = submitted_job(self._run)
        if not job or job_state(job) not in STATES_OF_THE_LIVING:
            return ""
        if (self._directory / "stop").exists() or self._told_job() != self._work():
            slurm("scancel", job)
            while job_state(job) in STATES_OF_THE_LIVING and not self._stopping:
                time.sleep(_POLL_SECONDS)
            return ""
        _say(f"goes on with job {job}, which is {job_state(job)}")
        return job

    def _work(self) -> dict[str, object]:
        return {
            "fingerprint": read_json(self._run / "inputs.json").get("fingerprint"),
            "ranks": self._spec.training.ranks,
            "launcher": self._launcher.model_dump(mode="json"),
        }

    def _told_job(self) -> dict[str, object]:
        return {name: value for name, value in read_json(self._directory / "job.json").items() if name in self._work()}

    def _submit(self) -> str:
        for path in self._directory.iterdir():
            path.unlink()
        settings = {
            "ranks": self._spec.training.ranks,
            **{name: getattr(self._launcher, name) for name in ("nodes", "interface", "environment", "restarts")},
        }
        write_json(self._directory / "settings.json", settings)
        asked = slurm("sbatch", *batch_options(self._spec, self._run), given=batch_script(self._spec, self._run))
        if asked.returncode:
            _say(f"sbatch refused: {asked.stderr.strip()}")
            return ""
        job = asked.stdout.strip().partition(";")[0]
        write_json(self._directory / "job.json", {"job": job, "submitted_at": now(), **self._work()})
        _say(f"job {job} is submitted")
        return job

    def _wait(self, job: str, began: int) -> int:
        asked_at, gone_at, state = 0.0, 0.0, ""
        while True:
            if ended := read_json(self._directory / "ended.json"):
                return self._ended(int(ended["code"]), began)
            if self._stopping and not self._told:
                self._tell(job)
            if time.monotonic() - asked_at > _ASK_SECONDS:
                asked_at, before, state = time.monotonic(), state, job_state(job)
                if state != before:
                    _say(f"job {job}: {state}")
                if state == "PENDING" and before not in ("", "PENDING"):
                    # Slurm lets two minutes pass before it looks at a job that was queued again; in the first seconds
                    # it would refuse it ("Job credential revoked").
                    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+10")
                gone_at = (gone_at or time.monotonic()) if state not in (*STATES_OF_THE_LIVING, "UNKNOWN") else 0.0
            if gone_at and (self._stopping or time.monotonic() - gone_at > _LATE_SECONDS):
                _say(f"job {job} ended without a word: {state}")
                return STOPPED if self._stopping else self._ended(1, began)
            time.sleep(_POLL_SECONDS)

    def _ended(self, code: int, began: int) -> int:
        """Brings the cause here, where it is looked for."""
        if code not in (0, STOPPED):
            logs = [self._log, *sorted(self._log.parent.glob("train-[0-9]*.log"))]
            for log in logs:
                _say(f"the end of {log.name}:\n{log_tail(log, since=began if log == self._log else 0)}")
        return code

    def _tell(self, job: str) -> None:
        """Asks the ranks to save their state and end; the job is not to be queued again."""
        self._told = True
        (self._directory / "stop").touch()
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
    sys.exit(SlurmHead(Path(sys.argv[1])).run())
