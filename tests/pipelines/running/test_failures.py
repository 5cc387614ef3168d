"""Why stages end, as real errors show it, and what real runs do about it."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from live import Lab, finished, kill
from places import TESTS
from waiting import wait_for

from pipelines.home.runs import status_of
from pipelines.processes.supervisor import StageError
from pipelines.running import stages
from pipelines.running.failures import early_exit
from pipelines.running.progress import Silent
from specs.machine.exit_cause import EarlyExit, cause_of, forget_exits, note_exit, noted_exits
from specs.machine.files import write_json

LIMITS = TESTS / "pipelines" / "limits"
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"


def raised(work: Any) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (lambda: torch.empty(1 << 50), "out_of_memory"),
        (lambda: bytearray(1 << 60), "out_of_memory"),
        (full_disk, "disk_full"),
        (lambda: os.kill(1 << 30, 0), "other"),
        (lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(2, 2)), "program_error"),
        (lambda: int("seven"), "program_error"),
        (lambda: {}["answer"], "program_error"),
    ],
)
def test_a_real_error_tells_its_cause(work: Any, cause: str) -> None:
    assert cause_of(raised(work)) == cause


def test_the_cause_lies_under_the_error_that_it_led_to() -> None:
    def wrapped() -> None:
        try:
            torch.empty(1 << 50)
        except RuntimeError as error:
            raise ValueError("the step failed") from error

    assert cause_of(raised(wrapped)) == "out_of_memory"
    assert cause_of(OSError(errno.EACCES, "no")) == "other"


@pytest.mark.parametrize(
    ("code", "output", "killed_for_memory", "cause"),
    [
        (-9, "", True, "out_of_memory"),
        (-9, "", False, "lost_peer"),
        (247, "", False, "lost_peer"),
        (1, "exits with return code = -9", False, "lost_peer"),
        (143, "", False, "preempted"),
        (1, CUDA, False, "out_of_memory"),
        (1, f"SamplerOutOfMemoryError: no room: {CUDA}", False, "sampler_out_of_memory"),
        (1, "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer", False, "lost_peer"),
        (1, "OSError: [Errno 28] No space left on device", False, "disk_full"),
        (1, "RuntimeError: cause unknown", False, "other"),
        (1, "Traceback ...\nZeroDivisionError: division by zero", False, "program_error"),
        (1, "RuntimeError: CUDA error: device-side assert triggered", False, "program_error"),
        (-11, "KeyError: 3", False, "other"),
    ],
)
def test_an_ending_is_inferred_where_nothing_was_noted(
    tmp_path: Path, code: int, output: str, killed_for_memory: bool, cause: str
) -> None:
    assert early_exit(code, output, tmp_path, killed_for_memory=killed_for_memory).cause == cause


def test_a_rank_with_trouble_of_its_own_counts_before_those_that_miss_it(tmp_path: Path) -> None:
    for rank, cause in enumerate(("lost_peer", "out_of_memory", "lost_peer")):
        record = {"cause": cause, "message": "m", "microbatch_tokens": 7}
        write_json(tmp_path / "exits" / f"rank-{rank:05}.json", record)
    early = early_exit(1, "", tmp_path, killed_for_memory=False)
    assert (early.cause, early.microbatch_tokens) == ("out_of_memory", 7)


@pytest.mark.parametrize(("code", "output"), [(1, ""), (1, "Connection closed by peer")])
def test_an_error_without_a_name_counts_before_the_ranks_that_miss_it(tmp_path: Path, code: int, output: str) -> None:
    notes = (("lost_peer", "Connection closed by peer"), ("other", "KeyError: 'answer'"))
    for rank, (cause, message) in enumerate(notes):
        write_json(tmp_path / "exits" / f"rank-{rank:05}.json", {"cause": cause, "message": message})
    early = early_exit(code, output, tmp_path, killed_for_memory=False)
    assert (early.cause, early.message) == ("other", "KeyError: 'answer'")
    for killed in ((-9, output), (137, output), (1, "exits with return code = -11")):
        assert early_exit(*killed, tmp_path, killed_for_memory=False).cause == "lost_peer"


def test_an_exception_that_would_happen_again_counts_unless_a_rank_was_killed(tmp_path: Path) -> None:
    notes = (("lost_peer", "Connection closed by peer"), ("program_error", "index out of range in self"))
    for rank, (cause, message) in enumerate(notes):
        write_json(tmp_path / "exits" / f"rank-{rank:05}.json", {"cause": cause, "message": message})
    assert early_exit(1, "", tmp_path, killed_for_memory=False).cause == "program_error"
    assert early_exit(-9, "", tmp_path, killed_for_memory=False).cause == "lost_peer"
    (tmp_path / "exits" / "rank-00000.json").unlink()
    assert early_exit(-9, "", tmp_path, killed_for_memory=False).cause == "lost_peer"


def test_ranks_that_nccl_waited_for_in_vain_are_named(tmp_path: Path) -> None:
    said = (
        "[rank{}]:[E1127 20:01:02.3 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=900000) ran for 900001 milliseconds"
    )
    text = "\n".join([said.format(0), said.format(2), *["terminate called"] * 100])
    spec: Any = SimpleNamespace(
        stages=SimpleNamespace(train=SimpleNamespace(timeout_seconds=60.0)),
        training=SimpleNamespace(ranks=4),
        launcher=SimpleNamespace(collective_timeout_seconds=900.0),
    )
    execution: Any = SimpleNamespace(
        directory=tmp_path, plan=SimpleNamespace(experiment=spec), stop_requested=lambda: None, progress=Silent()
    )
    command = [sys.executable, "-c", f"import os\nprint({text!r}, flush=True)\nos.abort()"]
    with pytest.raises(StageError) as caught:
        stages._run_process(execution, SimpleNamespace(stage="train"), command, lambda: None)  # type: ignore[arg-type]
    assert caught.value.cause == "lost_peer"
    assert str(caught.value).startswith(
        "train was killed by SIGABRT: ranks 1, 3 did not arrive at a collective within 900 s"
        " (launcher.collective_timeout_seconds); the end of "
    )


def test_the_first_note_of_a_rank_stays(tmp_path: Path) -> None:
    first = EarlyExit("diverged", "first", 7)
    note_exit(tmp_path, first)
    note_exit(tmp_path, EarlyExit("other", "second"))
    assert noted_exits(tmp_path) == [early_exit(1, "", tmp_path, killed_for_memory=False)] == [first]
    forget_exits(tmp_path)
    assert noted_exits(tmp_path) == []


def test_a_note_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    note_exit(tmp_path, EarlyExit("diverged"))
    (tmp_path / "exits" / "rank-00001.json").write_text('{"cause": "out_of')
    assert noted_exits(tmp_path) == [EarlyExit("diverged")]


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """480 MiB of address space beside what a trainer has at its start."""
    monkeypatch.setenv("PYTHONPATH", f"{LIMITS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TEST_SPARE_MIB", "480")
    monkeypatch.setenv("RPG_FORK_STAGES", "0")  # the limit is set at the start of a process


@pytest.mark.long
@pytest.mark.usefixtures("little_memory")
def test_a_trainer_that_runs_out_of_memory_goes_on_with_half_of_its_microbatch(lab: Lab) -> None:
    """An address space that one pass over a step's tokens does not fit into, and one over half of them does."""
    large = ("model.config.intermediate_size=8192", "training.prompts_per_step=64", "training.group_size=8")
    few = (
        "training.steps=1",
        "training.minibatches=1",
        "stages.train.retry_delay_seconds=0",
        "evaluation.checkpoints=final",
    )
    result = lab.rpg("run", str(lab.spec), overrides=(*large, *few), timeout=400)
    assert result.code == 0, result.err
    halved = re.search(r"with microbatch_tokens (\d+) \(the batch and its gradient stay the same\)", result.err)
    assert halved, result.err
    (event,) = lab.query("SELECT step, message FROM events WHERE kind = 'attempt_failed'")
    assert event[1].startswith("out_of_memory: train ")
    assert event[1].endswith(f"; another attempt has microbatch_tokens {halved[1]}")
    assert lab.query("SELECT count(*) FROM attempts") == [(2,)]
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["cause"] is None


@pytest.mark.long
@pytest.mark.usefixtures("little_memory")
def test_a_sampler_that_runs_out_of_memory_ends_the_run_with_what_helps(lab: Lab) -> None:
    """An address space that the cache of 8192 responses, 96 KiB each, does not fit into, whatever a pass holds."""
    wide = ("num_attention_heads=8", "num_key_value_heads=8", "head_dim=256")
    many = ("training.prompts_per_step=32", "training.group_size=256", "rollout.max_concurrent=8192")
    overrides = (*(f"model.config.{name}" for name in wide), *many, "stages.train.retries=3")
    result = lab.rpg("run", str(lab.spec), overrides=overrides, timeout=400)
    assert result.code == 1
    assert "train: the sampler ran out of memory; lower rollout.max_concurrent: " in result.err
    assert lab.query("SELECT count(*) FROM attempts") == [(1,)]
    assert "failed (sampler_out_of_memory)" in lab.rpg("runs").out


@pytest.mark.long
def test_a_run_that_loses_a_rank_says_so_and_goes_on_by_itself(lab: Lab) -> None:
    many = ("training.ranks=2", "training.steps=40", "training.checkpoint.every_steps=2")
    process = lab.start("run", str(lab.spec), overrides=(*many, "stages.train.retry_delay_seconds=0"))
    (run_id,) = wait_for(lab.run_ids)
    wait_for(lambda: lab.progress(run_id) >= 3, what="some steps")
    ranks = [child for child in psutil.Process(lab.training_pid()).children() if "rpg.train" in child.cmdline()]
    assert len(ranks) == 2
    kill(ranks[1].pid)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "the other rank ends too"
    result = finished(process, 400)
    assert result.code == 0, result.err
    assert [row[0].split(":")[0] for row in lab.query("SELECT message FROM events WHERE kind = 'attempt_failed'")] == [
        "lost_peer"
    ]
    assert lab.query("SELECT max(step), count(DISTINCT step) FROM metrics") == [(40, 40)]


@pytest.mark.long
def test_a_failure_that_would_only_happen_again_is_not_tried_again(lab: Lab) -> None:
    guard = "training.guards=[{metric: entropy, above: 0.0}]"
    result = lab.rpg("run", str(lab.spec), overrides=(guard, "stages.train.retries=3"))
    assert result.code == 1
    assert lab.query("SELECT count(*) FROM attempts") == [(1,)]
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["cause"] == "diverged"
    shown = lab.rpg("runs")
    assert "failed (diverged)" in shown.out
    shown = lab.rpg("show", run_id)
    assert "guard_stopped" in shown.out


@pytest.mark.long
def test_a_report_that_takes_longer_than_its_limit_is_ended(lab: Lab) -> None:
    few = ("training.steps=1", "evaluation.checkpoints=final", "evaluation.samples_per_problem=1")
    result = lab.rpg("run", str(lab.spec), overrides=(*few, "stages.report.timeout_seconds=0.2"))
    assert result.code == 1
    assert "report ran longer than 0.2 s and was stopped" in result.err
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["cause"] == "hung"
    assert lab.state(run_id)["stages"]["evaluate"]["status"] == "finished"


@pytest.mark.long
def test_a_run_on_a_full_disk_fails_with_that_cause_and_goes_on_when_there_is_room(lab: Lab, tmp_path: Path) -> None:
    """Everything of the home is on that disk: the record, the leases, the logs and the server's database."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256m", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        small = Lab(Path(shutil.copytree(lab.root, disk / "home")), lab.spec)
        command = small.start("run", str(small.spec), overrides=("training.steps=60",))
        wait_for(lambda: any(small.progress(run_id) >= 3 for run_id in small.run_ids()), what="step 3")
        (run_id,) = small.run_ids()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        ended = finished(command)
        assert ended.code == 1, ended.err
        filler.unlink()
        state = small.state(run_id)
        assert (status_of(small.home, run_id), state["cause"]) == ("failed", "disk_full"), small.account(run_id)
        assert small.query("select status, cause from runs") == [("failed", "disk_full")]
        assert small.rpg("resume", run_id, overrides=()).code == 0
        assert small.state(run_id)["status"] == "finished"
    finally:
        lab.clean_up()
        subprocess.run(["umount", "-l", disk], check=True)
