"""Every form of every verb's table says the same."""

import csv
import io
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from places import ROOT
from recorded_home import record_experiment, record_two_cells
from recorded_study import record, study, trial

from pipelines.cli.output import Format, TableFormat
from pipelines.home.home import Home
from pipelines.report.charts import line, line_chart
from pipelines.report.figures import save_figures
from pipelines.terminal.cells import spreadsheet_cell

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
    """Verbs with arguments, in a home that has an experiment and a study."""
    runs = record_two_cells(home)
    record_experiment(home, runs)
    record(home, study([trial(number, 0.4 + 0.1 * number) for number in range(3)]))
    monkeypatch.setenv("RPG_HOME", str(home.root))
    return {name: tuple(runs[0] if word == "RUN" else word for word in words) for name, words in RESULTS.items()}


def cells(text: str, kind: Format | TableFormat) -> list[list[str]]:
    """Returns a table's cells, by row, read back from the text of a form for papers or for programs."""
    match kind.value:
        case "csv":
            return list(csv.reader(io.StringIO(text)))
        case "markdown":
            first, rule, *rest = text.splitlines()
            assert set(rule) == {"|", "-"}
            return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (first, *rest)]
        case "latex":
            lines = text.splitlines()
            if lines[0] == r"\begin{table}":
                assert [lines[1], lines[2][:9], lines[-1]] == [r"\centering", r"\caption{", r"\end{table}"]
                lines = lines[3:-1]
            assert lines[0] == rf"\begin{{tabular}}{{{'l' * len(lines[2].split(' & '))}}}"
            assert [lines[1], lines[3], *lines[-2:]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
            plain = [line.replace("$^{*}$", " *").replace("\\_", "_").replace("\\%", "%") for line in lines]
            return [row.removesuffix(r" \\").split(" & ") for row in (plain[2], *plain[4:-2])]
        case "html":
            rows = re.findall("<tr>(.*?)</tr>", text)
            return [[unescape(cell) for cell in re.findall("<t[hd]>(.*?)</t[hd]>", row)] for row in rows]
        case "json":
            rows = json.loads(text)
            return [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        case _:
            raise ValueError(kind)


@pytest.mark.more
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
        assert of_csv[1][0].removesuffix(", %") in told
    elif whole_answer:
        assert {"groups", "answer", "accuracy"} <= json.loads(told).keys()
    else:
        header, *rows = ([cell.strip() for cell in row] for row in cells(told, kind))
        # A paper's table names the field in which groups differ; a program's has the same columns for every question.
        field = "group" if kind is TableFormat.csv or verb == "report of a run" else "clip.high"
        assert [header, *rows] == [[field if name == "group" else name for name in of_csv[0]], *of_csv[1:]]


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.parametrize("verb", RESULTS)
def test_rows_that_no_table_has_are_refused(verbs: dict[str, tuple[str, ...]], call: Call, verb: str) -> None:
    code, told, error = call(*verbs[verb], "--format", "latex", "--rows", "nonesuch")
    assert (code, told) == (2, "")
    assert "no row has 'nonesuch' in its first column; rows: " in " ".join(error.split())


FORMULAS = ("=1+1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "-1.5 [-2, -1]")
PLAIN = ("-1.5", "+3", "-.5e-3", "a=1", "", "1e5")


@pytest.mark.more
@pytest.mark.usefixtures("verbs")
@pytest.mark.parametrize("to_file", [False, True])
def test_safe_csv_quotes_what_a_spreadsheet_would_compute_and_leaves_numbers(
    call: Call, to_file: bool, tmp_path: Path
) -> None:
    values = ", ".join(f"({number}, '{text}', {-number - 0.5})" for number, text in enumerate((*FORMULAS, *PLAIN)))
    query = f'select t as "=a", v from (values {values}) as x(n, t, v) order by n'

    def told(*words: str) -> list[list[str]]:
        file = tmp_path / "rows.csv"
        code, out, error = call("sql", query, *words, *(("-o", str(file)) if to_file else ("--format", "csv")))
        assert (code, error) == (0, "")
        return list(csv.reader(io.StringIO((file.read_bytes() if to_file else out.encode()).decode(), newline="")))

    numbers = [str(-number - 0.5) for number in range(len(FORMULAS) + len(PLAIN))]
    assert told() == [["=a", "v"], *map(list, zip((*FORMULAS, *PLAIN), numbers, strict=True))]
    safe = [f"'{text}" for text in FORMULAS]
    assert told("--safe-csv") == [["'=a", "v"], *map(list, zip((*safe, *PLAIN), numbers, strict=True))]


@pytest.mark.more
def test_safe_csv_goes_with_every_verb_that_writes_csv(verbs: dict[str, tuple[str, ...]], call: Call) -> None:
    for verb in verbs.values():
        code, told, error = call(*verb, "--format", "csv", "--safe-csv")
        assert (code, error) == (0, "")
        of_csv = list(csv.reader(io.StringIO(told)))
        assert not [cell for row in of_csv for cell in row if spreadsheet_cell(cell) != cell], verb
        plain = list(csv.reader(io.StringIO(call(*verb, "--format", "csv")[1])))
        assert of_csv == [[spreadsheet_cell(cell) for cell in row] for row in plain]
    listed = {path.stem for path in (ROOT / "pipelines" / "cli" / "verbs").glob("*.py") if "Format" in path.read_text()}
    assert listed == {"sql", "compare", "report", "study"}


def test_figures_have_no_formula_in_their_csv(tmp_path: Path) -> None:
    chart = line_chart([line([(0.0, -1.0)], "@label")], title="Rewards", name="rewards", x_label="=x")
    assert chart is not None
    save_figures([chart], tmp_path, safe=True)
    (file,) = tmp_path.glob("*.csv")
    assert list(csv.reader(io.StringIO(file.read_text())))[:2] == [["line", "'=x", "value"], ["'@label", "0.0", "-1.0"]]


@pytest.mark.more
@pytest.mark.usefixtures("verbs")
@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>", "a|b", "a\nb", "&lt;b&gt;", "<!--", "a\\|b"])
def test_a_markdown_cell_holds_no_html_and_stays_one_cell(call: Call, text: str) -> None:
    query = f"select '{text}' as \"<b>\", 1 as n"
    code, told, error = call("sql", query, "--format", "markdown")
    assert (code, error) == (0, "")
    html = MarkdownIt("commonmark").enable("table").render(told)
    shown = re.findall(r"<t[hd]>(.*?)</t[hd]>", html)
    assert [unescape(cell) for cell in shown] == ["<b>", "n", text.replace("\n", "\\n"), "1"]
    assert not re.findall(r"<(?!/?(?:table|thead|tbody|tr|th|td)>)", html)
