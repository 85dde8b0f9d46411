"""The token map: from a tokenizer's ids to a smaller id space in which tokens that normalise alike are one.

" The", "the" and "THE" share one compressed id: an n-gram is looked up by what it says, not by how it is spelled. The
rule is DeepSeek-V4.1's, to the letter: for its 129,280-token tokenizer it gives 99,092 compressed ids.
"""

import hashlib
import json
import os

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, normalizers

from ..configuration.folder_update import TOKEN_MAP_FILE as TOKEN_MAP_FILE


TOKEN_MAP_KEY = "token_map"
VOCABULARY_KEY = "vocabulary_sha256"
COMPRESSED_VOCAB_SIZE_KEY = "engram_compressed_vocab_size"

# Stands for a token that is nothing but one space while the others are stripped.
_LONE_SPACE = "\ue000"
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def normalize_text(text: str) -> str:
    """The normal form of a token's text: without case, accents, compatibility forms and surrounding whitespace."""
    if text.isascii() and text.isprintable():
        # Most of a vocabulary, several times faster: the same steps on text whose only whitespace is spaces.
        return " ".join(text.split()).lower() or text[:1]
    return _NORMALIZER.normalize_str(text)


def token_map_size(backend_tokenizer: Tokenizer) -> int:
    """Number of entries that a map of this tokenizer has: one more than its highest id.

    That is the number of its tokens, unless ids are left out (the cl100k family has no 100256).
    """
    size = backend_tokenizer.get_vocab_size(with_added_tokens=True)
    # Asking for the whole vocabulary is slow. Ids are unique: if none below `size` is missing, none is above.
    if any(backend_tokenizer.id_to_token(i) is None for i in range(size)):
        return 1 + max(backend_tokenizer.get_vocab(with_added_tokens=True).values())
    return size


def token_classes(backend_tokenizer: Tokenizer, size: int) -> list[str]:
    """What decides whether two tokens are one: for every id below `size`, the normal form of its text.

    A token that is not text by itself (part of a character's bytes) stands for itself.
    """
    texts = backend_tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    return [
        backend_tokenizer.id_to_token(i) if "\ufffd" in text else normalize_text(text) or text
        for i, text in enumerate(texts)
    ]


def build_token_map(backend_tokenizer: Tokenizer, size: int, known: np.ndarray | None = None) -> np.ndarray:
    """Builds the map, or extends one by the tokens added since.

    Args:
        backend_tokenizer (`tokenizers.Tokenizer`): the fast tokenizer's backend.
        size (`int`): number of token ids to map.
        known (`np.ndarray`, *optional*): int32 `[known_size]`, the map of the first ids, kept as it is.

    Returns:
        `np.ndarray`: int32 `[size]`, read-only. A token gets the compressed id of the first token of its class; a new
        class gets the next free one.
    """
    known = np.empty(0, dtype=np.int32) if known is None else known
    classes = token_classes(backend_tokenizer, size)
    compressed_ids: dict[str, int] = {}
    for token_class, compressed_id in zip(classes[: len(known)], known.tolist(), strict=True):
        compressed_ids.setdefault(token_class, compressed_id)
    next_id = int(known.max()) + 1 if known.size else 0
    token_map = known.tolist()
    for token_class in classes[len(known) :]:
        compressed_id = compressed_ids.setdefault(token_class, next_id)
        next_id = max(next_id, compressed_id + 1)
        token_map.append(compressed_id)
    return _frozen(np.array(token_map, dtype=np.int32))


def check_tokenizer_size(size: int, vocab_size: int) -> None:
    """Refuses a tokenizer that leaves more than half of a model's rows without a token.

    Vocabularies are padded, at most to the next power of two; what has less tokens than that is of another model, or
    was made up: `AutoTokenizer` gives a tokenizer of one token for a folder that has none.

    Raises:
        ValueError: fewer than `vocab_size / 2` token ids.
    """
    if 2 * size < vocab_size:
        raise ValueError(
            f"The tokenizer has {size} token ids, but the model has `vocab_size` {vocab_size}: with less than half of "
            "them it is not the tokenizer of this model. Pass the one that it was trained with; for a new model, set "
            "`vocab_size` to len(tokenizer)."
        )


def token_map_sha256(token_map: np.ndarray) -> str:
    """Hex sha256 of the map's entries as little-endian int32, by which a model knows its tokenizer."""
    return hashlib.sha256(np.ascontiguousarray(token_map, dtype="<i4").tobytes()).hexdigest()


def vocabulary_sha256(backend_tokenizer: Tokenizer, size: int) -> bytes:
    """Digest of the tokens with ids below `size`, by which a map knows its tokenizer.json."""
    tokens = [backend_tokenizer.id_to_token(i) for i in range(size)]
    return hashlib.sha256(json.dumps(tokens).encode()).digest()


def save_token_map(
    path: str | os.PathLike, token_map: np.ndarray, compressed_vocab_size: int, backend: Tokenizer | None = None
) -> None:
    """Writes the map, the compressed vocabulary size that it is used with, and the digest of the vocabulary that it is
    for (that of the tokenizer `backend`), as one safetensors file."""
    # One entry only: with more, safetensors writes them in random order, and the file would differ from save to save.
    metadata = {COMPRESSED_VOCAB_SIZE_KEY: str(compressed_vocab_size)}
    tensors = {TOKEN_MAP_KEY: np.ascontiguousarray(token_map, dtype=np.int32)}
    if backend is not None:
        tensors[VOCABULARY_KEY] = np.frombuffer(vocabulary_sha256(backend, len(token_map)), np.uint8)
    save_file(tensors, path, metadata=metadata)


def load_token_map(path: str | os.PathLike, sha256: str) -> tuple[np.ndarray, int]:
    """Reads what `save_token_map` wrote.

    Args:
        path: the file.
        sha256 (`str`): the digest that the map must have.

    Returns:
        `tuple[np.ndarray, int]`: the map, int32 `[size]`, read-only, and the compressed vocabulary size.

    Raises:
        ValueError: the file cannot be read, or holds another map.
    """
    remedy = (
        "Fetch or save the folder again. If only this file is damaged, delete it: the map is then built afresh and "
        "accepted if its digest is the right one."
    )
    try:
        with safe_open(path, framework="numpy") as file:
            token_map = file.get_tensor(TOKEN_MAP_KEY)
            compressed_vocab_size = int(file.metadata()[COMPRESSED_VOCAB_SIZE_KEY])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a readable token map ({error}). {remedy}") from error
    if token_map.dtype != np.int32 or token_map.ndim != 1 or token_map_sha256(token_map) != sha256:
        raise ValueError(
            f"{path} holds another token map ({token_map.dtype}, shape {token_map.shape}, sha256 "
            f"{token_map_sha256(token_map)}) than tokenizer_config.json names (sha256 {sha256}). {remedy}"
        )
    if token_map.size == 0 or token_map.min() < 0 or token_map.max() >= compressed_vocab_size:
        raise ValueError(
            f"{path} holds compressed ids outside [0, {compressed_vocab_size}), the `engram_compressed_vocab_size` "
            f"that it names. {remedy}"
        )
    return _frozen(token_map), compressed_vocab_size


def check_vocabulary(path: str | os.PathLike, backend_tokenizer: Tokenizer, size: int) -> None:
    """Raises unless the map in `path`, of `size` ids, is for this vocabulary; files of older versions do not say."""
    with safe_open(path, framework="numpy") as file:
        digest = file.get_tensor(VOCABULARY_KEY).tobytes() if VOCABULARY_KEY in file.keys() else None
    if digest not in (None, vocabulary_sha256(backend_tokenizer, size)):
        raise ValueError(
            f"{path} is the token map of another vocabulary than tokenizer.json has, though they are as large: one of "
            "the two was replaced. Fetch or save the folder again."
        )


def _frozen(token_map: np.ndarray) -> np.ndarray:
    token_map.setflags(write=False)
    return token_map
