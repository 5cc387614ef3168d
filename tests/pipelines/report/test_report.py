import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawn import chart_of, charts_of, texts_of
from recorded_home import (
    START,
    byte_tokenizer,
    change_spec,
    record_conversation,
    record_evaluated_conversation,
    record_experiment,
    record_run,
    record_tokenizer,
    record_tokens,
    record_two_cells,
    write,
)

from pipelines.home.home import Home
from pipelines.report import charts, evidence, page, write_experiment_report, write_run_report
from pipelines.report.answer import accuracies_by_step, answers, headline, outcomes_of, points
from pipelines.report.charts import Chart, extent, line, line_chart, thin
from pipelines.report.compare import compare
from pipelines.report.evidence import Group, differences, flatten
from pipelines.report.marks import Ramp, StepMarks, ramps_of
from pipelines.report.plots import (
    Mark,
    ParallelAxis,
    Scale,
    bar_chart,
    dot_chart,
    interval_chart,
    mark,
    parallel_chart,
    surface_chart,
)
from pipelines.report.statistics import Interval, seed_mean
from pipelines.report.tokens import ShownToken, conversation
from rpg.certificate.certificate import certificate_record, certify, certify_over_training
from rpg.recording.segments import SegmentWriter
from specs import SpecError, parse_objective
from specs.records import EventRow, MetricRow
from specs.schema.schedule import at_step
from storage import Store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    record_two_cells(home)
    return home


@pytest.mark.more
def test_a_process_of_its_own_writes_a_runs_page(home: Home) -> None:
    command = [sys.executable, "-m", "pipelines.report", "sums-wide-s1"]
    subprocess.run(command, env=os.environ | {"RPG_HOME": str(home.root)}, check=True, timeout=240)
    assert charts_of((home.run("sums-wide-s1") / "report.html").read_text())


def test_a_page_has_a_table_of_contents_whose_links_lead_to_its_headings_in_their_order(home: Home) -> None:
    text = write_experiment_report(home, "sums").read_text()
    contents = text.partition('<nav class="contents">')[2].partition("</nav>")[0]
    links = re.findall(r'<a href="#([^"]+)">(.*?)</a>', contents)
    assert len(links) >= 4
    assert links == re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', text, re.DOTALL)
    assert text.index("</nav>") < text.index("<h2")
    assert "<nav" not in page._with_contents("<header></header>" + 3 * "<h2>one</h2>"), "few need none"


def test_an_experiments_page_answers_first_and_stands_alone(home: Home) -> None:
    text = write_experiment_report(home, "sums").read_text()
    assert all(reference.startswith("#") for reference in re.findall(r'\b(?:src|href)="([^"]+)"', text))
    assert "url(" not in text
    assert "On two-terms at step 60, by clip.high: 0.28 is best" in text
    assert text.index("is best") < text.index("<figure")
    assert len(charts_of(text)) == 10, "one of intervals and nine learning curves"
    assert "Constant throughout: learning_rate 0.0001" in text
    assert len(text) < 800_000


def test_a_runs_page_shows_its_gain_its_responses_and_its_times(home: Home) -> None:
    path = write_run_report(home, "sums-wide-s1")
    text = path.read_text()
    assert path == home.run("sums-wide-s1") / "report.html"
    assert re.search(r"Accuracy on two-terms rose from \d\d\.\d % to \d\d\.\d %, \+\d\d\.\d points", text)
    assert "60 held-out problems and one seed" in text
    assert "gold answer 99" in text
    assert "2 min 30 s" in text
    assert "&#34;kl_coef&#34;: 0.01" in text


def test_accuracy_on_the_way_is_drawn_over_the_steps_with_its_intervals(tmp_path: Path) -> None:
    home = Home(tmp_path)
    runs = [record_run(home, f"sums-s{seed}", seed=seed, on_the_way={20: 0.5, 40: 0.6}) for seed in range(2)]
    record_experiment(home, runs)
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        evaluated = evidence.accuracies(store, runs)
    (drawn,) = accuracies_by_step(groups, evaluated)
    assert list(drawn.by_step) == [0, 20, 40, 60]
    assert drawn.by_step[60] == outcomes_of(answers(groups, evaluated))[0].after
    text = write_experiment_report(home, "sums").read_text()
    (band,) = chart_of(text, "Accuracy on two-terms")["datasets"]["lines"]
    assert band["x"] == [0, 20, 40, 60]
    for end in ("low", "high"):
        assert band[end] == pytest.approx([getattr(at, end) for at in drawn.by_step.values()], abs=1e-5)
    assert "the band of an accuracy is its interval" in text


def test_few_seeds_are_drawn_one_by_one_and_more_as_mean_and_interval(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for seeds in (3, 4):
        name = f"sums{seeds}"
        runs = [record_run(home, f"{name}-s{seed}", seed=seed, experiment=name) for seed in range(seeds)]
        record_experiment(home, runs, name)
    few, more = (
        chart_of(write_experiment_report(home, f"sums{n}").read_text(), "Entropy, nats a token") for n in (3, 4)
    )
    assert [line["opacity"] for line in few["datasets"]["lines"]] == [0.33, 0.33, 0.33, 1]
    assert not any("low" in line for line in few["datasets"]["lines"])
    with Store.open(home.root) as store:
        query = "SELECT value FROM metrics WHERE name = 'entropy' AND step = 30 AND run_id LIKE 'sums4-%'"
        interval = seed_mean([value for (value,) in store.query(query).rows])
    (band,) = more["datasets"]["lines"]
    assert band["x"][29] == 30
    assert (band["low"][29], band["high"][29]) == pytest.approx((interval.low, interval.high), abs=1e-5)


def test_what_happened_at_which_step_is_marked_in_every_curve(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    writer = SegmentWriter(home.run("x-s0"), "x-s0", 2)
    moved = [EventRow("x-s0", 2, step, "reference_moved", "version", START) for step in (20, 40)]
    back = EventRow("x-s0", 2, 33, "rolled_back", "kl/reverse is 3: back to step 33", START)
    writer.rows([*moved, back])
    margins = [0.1] * 10 + [0.1 + 0.01 * step for step in range(1, 11)] + [0.2] * 20 + [0.3] * 20
    writer.rows([MetricRow("x-s0", 2, step, "clip/high", value, START) for step, value in enumerate(margins, 1)])
    writer.flush()
    text = write_run_report(home, "x-s0").read_text()
    curves = text[text.index(">Training</h2>") :]
    charts_ = charts_of(curves[: curves.index(">Spec</h2>")])
    assert len(charts_) == 10
    for chart in charts_:
        ramps, backs, moves = (layer["data"]["values"] for layer in chart["layer"][:3])
        assert [move["x"] for move in moves] == [[20, 40]]
        assert [back["x"] for back in backs] == [33]
        assert [ramp["text"] for ramp in ramps] == [
            "upper margin of the clip from 0.1 to 0.2 over steps 10 to 20",
            "upper margin of the clip from 0.2 to 0.3 at step 41",
        ]
    assert "Ticks at the bottom: updates of the reference; shaded: upper margin" in text
    assert "dashed: seed 0: kl/reverse is 3: back to step 33." in text


def test_ramps_are_where_a_value_changes() -> None:
    values = [1.0, 1.0, 2.0, 3.0, 3.0, 5.0]
    ramps = list(ramps_of("kl_coef", np.column_stack([np.arange(6), values])))
    assert [(ramp.first, ramp.last, ramp.start, ramp.end) for ramp in ramps] == [(1, 3, 1.0, 3.0), (4, 5, 3.0, 5.0)]


def test_distributions_are_the_quantiles_of_what_was_recorded(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    record_tokens(home, "x-s0", steps=range(1, 4), responses=40, length=30)
    text = write_run_report(home, "x-s0").read_text()
    chart = chart_of(text, "Response length, tokens")
    with Store.open(home.root) as store:
        lengths = [row[0] for row in store.query("SELECT num_tokens FROM rollouts WHERE step = 2").rows]
    (line,) = chart["datasets"]["lines"]
    assert (line["x"][1], line["y"][1]) == (2, np.quantile(lengths, 0.5, method="inverted_cdf"))
    assert line["low"][1] <= line["low2"][1] <= line["y"][1] <= line["high2"][1] <= line["high"][1]
    assert chart_of(text, "Ratio of a token")
    assert "Reward of a response" not in [spec["title"] for spec in charts_of(text)]
    assert "rewards take at most two values" in text


def test_the_best_the_worst_and_the_most_changed_responses_are_shown_by_token(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    record_tokens(home, "x-s0", steps=[8, 9], responses=8, length=20, text="so 42 <b>& done</b>\n")
    without = write_run_report(home, "x-s0").read_text()
    record_tokenizer(home, "x-s0")
    text = write_run_report(home, "x-s0").read_text()
    shown = text[
        text.index(">Responses of the last steps of training</h2>") : text.index(">Responses after training</h2>")
    ]
    assert re.findall(r"<h3[^>]*>(.*?)</h3>", shown) == [
        "Highest reward",
        "Lowest reward",
        "Most changed by their step&#39;s updates",
    ]
    best, worst, moved = shown.split("<h3")[1:]
    assert set(re.findall(r"reward (\S+) ·", best)) == {"1"}
    assert set(re.findall(r"reward (\S+) ·", worst)) == {"0"}
    with Store.open(home.root) as store:
        query = (
            "SELECT avg(abs(logprob - old_logprob)) AS m FROM tokens GROUP BY step, rollout_id ORDER BY m DESC LIMIT 1"
        )
        ((most,),) = store.query(query).rows
    assert f"moved {most:.2g} nats a token" in moved
    letters = re.findall(r'data-about="token \d+, id \d+ · ratio [\d.]+ · entropy [^"]*">(.)', best)
    assert "".join(letters).startswith("so 42 &")
    assert "<b>" not in shown
    (first,) = byte_tokenizer().encode("s").ids
    assert re.search(rf'data-about="token 0, [^"]*">{first} <', without)


def test_given_tokens_and_tokens_without_figures_are_shown_pale(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    record_tokens(home, "x-s0", steps=[1], sampled=False)
    text = write_run_report(home, "x-s0").read_text()
    assert re.search(r'class="[^"]*given" data-about="token 0, id \d+ · given, not sampled"', text)


CALLED = [
    {"text": "[37*48]", "sampled": True, "reward": 0.25},
    {"text": "(17<b>76)\x1b[2J", "sampled": False, "tool": "calculator", "seconds": 0.25},
    {"text": "[0/0]", "sampled": True},
    {"text": "(error: no)", "sampled": False, "tool": "policy\nx", "error": "there is no tool", "seconds": 0.0},
    {"text": "1776", "sampled": True},
]


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "texts"])
def test_a_response_of_several_turns_is_shown_as_a_conversation(tmp_path: Path, tokens: bool) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    record_conversation(home, "x-s0", CALLED, tokens=tokens)
    record_tokenizer(home, "x-s0")
    text = write_run_report(home, "x-s0").read_text()
    turns = re.findall(r'<li class="([^"]*)">(.*?)</li>', text, re.S)[: len(CALLED)]
    assert [kind for kind, _ in turns] == ["policy", "given-turn", "policy", "given-turn", "policy"]
    heads, texts = zip(*(shown.split("</p>") for _, shown in turns), strict=True)
    assert [" ".join(re.sub("<[^>]*>", "", head).split()) for head in heads] == [
        "policy 7 tokens sampled · calls calculator · reward of the turn 0.25",
        "tool calculator 13 tokens given · 0.25 s",
        "policy 5 tokens sampled · calls policy x",
        "tool policy x 11 tokens given · under 1 ms · there is no tool",
        "policy 4 tokens sampled",
    ]
    assert [html.unescape(re.sub("<[^>]*>", "", said)).strip() for said in texts] == [
        turn["text"].replace("\x1b", "\ufffd") for turn in CALLED
    ]
    assert (' class="given"' in turns[1][1]) is tokens
    assert "given" not in re.sub('class="given-turn"', "", turns[0][1])


def test_a_response_of_an_evaluation_is_shown_as_a_conversation_too(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    record_evaluated_conversation(home, "x-s0", CALLED)
    text = write_run_report(home, "x-s0").read_text()
    turns = re.findall(r'<li class="([^"]*)">(.*?)</li>', text, re.S)[: len(CALLED)]
    assert [kind for kind, _ in turns] == ["policy", "given-turn", "policy", "given-turn", "policy"]
    assert "calls policy x" in turns[2][1]
    assert "(17&lt;b&gt;76)" in turns[1][1]


def test_a_part_of_a_response_shows_the_turns_of_that_part() -> None:
    rows = [
        {"turn": turn, "sampled": turn % 2 == 0, "tool": None, "text": "", "num_tokens": number}
        | dict.fromkeys(("reward", "error", "seconds"))
        for turn, number in enumerate((4, 3, 0, 2))
    ]
    tokens = [ShownToken(str(place), "", "") for place in range(2, 7)]
    shown = conversation(rows, tokens, first=2)
    assert [(turn.speaker, "".join(token.text for token in turn.tokens)) for turn in shown] == [
        ("policy", "23"),
        ("environment", "456"),
        ("policy", ""),
    ]


def test_a_page_asks_as_few_questions_of_many_runs_as_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    query = Store.query
    monkeypatch.setattr(Store, "query", lambda self, sql, params=(): (asked.append(sql), query(self, sql, params))[1])
    counts = []
    for cells in (2, 12):
        home = Home(tmp_path / str(cells))
        values = [{"objective.clip.high": 0.1 + cell / 100} for cell in range(cells)]
        runs = [record_run(home, f"x{place}", values=value, steps=5, problems=5) for place, value in enumerate(values)]
        record_tokens(home, runs[0], steps=range(1, 6))
        record_experiment(home, runs)
        asked.clear()
        write_experiment_report(home, "sums")
        counts.append(len(asked))
    assert counts[0] == counts[1] < 21


def test_what_a_run_was_made_with_is_shown_and_where_its_values_come_from(tmp_path: Path) -> None:
    home = Home(tmp_path)
    runs = [record_run(home, f"x-s{seed}", seed=seed) for seed in range(3)]
    record_experiment(home, runs)
    for place, run_id in enumerate(runs):
        attempt = {"attempt": 1, "resumed_from_step": 0, "started_at": START.isoformat(), "packages": ["torch==2.1"]}
        write(home.run(run_id) / "attempts/0001.json", attempt | {"code": {"commit": f"{place // 2}" * 40}})
    origins = [[["training", "steps"], "file", "a<b>.yaml", 12], [["objective", "kl_coef"], "default", "", 0]]
    write(home.run(runs[0]) / "provenance.json", {"origins": origins})
    text = write_experiment_report(home, "sums").read_text()
    made = text[text.index(">Provenance</h2>") :]
    assert "<td>package torch</td><td>2.1</td>" in made
    assert "<td>code commit</td><td>000000000000 (2 runs), 111111111111 (1 run)</td>" in made
    assert f"<td>fingerprint of train</td><td>{'t' * 64}</td>" in made
    assert "<td>60</td><td>file</td><td>a&lt;b&gt;.yaml:12</td>" in text
    assert "<td>0.01</td><td>default</td>" not in text


def test_recorded_text_cannot_become_markup(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0", status="failed")
    spec = json.loads((home.run("x-s0") / "run.json").read_text())
    write(home.run("x-s0") / "run.json", spec | {"question": "<script>alert(1)</script>", "name": "<b>s</b>"})
    text = write_run_report(home, "x-s0").read_text()
    assert "<script>alert" not in text
    assert "<b>s" not in text
    assert "ran out of memory" in text


def test_responses_are_shown_also_where_training_changed_no_score(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0", before=-9.0, after=-9.0)
    text = write_run_report(home, "x-s0").read_text()
    assert "0.0 % to 0.0 %" in text
    assert text.count('class="sample"') == 6
    assert "read as 109" in text


def test_a_run_without_an_evaluation_says_so(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    shutil.rmtree(home.run("x-s0") / "evaluate")
    assert "Nothing has been evaluated yet." in write_run_report(home, "x-s0").read_text()


def test_a_certificate_is_shown_where_there_is_one(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    assert "Objective certificate" not in write_run_report(home, "x-s0").read_text()
    objective = parse_objective({"type": "rpg", "clip": {"type": "none"}})
    write(home.run("x-s0") / "certificate.json", certify(objective).as_json())
    text = write_run_report(home, "x-s0").read_text()
    assert "Objective certificate" in text
    assert re.search(r"Holds</span>.*enumerated cases", text, re.DOTALL)
    assert "reverse KL of each token" in text
    assert "nothing is claimed" not in text
    write(home.run("x-s0") / "certificate.json", certify(parse_objective({"type": "rpg"})).as_json())
    text = write_run_report(home, "x-s0").read_text()
    assert "Off policy, once the policy has moved" in text
    assert "In this run every update is on policy, so that on average it has exactly the gradient of" in text


def test_what_is_unnormalized_reverse_is_nowhere_called_reverse(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    for seed in range(2):
        run_id = record_run(home, f"x-s{seed}", seed=seed)
        objective = parse_objective({"type": "rpg"})
        write(home.run(run_id) / "certificate.json", certify(objective).as_json())
        change_spec(home, run_id, {"objective": objective.model_dump(mode="json")})
    record_experiment(home, ["x-s0", "x-s1"])
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = [call("show", "x-s0", "--all")[1], call("compare", "x-s0", "x-s1", "--all")[1]]
    shown += [write_run_report(home, "x-s0").read_text(), write_experiment_report(home, "sums").read_text()]
    for text in shown:
        assert not re.findall(r"(?<!unnormalized[ _])(?<!kl/)\breverse\b.{0,40}", text)
    assert "unnormalized reverse KL of each token" in shown[0]


def test_a_run_whose_objective_changes_shows_the_ramp_and_a_certificate_for_each_phase(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0")
    ramp = {"schedule": [[61, 0.1], [81, 0.3]], "between": "linear"}
    objective = parse_objective({"type": "rpg", "clip": {"type": "dual", "low": ramp}})
    writer = SegmentWriter(home.run("x-s0"), "x-s0", 1)
    margins = [(step, at_step(objective, step).clip.low) for step in range(61, 100)]
    writer.rows([MetricRow("x-s0", 1, step, "clip/low", margin, START) for step, margin in margins])
    writer.flush()
    certificates = {
        step: replace(each, not_covered={"training.entropy_coef": 0.01})
        for step, each in certify_over_training(objective).items()
    }
    write(home.run("x-s0") / "certificate.json", certificate_record(certificates))
    text = write_run_report(home, "x-s0").read_text()
    assert chart_of(text, "Lower margin of the clip")
    rows = text[text.index(">Objective certificates</h2>") : text.index(">Spec</h2>")].split("<tr>")[2:]
    assert [re.search(r"step \d+(?=<)", row)[0] for row in rows] == ["step 1", "step 71", "step 81"]
    assert all("<td>training.entropy_coef</td>" in row for row in rows)


def test_cells_are_called_by_their_labels_and_each_objective_has_its_certificate(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cells = {"narrow": {"objective.clip.low": 0.1}, "wide": {"objective.clip.low": 0.3}}
    labels = {}
    for label, values in cells.items():
        for seed in range(3):
            run_id = record_run(home, f"{label}-s{seed}", seed=seed, values=values, after=0.6 + 0.2 * (label == "wide"))
            labels[run_id] = label
            objective = parse_objective({"type": "rpg", "clip": {"type": "dual", "low": values["objective.clip.low"]}})
            write(home.run(run_id) / "certificate.json", certify(objective).as_json())
    record_experiment(home, list(labels))
    about = home.experiment("sums") / "experiment.json"
    write(about, json.loads(about.read_text()) | {"labels": labels})
    text = write_experiment_report(home, "sums").read_text()
    assert "wide is best" in text
    assert "objective.clip.low 0.1" not in text
    ends = text[text.index(">Where training ended</h2>") : text.index("Every measure")]
    assert re.findall(r"<th.*?>(.+?)</th>", ends) == [
        *("mean over the last 10 steps", "cell", "value", "interval", "difference from narrow", "its interval"),
    ]
    first, second = (re.findall(r"<td.*?>(?:<i .*?</i>)?(.*?)</td>", row) for row in ends.split("<tr")[2:4])
    assert (first[:2], first[4:]) == (["Reward, mean of a step", "narrow"], ["", ""])
    assert second[:2] == ["", "wide"]
    assert re.fullmatch(r"[+-]0\.\d+", second[4])
    rows = text[text.index(">Objective certificates</h2>") : text.index(">Spec</h2>")].split("<tr>")[2:]
    assert [row[4:10].rstrip("</d") for row in rows] == ["narrow", "wide"]
    assert all("Holds</span>, exact on policy" in row for row in rows)


def test_only_the_current_runs_of_an_experiment_are_reported(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run_ids = [record_run(home, f"x-s{seed}", seed=seed) for seed in range(2)]
    record_experiment(home, run_ids)
    about = json.loads((home.experiment("sums") / "experiment.json").read_text())
    write(home.experiment("sums") / "experiment.json", about | {"current": run_ids[:1]})
    (group,) = evidence.experiment_groups(home, "sums")
    assert group.run_ids == ["x-s0"]


def test_an_experiment_without_runs_is_a_users_error(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_experiment(home, [])
    with pytest.raises(SpecError, match="has no runs yet"):
        write_experiment_report(home, "sums")


def test_the_answer_pools_seeds_and_pairs_problems(home: Home) -> None:
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        evaluated = evidence.accuracies(store, [run_id for group in groups for run_id in group.run_ids])
    narrow, wide = outcomes_of(answers(groups, evaluated))
    by_hand = [np.mean(list(evaluated["two-terms"][f"sums-narrow-s{seed}"][60].values())) for seed in range(3)]
    assert narrow.after.value == pytest.approx(np.mean(by_hand))
    assert (narrow.num_seeds, narrow.num_problems, narrow.step) == (3, 60, 60)
    assert narrow.against_first is None
    assert wide.against_first.value == pytest.approx(wide.after.value - narrow.after.value)
    assert wide.gain.value == pytest.approx(wide.after.value - wide.before.value)
    assert wide.gain.high - wide.gain.low < 0.2


def test_a_change_within_its_interval_is_not_called_one(home: Home) -> None:
    group = Group("g", (evidence.load_run(home, "sums-wide-s0"),))
    scores = {f"p{index}": float(index % 2) for index in range(40)}
    moved = scores | {"p0": 1.0}
    found = answers([group], {"d": {"sums-wide-s0": {0: scores, 5: moved}}})
    assert headline(found).startswith("Accuracy on d did not move measurably: 50.0 % to 52.5 %")
    fallen = dict.fromkeys(scores, 0.0)
    found = answers([group], {"d": {"sums-wide-s0": {0: scores, 5: fallen}}})
    assert headline(found).startswith("Accuracy on d fell from 50.0 % to 0.0 %, -50.0 points")


def test_a_page_of_cells_with_one_seed_each_claims_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    cells = [("narrow", 0.1, 0.5), ("wide", 0.28, 0.9)]
    run_ids = [record_run(home, name, values={"objective.clip.high": high}, after=to) for name, high, to in cells]
    record_experiment(home, run_ids)
    text = write_experiment_report(home, "sums").read_text()
    assert "came out highest" in text
    assert "not new training runs" in text
    assert "for these weights on new problems, from 60 held-out problems and one seed" in text
    table = text[text.index("against 0.1") : text.index("</table>")]
    assert re.search(r'<span class="">\+\d\d\.\d</span>', table)
    assert "sure" not in table


def test_a_run_whose_last_evaluation_is_lost_is_named_and_answers_for_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    runs = [record_run(home, f"x-s{seed}", seed=seed, before=0.3, after=0.9) for seed in range(3)]
    record_experiment(home, runs)
    (samples,) = (home.run("x-s1") / "evaluate").rglob("evaluation_samples/*.parquet")
    table = pq.read_table(samples)
    pq.write_table(table.filter(pc.equal(table["step"], 0)), samples)
    text = write_experiment_report(home, "sums").read_text()
    assert re.search(r"Accuracy on two-terms rose from 3\d\.\d % to 8\d\.\d %", text)
    assert "60 held-out problems and 2 seeds" in text
    assert "seed 1 was last evaluated at step 0 on two-terms, others at step 60" in text
    samples.write_bytes(samples.read_bytes()[:-200])
    text = write_experiment_report(home, "sums").read_text()
    assert "60 held-out problems and 2 seeds" in text
    assert "seed 1 has no evaluation on two-terms, others at step 60" in text
    assert re.search(r"skipped runs/x-s1/evaluate/\S+parquet: .*: its rows are missing here", text)


def test_one_seed_is_said_of_a_run_that_did_not_move_too(tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_run(home, "x-s0", before=0.5, after=0.5)
    text = write_run_report(home, "x-s0").read_text()
    assert re.search(r"did not move measurably: [^<]*\. One seed: the interval covers", text)


def test_points_show_their_sign() -> None:
    assert points(Interval(-0.05, -0.1, 0.0)) == "-5.0 points [-10.0, +0.0]"


def test_differences_name_each_field_that_differs() -> None:
    one = {"name": "a", "seeds": [0], "objective": {"clip": {"type": "none"}}, "data": {"train": [{"size": 1}]}}
    two = {
        "name": "b",
        "seeds": [1],
        "objective": {"clip": {"type": "dual", "low": 0.2}},
        "data": {"train": [{"size": 2}]},
    }
    assert differences([one, two]) == {
        "objective.clip.type": ["none", "dual"],
        "data.train.0.size": [1, 2],
        "objective.clip.low": [None, 0.2],
    }
    assert flatten({"a": {}}) == {"a": {}}


def test_an_axis_holds_all_values_and_has_room_for_values_that_are_alike() -> None:
    assert extent([0.3, float("nan"), -1.0]) == [-1.0, 0.3]
    for alike in ([0.5, 0.5], [1.0, 1 + 1e-13], [1e300, 1e300 * (1 + 1e-12)], [0.0, 5e-324]):
        low, high = extent(alike)
        assert low < alike[0] <= alike[1] < high


def test_a_long_line_is_thinned_and_keeps_its_ends_and_its_peaks() -> None:
    points_ = [(float(step), step / 10_000 + 5 * (step == 4321) - 5 * (step == 8765)) for step in range(10_000)]
    kept = thin(points_)
    assert len(kept) == charts.MOST_POINTS
    assert {0, 4321, 8765, 9999} <= set(kept[:, 0])
    assert set(map(tuple, kept.tolist())) <= set(points_)
    assert thin([(0.0, float("nan")), (1.0, 2.0)]).tolist() == [[1.0, 2.0]]


def test_a_chart_of_many_long_lines_stays_small() -> None:
    rng = np.random.default_rng(0)
    lines = [line(np.column_stack([np.arange(5000), rng.random(5000)]), faint=bool(place)) for place in range(100)]
    assert len(drawn(line_chart(lines, title="t")).__html__()) < 100_000


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def test_charts_without_data_are_none_and_single_points_are_dots() -> None:
    assert line_chart([line([])], title="t") is None
    assert interval_chart([], title="t") is None
    assert bar_chart([], title="t") is None
    assert [row["dots"] for row in drawn(line_chart([line([(1.0, 2.0)])], title="t")).data["lines"]] == [True]
    alone = drawn(interval_chart([("r", [Mark("m", Interval(0.0, -0.2, 0.0))])], title="t", share=True))
    assert alone.x["scale"]["domain"] == [0.0, 0.5], "a share is not below 0"
    unknown = drawn(interval_chart([("r", [Mark("m", Interval(0.5, float("nan"), float("nan")))])], title="t"))
    assert texts_of(unknown.spec()) == ["m: 0.500", "r"]


def test_each_kind_of_chart_is_drawn_with_its_texts() -> None:
    scales = Scale(("a <b>", "two")), Scale(log=True)
    dots = [mark(place % 2, place, f"trial {place}", Interval(place, place - 1, place + 1)) for place in range(4)]
    axes = [ParallelAxis("left", [0.0, 1.0], [(0.0, "foot")]), ParallelAxis("right", [1.0, 0.5], [])]
    marks = StepMarks({0: [1, 2]}, {0: [Ramp("kl_coef", 1, 2, 0.1, 0.2)]}, {0: [(2, "back")]})
    curve = line([(1, 0.5), (3, 0.7)], "a", bands=[([0.4, 0.6], [0.6, float("nan")])])
    charts_ = {
        "curves": drawn(line_chart([curve, line([(2, 1.0)], "one")], title="curves")).over(marks.layers()),
        "intervals": interval_chart([("row", [Mark("m", Interval(0.5, 0.4, 0.6))])], title="intervals"),
        "bars": bar_chart([("bar", 12.0)], title="bars", unit=" %"),
        "dots": dot_chart(dots, title="dots", scale=scales[0], lines=[line([(0, 1), (1, 2)], steps=True)]),
        "surface": surface_chart(
            dots, [0, 1, 2, 3], title="surface", scales=scales, x_label="x", path=[(0, 1), (1, 0)]
        ),
        "parallel": parallel_chart(axes, [0.0, 1.0], title="parallel"),
    }
    written = {title: set(re.findall(r">([^<>]+)</text>", drawn(chart).svg())) for title, chart in charts_.items()}
    for title, texts in {
        "curves": {"a", "one", "step"},
        "intervals": {"row"},
        "bars": {"bar", "12 %"},
        "dots": {"a &lt;b&gt;", "two"},
        "surface": {"a &lt;b&gt;", "x", "10"},
        "parallel": {"left", "right", "foot"},
    }.items():
        assert texts | {title} <= written[title]


def test_recorded_text_ends_no_script_of_a_chart() -> None:
    text = "</script><script>alert(1)</script>"
    shown = drawn(line_chart([line([(1.0, 2.0)], text)], title=text)).__html__()
    assert shown.count("</script>") == 1
    assert chart_of(shown, text)["datasets"]["lines"][0]["line"] == text


@pytest.mark.more
def test_figures_that_are_too_large_to_reckon_with_break_no_report(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run_ids = record_two_cells(home)
    for run_id in run_ids:
        attempt = {"attempt": 2, "resumed_from_step": 50, "started_at": START.isoformat()}
        write(home.run(run_id) / "attempts/0002.json", attempt)
        writer = SegmentWriter(home.run(run_id), run_id, 2)
        for step in range(51, 61):
            value = (-1.0) ** step * 1.7e308
            writer.rows([MetricRow(run_id, 2, step, name, value, START) for name in ("reward/mean", "grad_norm")])  # type: ignore[arg-type]
        writer.flush()
    pages = write_run_report(home, run_ids[0]), write_experiment_report(home, "sums")
    assert all(len(charts_of(page.read_text())) > 5 for page in pages)
    rewards = [row for row in compare(home, ["sums"]).to_json()["metrics"] if row["metric"] == "reward/mean"]
    assert all(0 < row["value"]["value"] < 1 for row in rewards)
