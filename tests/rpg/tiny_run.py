"""A run small enough for a test: problems of two digits, a model of some thousand parameters, a run's directory."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from specs.machine.launch import KEY, new_key
from specs.schema.experiment import Experiment
from tests.forks import Fork, fork

if TYPE_CHECKING:
    import torch

TOKENS = ["<pad>", "<eos>", "0", "1", "="]
PROBLEMS = ["0=", "1=", "01=", "10=", "011=", "100=", "0101=", "11111="]

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {"source": "pretrained", "path": "base"},
    "data": {"train": [{"source": "parquet", "name": "train", "path": "train.parquet"}]},
    "reward": {"type": "exact_match"},
    "rollout": {"max_response_length": 8},
    "objective": {"type": "rpg", "kl_coef": 0.1},
    "reference": {"source": "snapshot", "update": {"every_steps": 3}},
    "training": {
        "steps": 6,
        "prompts_per_step": 4,
        "group_size": 8,
        "minibatches": 2,
        "microbatch_tokens": 60,
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"type": "linear", "warmup_updates": 2},
        "checkpoint": {"every_steps": 2},
    },
}


FORKED = ("rpg.train", "rpg.stage", *(f"tests.rpg.{each}_worker" for each in ("learner", "layout", "shares", "train")))
"""Programs that may be forks. None of them reads the environment while it is imported."""
READ_LATE = {KEY, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE"}
"""Environment variables that nothing reads while it is imported."""
STEADY = {"learning_rate": 0.01, "epsilon": 1e-6}
"""An optimizer for runs whose weights are compared: a rounding of a gradient that is nearly zero becomes no step."""


def make_inputs(directory: Path, *, head_dim: int = 8, experts: dict[str, Any] | None = None) -> None:
    """Fills `base` (model and tokenizer) and `data`. vLLM wants a head_dim of 32 or more. `experts`: settings of a
    mixture of four experts in place of each MLP."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    base = directory / "base"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(base)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if experts is None:
        Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(base)
    else:
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **experts}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).save_pretrained(base)
    rows = [
        {"problem_id": f"p{i}", "prompt": prompt, "answer": prompt[0], "dataset": "train", "metadata": "{}"}
        for i, prompt in enumerate(PROBLEMS)
    ]
    data = directory / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), data / "train.parquet")


def make_run(inputs: Path, run_dir: Path, **changes: dict[str, Any]) -> Path:
    """A run's directory with the spec above, sections changed field by field."""
    spec = {name: dict(value) if isinstance(value, dict) else value for name, value in SPEC.items()}
    for section, fields in changes.items():
        spec[section] = {**spec.get(section, {}), **fields}
    run_dir.mkdir(parents=True)
    (run_dir / "spec.json").write_text(Experiment.model_validate(spec).model_dump_json())
    where = {name: os.path.relpath(inputs / name, run_dir) for name in ("data", "base")}
    (run_dir / "inputs.json").write_text(json.dumps({"run_id": run_dir.name, "fingerprint": "f" * 64, **where}))
    return run_dir


def start(command: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[str] | Fork":
    """A trainer, a rank of one or a worker of the tests, with its words captured.

    A `python -m` is a fork of a process with this environment and torch and DeepSpeed imported, unless that is refused
    or an import may read a variable of its own: the imports take longer than a tiny run.
    """
    own = environment or {}
    python, *program = (word for word in command if word not in ("-P", "-m"))
    if python == sys.executable and program[0] in FORKED and own.keys() <= READ_LATE:
        shared = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        output = tempfile.TemporaryFile()  # noqa: SIM115 (it is read when the fork has ended)
        forked = fork(program, output, {**shared, "OMP_NUM_THREADS": "1"}, late=own)
        if forked is not None:
            return Fork(forked, output)
        output.close()
    return start_anew(command, environment)


def start_anew(command: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """A process that imports for itself, with a pipe of its words."""
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.Popen(command, env=wanted, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


Started = subprocess.Popen[str] | Fork
"""What `start` gives."""


def finish(*processes: Started, expect: int = 0, seconds: float = 240) -> str:
    """Waits for processes that must all end with one code; returns the first one's output. Leaves no process behind."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [expect] * len(processes), "\n".join(outputs)
    return outputs[0]


def train(run_dir: Path, *, expect: int = 0, ranks: int = 1) -> str:
    """Trains until the processes end; returns the first rank's output. Several ranks connect without a launcher."""
    command = [sys.executable, "-m", "rpg.train", str(run_dir)]
    environments = group_of(ranks) if ranks > 1 else [{}]
    return finish(*[start(command, environment) for environment in environments], expect=expect)


def free_port() -> int:
    """Returns a TCP port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def group_of(size: int) -> list[dict[str, str]]:
    """Returns the environment of each of this many ranks that connect without a launcher."""
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), KEY: new_key()}
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def listeners(process: psutil.Process) -> list[tuple[str, int]]:
    """The addresses at which a process and its children listen."""
    found = []
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found += [at.laddr for at in member.net_connections("inet") if at.status == psutil.CONN_LISTEN]
    return [(at.ip, at.port) for at in found]


def assert_trained(run_dir: Path) -> None:
    """The last exported weights are not the base model's, so that weights which equal them say something."""
    from safetensors.torch import load_file

    base = run_dir / json.loads((run_dir / "inputs.json").read_text())["base"]
    last = max((run_dir / "weights").glob("step-*"))
    before, after = (load_file(directory / "model.safetensors") for directory in (base, last))
    furthest = max(float((after[name].float() - before[name].float()).abs().max()) for name in after)
    assert furthest > 1e-3, "training moved nothing"


def rows(run_dir: Path, table: str) -> list[dict[str, Any]]:
    """The valid rows of a table: of each step, those of the attempt that counts; and every roll-back."""
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    valid: list[dict[str, Any]] = []
    for path in sorted((run_dir / "segments" / table).glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            later = [a["resumed_from_step"] for a in attempts if a["attempt"] > row["attempt"]]
            if row.get("kind") == "rolled_back" or all(row["step"] <= step for step in later):
                valid.append(row)
    return valid


def step_of(run: Path) -> int:
    """The step that the run's progress file names; 0 before there is one."""
    try:
        return int(json.loads((run / "progress.json").read_text()).get("step", 0))
    except (OSError, ValueError):
        return 0


def weights(run: Path) -> dict[str, "torch.Tensor"]:
    """The weights that the run exported last."""
    from safetensors.torch import load_file

    (file,) = sorted((run / "weights").glob("step-*"))[-1].glob("*.safetensors")
    return load_file(file)
