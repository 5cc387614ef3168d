"""The record in a browser: the table, the pages, the files for mirrors; nothing else of the home is reached."""

import base64
import html
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_home import (
    byte_tokenizer,
    record_experiment,
    record_run,
    record_tokenizer,
    record_tokens,
    record_two_cells,
    write,
)
from starlette.testclient import TestClient
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers, status_of_answer
from pipelines.prefect.server.credentials import make_passwords
from pipelines.remote.record_files import NotRecordedError, is_recorded, open_recorded, read_listings
from pipelines.web.app import make_app
from pipelines.web.pages import Pages
from pipelines.web.serve import live_link
from storage import Store

AUTH = "team:a password"


def test_pages_lie_below_the_home_and_those_of_a_server_that_was_killed_are_removed(home: Home) -> None:
    left = home.root / "tmp" / "pages-left"
    (left / "runs").mkdir(parents=True)
    left.with_name("pages-left.lock").touch()
    pages = Pages(home)
    assert "sums-s0" in pages.report("runs", "sums-s0")
    (lock, directory) = sorted((home.root / "tmp").iterdir(), key=lambda path: path.is_dir())
    assert (directory / "runs" / "sums-s0.html").is_file()
    assert lock.name == f"{directory.name}.lock"
    pages.close()
    assert not list((home.root / "tmp").iterdir())


def anybody(_shown: str) -> bool:
    """Lets in who shows nothing."""
    return True


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home with one run, and with everything that must not leave it."""
    home = Home(tmp_path / "home")
    record_experiment(home, [record_run(home, "sums-s0", steps=5, problems=4)])
    for name in (
        "prefect/prefect.db",
        "services/secrets",
        "runs/sums-s0/weights/step-000005/model.safetensors",
        "runs/sums-s0/checkpoints/step-000005/trainer.json",
        "runs/sums-s0/.state.json.12.partial",
        "runs/sums-s0/segments/metrics/.a0001-s000006-000010.parquet.tmp",
        "artifacts/base/0123/model.safetensors",
        "experiments.duckdb",
    ):
        write(home.root / name, "a secret")
    return home


@pytest.fixture
def client(home: Home) -> Iterator[TestClient]:
    with TestClient(make_app(home, anybody)) as client:
        yield client


@pytest.fixture
def with_tokens(home: Home) -> str:
    """A run of three steps of 120 responses, each of up to 12 tokens."""
    record_tokens(home, "sums-s0", steps=range(1, 4), responses=120, text="<b>42</b> ")
    record_tokenizer(home, "sums-s0")
    return "/runs/sums-s0/tokens"


def cells(page: str, column: int) -> list[str]:
    """The text of a column of a page's table."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.S)[1:]
    return [re.sub(r"<[^>]*>", " ", re.findall(r"<td.*?</td>", row, re.S)[column]).strip() for row in rows]


def listed(client: TestClient, known: dict[str, str] | None = None) -> dict[str, object]:
    return client.post("/record", json={"known": known or {}}).json()


def test_the_table_names_every_experiment_and_run_and_links_their_pages(client: TestClient) -> None:
    page = client.get("/").text
    assert 'href="experiments/sums"' in page
    assert 'href="runs/sums-s0"' in page
    for address in ("/experiments/sums", "/runs/sums-s0"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "<figure" in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert client.get("/runs/other").status_code == 404
    assert client.get("/studies/sums").status_code == 404


def test_what_a_run_took_is_rounded_as_by_rpg_runs(home: Home, client: TestClient) -> None:
    state = json.loads((home.run("sums-s0") / "state.json").read_text())
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T00:00:59.600+00:00"}
    write(home.run("sums-s0") / "state.json", state | times)
    assert "0:01:00" in client.get("/").text


def test_an_empty_home_has_a_table_too(tmp_path: Path) -> None:
    with TestClient(make_app(Home(tmp_path), anybody)) as client:
        assert "Nothing is recorded yet" in client.get("/").text


def test_a_page_is_rendered_again_only_when_what_it_shows_has_changed(home: Home, client: TestClient) -> None:
    written = client.get("/runs/sums-s0").text
    write(home.run("sums-s0") / "leases/1.json", {"number": 1})
    assert client.get("/runs/sums-s0").text == written
    state = json.loads((home.run("sums-s0") / "state.json").read_text())
    write(home.run("sums-s0") / "state.json", state | {"status": "failed", "reason": "the disk is full"})
    assert "the disk is full" in client.get("/runs/sums-s0").text
    assert "the disk is full" in client.get("/experiments/sums").text
    assert not (home.run("sums-s0") / "report.html").exists()


def test_recorded_text_is_shown_as_text(home: Home, client: TestClient) -> None:
    run = home.run("sums-s0") / "run.json"
    write(run, json.loads(run.read_text()) | {"name": "<script>alert(1)</script>"})
    assert "<script>alert" not in client.get("/").text
    assert "<script>alert" not in client.get("/runs/sums-s0").text


def test_what_html_has_no_place_for_does_not_reach_a_page(home: Home, client: TestClient) -> None:
    state = json.loads((home.run("sums-s0") / "state.json").read_text())
    write(home.run("sums-s0") / "state.json", state | {"status": "failed", "reason": "a\0b\x1b]0;c\x9bd"})
    record_tokens(home, "sums-s0", steps=range(1, 2), responses=1, text="f\0g\x08h ")
    for address in ("/", "/runs/sums-s0", "/experiments/sums", "/runs/sums-s0/tokens", "/runs/sums-s0/tokens/1/0"):
        answer = client.get(address)
        assert answer.status_code == 200, address
        assert not re.findall("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", answer.text), address
        assert "a\ufffdb\ufffd]0;c\ufffdd" in answer.text or "tokens" in address
    assert client.get("/runs/a%00b").status_code == 404


def test_a_mirror_is_told_what_has_changed_and_what_is_gone(home: Home, client: TestClient) -> None:
    first = listed(client)
    assert set(first["changed"]) == {"runs/sums-s0", "experiments/sums"}
    files = first["changed"]["runs/sums-s0"]["files"]
    assert {"runs/sums-s0/run.json", "runs/sums-s0/state.json", "runs/sums-s0/attempts/0001.json"} <= set(files)
    assert all(client.get(f"/record/{path}").content == (home.root / path).read_bytes() for path in files)
    known = {unit: listing["digest"] for unit, listing in first["changed"].items()}
    assert listed(client, known) == {"changed": {}, "gone": []}
    record_run(home, "sums-s1", seed=1, steps=5, problems=4)
    shutil.rmtree(home.experiment("sums"))
    later = listed(client, known)
    assert set(later["changed"]) == {"runs/sums-s1"}
    assert later["gone"] == ["experiments/sums"]


def test_a_file_that_has_grown_is_read_from_where_the_mirror_ends(home: Home, client: TestClient) -> None:
    log = home.run("sums-s0") / "logs" / "train.log"
    log.parent.mkdir()
    log.write_text("one\ntwo\n")
    whole = client.get("/record/runs/sums-s0/logs/train.log")
    assert whole.headers["content-type"].startswith("text/plain")
    grown = client.get("/record/runs/sums-s0/logs/train.log", headers={"range": "bytes=4-"})
    assert (grown.status_code, grown.text) == (206, "two\n")
    assert grown.headers["content-range"] == "bytes 4-7/8"
    beyond = client.get("/record/runs/sums-s0/logs/train.log", headers={"range": "bytes=99-"})
    assert (beyond.status_code, beyond.text) == (200, "one\ntwo\n")
    same = client.get("/record/runs/sums-s0/logs/train.log", headers={"if-none-match": whole.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "prefect/prefect.db",
        "services/secrets",
        "experiments.duckdb",
        "runs/sums-s0/weights/step-000005/model.safetensors",
        "runs/sums-s0/checkpoints/step-000005/trainer.json",
        "artifacts/base/0123/model.safetensors",
        "runs/sums-s0/.state.json.12.partial",
        "runs/sums-s0/segments/metrics/.a0001-s000006-000010.parquet.tmp",
        "runs/sums-s0/../../services/secrets",
        "runs/sums-s0/%2e%2e/%2e%2e/services/secrets",
        "runs%2fsums-s0%2f..%2f..%2fservices%2fsecrets",
        "runs//sums-s0/run.json",
        "/etc/passwd",
        "//etc/passwd",
        "%2fetc%2fpasswd",
        "runs/sums-s0/run.json%00",
        "runs/sums-s0/run.json/",
        "runs/sums-s0",
        "runs/sums-s0/link.json",
        "runs/linked/run.json",
        "runs/sums-s0/logs/pipe.log",
        "runs/sums-s0/logs/folder.log",
    ],
)
def test_nothing_but_the_record_can_be_read(home: Home, client: TestClient, path: str) -> None:
    outside = home.root.parent / "outside"
    write(outside / "run.json", {"a": "secret"})
    (home.run("sums-s0") / "link.json").symlink_to(home.root / "services" / "secrets")
    (home.root / "runs" / "linked").symlink_to(outside)
    (home.run("sums-s0") / "logs" / "folder.log").mkdir(parents=True)
    os.mkfifo(home.run("sums-s0") / "logs" / "pipe.log")
    answer = client.get(f"/record/{path}")
    assert answer.status_code == 404
    assert "a secret" not in answer.text
    files = [path for listing in listed(client)["changed"].values() for path in listing["files"]]
    assert not [name for name in files if "link" in name or "pipe" in name or "secret" in name or "/." in name]


@given(st.text(alphabet="ab./\\%0:~\x00rus-jon_*\n", max_size=40) | st.text(max_size=40))
def test_no_path_leads_out_of_the_record(text: str) -> None:
    for path in (text, f"runs/{text}", f"runs/a/{text}.json", f"runs/a/logs/{text}.log"):
        if is_recorded(path):
            assert not {"", ".", ".."} & set(path.split("/"))
            assert not path.startswith("/")
            assert not any(part.startswith(".") for part in path.split("/"))
        else:
            with pytest.raises(NotRecordedError):
                open_recorded(Path("/"), path)


def test_a_directory_that_becomes_a_link_while_it_is_served_is_not_followed(home: Home, client: TestClient) -> None:
    assert client.get("/record/runs/sums-s0/run.json").status_code == 200
    moved = home.root.parent / "moved"
    home.run("sums-s0").rename(moved)
    home.run("sums-s0").symlink_to(moved)
    assert client.get("/record/runs/sums-s0/run.json").status_code == 404
    assert "runs/sums-s0" not in read_listings(home.root)


def test_only_who_has_the_password_sees_anything(home: Home) -> None:
    with TestClient(make_app(home, AUTH.__eq__)) as client:
        for address in (
            "/",
            "/runs/sums-s0",
            "/runs/sums-s0/tokens",
            "/runs/sums-s0/tokens/1/0",
            "/record/runs/sums-s0/run.json",
            "/no/such/page",
        ):
            answer = client.get(address)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert client.get(address, auth=("team", "another")).status_code == 401
        assert client.post("/record", json={"known": {}}).status_code == 401
        assert client.get("/ready").status_code == 200
        user, password = AUTH.split(":")
        assert client.get("/runs/sums-s0", auth=(user, password)).status_code == 200
        assert client.get("/record/services/secrets", auth=(user, password)).status_code == 404


def test_a_page_of_another_site_cannot_read_under_a_name_that_was_made_to_lead_here(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(make_app(home, anybody, origins=["http://127.0.0.2:4202"])) as client:
        for host in ("evil.example", "evil.example:4202", "127.0.0.2.evil.example", ""):
            assert client.get("/", headers={"host": host}).status_code == 403
        for host in ("localhost:4202", "127.0.0.1:4202", "127.0.0.2:4202"):
            assert client.get("/", headers={"host": host}).status_code == 200
        here = {"host": "localhost:4202"}
        assert client.get("/", headers=here | {"origin": "http://localhost:4202"}).status_code == 200
        for origin in ("http://evil.example", "http://localhost:5000", "null"):
            assert client.get("/", headers=here | {"origin": origin}).status_code == 403
        monkeypatch.setenv("RPG_TRUSTED_HOSTS", "reports.example.org")
        assert client.get("/", headers={"host": "reports.example.org"}).status_code == 200


def test_the_link_opens_the_record_and_leaves_a_cookie(home: Home) -> None:
    app = make_app(home, AUTH.__eq__, token="a-token")
    with TestClient(app, base_url="http://127.0.0.1:4202", follow_redirects=False) as client:
        for address in ("/", "/?token=", "/?token=another", "/runs/sums-s0", "/record/runs/sums-s0/run.json"):
            answer = client.get(address)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="rpg"')
            assert "open the link that `rpg report --serve` has printed" in answer.text
        assert client.get("/", headers={"cookie": "rpg-4203=a-token; rpg-4202=another"}).status_code == 401
        assert client.get("/", headers={"cookie": "rpg-4202="}).status_code == 401
        opened = client.get("/runs/sums-s0?from=2&token=a-token")
        assert (opened.status_code, opened.headers["location"]) == (303, "http://127.0.0.1:4202/runs/sums-s0?from=2")
        cookie = opened.headers["set-cookie"]
        assert cookie.startswith("rpg-4202=a-token;")
        assert {"HttpOnly", "SameSite=lax"} <= set(cookie.split("; "))
        assert client.get("/").status_code == 200
        assert client.get("/record/services/secrets").status_code == 404
        client.cookies.clear()
        assert client.get("/", auth=("team", "a password")).status_code == 200


def test_the_responses_of_a_step_are_listed_page_by_page(client: TestClient, with_tokens: str) -> None:
    page = client.get(with_tokens).text
    assert "Responses of step 3<" in page
    assert "120 responses, page 1 of 3<" in page
    assert [int(cell.split()[0]) for cell in cells(page, 0)] == list(range(50))
    (later,) = re.findall(r'href="tokens\?([^"]*page=2)"', page)
    assert cells(client.get(f"{with_tokens}?{later.replace('&amp;', '&')}").text, 0)[0].startswith("50")
    (earlier,) = re.findall(r'href="tokens\?([^"]*step=2[^"]*)"', page)
    assert "Responses of step 2<" in client.get(f"{with_tokens}?{earlier.replace('&amp;', '&')}").text
    assert f'href="{with_tokens[1:]}"' in client.get("/").text


def test_responses_are_narrowed_down_by_clip_ratio_and_reward(home: Home, client: TestClient, with_tokens: str) -> None:
    query = (
        "SELECT rollout_id, any_value(reward), bool_or(clipped), max(greatest(ratio, 1 / ratio)) "
        "FROM rollouts JOIN tokens USING (run_id, step, rollout_id) WHERE step = 2 GROUP BY 1 ORDER BY 1"
    )
    with Store.open(home.root) as store:
        recorded = store.query(query).rows
    wanted = {
        "clipped=on": [row[0] for row in recorded if row[2]],
        "ratio=1.05": [row[0] for row in recorded if row[3] >= 1.05],
        "reward_from=0.5": [row[0] for row in recorded if row[1] == 1],
        "reward_to=0.5": [row[0] for row in recorded if row[1] == 0],
    }
    for field, rollouts in wanted.items():
        assert 0 < len(rollouts) < 120
        page = client.get(f"{with_tokens}?step=2&{field}").text
        assert f"{len(rollouts)} responses" in page
        assert [int(cell.split()[0]) for cell in cells(page, 0)] == rollouts[:50]
    ratios = cells(client.get(f"{with_tokens}?step=2&order=largest+ratio").text, 7)
    largest = [float(text.split(" to ")[1]) for text in ratios]
    assert largest == sorted(largest, reverse=True)


def test_a_response_is_shown_token_by_token_and_page_by_page(home: Home, client: TestClient) -> None:
    text = "é<i>1</i>\n"
    record_tokens(home, "sums-s0", steps=[1], responses=4, length=5000, text=text)
    record_tokenizer(home, "sums-s0")
    first = client.get("/runs/sums-s0/tokens/1/0").text
    later = client.get("/runs/sums-s0/tokens/1/0?from=1002").text
    for page, start in ((first, 0), (later, 1002)):
        tokens = re.findall(r'<i[^>]* data-about="token (\d+), id \d+ · ratio [^"]*">(.*?)</i>', page, re.S)
        assert [int(position) for position, _ in tokens] == list(range(start, start + 1000))
        # The bytes of é are two tokens: a box stands for the first. The second page begins between the two.
        repeated = ["▫", "é", *(html.escape(letter) for letter in "<i>1</i>"), "↵\n"]
        assert [shown for _, shown in tokens] == [repeated[position % 11] for position in range(start, start + 1000)]
    assert 'href="0?from=1000"' in first
    assert "<script" not in first.partition("</main>")[0]
    assert client.get("/runs/sums-s0/tokens/1/3").status_code == 200


def test_without_the_tokenizer_tokens_are_shown_by_their_ids(home: Home, client: TestClient) -> None:
    record_tokens(home, "sums-s0", steps=[1], text="ab")
    page = client.get("/runs/sums-s0/tokens/1/0").text
    assert "tokenizer is not in this home" in page
    first, second = byte_tokenizer().encode("ab").ids
    assert re.search(rf">{first} </i><i[^>]*>{second} </i>", page)
    assert ">ababab" in page


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/runs/other/tokens", 404),
        ("/runs/..%2f..%2fetc/tokens", 404),
        ("/runs/sums-s0/tokens/1/120", 404),
        ("/runs/sums-s0/tokens/99/0", 404),
        ("/runs/sums-s0/tokens/1/99999999999999999999", 400),
        ("/runs/sums-s0/tokens/1/0?from=-1", 400),
        ("/runs/sums-s0/tokens?step=two", 400),
        ("/runs/sums-s0/tokens?ratio=0.5", 400),
        ("/runs/sums-s0/tokens?ratio=nan", 400),
        ("/runs/sums-s0/tokens?page=0", 400),
        ("/runs/sums-s0/tokens?step=99999999999999999999", 400),
        ("/runs/sums-s0/tokens?order=reward;drop+table+runs", 400),
        ("/runs/sums-s0/tokens?step=99&page=9", 200),
    ],
)
@pytest.mark.usefixtures("with_tokens")
def test_an_address_of_the_token_browser_that_makes_no_sense_is_refused(
    client: TestClient, address: str, status: int
) -> None:
    assert client.get(address).status_code == status


def test_a_run_without_rollouts_has_a_page_of_responses_too(client: TestClient) -> None:
    assert "No responses are recorded" in client.get("/runs/sums-s0/tokens").text


NONSENSE = [
    *(b"", b"[]", b"{}", b'{"known": 3}', b'{"known": ["a"]}', b"\xff\xfe"),
    *(b"[" * 100_000, b'{"known": ' * 50_000, b'{"known": {}, "only": [' + b"[" * 100_000),
    *(b'{"known": {"a": 1}}', b'{"known": {}, "only": 3}', b'{"known": {}, "only": ["runs/\\u0000"]}'),
    *(b'{"known": {"\\ud800": "b"}}', b'{"known": {"a": [[]]}}', b'{"known": ' + b"9" * 10_000 + b"}"),
]


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_a_request_that_makes_no_sense_is_refused(client: TestClient, body: bytes) -> None:
    assert client.post("/record", content=body).status_code == 400


@pytest.mark.parametrize("verb", ["put", "delete", "patch", "post"])
def test_nothing_is_written(home: Home, client: TestClient, verb: str) -> None:
    before = (home.run("sums-s0") / "run.json").read_bytes()
    assert getattr(client, verb)("/record/runs/sums-s0/run.json").status_code == 405
    assert (home.run("sums-s0") / "run.json").read_bytes() == before


def status_as(uid: int, address: str, header: str = "") -> int:
    """The status of a GET of another user's curl, which keeps cookies and goes where it is led."""
    options = ["--silent", "--output", "/dev/null", "--location", "--cookie", "", "--write-out", "%{http_code}"]
    who = {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["curl", *options, *(["--header", header] if header else []), address]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", **who).stdout)


@pytest.mark.more
def test_rpg_report_serves_to_who_has_its_link_until_it_is_interrupted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    shutil.rmtree(home.services, ignore_errors=True)
    make_passwords(home)
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "report", "--serve"]
    environment = os.environ | {"RPG_HOME": str(home.root)}
    port, nobody = free_port(), 65534
    process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        link = process.stdout.readline().strip()
        address = f"http://127.0.0.1:{port}"
        assert re.fullmatch(re.escape(f"{address}/?token=") + r"[\w-]{32}", link)
        wait_for(lambda: answers(f"{address}/ready"), what="the page")
        for path in ("/", "/runs/sums-s0", "/record/runs/sums-s0/run.json", "/waiting", "/?token=another"):
            assert status_as(nobody, address + path) == 401, path
        assert status_as(nobody, link) == 200
        assert status_as(nobody, link, "Host: evil.example") == 403
        assert status_as(nobody, link, "Origin: http://evil.example") == 403
        for name in ("auth", "reader"):
            basic = base64.b64encode((home.services / "secrets" / name).read_bytes().strip()).decode()
            assert status_as(nobody, f"{address}/runs/sums-s0", f"Authorization: Basic {basic}") == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
    command[-2:] = ["watch", "--web", "sums", "sums-s0"]
    process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        link = process.stdout.readline().strip()
        assert re.fullmatch(re.escape(f"{address}/live?of=sums&of=sums-s0&token=") + r"[\w-]{32}", link)
        wait_for(lambda: answers(f"{address}/ready"), what="the page")
        assert status_as(nobody, link) == 200
        assert status_as(nobody, f"{address}/live?of=sums") == 401
    finally:
        process.terminate()
        process.communicate(timeout=30)
    refused = subprocess.run([*command, "--host", "0.0.0.0"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "without a password" in refused.stderr


def raw_status(port: int, path: str, auth: str = "") -> bytes:
    """The status of the answer to a GET whose path nothing has made neat."""
    password = f"Authorization: Basic {base64.b64encode(auth.encode()).decode()}\r\n" if auth else ""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n{password}Connection: close\r\n\r\n".encode())
        return connection.makefile("rb").readline().split()[1]


def test_the_program_of_the_server_profile_is_told_where_by_its_environment(home: Home) -> None:
    port = free_port()
    where = {"RPG_HOME": str(home.root), "RPG_WEB_HOST": "0.0.0.0", "RPG_WEB_PORT": str(port)}
    environment = os.environ | where | {"PREFECT_SERVER_API_AUTH_STRING": AUTH}
    process = subprocess.Popen([sys.executable, "-m", "pipelines.web"], env=environment)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the program")
        # As no client of Python's would send it: the path as it stands.
        for path in ("/record/runs/../services/secrets", "/record/../services/secrets", "/../services/secrets"):
            assert raw_status(port, path) == b"401"
            assert raw_status(port, path, AUTH) == b"404"
        assert raw_status(port, "/record/runs/sums-s0/run.json", AUTH) == b"200"
    finally:
        process.terminate()
        process.wait(30)


def test_two_cells_are_one_experiment_of_six_runs(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    record_two_cells(home)
    with TestClient(make_app(home, anybody)) as client:
        page = client.get("/").text
        assert "6 runs, 1 experiment<" in page
        assert len(re.findall(r'href="runs/[^"/]*"', page)) == 6


@pytest.mark.more
def test_the_link_of_a_command_serves_from_its_first_visitor_to_the_end_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    record_experiment(home, [record_run(home, "sums-s0")])
    with live_link(home, "sums") as link:
        assert link == "rpg watch --web sums", "in a log, which others may read"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # a terminal, to rich
    before = psutil.Process().children()
    with live_link(home, "sums") as link:
        (server,) = (child for child in psutil.Process().children() if child not in before)
        idle = server.memory_info().rss
        page, _, token = link.partition("&token=")
        assert page == f"http://127.0.0.1:{page.split(':')[2].split('/')[0]}/live?of=sums"
        assert not any(token in word for word in server.cmdline())
        assert status_of_answer(page, timeout=60) == 401
        with build_opener(HTTPCookieProcessor()).open(link, timeout=60) as answer:
            assert (len(token) >= 32, b"sums" in answer.read()) == (True, True)
        assert server.memory_info().rss > 3 * idle, "it imports nothing before"
    assert not server.is_running()
    assert status_of_answer(link) == 0
