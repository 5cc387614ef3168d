"""Why a stage's process ended early, and what another attempt does differently."""

import re
import signal
from pathlib import Path
from typing import Any

from pipelines.processes.supervisor import StageError, StageStoppedError
from pipelines.running.run import Execution
from rpg.processes.exit_cause import RETRIED, SIGNALLED, Cause, EarlyExit, cause_in, cause_of, noted_exits
from specs.errors import RpgError

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL)
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM, 256 - signal.SIGTERM)
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills() -> int:
    """How many processes of this control group, or else of this machine, the kernel has killed for memory so far."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip().lstrip("/")
        counters = (Path("/sys/fs/cgroup") / own / "memory.events", Path("/proc/vmstat"))
    except OSError:
        return 0
    for counter in counters:
        try:
            if found := _OOM_KILLS.search(counter.read_text(encoding="utf-8")):
                return int(found[1])
        except OSError:
            continue
    return 0


def early_exit(code: int, output: str, run_dir: Path, *, killed_for_memory: bool) -> EarlyExit:
    """How a process ended that did not exit with 0.

    Args:
        code: its exit code, or that of the launcher which passed on its rank's.
        output: the end of what it printed.
        run_dir: where ranks note their exits. A note of a rank's own trouble counts before one of a rank that only
            misses another; so does one whose cause has no name, unless a rank was killed, which leaves no note.
        killed_for_memory: whether the kernel has killed a process for memory meanwhile.
    """
    signalled = code < 0 or code > SIGNALLED or "return code = -" in output
    last = ("lost_peer", "other") if signalled else ("other", "lost_peer")
    notes = sorted(noted_exits(run_dir), key=lambda note: 1 + last.index(note.cause) if note.cause in last else 0)
    killed = code in _KILLED
    if killed and killed_for_memory:
        return EarlyExit("out_of_memory", "the kernel killed it for memory")
    if notes and notes[0].cause != "other":
        return notes[0]
    cause = cause_in(output)
    if notes and not signalled and cause in ("lost_peer", "other"):
        return EarlyExit("other", notes[0].message)
    if cause != "other":
        return EarlyExit(cause)
    if killed or "return code = -9" in output:
        return EarlyExit("lost_peer", "a process was killed by SIGKILL")
    return EarlyExit("preempted" if code in _TERMINATED else "other")


def cause_of_error(error: BaseException | None) -> Cause:
    """Of whatever ends a stage."""
    if isinstance(error, StageError):
        return error.cause
    if isinstance(error, (StageStoppedError, KeyboardInterrupt)):
        return "stopped"
    return "user_error" if isinstance(error, RpgError) else cause_of(error) if error else "other"


def after_failure(execution: Execution, stage: str, error: BaseException) -> dict[str, Any]:
    """What a stage's record keeps of a failure, for the next attempt: its cause, and after running out of memory half
    of the largest pass as the token budget, once."""
    cause, said = cause_of_error(error), (str(error).splitlines() or [""])[0].partition("; the end of ")[0]
    record = execution.state.stage(stage)
    kept: dict[str, Any] = {"cause": cause, "failure": f"{cause}: {said}"}
    if cause == "out_of_memory" and stage == "train" and isinstance(error, StageError):
        spec = execution.plan.experiment.training.microbatch_tokens
        again = budget(record, spec) != spec
        tried = min(spec, error.microbatch_tokens or spec)
        kept["microbatch_tokens"] = {
            **(record["microbatch_tokens"] if again else {"of": spec, "taken": max(1, tried // 2)}),
            "failures": 1 + (record["microbatch_tokens"]["failures"] if again else 0),
        }
        kept["failure"] += "" if again else f"; another attempt has microbatch_tokens {max(1, tried // 2)}"
    return kept


def may_retry(execution: Execution, stage: str, error: Exception) -> bool:
    """Whether another attempt may go better."""
    cause = cause_of_error(error)
    if cause == "out_of_memory":
        kept = execution.state.stage(stage).get("microbatch_tokens") or {}
        return stage == "train" and kept.get("failures") == 1
    return cause in RETRIED


def told_by_failures(execution: Execution) -> dict[str, Any]:
    """What the trainer is told of the attempts before it."""
    record = execution.state.stage("train")
    tokens = budget(record, execution.plan.experiment.training.microbatch_tokens)
    return {"microbatch_tokens": tokens, "failure": record.get("failure") or ""}


def difference(execution: Execution, stage: str) -> str:
    """What another attempt does differently, in words."""
    record, spec = execution.state.stage(stage), execution.plan.experiment.training.microbatch_tokens
    if record.get("cause") != "out_of_memory" or stage != "train":
        return ""
    return f" with microbatch_tokens {budget(record, spec)} (the batch and its gradient stay the same)"


def budget(record: dict[str, Any], spec: int) -> int:
    """The token budget of a pass: halved where that of the spec ran out of memory before."""
    kept = record.get("microbatch_tokens") or {}
    return int(kept["taken"]) if kept.get("of") == spec else spec
