"""What a spec may say of vLLM's engines."""

import pytest
from spec_text import changed, message, warnings

ROLLOUT = "rollout: {max_response_length: 32}"


def with_engine(fields: str) -> str:
    """The good spec with vLLM and these fields after the others of its section."""
    return changed(ROLLOUT, f"rollout: {{engine: vllm, max_response_length: 32{fields}}}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (", tensor_parallel_size: 2", "rollout.tensor_parallel_size: an engine in the trainer's process has one GPU"),
        (
            ", ranks_per_engine: 2",
            "rollout.ranks_per_engine: an engine in the trainer's process serves that process alone",
        ),
        (", placement: dedicated, sleep: true", "rollout.sleep: a dedicated engine shares its memory with nobody"),
        (", sleep: true}\nresources: {device: cpu", "rollout.sleep: vLLM cannot sleep on a CPU"),
        (", placement: dedicated, engine_gpus: [3, 3]", "rollout.engine_gpus.1: the GPU is given twice"),
        (
            ", placement: dedicated, tensor_parallel_size: 2, engine_gpus: [2, 3, 4]",
            "rollout.engine_gpus: the GPUs cannot be dealt out evenly",
        ),
    ],
)
def test_engines_that_cannot_be_where_they_are_put_are_errors(fields: str, expected: str) -> None:
    text = message(with_engine(fields))
    assert expected in text
    assert text.endswith("1 error; nothing was run")


@pytest.mark.parametrize(
    "fields", [", engine_gpus: [1]", ", placement: dedicated, engine_gpus: [1]}\nresources: {device: cpu"]
)
def test_gpus_that_no_engine_takes_are_warned_of(fields: str) -> None:
    text = warnings(with_engine(fields))
    assert "rollout.engine_gpus: engine_gpus has no effect" in text


def test_an_engine_that_samples_ahead_cannot_sleep_meanwhile() -> None:
    text = message(with_engine(", sleep: true, max_staleness: 1"))
    assert "rollout.sleep: an engine that samples while the learner trains cannot sleep then\n" in text
