"""Detection of stop texts in a response, with vLLM's rule and decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from rpg.pretrained import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopTextWatch:
    """Detector of stop texts in one response. It reads the response token by token. Special tokens are not text."""

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str], prompt_ids: Sequence[int]) -> None:
        """Starts at the end of the prompt.

        Args:
            tokenizer: the policy's tokenizer.
            stop: the texts, none empty.
            prompt_ids: the tokens before the response, which decide whether its first word begins with a space.
        """
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
        self._kept = max(map(len, stop)) - 1
        self._tail = ""
        """The last characters so far, which may contain the beginning of a stop text."""

    def completes(self, token_id: int) -> bool:
        """Returns whether a stop text is complete with this token. The stop text may begin in earlier tokens, and end
        before this token's end."""
        text = self._tail + (self._decode(token_id) or "")
        self._tail = text[-self._kept :] if self._kept else ""
        return any(stop in text for stop in self._stop)

    def _decode(self, token_id: int) -> str | None:
        """Returns the characters that this token completes; None while bytes of a character are missing."""
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            # The bytes so far are not UTF-8. The stream cannot skip them, so a new one decodes from this token on.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id)


def tokenizer_in(weights_dir: Path | None) -> PreTrainedTokenizerFast:
    """Returns the policy's tokenizer.

    Raises:
        ValueError: the directory has no tokenizer, or one that is not of the tokenizers library, which decodes token by
            token.
    """
    if weights_dir is None or not (weights_dir / "tokenizer_config.json").exists():
        raise ValueError(f"stop texts need the policy's tokenizer; there is none in {weights_dir}")
    tokenizer = tokenizer_of(weights_dir)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"stop texts need a tokenizer of the tokenizers library, not {type(tokenizer).__name__}")
    return tokenizer
