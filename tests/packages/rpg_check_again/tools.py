"""A tool: a plain function with types and a docstring."""


def word_count(text: str, at_least: int = 1) -> dict[str, int]:
    """Counts the words of a text.

    Args:
        text: what to count in
        at_least: letters of a word at least
    """
    if not text:
        raise ValueError("there is no text")
    return {"words": sum(len(word) >= at_least for word in text.split())}
