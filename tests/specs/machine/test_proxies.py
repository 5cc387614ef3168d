"""Programs on one machine reach each other directly, whatever proxy the shell names for the network."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from specs.machine.proxies import reach_this_machine_directly

CLIENTS = """
import asyncio, contextlib, sys
import specs
import aiohttp, httpx, requests, urllib.request, websockets.proxy, websockets.uri
import openai

async def get(url):
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        return answer.status

url = sys.argv[1]
httpx.get(url)
requests.get(url)
urllib.request.urlopen(url).read()
asyncio.run(get(url))
with contextlib.suppress(openai.APIError):
    openai.OpenAI(base_url=url, api_key="x", max_retries=0).models.list()
assert websockets.proxy.get_proxy(websockets.uri.parse_uri(url.replace("http", "ws", 1))) is None
"""
"""A program that asks an address through each kind of client that processes of ours use."""


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that refuses: its address, and the targets that it was asked for."""
    asked: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        do_GET = do_POST = do_CONNECT = refuse  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            del arguments

    with _serving(Refusing) as address:
        yield address, asked


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a server on loopback that answers everything."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: object) -> None:
            del arguments

    with _serving(Answering) as address:
        yield address


class _serving:  # noqa: N801
    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def surroundings(**variables: str) -> dict[str, str]:
    """This environment with these proxies alone."""
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return own | variables


def test_no_client_in_a_process_of_ours_asks_a_proxy_for_loopback(proxy: tuple[str, list[str]], server: str) -> None:
    address, asked = proxy
    named = surroundings(HTTP_PROXY=address, https_proxy=address, no_proxy="", NO_PROXY="example.org")
    program = [sys.executable, "-P", "-c", CLIENTS, server]
    done = subprocess.run(program, env=named, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not asked


@pytest.mark.more
@pytest.mark.parametrize("module", ["pipelines.cli", "rpg.types", "storage.record"])
@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_each_package_knows_what_needs_no_proxy(
    module: str, variable: str, proxy: tuple[str, list[str]], server: str
) -> None:
    address, asked = proxy
    program = f"import {module}, httpx, sys; httpx.get(sys.argv[1]).raise_for_status()"
    named = surroundings(**{variable: address}, no_proxy=".example.org, 10.0.0.0/8")
    subprocess.run([sys.executable, "-P", "-c", program, server], env=named, check=True, timeout=60)
    assert not asked


def test_the_proxy_is_asked_for_hosts_elsewhere(proxy: tuple[str, list[str]]) -> None:
    address, asked = proxy
    program = "import specs, httpx; httpx.get('http://judge.example/v1')"
    subprocess.run([sys.executable, "-P", "-c", program], env=surroundings(http_proxy=address), check=True, timeout=60)
    assert asked == ["http://judge.example/v1"]


def test_lists_in_upper_and_lower_case_become_one_and_keep_their_hosts() -> None:
    host = os.uname().nodename
    environment = {"https_proxy": "http://p:1", "no_proxy": ".a.org, localhost", "NO_PROXY": "b.org,.a.org"}
    reach_this_machine_directly(environment)
    listed = environment["no_proxy"].split(",")
    assert environment["NO_PROXY"] == environment["no_proxy"]
    assert listed[:3] == [".a.org", "localhost", "b.org"]
    assert {"127.0.0.1", "::1", host} <= set(listed)
    again = dict(environment)
    reach_this_machine_directly(again)
    assert again == environment


def test_an_environment_without_a_proxy_stays_as_it_is() -> None:
    environment = {"no_proxy": "a.org", "PATH": "/bin"}
    reach_this_machine_directly(environment)
    assert environment == {"no_proxy": "a.org", "PATH": "/bin"}
