"""N-gram hashing: where the window that ends at a token is found in the tables.

Three pure pieces, used alike by the tokenizer (numpy) and by the model (torch, any device):

- the *layout*: which range of rows belongs to which layer, n-gram size and head (`build_layout`);
- the *multipliers* of each layer (`build_multipliers`);
- the *hash* itself (`encode_stream`, then `hash_stream`).

Formulas: DeepSeek-V4.1's Engram. A window is the last N compressed ids; it is mixed by
`r = w0*m0 ^ w1*m1 ^ ... ` (int64 products that never overflow, because `m < 2**63 / compressed_vocab_size`), and each
head of each n-gram size takes `r % prime` as its row inside its own bucket range.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch


Array = TypeVar("Array", np.ndarray, torch.Tensor)

# In an encoded stream, a position nobody may look at or past: padding, a masked token, before the sequence.
DEAD = -1
# V4.1 seeds each layer's multipliers with this prime times the layer's index.
MULTIPLIER_SEED = 10007
# Of all layers together; their primes are found in seconds.
MAX_COLUMNS = 2**14


@dataclass(frozen=True)
class NgramLayout:
    """The bucket ranges of every Engram layer.

    Attributes:
        primes (`np.ndarray`): int64 `[n_layers, max_ngram_size - 1, n_heads]`, the bucket count of each n-gram size
            and head.
        offsets (`np.ndarray`): int64, same shape, the first row of each bucket range inside its layer's table.
        num_embeddings (`tuple[int, ...]`): rows of each layer's table (the sum of its primes).
    """

    primes: np.ndarray
    offsets: np.ndarray
    num_embeddings: tuple[int, ...]


def is_prime(number: int) -> bool:
    """Miller-Rabin with the first twelve primes as bases, which is exact below 3.3e24."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    if number < 2:
        return False
    for base in bases:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def check_layout(n_layers: int, engram_vocab_size: int, max_ngram_size: int, n_heads: int, head_dim: int = 1) -> None:
    """Refuses tables that no int64 can address, and more hash columns than can be laid out at once.

    Args:
        n_layers, engram_vocab_size, max_ngram_size, n_heads (`int`): as in [`build_layout`].
        head_dim (`int`): width of a row; its elements are counted, at 8 bytes, if it is given.

    Raises:
        ValueError: names the fields. Raised before a prime is looked for.
    """
    columns = (max_ngram_size - 1) * n_heads
    if n_layers * columns > MAX_COLUMNS:
        raise ValueError(
            f"`engram_max_ngram_size` ({max_ngram_size}) and `engram_n_heads` ({n_heads}) ask for "
            f"{n_layers * columns} hash columns in {n_layers} Engram layers, more than {MAX_COLUMNS}: choose smaller "
            "ones. (DeepSeek-V4.1 has 24 a layer.)"
        )
    # In int64 with room to spare, since the primes of tables of this size are less than twice as large.
    if n_layers and 8 * head_dim * columns * engram_vocab_size >= 2**62:
        raise ValueError(
            f"`engram_vocab_size` ({engram_vocab_size}) rows for each of {columns} hash columns"
            + (f", of `engram_head_dim` {head_dim}," if head_dim > 1 else "")
            + " make tables beyond what int64 can address: choose a smaller `engram_vocab_size`."
        )


@lru_cache(maxsize=64)
def build_layout(n_layers: int, engram_vocab_size: int, max_ngram_size: int, n_heads: int) -> NgramLayout:
    """Lays out the tables of `n_layers` Engram layers.

    Every (layer, n-gram size, head), in that order, gets the smallest prime above `engram_vocab_size - 1` that none
    before it got: one ascending run of primes. No prime is shared, so no two heads collide on the same pairs.

    Args:
        n_layers (`int`): number of Engram layers.
        engram_vocab_size (`int`): lower bound of every bucket count, in rows.
        max_ngram_size (`int`): N, the longest n-gram, in tokens; sizes 2..N are hashed.
        n_heads (`int`): K, hashes per n-gram size.

    Returns:
        `NgramLayout` (cached: treat its arrays as read-only).

    Raises:
        ValueError: as [`check_layout`].
    """
    check_layout(n_layers, engram_vocab_size, max_ngram_size, n_heads)
    primes = []
    candidate = engram_vocab_size
    for _ in range(n_layers * (max_ngram_size - 1) * n_heads):
        while not is_prime(candidate):
            candidate += 1
        primes.append(candidate)
        candidate += 1
    primes = np.array(primes, dtype=np.int64).reshape(n_layers, (max_ngram_size - 1) * n_heads)
    offsets = np.cumsum(primes, axis=1) - primes
    shape = (n_layers, max_ngram_size - 1, n_heads)
    num_embeddings = tuple(int(rows) for rows in primes.sum(axis=1))
    primes, offsets = primes.reshape(shape), offsets.reshape(shape)
    primes.setflags(write=False)
    offsets.setflags(write=False)
    return NgramLayout(primes=primes, offsets=offsets, num_embeddings=num_embeddings)


def build_multipliers(layer_ids: tuple[int, ...], compressed_vocab_size: int, max_ngram_size: int) -> np.ndarray:
    """The odd multipliers of each Engram layer's hash.

    Args:
        layer_ids (`tuple[int, ...]`): indices of the decoder layers that hold an Engram layer.
        compressed_vocab_size (`int`): number of compressed ids; multipliers stay below `2**63 /
            compressed_vocab_size`.
        max_ngram_size (`int`): N, the longest n-gram, in tokens.

    Returns:
        `np.ndarray`: int64 `[n_layers, max_ngram_size]`.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    multipliers = [
        2 * np.random.default_rng(MULTIPLIER_SEED * layer_id).integers(0, bound, (max_ngram_size,), dtype=np.int64) + 1
        for layer_id in layer_ids
    ]
    return np.array(multipliers, dtype=np.int64).reshape(len(layer_ids), max_ngram_size)


def check_token_ids(ids: np.ndarray | torch.Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Raises unless `ids` are integers in `[0, vocab_size)`.

    An id outside would index another token's row or overflow the hash, silently. On CPU the error is raised here; on
    an accelerator, and inside `torch.compile`, it is asserted on the device, so that no step waits for the check.

    Raises:
        TypeError: `ids` are not integers, or a tensor of others than int64 and int32.
        ValueError: an id is negative or `>= vocab_size` (a RuntimeError where it is asserted on the device).
    """
    is_tensor = isinstance(ids, torch.Tensor)
    if is_tensor:
        # Embeddings take no others.
        is_integer = ids.dtype in (torch.int64, torch.int32)
    else:
        is_integer = np.issubdtype(ids.dtype, np.integer)
    if not is_integer:
        kind = "integers of 64 or 32 bits with a sign" if is_tensor else "integers"
        raise TypeError(f"`{name}` must hold {kind}, got dtype {ids.dtype}. Convert them with `.long()`.")
    if is_tensor and (ids.device.type != "cpu" or torch.compiler.is_compiling()):
        if ids.device.type != "meta":
            torch._assert_async(
                ((ids >= 0) & (ids < vocab_size)).all(), f"`{name}` holds an id outside [0, {vocab_size})."
            )
        return
    if 0 in ids.shape:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"`{name}` holds the id {low if low < 0 else high}, outside [0, {vocab_size}). Use the tokenizer that the "
            "model was built for, and mark padding with `attention_mask`, not with an id."
        )


def document_starts(position_ids: Array) -> Array:
    """Where packed documents begin: positions that do not continue the one before (as in Transformers' own masks).

    Args:
        position_ids: integer `[B, L]`.

    Returns:
        bool `[B, L]`. The first column is a start only if its position is 0, since it may continue a cached sequence.
    """
    xp = torch if isinstance(position_ids, torch.Tensor) else np
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return xp.concatenate((position_ids[:, :1] == 0, restarts), 1)


def encode_stream(compressed_ids: Array, dead: Array | None = None, starts: Array | None = None) -> Array:
    """Folds what an n-gram may not cross into the ids themselves, so that a short history of them is all the state.

    Args:
        compressed_ids: int64 `[B, L]`.
        dead: bool `[B, L]` or None, True where a token is padding, masked, or not text.
        starts: bool `[B, L]` or None, True where a document begins.

    Returns:
        int64 `[B, L]`: `id` for a live token, `-2 - id` for a live token that begins a document, `DEAD` otherwise.
    """
    xp = torch if isinstance(compressed_ids, torch.Tensor) else np
    stream = compressed_ids
    if starts is not None:
        stream = xp.where(starts, -2 - stream, stream)
    if dead is not None:
        stream = xp.where(dead, DEAD, stream)
    return stream


def hash_stream(stream: Array, pad_id: int, multipliers: Array, primes: Array, offsets: Array) -> Array:
    """Hashes the window that ends at each position to one row per Engram layer, n-gram size and head.

    Look-back stops at a dead position and at the beginning of a document: from the first such shift on, every older
    entry of the window is `pad_id`.

    Args:
        stream: int64 `[B, (N - 1) + L]` from `encode_stream`: the N - 1 positions before the first (`DEAD` where there
            are none), then L positions.
        pad_id: compressed id that stands for "nothing here".
        multipliers: int64 `[n_layers, N]`.
        primes: int64 `[n_layers, N - 1, K]`.
        offsets: int64 `[n_layers, N - 1, K]`.

    Returns:
        int64 `[B, L, n_layers, (N - 1) * K]`, row ids inside each layer's table; columns ordered by n-gram size, then
        head.
    """
    xp = torch if isinstance(stream, torch.Tensor) else np
    max_ngram_size = multipliers.shape[1]
    length = stream.shape[1] - (max_ngram_size - 1)
    # A negative entry is dead or begins a document: nothing before it may be seen.
    barrier = stream < 0
    tokens = xp.where(barrier, -2 - stream, stream)
    tokens = xp.where(stream == DEAD, pad_id, tokens)

    def shifted(values: Array, shift: int) -> Array:
        first = max_ngram_size - 1 - shift
        return values[:, first : first + length]

    mixed = shifted(tokens, 0)[..., None] * multipliers[:, 0]
    blocked = shifted(barrier, 0)
    columns = []
    for shift in range(1, max_ngram_size):
        window = xp.where(blocked, pad_id, shifted(tokens, shift))
        blocked = blocked | shifted(barrier, shift)
        mixed = mixed ^ (window[..., None] * multipliers[:, shift])
        columns.append(mixed[..., None] % primes[:, shift - 1] + offsets[:, shift - 1])
    return xp.concatenate(columns, -1)
