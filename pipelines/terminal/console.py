"""A Rich console whose texts cannot command the terminal."""

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipelines.terminal.streams import beneath, stripped


class SafeConsole(Console):
    """A console that sends its own styles and cursor movements to the terminal, but only the printable characters of
    texts."""

    def __init__(self, file: IO[str] | None = None, *, stderr: bool = False, **settings: Any) -> None:
        stream = file or beneath(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of the output. On a terminal, texts are stripped, and links, which are also commands, are
        removed."""
        segments = super().render(renderable, options)
        return map(_without_commands, segments) if self.is_terminal else segments


def _without_commands(segment: Segment) -> Segment:
    text, style, control = segment
    if control:
        return segment
    return Segment(stripped(text), style.update_link(None) if style and style.link else style)
