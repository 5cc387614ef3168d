"""GPU slots: two runs never hold one, and nothing is left of a run that was killed."""

import fcntl
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.launchers.ranks import verdict
from specs.machine.gpu_slots import DIRECTORY, SLOTS, TooFewSlotsError, leased, slots_here, slots_wanted

HOLD = """
import sys, time
from specs.machine.gpu_slots import leased
with leased(int(sys.argv[1]), sys.argv[2], waiting=None) as slots:
    print(*slots, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def four_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS, "0,1,2,3")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "slots"))


def hold(count: int, holder: str) -> tuple["subprocess.Popen[str]", list[str]]:
    """A process that holds slots until it is killed, and which it got."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(count), holder], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_two_runs_get_slots_of_their_own_and_a_third_is_told_who_has_them() -> None:
    first, got_first = hold(1, "run-a")
    second, got_second = hold(2, "run-b")
    try:
        assert got_first == ["0"]
        assert got_second == ["1", "2"]
        with pytest.raises(TooFewSlotsError) as refused, leased(2, "run-c", waiting=None):
            pass
        assert f"0 is held by run-a (process {first.pid} of " in str(refused.value)
        assert "2 is held by run-b" in str(refused.value)
        with leased(1, "run-c", waiting=None) as left:
            assert left == ["3"]
    finally:
        end(first)
        end(second)


def test_the_slots_of_a_killed_process_are_free_at_once() -> None:
    process, got = hold(4, "run-a")
    assert len(got) == 4
    end(process)
    with leased(4, "run-b", waiting=None) as taken:
        assert taken == ["0", "1", "2", "3"]


def test_waiting_ends_when_the_slots_are_given_back_and_names_the_holder_meanwhile() -> None:
    process, _ = hold(3, "run-a")
    messages: list[str] = []

    def waiting(message: str) -> None:
        messages.append(message)
        if len(messages) == 2:
            end(process)

    with leased(2, "run-b", waiting=waiting) as taken:
        assert taken == ["0", "1"]
    assert "2 of 4 GPU slots are needed; 0 is held by run-a" in messages[0]


def test_two_that_want_more_than_half_each_both_get_their_turn() -> None:
    code = (
        "from specs.machine.gpu_slots import leased\nimport time\n"
        "with leased(3, 'x', waiting=lambda _: None): time.sleep(0.2)"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    deadline = time.monotonic() + 60
    assert [process.wait(deadline - time.monotonic()) for process in started] == [0] * 4


def test_more_slots_than_there_are_is_an_error_not_a_wait() -> None:
    message = "5 GPU slots are requested, but this machine has 4"
    with pytest.raises(TooFewSlotsError, match=message), leased(5, "run", waiting=lambda _: None):
        pass


def test_nothing_is_left_of_a_lease_that_was_given_back(tmp_path: Path) -> None:
    with leased(1, "run-a", waiting=None):
        (lease,) = (tmp_path / "slots").iterdir()
        assert json.loads(lease.read_text())["holder"] == "run-a"
    assert list((tmp_path / "slots").iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    process, _ = hold(2, "run-a")
    end(process)
    assert len(list((tmp_path / "slots").iterdir())) == 2
    with leased(2, "run-b", waiting=None):
        assert len(list((tmp_path / "slots").iterdir())) == 2


NOBODY = 65534
AS_NOBODY = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
"""Only once everything is imported: the interpreter itself may lie where this user cannot go."""
HOSTILE = (
    f"""
import fcntl, os, sys, time
{AS_NOBODY}"""
    + """
directory, victim = sys.argv[1:]
for name in ("rpg-slot-0@1.lock", "rpg-slot-0@2.lock", "choosing.lock", "0.lock"):
    os.symlink(victim, os.path.join(directory, name))
os.mkfifo(os.path.join(directory, "rpg-slot-0@3.lock"))
os.mkdir(os.path.join(directory, "rpg-slot-0@4.lock"))
os.close(os.open(os.path.join(directory, "rpg-slot-0@5.lock"), os.O_CREAT | os.O_WRONLY, 0o600))
lease = os.open(os.path.join(directory, "rpg-slot-1@6.lock"), os.O_CREAT | os.O_WRONLY, 0o644)
fcntl.flock(lease, fcntl.LOCK_EX)
os.write(lease, b'{"holder": "a\\u001b[2Jb", "pid": 1, "user": "root"}')
for name in os.listdir(directory):
    path = os.path.join(directory, name)
    if os.stat(path, follow_symlinks=False).st_uid != os.getuid():
        try:
            os.unlink(path)
        except PermissionError:
            continue
        print("could remove", name)
print("ready", flush=True)
time.sleep(60)
"""
)


@pytest.fixture
def open_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of leases that every user of this machine can reach, as pytest's own is not."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    with tempfile.TemporaryDirectory(prefix="slots-") as directory:
        os.chmod(directory, 0o1777)
        monkeypatch.setenv(DIRECTORY, directory)
        yield Path(directory)


def hostile(directory: Path, victim: Path) -> "subprocess.Popen[str]":
    """A process of another user that has filled the directory with what it could."""
    command = [sys.executable, "-c", HOSTILE, str(directory), str(victim)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_another_user_cannot_have_a_file_written_nor_block_a_slot_that_he_does_not_hold(
    open_directory: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "private"
    victim.write_text("untouched")
    victim.chmod(0o600)
    with victim.open() as locked, leased(1, "run-a", available=["2"], waiting=None):
        fcntl.flock(locked, fcntl.LOCK_EX)
        process = hostile(open_directory, victim)
        try:
            with leased(1, "run-b", available=["0"], waiting=None) as taken:
                assert taken == ["0"]
            with pytest.raises(TooFewSlotsError) as refused, leased(1, "run-b", available=["1", "2"], waiting=None):
                pass
        finally:
            end(process)
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("untouched", 0o600)
    message = str(refused.value)
    assert f"1 is held by a[2Jb (process 1 of {pwd.getpwuid(NOBODY).pw_name})" in message
    assert "2 is held by run-a" in message
    assert "\x1b" not in message
    with leased(1, "run-b", available=["1"], waiting=None) as freed:
        assert freed == ["1"]


def test_two_users_never_hold_one_slot(open_directory: Path) -> None:
    code = f"import specs.machine.gpu_slots\n{AS_NOBODY}os.umask(0o077){HOLD}"
    other = subprocess.Popen([sys.executable, "-c", code, "2", "run-of-nobody"], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline().split() == ["0", "1"]
        # A umask of 077 does not keep the others from asking.
        leases = [path.stat() for path in open_directory.iterdir()]
        assert [(lease.st_uid, lease.st_mode & 0o777) for lease in leases] == [(NOBODY, 0o644)] * 2
        with leased(2, "run-b", waiting=None) as taken:
            assert taken == ["2", "3"]
            with pytest.raises(TooFewSlotsError, match="0 is held by run-of-nobody"), leased(1, "c", waiting=None):
                pass
    finally:
        end(other)
    with leased(4, "run-b", waiting=None) as freed:
        assert len(freed) == 4


def test_users_with_temporary_directories_of_their_own_share_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DIRECTORY)
    code = "from specs.machine import gpu_slots; print(gpu_slots._directory())"
    places = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": tmpdir}, capture_output=True).stdout
        for tmpdir in ("/tmp", str(tmp_path))
    }
    (place,) = places
    assert os.stat(place.decode().strip()).st_uid == 0


def test_a_directory_in_which_others_can_remove_leases_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    monkeypatch.setenv(DIRECTORY, str(loose))
    with pytest.raises(TooFewSlotsError, match="must be a directory, and sticky"), leased(1, "run", waiting=None):
        pass


def test_declared_slots_stand_for_gpus_and_the_cpu_needs_none() -> None:
    assert slots_here({SLOTS: "a, b,"}) == ["a", "b"]
    assert slots_wanted("auto", 2) == 2
    assert slots_wanted("cpu", 2) == 0
    with leased(0, "run", waiting=None) as nothing:
        assert nothing == []


@pytest.mark.parametrize(
    ("codes", "meant"),
    [
        ([0, 0], 0),
        ([0, 143], 143),
        ([143, 1], 1),
        # A rank that was killed is why its peer complains.
        ([1, -9], 137),
        ([None, 2], 2),
        # The signal that asks to stop met one before it listened.
        ([-15, 143], 143),
        ([-15, -9], 137),
        ([None, None], 0),
    ],
)
def test_many_exit_codes_become_the_one_that_tells_the_cause(codes: list[int | None], meant: int) -> None:
    assert verdict(codes) == meant
