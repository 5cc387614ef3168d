"""The passwords of a home's services: created at first use, in files that only this user can read.

The pages and the Prefect API accept two: one to submit and one that only reads. A third is the home's own: its
processes send it to each other, so that the people's two can be changed while runs train.
"""

import base64
import contextlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from pipelines.home.home import Home
from specs.machine.files import aside_of, replacing

AUTH_VARIABLE = "PREFECT_API_AUTH_STRING"
"""The environment variable from which a client of a Prefect server takes the auth string, `user:password`."""
SERVER_AUTH_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
"""The environment variable with the auth string that Prefect's server and our pages require."""
READER_VARIABLE = "RPG_READER_AUTH_STRING"
"""The environment variable with the read-only auth string. The pages accept it; the Prefect API accepts it only for
requests for the record's address."""
PASSWORDS_VARIABLE = "RPG_WEB_PASSWORDS"
"""Environment variable. With the value `home`, a page requires a password of its home. `rpg up` sets it for its
pages."""
_USERS = {"auth": "rpg", "reader": "reader", "own": "home"}
"""The user name in each auth string of a home, by the name of the string's file."""
Accepts = Callable[[str], bool]
"""Function that returns whether a `user:password` is accepted."""


def password(home: Home, name: str) -> str:
    """Returns the password of that name, which is random and has no characters that a URL would quote. Creates it if it
    is missing.

    A password that people or processes send by HTTP has the form `user:password`.
    """
    path = _file(home, name)
    for directory in (home.services, path.parent):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written to a temporary file and linked, so that two concurrent commands both read one whole file.
    if not path.exists():
        aside = aside_of(path)
        _write_new(aside, name)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
    return path.read_text(encoding="ascii").strip()


def auth_string(home: Home) -> str:
    """Returns the user and password for the dashboard's login page: services/secrets/auth."""
    return password(home, "auth")


def own_string(home: Home) -> str:
    """Returns the internal password with which the home's processes call each other."""
    return password(home, "own")


def make_passwords(home: Home) -> None:
    """Creates the passwords of this home's servers that are missing."""
    for name in _USERS:
        password(home, name)


def renew(home: Home, *, own: bool) -> None:
    """Replaces the passwords for people: the one to submit and the one to read. The old ones are no longer accepted.

    Args:
        own: replaces the password of the home's processes too. None of them may be up.
    """
    make_passwords(home)
    for name in _USERS if own else ("auth", "reader"):
        with replacing(_file(home, name)) as aside:
            _write_new(aside, name)


def login_files(home: Home) -> dict[str, Path]:
    """Returns the files with the logins for people, by purpose."""
    return {"password": _file(home, "auth"), "reader": _file(home, "reader")}


class Passwords:
    """Some of a home's passwords, read from their files. A changed file takes effect at the next request.

    A missing file accepts nothing.
    """

    def __init__(self, home: Home, *names: str) -> None:
        self._paths = [_file(home, name) for name in names]
        self._read: dict[Path, tuple[tuple[int, int], bytes]] = {}
        """Identity (inode and time) and content of each file that was read."""

    def __call__(self, shown: str) -> bool:
        """Returns whether `shown` is one of the passwords."""
        given = shown.encode()
        return any(hmac.compare_digest(given, expected) for path in self._paths if (expected := self._current(path)))

    def _current(self, path: Path) -> bytes:
        try:
            status = path.stat()
            version = status.st_ino, status.st_mtime_ns
            if path not in self._read or self._read[path][0] != version:
                self._read[path] = version, path.read_bytes().strip()
        except FileNotFoundError:
            return b""
        return self._read[path][1]


def asked_for(home: Home) -> Accepts | None:
    """Returns the passwords that the environment requires for a page of the record or of studies; None if it requires
    none."""
    if os.environ.get(PASSWORDS_VARIABLE) == "home":
        return of_home(home)
    return named_by(SERVER_AUTH_VARIABLE, READER_VARIABLE)


def of_home(home: Home) -> Accepts:
    """Returns the passwords of a home that a read-only page accepts: all of them."""
    return Passwords(home, *_USERS)


def named_by(*variables: str) -> Accepts | None:
    """Returns the passwords in environment variables; None if no variable has one."""
    given = [os.environ[name].encode() for name in variables if os.environ.get(name)]
    if not given:
        return None
    return lambda shown: any(hmac.compare_digest(shown.encode(), expected) for expected in given)


def shown_in(authorization: str) -> str:
    """Returns the `user:password` of an Authorization header (HTTP basic authentication); empty if it has none."""
    scheme, _, encoded = authorization.strip().partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode()
    except ValueError:
        return ""


def header_with(auth_string: str) -> str:
    """Returns the Authorization header for `user:password`."""
    return "Basic " + base64.b64encode(auth_string.encode()).decode()


def _file(home: Home, name: str) -> Path:
    return home.services / "secrets" / name


def _write_new(path: Path, name: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        user = _USERS.get(name, "")
        file.write(f"{user}:" * bool(user) + secrets.token_urlsafe(24))
