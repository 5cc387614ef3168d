"""Ranks that share each sequence compute the same as one rank, each with its part of the activations."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.planning.memory import memory_estimate
from pipelines.planning.model_shape import model_shape
from rpg.learner.sequence_parallel import check_heads
from specs.errors import SpecError
from specs.machine.exit_cause import noted_exits
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC, finish, group_of, make_inputs, make_run, start

CONFIG = {
    **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"intermediate_size": 384, "tie_word_embeddings": True, "max_position_embeddings": 512},
}
VOCABULARY = 258


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**CONFIG, vocab_size=VOCABULARY)).save_pretrained(directory)
    return directory


def measured(base: Path, *, ranks: int, size: int, precision: str = "float32") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.rpg.sequence_parallel_worker", str(base), str(size), precision]
    output = finish(*(start(command, environment) for environment in group_of(ranks)))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def estimate(size: int) -> int:
    """Bytes of activations and logits that the plan expects of a row of 501 tokens."""
    spec = dict(SPEC)
    spec["model"] = {"source": "scratch", "model_type": "qwen3", "config": CONFIG}
    spec["data"] = {**SPEC["data"], "max_prompt_length": 1}
    spec["rollout"] = {"max_response_length": 500}
    spec["training"] = {
        **{"steps": 1, "prompts_per_step": 2, "group_size": 1, "microbatch_tokens": 501},
        **{"ranks": size, "sequence_parallel_size": size},
    }
    experiment = Experiment.model_validate(spec)
    shape = model_shape(experiment)
    memory = memory_estimate(experiment, shape)
    return memory.activations + memory.logits


@pytest.mark.long
def test_two_ranks_share_a_row_give_the_gradients_of_one_and_hold_half_each(base: Path) -> None:
    for rank in measured(base, ranks=2, size=2):
        assert rank["logprobs"] < 1e-5
        assert rank["entropies"] < 1e-5
        assert rank["gradients"] < 1e-5
        assert rank["layers"] == 2 * CONFIG["num_hidden_layers"]
        assert rank["peak"] == pytest.approx(estimate(2), rel=0.1)
        assert rank["peak"] < 0.6 * estimate(1)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_in_one_group_or_in_two_do_too(base: Path, size: int) -> None:
    """With four ranks to a group each has one of four heads, and two share a head of keys."""
    for rank in measured(base, ranks=4, size=size):
        assert rank["logprobs"] < 1e-5
        assert rank["gradients"] < 1e-5


@pytest.mark.long
def test_in_bfloat16_a_shared_row_differs_as_little_as_rounding_does(base: Path) -> None:
    for rank in measured(base, ranks=2, size=2, precision="bfloat16"):
        assert rank["gradients"] < 0.03


WITHOUT_MEMORY = """
import sys
from pathlib import Path
import torch
from rpg.learner.deepspeed import Learner
from rpg.processes import ranks
from rpg.train import main

def backward(self, loss):
    if ranks.rank() == 1:
        raise torch.OutOfMemoryError("no room for the gradient")
    return add_gradient(self, loss)

add_gradient, Learner.backward = Learner.backward, backward
sys.exit(main(Path(sys.argv[1])))
"""


@pytest.mark.long
def test_a_helping_rank_without_memory_notes_the_row_that_it_shared(tmp_path: Path) -> None:
    """Half of the recorded amount becomes the next attempt's budget."""
    make_inputs(tmp_path)
    run_dir = make_run(tmp_path, tmp_path / "run", training={"ranks": 2, "sequence_parallel_size": 2})
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(run_dir)]
    finish(*(start(command, environment) for environment in group_of(2)), expect=1)
    leading, helping = noted_exits(run_dir)
    assert helping.cause == "out_of_memory"
    assert helping.microbatch_tokens == leading.microbatch_tokens > 30


def test_heads_that_cannot_be_shared_out_are_named_with_the_sizes_that_can() -> None:
    check_heads(8, heads=32, key_heads=4)
    with pytest.raises(SpecError, match=r"3 for 32 heads of queries and 8 of keys    allowed: 1, 2, 4, 8, 16, 32$"):
        check_heads(3, heads=32, key_heads=8)
