"""The check of the user who listens at a port."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_listener import NOBODY, listening

from specs.machine.foreign import listeners
from specs.machine.foreign.listeners import foreign_listener, guard_connections

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can listen as another user")
SOMEBODY = 65533


def as_user(user: int, ask: Callable[[], str]) -> str:
    """Returns the answer of a process of that user."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setuid(user)
        os.write(write, ask().encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(read) as answer:
        return answer.read()


@as_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::", "127.0.0.7"])
def test_another_users_listener_is_found_at_whichever_address_it_takes_connections(tmp_path: Path, host: str) -> None:
    asked = {"127.0.0.7": ["127.0.0.7"], "::1": ["[::1]"]}.get(host, ["127.0.0.1", "localhost", "0.0.0.0"])
    with listening(tmp_path / "sent", host=host) as taken:
        for name in asked:
            why = foreign_listener(f"http://{name}:{taken.port}/api")
            assert f"port {taken.port} of this machine has been taken by another user, nobody" in why
            assert "RPG_TRUSTED_USERS=nobody" in why
        assert not foreign_listener(f"http://{'127.0.0.1' if host in ('::1', '127.0.0.7') else '127.0.0.2'}:1/api")
        assert not foreign_listener(f"https://127.0.0.1:{taken.port}/api"), "a certificate proves the server"
        assert not foreign_listener(f"http://192.0.2.1:{taken.port}/api"), "an address of another machine"


@as_root
def test_a_socket_of_ones_own_at_the_very_address_takes_the_connection_before_one_of_all_addresses(
    tmp_path: Path,
) -> None:
    with listening(tmp_path / "sent", host="::1") as taken, socket.create_server(("127.0.0.1", taken.port)):
        assert not foreign_listener(f"http://127.0.0.1:{taken.port}")
        assert foreign_listener(f"http://[::1]:{taken.port}")


@as_root
def test_root_and_oneself_may_listen_and_accounts_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as roots, listening(tmp_path / "sent") as taken:
        at_roots, at_nobodys = (f"http://127.0.0.1:{port}/api" for port in (roots.getsockname()[1], taken.port))
        assert not as_user(SOMEBODY, lambda: foreign_listener(at_roots))
        assert not as_user(NOBODY, lambda: foreign_listener(at_nobodys))
        assert "no password" in as_user(SOMEBODY, lambda: foreign_listener(at_nobodys))
        assert foreign_listener(at_roots, [NOBODY]), "a service that is to run as another user"
        for named in ("nobody", f" root , {NOBODY}"):
            monkeypatch.setenv("RPG_TRUSTED_USERS", named)
            assert not as_user(SOMEBODY, lambda: foreign_listener(at_nobodys))
        monkeypatch.setenv("RPG_TRUSTED_USERS", "somebody,")
        assert foreign_listener(at_nobodys)


@as_root
def test_a_connection_is_refused_once_another_user_has_taken_the_port_of_a_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_GUARDED", set[int]())
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        port = tunnel.getsockname()[1]
        guard_connections(f"http://localhost:{port}/api")
        socket.create_connection(("127.0.0.1", port)).close()
    with listening(tmp_path / "sent", port=port), listening(tmp_path / "other") as unguarded:
        with pytest.raises(ConnectionRefusedError, match="taken by another user, nobody"):
            socket.create_connection(("localhost", port))
        socket.create_connection(("127.0.0.1", unguarded.port)).close()


@pytest.mark.parametrize(
    "url", ["", "http://", "http://localhost:none", "http://no.such.host.invalid:4200", "nonsense"]
)
def test_nobody_listens_at_what_is_no_address(url: str) -> None:
    assert not foreign_listener(url)
    guard_connections("")
