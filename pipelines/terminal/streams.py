"""Standard streams that drop the commands that a terminal would obey.

Run names, logs and responses come from elsewhere: terminal commands in them may write the clipboard, or overwrite
earlier output. Output to a pipe or a file is unchanged.
"""

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OBEYED = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
"""Characters that command a terminal (all control characters except tab and line feed) or change the direction of
text."""
_STYLES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Pattern of escape sequences for colours and movements. Without it, their letters would remain."""


def stripped(text: str) -> str:
    """Returns the text without the commands that a terminal would obey.

    >>> stripped("\\x1b[31ma\\x1b]52;c;cm0=\\x07\\r\\nb\\rc")
    'a]52;c;cm0=\\nbc'
    """
    return _STYLES.sub("", text.replace("\r\n", "\n")).translate(_OBEYED)


class _Bytes(io.RawIOBase):
    """A stream of bytes to a terminal, which strips them. A character's bytes may arrive in two parts."""

    def __init__(self, beneath: BinaryIO, encoding: str) -> None:
        self._beneath = beneath
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)("ignore")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._beneath.isatty()

    def fileno(self) -> int:
        return self._beneath.fileno()

    def write(self, data: "Buffer", /) -> int:
        given = bytes(data)
        self._beneath.write(stripped(self._decoder.decode(given)).encode(self._encoding, "replace"))
        self._beneath.flush()
        return len(given)


class _Shown(io.TextIOWrapper):
    """A replacement of `sys.stdout` or `sys.stderr` for a terminal."""

    def __init__(self, beneath: TextIO) -> None:
        bytes_out = cast("BinaryIO", _Bytes(beneath.buffer, beneath.encoding))
        super().__init__(bytes_out, beneath.encoding, beneath.errors, line_buffering=True)
        self.rich_proxied_file = beneath
        """The stream that Rich's consoles write to: their output has styles, and `SafeConsole` strips the texts."""


def beneath(stream: TextIO) -> TextIO:
    """Returns the terminal's own stream, for text that has been stripped and styled. Rich's live display adds one more
    layer."""
    while proxied := getattr(stream, "rich_proxied_file", None):
        stream = proxied
    return stream


def open_streams() -> None:
    """Gives this process standard streams that accept everything that it prints.

    /dev/null replaces a stream that the shell has closed (`>&-`): the next file would get its number. A terminal with
    few characters shows others as escapes; output to a file or a pipe is UTF-8 in every locale.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


@contextlib.contextmanager
def shown_safely() -> Iterator[None]:
    """Strips this process's output to a terminal inside the block."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    shown = {name: _Shown(stream) for name, stream in before.items() if stream is not None and stream.isatty()}
    for name, stream in shown.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in shown.items():
            setattr(sys, name, before[name])
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the stream was closed
                stream.detach()
