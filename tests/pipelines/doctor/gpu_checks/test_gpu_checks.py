"""`rpg doctor --gpu`: its checks pass if training works, fail if it does not, and do not affect each other.

On CPUs they are the same work with gloo in place of NCCL; the tests marked `gpu` are the checks themselves.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from places import ROOT
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.cli.gpu_table import lines
from pipelines.doctor.gpu_checks import engines, rank, training
from pipelines.doctor.gpu_checks.catalogue import CHECKS
from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Result
from pipelines.doctor.gpu_checks.models import TINY, make_model
from pipelines.doctor.gpu_checks.network import rounds_of_pairs, tournament
from pipelines.doctor.gpu_checks.session import check_gpus
from pipelines.home.home import Home
from rpg.processes import ranks
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.sentinel import Sentinel, probe_of
from specs.schema.experiment import Experiment
from specs.schema.rollout import TransformersRollout

CPU = torch.device("cpu")
NAMES = [check.name for check in CHECKS]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)  # which joining sets, and later tests must not find
    ranks.join("cpu")
    yield Bench(CPU, tmp_path)
    ranks.leave()


def test_without_a_gpu_it_says_so_in_a_line_and_exits_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--gpu"], env={"RPG_HOME": str(tmp_path), "RPG_SLOTS": ""})
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("this machine has no GPU")
    assert "run it on a GPU node" in line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_two_ranks_meet_once(size: int) -> None:
    rounds = tournament(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    for pairs in rounds:
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)


def test_of_64_hosts_every_two_and_every_link_within_one_are_tried_in_70_rounds() -> None:
    hosts = [str(rank // 8) for rank in range(512)]
    rounds = rounds_of_pairs(hosts)
    assert len(rounds) == 7 + 63
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 512
    within = [pair for pairs in rounds[:7] for pair in pairs]
    assert sorted(within) == [pair for pair in combinations(range(512), 2) if hosts[pair[0]] == hosts[pair[1]]]
    between = [(hosts[one], hosts[two]) for pairs in rounds[7:] for one, two in pairs]
    assert Counter(between) == dict.fromkeys(combinations(dict.fromkeys(hosts), 2), 8)


def test_on_hosts_of_different_size_all_ranks_of_the_smaller_one_meet_the_larger_one() -> None:
    assert rounds_of_pairs(["a", "a", "a", "b"]) == [[(1, 2)], [(0, 2)], [(0, 1)], [(0, 3)]]


@pytest.mark.parametrize("name", NAMES)
def test_every_check_is_a_function_that_is_there(name: str) -> None:
    [check] = [check for check in CHECKS if check.name == name]
    assert check.load().__doc__


@pytest.mark.long
def test_a_check_that_hangs_is_killed_and_the_next_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gradients = (check for check in CHECKS if check.name in ("machine", "gradients"))
    monkeypatch.setattr(rank, "CHECKS", (replace(gradients, limit_seconds=0.3), machine))  # torch is not up by then
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    job = {"device": "cpu", "checks": ["gradients", "machine"], "out": str(tmp_path), "scratch": str(tmp_path / "s")}
    rank.CheckingRank(job).run()
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results["gradients-00000.json"]["status"] == "failed"
    assert results["gradients-00000.json"]["message"].startswith("it took longer than 0.3 s and was killed; see ")
    assert results["machine-00000.json"]["status"] == "ok"


def _ended(tmp_path: Path, program: str, *, stands_still: float, most: float) -> int:
    log = tmp_path / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-uc", f"import time\n{program}"], stdout=output)
    try:
        return rank.ended(process, log, stands_still=stands_still, most=most)
    finally:
        process.kill()
        process.wait()


@pytest.mark.more
@pytest.mark.parametrize(
    "program",
    [
        "for _ in range(16): print('compiling'); time.sleep(0.5)",
        "while time.process_time() < 4: pass",
    ],
)
def test_an_engines_start_that_goes_on_is_not_ended_by_the_clock(tmp_path: Path, program: str) -> None:
    assert _ended(tmp_path, program, stands_still=3, most=300) == 0


@pytest.mark.more
def test_computing_goes_on_where_the_children_that_computed_more_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter of a process tree falls when a compiler's workers end."""
    counted = itertools.chain((50.0, 100.0, 102.0), itertools.count(3.0, 1.5))
    monkeypatch.setattr(rank, "_cpu_seconds", lambda _pid: next(counted))
    assert _ended(tmp_path, "time.sleep(4)", stands_still=1, most=300) == 0


@pytest.mark.more
@pytest.mark.parametrize(
    ("program", "most", "message"),
    [
        ("time.sleep(300)", 300, "it made no progress for"),
        ("while True: pass", 4, "it took longer than"),
        ("while True: pass", 2, "it took longer than"),
    ],
)
def test_one_that_stands_still_or_never_ends_is_ended(tmp_path: Path, program: str, most: float, message: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as error:
        _ended(tmp_path, program, stands_still=2, most=most)
    assert error.value.cmd == message


@pytest.mark.long
def test_packed_rows_that_are_not_kept_apart_are_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.directory / "sitecustomize.py").write_text(
        "import sys\nif 'rpg.train' in sys.orig_argv:\n"
        "    from rpg.learner.packing_trial import PackingTrial\n"
        "    PackingTrial.keeps_apart = property(lambda _: False)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{bench.directory}{os.pathsep}{ROOT}")
    with pytest.raises(CheckFailedError, match="responses are padded"):
        training.trained_and_resumed(bench)


@pytest.mark.parametrize(
    ("awake", "asleep", "loaded", "failure"),
    [
        (10, 60, 50, ""),
        (10, 12, 50, "the sleeping engine frees only"),
        (10, 60, 12, "loading weights also reclaims the cache"),
    ],
)
def test_an_engine_that_keeps_its_memory_asleep_is_noticed(
    awake: int, asleep: int, loaded: int, failure: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_model(TINY, CPU, torch.float32)
    learner.save_pretrained(bench.directory)
    sampler = open_sampler(TransformersRollout(), SamplerSettings(bench.directory, CPU, max_length=64, seed=0))
    sentinel = Sentinel(probe_of([5, 6], max_length=64), tolerance=0.05)
    measured = iter([awake, asleep, loaded])
    monkeypatch.setattr(engines, "_free", lambda _: (next(measured), 100))
    expected = pytest.raises(CheckFailedError, match=failure) if failure else nullcontext()
    with expected:
        engines._memory_given_back(sampler, sentinel, learner, CPU)


def test_the_table_has_the_range_over_the_ranks_and_a_remedy_for_each_failure() -> None:
    results = [
        Result("machine", "ok", figures={"gpu": "A", "memory_gib": 79.6}, seconds=4.2),
        Result("machine", "ok", figures={"gpu": "A", "memory_gib": 79.1}, seconds=5.0, rank=1),
        Result("gradients", "failed", "off by 0.3", host="node-1"),
        Result("gradients", "ok", figures={"error": 0.1}, rank=1),
        Result("colocated", "skipped", "vLLM is not installed"),
    ]
    table = list(lines(results))
    assert " ".join(table[0].split()) == "ok machine 5 s gpu A, memory_gib 79.1 to 79.6"
    assert " ".join(table[1].split()) == "FAILED gradients rank 0, node-1: off by 0.3"
    assert table[2].strip().startswith("remedy: compare the versions with those of constraints.txt")
    assert " ".join(table[3].split()) == "skipped colocated vLLM is not installed"


def spec(device: str, num_ranks: int) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "checked",
            "model": {"source": "pretrained", "path": "base"},
            "data": {"train": [{"source": "parquet", "name": "train", "path": "train.parquet"}]},
            "reward": {"type": "exact_match"},
            "objective": {"type": "rpg"},
            "reference": {"source": "behaviour", "update": None},
            "training": {"steps": 1, "prompts_per_step": num_ranks, "group_size": 2, "ranks": num_ranks},
            "resources": {"device": device},
        }
    )


@pytest.mark.long
def test_the_checks_that_ranks_make_together_pass_on_two_cpus(tmp_path: Path) -> None:
    together = [check.name for check in CHECKS if check.scope != "host"]
    seen: list[Result] = []
    results = check_gpus(Home(tmp_path), spec("cpu", 2), names=together, on_result=seen.append)
    outcomes = [(result.check, result.rank, result.status, result.message) for result in results]
    assert outcomes == [(name, rank, "ok", "") for name in together for rank in (0, 1)]
    assert sorted(result.check for result in seen) == sorted(result.check for result in results)
    rates = [result.figures["within_hosts_gb_per_s"] for result in results if result.check == "all_reduce"]
    assert min(map(float, rates)) > 0
    assert not any((tmp_path / "gpu-checks").iterdir()), "what passed leaves nothing behind"


@pytest.mark.long
@pytest.mark.parametrize("name", [check.name for check in CHECKS if check.scope == "host"])
def test_a_check_of_a_host_passes_on_a_cpu(name: str, tmp_path: Path) -> None:
    [result] = check_gpus(Home(tmp_path), spec("cpu", 1), names=[name], on_result=lambda _: None)
    expected = "skipped" if name in ("asleep", "dedicated_nccl") else "ok"
    assert result.status == expected or result.message == "vLLM is not installed", result.message


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_check_passes_on_the_gpus_that_are_here(name: str, tmp_path: Path) -> None:
    results = check_gpus(Home(tmp_path), names=[name], on_result=lambda _: None)
    assert {result.message for result in results if result.status == "failed"} == set()
    if all(result.status == "skipped" for result in results):
        pytest.skip(results[0].message)
