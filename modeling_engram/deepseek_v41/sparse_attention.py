"""Attention over a window and chosen groups, with a sink.

    o_h = sum_i exp(s_hi) v_i / (sum_i exp(s_hi) + exp(sink_h)),   s_hi = <q_h, v_i> d^-1/2

over the token's own keys, which are the values: those of the last W tokens of its document, itself included, and the
chosen entries. In fp32; the probabilities are rounded to the dtype of the values for the product with them, not for
the denominator. Queries go in chunks, so memory is independent of the length, and time grows linearly with it.
"""

import torch


QUERIES_AT_A_TIME = 128


def sparse_attention(
    queries: torch.Tensor,
    window_keys: torch.Tensor,
    index: torch.Tensor,
    window: int,
    sinks: torch.Tensor,
    entries: torch.Tensor | None = None,
    choice: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Args:
        queries: `[B, L, n, d]`.
        window_keys: `[B, K + L, d]` with K >= W - 1, the last L of them the tokens' own.
        index: int64 `[B, L]`, number of each token in its document.
        window: W.
        sinks: fp32 `[n]`.
        entries: `[B, T, d]`. choice: int64 `[B, L, k]`, slots of them, -1 for none; or both None.

    Returns:
        `[B, L, n, d]` in the dtype of the queries.
    """
    length, size = queries.shape[1], queries.shape[-1]
    first = window_keys.shape[1] - length - (window - 1)
    outputs = []
    for at in range(0, length, QUERIES_AT_A_TIME):
        end = min(at + QUERIES_AT_A_TIME, length)
        part = queries[:, at:end].float()
        keys = window_keys[:, first + at : first + end + window - 1].float()
        distance = torch.arange(window - 1, end - at + window - 1, device=queries.device).unsqueeze(1)
        distance = distance - torch.arange(end - at + window - 1, device=queries.device)
        seen = (distance >= 0) & (distance < window) & (distance <= index[:, at:end, None])
        batch, count, heads, _ = part.shape
        logits = (part.flatten(1, 2) @ keys.transpose(1, 2)).view(batch, count, heads, keys.shape[1])
        logits = logits.masked_fill(~seen.unsqueeze(2), -torch.inf)
        if choice is not None:
            chosen = choice[:, at:end]
            picked = entries.gather(1, chosen.clamp_min(0).flatten(1).unsqueeze(-1).expand(-1, -1, size))
            picked = picked.view(batch, count, choice.shape[-1], size).float()
            more = (part @ picked.transpose(2, 3)).masked_fill((chosen < 0).unsqueeze(2), -torch.inf)
            logits = torch.cat([logits, more], -1)
        logits = logits * size**-0.5
        # Any number in its place gives the same output, so no gradient passes here.
        largest = logits.amax(-1, keepdim=True).detach()
        weights = (logits - largest).exp()
        total = weights.sum(-1, keepdim=True) + (sinks.float()[:, None] - largest).exp()
        weights = weights.to(queries.dtype).float()
        output = (weights[..., : keys.shape[1]].flatten(1, 2) @ keys).view(batch, count, heads, size)
        if choice is not None:
            output = output + weights[..., keys.shape[1] :] @ picked
        outputs.append((output / total).to(queries.dtype))
    return torch.cat(outputs, 1)
