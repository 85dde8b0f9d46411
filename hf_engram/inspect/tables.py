"""The tables: how many n-grams share a row, against what a perfect hash would give, and the norms of rows."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .trace import MemoryTrace, find_decoder


# Rows that are read at once.
ROWS_AT_ONCE = 2**14


def expected_rows(n_ngrams: int, n_rows: int) -> float:
    """Rows that `n_ngrams` different n-grams use on average, if a perfect hash throws each into one of `n_rows`.

    A row stays empty with probability `(1 - 1/p)^m`, so it is `p * (1 - (1 - 1/p)^m)`, by logarithms, since for large
    tables the difference from 1 is lost in rounding.
    """
    if n_rows == 1:
        return float(n_ngrams > 0)
    return -n_rows * math.expm1(n_ngrams * math.log1p(-1 / n_rows))


@dataclass(frozen=True)
class RowUsage:
    """The rows that a text uses in one column of one table: of one layer, n-gram size and head.

    Attributes:
        layer_id, size, head (`int`): which column.
        n_rows (`int`): rows that the column can choose from, a prime.
        n_ngrams (`int`): different n-grams of this size in the text, as they are hashed.
        n_used (`int`): different rows that they are in.
    """

    layer_id: int
    size: int
    head: int
    n_rows: int
    n_ngrams: int
    n_used: int

    @property
    def collision_rate(self) -> float:
        """Share of the n-grams for which there is no row of their own: `1 - n_used / n_ngrams`."""
        return 1 - self.n_used / self.n_ngrams if self.n_ngrams else 0.0

    @property
    def expected_collision_rate(self) -> float:
        """What a perfect hash would give on average."""
        return 1 - expected_rows(self.n_ngrams, self.n_rows) / self.n_ngrams if self.n_ngrams else 0.0


def row_usage(trace: MemoryTrace) -> list[RowUsage]:
    """The rows that a text uses: one [`RowUsage`] for each layer, n-gram size and head."""
    live = trace.reach > 0
    n_ngrams = {size: len(np.unique(trace.ngram_ids(size)[live], axis=0)) for size in trace.sizes}
    return [
        RowUsage(
            layer_id=layer.layer_id,
            size=size,
            head=head,
            n_rows=int(layer.primes[column]),
            n_ngrams=n_ngrams[size],
            n_used=len(np.unique(layer.row_ids[live, column])),
        )
        for layer in trace.layers
        for column, (size, head) in enumerate((size, head) for size in trace.sizes for head in range(trace.n_heads))
    ]


@dataclass(frozen=True)
class RowNorms:
    """Norms of the rows of one layer's table.

    Attributes:
        layer_id (`int`): index of the decoder layer.
        n_rows (`int`): rows of the table.
        sample (`np.ndarray`): fp32, the norms of rows drawn at random, each at most once; of all if there are few.
        used (`np.ndarray`): fp32, the norms of the rows that the text uses, each once; at most as many as the sample.
    """

    layer_id: int
    n_rows: int
    sample: np.ndarray
    used: np.ndarray


def row_norms(model: nn.Module, trace: MemoryTrace, n_sampled: int = 100_000, seed: int = 0) -> list[RowNorms]:
    """The norms of table rows, for each Engram layer: of some at random, and of those that a text uses.

    Only these rows are read, wherever the tables are; quantised ones are decoded.

    Args:
        model: the one that `trace` was made with.
        trace: says which rows the text uses.
        n_sampled (`int`): most rows to read for each.
        seed (`int`): of the draw.
    """
    if n_sampled < 1:
        raise ValueError(f"`n_sampled` must be at least 1, got {n_sampled}.")
    memory = find_decoder(model).engram_memory
    generator = np.random.default_rng(seed)
    live = trace.reach > 0

    def draw(rows: np.ndarray | int) -> np.ndarray:
        count = rows if isinstance(rows, int) else len(rows)
        return np.sort(generator.choice(rows, min(count, n_sampled), replace=False, shuffle=False))

    n_rows = [table.num_embeddings for table in memory.tables]
    sample = _norms(memory, [draw(count) for count in n_rows])
    used = _norms(memory, [draw(np.unique(layer.row_ids[live])) for layer in trace.layers])
    return [
        RowNorms(layer.layer_id, *numbers) for layer, *numbers in zip(trace.layers, n_rows, sample, used, strict=True)
    ]


@torch.no_grad()
def _norms(memory: nn.Module, row_ids: list[np.ndarray]) -> list[np.ndarray]:
    """The norms, fp32 `[n]`, of the rows int64 `[n]` of each table."""
    most = max(map(len, row_ids))
    # The memory reads as many rows of every table: shorter lists are filled up with row 0.
    ids = np.zeros((1, most, len(row_ids), 1), dtype=np.int64)
    for index, rows in enumerate(row_ids):
        ids[0, : len(rows), index, 0] = rows
    norms = [[] for _ in row_ids]
    for part in torch.from_numpy(ids).split(ROWS_AT_ONCE, dim=1):
        for index, rows in enumerate(memory(part.to(memory.home.device), dtype=torch.float32)):
            norms[index].append(rows[0].float().norm(dim=-1).cpu().numpy())
    return [np.concatenate(parts)[: len(rows)] for parts, rows in zip(norms, row_ids, strict=True)]
