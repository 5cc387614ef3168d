"""`benchmarks/gpu.py campaign`: each step ends in its time with all that it has started, and no row is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from waiting import is_gone, wait_for

from benchmarks.campaign import rows_of, tables
from benchmarks.gpu import STEPS, with_shares

_STEPS = '''
import os, subprocess, sys, time
from pathlib import Path

def hang(device, place):
    """Starts a process in a session of its own, whose parent ends, and waits."""
    subprocess.run([sys.executable, "-c", """
import subprocess, sys
detached = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(sys.argv[1], "w").write(str(detached.pid) + " ")
""", place], check=True)
    with open(place, "a") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

def fail(device, why):
    raise ValueError(why)

def measure(device, figure):
    return {"figure": figure}

def prepare(device, place="", **_):
    if place.endswith(".turns"):
        open(place, "a").write(f"ready {os.getpid()}\\n")

def wait(device, place, seconds):
    """Says when it computes."""
    for word in ("begins", "ends"):
        open(place, "a").write(f"{word} {os.getpid()}\\n")
        time.sleep(seconds)
    return {"pid": os.getpid()}

def start_elsewhere(device, place):
    """Leaves a child with another TMPDIR behind, as programs in a sandbox have."""
    child = subprocess.Popen(["sleep", "1000"], env={"PATH": os.environ["PATH"], "TMPDIR": "/tmp"})
    open(place, "w").write(str(child.pid))
    time.sleep(1000)
'''
_CAMPAIGN = """
import sys
from pathlib import Path
from benchmarks.campaign import Step, command_line

place = sys.argv[1]
steps = [
    Step("one", "hangs", "steps_of_a_test:hang", {"place": place}),
    Step("one", "fails", "steps_of_a_test:fail", {"why": "it may"}),
    Step("two", "measures", "steps_of_a_test:measure", {"figure": 1.5}),
    Step("two", "lacks", "steps_of_a_test:measure", package="no_such_package"),
]
sys.exit(command_line(sys.argv[2:], steps, about=""))
"""


def _campaign(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "steps_of_a_test.py").write_text(_STEPS)
    command = [sys.executable, "-c", _CAMPAIGN, str(tmp_path / "pids"), "campaign", "--device", "cpu"]
    command += ["--rows", str(tmp_path / "rows.jsonl"), *options]
    path = f"{ROOT}:{tmp_path}"
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.more
def test_a_step_that_hangs_is_ended_in_time_with_all_that_it_started_and_the_next_ones_are_made(tmp_path: Path) -> None:
    done = _campaign(tmp_path, "--step-limit", "12")
    assert done.returncode == 1, done.stderr
    rows = {step: row for (_, step), row in rows_of(tmp_path / "rows.jsonl").items()}
    assert list(rows) == ["hangs", "fails", "measures"]
    assert rows["hangs"]["failed"] == "longer than 12 s"
    assert rows["hangs"]["seconds"] <= 12
    assert rows["fails"]["failed"] == "exited with 1"
    assert rows["fails"]["log"].endswith("ValueError: it may")
    assert rows["measures"]["figures"] == {"figure": 1.5}
    assert "lacks: not made, no_such_package is not installed" in done.stdout
    detached, step = map(int, (tmp_path / "pids").read_text().split())
    for pid in (detached, step):
        wait_for(lambda pid=pid: is_gone(pid), what=f"the end of {pid}")


_TURNS = """
import sys
from benchmarks.campaign import Step, command_line

place = sys.argv[1]
steps = [
    Step("one", f"step {number}", "steps_of_a_test:wait", {"place": place, "seconds": 0.5}, alone=number > 2)
    for number in range(1, 5)
]
sys.exit(command_line(sys.argv[2:], steps, about=""))
"""


@pytest.mark.more
def test_steps_whose_times_count_compute_alone_and_are_ready_before_their_turn(tmp_path: Path) -> None:
    (tmp_path / "steps_of_a_test.py").write_text(_STEPS)
    place, rows = tmp_path / "pids.turns", tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", _TURNS, str(place), "campaign", "--device", "cpu", "--rows", str(rows)]
    path = f"{ROOT}:{tmp_path}"
    done = subprocess.run([*command, "--at-once", "3"], cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr
    pids = {step: str(row["figures"]["pid"]) for (_, step), row in rows_of(rows).items()}
    events = [line.split() for line in place.read_text().splitlines()]
    at = {(word, pid): number for number, (word, pid) in enumerate(events)}
    one, two, three, four = (pids[f"step {number}"] for number in range(1, 5))
    assert max(at["begins", one], at["begins", two]) < min(at["ends", one], at["ends", two]), "both at once"
    assert at["ready", three] < min(at["ends", one], at["ends", two]), "it imports meanwhile"
    assert at["begins", three] > max(at["ends", one], at["ends", two])
    assert at["begins", four] > at["ends", three]


_ELSEWHERE = """
import sys
from benchmarks.campaign import Step, command_line

step = Step("one", "leaves a child", "steps_of_a_test:start_elsewhere", {"place": sys.argv[1]})
sys.exit(command_line(sys.argv[2:], [step], about=""))
"""


@pytest.mark.more
def test_a_child_with_another_temporary_directory_ends_with_its_step_too(tmp_path: Path) -> None:
    (tmp_path / "steps_of_a_test.py").write_text(_STEPS)
    command = [sys.executable, "-c", _ELSEWHERE, str(tmp_path / "pid"), "campaign", "--device", "cpu"]
    command += ["--rows", str(tmp_path / "rows.jsonl"), "--step-limit", "9"]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": os.environ["PATH"]}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: is_gone(pid), what=f"the end of {pid}")


def test_a_later_call_makes_what_is_missing_and_fails_again_only_where_it_is_told_to(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    failed = {"step": "hangs", "part": "one", "device": "cpu", "seconds": 1, "failed": "exited with 1", "log": ""}
    rows.write_text(json.dumps(failed) + "\n" + json.dumps({**failed, "step": "fails"}) + "\n" + '{"step": "meas')
    done = _campaign(tmp_path, "--step-limit", "30")
    assert done.returncode == 1
    assert "measures, " in done.stdout
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()[3:]] == ["measures"]
    assert _campaign(tmp_path, "--steps", "measures").returncode == 0
    _campaign(tmp_path, "--steps", "fails", "--again")
    assert rows_of(rows)["cpu", "fails"]["log"].endswith("ValueError: it may")


def test_tables_come_from_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(
            json.dumps({"part": part, "device": "cuda", "seconds": 1, "step": step, **rest})
            for part, step, rest in (
                ("learner", "rates", {"figures": {"products_tflops": 500.0}}),
                ("learner", "update", {"figures": {"tflops": 250.0, "passes_seconds": 3.0, "roofline_seconds": 2.0}}),
                ("sampler", "slots", {"failed": "exited with 1", "log": "no\nOutOfMemoryError: no room"}),
            )
        )
    )
    shown = list(tables(list(rows_of(tmp_path / "rows.jsonl").values()), with_shares))
    assert "| update | 250 | 3 | 2 | 0.5 | 1.5 |" in shown
    assert shown[-1] == "- slots: FAILED, exited with 1: OutOfMemoryError: no room"
    done = _campaign(tmp_path, "--show")
    assert done.returncode == 0
    assert "| update | 250 | 3 | 2 |" in done.stdout.splitlines()


def test_every_step_has_a_name_of_its_own() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.long
def test_a_step_of_the_learner_and_one_of_the_sampler_run_on_a_cpu(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    names = ["1.7B, recomputing some", "1.7B, 64 slots, no cuDNN kernel, keys in 64s"]
    command = [sys.executable, "benchmarks/gpu.py", "campaign", "--device", "cpu", "--rows", str(rows)]
    done = subprocess.run([*command, "--steps", *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    update, sampled = (row["figures"] for row in rows_of(rows).values())
    assert update["tokens_per_second"] > 0
    assert update["roofline_seconds"] > 0
    assert sampled["tokens_per_second"] > 0


@pytest.mark.more
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_steps_of_vllm_run_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/gpu.py", "campaign", "--device", "cpu", "--rows", str(rows)]
    done = subprocess.run([*command, "--parts", "vllm"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {step: row["figures"] for (_, step), row in rows_of(rows).items()}
    assert made.keys() == {step.name for step in STEPS if step.part == "vllm" and not step.lacks("cpu")}
    assert made["1.7B, 256 slots, vLLM"]["logprob_difference"] < 1e-4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_campaign_runs_on_a_cpu(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/gpu.py", "campaign", "--device", "cpu", "--rows", str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {step for _, step in rows_of(rows)}
    assert made == {step.name for step in STEPS if not step.lacks("cpu")}
    figures = rows_of(rows)["cpu", "noise, 1.7B"]["figures"]
    assert figures["head_rounded_against_head_in_float32_mean"] < figures["bfloat16_against_float32_mean"] < 0.1
