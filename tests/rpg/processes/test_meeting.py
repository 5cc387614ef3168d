"""Ranks of one machine meet where nobody else can: attacked while they do, by processes without the launch's key."""

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from pipelines.launchers.local import local_command
from rpg.processes import store
from rpg.processes.store import MembersStore, keep_store
from specs.machine.launch import KEY, ON_LOOPBACK
from tests.rpg.tiny_run import free_port, group_of, listeners

NOBODY = 65534
ADDRESS = "127.0.0.1"


Process = subprocess.Popen[str]


def start(environment: dict[str, str]) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rpg.meeting_worker"],
        env={**os.environ, **ON_LOOPBACK, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def ended(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def again(process: Process, word: str = "") -> None:
    """Gives a process a line."""
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def until(process: Process, word: str) -> str:
    """Returns a process's output up to a line."""
    assert process.stdout
    said = ""
    for line in process.stdout:
        said += line
        if line == f"{word}\n":
            return said
    raise AssertionError(said)


def assert_they_gather(*ranks: Process) -> None:
    for rank in ranks:
        assert rank.stdin
        rank.stdin.close()
        rank.stdin = None
    for rank in ranks:
        assert rank.communicate(timeout=120)[0].splitlines()[-1] == GATHERED
        assert rank.returncode == 0


def as_another_user(code: str, *arguments: str) -> Process:
    """A process that attacks: as root, of another user; else of this one. It has nothing of ours in its environment."""
    # The interpreter may be in root's own directory, so that nothing can be imported later.
    drop = f"""
        import encodings.idna, os, pickle, socket, sys
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid({NOBODY})
            os.setuid({NOBODY})
    """
    command = [sys.executable, "-c", textwrap.dedent(drop) + textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.more
def test_ranks_started_here_listen_at_loopback_alone_and_have_a_key_that_no_command_line_shows(tmp_path: Path) -> None:
    port = free_port()
    command = [word.replace("rpg.train", "tests.rpg.meeting_worker") for word in local_command(tmp_path, 2, port)]
    # What a shell of a cluster may have set would have them listen elsewhere.
    elsewhere = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", KEY: "known"}
    launcher = subprocess.Popen(command, env=elsewhere, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with ended(launcher):
        until(launcher, "met")
        family = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        keys = {rank.environ()[KEY] for rank in family[1:]}
        assert len(keys) == 1
        assert len(key := keys.pop()) == 64
        assert not any(key in word for process in family for word in process.cmdline())
        seen = listeners(family[0])
        assert (ADDRESS, port) in seen
        assert len(seen) > 2, "gloo's listeners too"
        assert {address for address, _ in seen} == {ADDRESS}
        assert launcher.communicate(timeout=120)[0].count(GATHERED) == 2
        assert launcher.returncode == 0


def test_several_ranks_without_a_key_do_not_meet() -> None:
    environment, _ = group_of(2)
    environment[KEY] = ""
    rank = start(environment)
    with ended(rank):
        assert f"{KEY} is not set" in rank.communicate(timeout=120)[0]
        assert rank.returncode == 1


ASKS_THE_STORE = """
    port, ran = int(sys.argv[1]), sys.argv[2]

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (ran,)

    # To PyTorch's own store: validate, set, get. A frame of ours without a proof. Noise. A pickle. Nothing.
    magic, name = b"\\x00" + (0x3C85F7CE).to_bytes(4, "little"), (7).to_bytes(8, "little") + b"group/0"
    asked = b'["delete", 1.0, ["group/0"]]'
    for content in [
        magic + b"\\x01" + name + name,
        magic + b"\\x03" + name,
        bytes(32) + len(asked).to_bytes(4, "big") + bytes(32) + asked,
        b"GET / HTTP/1.1\\r\\n\\r\\n" * 100,
        pickle.dumps(Bomb()),
        b"",
    ]:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            answer = connection.recv(4096)  # before the store can hang up on what it is sent
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(4096):
                    answer += part
            except OSError:
                pass
            print(os.getuid(), len(answer), flush=True)
"""
TAKES_SEATS = """
    # Gloo takes who names a small number first. Which ports are the ranks' is told here; anybody could look.
    taken = []
    for line in sys.stdin:
        for number in (0, 1):
            connection = socket.create_connection(("127.0.0.1", int(line)), timeout=5)
            connection.sendall(number.to_bytes(8, "little"))
            taken.append(connection)
"""
GATHERED = "gathered [{'rank': 0}, {'rank': 1}] 2.0"
NOTICED = "a process outside the launch may have taken a rank's place"


@pytest.mark.more
def test_an_outsider_is_told_nothing_by_the_store_while_ranks_meet_and_afterwards(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    first, second = group_of(2)
    arguments = first["MASTER_PORT"], str(tmp_path / "ran")
    zero = start(first)
    with ended(zero):
        while (ADDRESS, int(first["MASTER_PORT"])) not in listeners(psutil.Process(zero.pid)):
            assert zero.poll() is None
            time.sleep(0.05)
        before = as_another_user(ASKS_THE_STORE, *arguments).communicate(timeout=60)[0]
        one = start(second)
        with ended(one):
            for rank in (zero, one):
                until(rank, "met")
            after = as_another_user(ASKS_THE_STORE, *arguments).communicate(timeout=60)[0]
            assert_they_gather(zero, one)
    user = NOBODY if os.getuid() == 0 else os.getuid()
    assert before == after
    assert {int(user) for user in before.split()[::2]} == {user}
    assert before.split()[1::2] == ["32"] * 6, "only a nonce, which is public"
    assert not (tmp_path / "ran").exists()


@pytest.mark.more
def test_an_outsider_who_takes_a_ranks_seat_is_noticed_and_the_ranks_meet_without_him() -> None:
    first, second = group_of(2)
    zero, thief = start(first), as_another_user(TAKES_SEATS)
    with ended(zero, thief):
        tell_of_listeners(zero, thief, int(first["MASTER_PORT"]))
        time.sleep(3)
        one = start(second)
        with ended(one):
            said = [until(rank, "met") for rank in (zero, one)]
            for _ in range(8):  # which of two ranks waits for the other's connection is left to chance
                if any(NOTICED in text for text in said):
                    break
                again(zero)
                time.sleep(1)
                again(one)
                said = [until(rank, "again") for rank in (zero, one)]
            assert any(NOTICED in text for text in said)
            assert_they_gather(zero, one)


def tell_of_listeners(rank: Process, thief: Process, known: int) -> None:
    """Tells the thief, from now on, of each port at which the rank begins to listen."""

    def watch() -> None:
        told = {known}
        with suppress(OSError, ValueError, psutil.Error):
            while rank.poll() is None:
                for _, port in listeners(psutil.Process(rank.pid)):
                    if port not in told:
                        told.add(port)
                        again(thief, str(port))
                time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture
def kept() -> tuple[tuple[str, int], Any]:
    """A launch's store, and its address."""
    at = (ADDRESS, free_port())
    return at, keep_store(at, b"key")


def test_a_member_has_the_keepers_values_and_it_has_the_members(kept: tuple[tuple[str, int], Any]) -> None:
    at, keeper = kept
    member = MembersStore(at, b"key", patience=timedelta(seconds=20))
    keeper.set("a", "1")
    member.set("b", b"\x00\xff")
    assert (member.get("a"), keeper.get("b")) == (b"1", b"\x00\xff")
    assert (member.add("n", 2), keeper.add("n", 3), member.add("n", 0)) == (2, 5, 5)
    assert member.check(["a", "b"])
    assert not member.check(["c"])
    assert member.compare_set("a", "1", "2") == b"2"
    assert member.compare_set("a", "1", "3") == b"2"
    member.append("a", "4")
    assert member.multi_get(["a", "b"]) == [b"24", b"\x00\xff"]
    assert member.delete_key("a")
    assert not member.check(["a"])
    with pytest.raises(DistStoreError):
        member.wait(["a"], timedelta(seconds=0.2))
    threading.Timer(0.2, keeper.set, ["a", "late"]).start()
    assert member.get("a") == b"late", "asked for before it was there"


def test_who_has_another_key_neither_asks_nor_answers(kept: tuple[tuple[str, int], Any]) -> None:
    at, keeper = kept
    with pytest.raises(DistNetworkError, match=rf"the ranks' store at {ADDRESS}:{at[1]} cannot be reached"):
        MembersStore(at, b"another", patience=timedelta(seconds=0.3))
    with suppress(Exception):  # PyTorch's own, which is what an outsider has
        TCPStore(at[0], at[1], is_master=False, timeout=timedelta(seconds=0.5)).set("taken", "1")
    assert keeper.num_keys() == 0


def test_a_message_that_is_altered_repeated_or_sent_back_is_refused(kept: tuple[tuple[str, int], Any]) -> None:
    """Through an attacker in between, without the key, who forwards all messages except one."""
    at, keeper = kept
    asked = json.dumps(["add", 5.0, ["n", 1]]).encode()

    def proxied(alter: Any) -> str:
        with socket.create_server((ADDRESS, 0)) as between:
            relay = threading.Thread(target=relayed, args=(between, at, asked, alter), daemon=True)
            relay.start()
            member = MembersStore(between.getsockname(), b"key", patience=timedelta(seconds=5))
            try:
                return str(member.add("n", 1))
            except DistNetworkError as error:
                return str(error)
            finally:
                del member
                relay.join(10)

    assert proxied(lambda frame: frame) == "1"
    assert "has gone" in proxied(lambda frame: frame.replace(b'"n", 1', b'"n", 9'))
    assert "has gone" in proxied(lambda frame: frame[:4] + bytes(32) + frame[36:])
    assert keeper.add("n", 0) == 1
    proxied(lambda frame: frame + frame)
    assert keeper.add("n", 0) == 2, "the second time it counts for nothing"


def relayed(between: socket.socket, at: tuple[str, int], asked: bytes, alter: Any) -> None:
    """Passes on one connection each way; the frame that asks goes through `alter`."""
    member, _ = between.accept()
    with member, socket.create_connection(at) as keeper:
        back = threading.Thread(target=pump, args=(keeper, member, lambda part: part), daemon=True)
        back.start()
        frame = 36 + len(asked)
        pump(member, keeper, lambda part: part[:-frame] + alter(part[-frame:]) if part.endswith(asked) else part)
        back.join(10)


def pump(source: socket.socket, target: socket.socket, alter: Any) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(alter(part))
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def test_strangers_that_say_nothing_or_talk_slowly_keep_no_member_away(
    kept: tuple[tuple[str, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, _ = kept
    monkeypatch.setattr(store, "_PROOF_SECONDS", 1.0)
    strangers = [socket.create_connection(at) for _ in range(200)]
    try:
        for stranger in strangers[::2]:
            stranger.sendall(bytes(32) + struct.pack(">I", 2**31))
        member = MembersStore(at, b"key", patience=timedelta(seconds=20))
        member.set("a", "1")
        assert member.get("a") == b"1"
        strangers[0].settimeout(10)
        answers = b""
        with suppress(OSError):
            while part := strangers[0].recv(4096):
                answers += part
        assert len(answers) == 32, "a nonce, and the end"
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.more
def test_a_pickle_in_the_place_of_a_ranks_value_makes_nothing(tmp_path: Path) -> None:
    """Even an attacker with the key cannot run code: a rank reads gathered data as a message."""
    ran = tmp_path / "ran"
    code = f"""
    import os, pickle, torch, torch.distributed as dist
    from rpg.processes import ranks
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ({str(ran)!r},)
    ranks.join("cpu")
    if ranks.rank() == 1:
        ranks.encoded = pickle.dumps
    try:
        ranks.gather(Bomb() if ranks.rank() == 1 else 0)
    except ValueError as error:
        print("refused", str(error)[:20], flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [
        subprocess.Popen(command, env=os.environ | ON_LOOPBACK | each, stdout=subprocess.PIPE, text=True)
        for each in group_of(2)
    ]
    with ended(*processes):
        assert processes[0].communicate(timeout=120)[0].startswith("refused")
    assert not ran.exists()
    pickle.dumps(ran)
