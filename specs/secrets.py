"""Secrets: references to them in specs, detection of likely ones, and removal of their values from written text.

A spec holds `env:NAME` or `file:PATH` and never a secret itself: specs are shared, frozen and stored. The machine that
needs the value reads it. Standard library only: nodes of a cluster import this.
"""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from urllib.parse import quote

from specs.bounds import read_within
from specs.errors import RpgError

HIDDEN = "(hidden)"
"""Replacement for a secret's value."""
NAMES = "RPG_SECRETS"
"""Environment variable that names further variables whose values are secret, separated by commas."""
_LEAST_LENGTH = 8
"""Smallest number of characters of a secret. Shorter values are flags or numbers, and hiding them would hide ordinary
text."""
_REFERENCE = re.compile(r"env:(?P<variable>[A-Za-z_][A-Za-z0-9_]*)|file:(?P<file>(?!//)[/~].+)")
_PASSWORDS = r"PASSWORD|PASSWD|PASSPHRASE|(?<!BY)PASS|(?<=_)PWD|SECRET|AUTH_STRING"
_PASSWORD_NAME = re.compile(rf"({_PASSWORDS})(_|$)", re.IGNORECASE)
"""Names of variables whose value is a secret even if it has only digits. In a variable called KEY or TOKEN, digits are
a number. PWD is a directory."""
_SECRET_NAME = re.compile(rf"({_PASSWORDS}|TOKEN|CREDENTIALS?|APIKEY|(^|_)KEY|(^|_)PAT)(_|$)", re.IGNORECASE)
_NAME_OF_OTHERS = re.compile(r"_(FILE|PATH|DIR|ID|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
"""Names of variables that contain a secret's place or owner, not the secret."""
_AUTH_NAME = re.compile(r"AUTH_STRING$", re.IGNORECASE)
"""Names of variables whose value is `user:password`, as in Prefect."""
_SHAPES = (
    r"hf_[A-Za-z0-9]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"sk-[\w-]{16,}",
    r"xox[abeprs]-[\w-]{10,}|https://hooks\.slack\.com/services/\S+",
    r"AKIA[0-9A-Z]{16}",
    r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
)
"""Patterns of tokens of Hugging Face, GitHub, GitLab, OpenAI and others, Slack and AWS, of JSON web tokens, and of
private keys."""
_TOKEN = re.compile("|".join(_SHAPES))
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:(?!\d+/)(?=(?P<password>\S+)@)")
"""Pattern of a URL's password: the text after the colon, unless it is a port, up to the last @. A password may contain
@ and slashes."""


class SecretError(RpgError):
    """Error: a secret that a spec refers to is not on this machine."""


def is_reference(value: str) -> bool:
    """Returns whether the value refers to a secret: `env:NAME`, or `file:` and a path that begins with `/` or `~`."""
    return _REFERENCE.fullmatch(value) is not None


def variable_of(value: str) -> str:
    """Returns the environment variable that a reference names; empty for any other value."""
    reference = _REFERENCE.fullmatch(value)
    return (reference["variable"] or "") if reference else ""


def resolved(values: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the values, with each reference replaced by the secret that it names on this machine.

    If any value is a secret, RPG_SECRETS is added, so that processes with these variables hide their values.

    Raises:
        SecretError: a variable is not set or a file cannot be read.
    """
    secret = [name for name, value in values.items() if is_reference(value)]
    named = {NAMES: ",".join([*filter(None, [environment.get(NAMES)]), *secret])} if secret else {}
    return {name: _resolved(name, value, environment) for name, value in values.items()} | named


def _resolved(name: str, value: str, environment: Mapping[str, str]) -> str:
    reference = _REFERENCE.fullmatch(value)
    if not reference:
        return value
    if variable := reference["variable"]:
        if variable not in environment:
            raise SecretError(f"{name} is {value}, and there is no variable {variable} on this machine")
        return environment[variable]
    try:
        return read_within(str(Path(reference["file"]).expanduser())).decode("utf-8").rstrip("\n")
    except (OSError, ValueError, RuntimeError) as error:
        raise SecretError(f"{name} is {value}, which cannot be read on this machine: {error}") from error


def looks_secret(name: str, value: str) -> bool:
    """Returns whether the value of a variable is likely a secret, by the variable's name or the value's shape."""
    if is_reference(value) or len(value) < _LEAST_LENGTH:
        return False
    if value.replace(".", "", 1).isdecimal() and not _PASSWORD_NAME.search(name):
        return False
    by_name = _SECRET_NAME.search(name) and not _NAME_OF_OTHERS.search(name)
    return bool(by_name or _TOKEN.search(value) or _URL_PASSWORD.search(value))


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a record, with HIDDEN in place of likely secrets. References are kept, since they
    reveal nothing."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in values.items()}


def secrets_in(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the secrets in the variables in all spellings, the longest first.

    These are the values of variables that RPG_SECRETS names, and likely secrets. For a URL only the password counts;
    for `user:password` the whole, the password alone, and the base64 form of a request's header.
    """
    named = environment.get(NAMES, "").split(",")
    values: set[str] = set()
    for name, value in environment.items():
        if passwords := set(_passwords_of_urls(value)):
            values |= passwords
        elif name in named or looks_secret(name, value):
            values.add(value)
            if _AUTH_NAME.search(name):
                values |= {value.partition(":")[2], base64.b64encode(value.encode()).decode("ascii")}
    return _spellings(value for value in values if len(value) >= _LEAST_LENGTH)


def _passwords_of_urls(value: str) -> Iterator[str]:
    """Yields candidates for the password of each URL: the text up to each following @. One of these ends the
    password."""
    for match in _URL_PASSWORD.finditer(value):
        yield from accumulate(match["password"].split("@"), "{}@{}".format)


def _spellings(values: Iterable[str]) -> list[str]:
    """Returns each value as it is, and as spelled in JSON, in a URL, and in Python's repr."""
    ways = {
        way for value in values for way in (value, json.dumps(value)[1:-1], quote(value, safe=""), repr(value)[1:-1])
    }
    return sorted(ways, key=lambda way: (-len(way), way))


def hide(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the text without the secrets in the variables."""
    for secret in secrets_in(environment):
        text = text.replace(secret, HIDDEN)
    return text
