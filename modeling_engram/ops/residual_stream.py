"""The multi-copy residual stream (manifold-constrained hyper-connections, as DeepSeek-V4.1 passes it on).

A sublayer (attention or MLP) reads one vector and writes one vector, while the stream carries H copies. Three small
sets of weights, computed from the stream that enters the sublayer, tie them together:

- `pre` [H] collapses the copies to one vector, for the *next* sublayer (so the collapse needs nothing new);
- `post` [H] says how much of the sublayer's output each copy gets;
- `comb` [H, H] mixes the copies among themselves; Sinkhorn normalisation makes it nearly doubly stochastic.

`stream_mixes` computes the weights; `stream_update` expands the stream and collapses it again in one pass, and
`stream_expand` and `stream_collapse` are its two halves.
"""

from .stream_mixes import stream_mixes
from .stream_update import stream_collapse, stream_expand, stream_update


__all__ = ["stream_collapse", "stream_expand", "stream_mixes", "stream_update"]
