"""The passwords of a home's services: made when one is first asked for, kept where only this user can read them."""

import contextlib
import os
import secrets

from pipelines.home import Home
from rpg.files import aside_of

AUTH_VARIABLE = "PREFECT_API_AUTH_STRING"
"""The environment variable from which a client of a Prefect server takes the auth string, `user:password`."""


def password(home: Home, name: str, user: str = "") -> str:
    """The password of that name, random and without characters that a URL would quote; made where there is none.

    Args:
        user: where the file is to hold `user:password`.
    """
    path = home.services / "secrets" / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written aside and linked, so that of two commands that make it at once both read the whole file of one.
    aside = aside_of(path)
    if not path.exists():
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{user}:" * bool(user) + secrets.token_urlsafe(24))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
    return path.read_text(encoding="ascii").strip()


def auth_string(home: Home) -> str:
    """What a user types into the login page of this home's server profile: services/secrets/auth."""
    return password(home, "auth", user="rpg")
