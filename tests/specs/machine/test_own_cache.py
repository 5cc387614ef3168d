"""The user's own cache directory on a machine with another user. The other user comes first, or finds it open."""

import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from as_users import Shared, acting_as, shared_machine

from specs.machine import own_cache
from specs.machine.own_cache import UnsafeDirectoryError, directory, library_variables, local_directory, place

UMASKS = [0o022, 0o002, 0o000]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """Two users, of whom the first has a home directory and no cache yet."""
    own_cache.versions_of("torch")  # imports modules that the users of the tests may be unable to read
    with shared_machine() as machine:
        monkeypatch.setenv("HOME", str(machine.home))
        monkeypatch.setattr("tempfile.tempdir", str(machine.tmp))
        for name in ("XDG_CACHE_HOME", *own_cache._OF_LIBRARIES):
            monkeypatch.delenv(name, raising=False)
        for remembered in (own_cache._library_variables, own_cache._temporary, own_cache._warn):
            remembered.cache_clear()
        yield machine


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def owned(path: Path, user: str, mode: int = 0o755, *, file: bool = False) -> Path:
    """A directory, or file, of a user's."""
    if file:
        path.write_text("{}")
    else:
        path.mkdir()
    path.chmod(mode)
    shutil.chown(path, user, user)
    return path


@pytest.mark.parametrize("umask", UMASKS)
def test_it_is_made_for_its_user_alone_whatever_the_umask(machine: Shared, umask: int) -> None:
    with acting_as(machine.user, umask):
        assert directory() == machine.home / ".cache" / "rpg"
        made = place("planning", "looks", "1.json")
        made.parent.mkdir(parents=True)
        made.write_text("{}")
        assert place("planning", "looks", "1.json") == made, "its own files are accepted"
    assert mode_of(machine.home / ".cache") == mode_of(machine.home / ".cache" / "rpg") == 0o700


Plant = Callable[[Shared], Path]
"""Makes what another user would, and returns the path that a message has to name."""


def made_first(machine: Shared) -> Path:
    owned(machine.home / ".cache", machine.user, 0o1777)
    return owned(machine.home / ".cache" / "rpg", machine.other)


def left_open(machine: Shared) -> Path:
    owned(machine.home / ".cache", machine.user)
    return owned(machine.home / ".cache" / "rpg", machine.user, 0o777)


def open_to_a_group(machine: Shared) -> Path:
    owned(machine.home / ".cache", machine.user)
    path = owned(machine.home / ".cache" / "rpg", machine.user, 0o770)
    shutil.chown(path, group="users")
    return path


def open_parent(machine: Shared) -> Path:
    """Another user could rename the cache and put an own one in its place."""
    path = owned(machine.home / ".cache", machine.user, 0o777)
    owned(path / "rpg", machine.user, 0o700)
    return path


def parent_of_another(machine: Shared) -> Path:
    return owned(machine.home / ".cache", machine.other, 0o777)


def a_link(machine: Shared) -> Path:
    """It leads to a directory of the user's own that is no cache."""
    owned(machine.home / ".cache", machine.user, 0o1777)
    link = machine.home / ".cache" / "rpg"
    link.symlink_to(owned(machine.home / "thesis", machine.user, 0o755))
    os.chown(link, pwd.getpwnam(machine.other).pw_uid, 0, follow_symlinks=False)
    return link


def a_link_behind_a_link(machine: Shared) -> Path:
    """The user's own link leads to a name in a shared scratch directory, which was taken."""
    (machine.home / ".cache").symlink_to(machine.tmp / "scratch-of-user")
    link = machine.tmp / "scratch-of-user"
    link.symlink_to(owned(machine.home / "thesis", machine.user, 0o755))
    os.chown(link, pwd.getpwnam(machine.other).pw_uid, 0, follow_symlinks=False)
    return link


def planted_in_an_older_one(machine: Shared) -> Path:
    """An earlier version made the directory readable, and one in it that all could write."""
    owned(machine.home / ".cache", machine.user)
    owned(machine.home / ".cache" / "rpg", machine.user)
    owned(machine.home / ".cache" / "rpg" / "planning", machine.user, 0o777)
    return machine.home / ".cache" / "rpg" / "planning"


PLANTS = [
    *(made_first, left_open, open_to_a_group, open_parent, parent_of_another),
    *(a_link, a_link_behind_a_link, planted_in_an_older_one),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_it_is_refused_where_another_user_controls_it(machine: Shared, plant: Plant) -> None:
    named = plant(machine)
    with acting_as(machine.user), pytest.raises(UnsafeDirectoryError) as refused:
        directory()
    said = str(refused.value)
    status = named.lstat()
    found = f"owner {pwd.getpwuid(status.st_uid).pw_name}, mode {stat.S_IMODE(status.st_mode):04o}"
    assert said.startswith(f"{named} is not safe to use: ")
    assert found in said
    assert "hint: remove it, or check" in said
    assert not list((machine.home / "thesis").rglob("*"))


@pytest.mark.parametrize("planted", ["planning", "planning/looks", "planning/looks/1.json"])
def test_what_another_user_has_put_there_is_not_read(machine: Shared, planted: str) -> None:
    with acting_as(machine.user):
        directory()
    owned(machine.home / ".cache" / "rpg" / planted.partition("/")[0], machine.user, 0o755)
    (machine.home / ".cache" / "rpg" / planted).parent.mkdir(exist_ok=True, parents=True)
    path = machine.home / ".cache" / "rpg" / planted
    if not path.exists():
        owned(path, machine.other, file=path.suffix == ".json")
    shutil.chown(path, machine.other)
    with acting_as(machine.user), pytest.raises(UnsafeDirectoryError, match="another user owns it") as refused:
        place("planning", "looks", "1.json")
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(("mode", "group"), [(0o666, ""), (0o660, "users"), (0o602, "")])
def test_a_file_that_others_can_write_by_a_link_elsewhere_is_not_read(machine: Shared, mode: int, group: str) -> None:
    with acting_as(machine.user):
        parent = place("planning", "looks")
        parent.mkdir(parents=True)
    path = owned(parent / "1.json", machine.user, mode, file=True)
    if group:
        shutil.chown(path, group=group)
    with acting_as(machine.user):
        assert place("planning", "looks", "1.json") == path, "nobody else gets to it"
    link = machine.tmp / "link.json"
    link.hardlink_to(path)
    if mode & stat.S_IWOTH:
        with acting_as(machine.other):
            link.write_text("planted")
    with acting_as(machine.user), pytest.raises(UnsafeDirectoryError, match="another hard link") as refused:
        place("planning", "looks", "1.json")
    assert str(path) in str(refused.value)
    path.chmod(0o600)
    with acting_as(machine.user):
        assert place("planning", "looks", "1.json") == path


def test_code_that_others_can_write_by_a_link_elsewhere_is_not_run(
    machine: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    with acting_as(machine.user):
        own = local_directory("compiled")
        own.mkdir()
    (machine.tmp / "link.so").hardlink_to(owned(own / "cabc.so", machine.user, 0o666, file=True))
    with acting_as(machine.user):
        assert not Path(library_variables()["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(own)
    assert f"{own}/cabc.so is not safe to use" in capsys.readouterr().err


def test_its_users_own_group_and_a_sticky_parent_are_no_danger(
    machine: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned(machine.home / ".cache", machine.user, 0o775)  # as a umask of 002 makes it
    with acting_as(machine.user):
        assert mode_of(directory()) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.tmp))
    with acting_as(machine.user):
        assert directory() == machine.tmp / "rpg"


def test_one_that_was_only_readable_is_closed(machine: Shared) -> None:
    owned(machine.home / ".cache", machine.user)
    owned(machine.home / ".cache" / "rpg", machine.user)
    owned(machine.home / ".cache" / "rpg" / "mirrors", machine.user)
    with acting_as(machine.user):
        assert mode_of(directory()) == 0o700


def test_a_user_without_a_home_directory_is_told_so(machine: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "relative")
    with acting_as(machine.user), pytest.raises(PermissionError, match="set XDG_CACHE_HOME"):
        directory()


def test_libraries_compile_into_it(machine: Shared) -> None:
    with acting_as(machine.user):
        variables = library_variables()
    names = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCH_EXTENSIONS_DIR"}
    own = machine.home / ".cache" / "rpg" / "compiled"
    assert all(Path(variables.pop(name)).is_relative_to(own) for name in names)
    assert {*variables.values()} == {"0"}, "torch keeps these caches elsewhere"


def test_a_value_of_the_users_stays_where_it_is_safe(machine: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = owned(machine.tmp / "scratch", machine.user)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(scratch / "new"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/vllm")
    with acting_as(machine.user):
        variables = library_variables()
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(scratch)
    assert variables["TRITON_CACHE_DIR"] == str(scratch / "new")
    assert variables["VLLM_CACHE_ROOT"] == "~/vllm"
    assert mode_of(scratch / "new") == 0o700, "no other user may make it first"


def of_another(machine: Shared) -> Path:
    return owned(machine.tmp / "torchinductor_daemon", machine.other)


def open_to_all(machine: Shared) -> Path:
    return owned(machine.tmp / "scratch", machine.user, 0o777)


def with_code_of_another(machine: Shared) -> Path:
    path = owned(machine.tmp / "scratch", machine.user)
    owned(owned(path / "ab", machine.user) / "cabc.so", machine.other, file=True)
    return path


def with_code_open_to_all(machine: Shared) -> Path:
    path = owned(machine.tmp / "scratch", machine.user)
    owned(owned(path / "ab", machine.user) / "cabc.so", machine.user, 0o666, file=True)
    return path


@pytest.mark.parametrize(
    "plant", [of_another, open_to_all, with_code_of_another, with_code_open_to_all], ids=lambda plant: plant.__name__
)
def test_a_value_that_another_user_controls_is_replaced_with_a_warning(
    machine: Shared, plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(plant(machine)))
    with acting_as(machine.user):
        variables = library_variables()
        assert library_variables() == variables
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(machine.home / ".cache" / "rpg" / "compiled" / "inductor")
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: TORCHINDUCTOR_CACHE_DIR: {machine.tmp}/")


@pytest.mark.parametrize("plant", [made_first, left_open, open_parent], ids=lambda plant: plant.__name__)
def test_code_is_compiled_in_a_new_directory_where_the_cache_is_refused(
    machine: Shared, plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(machine)
    owned(machine.tmp / "rpg-1", machine.other, 0o777)
    with acting_as(machine.user, 0):
        chosen = Path(library_variables()["TORCHINDUCTOR_CACHE_DIR"])
        assert own_cache.place_to_save_time("planning", "looks") is None
        assert own_cache.place_to_save_time("planning", "looks") is None
    (warning,) = capsys.readouterr().err.splitlines()
    assert "is not safe to use" in warning
    top = chosen.parents[1]
    assert top.parent == machine.tmp
    assert (mode_of(top), top.owner()) == (0o700, machine.user)


def test_code_is_compiled_on_a_disk_of_the_machine(
    machine: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = pwd.getpwnam(machine.user).pw_uid
    monkeypatch.setattr(own_cache, "_is_shared_by_machines", lambda path: path.is_relative_to(machine.home))
    with acting_as(machine.user):
        assert local_directory("compiled") == machine.tmp / f"rpg-{user}" / "compiled"
        # A launcher passes the head's choice on, which means nothing on another machine.
        monkeypatch.setenv("TRITON_CACHE_DIR", str(directory() / "compiled" / "triton"))
        assert library_variables()["TRITON_CACHE_DIR"] == str(machine.tmp / f"rpg-{user}" / "compiled" / "triton")
    shutil.rmtree(machine.tmp / f"rpg-{user}")
    owned(machine.tmp / f"rpg-{user}", machine.other, 0o777)
    with acting_as(machine.user):
        assert local_directory("compiled").parents[0].owner() == machine.user
    assert f"{machine.tmp}/rpg-{user} is not safe to use" in capsys.readouterr().err


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
35 22 0:31 / /home rw,relatime shared:8 - nfs4 filer:/home rw,vers=4.2
36 35 8:2 / /home/local rw - xfs /dev/sdb1 rw
37 22 0:33 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
38 22 0:34 / /data rw - ext4 /dev/sdc1 rw
39 38 0:35 / /data rw - fuse.sshfs host:/data rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/me/.cache/rpg", True),
        ("/home/local/me/.cache/rpg", False),
        ("/homes/me/.cache/rpg", False),
        ("/scratch/me", True),
        ("/data/me", True),
        ("/tmp", False),
    ],
)
def test_file_systems_of_several_machines_are_known_by_their_kind(path: str, shared: bool) -> None:
    assert own_cache._is_shared_by_machines(Path(path), MOUNTS) == shared
