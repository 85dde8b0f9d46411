"""The Engram tables and the lookup of their rows."""

import torch
from torch import nn

from .ops.gather_rows import gather_rows


class EngramMemory(nn.Module):
    """The tables of all Engram layers.

    They hang on the model, not on its decoder layers, so that whatever places, streams or offloads decoder layers
    leaves the tables where they are. Rows are addressed by token ids alone, hence fetched for all layers before the
    first one.

    Args:
        config ([`EngramConfig`]): sizes of the tables.

    Attributes:
        tables (`nn.ModuleList`): one `nn.Embedding` `[rows, engram_head_dim]` per Engram layer, in the order of
            `engram_layer_ids`.
        sparse_grad (`bool`): whether tables get sparse gradients (only the rows of the batch, each once), as
            `torch.optim.SparseAdam` takes them. False by default, since AdamW and the Trainer take dense gradients
            only.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(rows, config.engram_head_dim) for rows in config.engram_num_embeddings
        )
        self.sparse_grad = False

    def forward(self, hash_ids: torch.Tensor) -> list[torch.Tensor]:
        """Fetches the rows of every Engram layer.

        Args:
            hash_ids: int64 `[B, L, n_engram_layers, C]`, row ids inside each layer's table.

        Returns:
            list of `[B, L, C * engram_head_dim]`, one per Engram layer, on the device of `hash_ids`.
        """
        return [
            gather_rows(table.weight, hash_ids[:, :, index], sparse_grad=self.sparse_grad)
            for index, table in enumerate(self.tables)
        ]
