"""The live page in a real browser: its curves are the recorded ones, follow the run, and answer at once."""

import csv
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import served, visit
from playwright.sync_api import Browser, Page, expect
from recorded_home import START, record_experiment, record_run
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.report.statistics import seed_mean
from rpg.recording.segments import SegmentWriter
from specs.records import MetricRow
from storage import Store

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.more]
REWARD = "shown.get('reward/mean')"
SECONDS = 0.1
"""Longest time that zooming and hiding may take."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two cells, one of five seeds and one of two."""
    home = Home(tmp_path_factory.mktemp("home"))
    runs = [
        record_run(home, f"sums-{high}-s{seed}", seed=seed, values={"objective.clip.high": high}, problems=9)
        for high, num_seeds in ((0.1, 5), (0.28, 2))
        for seed in range(num_seeds)
    ]
    record_experiment(home, runs)
    return home


def open_live(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("#charts svg").first).to_be_visible()
    settle(page)


def settle(page: Page, until: str = "groups.length && shown.size") -> None:
    """Waits until a condition holds and everything is drawn."""
    # The page's policy forbids `wait_for_function`, which evaluates text in the page.
    wait_for(lambda: page.evaluate(until), what=until)
    page.evaluate("(async () => { await drawing; })()")


def lines(page: Page) -> list[dict[str, Any]]:
    """The lines of the reward's chart with all their points."""
    found: list[dict[str, Any]] = page.evaluate(f"{REWARD}.full")
    return found


def recorded(home: Home, run_id: str, name: str = "reward/mean") -> list[float]:
    with Store.open(home.root) as store:
        query = "SELECT value FROM metrics WHERE run_id = ? AND name = ? ORDER BY step"
        return [value for (value,) in store.query(query, [run_id, name]).rows]


def test_seeds_are_a_band_with_the_interval_of_the_reports_or_lines(browser: Browser, home: Home) -> None:
    seeds = np.array([recorded(home, f"sums-0.1-s{seed}") for seed in range(5)])
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums")
        assert page.evaluate("[...shown.keys()]")[:4] == ["mean@8 on two-terms", "reward/mean", "kl/reverse", "entropy"]
        left = "(all) => all.map((each) => each.getBoundingClientRect().left)"
        texts, charts = (page.locator(f"#charts {what}").evaluate_all(left) for what in ("svg text", "svg"))
        assert min(texts) > min(charts) - 1, "titles and axes are not cut"
        expect(page.locator("#key")).to_have_text("clip.high")
        band, *others = lines(page)
        assert band["line"] == "0.1"
        for step in (0, 17, 59):
            interval = seed_mean(seeds[:, step])
            shown = [band[name][step] for name in ("x", "y", "low", "high")]
            assert shown == pytest.approx([step + 1, interval.value, interval.low, interval.high], rel=1e-4)
        # Two seeds make no interval: they are pale beside their mean.
        assert [(line["line"], line["opacity"], "low" in line) for line in others] == [
            ("", 0.33, False),
            ("", 0.33, False),
            ("0.28", 1, False),
        ]
        page.get_by_label("seeds as a band").uncheck()
        settle(page)
        assert [line["line"] for line in lines(page)][-1] == "0.28, seed 1"
        assert len(lines(page)) == 7
        assert lines(page)[3]["y"] == pytest.approx(seeds[3], rel=1e-5)
        page.reload()
        settle(page)
        assert len(lines(page)) == 7, "the choice is in the page's address"
        assert (visited.errors, visited.elsewhere) == ([], [])


def test_a_click_on_a_label_hides_a_series_in_every_chart(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums")
        label = page.locator("#series button", has_text="0.1")
        drawn = page.locator("#charts path[stroke='var(--c0)']")
        others = page.locator("#charts path[stroke='var(--c1)']")
        assert drawn.count() >= 7
        before = others.count()
        label.click()
        settle(page)
        assert label.get_attribute("aria-pressed") == "false"
        assert (drawn.count(), others.count()) == (0, before)
        label.click()
        page.locator("#series button").last.dblclick()
        settle(page)
        assert (drawn.count(), others.count()) == (0, before), "a double click shows one alone"
        assert visited.errors == []


def test_a_drag_zooms_every_chart_and_a_double_click_goes_back(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums")
        chart = page.locator("#charts figure", has=page.locator("svg")).nth(1)
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 120, box["y"] + 90)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 90, steps=3)
        expect(chart.locator("rect.zoom")).to_be_visible()
        page.mouse.up()
        settle(page)
        low, high = (float(page.get_by_label(name, exact=True).input_value()) for name in ("from", "to"))
        assert 1 < low < high < 60
        domains = page.evaluate("[...shown.values()].map(({ view }) => view.scale('x').domain())")
        assert np.ptp(domains, axis=0) == pytest.approx(0)
        assert domains[0] == pytest.approx([low, high], rel=1e-3)
        chart.locator("svg").dblclick(position={"x": 150, "y": 90})
        settle(page)
        assert page.evaluate(f"{REWARD}.view.scale('x').domain()") == [0, 60]
        page.get_by_label("from", exact=True).fill("10")
        page.get_by_label("to", exact=True).fill("20")
        page.get_by_label("to", exact=True).press("Enter")
        settle(page)
        assert page.evaluate(f"{REWARD}.view.scale('x').domain()") == [10, 20]
        page.get_by_role("button", name="Whole range").click()
        settle(page)
        assert page.evaluate(f"{REWARD}.view.scale('x').domain()") == [0, 60]
        assert visited.errors == []


def test_the_x_axis_is_in_tokens_or_time_too(browser: Browser, home: Home) -> None:
    lengths, times = (
        np.array([recorded(home, f"sums-0.1-s{seed}", name) for seed in range(5)])
        for name in ("response_length/mean", "time/step")
    )
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums")
        for axis, ends in (("tokens", 32 * lengths.cumsum(axis=1)), ("time", times.cumsum(axis=1) / 60)):
            page.get_by_label("x axis").select_option(axis)
            last = float(ends.mean(axis=0)[-1])
            settle(page, f"{REWARD}.full.length && Math.abs({REWARD}.full[0].x.at(-1) / {last} - 1) < 1e-3")
            assert lines(page)[0]["x"] == pytest.approx(ends.mean(axis=0), rel=1e-4)
        assert page.evaluate(f"{REWARD}.spec.encoding.x.title") == "minutes of training"
        assert visited.errors == []


def test_a_chart_is_smoothed_enlarged_logarithmic_and_saved(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums-0.1-s0")
        card = page.locator("#charts .card").nth(1)
        values = np.array(lines(page)[0]["y"])
        page.get_by_label("smoothing").fill("0.9")
        settle(page)
        smooth = np.array(lines(page)[0]["y"])
        assert np.abs(np.diff(smooth)).mean() < np.abs(np.diff(values)).mean() / 3
        page.get_by_label("smoothing").fill("0")
        width = card.locator("svg").bounding_box()["width"]  # type: ignore[index]
        card.get_by_role("button", name="Enlarge").click()
        settle(page)
        box = card.locator("svg").bounding_box()
        assert box["width"] > 2 * width
        assert box["height"] > 400
        card.get_by_role("button", name="Log scale").click()
        settle(page)
        assert page.evaluate(f"{REWARD}.view.scale('y').type") == "log"
        assert card.locator("path[stroke-width='2']").bounding_box() is not None
        with page.expect_download() as saved:
            card.get_by_role("button", name="CSV").click()
        rows = list(csv.DictReader(saved.value.path().read_text().splitlines()))
        assert [float(row["value"]) for row in rows] == pytest.approx(values)
        assert visited.errors == []


def test_metrics_are_chosen_and_stay_chosen(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums")
        page.locator(".choice summary").click()
        page.get_by_role("checkbox", name="Learning rate").check()
        page.get_by_role("checkbox", name="Entropy, nats a token").uncheck()
        settle(page, "shown.get('learning_rate')?.full.length && !shown.has('entropy')")
        page.reload()
        settle(page, "shown.get('learning_rate')?.full.length && !shown.has('entropy')")
        assert page.evaluate("shown.size") == 7
        assert visited.errors == []


def test_new_steps_appear_without_a_reload_and_cost_few_bytes(browser: Browser, tmp_path: Path) -> None:
    home = Home(tmp_path)
    record_experiment(home, [record_run(home, "sums-s0", steps=50, problems=4, status="running")])
    sizes: list[int] = []
    with served(home) as address, visit(browser, width=390) as visited:
        page = visited.page
        page.on(
            "response", lambda answer: sizes.append(len(answer.body())) if answer.request.method == "POST" else None
        )
        open_live(page, f"{address}/live?of=sums")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        writer = SegmentWriter(home.run("sums-s0"), "sums-s0", 1)
        for step in range(51, 56):
            moment = START + timedelta(seconds=step)
            writer.rows([MetricRow("sums-s0", 1, step, "reward/mean", step / 100, moment)])
        writer.flush()
        page.evaluate("ask()")
        settle(page, f"{REWARD}.full[0].x.at(-1) === 55")
        assert lines(page)[0]["y"][-5:] == [0.51, 0.52, 0.53, 0.54, 0.55]
        assert "step 55 of 60" in page.locator("#series").inner_text()
        assert sizes[-1] < sizes[0] / 3
        assert visited.errors == []


def test_a_server_that_is_gone_is_reported_and_asked_again(browser: Browser, home: Home) -> None:
    with visit(browser) as visited:
        page = visited.page
        with served(home) as address:
            open_live(page, f"{address}/live?of=sums")
        page.evaluate("ask()")
        expect(page.locator("#state")).to_have_text(re.compile("does not answer.*asking again in 10 s"))


def test_a_hundred_thousand_points_are_zoomed_and_hidden_at_once(browser: Browser, tmp_path: Path) -> None:
    home, count, steps = Home(tmp_path), 10, 10_000
    runs = [record_run(home, f"x{place}", values={"objective.kl_coef": place / 100}, steps=1) for place in range(count)]
    rng = np.random.default_rng(0)
    for run_id in runs:
        writer = SegmentWriter(home.run(run_id), run_id, 1)
        values = np.cumsum(rng.normal(0, 1, steps))
        writer.columns(
            MetricRow,
            {"step": np.arange(2, steps + 2), "name": "reward/mean", "value": values, "recorded_at": START},
        )
        writer.flush()
    record_experiment(home, runs)
    acts = {
        "zoom": "range = range ? null : [2000, 7000]; redrawAll()",
        "hide": "document.querySelector('#series button').click()",
    }
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        open_live(page, f"{address}/live?of=sums#metric=reward/mean")
        assert sum(len(line["x"]) for line in lines(page)) > 100_000
        session = page.context.new_cdp_session(page)
        # Time of the page's thread, so that other processes of the machine do not count.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

        for act, script in acts.items():
            taken = []
            for _ in range(5):
                before = spent()
                page.evaluate(f"(async () => {{ {script}; await drawing; }})()")
                taken.append(spent() - before)
            assert 0 < min(taken) < SECONDS, (act, taken)
        assert visited.errors == []
