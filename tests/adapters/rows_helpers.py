"""What the tests of adapters with table rows share: to make them, to train them, and to compare tables."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_engram.adapters import engram_tables
from hf_engram.optim import EngramOptimizer


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", **options})


def adapted(model, **options) -> PeftModel:
    return get_peft_model(model, lora(**options))


def train(model, ids, steps: int = 3, optimizer=None) -> list[float]:
    optimizer = optimizer or EngramOptimizer(model, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits_of(model, ids) -> torch.Tensor:
    return model.eval()(input_ids=ids).logits


def tables_of(model) -> list[torch.Tensor]:
    return [table.detach().clone() for table in engram_tables(model)]


def same(tables, others) -> bool:
    """Bit for bit: zero is not minus zero."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        torch.equal(one.view(kinds[one.itemsize]), two.view(kinds[two.itemsize]))
        for one, two in zip(tables, others, strict=True)
    )
