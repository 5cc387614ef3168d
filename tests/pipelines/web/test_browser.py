"""What a person sees in a browser: headless Chromium on the dashboard and on the record's pages."""

import csv
import io
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import served, visit
from live import SPEC
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import Error as PlaywrightError
from recorded_home import (
    FINGERPRINT,
    record_conversation,
    record_experiment,
    record_run,
    record_tokenizer,
    record_tokens,
    record_two_cells,
    write,
)
from recorded_study import confirmation, confirmed_arm, pruned, study, trial
from recorded_study import record as record_study
from server_profile import ServerLab
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.prefect.server.api import running_services
from pipelines.report import write_experiment_report, write_run_report
from pipelines.studies.answers.report import write_study_report
from rpg.recording.segments import SegmentWriter
from specs.records import EvaluationSampleRow
from storage import Store

pytestmark = pytest.mark.needs("chromium")
PAIR = SPEC.replace("name: tiny", "name: pair") + "seeds: [0, 1]\n"
ENDLESS = SPEC.replace("name: tiny", "name: endless").replace("steps: 6\n", "steps: 100000\n")


@pytest.fixture
def record(tmp_path: Path) -> Iterator[str]:
    """The address of the pages of a home with six recorded runs."""
    home = Home(tmp_path / "home")
    record_two_cells(home)
    with served(home) as address:
        yield address


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Three arms of three seeds, each with rollouts and tokens."""
    home = Home(tmp_path_factory.mktemp("home"))
    runs = []
    for high in (0.1, 0.2, 0.28):
        for seed in range(3):
            cell = {"objective.clip.high": high}
            runs.append(record_run(home, f"sums-{high}-s{seed}", seed=seed, values=cell, after=0.5 + high))
            record_tokens(home, runs[-1], length=300, text="The sum of 12 and 30 is 42, since 2 and 0 is 2. ")
            record_tokenizer(home, runs[-1])
    record_experiment(home, runs)
    return home


def column(page: Page, heading: str) -> list[str]:
    """The visible cells of the table of runs under a heading."""
    headings = page.locator("table").last.locator("th").all_inner_texts()
    cells = page.locator("table").last.locator(f"tbody tr:visible td:nth-child({headings.index(heading) + 1})")
    return cells.all_inner_texts()


@pytest.mark.more
def test_the_record_is_filtered_sorted_and_opened(browser: Browser, record: str) -> None:
    with visit(browser) as visited:
        page = visited.page
        page.goto(record)
        runs = column(page, "run")
        assert len(runs) > 2
        page.get_by_label("Filter").fill(runs[0])
        assert column(page, "run") == [runs[0]]
        page.reload()
        assert column(page, "run") == [runs[0]], "the filter is in the page's address"
        page.get_by_label("Filter").fill("")
        heading = page.locator("table").last.get_by_role("columnheader", name="after")
        heading.click()
        rising = column(page, "after")
        heading.press("Enter")
        assert column(page, "after") == rising[::-1]
        assert rising == sorted(rising, key=lambda share: float(share.rstrip(" %"))) != rising[::-1]
        page.get_by_role("link", name=runs[0]).click()
        expect(page.locator("svg").first).to_be_visible()
        page.go_back()
        page.locator("a[href^=experiments]").first.click()
        expect(page.locator("svg").first).to_be_visible()
        assert (visited.errors, visited.elsewhere) == ([], [])


def open_drawn(page: Page, address: str) -> None:
    """Opens a page and waits until its charts are drawn."""
    page.goto(address)
    expect(page.locator("figure.chart svg")).to_have_count(page.locator("figure.chart").count())


OUTSIDE = """() => [...document.querySelectorAll("main *")].filter((each) => {
    const place = each.getBoundingClientRect();
    const outside = place.width && (place.right > innerWidth + 1 || place.left < -1);
    return outside && !each.closest(".scroll, .wide-chart, svg");
}).map((each) => each.outerHTML.slice(0, 80))"""
"""What juts out of the page, apart from what scrolls in a box of its own."""
CUT_OFF = """() => [...document.querySelectorAll(".scroll, .wide-chart, td, th, pre")].filter(
    (each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1
).map((each) => each.outerHTML.slice(0, 80))"""
"""What does not show all that is in it."""
TITLES = """() => [...document.querySelectorAll(".card svg .role-title text")].filter((each) =>
    each.getBoundingClientRect().right > each.closest("svg").getBoundingClientRect().right + 1
).map((each) => each.textContent)"""
"""Titles of charts that leave their card."""


@pytest.mark.more
def test_a_report_is_readable_on_a_telephone_and_on_paper(browser: Browser, home: Home) -> None:
    varied = ("objective.clip.high", "training.optimizer.learning_rate")  # both are in the title of a chart
    cells = [dict.fromkeys(varied, 0.1 + place / 100) for place in range(8)]
    many = [
        record_run(home, f"many-{place}-s{seed}", seed=seed, values=cell, steps=10, problems=9, experiment="many")
        for place, cell in enumerate(cells)
        for seed in range(2)
    ]
    record_experiment(home, many, "many")
    rungs = {"15": {"value": 0.4, "low": 0.3, "high": 0.5}}
    trials = [*(trial(number, 0.5 + number / 50, rungs=rungs) for number in range(12)), pruned(12, 0.3)]
    arms = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.75)
    reports = [
        write_run_report(home, "sums-0.1-s0"),
        *(write_experiment_report(home, name) for name in ("sums", "many")),
    ]
    of_study = write_study_report(home, record_study(home, study(trials, confirmation=confirmation(*arms))))
    for report in (*reports, of_study):
        with visit(browser, width=390) as visited:
            page = visited.page
            open_drawn(page, f"file://{report}")
            assert page.evaluate(OUTSIDE) == []
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            assert page.evaluate(TITLES) == []
            stacked = "(all) => all.map((each) => each.parentElement.scrollWidth - each.parentElement.clientWidth)"
            assert set(page.locator(".stacked:visible").evaluate_all(stacked)) <= {0}, "rows of results are not cut"
            names = page.locator("svg text").evaluate_all(
                "(all) => all.map((each) => each.getBoundingClientRect().height).filter(Boolean)"
            )
            assert min(names) > 8, "the smallest text of a chart, pixels"
            # A4 less 12 mm on either side.
            page.set_viewport_size({"width": 703, "height": 1000})
            page.emulate_media(media="print")
            assert page.evaluate(OUTSIDE) == []
            assert report == of_study or page.evaluate(CUT_OFF) == []
            widths = page.locator("svg").evaluate_all(
                "(all) => all.map((each) => each.getBoundingClientRect().width).filter(Boolean)"
            )
            assert len(widths) >= 9
            assert min(widths) > 250
            assert visited.errors == []


@pytest.mark.more
def test_a_chart_follows_the_pointer_is_smoothed_and_saves_its_values(browser: Browser, home: Home) -> None:
    """The values of the file are those that were recorded, however the curve is smoothed just now."""
    record_run(home, "noisy", seed=0, steps=40, experiment="noisy")
    with Store.open(home.root) as store:
        recorded = store.query(
            "select step, value from metrics where run_id = 'noisy' and name = 'reward/mean' order by step"
        ).rows
    values = [value for _, value in recorded]
    with visit(browser) as visited, served(home) as address:
        page = visited.page
        for at in (f"file://{write_run_report(home, 'noisy')}", f"{address}/runs/noisy"):
            open_drawn(page, at)
            page.get_by_role("link", name="Training", exact=True).click()
            expect(page.locator("h2:target")).to_have_text("Training")
            card = page.locator(".curves .card", has_text="Reward").first
            line, box = card.locator("path[stroke-width='2']"), page.locator("#hover")
            card.locator("svg").hover()
            told = re.fullmatch(r"seed 0: (\S+) at (\d+)", box.inner_text())
            assert told, box.inner_text()
            assert float(told[1]) == pytest.approx(values[int(told[2]) - 1], rel=1e-3)
            drawn = line.get_attribute("d")
            heights = [line.bounding_box()["height"]]  # type: ignore[index]
            page.locator(".smoothing input").fill("0.9")
            expect(card.locator("path[stroke-width='1']")).to_be_visible()
            heights.append(line.bounding_box()["height"])  # type: ignore[index]
            assert heights[1] < heights[0]
            card.locator("svg").hover(position={"x": 100, "y": 90})
            expect(box).to_contain_text("seed 0, smoothed")
            with page.expect_download() as saved:
                card.get_by_role("button", name="CSV").click()
            rows = list(csv.DictReader(saved.value.path().read_text().splitlines()))
            assert [int(row["step"]) for row in rows] == [step for step, _ in recorded]
            assert [float(row["value"]) for row in rows] == pytest.approx(values, abs=2e-4 * float(np.ptp(values)))
            page.locator(".smoothing input").fill("0")
            expect(card.locator("path[stroke-width='1']")).to_have_count(0)
            assert line.get_attribute("d") == drawn
        assert visited.errors == []


@pytest.mark.more
def test_charts_follow_the_colours_of_the_page(browser: Browser, home: Home) -> None:
    report = write_run_report(home, "sums-0.1-s0")
    with visit(browser) as visited:
        page = visited.page
        open_drawn(page, f"file://{report}")
        behind = page.locator(".curves svg").first.evaluate("(each) => getComputedStyle(each).backgroundColor")
        assert behind == "rgba(0, 0, 0, 0)", "the card is the background"
        line = page.locator(".curves path[stroke-width='2']").first
        colours = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            colours.append(line.evaluate("(each) => getComputedStyle(each).stroke"))
        assert colours == ["rgb(15, 111, 168)", "rgb(95, 176, 228)"]


@pytest.mark.long
def test_a_page_of_a_hundred_runs_is_small_and_opens_at_once(browser: Browser, tmp_path: Path) -> None:
    home = Home(tmp_path)
    cells = [{"objective.clip.high": 0.1 + place / 100} for place in range(100)]
    runs = [
        record_run(home, f"x{place:02}", values=cell, steps=500, problems=20, on_the_way={250: 0.5})
        for place, cell in enumerate(cells)
    ]
    for run_id in runs[:8]:
        record_tokens(home, run_id, steps=range(1, 501), length=400)
    record_experiment(home, runs)
    report = write_experiment_report(home, "sums")
    assert report.stat().st_size < 1_500_000
    with visit(browser) as visited:
        seconds = []
        for _ in range(3):
            begun = time.monotonic()
            visited.page.goto(f"file://{report}")
            seconds.append(time.monotonic() - begun)
        assert min(seconds) < 2
        text = visited.page.locator("main").inner_text()
        for left_out in ("7 of 100 cells: the first and the highest", "93 others", "All 100 cells", "4 of 100 cells"):
            assert left_out in text
        assert visited.errors == []


@pytest.mark.more
def test_markup_in_what_is_recorded_is_text(browser: Browser, tmp_path: Path) -> None:
    script = "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'>"
    home, other = Home(tmp_path), {"objective.clip.high": script}
    for run_id, values in (("x-s0", {}), ("x-s1", other)):
        record_run(home, run_id, values=values, steps=5, problems=4)
        record_tokens(home, run_id, steps=[1], prompt=script, text=script, length=200)
        record_tokenizer(home, run_id)
        known = json.loads((home.run(run_id) / "run.json").read_text())
        write(home.run(run_id) / "run.json", known | {"question": script, "name": f"{run_id} {script}"})
        writer = SegmentWriter(home.run(run_id), run_id, 2)
        writer.event(3, "rolled_back", script)
        writer.flush()
        evaluated = SegmentWriter(home.run(run_id) / "evaluate" / FINGERPRINT[:16], run_id, 2)
        texts = {"prompt": script, "response": script, "answer": script, "extracted": script}
        figures = {"sample": 0, "score": 9.0, "correct": True, "num_tokens": 1, "finish_reason": script}
        place = {"fingerprint": FINGERPRINT, "dataset": "two-terms", "problem_id": "p000", "reward_error": None}
        evaluated.rows([EvaluationSampleRow(run_id=run_id, step=5, **place, **texts, **figures)])
        evaluated.flush()
    record_experiment(home, ["x-s0", "x-s1"])
    about = home.experiment("sums") / "experiment.json"
    labels = {"x-s0": script, "x-s1": f"other {script}"}
    write(about, json.loads(about.read_text()) | {"question": script, "labels": labels})
    with served(home) as address, visit(browser) as visited:
        for path in ("", "/experiments/sums", "/runs/x-s0", "/runs/x-s0/tokens", "/runs/x-s0/tokens/1/0"):
            visited.page.goto(address + path)
            assert script[:20] in visited.page.locator("main").inner_text().replace("\n", ""), path
            assert visited.page.evaluate("window.ran") is None, path
            assert visited.page.locator("img").count() == 0, path
        assert (visited.errors, visited.elsewhere) == ([], [])


def test_a_conversation_fits_on_a_telephone_and_acts_on_nothing(browser: Browser, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    record_run(home, "sums-s0")
    turns = [
        {"text": "<script>document.title = 'taken'</script>", "sampled": True},
        {"text": "9" * 300, "sampled": False, "tool": "<img src=x onerror=alert(1)>" + "y" * 90, "error": "z" * 200},
        {"text": "\x1b[31m</pre></li><h1>9</h1>", "sampled": True, "reward": 0.5},
    ]
    record_conversation(home, "sums-s0", turns)
    record_tokenizer(home, "sums-s0")
    with served(home) as address, visit(browser, width=390) as visited:
        page = visited.page
        page.goto(f"{address}/runs/sums-s0/tokens/1/0")
        assert page.locator(".turns li").count() == len(turns)
        assert page.locator(".turns pre").all_inner_texts() == [
            turn["text"].replace("\x1b", "\ufffd") for turn in turns
        ]
        assert page.locator(".turns .given").count() == 300
        assert page.title() != "taken"
        assert page.locator("h1").count() == 1
        assert page.evaluate(OUTSIDE) == []
        assert (visited.errors, visited.elsewhere) == ([], [])


@pytest.mark.more
def test_a_token_shows_its_numbers_and_the_colours_are_chosen(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser) as visited:
        page = visited.page
        for path in ("/runs/sums-0.1-s0", "/runs/sums-0.1-s0/tokens/10/0"):
            page.goto(address + path)
            token = page.locator("pre.tokens i[class*=e][class*=u], pre.tokens i[class*=e][class*=d]").first
            token.hover()
            expect(page.locator("#hover")).to_contain_text("ratio")
            expect(page.locator("#hover")).to_contain_text("entropy")
            colour = "(each) => getComputedStyle(each).backgroundColor"
            colours = [token.evaluate(colour)]
            for name in ("entropy", "advantage"):
                page.get_by_role("radio", name=name).check()
                colours.append(token.evaluate(colour))
            assert len(set(colours)) == 3
        assert (visited.errors, visited.elsewhere) == ([], [])


@pytest.mark.more
def test_responses_are_found_and_opened(browser: Browser, home: Home) -> None:
    with served(home) as address, visit(browser, width=390) as visited:
        page = visited.page
        page.goto(f"{address}/runs/sums-0.1-s0/tokens")
        assert page.evaluate(OUTSIDE) == []
        page.get_by_label("step").fill("4")
        page.get_by_label("with clipped tokens").check()
        page.get_by_label("order").select_option("longest")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("heading")).to_have_text("Responses of step 4")
        lengths = [int(text) for text in column(page, "tokens")]
        assert lengths == sorted(lengths, reverse=True)
        page.locator("td a").first.click()
        expect(page.locator("pre.tokens")).to_contain_text("The sum of 12 and 30 is 42")
        assert page.evaluate(OUTSIDE) == []
        page.get_by_role("link", name="step 4").click()
        page.get_by_role("link", name="record").click()
        page.get_by_role("row", name="sums-0.1-s0").get_by_role("link", name="tokens").click()
        expect(page.get_by_role("heading")).to_have_text("Responses of step 10")
        assert (visited.errors, visited.elsewhere) == ([], [])


def state_of(lab: ServerLab, run: dict[str, str]) -> str:
    """What the server says of a flow run; its page asks again only while the run is executed."""
    state: str = lab.call(f"/flow_runs/{run['flow_run_id']}")["state"]["type"]
    return state


@pytest.mark.long
def test_who_has_not_logged_in_is_shown_nothing(browser: Browser, server_lab: ServerLab) -> None:
    services = running_services(server_lab.home)
    for address in (
        f"{services.url}/admin/settings",
        f"{services.url}/flow_runs/{'0' * 8}-0000-0000-0000-{'0' * 12}",
        services.record_url,
        f"{services.record_url}/record/runs/any/state.json",
        services.studies_url,
        f"{services.studies_url}/api/studies",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address, timeout=60)
        refused.value.close()
        assert refused.value.code == 401, address
    settings = urllib.request.urlopen(f"{services.dashboard}/ui-settings", timeout=60)
    with settings:
        assert server_lab.auth_string.partition(":")[2] not in settings.read().decode()
    with visit(browser) as visited:
        visited.page.goto(f"{services.dashboard}/v2/runs")
        visited.page.wait_for_url("**/login**")
        with pytest.raises(PlaywrightError, match="ERR_INVALID_AUTH_CREDENTIALS"):
            visited.page.goto(services.record_url)


def log_in(page: Page, lab: ServerLab) -> None:
    page.goto(lab.url.removesuffix("/api"))
    page.get_by_placeholder("admin:pass").fill("rpg:wrong")
    page.get_by_role("button", name="Login").click()
    expect(page.locator("form p")).to_be_visible()
    assert "/login" in page.url
    page.get_by_placeholder("admin:pass").fill(lab.auth_string)
    page.get_by_role("button", name="Login").click()
    page.wait_for_url("**/dashboard**")


def submit(lab: ServerLab, spec: str) -> list[dict[str, str]]:
    """The flow runs of a spec that is submitted as `rpg submit` does."""
    lab.spec.write_text(spec)
    result = lab.rpg("submit", str(lab.spec), "--json")
    assert result.code == 0, result.err
    submitted: list[dict[str, str]] = json.loads(result.out)
    return submitted


def open_artifact(page: Page, lab: ServerLab, key: str) -> None:
    """Opens the newest artifact of a key from the list of those of its key."""
    page.goto(f"{lab.url.removesuffix('/api')}/v2/artifacts/key/{key}")
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    page.wait_for_url("**/artifacts/artifact/**")


def drawn_colours(page: Page) -> int:
    """How many colours the graph of a flow run has: a single one while nothing is drawn."""
    image = Image.open(io.BytesIO(page.locator("canvas").first.screenshot())).convert("RGB")
    return len(image.getcolors(maxcolors=2**24) or ())


@pytest.mark.long
def test_a_submitted_experiment_is_followed_from_pending_to_finished(browser: Browser, server_lab: ServerLab) -> None:
    lab = server_lab
    services = running_services(lab.home)
    user, _, password = lab.auth_string.partition(":")
    credentials = {"username": user, "password": password, "origin": services.record_url}
    first, second = submit(lab, PAIR)
    with visit(browser, credentials) as visited:
        page = visited.page
        log_in(page, lab)
        page.goto(second["link"])
        expect(page.get_by_text(re.compile("^(Scheduled|Late|Pending)$")).first).to_be_visible()
        page.goto(first["link"])
        expect(page.get_by_text("Running", exact=True).first).to_be_visible()
        for run in (first, second):
            wait_for(lambda run=run: state_of(lab, run) == "COMPLETED", timeout=400, what="its end on the server")
            page.goto(run["link"])
            expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
        wait_for(lambda: drawn_colours(page) > 8, timeout=60, what="the graph")
        page.get_by_role("tab", name="Artifacts").click()
        for name in ("plan", "learning-curve", "results", "training"):
            expect(page.get_by_role("heading", name=f"{second['run_id']}-{name}").first).to_be_visible()

        open_artifact(page, lab, f"{second['run_id']}-plan")
        expect(page.locator("svg[id^=mermaid] .node")).to_have_count(5)
        open_artifact(page, lab, f"{second['run_id']}-learning-curve")
        expect(page.locator("svg[aria-roledescription=xychart]").first).to_be_visible()
        open_artifact(page, lab, f"{second['run_id']}-results")
        expect(page.get_by_role("cell", name="mean@2").first).to_be_visible()

        open_artifact(page, lab, "pair")
        expect(page.get_by_test_id("markdown-display").get_by_text("2 runs: 2 finished")).to_be_visible()
        page.get_by_role("link", name=first["run_id"]).click()
        page.wait_for_url(f"**{first['flow_run_id']}**")
        open_artifact(page, lab, "pair")
        page.get_by_role("link", name="report", exact=True).first.click()
        page.wait_for_url(f"{services.record_url}/runs/*")
        expect(page.locator("svg").first).to_be_visible()
        assert visited.elsewhere == []
        assert any("amplitude.com" in error for error in visited.errors), "what the dashboard asks for is kept back"
    with visit(browser, credentials) as visited:
        page = visited.page
        page.goto(f"{services.record_url}/experiments/pair")
        expect(page.locator("svg").first).to_be_visible()
        page.goto(services.record_url)
        assert set(column(page, "status")) == {"finished"}
        assert (visited.errors, visited.elsewhere) == ([], [])


@pytest.mark.long
def test_the_curve_grows_while_a_run_trains_and_the_dashboard_cancels_it(
    browser: Browser, server_lab: ServerLab
) -> None:
    lab = server_lab
    (run,) = submit(lab, ENDLESS)
    key = f"{run['run_id']}-learning-curve"

    def curves() -> list[dict[str, Any]]:
        wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        shown: list[dict[str, Any]] = lab.call("/artifacts/filter", wanted)
        return shown

    with visit(browser) as visited:
        page = visited.page
        log_in(page, lab)
        last_steps = []
        for count in (1, 2):
            wait_for(lambda count=count: len(curves()) >= count, timeout=300, what="a learning curve")
            open_artifact(page, lab, key)
            chart = page.locator("svg[aria-roledescription=xychart]").first
            expect(chart).to_be_visible()
            steps = [int(word) for word in chart.locator("text").all_text_contents() if word.isdecimal()]
            last_steps.append(max(steps))
        assert last_steps[1] > last_steps[0]

        page.goto(run["link"])
        expect(page.get_by_text("Running", exact=True).first).to_be_visible()
        page.locator("main [aria-haspopup=menu]").first.click()
        page.get_by_role("menuitem", name="Cancel").click()
        page.get_by_role("button", name="Cancel Flow Run").click()
        wait_for(lambda: state_of(lab, run) == "CANCELLED", what="the end")
        page.reload()
        expect(page.get_by_text("Cancelled", exact=True).first).to_be_visible()
        assert visited.elsewhere == []
    lab.wait_until(run["run_id"], "cancelled", timeout=30)
    assert lab.training_pid() == 0
    assert list(lab.home.run(run["run_id"]).glob("checkpoints/step-*"))
