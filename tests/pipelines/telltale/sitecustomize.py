"""On PYTHONPATH, prints the secret that a stage's process has in its environment; with TELLTALE=fail the trainer also
fails with the secret in its message, once it is ready."""

import os
import sys

_SECRETS = ("CANARY_TOKEN", "RPG_DATASETS_URL")


def _fail(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and "/attempts/" in str(arguments[0]):
        raise ValueError(f"401 for {os.environ['CANARY_TOKEN']}")


if {"rpg.train", "rpg.stage"} & set(sys.orig_argv):
    for _name in _SECRETS:
        print("telltale", _name, os.environ[_name], ascii(os.environ[_name]), file=sys.stderr, flush=True)
    if os.environ.get("TELLTALE") == "fail" and "rpg.train" in sys.orig_argv:
        sys.addaudithook(_fail)
