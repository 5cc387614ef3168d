"""Data of the live page: new steps of the runs that have changed, and the answer so far."""

import html
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from recorded_home import START, record_experiment, record_run, record_two_cells, write
from recorded_study import record as record_study
from recorded_study import study, trial
from starlette.testclient import TestClient

from pipelines.home.home import Home
from pipelines.home.versions import looks_of
from pipelines.web.app import make_app
from rpg.recording.segments import SegmentWriter
from specs.records import MetricRow
from storage import Store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two cells of three seeds."""
    home = Home(tmp_path_factory.mktemp("home"))
    record_two_cells(home)
    return home


@pytest.fixture
def one(tmp_path: Any) -> Home:
    """An experiment of one run of five steps."""
    home = Home(tmp_path)
    record_experiment(home, [record_run(home, "sums-s0", steps=5, problems=4)])
    return home


def client_of(home: Home) -> TestClient:
    return TestClient(make_app(home, lambda _shown: True))


@pytest.fixture
def client(one: Home) -> Iterator[TestClient]:
    with client_of(one) as client:
        yield client


def ask(client: TestClient, *names: str, known: Any = None, **wanted: Any) -> dict[str, Any]:
    answer = client.post("/live", json={"of": names, "known": known or {}, **wanted})
    assert answer.status_code == 200, answer.text
    return answer.json()


def known_after(sent: dict[str, Any]) -> dict[str, Any]:
    return {run_id: run["known"] for run_id, run in sent["runs"].items()}


def add_steps(home: Home, run_id: str, values: dict[int, float], attempt: int = 1) -> None:
    writer = SegmentWriter(home.run(run_id), run_id, attempt)
    moment = START + timedelta(hours=1)
    writer.rows([MetricRow(run_id, attempt, step, "reward/mean", value, moment) for step, value in values.items()])
    writer.flush()


def set_status(home: Home, run_id: str, status: str) -> None:
    path = home.run(run_id) / "state.json"
    state = json.loads(path.read_text())
    stages = state["stages"] | ({"evaluate": {"status": "pending"}} if status == "pending" else {})
    write(path, state | {"status": status, "stages": stages})


def test_the_first_question_gets_every_step_as_it_is_recorded(recorded: Home) -> None:
    with client_of(recorded) as client:
        sent = ask(client, "sums")
    assert (sent["key"], [group["label"] for group in sent["groups"]]) == ("clip.high", ["0.1", "0.28"])
    assert [run["seed"] for run in sent["groups"][0]["runs"]] == [0, 1, 2]
    assert sent["groups"][0]["runs"][0]["responses"] == 32
    assert sent["recorded"][:3] == ["mean@8 on two-terms", "reward/mean", "kl/reverse"]
    with Store.open(recorded.root) as store:
        for run_id, run in sent["runs"].items():
            query = "SELECT value FROM metrics WHERE run_id = ? AND name = 'reward/mean' ORDER BY step"
            values = [value for (value,) in store.query(query, [run_id]).rows]
            assert run["curves"]["reward/mean"]["x"] == 1
            assert run["curves"]["reward/mean"]["y"] == pytest.approx(values, rel=1e-5)
            assert run["curves"]["mean@8 on two-terms"]["x"] == [0, 60]


def test_a_later_question_gets_the_new_steps_alone(one: Home, client: TestClient) -> None:
    known = known_after(ask(client, "sums"))
    unchanged = ask(client, "sums", known=known)
    assert unchanged.keys() == {"wait"}
    add_steps(one, "sums-s0", {6: 0.25, 8: 0.5})
    sent = ask(client, "sums", known=known)
    run = sent["runs"]["sums-s0"]
    assert not run["whole"]
    assert "answer" not in sent
    # The last step is sent again: a part of it may have been written later.
    assert run["curves"]["reward/mean"]["x"] == [5, 6, 8]
    assert run["curves"]["reward/mean"]["y"][1:] == [0.25, 0.5]
    assert run["known"][3] == 8


def test_a_run_that_was_resumed_is_sent_whole(one: Home, client: TestClient) -> None:
    known = known_after(ask(client, "sums"))
    write(
        one.run("sums-s0") / "attempts/0002.json",
        {"attempt": 2, "resumed_from_step": 3, "started_at": START.isoformat()},
    )
    add_steps(one, "sums-s0", {4: 0.25}, attempt=2)
    run = ask(client, "sums", known=known)["runs"]["sums-s0"]
    assert run["whole"]
    assert run["curves"]["reward/mean"]["x"] == 1
    assert len(run["curves"]["reward/mean"]["y"]) == 4
    assert run["curves"]["reward/mean"]["y"][3] == 0.25


def test_what_is_not_finite_is_null(one: Home, client: TestClient) -> None:
    add_steps(one, "sums-s0", {6: float("nan"), 7: float("inf"), 8: 1e300, 9: -1.23456789e-7})
    curve = ask(client, "sums")["runs"]["sums-s0"]["curves"]["reward/mean"]
    assert curve["y"][5:] == [None, None, None, -1.23457e-7]


def test_metrics_and_the_axis_are_chosen(client: TestClient) -> None:
    curves = ask(client, "sums", metrics=["grad_norm"], x="time")["runs"]["sums-s0"]["curves"]
    assert curves.keys() == {"grad_norm", "time/step", "mean@8 on two-terms"}


def test_runs_of_several_names_are_overlaid(recorded: Home) -> None:
    with client_of(recorded) as client:
        sent = ask(client, "sums-narrow-s0", "sums")
    assert [group["label"] for group in sent["groups"]][1:] == ["sums: clip.high 0.1", "sums: clip.high 0.28"]
    assert sent["answer"] == {"text": "", "note": "", "asks": False}


def test_a_study_is_overlaid_by_trial_with_its_answer(tmp_path: Any) -> None:
    home = Home(tmp_path)
    lows = (0.1, 0.2)
    ids = [
        record_run(home, f"clips-{low}", values={"objective.clip.low": low}, steps=5, problems=4, experiment="clips")
        for low in lows
    ]
    trials = [trial(number, low) | {"run_ids": [ids[number]]} for number, low in enumerate(lows)]
    with client_of(home) as client:
        record_study(home, study(trials))
        sent = ask(client, "clips")
    assert [group["label"] for group in sent["groups"]] == ["trial 0 (baseline)", "trial 1"]
    assert sent["answer"]["text"].startswith("Candidate: ")


def test_the_answer_of_an_experiment_that_is_over_is_there(recorded: Home) -> None:
    with client_of(recorded) as client:
        answer = ask(client, "sums")["answer"]
    assert "0.28" in answer["text"]
    assert not answer["asks"]
    assert answer["note"] == "Intervals hold at 95 %; after another look, with more seeds, at 98.5 %."


def test_an_answer_before_the_end_is_shown_to_who_asks_and_says_what_it_costs(tmp_path: Any) -> None:
    home = Home(tmp_path)
    record_experiment(home, [record_run(home, f"sums-s{seed}", seed=seed, steps=5, problems=9) for seed in range(4)])
    about = home.experiment("sums") / "experiment.json"
    ids = [f"sums-s{seed}" for seed in range(4)]
    versions = [{"version": 1, "recipes": ["a"], "runs": ids}]
    write(about, json.loads(about.read_text()) | {"versions": versions})
    set_status(home, "sums-s3", "pending")
    with client_of(home) as client:
        assert "1 of 4 runs have not ended" in client.get("/").text
        before = ask(client, "sums")["answer"]
        assert before == {
            "text": "",
            "asks": True,
            "note": "3 seeds have ended. Their answer holds at 95 %. After it is shown, a later one, with more seeds,"
            " holds at 98.5 % instead of 95 %.",
        }
        assert not looks_of(home, "sums")
        shown = ask(client, "sums", look=True)["answer"]
        assert shown["text"]
        assert looks_of(home, "sums") == (3,)
        # A second question with the same seeds costs no more.
        assert ask(client, "sums")["answer"] == shown
        assert html.escape(shown["text"]) in client.get("/").text
        set_status(home, "sums-s3", "finished")
        over = ask(client, "sums")["answer"]
        assert over["note"] == "Intervals hold at 98.5 %; after another look, with more seeds, at 99.5 %."


def test_the_page_names_what_it_shows_and_may_fetch_from_its_server_alone(client: TestClient) -> None:
    page = client.get("/live?of=sums")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].endswith("connect-src 'self'")
    assert "connect-src" not in client.get("/").headers["content-security-policy"]
    assert "<title>sums: live</title>" in page.text
    assert 'href="live?of=sums"' in client.get("/").text


def test_without_a_name_the_page_is_that_of_the_runs_that_train(one: Home, client: TestClient) -> None:
    record_experiment(one, [record_run(one, "other-s0", steps=5, problems=4, experiment="other")], "other")
    set_status(one, "other-s0", "pending")
    assert client.get("/live", follow_redirects=False).headers["location"] == "live?of=other"


def test_a_page_of_nothing_recorded_says_so(tmp_path: Any, client: TestClient) -> None:
    answer = client.get("/live?of=other")
    assert answer.status_code == 404
    assert "there is no run `other`" in answer.text
    with client_of(Home(tmp_path / "empty")) as empty:
        assert empty.get("/live").text == "nothing is recorded yet\n"


def test_an_experiment_that_is_starting_has_a_page(tmp_path: Any) -> None:
    home = Home(tmp_path)
    write(home.experiment("sums") / "experiment.json", {"name": "sums", "runs": [], "current": []})
    with client_of(home) as client:
        assert client.get("/live?of=sums").status_code == 200
        assert ask(client, "sums").keys() == {"wait"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"of": 3}',
        b'{"of": [], "x": "hours"}',
        b'{"of": [], "known": {"a": [1]}}',
        b"\xff",
        b"[" * 10**5,
        rb'{"of": ["\ud800"]}',
    ],
)
def test_a_question_that_makes_no_sense_is_refused(client: TestClient, body: bytes) -> None:
    assert client.post("/live", content=body).status_code == 400


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\0b", "a" * 300])
def test_a_name_that_no_run_has_is_not_found(client: TestClient, name: str) -> None:
    assert client.post("/live", content=json.dumps({"of": [name]})).status_code == 404
