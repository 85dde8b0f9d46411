"""The Engram tables, where they live, and the lookup of their rows."""

import torch
from torch import nn

from ..configuration.configuration_engram import placement_of_each
from .adapter_rows import AdapterRows
from .engram_table import EngramTable
from .row_request import DiskRequest, Prefetched, RowRequest, awaited


class EngramMemory(AdapterRows):
    """The tables of all Engram layers.

    They hang on the model, not on its decoder layers, so that whatever places, streams or offloads decoder layers
    leaves the tables where they are. Rows are addressed by token ids alone, hence fetched for all layers before the
    first one: those of tables beside the model at once, others while the layers before theirs compute.

    Args:
        config ([`EngramConfig`]): sizes of the tables, and their placement.

    Attributes:
        tables (`nn.ModuleList`): one [`EngramTable`] `[rows, engram_head_dim]` per Engram layer, in the order of
            `engram_layer_ids`.
        sparse_grad (`bool`): whether tables get sparse gradients (only the rows of the batch, each once), as
            `torch.optim.SparseAdam` takes them. False by default, since AdamW and the Trainer take dense gradients
            only. DDP wants to know it when it is made, so set it before.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        rows, dim = config.engram_num_embeddings, config.engram_head_dim
        values = placement_of_each(getattr(config, "engram_placement", "device"), len(rows))
        self.tables = nn.ModuleList(EngramTable(n, dim, value) for n, value in zip(rows, values, strict=True))
        # Moves and is cast with the model, as tables beside it are.
        self.register_buffer("home", torch.empty(0), persistent=False)
        self.prefetched = Prefetched()

    @property
    def sparse_grad(self) -> bool:
        return any(table.sparse for table in self.tables.modules() if isinstance(table, EngramTable))

    @sparse_grad.setter
    def sparse_grad(self, value: bool) -> None:
        # A DTensor, which only the package's optimizer needs to know.
        if value and any(hasattr(table.weight, "device_mesh") for table in self.tables.modules()
                         if isinstance(table, EngramTable)):  # fmt: skip
            raise ValueError(
                "The tables are sharded over processes (FSDP2), which no sparse gradient can be: leave "
                "`sparse_grad = False`, and the gradients of all rows are added up and sharded."
            )
        for table in self.tables.modules():
            if isinstance(table, EngramTable):
                table.sparse = value

    def forward(
        self,
        hash_ids: torch.Tensor,
        dtype: torch.dtype | None = None,
        wait: bool = True,
        adapter_names: list[str] | None = None,
    ) -> list[torch.Tensor | RowRequest]:
        """Fetches the rows of every Engram layer.

        Args:
            hash_ids: int64 `[B, L, n_engram_layers, C]`, row ids inside each layer's table.
            dtype: that rows of quantised tables, and of tables away from the model, are wanted in; None for the
                table's own, or fp32 for quantised ones. Rows of float tables beside the model have the table's.
            wait: False gives a request for rows that are on their way, see `awaited`.
            adapter_names: PEFT's, of a batch with several adapters.

        Returns:
            list of `[B, L, C * engram_head_dim]`, one per Engram layer, on the device of `hash_ids`.

        Raises:
            IndexError: an id beyond the last row. ValueError: a table that was not loaded; or adapters in one batch
                that have table rows.
            RuntimeError: a file that was truncated, replaced or removed since it was opened.
        """
        self.check_adapter_names(adapter_names)
        if self.adapter_in_place is not None:
            self._watch()
        for index, table in enumerate(self.tables):
            # PEFT's copy of a whole table, for `modules_to_save`, passes the table's attributes on.
            if not hasattr(table, "placement"):
                raise TypeError(
                    f"`tables.{index}` is a {type(table).__name__}: adapters on a table have no effect. Leave tables "
                    "out of `target_modules`, and train their rows (`unfreeze_tables(model)`)."
                )
        rows = [None] * len(self.tables)
        if any(table.placement == "disk" for table in self.tables):
            rows = self._request(hash_ids, dtype)
        for index, table in enumerate(self.tables):
            if rows[index] is None:
                rows[index] = self._lookup(table, hash_ids[:, :, index], dtype)
        return [awaited(item) for item in rows] if wait else rows

    def _lookup(
        self, table: EngramTable, row_ids: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor | RowRequest:
        """Rows of a table in memory."""
        weight, scale = table.weight, table.scale
        if weight is None:
            raise ValueError("An Engram table was not loaded: use `from_pretrained`, or the placement 'device'.")
        if table.placement == "device" and scale is None:
            return table(row_ids)

        trains = weight.requires_grad and torch.is_grad_enabled()
        if table.placement == "cpu" and row_ids.is_cuda and not trains and not torch.compiler.is_compiling():
            return RowRequest(lambda ids: table(ids, dtype), row_ids.device, False, row_ids)
        return table(row_ids, dtype)

    @torch.compiler.disable
    def _request(self, hash_ids: torch.Tensor, dtype: torch.dtype | None) -> list[RowRequest | None]:
        """Starts to read the rows of all tables on disk."""
        device, host_ids = hash_ids.device, hash_ids.cpu()
        requests = self.prefetched.take(host_ids) or self._read(host_ids, device)

        def request(disk: DiskRequest) -> RowRequest:
            return RowRequest(lambda: disk.gather(device, dtype), device, True)

        return [None if disk is None else request(disk) for disk in requests]

    def _read(self, host_ids: torch.Tensor, device: torch.device) -> list[DiskRequest | None]:
        requests = []
        for index, table in enumerate(self.tables):
            if table.placement == "disk" and table.disk is None:
                raise ValueError(
                    f"The table of Engram layer {self.config.engram_layer_ids[index]} is to be on disk, but no file "
                    "is open: load the model with `from_pretrained`."
                )
            on_disk = table.placement == "disk"
            requests.append(DiskRequest(table.disk, host_ids[:, :, index], device) if on_disk else None)
        return requests

    @torch.compiler.disable
    def prefetch(self, hash_ids: torch.Tensor) -> None:
        """Starts to read the rows that a later forward with these hash ids takes; returns at once.

        Tables in memory need none. Of calls whose forward never comes, the last few are kept.

        Args:
            hash_ids: int64 `[B, L, n_engram_layers, C]`.

        Raises:
            as `forward`.
        """
        if any(table.placement == "disk" for table in self.tables):
            # The forward may come after the caller has written other ids into the tensor.
            host_ids = hash_ids.to("cpu", copy=True)
            self.prefetched.put(host_ids, self._read(host_ids, self.home.device))

    def to_placement(self, placement: str | list[str]) -> "EngramMemory":
        """Moves the tables, and writes the new placement to the config.

        Args:
            placement: `"device"` (beside the model), `"cpu"` (host memory) or `"disk"` (the file that the table was
                loaded from or last saved to), for all tables or a list with one for each Engram layer.

        Raises:
            ValueError: not a placement; or to disk, where the file does not hold the table as it is now: it is
                compared, and nothing is ever lost.
        """
        values = placement_of_each(placement, len(self.tables))
        if "disk" in values:
            self.check_without_rows("moved to disk")
        self.prefetched.clear()
        # All or none: what can go wrong goes wrong before the first one moves.
        moves = [
            table.to_placement(value, self.home.device, self.home.dtype)
            for table, value in zip(self.tables, values, strict=True)
        ]
        for move in moves:
            move()
        self.config.engram_placement = placement if isinstance(placement, str) else values
        return self

    def quantize_tables(self) -> list[dict[str, float]]:
        """Turns float tables in memory into fp8: e4m3 rows, and for every `engram_scale_block_size` columns of a row
        the smallest power of two as scale (e8m0) with which the block fits. From then on they are frozen.

        Returns:
            for each Engram layer `max_abs_error`, `rms_error`, and `relative_rms_error` (over the rms of the table).

        Raises:
            ValueError: a table is on disk or quantised already, holds infinite numbers or NaN, or the block size does
                not divide the row.
        """
        self.check_without_rows("quantised")
        block_size = self.config.engram_scale_block_size
        for table in self.tables:
            table.check_can_quantise(block_size)
        # All or none: an infinite number may be in the last one.
        quantised = [table.quantised(block_size) for table in self.tables]
        for table, (weight, scale, _) in zip(self.tables, quantised, strict=True):
            table.set_weights(weight, scale)
        return [errors for *_, errors in quantised]
