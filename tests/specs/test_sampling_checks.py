"""What a spec may say of sampling, and what is warned of."""

import pytest
from spec_text import changed, message, warnings

ROLLOUT = "rollout: {max_response_length: 32}"


def spec_with(said: str) -> str:
    """The good spec with another rollout section, or an evaluation section."""
    return changed(ROLLOUT, said if said.startswith("rollout") else f"{ROLLOUT}\n{said}")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "rollout: {max_response_length: 32, top_p: 0.9}",
            "rollout.top_p: the importance ratio is biased",
        ),
        (
            "rollout: {max_response_length: 32, top_k: 20}",
            "given: 20: tokens are drawn from a part of the distribution",
        ),
        ("evaluation: {temperature: 0, samples_per_problem: 1, top_k: 5}", "evaluation.top_k: top_k has no effect"),
        ("evaluation: {temperature: 0, samples_per_problem: 1, top_p: 0.5}", "evaluation.top_p: top_p has no effect"),
        (
            "rollout: {max_response_length: 32, stop: ['.']}",
            "rollout.stop: evaluation does not stop where training does",
        ),
    ],
)
def test_sampling_that_misleads_is_warned_of(said: str, expected: str) -> None:
    text = warnings(spec_with(said))
    assert expected in text
    assert text.endswith("1 warning")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (", tensor_parallel_size: 2", "rollout.tensor_parallel_size: an engine in the trainer's process has one GPU"),
        (", placement: dedicated, sleep: true", "rollout.sleep: a dedicated engine shares its memory with nobody"),
        (", sleep: true}\nresources: {device: cpu", "rollout.sleep: vLLM cannot sleep on a CPU"),
        (", placement: dedicated, engine_gpus: [3, 3]", "rollout.engine_gpus.1: the GPU is given twice"),
        (
            ", placement: dedicated, tensor_parallel_size: 2, engine_gpus: [2, 3, 4]",
            "rollout.engine_gpus: the GPUs cannot be dealt out evenly",
        ),
    ],
)
def test_engines_that_cannot_be_where_they_are_put_are_errors(said: str, expected: str) -> None:
    text = message(spec_with(f"rollout: {{engine: vllm, max_response_length: 32{said}}}"))
    assert expected in text
    assert text.endswith("1 error; nothing was run")


@pytest.mark.parametrize(
    "said", [", engine_gpus: [1]", ", placement: dedicated, engine_gpus: [1]}\nresources: {device: cpu"]
)
def test_gpus_that_no_engine_takes_are_warned_of(said: str) -> None:
    text = warnings(spec_with(f"rollout: {{engine: vllm, max_response_length: 32{said}}}"))
    assert "rollout.engine_gpus: engine_gpus has no effect" in text


def test_sampling_that_fits_is_not_warned_of() -> None:
    said = "rollout: {max_response_length: 32, stop: ['.']}\nevaluation: {stop: ['.'], top_p: 0.95, top_k: 20}"
    assert warnings(changed(ROLLOUT, said)) == "0 warnings"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("rollout: {max_response_length: 32, top_p: 0}", "rollout.top_p: must be greater than 0"),
        ("rollout: {max_response_length: 32, top_k: -1}", "rollout.top_k: must be at least 0"),
        ("rollout: {max_response_length: 32, stop: ['']}", "rollout.stop.0: must not be empty"),
        ("evaluation: {stop: ['a', '']}", "evaluation.stop.1: must not be empty"),
    ],
)
def test_sampling_out_of_range_is_an_error(said: str, expected: str) -> None:
    assert expected in message(spec_with(said))
