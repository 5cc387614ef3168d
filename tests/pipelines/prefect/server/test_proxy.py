"""A Prefect server behind a proxy that ends TLS: the dashboard asks the proxy's address, and no page of others does."""

import json
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from guarded import PASSWORD, Server
from test_api_proxy import basic

from pipelines.home.home import Home
from pipelines.prefect.server.settings import origins_of, public_url
from specs.errors import RpgError

NAME = "prefect.example.org"


class Proxy:
    """Ends TLS under the name and forwards the data, as nginx does with `proxy_set_header Host $host`."""

    def __init__(self, directory: Path) -> None:
        key, certificate = directory / "key.pem", directory / "certificate.pem"
        subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-days", "1"]
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ]
        subprocess.run([*made, *subject], check=True, capture_output=True, timeout=60)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._trusted = ssl.create_default_context(cafile=str(certificate))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._context = context
        self.behind = 0
        """The port of the server; set before the first call."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            suppress(OSError),
            self._context.wrap_socket(connection, server_side=True) as told,
            socket.create_connection(("127.0.0.1", self.behind)) as server,
        ):
            server.sendall(told.recv(65536))
            while said := server.recv(65536):
                told.sendall(said)

    def ask(self, path: str, host: str = NAME, **headers: str) -> tuple[int, str, dict[str, str]]:
        """The status, the text and the headers of an answer to a browser, which has found the name at the proxy."""
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=60) as plain,
            self._trusted.wrap_socket(plain, server_hostname=NAME) as connection,
        ):
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            said = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        head, _, text = said.partition("\r\n\r\n")
        status, *named = head.split("\r\n")
        return int(status.split()[1]), text, dict(line.lower().split(": ", 1) for line in named)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Server]]:
    directory = tmp_path_factory.mktemp("proxied")
    proxy = Proxy(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_UI_API_URL", f"https://{NAME}:{proxy.port}/api")
        server = Server(Home(directory / "home"))
    proxy.behind = int(server.url.rpartition(":")[2].removesuffix("/api"))
    yield proxy, server
    server.stop()
    proxy.close()


@pytest.mark.long
def test_the_dashboard_asks_the_proxys_address(proxied: tuple[Proxy, Server]) -> None:
    proxy, server = proxied
    status, page, headers = proxy.ask("/ui-settings", f"{NAME}:{proxy.port}")
    assert status == 200
    assert json.loads(page)["api_url"] == f"https://{NAME}:{proxy.port}/api"
    assert f"default-src 'self' https://{NAME}:{proxy.port} " in headers["content-security-policy"]
    # On the server's own machine it still answers, and a page that was loaded there may ask the proxy's address.
    with urllib.request.urlopen(f"{server.url}/ready", timeout=60) as answer:
        assert answer.status == 200
    here = server.url.removesuffix("/api")
    status, _, headers = proxy.ask("/api/admin/version", origin=here, authorization=basic(PASSWORD))
    assert (status, headers["access-control-allow-origin"]) == (200, here)


@pytest.mark.more
def test_the_proxys_own_page_may_ask_and_no_other(proxied: tuple[Proxy, Server]) -> None:
    proxy, _ = proxied
    shown = {"authorization": basic(PASSWORD)}
    own = f"https://{NAME}:{proxy.port}"
    assert proxy.ask("/api/admin/version", origin=own, **shown)[0] == 200
    assert proxy.ask("/api/admin/version", origin=own)[0] == 401
    for origin in ("https://elsewhere.example", f"https://{NAME}:1", f"http://{NAME}.elsewhere.example", "null"):
        assert proxy.ask("/api/admin/version", origin=origin, **shown)[0] == 403
    for host in ("elsewhere.example", f"{NAME}.elsewhere.example"):
        assert proxy.ask("/api/admin/version", host, **shown)[0] == 403


@pytest.mark.parametrize("address", [NAME, f"{NAME}/api", "ftp://a/api", "https:///api", f"https://a:b@{NAME}/api"])
def test_an_address_that_is_none_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_UI_API_URL", address)
    with pytest.raises(RpgError, match=r"such as https://prefect\.example\.org/api"):
        public_url("http://127.0.0.1:4200/api")


def test_a_name_that_a_proxy_asks_under_is_the_origin_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["http://127.0.0.1:4200", "http://localhost:4200"]
    assert origins_of("http://127.0.0.1:4200/api") == here
    monkeypatch.setenv("RPG_TRUSTED_HOSTS", f"{NAME},studies.example.org")
    monkeypatch.setenv("PREFECT_SERVER_UI_API_URL", f"https://{NAME}/api")
    assert origins_of("http://127.0.0.1:4200/api") == [*here, f"https://{NAME}", "https://studies.example.org"]
