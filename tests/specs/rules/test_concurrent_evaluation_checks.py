"""What `evaluation.concurrent_ranks` needs beside training, and that it changes no result."""

import pytest
from spec_text import GOOD, message, warnings, write

from specs.loader import load_experiment
from specs.schema.launchers import SlurmLauncher

EVALUATION = "evaluation: {checkpoints: all, concurrent_ranks: 2}\n"
EXPORTING = GOOD.replace("minibatches: 2\n", "minibatches: 2\n  export_every_steps: 2\n  ranks: 4\n")


def test_it_is_no_part_of_what_a_result_is():
    sections = ("evaluation: {}\n", "evaluation: {concurrent_ranks: 2}\n")
    plain, concurrent = (load_experiment(write(EXPORTING + section)).identity() for section in sections)
    assert plain == concurrent


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (4, 2)])
def test_slurm_gives_a_node_as_many_ranks_as_training(ranks, nodes):
    text = EXPORTING + "launcher: {type: slurm, nodes: 2}\n" + EVALUATION.replace("ranks: 2", f"ranks: {ranks}")
    launcher = load_experiment(write(text)).concurrent_evaluation.launcher
    assert isinstance(launcher, SlurmLauncher)
    assert launcher.nodes == nodes
    assert "2 nodes" in message(text.replace(f"concurrent_ranks: {ranks}", "concurrent_ranks: 3"))


def test_either_the_trainer_measures_or_ranks_beside_it_and_both_need_problems():
    assert message(EXPORTING + "evaluation: {every_steps: 2, concurrent_ranks: 1}\n") == (
        "spec.yaml:26: evaluation.concurrent_ranks: the trainer evaluates its policy itself\n"
        "    26 | evaluation: {every_steps: 2, concurrent_ranks: 1}\n"
        "  given: 1, with evaluation.every_steps 2\n"
        "  hint: write `checkpoints: all` and `training.export_every_steps` and leave `every_steps` out; or leave "
        "`concurrent_ranks` out\n"
        "1 error; nothing was run"
    )
    assert "there is no evaluation set" in message(EXPORTING + EVALUATION, "data.evaluation=[]")


def test_there_may_be_nothing_to_measure_before_the_end():
    assert "concurrent_ranks has no effect" in warnings(
        EXPORTING + "evaluation: {checkpoints: final, concurrent_ranks: 1}\n"
    )
    assert warnings(EXPORTING + EVALUATION) == "0 warnings"
