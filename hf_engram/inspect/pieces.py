"""The text of single tokens."""

from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers


@lru_cache(maxsize=1)
def byte_of_letter() -> dict[str, int]:
    """Which byte each letter of a byte-level vocabulary stands for, as the tokenizers library writes them."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # All that lead or continue a character: those of one and two bytes, then one of each longer lead.
    characters = [*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x10000, 0x400)]
    characters += range(0x10000, 0x110000, 0x10000)
    return {
        letter: byte
        for character in map(chr, characters)
        for letter, byte in zip(level.pre_tokenize_str(character)[0][0], character.encode(), strict=True)
    }


def token_pieces(tokenizer: Any, token_ids: np.ndarray) -> list[str]:
    """The text of each token.

    Args:
        tokenizer: a fast one.
        token_ids: int `[L]`.

    Returns:
        `[L]`. Bytes that are only a part of a character are written `\\xf0`; where the vocabulary does not say which
        they are, the token stands as it does in the vocabulary.
    """
    decoder = tokenizer.backend_tokenizer
    pieces = {}
    for token_id in np.unique(token_ids).tolist():
        piece = decoder.decode([token_id], skip_special_tokens=False)
        # Some decoders drop the space that a first word begins with.
        token = decoder.id_to_token(token_id)
        if "\ufffd" in piece:
            piece = _bytes_of(token, piece) or token
        elif token.startswith("\u2581") and not piece.startswith(" "):
            piece = f" {piece}"
        pieces[token_id] = piece
    return [pieces[token_id] for token_id in token_ids.tolist()]


def _bytes_of(token: str, decoded: str) -> str | None:
    """The bytes of a byte-level token that is no whole character; None if the token is not byte-level."""
    letters = byte_of_letter()
    if not all(letter in letters for letter in token):
        return None
    data = bytes(letters[letter] for letter in token)
    return data.decode(errors="backslashreplace") if data.decode(errors="replace") == decoded else None
