"""Builds tokenizers from scratch: one token per byte, or byte-level BPE trained on a text."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specs.schema.model import ByteTokenizer, TrainedTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
PAD = "<|pad|>"


def make_tokenizer(spec: ByteTokenizer | TrainedTokenizer, texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Returns a tokenizer that decodes to exactly the encoded text and adds no special token by default.

    Args:
        spec: the kind of tokenizer.
        texts: training texts; a byte tokenizer ignores them.
    """
    from transformers import PreTrainedTokenizerFast

    model = _bytes() if isinstance(spec, ByteTokenizer) else _trained(spec.vocab_size, texts)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _bytes() -> "Model":
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import ByteLevel

    # Without merges BPE keeps the bytes as they are; ids 0 to 255 follow the byte alphabet's order.
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    return _byte_level(Tokenizer(models.BPE(vocab=vocabulary, merges=[])), split_words=False)


def _trained(vocab_size: int, texts: Iterable[str]) -> "Model":
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel

    model = _byte_level(Tokenizer(models.BPE()), split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def _byte_level(model: "Model", *, split_words: bool) -> "Model":
    from tokenizers import decoders, pre_tokenizers

    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([END, PAD])
    return model
