"""The cause of a stage's failure, and the changes that the next attempt makes."""

import re
import signal
from pathlib import Path
from typing import Any

from pipelines.processes.supervisor import StageError, StageStoppedError
from pipelines.running.run import RunExecution
from specs.errors import RpgError
from specs.machine.exit_cause import RETRIED, SIGNALLED, Cause, EarlyExit, cause_in, cause_of, noted_exits

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL)
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM, 256 - signal.SIGTERM)
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills() -> int:
    """Returns how many processes the kernel has killed so far because memory ran out: in this control group, else on
    this machine."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip().lstrip("/")
        counters = (Path("/sys/fs/cgroup") / own / "memory.events", Path("/proc/vmstat"))
    except OSError:
        return 0
    for counter in counters:
        try:
            if count := _OOM_KILLS.search(counter.read_text(encoding="utf-8")):
                return int(count[1])
        except OSError:
            continue
    return 0


def early_exit(code: int, output: str, run_dir: Path, *, killed_for_memory: bool) -> EarlyExit:
    """Returns how a process with an exit code other than 0 ended.

    Args:
        code: its exit code, or the launcher's, which passes on its rank's.
        output: the end of its output.
        run_dir: the directory in which ranks note their exits. A note of a rank's own error counts before a note of a
            rank that only lost contact with another rank. The same applies to a note of an error without a known cause,
            unless a rank was killed: a killed rank leaves no note.
        killed_for_memory: whether the kernel has killed a process for memory meanwhile.
    """
    signalled = code < 0 or code > SIGNALLED or "return code = -" in output
    # A signal ends a process without an exception of its own: recorded ones came before, or from the loss.
    unnamed = ("other", "program_error") if signalled else ("other",)
    last = ("lost_peer", *unnamed) if signalled else ("other", "lost_peer")
    notes = sorted(noted_exits(run_dir), key=lambda note: 1 + last.index(note.cause) if note.cause in last else 0)
    killed = code in _KILLED
    if killed and killed_for_memory:
        return EarlyExit("out_of_memory", "the kernel killed it because memory ran out")
    if notes and notes[0].cause not in unnamed:
        return notes[0]
    cause = cause_in(output)
    if notes and not signalled and cause in ("lost_peer", "other", "program_error"):
        return EarlyExit("other", notes[0].message)
    if cause not in unnamed:
        return EarlyExit(cause)
    if killed or "return code = -9" in output:
        return EarlyExit("lost_peer", "a process was killed by SIGKILL")
    return EarlyExit("preempted" if code in _TERMINATED else "other")


def cause_of_error(error: BaseException | None) -> Cause:
    """Returns the cause of the error that ended a stage; `other` without an error."""
    if isinstance(error, StageError):
        return error.cause
    if isinstance(error, (StageStoppedError, KeyboardInterrupt)):
        return "stopped"
    if isinstance(error, RpgError):
        return "user_error"
    return cause_of(error) if error else "other"


def failure_record(execution: RunExecution, stage: str, error: BaseException) -> dict[str, Any]:
    """Returns the record of a failure for the stage's next attempt.

    It has the cause in a word and its message. The first time that training runs out of memory, it also has the token
    budget of the next attempt: half of the largest microbatch that was tried.
    """
    cause = cause_of_error(error)
    message = (str(error).splitlines() or [""])[0].partition("; the end of ")[0]
    kept: dict[str, Any] = {"cause": cause, "failure": f"{cause}: {message}"}
    if cause == "out_of_memory" and stage == "train" and isinstance(error, StageError):
        record, in_spec = execution.state.stage(stage), execution.plan.experiment.training.microbatch_tokens
        if token_budget(record, in_spec) != in_spec:
            lowered = record["microbatch_tokens"]
            kept["microbatch_tokens"] = lowered | {"failures": lowered["failures"] + 1}
        else:
            half = max(1, min(in_spec, error.microbatch_tokens or in_spec) // 2)
            kept["microbatch_tokens"] = {"of": in_spec, "taken": half, "failures": 1}
            kept["failure"] += f"; another attempt has microbatch_tokens {half}"
    return kept


def may_retry(execution: RunExecution, stage: str, error: Exception) -> bool:
    """Returns whether another attempt may succeed."""
    cause = cause_of_error(error)
    if cause == "out_of_memory":
        lowered = execution.state.stage(stage).get("microbatch_tokens") or {}
        return stage == "train" and lowered.get("failures") == 1
    return cause in RETRIED


def retry_inputs(execution: RunExecution) -> dict[str, Any]:
    """Returns the trainer's inputs that follow from earlier attempts: the token budget to use, and the last failure."""
    record = execution.state.stage("train")
    tokens = token_budget(record, execution.plan.experiment.training.microbatch_tokens)
    return {"microbatch_tokens": tokens, "failure": record.get("failure") or ""}


def retry_difference(execution: RunExecution, stage: str) -> str:
    """Describes the changes of the next attempt to the user; empty if it changes nothing."""
    record, in_spec = execution.state.stage(stage), execution.plan.experiment.training.microbatch_tokens
    if record.get("cause") != "out_of_memory" or stage != "train":
        return ""
    return f" with microbatch_tokens {token_budget(record, in_spec)} (the batch and its gradient stay the same)"


def token_budget(record: dict[str, Any], in_spec: int) -> int:
    """Returns the tokens of a microbatch: those of the spec, or fewer if an attempt ran out of memory.

    Args:
        record: the train stage's record in state.json.
        in_spec: training.microbatch_tokens.
    """
    lowered = record.get("microbatch_tokens") or {}
    return int(lowered["taken"]) if lowered.get("of") == in_spec else in_spec
