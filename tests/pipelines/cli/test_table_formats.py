"""Every form of every verb's table says the same."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_home import record_experiment, record_two_cells
from recorded_study import record, study, trial

from pipelines.cli.output import Format, TableFormat
from pipelines.home.home import Home

Call = Callable[..., tuple[int, str, str]]
RESULTS = {
    "compare": ("compare", "sums"),
    "report of an experiment": ("report", "sums"),
    "report of a run": ("report", "RUN"),
    "report of a study": ("report", "clips"),
    "study report": ("study", "report", "clips"),
}
QUERY = "select run_id, step, dataset, round(value, 4) as value from evaluations where metric = 'mean@8' order by all"


@pytest.fixture
def verbs(home: Home, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Verbs with what they are asked, in a home that has an experiment and a study."""
    runs = record_two_cells(home)
    record_experiment(home, runs)
    record(home, study([trial(number, 0.4 + 0.1 * number) for number in range(3)]))
    monkeypatch.setenv("RPG_HOME", str(home.root))
    return {name: tuple(runs[0] if word == "RUN" else word for word in words) for name, words in RESULTS.items()}


def cells(text: str, kind: Format | TableFormat) -> list[list[str]]:
    """What a table has, by row, read back from the text of a form for papers or for programs."""
    match kind.value:
        case "csv":
            return list(csv.reader(io.StringIO(text)))
        case "markdown":
            first, rule, *rest = text.splitlines()
            assert set(rule) == {"|", "-"}
            return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (first, *rest)]
        case "latex":
            lines = text.splitlines()
            assert lines[0] == rf"\begin{{tabular}}{{{'l' * len(lines[2].split(' & '))}}}"
            assert [lines[1], lines[3], *lines[-2:]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
            plain = [line.replace("$^{*}$", " *").replace("\\_", "_").replace("\\%", "%") for line in lines]
            return [row.removesuffix(r" \\").split(" & ") for row in (plain[2], *plain[4:-2])]
        case "json":
            rows = json.loads(text)
            return [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        case _:
            raise ValueError(kind)


@pytest.mark.parametrize("verb", RESULTS)
@pytest.mark.parametrize("kind", TableFormat)
def test_a_table_of_results_says_the_same_in_every_form(
    verbs: dict[str, tuple[str, ...]], call: Call, verb: str, kind: TableFormat
) -> None:
    code, told, error = call(*verbs[verb], "--format", kind.value)
    assert (code, error) == (0, "")
    of_csv = cells(call(*verbs[verb], "--format", "csv")[1], TableFormat.csv)
    assert len(of_csv) > 1
    assert len({len(row) for row in of_csv}) == 1
    whole_answer = kind is TableFormat.json and "study" not in verb
    if kind is TableFormat.table:
        assert of_csv[1][-1].split()[0] in told
    elif whole_answer:
        assert {"groups", "answer", "accuracy"} <= json.loads(told).keys()
    else:
        assert [[cell.strip() for cell in row] for row in cells(told, kind)] == of_csv


@pytest.mark.parametrize("kind", Format)
def test_rows_of_sql_say_the_same_in_every_form(
    verbs: dict[str, tuple[str, ...]], call: Call, kind: Format, tmp_path: Path
) -> None:
    of_csv = cells(call("sql", QUERY, "--format", "csv")[1], Format.csv)
    assert len(of_csv) > len(verbs)
    if kind is Format.parquet:
        import pyarrow.parquet as pq

        assert call("sql", QUERY, "--format", "parquet", "-o", str(tmp_path / "rows"))[0] == 0
        assert pq.read_table(tmp_path / "rows").num_rows == len(of_csv) - 1
        return
    code, told, error = call("sql", QUERY, "--format", kind.value)
    assert (code, error) == (0, "")
    if kind is Format.table:
        assert len(told.splitlines()) == len(of_csv) + 1  # a rule under the names
        assert all(row[0] in told for row in of_csv)
        return
    assert cells(told, kind) == of_csv
