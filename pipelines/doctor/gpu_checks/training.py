"""Checkpoints, and the trainer from its beginning to its end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from pipelines.doctor.gpu_checks.models import EOS, PAD, TINY, BatchShape, random_step, write_model
from pipelines.doctor.gpu_checks.numerics import add_gradient, training
from rpg.batches.minibatches import cut, plan_step
from rpg.checkpoints.pieces import StateCopy
from rpg.learner.deepspeed import Learner
from rpg.processes import ranks
from specs.schema.experiment import Experiment
from specs.schema.training import Offload, Training

_SHAPE = BatchShape(prompts=4, group_size=4, prompt_length=8, response_length=24, microbatch_tokens=256, unequal=True)
_STEPS, _PAUSE = 4, 2
_PROBLEMS = ("0=", "1=", "01=", "10=", "011=", "100=", "0101=", "11111=")
_TOKENS = ("<pad>", "<eos>", "0", "1", "=")


def state_saved_and_loaded(bench: Bench) -> Figures:
    """A learner that loads another's state holds its weights in every bit, and makes the same next update."""
    directory = bench.directory
    _write_base(bench)
    settings = training(bench.precision, zero_stage=2, shape=_SHAPE)
    saving = _opened(bench, settings)
    for _ in range(2):
        _update(saving, settings)
    saved, copy = _weights(saving), StateCopy()
    saving.save(copy)
    if ranks.rank() == 0:
        (directory / "state").mkdir()
    ranks.wait_for_all()
    copy.write(directory / "state")
    ranks.wait_for_all()
    loading = _opened(bench, settings)
    loading.load(directory / "state")
    if not torch.equal(_weights(loading), saved):
        raise CheckFailedError("the weights that were loaded are not those that were saved")
    norms = _update(saving, settings), _update(loading, settings)
    apart = _difference(_weights(loading), _weights(saving), since=saved)
    if not apart <= _allowed(bench):
        raise CheckFailedError(
            f"the update after loading is off by {apart:.2g} of its norm, allowed {_allowed(bench)}; gradient norms"
            f" {norms[0]:.6g} and {norms[1]:.6g}"
        )
    return {"state_mib": copy.num_bytes / 2**20, "next_update_difference": apart}


def state_away_while_sampling(bench: Bench) -> Figures:
    """Updates whose state leaves the device after each are those of a learner whose state stays; its memory is given
    back, that of the optimizer's two moments and of the master weights at least."""
    _write_base(bench)
    figures: Figures = {}
    for stage in (2, 3):
        stays = training(bench.precision, zero_stage=stage, shape=_SHAPE)
        leaves = stays.model_copy(update={"offload": Offload(while_sampling=True)})
        learners = _opened(bench, stays), _opened(bench, leaves)
        before = _weights(learners[0])
        for _ in range(3):
            for learner in learners:
                _update(learner, stays)
        apart = _difference(_weights(learners[1]), _weights(learners[0]), since=before)
        if not apart <= _allowed(bench):
            raise CheckFailedError(f"at ZeRO {stage} three updates are off by {apart:.2g}, allowed {_allowed(bench)}")
        figures[f"difference_{stage}"] = apart
        if bench.device.type == "cuda":
            figures[f"given_back_mib_{stage}"] = _given_back(learners[1], bench.device, stage) / 2**20
    return figures


def _given_back(learner: Learner, device: torch.device, stage: int) -> int:
    """Bytes that torch holds less between updates than while they are made."""
    with learner.updating():
        held = torch.cuda.memory_allocated(device)
    given_back = held - torch.cuda.memory_allocated(device)
    least = 12 * sum(weight.numel() for _, weight in learner.weights()) // ranks.world_size()
    if not given_back >= least:
        raise CheckFailedError(f"at ZeRO {stage} {given_back} bytes were given back, of at least {least}")
    return given_back


def _write_base(bench: Bench) -> None:
    if ranks.rank() == 0:
        write_model(bench.directory / "base", TINY, torch.device("cpu"), getattr(torch, bench.precision))
    ranks.wait_for_all()


def _opened(bench: Bench, settings: Training) -> Learner:
    return Learner(bench.directory / "base", settings, temperature=1.0, device=bench.device, lends_weights=False)


def _weights(learner: Learner) -> torch.Tensor:
    """All of them, end to end."""
    return torch.cat([weight.detach().float().flatten() for _, weight in learner.weights()])


def _update(learner: Learner, settings: Training) -> float:
    """One update on random responses, the same ones each time. Returns its gradient norm."""
    step = random_step(TINY["vocab_size"], _SHAPE)
    passes = cut(step, plan_step(step, settings, packed=learner.packs), learner.device)[0].passes
    with learner.updating():
        add_gradient(learner, passes, step)
        return learner.update(learning_rate=1e-3)


def _difference(weights: torch.Tensor, others: torch.Tensor, *, since: torch.Tensor) -> float:
    """In norm, relative to how far the others have moved."""
    return float((weights - others).norm() / (others - since).norm())


def _allowed(bench: Bench) -> float:
    """Largest accepted difference of updates. Kernels of a GPU add up in any order, and AdamW makes a small gradient's
    sign a whole step."""
    return 0.0 if bench.device.type == "cpu" else 0.1


def trained_and_resumed(bench: Bench) -> Figures:
    """`rpg.train` with the transformers engine: to a pause, and in another process to the end.

    On a CPU the weights must then be those of a run without a pause, in every bit.
    """
    from safetensors.torch import load_file

    write_inputs(bench.directory)
    paused = write_run(bench, "paused")
    train(paused, until=_PAUSE)
    train(paused)
    metrics = recorded(paused)
    if list(metrics) != list(range(1, _STEPS + 1)):
        raise CheckFailedError(f"steps {list(metrics)} are recorded for 1 to {_STEPS}")
    figures: Figures = {
        f"{name}_seconds": max(metrics[step][f"time/{name}"] for step in metrics if step > 1)
        for name in ("step", "checkpoint")
    }
    if bench.device.type == "cpu":
        straight = write_run(bench, "straight")
        train(straight)
        one, other = (load_file(next((run / "weights").rglob("*.safetensors"))) for run in (paused, straight))
        if not all(torch.equal(one[name], other[name]) for name in other):
            raise CheckFailedError("the weights after the pause are not those of a run without one")
    return figures


def write_inputs(directory: Path, config: dict[str, Any] | None = None) -> None:
    """A base model of random weights with a tokenizer of five tokens, and eight problems.

    Args:
        config: of a model with a larger vocabulary, whose further tokens have no text. It is written in bfloat16.
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
    """A run's directory for `rpg.train`, beside what `write_inputs` has written.

    Args:
        changes: fields of sections of the spec that are to be others.
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
    """The trainer's process, which is killed at the end of the block if it has not ended."""
    inputs = {"run_id": run.name, "fingerprint": "0" * 64, "data": "../data", "base": "../base", "until": until}
    (run / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-P", "-m", "rpg.train", str(run)], stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def recorded(run: Path) -> dict[int, dict[str, float]]:
    """Step -> its metrics by name, of all steps on record."""
    import pyarrow.parquet as pq

    steps: dict[int, dict[str, float]] = {}
    for file in sorted((run / "segments" / "metrics").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            steps.setdefault(row["step"], {})[row["name"]] = row["value"]
    return dict(sorted(steps.items()))
