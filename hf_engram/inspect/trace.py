"""What the memory does with a text: the gate at every token, how much is written, and which n-grams were looked up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from ..modeling_engram.ops.engram_gate import gate_and_value
from .pieces import token_pieces


@dataclass(frozen=True)
class LayerTrace:
    """What one Engram layer did with L tokens, in H copies of the stream.

    Attributes:
        layer_id (`int`): index of the decoder layer.
        gates (`np.ndarray`): fp32 `[L, H]`, in (0, 1); NaN at tokens that are not text.
        shares (`np.ndarray`): fp32 `[L, H]`, the norm of what was written (`gate * value`) over the norm of the stream
            that the layer left. Above 1 where the two were opposed.
        value_norms (`np.ndarray`): fp32 `[L]`, norm of the value, before the gate.
        size_shares (`np.ndarray`): fp32 `[L, N - 1]`, how much of the value comes from the rows of each n-gram size:
            that part of the value, projected on the value, over its norm. They add up to 1, and one may be negative.
            Zeros where the value is zero.
        row_ids (`np.ndarray`): int64 `[L, C]`, rows of the layer's table; columns ordered by n-gram size, then head.
        primes (`np.ndarray`): int64 `[C]`, the rows that each column can choose from.
    """

    layer_id: int
    gates: np.ndarray
    shares: np.ndarray
    value_norms: np.ndarray
    size_shares: np.ndarray
    row_ids: np.ndarray
    primes: np.ndarray


@dataclass(frozen=True)
class MemoryTrace:
    """A text as a model's memory sees it.

    Attributes:
        name (`str`): of the model.
        token_ids, compressed_ids (`np.ndarray`): int64 `[L]`; what is hashed are the compressed ids.
        pieces (`list[str]`): the text of each token; a part of a character as its bytes, such as `\\xf0\\x9f`.
        reach (`np.ndarray`): int64 `[L]`, how many tokens an n-gram may hold that ends here: back to the start of the
            window, or to the token after the last one that is not text. 0 at tokens that are not text.
        window_starts (`list[int]`): where the model began to read anew, since it reads `max_position_embeddings`
            tokens at most.
        n_cut (`int`): tokens of the text beyond `max_tokens`, which were left out.
        max_ngram_size, n_heads (`int`): N and K.
        pad_id (`int`): the compressed id that stands where an n-gram has no token.
        layers (`list[LayerTrace]`): one for each Engram layer.
    """

    name: str
    token_ids: np.ndarray
    compressed_ids: np.ndarray
    pieces: list[str]
    reach: np.ndarray
    window_starts: list[int]
    n_cut: int
    max_ngram_size: int
    n_heads: int
    pad_id: int
    layers: list[LayerTrace]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sizes(self) -> range:
        """The n-gram sizes that are hashed: 2 to N."""
        return range(2, self.max_ngram_size + 1)

    def layer(self, layer_id: int) -> LayerTrace:
        """The trace of the Engram layer in decoder layer `layer_id`."""
        for layer in self.layers:
            if layer.layer_id == layer_id:
                return layer
        known = [layer.layer_id for layer in self.layers]
        raise ValueError(f"`layer_id` is {layer_id}, but Engram layers are {known}.")

    def ngram(self, position: int, size: int) -> list[str]:
        """The pieces of the n-gram of `size` that ends at `position`: fewer than `size` where look-back stops."""
        length = min(size, int(self.reach[position]))
        return self.pieces[position + 1 - length : position + 1]

    def ngram_ids(self, size: int) -> np.ndarray:
        """int64 `[L, size]`: what is hashed for the n-gram that ends at each token, the oldest id first; `pad_id`
        where look-back has stopped."""
        shifts = np.arange(size - 1, -1, -1)
        at = np.arange(len(self))[:, None] - shifts
        return np.where(shifts < self.reach[:, None], self.compressed_ids[np.maximum(at, 0)], self.pad_id)


def find_decoder(model: nn.Module) -> nn.Module:
    """The decoder (an `EngramModel`, of whichever copy of the code) inside `model`, whatever wraps it.

    Raises:
        ValueError: there is none, or it has no Engram layers.
    """
    for module in model.modules():
        if hasattr(module, "engram_memory") and hasattr(module, "engram_hasher") and hasattr(module, "layers"):
            if module.engram_memory is None:
                raise ValueError("`model` has no Engram layers (`engram_layer_ids` is []): nothing to inspect.")
            return module
    raise ValueError(f"`model` is a {type(model).__name__} without an Engram decoder: there is nothing to inspect.")


def engram_modules(decoder: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that may compute each Engram layer, by its index: several where PEFT keeps a copy beside it."""

    def is_layer(module: nn.Module) -> bool:
        # Its own, not what a wrapper passes on.
        return "wkv" in module._modules and "q_weight" in module._parameters

    layer_ids = decoder.config.engram_layer_ids
    return {index: [m for m in decoder.layers[index].engram.modules() if is_layer(m)] for index in layer_ids}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In the block, the model is in evaluation mode and takes no gradients; afterwards each module is in its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def encode(tokenizer: Any, text: str, max_tokens: int | None = None) -> tuple[np.ndarray, int]:
    """The text's token ids, int64 `[L]`, and how many more there were.

    Raises:
        ValueError: the tokenizer is none with a token map, the text has no tokens, or `max_tokens` is below 1.
    """
    if not hasattr(tokenizer, "token_map"):
        raise ValueError(
            f"`tokenizer` is a {type(tokenizer).__name__}, which has no token map: load it from the model's folder."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` must be at least 1, got {max_tokens}.")
    ids = np.array(tokenizer(text, return_hash_ids=False, verbose=False)["input_ids"], dtype=np.int64)
    if not text or not len(ids):
        raise ValueError(f"`text` ({text[:20]!r}) has no tokens: give one that is not empty.")
    kept = ids[:max_tokens]
    return kept, len(ids) - len(kept)


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Raises ValueError unless the model hashes as the tokenizer says."""
    theirs = find_decoder(model).engram_hasher.token_map.cpu().numpy()
    ours = tokenizer.token_map
    if len(ours) > len(theirs) or not np.array_equal(theirs[: len(ours)], ours):
        raise ValueError(
            f"The token map of `tokenizer` ({len(ours)} ids) is not the model's ({len(theirs)} ids): load the "
            "tokenizer from the model's folder."
        )


def windows(model: nn.Module, length: int) -> list[slice]:
    """Cuts `length` tokens into as few pieces as the model can read, each of which it reads by itself."""
    size = find_decoder(model).config.max_position_embeddings
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def trace_memory(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    max_tokens: int | None = None,
    token_mask: np.ndarray | None = None,
    name: str = "model",
    progress: bool = False,
) -> MemoryTrace:
    """Reads a text and records what every Engram layer does at every token.

    Gates are those of the forward itself: they are computed from the stream that enters the layer and the keys that
    the layer has made, by the operation's own formula. The model is left as it was.

    Args:
        model: an Engram model, from the package or loaded with `trust_remote_code`, bare or with any head.
        tokenizer: the model's own.
        text (`str`): longer ones than `max_position_embeddings` are read in several pieces, each by itself.
        max_tokens (`int`, *optional*): most tokens to read; the rest is left out.
        token_mask (`np.ndarray`, *optional*): bool `[L]`, False at tokens that are not text to the memory.
        name (`str`): how to call the model.
        progress (`bool`): whether to show a progress bar.

    Raises:
        ValueError: the model has no Engram layers, the tokenizer is another's, or the text has no tokens.
    """
    decoder = find_decoder(model)
    ids, n_cut = encode(tokenizer, text, max_tokens)
    check_tokenizer(model, tokenizer)
    if token_mask is not None and (token_mask.shape != ids.shape or token_mask.dtype != bool):
        raise ValueError(f"`token_mask` must be bool {ids.shape}, got {token_mask.dtype} {token_mask.shape}.")
    live = np.ones(len(ids), dtype=bool) if token_mask is None else token_mask

    config, hasher = decoder.config, decoder.engram_hasher
    device = decoder.engram_memory.home.device
    recorder = _Recorder(decoder)
    pieces = windows(model, len(ids))
    row_ids = []
    with evaluating(model), recorder:
        for window in tqdm(pieces, desc="reading", unit="window", disable=not progress):
            batch = torch.from_numpy(ids[None, window]).to(device)
            mask = None if token_mask is None else torch.from_numpy(live[None, window]).to(device)
            row_ids.append(decoder.compute_hash_ids(batch, token_mask=mask)[0].cpu().numpy())
            decoder(input_ids=batch, token_mask=mask, use_cache=False)
    rows, primes = np.concatenate(row_ids), hasher.primes.flatten(1).cpu().numpy()
    layers = [
        LayerTrace(layer_id, **recorder.result(layer_id, live), row_ids=rows[:, index], primes=primes[index])
        for index, layer_id in enumerate(config.engram_layer_ids)
    ]
    token_map = hasher.token_map.cpu().numpy().astype(np.int64)
    return MemoryTrace(
        name=name,
        token_ids=ids,
        compressed_ids=token_map[ids],
        pieces=token_pieces(tokenizer, ids),
        reach=_reach(live, [window.start for window in pieces]),
        window_starts=[window.start for window in pieces],
        n_cut=n_cut,
        max_ngram_size=config.engram_max_ngram_size,
        n_heads=config.engram_n_heads,
        pad_id=int(token_map[config.engram_pad_token_id]),
        layers=layers,
    )


def _reach(live: np.ndarray, starts: list[int]) -> np.ndarray:
    """int64 `[L]`: the number of tokens since the last one that is not text, or since the start of the window."""
    at = np.arange(len(live))
    before_first = np.where(live, -1, at)
    before_first[starts] = np.maximum(before_first[starts], np.array(starts) - 1)
    return at - np.maximum.accumulate(before_first)


class _Recorder:
    """Hooks on the Engram layers of a decoder, which keep what they compute; a context manager."""

    def __init__(self, decoder: nn.Module) -> None:
        self.modules = engram_modules(decoder)
        self.n_sizes = decoder.config.engram_max_ngram_size - 1
        self.records: dict[int, list[tuple[torch.Tensor, ...]]] = {index: [] for index in self.modules}
        self.handles: list[Any] = []

    def __enter__(self) -> "_Recorder":
        for index, modules in self.modules.items():
            for engram in modules:
                self._watch(index, engram)
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _watch(self, index: int, engram: nn.Module) -> None:
        streams: list[torch.Tensor] = []

        def on_stream(module: nn.Module, args: tuple, kwargs: dict) -> None:
            streams.append(args[0] if args else kwargs["hidden_states"])

        def on_keys(wkv: nn.Module, args: tuple, kv: torch.Tensor) -> None:
            # In here, the layer's weights are where it computes, also if they are offloaded in between.
            stream = streams.pop()
            gate, value = gate_and_value(stream, kv, engram.q_weight, engram.k_weight, engram.eps)
            written = gate.unsqueeze(-1) * value.unsqueeze(-2)
            share = written.norm(dim=-1) / (stream.to(written.dtype) + written).norm(dim=-1)
            # Nothing written into nothing.
            share = torch.where(written.norm(dim=-1) == 0, 0, share)
            parts = self._parts(wkv, args[0], value)
            self.records[index].append(tuple(t[0].float().cpu() for t in (gate, share, value.norm(dim=-1), parts)))

        self.handles.append(engram.register_forward_pre_hook(on_stream, with_kwargs=True))
        self.handles.append(engram.wkv.register_forward_hook(on_keys))

    def _parts(self, wkv: nn.Module, rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[B, L, N - 1]`: the parts of the value that come from each n-gram size, projected on it."""
        dim = value.shape[-1]
        square = value.square().sum(-1)
        shares = []
        # The projection has no bias, so the parts add up. Its own forward, which calls no hook.
        for columns in torch.arange(rows.shape[-1], device=rows.device).chunk(self.n_sizes):
            alone = torch.zeros_like(rows)
            alone[..., columns] = rows[..., columns]
            part = wkv.forward(alone)[..., -dim:].to(value.dtype)
            shares.append(torch.where(square == 0, 0, (part * value).sum(-1) / square))
        return torch.stack(shares, dim=-1)

    def result(self, index: int, live: np.ndarray) -> dict[str, np.ndarray]:
        names = ("gates", "shares", "value_norms", "size_shares")
        if not self.records[index]:
            raise RuntimeError(
                f"Engram layer {index} computed nothing that could be seen: a compiled model runs no hooks. Inspect "
                "it before `torch.compile`."
            )
        parts = (torch.cat(part).numpy() for part in zip(*self.records[index], strict=True))
        values = dict(zip(names, parts, strict=True))
        for name, array in values.items():
            array[~live] = np.nan if name == "gates" else 0
        return values
