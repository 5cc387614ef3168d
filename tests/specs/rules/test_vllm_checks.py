"""Allowed settings of vLLM's engines."""

import pytest
from spec_text import changed, message, warnings, write

from specs.loader import load_any, load_experiment

ROLLOUT = "rollout: {max_response_length: 32}"


def with_engine(fields: str) -> str:
    """The good spec with vLLM and these fields after the others of its section."""
    return changed(ROLLOUT, f"rollout: {{engine: vllm, max_response_length: 32{fields}}}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (", tensor_parallel_size: 2", "rollout.tensor_parallel_size: an engine in the trainer's process has only"),
        (
            ", ranks_per_engine: 2",
            "rollout.ranks_per_engine: an engine in the trainer's process serves only that process",
        ),
        (
            ", placement: colocated, engines: 4",
            "rollout.engines: an engine in the trainer's process is not a separate process",
        ),
        (
            ", engines: 2, ranks_per_engine: 2",
            "rollout.ranks_per_engine: rollout.engines already determines how many ranks share an engine",
        ),
        (", placement: dedicated, sleep: true", "rollout.sleep: a dedicated engine does not share its memory"),
        (", sleep: true}\nresources: {device: cpu", "rollout.sleep: vLLM cannot sleep on a CPU"),
        (", kv_cache: fp8}\nresources: {device: cpu", "rollout.kv_cache: an 8-bit cache needs a GPU"),
        (
            ", replay_routing: true}\nresources: {device: cpu",
            "rollout.replay_routing: vLLM reports a token's experts only on a GPU",
        ),
        (
            ", replay_routing: true, enable_prefix_caching: false",
            "rollout.replay_routing: vLLM reports experts only with prefix caching",
        ),
        (", placement: dedicated, engine_gpus: [3, 3]", "rollout.engine_gpus.1: the GPU is given twice"),
        (
            ", placement: dedicated, tensor_parallel_size: 2, engine_gpus: [2, 3, 4]",
            "rollout.engine_gpus: the GPUs do not divide evenly among the engines",
        ),
    ],
)
def test_engines_that_cannot_be_where_they_are_put_are_errors(fields: str, expected: str) -> None:
    text = message(with_engine(fields))
    assert expected in text
    assert text.endswith("1 error; nothing was run")


NODES = "launcher: {type: slurm, nodes: 2}"
TOO_FEW = "rollout.engine_gpus: too few GPUs for the engines"
IN_TWO_WAYS = "rollout.engine_gpus: it mixes GPUs of the ranks that the engines serve with other GPUs"


@pytest.mark.parametrize(
    ("fields", "launcher", "expected"),
    [
        ("engine_gpus: [4, 5, 6]", "", TOO_FEW),
        ("engine_gpus: [2, 3, 4], tensor_parallel_size: 3", NODES, TOO_FEW),
        ("engine_gpus: [0, 4], ranks_per_engine: 2", "", IN_TWO_WAYS),
        ("engine_gpus: [1, 2], ranks_per_engine: 2", "", ""),
        ("engine_gpus: [2, 3]", NODES, ""),
    ],
)
def test_the_gpus_that_are_named_must_do_for_the_engines_of_each_machine(
    fields: str, launcher: str, expected: str
) -> None:
    """4 ranks, on one machine or two a node."""
    text = with_engine(f", placement: dedicated, {fields}").replace("steps: 4", "steps: 4\n  ranks: 4")
    assert not load_any(write(f"{text}{launcher}\n")).warnings, "without GPUs nothing is wrong"
    on_gpus = f"{text}{launcher}\nresources: {{device: cuda}}\n"
    if expected:
        assert expected in message(on_gpus)
    else:
        load_any(write(on_gpus))


@pytest.mark.parametrize(
    ("fields", "ranks", "launcher", "given"),
    [
        ("engine_gpus: [2, 3, 4, 5, 6, 7]", 2, "", "6 GPUs for 2 engines of 1"),
        ("engine_gpus: [4, 5, 6, 7], ranks_per_engine: 4, tensor_parallel_size: 2", 4, "", "4 GPUs for 1 engines of 2"),
        ("engine_gpus: [4, 5, 6, 7]", 4, NODES, "4 GPUs for 2 engines of 1"),
        ("engine_gpus: [4, 5, 6, 7], ranks_per_engine: 2, tensor_parallel_size: 2", 4, "", ""),
        ("engine_gpus: [4, 5]}\nresources: {device: cpu", 1, "", ""),
    ],
)
def test_gpus_that_would_be_idle_are_refused_by_name(fields: str, ranks: int, launcher: str, given: str) -> None:
    text = with_engine(f", placement: dedicated, {fields}").replace("steps: 4", f"steps: 4\n  ranks: {ranks}")
    spec = f"{text}{launcher}\n"
    if not given:
        load_any(write(spec))
        return
    refused = message(spec)
    assert "rollout.engine_gpus: more GPUs than the engines use\n" in refused
    assert f"given: {given}    allowed: " in refused
    if ranks == 2:
        assert "hint: GPUs 4, 5, 6, 7 would be idle: write rollout.engines: 6, raise" in refused
        load_any(write(spec.replace("engine_gpus", "engines: 6, engine_gpus")))


@pytest.mark.parametrize(
    "fields", [", engine_gpus: [1]", ", placement: dedicated, engine_gpus: [1]}\nresources: {device: cpu"]
)
def test_gpus_that_no_engine_takes_are_warned_of(fields: str) -> None:
    text = warnings(with_engine(fields))
    assert "rollout.engine_gpus: engine_gpus has no effect" in text


APART = "launcher: {type: ray, engine_nodes: 2}"


@pytest.mark.parametrize(
    ("fields", "launcher", "expected"),
    [
        (", placement: dedicated", APART, ""),
        (", placement: dedicated, ranks_per_engine: 2", "launcher: {type: slurm, nodes: 4, engine_nodes: 2}", ""),
        (
            "",
            APART,
            "launcher.engine_nodes: only dedicated engines of vLLM can be on machines without ranks\n"
            f"    25 | {APART}\n"
            "  given: rollout.engine vllm, placement colocated\n"
            "  hint: write rollout: {engine: vllm, placement: dedicated}, or leave it out\n",
        ),
        (
            ", placement: dedicated, engine_gpus: [4, 5, 6, 7]",
            APART,
            "rollout.engine_gpus: it names GPUs of the ranks' machines, but the engines are on other machines\n",
        ),
        (
            ", placement: dedicated, ranks_per_engine: 2",
            "launcher: {type: slurm, nodes: 4, engine_nodes: 3}",
            "launcher.engine_nodes: more nodes than engines\n"
            "    25 | launcher: {type: slurm, nodes: 4, engine_nodes: 3}\n"
            "  given: 3 for 2 engines    allowed: at most 2\n",
        ),
    ],
)
def test_engines_on_machines_of_their_own_are_dedicated_ones_that_have_room_there(
    fields: str, launcher: str, expected: str
) -> None:
    """4 ranks."""
    text = with_engine(fields).replace("steps: 4", "steps: 4\n  ranks: 4") + f"{launcher}\n"
    if expected:
        assert expected in message(text)
    else:
        load_any(write(text))


def test_sampling_in_the_trainer_needs_no_machines_for_engines() -> None:
    text = changed("steps: 4", "steps: 4\n  ranks: 4") + f"{APART}\n"
    assert "  given: rollout.engine transformers\n" in message(text)


def test_an_engine_that_samples_ahead_cannot_sleep_meanwhile() -> None:
    text = message(with_engine(", sleep: true, max_staleness: 1"))
    assert "rollout.sleep: an engine that samples during training cannot sleep\n" in text


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_two_gpus_train_and_six_sample(engine: str) -> None:
    text = changed(ROLLOUT, f"rollout: {{engine: {engine}, max_response_length: 32, engines: 6}}")
    spec = text.replace("steps: 4", "steps: 4\n  ranks: 2") + "resources: {device: cuda}\n"
    experiment = load_experiment(write(spec))
    assert (experiment.gpus, experiment.samplers, experiment.rollout.hosts(2)) == (8, 6, [0, 0, 0, 1, 1, 1])
    assert "rollout.engines: a step has fewer prompts than engines: some are idle" in warnings(spec)


def test_engines_are_spread_evenly_over_the_nodes_of_the_ranks_or_over_their_own() -> None:
    text = with_engine(", engines: 6").replace("steps: 4", "steps: 4\n  ranks: 4")
    on_two = load_experiment(write(f"{text}{NODES}\n"))
    assert (on_two.gpus, on_two.samplers, on_two.gpus_beside(2)) == (4 + 6, 6, 2 + 3)
    apart = load_experiment(write(f"{text}launcher: {{type: slurm, nodes: 2, engine_nodes: 1}}\n"))
    assert (apart.gpus, apart.samplers, apart.gpus_beside(2)) == (4 + 6, 6, 2)
    refused = message(f"{text}launcher: {{type: slurm, nodes: 4}}\n")
    assert "rollout.engines: the engines do not divide evenly among the machines\n" in refused
    assert "given: 6 engines on 4 nodes" in refused
