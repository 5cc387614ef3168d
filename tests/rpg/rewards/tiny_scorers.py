"""Models that score, of some thousand parameters: a judge that writes and a classifier. Both like a response
without a 0."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rpg.base.tokenization import make_tokenizer
from specs.schema.model import ByteTokenizer

STEPS, BATCH = 150, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
JUDGE: dict[str, Any] = {
    "type": "judge",
    "rubric": "Has it no 0?",
    "scale": {"low": 1, "high": 9},
    "template": "{answer}",
    "reasoning": False,
}


def _responses(count: int) -> list[str]:
    generator = random.Random(0)
    return ["".join(generator.choices("11=0", k=generator.randrange(1, 9))) for _ in range(count)]


def _trained(model: Any, loss_of: Callable[[list[str]], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    responses = _responses(STEPS * BATCH)
    for step in range(STEPS):
        loss = loss_of(responses[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1, loss


def make_judge(directory: Path, **sizes: int) -> Path:
    """Trained by supervised steps on questions and verdicts: 9 if the answer has no 0, else 1."""
    tokenizer = make_tokenizer(ByteTokenizer(), [])
    torch.manual_seed(0)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **special, **SIZES | sizes))

    def loss_of(responses: list[str]) -> torch.Tensor:
        rows = []
        for response in responses:
            question = f"{response}\nVerdict: "
            verdict = ("1" if "0" in response else "9") + tokenizer.eos_token
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, verdict)]
            rows.append((ids[0] + ids[1], [-100] * len(ids[0]) + ids[1]))
        longest = max(len(ids) for ids, _ in rows)
        tokens = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([wanted + [-100] * (longest - len(wanted)) for _, wanted in rows])
        return model(input_ids=tokens, labels=labels).loss

    _trained(model, loss_of)
    model.save_pretrained(directory / "judge")
    tokenizer.save_pretrained(directory / "judge")
    return directory / "judge"


def make_classifier(directory: Path) -> Path:
    """Trained by steps of regression: to 1 if the response has no 0, else to 0."""
    tokenizer = make_tokenizer(ByteTokenizer(), [])
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **SIZES)
    model = Qwen3ForSequenceClassification(config)
    tokenizer.padding_side = "right"

    def loss_of(responses: list[str]) -> torch.Tensor:
        tokens = tokenizer([f"1=\n\n{response}" for response in responses], padding=True, return_tensors="pt")
        wanted = torch.tensor([float("0" not in response) for response in responses])
        return (model(**tokens).logits[:, 0] - wanted).square().mean()

    _trained(model, loss_of)
    model.save_pretrained(directory / "classifier")
    tokenizer.save_pretrained(directory / "classifier")
    return directory / "classifier"
