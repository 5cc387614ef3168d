"""Pages of the dashboard are Markdown: text that a spec or a model holds is no HTML in them."""

from pathlib import Path

from markdown_it import MarkdownIt
from recorded_home import record_experiment, record_two_cells
from recorded_study import record, study, trial

from pipelines.home.home import Home
from pipelines.running.experiment_page import experiment_markdown
from pipelines.studies.answers.dashboard import study_markdown
from pipelines.studies.answers.results import read_study
from specs.machine.files import read_json, write_json

BAD = "<img src=x onerror=alert(1)> | more\nlines"


def shown(markdown: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(markdown))


def test_no_page_of_the_dashboard_has_html_of_a_spec(tmp_path: Path) -> None:
    home = Home(tmp_path)
    runs = record_two_cells(home)
    record_experiment(home, runs)
    for path in (home.experiment("sums") / "experiment.json", *(home.run(run) / "run.json" for run in runs)):
        document = read_json(path) | {"question": BAD}
        if "values" in document:
            document["values"] = dict.fromkeys(document["values"] or ["x"], BAD)
        write_json(path, document)
    page = shown(experiment_markdown(home, "sums"))
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert page.count("<tr>") == 1 + len(runs)
    name = record(home, study([trial(number, 0.5) for number in range(2)]) | {"question": BAD})
    assert "<img" not in shown(study_markdown(home, read_study(home, name)))
