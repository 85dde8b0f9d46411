"""The hash: token ids to the row ids of every Engram layer, in one launch, exact in int64.

The formulas are those of `tokenization/ngram_hashing.py`, which all else here must equal. Per token and layer:

    entry_s = the token s places before, encoded: its compressed id, `-2 - id` if a document begins there, or `DEAD`
    w_s = the compressed id in entry_s; the pad token's if dead, or if any of entry_0 .. entry_(s-1) is negative
    x_n = w_0 * m_0 ^ ... ^ w_n * m_n                                       n = 1 .. N - 1
    row id of head k = x_n mod p_nk + offset_nk

What is divided is never negative: entries below zero are decoded before they are multiplied, compressed ids and
multipliers are not negative, and `m < 2**63 / compressed_vocab_size` keeps the products, hence the XOR of products, in
`[0, 2**63)`. There the remainder of C, which is the kernels', and the floored one of Python are the same.

Division of 64-bit integers is slow everywhere, so a row id is found without one. Let `Q = floor(x / p)`.

*Kernels*, for `1 <= p <= 2**62`: `v = floor((2**63 - 1) / p)` is `(2**63 - c) / p` for some integer `1 <= c <= p`. The
high half of the 128-bit product of `2 * x` and v is `q = floor(x * v / 2**63) = floor(x / p - (c / p) * (x / 2**63))`.
What is subtracted is in `[0, 1)`, so q is Q or Q - 1 and `x - q * p` is in `[0, 2 * p)`: one subtraction mends it.

*CPU*, for `2**13 <= p < 2**31`: three fp64 roundings (of x, of 1 / p, of their product), each by at most `u = 2**-53`,
give t with `|t - x / p| <= 3.01 * u * x / p < 0.377`, as `x / p < 2**50`. Between `2**52` and `2**53`, fp64 holds
integers only, so `t + 2**52` is rounded to `q + 2**52` with an integer q, `|q - t| <= 1/2`, and q is in its low bits:
the low 32 of `2**52` itself are zero. Now `|q - x / p| < 0.877`, so `x - q * p` is in `(-p, p)`: one addition mends
it. As it fits in int32, the low halves of x and q give it, by a product and a difference that wrap.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from ...tokenization.ngram_hashing import DEAD, Array, document_starts, encode_stream, hash_stream
from .backend import device_guard, kernel, resolve_backend


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


# The formula


def _encode(
    input_ids: Array,
    token_map: Array,
    max_ngram_size: int,
    dead: Array | None,
    position_ids: Array | None,
    history: Array | None,
) -> tuple[Array, Array]:
    """Encoded tokens int64 `[B, L]`, and with the history before them `[B, N - 1 + L]`: what `hash_stream` takes."""
    compressed = token_map[input_ids]
    starts = None if position_ids is None else document_starts(position_ids)
    before = (input_ids.shape[0], max_ngram_size - 1)
    if isinstance(compressed, torch.Tensor):
        encoded = encode_stream(compressed.long(), dead, starts)
        history = encoded.new_full(before, DEAD) if history is None else history
        return encoded, torch.cat((history, encoded), 1)
    encoded = encode_stream(compressed.astype(np.int64), dead, starts)
    history = np.full(before, DEAD) if history is None else history
    return encoded, np.concatenate((history, encoded), 1)


def ngram_hash_reference(
    input_ids: Array,
    token_map: Array,
    pad_id: int,
    multipliers: Array,
    primes: Array,
    offsets: Array,
    dead: Array | None = None,
    position_ids: Array | None = None,
    history: Array | None = None,
) -> tuple[Array, Array]:
    """The formula, in PyTorch or NumPy; arguments as `ngram_hash`. What all else here must equal."""
    encoded, stream = _encode(input_ids, token_map, multipliers.shape[1], dead, position_ids, history)
    return hash_stream(stream, pad_id, multipliers, primes, offsets), encoded


# Eager: on CPU, NumPy for a few tokens, else blocks of tokens that stay in cache

# Up to this many tokens, what counts is the number of calls, and NumPy's cost least.
FEW_TOKENS = 512
# Row ids in a block, for each thread: two scratch numbers a row id are about one megabyte.
CPU_BLOCK = 2**16
CPU_BLOCK_THREADS = 4
# Where the reciprocals are exact (see the top of the file).
MIN_PRIME = 2**13
INT32_END = 2**31
ROUNDS_TO_INTEGER = 2.0**52


def _numpy_hash(*arguments: torch.Tensor | int | None) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (argument.numpy() if isinstance(argument, torch.Tensor) else argument for argument in arguments)
    hash_ids, encoded = ngram_hash_reference(*arrays)
    return torch.from_numpy(np.ascontiguousarray(hash_ids)), torch.from_numpy(encoded)


def _mix(stream: torch.Tensor, pad_id: int, multipliers: torch.Tensor) -> torch.Tensor:
    """What is divided, int64 `[n_layers, N - 1, B, L]`, from `stream` and `multipliers` as in `hash_stream`."""
    n_layers, max_ngram_size = multipliers.shape
    length = stream.shape[1] - (max_ngram_size - 1)
    # Tokens to the left, so that a block of them is contiguous for each divisor.
    factors = multipliers.t()[..., None, None]
    barrier = stream < 0
    tokens = torch.where(barrier, -2 - stream, stream).masked_fill_(stream == DEAD, pad_id)

    mixed = stream.new_empty(n_layers, max_ngram_size - 1, len(stream), length)
    last = tokens[:, max_ngram_size - 1 :] * factors[0]
    blocked = barrier[:, max_ngram_size - 1 :]
    for shift in range(1, max_ngram_size):
        there = slice(max_ngram_size - 1 - shift, max_ngram_size - 1 - shift + length)
        window = tokens[:, there].masked_fill(blocked, pad_id)
        blocked = blocked | barrier[:, there]
        last = torch.bitwise_xor(window * factors[shift], last, out=mixed[:, shift - 1])
    return mixed


def _has_reciprocals(primes: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Whether fp64 and int32 are enough for these divisors and row ids. The low half of a number must come first."""
    return (
        sys.byteorder == "little"
        and int(primes.min()) >= MIN_PRIME
        and int(primes.max()) < INT32_END
        and int((offsets + primes).max()) <= INT32_END
    )


def _hash_blocks(
    stream: torch.Tensor, pad_id: int, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """As `hash_stream`, for what `_has_reciprocals`. Rounding and wrapping are proved at the top of the file."""
    n_layers, sizes, heads = primes.shape
    length = stream.shape[1] - sizes
    tokens, groups = len(stream) * length, n_layers * sizes
    mixed = _mix(stream, pad_id, multipliers).view(groups, 1, tokens)
    reciprocal = primes.view(groups, heads, 1).double().reciprocal_()
    prime, offset = primes.view(groups, heads, 1).int(), offsets.view(groups, heads, 1).int()
    minus_prime = -prime

    # NumPy asks for huge pages: the first touch of 40 MB of row ids in small ones takes longer than all the rest here.
    hash_ids = torch.from_numpy(np.empty((tokens, groups * heads), dtype=np.int64))
    threads = min(torch.get_num_threads(), CPU_BLOCK_THREADS)
    # Odd: rows of the scratch a power of two apart would fall into the same lines of the cache when turned.
    size = CPU_BLOCK * threads // (groups * heads) | 1
    # Of each row id: the quotient, then (in its low half) the remainder; and whether that is negative.
    scratch = stream.new_empty(2, groups * heads * min(size, tokens))
    for start in range(0, tokens, size):
        x = mixed[..., start : start + size].contiguous()
        count = x.shape[-1]
        work, sign = (part[: groups * heads * count].view(groups, heads, count) for part in scratch)
        torch.mul(x.double(), reciprocal, out=work.view(torch.float64)).add_(ROUNDS_TO_INTEGER)
        # From here on the high halves are computed, too, and mean nothing: a contiguous run is what is fast.
        row, sign = work.view(torch.int32), sign.view(torch.int32)
        torch.addcmul(x.view(torch.int32), row, minus_prime, out=row)
        torch.bitwise_right_shift(row, 31, out=sign).bitwise_and_(prime)
        row.add_(sign).add_(offset)
        hash_ids[start : start + size] = row.view(groups * heads, count, 2)[..., 0].t()
    return hash_ids.view(len(stream), length, n_layers, sizes * heads)


# Triton. A program takes a run of tokens and one layer.


@kernel
def _hash_kernel(
    ids_ptr: torch.Tensor,
    token_map_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    dead_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    history_ptr: torch.Tensor,
    hash_ids_ptr,
    encoded_ptr,
    tokens: int,
    length: int,
    layers: int,
    pad_id: int,
    ids_row_stride: int,
    ids_stride: int,
    dead_row_stride: int,
    dead_stride: int,
    position_row_stride: int,
    position_stride: int,
    history_row_stride: int,
    history_stride: int,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    DEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """hash_ids [B * L, n_layers, (N - 1) * HEADS] and encoded [B * L]; the others by strides, or contiguous."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    layer = tl.program_id(1).to(tl.int64)
    inside = token < tokens
    row = token // length
    column = token % length
    mixed = tl.zeros([BLOCK_TOKENS], tl.int64)
    # Nowhere. Triton 3.3's interpreter has no zeros of one bit.
    blocked = column < 0
    for shift in tl.static_range(N):
        at = column - shift
        here = inside & (at >= 0)
        id = tl.load(ids_ptr + row * ids_row_stride + at * ids_stride, mask=here, other=0)
        entry = tl.load(token_map_ptr + id, mask=here, other=0).to(tl.int64)
        if HAS_POSITIONS:
            position_ptr = positions_ptr + row * position_row_stride + at * position_stride
            position = tl.load(position_ptr, mask=here, other=0)
            continued = tl.load(position_ptr - position_stride, mask=here & (at > 0), other=-1) + 1
            # The first of all begins a document at position 0 only: it may continue the history.
            starts = tl.where(at > 0, position != continued, position == 0)
            entry = tl.where(starts, -2 - entry, entry)
        if HAS_DEAD:
            dead = tl.load(dead_ptr + row * dead_row_stride + at * dead_stride, mask=here, other=0)
            entry = tl.where(dead != 0, DEAD, entry)
        if HAS_HISTORY:
            past_ptr = history_ptr + row * history_row_stride + (N - 1 + at) * history_stride
            past = tl.load(past_ptr, mask=inside & (at < 0), other=DEAD)
            entry = tl.where(at < 0, past, entry)
        else:
            entry = tl.where(at < 0, DEAD, entry)
        if shift == 0:
            if layer == 0:
                tl.store(encoded_ptr + token, entry, mask=inside)

        # From here on nothing is negative.
        window = tl.where(entry < 0, -2 - entry, entry)
        window = tl.where(blocked | (entry == DEAD), pad_id, window)
        blocked = blocked | (entry < 0)
        mixed = mixed ^ (window * tl.load(multipliers_ptr + layer * N + shift))
        if shift > 0:
            for first in range(0, HEADS, BLOCK_HEADS):
                head = first + tl.arange(0, BLOCK_HEADS)
                divisor = (layer * (N - 1) + shift - 1) * HEADS + head
                prime = tl.load(primes_ptr + divisor, mask=head < HEADS, other=1)[None, :]
                offset = tl.load(offsets_ptr + divisor, mask=head < HEADS, other=0)[None, :]
                # One division for all tokens of the run; the proof is at the top of the file.
                reciprocal = 0x7FFFFFFFFFFFFFFF // prime
                doubled = (mixed[:, None] * 2).to(tl.uint64)
                quotient = tl.umulhi(doubled, reciprocal.to(tl.uint64)).to(tl.int64)
                remainder = mixed[:, None] - quotient * prime
                remainder = tl.where(remainder >= prime, remainder - prime, remainder)
                hash_at = (token[:, None] * layers + layer) * ((N - 1) * HEADS) + (shift - 1) * HEADS + head[None, :]
                tl.store(hash_ids_ptr + hash_at, remainder + offset, mask=inside[:, None] & (head < HEADS)[None, :])


def _tile(heads: int) -> dict[str, int]:
    """256 row ids of an n-gram size at a time, four a thread: 4096 tokens are enough programs for any device."""
    block_heads = min(triton.next_power_of_2(heads), 32)
    return {"BLOCK_TOKENS": 256 // block_heads, "BLOCK_HEADS": block_heads, "num_warps": 2}


def _strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """From row to row, none where one row is there for all, and from place to place."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0) if tensor.shape[0] > 1 else 0, tensor.stride(1)


def triton_ngram_hash(
    input_ids: torch.Tensor,
    token_map: torch.Tensor,
    pad_id: int,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    dead: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ngram_hash` in one launch."""
    batch, length = input_ids.shape
    n_layers, sizes, heads = primes.shape
    hash_ids = primes.new_empty(batch, length, n_layers, sizes * heads)
    encoded = primes.new_empty(batch, length)
    if hash_ids.numel() == 0:
        return hash_ids, encoded
    dead = None if dead is None else dead.view(torch.uint8)
    tile = _tile(heads)
    with device_guard(input_ids):
        _hash_kernel[(triton.cdiv(batch * length, tile["BLOCK_TOKENS"]), n_layers)](
            input_ids,
            token_map.contiguous(),
            multipliers.contiguous(),
            primes.contiguous(),
            offsets.contiguous(),
            dead,
            position_ids,
            history,
            hash_ids,
            encoded,
            batch * length,
            length,
            n_layers,
            pad_id,
            *_strides(input_ids),
            *_strides(dead),
            *_strides(position_ids),
            *_strides(history),
            N=sizes + 1,
            HEADS=heads,
            HAS_DEAD=dead is not None,
            HAS_POSITIONS=position_ids is not None,
            HAS_HISTORY=history is not None,
            DEAD=DEAD,
            **tile,
        )
    return hash_ids, encoded


# Dispatch


def _check(input_ids, token_map, multipliers, primes, offsets, dead, position_ids, history) -> None:
    if input_ids.ndim != 2:
        raise ValueError(f"`input_ids` must be [B, L], got the shape {tuple(input_ids.shape)}.")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`input_ids` must be int32 or int64, got {input_ids.dtype}: convert them with `.long()`.")
    batch, length = input_ids.shape
    n_layers, max_ngram_size = multipliers.shape
    if primes.shape != offsets.shape or primes.ndim != 3 or primes.shape[:2] != (n_layers, max_ngram_size - 1):
        raise ValueError(
            f"With multipliers [n_layers, N] = {list(multipliers.shape)}, primes and offsets must be "
            f"[n_layers, N - 1, K], got {list(primes.shape)} and {list(offsets.shape)}: take all from one layout."
        )
    if dead is not None and (dead.shape != input_ids.shape or dead.dtype != torch.bool):
        raise ValueError(f"`dead` must be bool {[batch, length]}, got {dead.dtype} {list(dead.shape)}.")
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(f"`position_ids` must be [{batch} or 1, {length}], got {list(position_ids.shape)}.")
    if history is not None and (history.shape != (batch, max_ngram_size - 1) or history.dtype != torch.int64):
        raise ValueError(
            f"`history` must be int64 {[batch, max_ngram_size - 1]}, the last N - 1 tokens as `encode_stream` gives "
            f"them, got {history.dtype} {list(history.shape)}."
        )


def ngram_hash(
    input_ids: torch.Tensor,
    token_map: torch.Tensor,
    pad_id: int,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    dead: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hashes the window that ends at each token to a row of every Engram layer, n-gram size and head.

    Args:
        input_ids: integer `[B, L]`, in `[0, V)`: checked by the caller.
        token_map: int32 `[V]`, the compressed id of every token id, none negative.
        pad_id: compressed id that stands where a window has no token.
        multipliers: int64 `[n_layers, N]`, in `[0, 2**63 / compressed_vocab_size)`.
        primes, offsets: int64 `[n_layers, N - 1, K]`, the layout of the tables.
        dead: bool `[B, L]` or None, True where a token is padding, masked, or not text.
        position_ids: integer `[B or 1, L]` or None; where they restart, a document begins (see `document_starts`).
        history: int64 `[B, N - 1]` or None, the tokens before, encoded; None for a sequence that starts here.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        int64 `[B, L, n_layers, (N - 1) * K]`, row ids inside each layer's table; and int64 `[B, L]`, the tokens as
        `encode_stream` gives them, of which the last N - 1 are the history of what follows.

    Raises:
        ValueError: shapes or dtypes that do not fit together. TypeError: ids that are not int32 or int64.
    """
    _check(input_ids, token_map, multipliers, primes, offsets, dead, position_ids, history)
    arguments = (input_ids, token_map, pad_id, multipliers, primes, offsets, dead, position_ids, history)
    if resolve_backend("ngram_hash", backend, input_ids) == "triton":
        return triton_ngram_hash(*arguments)
    # Compilers fuse the formula themselves. A tensor of another class need not have numbers that can be looked at.
    # Nor may a tracer, which would take the numbers for constants.
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if input_ids.device.type == "cpu" and not is_traced and type(input_ids) is torch.Tensor:
        if input_ids.numel() <= FEW_TOKENS:
            return _numpy_hash(*arguments)
        if _has_reciprocals(primes, offsets):
            encoded, stream = _encode(input_ids, token_map, multipliers.shape[1], dead, position_ids, history)
            return _hash_blocks(stream, pad_id, multipliers, primes, offsets), encoded
    return ngram_hash_reference(*arguments)
