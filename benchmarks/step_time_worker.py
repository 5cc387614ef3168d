"""One process of benchmarks/step_time.py: `WAY LENGTHS SIGNAL SEED STEPS DIRECTORY`; leaves DIRECTORY/result.json."""

import json
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from small_qwen3 import PAD, VOCABULARY, small_qwen3
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

GROUP_SIZE, PROMPTS = 8, 8
ENDS = {"tailed": list(range(VOCABULARY * 11 // 512)), "equal": [0]}
LIMITS = {"tailed": 256, "equal": 62}
SUMS = ("sampled", "top_k", "full")
CACHE_GIB = {"tailed": 0.25, "equal": 0.0625}
"""vLLM's, for 64 responses at once."""
LEARNING_RATE = 1e-6
MICROBATCH_ROWS = 16
"""TRL's per-device batch; four of them make an update."""


def text(token: int) -> str:
    """Text of a token. DAPO's scorer reads the last answer: that of one token in twelve is right."""
    if token < len(ENDS["tailed"]):
        return f"<end{token}>|"
    return "<pad>|" if token == PAD else f"Answer: {int(token % 12 == 0)}\n{token}|"


def make_base(directory: Path, lengths: str) -> None:
    """Tokenizer and model. With equal lengths the end token's logit lies far below all others."""
    vocabulary = {text(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=text(PAD)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^|]*\|"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=text(PAD), eos_token=text(0)).save_pretrained(
        directory
    )
    model = small_qwen3(ends=ENDS[lengths])
    if lengths == "equal":
        with torch.no_grad():  # hidden states share a direction; the end token's row points away from it
            embeddings = model.get_input_embeddings().weight
            embeddings += 0.02
            embeddings[0] = -0.06
    model.save_pretrained(directory)


def make_prompts() -> list[str]:
    rng = random.Random(0)
    return [
        "".join(text(rng.randrange(len(ENDS["tailed"]) + 9, PAD)) for _ in range(rng.randrange(10, 31)))
        for _ in range(PROMPTS)
    ]


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def trl(directory: Path, lengths: str, seed: int, steps: int) -> dict[str, Any]:
    """TRL's GRPOTrainer: loss dapo, on policy, no KL."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rpg.rewards.functions.math_dapo import MathDapo
    from rpg.types import Problem

    torch.set_num_threads(2)
    base = directory / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    problem = Problem("p", "", "1", "train")
    ends: list[float] = []
    mean_lengths: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        mean_lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [MathDapo(type="math_dapo").score(problem, each).value for each in texts]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        per_device_train_batch_size=MICROBATCH_ROWS,
        gradient_accumulation_steps=PROMPTS * GROUP_SIZE // MICROBATCH_ROWS,
        num_generations=GROUP_SIZE,
        max_completion_length=LIMITS[lengths],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        seed=seed,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=steps,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in make_prompts()]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    seconds = [after - before for before, after in pairwise(ends)]
    return {"seconds": seconds, "mean_lengths": mean_lengths, "peak_gib": peak_gib()}


def ours(directory: Path, lengths: str, signal: str, seed: int, steps: int, engine: str) -> dict[str, Any]:
    """The trainer as a run starts it; a step's seconds from the recording of one to that of the next."""
    run = make_run(directory, lengths, signal, seed, steps, engine)
    subprocess.run([sys.executable, "-m", "rpg.train", str(run)], check=True)
    names = ("time/step", "response_length/mean", "memory/peak_gib")
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for file in (run / "segments" / "metrics").glob("*.parquet"):
        for row in pq.read_table(file, columns=["step", "name", "value"]).to_pylist():
            if row["name"] in found:
                found[row["name"]].append((row["step"], row["value"]))
    by_step = {name: [value for _, value in sorted(values)] for name, values in found.items()}
    return {
        "seconds": by_step["time/step"],
        "mean_lengths": by_step["response_length/mean"],
        "peak_gib": max(by_step["memory/peak_gib"]),
    }


def objective_of(signal: str) -> dict[str, Any]:
    """The objective: with a divergence, with one that is summed over tokens, or without."""
    if signal in ("all", *SUMS):
        return {"type": "rpg", "kl_coef": 1e-4, **({"kl": signal} if signal in SUMS else {})}
    return {"type": "rpg", "divergence": "none"}


def make_run(directory: Path, lengths: str, signal: str, seed: int, steps: int, way: str) -> Path:
    from specs.schema.experiment import Experiment

    engine, _, ahead = way.partition("-")
    data, run = directory / "data", directory / "run"
    data.mkdir()
    run.mkdir()
    rows = [
        {"problem_id": f"p{i}", "prompt": prompt, "answer": "1", "dataset": "train", "metadata": "{}"}
        for i, prompt in enumerate(make_prompts())
    ]
    pq.write_table(pa.Table.from_pylist(rows), data / "train.parquet")
    spec = {
        "name": "step-time",
        "seeds": [seed],
        "model": {"source": "pretrained", "path": "base"},
        "data": {"train": [{"source": "parquet", "name": "train", "path": "train.parquet"}]},
        "reward": {"type": "math_dapo"},
        "rollout": {
            "engine": engine,
            "max_response_length": LIMITS[lengths],
            **({"cpu_cache_gib": CACHE_GIB[lengths]} if engine == "vllm" else {}),
            **({"dynamic_sampling": {"max_batches": 20, "refill": signal}} if signal in ("rounds", "stream") else {}),
            **({"max_staleness": 1, "partial": ahead == "partial"} if ahead else {}),
        },
        # With a divergence every group has a gradient; the behaviour policy is at hand, so it costs no pass.
        "objective": objective_of(signal),
        **({"reference": {"source": "initial"}} if signal in SUMS else {}),
        "training": {
            "steps": steps,
            "prompts_per_step": PROMPTS,
            "group_size": GROUP_SIZE,
            "microbatch_tokens": 512,
            "skip_zero_advantage": signal == "skipped",
            "optimizer": {"learning_rate": LEARNING_RATE},
            "checkpoint": {"every_steps": 1000},
        },
        "resources": {"threads": 2},
    }
    (run / "spec.json").write_text(Experiment.model_validate(spec).model_dump_json())
    inputs = {"run_id": "run", "fingerprint": "f" * 64, "data": "../data", "base": "../base"}
    (run / "inputs.json").write_text(json.dumps(inputs))
    return run


def floor(directory: Path, lengths: str, signal: str, seed: int, steps: int, engine: str) -> dict[str, Any]:
    """The sampler alone, as the trainer would call it, then one plain forward and backward over its samples."""
    from transformers import AutoTokenizer

    from rpg.data.order import PromptOrder, seed_of
    from rpg.samplers import SamplerSettings, open_sampler
    from rpg.types import Sampling
    from specs.schema.experiment import Experiment

    torch.set_num_threads(2)
    spec = Experiment.model_validate_json(
        (make_run(directory, lengths, signal, seed, steps, engine) / "spec.json").read_bytes()
    )
    base = directory / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in make_prompts()]
    model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    settings = SamplerSettings(
        weights_dir=base,
        device=torch.device("cpu"),
        max_length=max(map(len, prompts)) + LIMITS[lengths],
        seed=0,
        learner_model=model if spec.rollout.runs_learner_model else None,
    )
    sampler = open_sampler(spec.rollout, settings)
    order = PromptOrder(PROMPTS, seed=seed_of(seed, 0))
    seconds, mean_lengths = [], []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        groups = sampler.generate(
            [prompts[place] for place in order.take(PROMPTS)],
            group_size=GROUP_SIZE,
            sampling=Sampling(1.0, 1.0, LIMITS[lengths]),
            seeds=[seed_of(seed, step, place) for place in range(PROMPTS)],
        )
        sequences = [(list(group.prompt_ids), list(each.response_ids)) for group in groups for each in group.rollouts]
        forward_and_backward(model, sequences)
        seconds.append(time.perf_counter() - start)
        mean_lengths.append(sum(len(response) for _, response in sequences) / len(sequences))
    sampler.close()
    return {"seconds": seconds, "mean_lengths": mean_lengths, "peak_gib": peak_gib()}


def forward_and_backward(model: Qwen3ForCausalLM, sequences: list[tuple[list[int], list[int]]]) -> None:
    """Cross-entropy of the responses, longest first, in rows x longest <= 2048 tokens."""
    model.zero_grad()
    packs: list[list[tuple[list[int], list[int]]]] = []
    for sequence in sorted(sequences, key=lambda each: -sum(map(len, each))):
        if packs and sum(map(len, packs[-1][0])) * (len(packs[-1]) + 1) <= 2048:
            packs[-1].append(sequence)
        else:
            packs.append([sequence])
    for pack in packs:
        width = sum(map(len, pack[0]))
        ids = torch.full((len(pack), width), PAD)
        labels = torch.full((len(pack), width), -100)
        for row, (prompt, response) in enumerate(pack):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor(prompt + response)
            labels[row, len(prompt) : end] = torch.tensor(response)
        logits = model(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").backward()


def main(way: str, lengths: str, signal: str, seed: str, steps: str, directory: str) -> None:
    place = Path(directory)
    make_base(place / "base", lengths)
    if way == "trl":
        result = trl(place, lengths, int(seed), int(steps))
    elif way.startswith("floor-"):
        result = floor(place, lengths, signal, int(seed), int(steps), way.removeprefix("floor-"))
    else:
        result = ours(place, lengths, signal, int(seed), int(steps), way)
    (place / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
