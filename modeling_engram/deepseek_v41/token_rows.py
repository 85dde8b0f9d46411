"""Where the tokens of a forward stand: in their documents, in the windows, and in the groups that are compressed.

Attention meets the *live* tokens of every row one after the other, from the left; padding comes after them and is seen
by nobody. So a row computes what it would alone, wherever its padding is. A live token knows its number `index` in its
document; a group of m tokens is m tokens of one document, counted from its start, and closes with its last one. A
document's groups take consecutive slots of the shared cache:

    low <= slot < high          the groups that a token may see: those of its document that have closed
    high = low + floor((index + 1) / m)

`low` is a multiple of the candidates' block size, so that blocks are counted from the document's start, too.

What the next forward must know of a row is its *counts*: live tokens so far, those of them in the current document,
and, for each ratio m, `low`.
"""

from typing import NamedTuple

import torch

from ...tokenization.ngram_hashing import document_starts


class Groups(NamedTuple):
    """The groups of one ratio.

    Attributes:
        low, high: int64 `[B, L]`, the slots that each token may see.
        closing: int64 `[B, N]`, the tokens that close a group, in order; then others.
        slots: int64 `[B, N]`, the slot of each group that closes; `capacity` where none does.
        capacity (`int`): slots that are in use, in the fullest row.
    """

    low: torch.Tensor
    high: torch.Tensor
    closing: torch.Tensor
    slots: torch.Tensor
    capacity: int


class TokenRows(NamedTuple):
    """The tokens of a forward, live ones first.

    Attributes:
        order: int64 `[B, L]`, the column that each token comes from; None where all tokens are live.
        lengths: int64 `[B]`, live tokens of each row; None where all are.
        index: int64 `[B, L]`, number of each token in its document.
        positions: int64 `[B, L]`, by which it is rotated.
        groups: by ratio.
        counts: int64 `[B, L, 2 + ratios]`, after each *column*.
    """

    order: torch.Tensor | None
    lengths: torch.Tensor | None
    index: torch.Tensor
    positions: torch.Tensor
    groups: dict[int, Groups]
    counts: torch.Tensor

    def compact(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, L, D]` in the order of columns, with live tokens first."""
        if self.order is None:
            return x
        return x.gather(1, self.order.unsqueeze(-1).expand_as(x))

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, L, D]` with live tokens first, in the order of columns."""
        if self.order is None:
            return x
        return x.gather(1, self.order.argsort(1).unsqueeze(-1).expand_as(x))


def take(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`x[b, columns[b, i]]` for `x` `[B, L]` or `[B, L, D]`."""
    return x.gather(1, columns if x.ndim == 2 else columns.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def token_rows(
    shape: tuple[int, int],
    device: torch.device,
    ratios: list[int],
    block_size: int,
    live: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> TokenRows:
    """
    Args:
        shape: (B, L) of the tokens of this forward.
        ratios: tokens in a group, ascending, without 0.
        block_size: of the candidates; 1 where there are none.
        live: bool `[B, L]`, False at padding; None for none.
        position_ids: integer `[B or 1, L]`, which restart where a document begins; None for numbers in the document.
        counts: int64 `[B, 2 + ratios]` after the tokens in the cache; None without any.
    """
    batch, length = shape
    at = torch.arange(length, device=device).expand(batch, -1)
    if counts is None:
        counts = torch.zeros(batch, 2 + len(ratios), dtype=torch.int64, device=device)
    order = lengths = None
    positions = None if position_ids is None else position_ids.long().expand(batch, -1)
    if live is not None:
        order = (~live).int().argsort(dim=1, stable=True)
        lengths = live.sum(1)
        positions = None if positions is None else positions.gather(1, order)
    valid = torch.ones_like(at, dtype=torch.bool) if lengths is None else at < lengths.unsqueeze(1)

    total, document = counts[:, 0:1], counts[:, 1:2]
    starts = torch.zeros_like(valid) if positions is None else document_starts(positions) & valid
    starts = starts & ((at > 0) | (document > 0))
    last_start = torch.where(starts, at, -1).cummax(1).values
    index = torch.where(last_start < 0, document + at, at - last_start)
    # Of the document before each start.
    ended = torch.where(starts, torch.cat([document, index[:, :-1] + 1], 1), 0)
    lows = []
    for number, ratio in enumerate(ratios):
        blocks = -(-(ended // ratio) // block_size)
        lows.append(counts[:, 2 + number : 3 + number] + (blocks * block_size).cumsum(1))
    after = torch.stack([total + at + 1, index + 1, *lows], -1)

    groups = {}
    for ratio, low in zip(ratios, lows, strict=True):
        high = low + (index + 1) // ratio
        closes = valid & ((index + 1) % ratio == 0)
        low, high = torch.where(valid, low, 0), torch.where(valid, high, 0)
        capacity, count = torch.stack([high.amax(), closes.sum(1).amax()]).tolist() if length else (0, 0)
        closing = (~closes).int().argsort(dim=1, stable=True)[:, :count]
        slots = torch.where(closes.gather(1, closing), high.gather(1, closing) - 1, capacity)
        groups[ratio] = Groups(low, high, closing, slots, capacity)
    if live is not None:
        seen = live.cumsum(1)
        after = torch.cat([counts.unsqueeze(1), after], 1).gather(
            1, seen.unsqueeze(-1).expand(-1, -1, after.shape[-1])
        )
    index = torch.where(valid, index, 0)
    return TokenRows(order, lengths, index, index if positions is None else positions, groups, after)
