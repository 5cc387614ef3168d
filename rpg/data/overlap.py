"""Finds training problems that contain a question of an evaluation set, regardless of wrapping and typesetting.

Texts are compared word for word in a normal form: without case, without LaTeX's spacing and markup, without
punctuation. Text with which all questions of a set begin or end is an instruction, not part of the question: the files
of DAPO-Math, AIME and AMC put each question between the same sentences. A question that is reworded, or has other
numbers, counts as different.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import takewhile

Words = tuple[str, ...]

LEAST_WORDS = 8
"""Smallest number of words of a question to search for. A shorter one may occur in another question by chance."""
_LEAST_QUESTIONS = 10
"""Smallest number of questions of a set in which to look for an instruction. Fewer may begin or end alike by chance."""
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\[,!])(?=\d{3}\b)")
_SPELLINGS = (
    (re.compile(r"\\[dt]frac(?![a-z])"), r"\\frac "),
    (re.compile(r"\\([lgn]e)q(?![a-z])"), r"\\\1 "),
    (re.compile("\N{MINUS SIGN}"), "-"),
)
_DROPPED = re.compile(
    r"\[asy\].*?\[/asy\]"  # the source code of a picture
    r"|\\(?:begin|end)\{[^}]*\}"
    r"|\\(?:left|right|displaystyle|textstyle|limits|q?quad|boxed|emph|mbox|operatorname|text(?:bf|it|rm)?"
    r"|math(?:rm|bf|it|bb|cal))(?![a-z])"
    r"|\\[,;:!>$]"
    r"|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})",  # two-digit, two digit
    re.DOTALL,
)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+|\d+(?:\.\d+)?|(?<=[\d)])!|[-+*/=<>|%]")
"""Pattern of a word, a number, a factorial, an operator, or a character of a script without spaces."""


def words_of(text: str) -> Words:
    r"""Returns the words, numbers and operators of a text in normal form.

    Example:
        >>> words_of(r"The two-digit $\left(x^{2}\right)$ of 1,000, if Any.")
        ('the', 'two', 'digit', 'x', '2', 'of', '1000', 'if', 'any')
    """
    plain = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())
    for pattern, spelling in _SPELLINGS:
        plain = pattern.sub(spelling, plain)
    return tuple(_WORD.findall(_DROPPED.sub(" ", plain)))


def without_instruction(texts: Sequence[Words]) -> list[Words]:
    """Returns the texts of a set without their common beginning and end; unchanged if they are few or all equal."""
    first, last = min(texts, default=()), max(texts, default=())
    if len(texts) < _LEAST_QUESTIONS or first == last:
        return list(texts)
    begin = _shared_beginning(first, last)
    ends = [text[begin:][::-1] for text in texts]
    end = _shared_beginning(min(ends), max(ends))
    return [text[begin : len(text) - end] for text in texts]


def _shared_beginning(one: Words, other: Words) -> int:
    """Returns the number of words with which both texts begin. If they are the first and last of a sorted list, all
    texts between them begin with these words too."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Questions:
    """An index of the evaluation sets' questions for searching other texts: by their first words, then word for
    word."""

    def __init__(self, questions: Sequence[Words]) -> None:
        """Indexes the questions. Questions with fewer than LEAST_WORDS words are never found."""
        self._questions = questions
        self._by_beginning: dict[Words, list[int]] = {}
        for index, question in enumerate(questions):
            if len(question) >= LEAST_WORDS:
                self._by_beginning.setdefault(question[:LEAST_WORDS], []).append(index)
        self._first_words = {beginning[0] for beginning in self._by_beginning}

    def held_by(self, text: Words) -> int | None:
        """Returns the index of the first question that a text contains word for word; None if it contains none."""
        for at in range(len(text) - LEAST_WORDS + 1):
            if text[at] in self._first_words:
                for index in self._by_beginning.get(text[at : at + LEAST_WORDS], ()):
                    question = self._questions[index]
                    if text[at : at + len(question)] == question:
                        return index
        return None
