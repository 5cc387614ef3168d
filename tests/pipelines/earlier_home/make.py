"""Records `home.tar.xz`, a home as one version of the product left it, and `answers.json`, what it said of that home.

    unshare --uts sh -c 'hostname recorder; PYTHONPATH=.:tests/pipelines python tests/pipelines/earlier_home/make.py'

Everything in the home was done through the command line, on a CPU: an experiment of two runs and a run in a worker, to
their ends; a run cancelled after a checkpoint; a study to its end and one stopped within its second trial; a run and a
study that wait on the Prefect server, whose worker was gone by then. The files name the place where they were made,
`ROOT`; whoever unpacks them puts another in. Recorded at commit 69f12e80. What is recorded again is the home of
another version: so a release replaces this one, with the ids and fingerprints that test_earlier_home.py expects.
"""

import json
import os
import shutil
import signal
import tarfile
from pathlib import Path

from live import Lab, finished
from waiting import wait_for

from pipelines.prefect_flows.workers.flow_process import flow_processes
from pipelines.services.supervisord import Supervisor
from specs.machine.files import read_json

HERE = Path(__file__).parent
ROOT = Path("/tmp/recorded-home")
EXPERIMENT = """\
name: NAME
question: Does a home outlive the version that wrote it?
model:
  source: scratch
  model_type: qwen3
  config:
    hidden_size: 8
    intermediate_size: 16
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 4
    max_position_embeddings: 32
    tie_word_embeddings: true
  tokenizer: {type: bytes}
data: {train: [TRAIN], evaluation: [HELD_OUT], prompt: {type: template, template: "PROMPT"}, overlap: drop,
       max_prompt_length: 16}
warm_up: {steps: 300, batch_size: 32, learning_rate: 1.0e-2}
rollout: {engine: transformers, max_response_length: 3}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2, clip: {type: dual}}
reference: {source: snapshot, update: {every_steps: 2}}
training:
  steps: STEPS
  prompts_per_step: 4
  group_size: 4
  minibatches: 2
  optimizer: {learning_rate: 1.0e-3}
  checkpoint: {every_steps: 2}
evaluation: {samples_per_problem: 2}
"""
FILES = {
    "TRAIN": "{source: jsonl, path: ../data/train.jsonl, columns: {answer: answer}}",
    "HELD_OUT": "{name: sums, source: jsonl, path: ../data/held_out.jsonl, columns: {answer: answer}}",
    "PROMPT": "{prompt}",
}
SUMS = "source: reasoning_gym, task: chain_sum, config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
GENERATED = {
    "TRAIN": f"{{{SUMS}, size: 60, seed: 100000}}",
    "HELD_OUT": f"{{name: sums, {SUMS}, size: 10, seed: 900000}}",
    "PROMPT": "{metadata.expression}=",
}
"""Studies take this one: their digest of an experiment has the place of its files in it, and the home is moved."""
MATRIX = """\
matrix:
  product:
    objective: [{type: rpg, kl_coef: 1.0e-2}, {type: grpo}]
"""
STUDY = """\
name: NAME
question: Which clip?
experiment: stopped.yaml
overrides:
  training.steps: STEPS
parameters:
  objective.clip.low: {float: [0.05, 0.5]}
  objective.clip.high: {float: [0.05, 1.0], log: true}
goal: {dataset: sums, metric: mean@2}
sampler: {startup_trials: 2}
trials: TRIALS
"""
SPECS: dict[str, tuple[str, dict[str, str], int]] = {
    "finished": (EXPERIMENT + MATRIX, FILES, 4),
    "stopped": (EXPERIMENT, GENERATED, 40),
    "submitted": (EXPERIMENT, FILES, 2),
    "waiting": (EXPERIMENT, FILES, 2),
    "clips": (STUDY, {"TRIALS": "2"}, 2),
    "halfway": (STUDY, {"TRIALS": "2"}, 30),
    "later": (STUDY, {"TRIALS": "1"}, 2),
}
"""Name -> text, its replacements, steps of training."""
QUERIES = (
    "SELECT run_id, experiment, name, seed, status, started_at, ended_at FROM runs ORDER BY run_id",
    "SELECT run_id, stage, fingerprint, status, cached FROM stages ORDER BY ALL",
    "SELECT run_id, step, name, value FROM metrics "
    "WHERE name IN ('reward/mean', 'kl/reverse') AND step < 3 ORDER BY ALL",
    "SELECT run_id, count(*) AS n, max(step) AS step FROM metrics GROUP BY ALL ORDER BY ALL",
    "SELECT run_id, step, rollout_id, prompt, response, reward, advantage "
    "FROM rollouts WHERE run_id LIKE 'finished-%' AND step < 3 ORDER BY ALL",
    "SELECT run_id, step, count(*) AS n, round(sum(logprob), 6) AS logprob, round(sum(old_logprob), 6) AS old_logprob, "
    "round(sum(ref_logprob), 6) AS ref_logprob, round(sum(entropy), 6) AS entropy "
    "FROM tokens GROUP BY ALL ORDER BY ALL",
    "SELECT run_id, step, dataset, metric, value, ci_low, ci_high, num_problems, samples_per_problem "
    "FROM evaluations WHERE metric = 'mean@2' ORDER BY ALL",
    "SELECT run_id, step, problem_id, sample, response, score "
    "FROM evaluation_samples WHERE run_id LIKE 'finished-%' AND step = 4 ORDER BY ALL",
    "SELECT run_id, step FROM checkpoints ORDER BY ALL",
    "SELECT * EXCLUDE (setting) FROM leaderboard WHERE metric = 'mean@2' ORDER BY ALL",
    "SELECT study, number, state, run_id, value, params FROM trials ORDER BY ALL",
)


def main() -> None:
    """Makes the home, asks the questions, packs it."""
    shutil.rmtree(ROOT, ignore_errors=True)
    # Prefect looks for settings in the user's own directory.
    os.environ |= {"HOME": str(ROOT), "RPG_HOME": str(ROOT / "home")}
    lab = Lab(ROOT / "home", ROOT / "specs")
    try:
        write_inputs()
        done_and_stopped(lab)
        studies(lab)
        served(lab)
        write_answers(lab)
    finally:
        lab.clean_up()
    pack()


def write_inputs() -> None:
    """Spec files and problems: all sums below ten."""
    specs, data = ROOT / "specs", ROOT / "data"
    specs.mkdir(parents=True)
    data.mkdir()
    for name, (text, words, steps) in SPECS.items():
        for word, value in {"NAME": name, "STEPS": str(steps), **words}.items():
            text = text.replace(word, value)
        (specs / f"{name}.yaml").write_text(text)
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    for name, held_out in (("train", False), ("held_out", True)):
        chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 7 == 0) == held_out]
        rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in chosen]
        (data / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def done_and_stopped(lab: Lab) -> None:
    """An experiment of two runs, and a run cancelled after its first checkpoint."""
    said(lab, "run", spec("finished"))
    run = lab.start("run", spec("stopped"))
    wait_for(lambda: steps_of(lab, "stopped") >= 2 or run.poll() is not None, what="a checkpoint")
    said(lab, "cancel", *run_ids(lab, "stopped"))
    assert finished(run).code == 1
    assert 2 <= steps_of(lab, "stopped") < SPECS["stopped"][2]


def studies(lab: Lab) -> None:
    """A study to its end, and one interrupted in the training of its second trial."""
    said(lab, "study", "run", spec("clips"))
    study = lab.start("study", "run", spec("halfway"))
    wait_for(lambda: len(run_ids(lab, "halfway")) == 2 or study.poll() is not None, what="the second trial")
    (second,) = [run_id for run_id in run_ids(lab, "halfway") if lab.state(run_id).get("status") != "finished"]
    wait_for(lambda: lab.progress(second) >= 2 or study.poll() is not None, what="a checkpoint")
    study.send_signal(signal.SIGINT)
    ended = finished(study)
    assert ended.code == 130, ended.err
    assert 2 <= lab.progress(second) < SPECS["halfway"][2]


def served(lab: Lab) -> None:
    """A run in the worker of `rpg up`; a run and a study submitted after that worker has gone."""
    said(lab, "up")
    said(lab, "submit", spec("submitted"))
    (run_id,) = run_ids(lab, "submitted")
    wait_for(lambda: lab.state(run_id)["status"] == "finished", what="the run in the worker")
    wait_for(lambda: not flow_processes(lab.home), what="the flow's end")
    Supervisor(lab.home, read_json(lab.home.prefect / "server.json")["control_port"]).stop("worker")
    said(lab, "submit", spec("waiting"))
    said(lab, "study", "submit", spec("later"))
    said(lab, "down")


def write_answers(lab: Lab) -> None:
    """Command lines that only read, and what each printed as JSON; a line an entry."""
    asked = [("sql", query, "--format", "json") for query in QUERIES]
    asked += [("runs", "--json"), ("study", "list", "--json")]
    shown = [run_id for name in ("finished", "stopped", "waiting") for run_id in run_ids(lab, name)]
    asked += [("show", run_id, "--json") for run_id in shown]
    lines = []
    for question in asked:
        answer = json.loads(said(lab, *question))
        if question[0] == "show":
            answer.pop("answer", None)  # a sentence, whose words may change
        entries = answer if isinstance(answer, list) else [answer]
        listed = ",\n  ".join(map(json.dumps, entries))
        lines.append(f'{{"question": {json.dumps(question)}, "answer": [\n  {listed}\n]}}')
    (HERE / "answers.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def said(lab: Lab, *arguments: str) -> str:
    """A command's output; it must succeed."""
    result = lab.rpg(*arguments)
    assert result.code == 0, (arguments, result.err)
    return result.out


def spec(name: str) -> str:
    return str(ROOT / "specs" / f"{name}.yaml")


def run_ids(lab: Lab, experiment: str) -> list[str]:
    return [run_id for run_id in lab.run_ids() if run_id.startswith(f"{experiment}-")]


def steps_of(lab: Lab, experiment: str) -> int:
    return max((lab.progress(run_id) for run_id in run_ids(lab, experiment)), default=0)


def pack() -> None:
    """All but the services' logs and what SQLite makes anew. DuckDB knows a segment by its time, to the nanosecond."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.name == "home/logs" or entry.name.endswith(".db-shm"):
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        changed = (ROOT / entry.name).stat().st_mtime_ns
        entry.pax_headers["mtime"] = f"{changed // 10**9}.{changed % 10**9:09}"
        return entry

    with tarfile.open(HERE / "home.tar.xz", "w:xz", preset=9) as archive:
        for name in ("specs", "data", "home"):
            archive.add(ROOT / name, name, filter=kept)


if __name__ == "__main__":
    main()
