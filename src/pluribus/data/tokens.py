"""Texts as token ids. Words are hashed, so that parties need not agree on a vocabulary, or share one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np

from pluribus.data.dataset import last_line
from pluribus.errors import MissingDataError, PackageError
from pluribus.inputs import PADDING, UNKNOWN

WORDS = "words"
_WORD = re.compile(r"\w+|[^\w\s]")
SHARE = 0.95  # of all texts, which are not cut if the user sets no length
MOST_TOKENS = 256  # of a row, if the user sets no length


class Tokens(NamedTuple):
    """Token ids (rows, length) as int32, with padding after the last token of a row."""

    ids: np.ndarray
    vocabulary: int
    cut: int
    """Number of texts that are longer than the length."""


Encode = Callable[[Sequence[str], int | None], list[list[int]]]  # texts and the most tokens of each


def tokenize(
    texts: Sequence[str], tokenizer: str, vocabulary: int, length: int | None, refuse: Callable[[int], Exception]
) -> Tokens:
    """Turn texts into token ids. `refuse` makes the error for a row whose text has no token."""
    encode, vocabulary = (make_word_encoder(vocabulary), vocabulary) if tokenizer == WORDS else _hugging_face(tokenizer)
    rows = encode(texts, None)
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if not counts.all():
        raise refuse(int((counts == 0).argmax()))
    most = length or min(MOST_TOKENS, int(np.quantile(counts, SHARE, method="inverted_cdf")))
    late = np.flatnonzero(counts > most)
    for row, shorter in zip(late.tolist(), encode([texts[row] for row in late.tolist()], most), strict=True):
        rows[row] = shorter
    ids = np.full((len(rows), most), PADDING, np.int32)
    ids[np.arange(most) < np.minimum(counts, most)[:, None]] = np.concatenate(rows)
    return Tokens(ids, vocabulary, len(late))


# Words ----------------------------------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Words of letters and digits in lower case, and every other symbol by itself.

    >>> split_words("It's 5 o'clock.")
    ['it', "'", 's', '5', 'o', "'", 'clock', '.']
    """
    return _WORD.findall(normalize("NFC", text).lower())


def hash_word(word: str, vocabulary: int) -> int:
    """The id of a word, the same on every machine: a number from 2 to vocabulary - 1."""
    first = UNKNOWN + 1
    digest = blake2b(word.encode(), digest_size=8).digest()
    return first + int.from_bytes(digest, "big") % (vocabulary - first)


def make_word_encoder(vocabulary: int) -> Encode:
    """Encode words by their hash."""
    known = cache(lambda word: hash_word(word, vocabulary))
    return lambda texts, most: [[known(word) for word in split_words(text)[:most]] for text in texts]


# Hugging Face ---------------------------------------------------------------------------------------------------------


def _hugging_face(name: str) -> tuple[Encode, int]:
    """A tokenizer by its name or folder, and the size of its vocabulary.

    Its ids stay, except that the ids 0 and of its padding are exchanged: 0 is padding here. If it has no padding, all
    ids are shifted by one.
    """
    try:
        import transformers
    except ImportError as missing:
        raise PackageError(
            f"--tokenizer {name} needs a package that is missing: pip install 'pluribus[hf]', or use --tokenizer words."
        ) from missing
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of the network, of files, or of the tokenizer's own code
        raise MissingDataError(
            f"the tokenizer {name} is neither a folder nor could it be downloaded ({last_line(error)}): use a folder "
            "with its files, or --tokenizer words."
        ) from error
    padding = found.pad_token_id
    shift = np.arange(len(found)) + (padding is None)
    if padding is not None:
        shift[[PADDING, padding]] = padding, PADDING

    def encode(texts: Sequence[str], most: int | None) -> list[list[int]]:
        if not texts:
            return []
        limits: dict[str, Any] = {} if most is None else {"truncation": True, "max_length": most}
        encoded = found([*texts], return_special_tokens_mask=True, return_attention_mask=False, verbose=False, **limits)
        rows = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        return [[] if all(added) else [one for one in shift[ids].tolist() if one != PADDING] for ids, added in rows]

    return encode, len(shift) + (padding is None)
