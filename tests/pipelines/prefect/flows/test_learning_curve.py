"""The learning curve on Prefect's dashboard, as Mermaid's chart."""

import pytest

from pipelines.prefect.flows.dashboard import curve_mermaid


def axis(steps: list[int]) -> str:
    lines = curve_mermaid([(step, 0.1 * step) for step in steps], "reward").splitlines()
    return next(line.strip() for line in lines if "x-axis" in line)


@pytest.mark.parametrize("steps", [[1], [1, 2], [50, 100, 150], [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]])
def test_few_steps_and_uneven_ones_are_named_each(steps: list[int]) -> None:
    assert axis(steps) == f'x-axis "step" [{", ".join(map(str, steps))}]'


def test_many_even_steps_are_an_axis_of_numbers() -> None:
    assert axis(list(range(1, 5001))) == 'x-axis "step" 1 --> 5000'


def test_values_of_a_long_run_are_means_of_neighbours() -> None:
    chart = curve_mermaid([(step, float(step % 2)) for step in range(1, 121)], "reward")
    assert f"line [{', '.join(['0.5000'] * 60)}]" in chart


def test_uneven_steps_of_a_long_run_have_a_name_for_each_mean() -> None:
    steps = [step for step in range(1, 201) if step % 7]
    assert len(steps) == 172
    names = axis(steps).removeprefix('x-axis "step" [').removesuffix("]").split(", ")
    assert list(map(int, names)) == [*steps[2::3], steps[-1]], "the last of three neighbours"
