"""A check of the trainer from start to end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from pipelines.doctor.gpu_checks.models import EOS, PAD, TINY, write_model
from rpg.learner.kernels import are_right
from specs.schema.experiment import Experiment

_STEPS, _PAUSE = 4, 2
_SETTINGS = {"zero_stage": 3, "offload": {"while_sampling": True}}
_PROBLEMS = ("0=", "1=", "01=", "10=", "011=", "100=", "0101=", "11111=")
_TOKENS = ("<pad>", "<eos>", "0", "1", "=")


def trained_and_resumed(bench: Bench) -> Figures:
    """Runs `rpg.train` with the transformers engine up to a pause, and then, in another process, to the end.

    At ZeRO 3 the engine has its own weights, so that the sentinel checks each load. The state leaves the device while
    it samples, rows are packed, and norms are Liger's if it is installed. On a CPU the weights must then equal those of
    a run without a pause, in every bit.
    """
    from safetensors.torch import load_file

    if bench.device.type == "cuda" and find_spec("liger_kernel") and not are_right("qwen3", bench.device):
        raise CheckFailedError("gradients with Liger's kernels differ from those with PyTorch's operations")
    write_inputs(bench.directory)
    paused = write_run(bench, "paused", training=_SETTINGS)
    train(paused, until=_PAUSE)
    train(paused)
    if packed := [event["message"] for event in _rows(paused, "events") if event["kind"] == "not_packed"]:
        raise CheckFailedError(packed[0])
    metrics = recorded(paused)
    if list(metrics) != list(range(1, _STEPS + 1)):
        raise CheckFailedError(f"steps {list(metrics)} are recorded instead of 1 to {_STEPS}")
    figures: Figures = {
        f"{name}_seconds": max(metrics[step][f"time/{name}"] for step in metrics if step > 1)
        for name in ("step", "checkpoint")
    }
    if bench.device.type == "cpu":
        straight = write_run(bench, "straight", training=_SETTINGS)
        train(straight)
        one, other = (load_file(next((run / "weights").rglob("*.safetensors"))) for run in (paused, straight))
        if not all(torch.equal(one[name], other[name]) for name in other):
            raise CheckFailedError("the weights differ from those of a run without a pause")
    return figures


def write_inputs(directory: Path, config: dict[str, Any] | None = None) -> None:
    """Writes a base model with random weights, a tokenizer of five tokens, and eight problems.

    Args:
        config: settings of a model with a larger vocabulary, whose further tokens have no text. It is written in
            bfloat16.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    dtype = torch.bfloat16 if config else torch.float32
    config = config or {**TINY, "vocab_size": len(_TOKENS)}
    assert (_TOKENS[PAD], _TOKENS[EOS]) == ("<pad>", "<eos>")
    base = write_model(directory / "base", config, torch.device("cpu"), dtype)
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(_TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(base)
    rows = [
        {"problem_id": f"p{number}", "prompt": prompt, "answer": prompt[0], "dataset": "train", "metadata": "{}"}
        for number, prompt in enumerate(_PROBLEMS)
    ]
    (directory / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "data" / "train.parquet")


def write_run(bench: Bench, name: str, **changes: dict[str, Any]) -> Path:
    """Writes a run's directory for `rpg.train`, beside the files of `write_inputs`.

    Args:
        changes: fields of sections of the spec that replace the defaults.
    """
    spec: dict[str, Any] = {
        "name": name,
        "model": {"source": "pretrained", "path": "base"},
        "data": {"train": [{"source": "parquet", "name": "train", "path": "train.parquet"}]},
        "reward": {"type": "exact_match"},
        "rollout": {"max_response_length": 8},
        "objective": {"type": "rpg", "kl_coef": 0.1},
        "reference": {"source": "snapshot", "update": {"every_steps": 3}},
        "training": {
            **{"steps": _STEPS, "prompts_per_step": 4, "group_size": 8, "minibatches": 2},
            "precision": bench.precision,
            "optimizer": {"learning_rate": 0.003},
            "checkpoint": {"every_steps": _PAUSE},
        },
        "resources": {"device": bench.device.type},
    }
    spec |= {section: {**spec.get(section, {}), **fields} for section, fields in changes.items()}
    run = bench.directory / name
    run.mkdir()
    (run / "spec.json").write_text(Experiment.model_validate(spec).model_dump_json(), encoding="utf-8")
    return run


def train(run: Path, *, until: int = 0) -> None:
    """Trains to the end, or to the step at which it pauses."""
    with started(run, until=until) as process:
        code = process.wait()
    if code:
        raise CheckFailedError(f"`rpg.train` exited with {code}{f', pausing at step {until}' if until else ''}")


@contextmanager
def started(run: Path, *, until: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    """Yields the trainer's process, and kills it at the end of the block if it has not ended."""
    inputs = {"run_id": run.name, "fingerprint": "0" * 64, "data": "../data", "base": "../base", "until": until}
    (run / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-P", "-m", "rpg.train", str(run)], stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def recorded(run: Path) -> dict[int, dict[str, float]]:
    """Returns step -> its metrics by name, for all recorded steps."""
    steps: dict[int, dict[str, float]] = {}
    for row in _rows(run, "metrics"):
        steps.setdefault(row["step"], {})[row["name"]] = row["value"]
    return dict(sorted(steps.items()))


def _rows(run: Path, table: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    for file in sorted((run / "segments" / table).glob("*.parquet")):
        yield from pq.read_table(file).to_pylist()
