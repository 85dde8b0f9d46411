"""Tables of which each process holds a part (FSDP2): tensors of `torch.distributed.tensor`, sharded by rows.

What is done to a row needs that row alone, so a step works on the part that is here. What holds for all of a table,
whether its gradient is finite, is asked of all processes that hold parts of it. A tensor that is not sharded is its
own part, of which no other process is asked.
"""

from collections.abc import Iterable

import torch


try:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:  # a torch without torch.distributed
    DTensor = None


def is_sharded(tensor: torch.Tensor) -> bool:
    return DTensor is not None and isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this process holds: the same memory. Call it without gradients."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def check_sharded_by_rows(table: torch.Tensor) -> None:
    """Refuses tables of which a process has parts of rows, since a row's second moment is the mean over it.

    Raises:
        ValueError: sharded otherwise than by rows, or twice.
    """
    if not is_sharded(table):
        return
    sharded = [placement for placement in table.placements if not placement.is_replicate()]
    if len(sharded) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in sharded):
        raise ValueError(
            f"A table of {list(table.shape)} is sharded as {table.placements}, but the optimizer needs whole rows: "
            "shard it by rows, in one dimension of the mesh, as `fully_shard` does by itself."
        )


def first_row(table: torch.Tensor) -> int:
    """The number, in the whole table, of the first row that is here."""
    for dim, placement in enumerate(table.placements if is_sharded(table) else ()):
        if placement.is_shard():
            size, rank = table.device_mesh.size(dim), table.device_mesh.get_local_rank(dim)
            return min(rank * -(-len(table) // size), len(table))
    return 0


def zeros_beside(table: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros `[rows]` or `[rows, d]`, each row of them where the table's is."""
    if not is_sharded(table):
        return torch.zeros(shape, dtype=dtype, device=table.device)
    local = local_part(table)
    zeros = torch.zeros((len(local), *shape[1:]), dtype=dtype, device=local.device)
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    return DTensor.from_local(
        zeros, table.device_mesh, table.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def moved_beside(saved: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a whole or sharded `[rows, ...]`, each row of it where the table's is.

    Raises:
        ValueError: sharded over other processes.
    """
    if is_sharded(saved) and (not is_sharded(table) or saved.device_mesh != table.device_mesh):
        raise ValueError(
            f"`state_dict` is sharded over {saved.device_mesh}, the table "
            + (f"over {table.device_mesh}" if is_sharded(table) else "is not")
            + ": save and load it with `torch.distributed.checkpoint.state_dict`, which sees to that."
        )
    saved = saved.to(device=table.device, dtype=dtype, copy=True)
    if not is_sharded(table):
        return saved
    if is_sharded(saved):
        return saved.redistribute(placements=table.placements)
    # Each process has all of it.
    return distribute_tensor(saved, table.device_mesh, table.placements, src_data_rank=None)


def holds_everywhere(holds: bool, tables: Iterable[torch.Tensor]) -> bool:
    """Whether it holds in all processes that have parts of these tables. All of them must ask."""
    groups = {}
    for table in tables:
        if is_sharded(table):
            mesh = table.device_mesh
            groups |= {group.group_name: (group, mesh.device_type) for group in mesh.get_all_groups()}
    for _, (group, device) in sorted(groups.items()):
        flag = torch.tensor(int(holds), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        holds = bool(flag)
    return holds
