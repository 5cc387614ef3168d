"""Cost of the server profile for runs: how long a team waits for it, and its resources by the number of runs.

    python benchmarks/server.py [--runs 50] [--workers 2] [--slope 10 50 200]

Starts `rpg up --profile server` in a directory of its own, submits runs of two steps at once, and waits for their end.
Meanwhile it asks the API twice a second for the runs that are open, as a dashboard does. The slope is that of
submitting and listing alone: those runs wait in a pool that no worker takes from.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.prefect.server.client import api_url, prefect_client
from storage import Store

SPEC = """\
name: load
question: What does the server cost?
model:
  source: scratch
  model_type: qwen3
  config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
           head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {type: bytes}
data:
  train:
    - {source: reasoning_gym, task: chain_sum, size: 60, seed: 100000,
       config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  evaluation:
    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 10, seed: 900000,
       config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt: {type: template, template: "{metadata.expression} ="}
  overlap: drop
  max_prompt_length: 16
warm_up: {steps: 5, batch_size: 16}
rollout: {engine: transformers, max_response_length: 4}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training:
  steps: 2
  prompts_per_step: 4
  group_size: 4
  optimizer: {learning_rate: 1.0e-4}
evaluation: {samples_per_problem: 2}
"""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass
class Figures:
    """Seconds, unless they say otherwise."""

    submit: float
    """The whole of `rpg submit`."""
    overhead: list[float]
    """Seconds of each run from when a worker took it to its flow run's end, less its stages."""
    first_stage: list[float]
    """From when the server had a flow run to its first stage, of the runs for which a worker was free."""
    queue_delay: list[float]
    """Seconds of each later run from the end of a run, which freed a worker, to when a worker took it."""
    api: list[float]
    """Seconds of each request for all runs while they were executed."""
    whole: float
    """From the end of `rpg submit` to the end of the last run."""


def rpg(home: Home, *arguments: str) -> tuple[float, str]:
    """Runs a command to its end. Returns its seconds and its output."""
    started = time.perf_counter()
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", *arguments]
    environment = os.environ | {"RPG_HOME": str(home.root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return time.perf_counter() - started, done.stdout


def submit(home: Home, name: str, runs: int, *options: str) -> tuple[float, dict[str, str]]:
    """Returns seconds, and run -> flow run."""
    spec = home.root.parent / f"{name}.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    sets = ["--set", f"name={name}", "--set", f"seeds={list(range(runs))}"]
    seconds, printed = rpg(home, "submit", str(spec), "--json", *sets, *options)
    return seconds, {each["run_id"]: each["flow_run_id"] for each in json.loads(printed)}


def execute(home: Home, name: str, runs: int, workers: int) -> Figures:
    """Submits runs at once to a home whose server profile is up, and waits until all have ended.

    Args:
        workers: how many take them. None of them may be at work.
    Raises:
        SystemExit: a run did not finish, or the record lacks one.
    """
    url = api_url(home, "")
    with prefect_client(home, url) as client:

        def ask(path: Any, body: Any = None) -> Any:
            return client.request("POST" if body is not None else "GET", path, json=body).json()

        seconds, flow_runs = submit(home, name, runs)
        submitted_at = time.time()
        api, of_these = [], {"flow_runs": {"id": {"any_": list(flow_runs.values())}}}
        left = runs
        while left:
            started = time.perf_counter()
            page = ask("/flow_runs/filter", of_these | {"limit": 200})
            api.append(time.perf_counter() - started)
            left = sum(flow_run["state"]["type"] not in ENDED for flow_run in page)
            time.sleep(0.5)
        whole = time.time() - submitted_at
        histories = {
            run_id: [
                (state["type"], _seconds(state["timestamp"]))
                for state in ask(f"/flow_run_states/?flow_run_id={flow_run_id}")
            ]
            for run_id, flow_run_id in flow_runs.items()
        }
    stages = _stages(home, name, runs)
    made = {run_id: min(at for _, at in states) for run_id, states in histories.items()}
    taken = {run_id: min(at for kind, at in states if kind == "PENDING") for run_id, states in histories.items()}
    ended = {run_id: max(at for _, at in states) for run_id, states in histories.items()}
    order = sorted(taken, key=lambda run_id: taken[run_id])
    ends = sorted(ended.values())
    return Figures(
        submit=seconds,
        overhead=[
            ended[run_id] - taken[run_id] - sum(end - start for start, end in stages[run_id]) for run_id in order
        ],
        first_stage=[min(start for start, _ in stages[run_id]) - made[run_id] for run_id in order[:workers]],
        queue_delay=[taken[run_id] - free for run_id, free in zip(order[workers:], ends, strict=False)],
        api=api,
        whole=whole,
    )


def _stages(home: Home, name: str, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Run -> when its stages began and ended; from SQL, which must have every run as finished, with both steps."""
    with Store.open(home.root) as store:
        of_these = f"from runs left join metrics using (run_id) where experiment = '{name}' and status = 'finished'"
        counted = store.query(f"select run_id, count(distinct metrics.step) {of_these} group by all").rows
        if [steps for _, steps in counted] != [2] * runs:
            raise SystemExit(f"not every run is recorded to have done two steps: {counted}")
        stages: dict[str, list[tuple[float, float]]] = {}
        # A stage whose result was there already has an end only.
        began = "coalesce(stages.started_at, stages.ended_at)"
        of_these = f"from stages join runs using (run_id) where experiment = '{name}'"
        rows = store.query(f"select run_id, epoch({began}), epoch(stages.ended_at) {of_these}").rows
        for run_id, started, ended in rows:
            stages.setdefault(run_id, []).append((started, ended))
    return stages


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def quantile(seconds: Sequence[float], share: float) -> float:
    """The least of them that so large a share does not exceed."""
    return sorted(seconds)[max(0, -(-int(share * 1000) * len(seconds) // 1000) - 1)]


def slope(home: Home, sizes: Sequence[int]) -> None:
    """Prints what submitting and listing take with the number of runs, which all wait."""
    url = api_url(home, "")
    print("\nruns | rpg submit | per run | a page of 200 flow runs | kB a flow run | rpg runs")
    for size in sizes:
        seconds, flow_runs = submit(home, f"waiting-{size}", size, "--pool", "nobody")
        of_these = {"flow_runs": {"id": {"any_": list(flow_runs.values())}}, "limit": 200}
        with prefect_client(home, url) as client:
            path: Any = "/flow_runs/filter"
            started = time.perf_counter()
            page = client.request("POST", path, json=of_these)
            took = time.perf_counter() - started
        listed, _ = rpg(home, "runs")
        kilobytes = len(page.content) / 1000 / size
        each = 1000 * seconds / size
        print(f"{size} | {seconds:.1f} s | {each:.0f} ms | {took:.2f} s | {kilobytes:.1f} | {listed:.1f} s")


def report(figures: Figures) -> None:
    """Prints a table."""
    runs = len(figures.overhead)
    print(f"{runs} runs: all finished and recorded {figures.whole:.0f} s after they were submitted")
    print(f"rpg submit: {figures.submit:.1f} s, {1000 * figures.submit / runs:.0f} ms a run")
    print(f"submit to the first stage with a free worker: at most {max(figures.first_stage):.1f} s")
    for name, seconds in (
        ("overhead of a run beyond its stages", figures.overhead),
        ("a worker is free, a run waits", figures.queue_delay),
        (f"API, {len(figures.api)} requests under load", figures.api),
    ):
        if seconds:
            print(f"{name}: p50 {quantile(seconds, 0.5):.3f} s, p95 {quantile(seconds, 0.95):.3f} s")


@contextmanager
def server_profile(workers: int) -> Iterator[Home]:
    """A home of its own whose server profile is up within the block."""
    # PostgreSQL's own user cannot enter directories of root.
    with tempfile.TemporaryDirectory(prefix="rpg-benchmark-") as directory:
        Path(directory).chmod(0o755)
        home = Home(Path(directory) / "home")
        try:
            rpg(home, "up", "--profile", "server", "--workers", str(workers))
            yield home
        finally:
            rpg(home, "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slope", type=int, nargs="*", default=[10, 50, 200])
    arguments = parser.parse_args()
    with server_profile(arguments.workers) as home:
        execute(home, "first", 1, 1)  # makes the data and the base model, which all share
        report(execute(home, "load", arguments.runs, arguments.workers))
        slope(home, arguments.slope)


if __name__ == "__main__":
    main()
