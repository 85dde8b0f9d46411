"""What each Engram layer is worth: the loss on a text with the layer shut off."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from .trace import check_tokenizer, encode, engram_modules, evaluating, find_decoder, windows


# Positions whose logits are held at once.
LOGITS_AT_ONCE = 256


@dataclass(frozen=True)
class Ablation:
    """Loss on a text, in nats for each token that is predicted.

    Attributes:
        n_tokens (`int`): tokens that are predicted.
        loss (`float`): of the model as it is.
        without_layer (`dict[int, float]`): with one Engram layer shut off, by its index.
        without_memory (`float`): with all of them shut off.
    """

    n_tokens: int
    loss: float
    without_layer: dict[int, float]
    without_memory: float


@contextmanager
def shut_off(model: nn.Module, layer_ids: list[int]) -> Iterator[None]:
    """In the block, the Engram layers `layer_ids` let the stream pass as it is. No weight is touched.

    Raises:
        ValueError: an index is not an Engram layer's.
    """
    modules = engram_modules(find_decoder(model))
    if unknown := sorted(set(layer_ids) - set(modules)):
        raise ValueError(f"`layer_ids` names {unknown}, but the Engram layers are {sorted(modules)}.")

    def pass_on(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        return args[0] if args else kwargs["hidden_states"]

    handles = []
    try:
        for layer_id in layer_ids:
            handles += [m.register_forward_hook(pass_on, with_kwargs=True) for m in modules[layer_id]]
        yield
    finally:
        for handle in handles:
            handle.remove()


def ablate(
    model: nn.Module, tokenizer: Any, text: str, max_tokens: int | None = None, progress: bool = False
) -> Ablation:
    """The loss on a text, with each Engram layer shut off in turn, and with all of them. Held-out text tells what the
    memory is worth; text that was trained on, what it has learned by heart.

    The model is left as it was, also when an error ends the run.

    Args:
        model: an Engram model with a language modelling head.
        tokenizer, text, max_tokens, progress: as [`trace_memory`] takes them; each window's first token is given.

    Raises:
        ValueError: the model has no Engram layers or no such head, the tokenizer is another's, or the text has fewer
            than two tokens.
    """
    layer_ids = list(find_decoder(model).config.engram_layer_ids)
    if model.get_output_embeddings() is None:
        raise ValueError(f"`model` ({type(model).__name__}) has no language modelling head, hence no loss on a text.")
    ids, _ = encode(tokenizer, text, max_tokens)
    check_tokenizer(model, tokenizer)
    if len(ids) < 2:
        raise ValueError(f"`text` has {len(ids)} token: a loss needs at least two.")
    off = [[], *([layer_id] for layer_id in layer_ids), layer_ids]
    losses = []
    with evaluating(model), tqdm(total=len(off), desc="ablating", unit="run", disable=not progress) as bar:
        for layers in off:
            with shut_off(model, layers):
                losses.append(_loss(model, torch.from_numpy(ids)))
            bar.update()
    loss, *others, without_memory = losses
    cuts = windows(model, len(ids))
    return Ablation(len(ids) - len(cuts), loss, dict(zip(layer_ids, others, strict=True)), without_memory)


def _loss(model: nn.Module, ids: torch.Tensor) -> float:
    """Mean loss on token ids int64 `[L]`."""
    decoder, head = find_decoder(model), model.get_output_embeddings()
    device = decoder.engram_memory.home.device
    losses = []
    for window in windows(model, len(ids)):
        batch = ids[None, window].to(device)
        hidden_states = decoder(input_ids=batch, use_cache=False).last_hidden_state[0, :-1]
        # The logits of all positions would be far larger than everything else.
        for states, targets in zip(
            hidden_states.split(LOGITS_AT_ONCE), batch[0, 1:].split(LOGITS_AT_ONCE), strict=True
        ):
            losses += F.cross_entropy(head(states).float(), targets.to(states.device), reduction="none").tolist()
    return math.fsum(losses) / len(losses)
