"""What n-grams may look at, from the masks that a forward gets: which tokens are text, and where documents begin."""

import torch

from ..tokenization.ngram_hashing import document_starts


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
                "length] over the cached and the new tokens."
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
                f"`token_mask` must be bool {tuple(shape)}, got {token_mask.dtype} {tuple(token_mask.shape)}."
            )
        live = token_mask if live is None else live & token_mask
    # On CPU it is cheaper to find out that nothing is masked; elsewhere it would wait for the device.
    if live is not None and live.device.type == "cpu" and not torch.compiler.is_compiling() and bool(live.all()):
        return None
    return live


def positions_by_visibility(
    attention_mask: torch.Tensor,
    shape: tuple[int, int],
    past_length: int | torch.Tensor,
    position_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Positions that restart wherever a token may not attend to the one before it, for a mask of four dimensions.

    Such a mask says by itself where a document or the padding ends, also where `position_ids` do not.

    Args:
        attention_mask: `[B or 1, heads or 1, L, >= past + L]`, bool (True: may attend) or added to the logits.
        shape: (B, L) of the tokens of this forward.
        past_length: number of tokens in the cache.
        position_ids: integer `[B or 1, L]` or None; where they restart, these do, too.

    Returns:
        int64 `[B, L]`; the first is 0 only where it begins a document.
    """
    batch, length = shape
    if attention_mask.dtype == torch.bool:
        visible = attention_mask.any(1)
    else:
        visible = (attention_mask > torch.finfo(attention_mask.dtype).min / 2).any(1)
    before = torch.arange(length, device=visible.device) + past_length - 1
    sees = visible.gather(-1, before.clamp_min(0).view(1, -1, 1).expand(len(visible), -1, 1)).squeeze(-1)
    starts = (~sees & (before >= 0)).expand(batch, -1)
    if position_ids is not None:
        starts = starts | document_starts(position_ids)
    at = torch.arange(length, device=starts.device).expand(batch, -1)
    return at - at.masked_fill(~starts, -1).cummax(1).values
