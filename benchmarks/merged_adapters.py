"""Loss of merging adapters into bfloat16 weights: a model that samples with W + (alpha / rank) B A rounded once.

Of a weight that lies on bfloat16's grid, a change of less than half a step is rounded away. For adapters as they are
after so many updates, each of which moves B by the learning rate, it prints

    moved      how far the policy has moved from the base model: mean difference of logprobs, nats, in float32
    follows    how much of that movement the merged weights have: the slope of theirs over the whole one
    apart      mean difference between merged weights and adapters, nats, both computed in float32
    noise      the same for the base model computed in bfloat16 and in float32
    alike      share of the tokens whose logprobs in bfloat16 have not moved in any bit

`python benchmarks/merged_adapters.py [--hidden-size 256]`
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rpg.learner.adapters import add_adapters, whole_weights
from specs.schema.training import Lora

VOCABULARY = 1000
UPDATES = ((1e-6, 1), (1e-5, 1), (1e-5, 10), (1e-5, 100), (1e-4, 10), (1e-4, 100))
"""Learning rates, and numbers of updates at them."""


def base_model(hidden_size: int) -> PreTrainedModel:
    """Random weights on bfloat16's grid, logits spread as those of a trained model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    nn.init.constant_(model.model.norm.weight, 6.0)
    return model.to(torch.bfloat16)


@torch.no_grad()
def logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logprob of each token after the first. [b, L - 1]"""
    logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def adapted(model: PreTrainedModel, change: float) -> PreTrainedModel:
    """A copy with adapters of rank 16 whose B has moved by at most `change` from 0."""
    model = copy.deepcopy(model)
    add_adapters(model, Lora(rank=16, alpha=32.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.uniform_(-change, change, generator=generator)
    return model


def merged(model: PreTrainedModel, base: PreTrainedModel) -> PreTrainedModel:
    """The base model with the adapters merged into it, as a sampler gets them."""
    result = copy.deepcopy(base)
    result.load_state_dict({weight.name: weight.whole() for weight in whole_weights(model)}, strict=False)
    return result


def main() -> None:
    """Prints a line for each state of the adapters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, default=256)
    base = base_model(parser.parse_args().hidden_size)
    ids = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(2))
    exact_base, rounded_base = logprobs(copy.deepcopy(base).float(), ids), logprobs(base, ids)
    noise = (exact_base - rounded_base).abs().mean()
    for rate, updates in UPDATES:
        policy = adapted(base, rate * updates)
        sampler = merged(policy, base)
        moved = logprobs(copy.deepcopy(policy).float(), ids) - exact_base
        given = logprobs(copy.deepcopy(sampler).float(), ids) - exact_base
        alike = (logprobs(sampler, ids) == rounded_base).float().mean()
        print(
            f"{updates:3} updates at {rate:.0e}: moved {moved.abs().mean():.1e}, follows"
            f" {(given * moved).sum() / (moved * moved).sum():.2f}, apart {(given - moved).abs().mean():.1e},"
            f" noise {noise:.1e}, alike {alike:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
