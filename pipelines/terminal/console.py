"""Rich's console with texts that cannot command the terminal."""

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipelines.terminal.streams import beneath, stripped


class SafeConsole(Console):
    """A console whose own styles and cursor movements reach the terminal, and of the texts what can be read."""

    def __init__(self, file: IO[str] | None = None, *, stderr: bool = False, **settings: Any) -> None:
        stream = file or beneath(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed; on a terminal texts are stripped, and a link, a command too, is none."""
        segments = super().render(renderable, options)
        return map(_without_commands, segments) if self.is_terminal else segments


def _without_commands(segment: Segment) -> Segment:
    text, style, control = segment
    if control:
        return segment
    return Segment(stripped(text), style.update_link(None) if style and style.link else style)
