"""What n-grams may look at, from the masks that a forward gets: which tokens are text, and where documents begin."""

import torch


def assert_holds(holds: torch.Tensor, message: str) -> None:
    """Raises a ValueError with `message` unless all of `holds` (bool) are true. On an accelerator, and in what is
    compiled, it is asserted on the device (as a RuntimeError), so that nothing waits for it."""
    if holds.is_meta:
        return
    if holds.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(holds.all(), message)
    elif not holds.all():
        raise ValueError(message)


def live_tokens(
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    past_length: int | torch.Tensor = 0,
) -> torch.Tensor | None:
    """bool `[B, L]`, False at the positions that n-grams may not look at or past; None if there are none.

    Args:
        shape: (B, L) of the tokens of this forward.
        attention_mask: `[B, >= L]` with zeros at padding, or None. One of more than L columns covers the cached tokens
            too, and may go on to the end of a cache that is not full yet.
        token_mask: bool `[B, L]` with False at tokens that are not text, or None.
        past_length: number of tokens in the cache.
    """
    live = None
    if attention_mask is not None:
        length = attention_mask.shape[1] if attention_mask.ndim == 2 else -1
        if attention_mask.ndim != 2 or attention_mask.shape[0] != shape[0] or length < shape[1]:
            raise ValueError(
                f"`attention_mask` has shape {tuple(attention_mask.shape)}, the input is {tuple(shape)}: pass [batch, "
                "length] over the cached and the new tokens, or [batch, 1, length, length] of what each may see."
            )
        if attention_mask.is_floating_point():
            assert_holds(
                attention_mask >= 0,
                "`attention_mask` of two dimensions holds numbers below zero, as masks that are added do: pass 1 at "
                "tokens and 0 at padding.",
            )
        if isinstance(past_length, torch.Tensor) and length > shape[1]:
            here = torch.arange(shape[1], device=attention_mask.device) + past_length.to(attention_mask.device)
            live = attention_mask.index_select(1, here) != 0
        elif isinstance(past_length, int) and length > past_length + shape[1]:
            live = attention_mask[:, past_length : past_length + shape[1]] != 0
        else:
            live = attention_mask[:, -shape[1] :] != 0
    if token_mask is not None:
        if tuple(token_mask.shape) != tuple(shape) or token_mask.dtype != torch.bool:
            raise ValueError(
                f"`token_mask` must be bool {tuple(shape)} (False at tokens that are not text), got "
                f"{token_mask.dtype} {tuple(token_mask.shape)}: pass `token_mask.bool()` over the tokens of this call."
            )
        live = token_mask if live is None else live & token_mask
    # On CPU it is cheaper to find out that nothing is masked; elsewhere it would wait for the device.
    if live is not None and live.device.type == "cpu" and not torch.compiler.is_compiling() and bool(live.all()):
        return None
    return live


# What a mask adds to a logit to hide a token: people write -1e4, -1e9, infinity, or a type's lowest number.
HIDING = -1e3


def parents_by_visibility(
    attention_mask: torch.Tensor,
    shape: tuple[int, int],
    past_length: int | torch.Tensor,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    """The token that each token follows, for a mask of four dimensions: of those before it, the last that it may see.

        parent(t) = max { s < t : t may attend to s in some head }, none where there is none, or at position 0
        n-gram of t = (t, parent(t), parent(parent(t)), ...)

    So in a chain the token before, also where a token sees a window only; in a tree of drafts, or with a shared
    prefix, the token before in the branch; at the first token of a document, and after padding that begins a row,
    none. Padding inside a row is passed over. What a token may see of itself and of later ones (a bidirectional mask)
    says nothing.

    Args:
        attention_mask: `[B or 1, heads or 1, L, >= past + L]`, bool (True: may attend) or added to the logits, where
            `HIDING` and less hides.
        shape: (B, L) of the tokens of this forward.
        past_length: number of tokens in the cache.
        position_ids: integer `[B or 1, L]` or None.

    Returns:
        int64 `[B, L]`: places, cached tokens counted; -1 for none.

    Raises:
        ValueError: a shape that does not fit. TypeError: a mask of integers.
    """
    batch, length = shape
    rows, _, queries, keys = attention_mask.shape
    fits = isinstance(past_length, torch.Tensor) or keys >= past_length + length
    # Not `rows not in (1, batch)`: in a compiled model, where the batch may be of any size, no number is in a tuple.
    if (rows != 1 and rows != batch) or queries != length or not fits:
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}, the input is {tuple(shape)} after "
            f"{past_length} cached tokens: pass [batch or 1, heads or 1, {length}, cached and new tokens]."
        )
    if attention_mask.dtype == torch.bool:
        visible = attention_mask.any(1)
    elif attention_mask.is_floating_point():
        visible = (attention_mask > HIDING).any(1)
    else:
        raise TypeError(
            f"`attention_mask` of four dimensions must be bool (True: may attend) or floating point (added to the "
            f"logits), got {attention_mask.dtype}: convert it with `.bool()`."
        )
    places = torch.arange(length, device=visible.device) + past_length
    columns = torch.arange(keys, device=visible.device, dtype=torch.int32)
    is_before = columns < places.unsqueeze(-1)
    parents = torch.where(visible & is_before, columns, -1).amax(-1).long()
    if position_ids is not None:
        parents = parents.masked_fill(position_ids == 0, -1)
    return parents.expand(batch, -1)


def attention_mask_as(dtype: torch.dtype, attention_mask: torch.Tensor, keeps_bool: bool) -> torch.Tensor:
    """A mask of four dimensions as attention takes it: added in `dtype`, or bool where `keeps_bool`."""
    if attention_mask.dtype == torch.bool:
        if keeps_bool:
            return attention_mask
        hidden = torch.finfo(dtype).min
        return torch.zeros_like(attention_mask, dtype=dtype).masked_fill_(~attention_mask, hidden)
    if attention_mask.dtype == dtype:
        return attention_mask
    # Another type's lowest number is infinite in this one, and a row of infinities is not a number.
    return attention_mask.to(dtype).clamp_min(torch.finfo(dtype).min)
