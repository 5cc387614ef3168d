"""Interpretation of the command line's words: settings without `--set`, and verbs by the names that other tools use."""

import os
import re
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

ALSO = {"ls": "runs", "list": "runs", "status": "runs"}
"""Alias -> verb that it runs."""
_MEANT = {
    **dict.fromkeys(("train", "start", "launch", "exec"), "run"),
    **dict.fromkeys(("stop", "kill", "abort"), "cancel"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("sweep", "tune", "optimize"), "study run"),
    **dict.fromkeys(("eval", "test"), "evaluate"),
    **dict.fromkeys(("dashboard", "ui", "serve"), "up"),
    **dict.fromkeys(("check", "lint"), "validate"),
    **dict.fromkeys(("dry-run", "preview"), "plan"),
    **dict.fromkeys(("tail", "log"), "logs"),
}
"""Verb of other tools that does not exist here -> our verb for the same purpose."""
_SETTING = re.compile(r"[A-Za-z_][\w.\[\]-]*\s*=(?!.*\.ya?ml$)")
"""Pattern of `PATH=VALUE`. A word with a spec's suffix is a file instead."""


class Verbs(TyperGroup):
    """A group of verbs that takes `PATH=VALUE` as `--set PATH=VALUE`, `help`, `version` and the names in ALSO."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the options before the verb; `help` and `version` are options too."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"] and any("--version" in option.opts for option in self.params):
            args = ["--version"]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the verb of this name or alias; None if there is no such verb."""
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, ALSO.get(cmd_name, ""))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the verb's name, the verb and its words. Raises UsageError with the verb that was probably meant."""
        meant = _MEANT.get(args[0], "")
        if self.get_command(ctx, args[0]) is None and self.get_command(ctx, meant.partition(" ")[0]):
            ctx.fail(f"No such command {args[0]!r}. Did you mean '{ctx.command_path} {meant}'?")
        name, verb, rest = super().resolve_command(ctx, args)
        return name, verb, list(_with_set(verb, rest))


def _with_set(verb: Any, words: list[str]) -> Iterator[str]:
    """Yields the words, with `--set` inserted before each bare setting if the verb has that option."""
    with_value = {
        name
        for option in verb.params
        if not getattr(option, "is_flag", True)
        for name in (*option.opts, *option.secondary_opts)
    }
    previous = ""
    for word in words:
        is_value = previous in with_value
        if "--set" in with_value and not is_value and _SETTING.match(word) and not os.path.exists(word):
            yield "--set"
        yield word
        previous = "" if is_value else word
