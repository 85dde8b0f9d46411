"""The whole model against a plain float64 loop, written from the design page alone: no code of the package."""

import math

import numpy as np
import pytest
import torch

from hf_engram import EngramModel


def rms_norm(x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x, positions, theta):
    """Rotary embedding of `x` [heads, L, head_dim], halves layout."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(h, weights, config, live):
    """One sequence [L, D]; `live` bool [L], False at padding."""
    length, head_dim = h.shape[0], config.head_dim
    positions = torch.arange(length)

    def heads(name, count):
        return (h @ weights[f"self_attn.{name}_proj.weight"].T).view(length, count, head_dim).transpose(0, 1)

    query = heads("q", config.num_attention_heads)
    key, value = heads("k", config.num_key_value_heads), heads("v", config.num_key_value_heads)
    groups = config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    query, key = rotate(query, positions, theta), rotate(key, positions, theta)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    out = torch.zeros_like(query)
    for t in range(length):
        seen = [s for s in range(t + 1) if live[s] or s == t]
        for head in range(config.num_attention_heads):
            scores = torch.stack([query[head, t] @ key[head, s] for s in seen]) / math.sqrt(head_dim)
            out[head, t] = sum(p * value[head, s] for p, s in zip(scores.softmax(0), seen, strict=True))
    return out.transpose(0, 1).reshape(length, -1) @ weights["self_attn.o_proj.weight"].T


def mlp(h, weights):
    gate = h @ weights["mlp.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (h @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T


def mixes(x, weights, name, config):
    """`x` [H, D] of one token."""
    copies = config.hc_mult
    fn, base, scale = (weights[f"{name}.{part}"] for part in ("fn", "base", "scale"))
    flat = x.flatten()
    z = (fn @ flat) / torch.sqrt((flat * flat).mean() + config.rms_norm_eps)
    pre = torch.sigmoid(z[:copies] * scale[0] + base[:copies]) + config.hc_eps
    post = 2 * torch.sigmoid(z[copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = (z[2 * copies :] * scale[2] + base[2 * copies :]).view(copies, copies).softmax(-1) + config.hc_eps
    comb = comb / (comb.sum(0, keepdim=True) + config.hc_eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        comb = comb / (comb.sum(0, keepdim=True) + config.hc_eps)
    return pre, post, comb


def sublayer(x, pre, weights, hc_name, norm_name, config, run):
    """`x` [L, H, D] to the stream after the sublayer, and the `pre` [L, H] for the next one."""
    if config.hc_mult == 1:
        h = rms_norm(x[:, 0], config.rms_norm_eps) * weights[f"{norm_name}.weight"]
        return x + run(h)[:, None], None
    collapsed = x[:, 0] if pre is None else (pre[..., None] * x).sum(1)
    y = run(rms_norm(collapsed, config.rms_norm_eps) * weights[f"{norm_name}.weight"])
    out, new_pre = torch.zeros_like(x), []
    for t in range(x.shape[0]):
        pre_t, post, comb = mixes(x[t], weights, hc_name, config)
        new_pre.append(pre_t)
        for j in range(config.hc_mult):
            out[t, j] = post[j] * y[t] + sum(comb[i, j] * x[t, i] for i in range(config.hc_mult))
    return out, torch.stack(new_pre)


def hash_columns(ids, live, t, layer, config, compressed):
    """Rows of the n-grams that end at `t`, in Python integers that wrap at 64 bits."""
    rng = np.random.default_rng(10007 * config.engram_layer_ids[layer])
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = [2 * int(m) + 1 for m in rng.integers(0, bound, (config.engram_max_ngram_size,), dtype=np.int64)]
    n_columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    primes, candidate = [], config.engram_vocab_size
    while len(primes) < n_columns * (layer + 1):
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
        candidate += 1
    primes = primes[n_columns * layer :]
    pad = compressed[config.engram_pad_token_id]
    window, blocked = [], False
    for shift in range(config.engram_max_ngram_size):
        s = t - shift
        blocked = blocked or s < 0 or not live[s]
        window.append(pad if blocked else compressed[ids[s]])
    columns, mixed = [], window[0] * multipliers[0]
    for n in range(1, config.engram_max_ngram_size):
        mixed ^= window[n] * multipliers[n]
        for _ in range(config.engram_n_heads):
            columns.append(mixed % primes[len(columns)] + sum(primes[: len(columns)]))
    return columns


def engram(x, rows, weights, config, live):
    copies, dim = config.hc_mult, config.hidden_size
    kv = rows @ weights["engram.wkv.weight"].T
    out = x.clone()
    for t in range(x.shape[0]):
        if not live[t]:
            continue
        value = kv[t, copies * dim :]
        for h in range(copies):
            query = rms_norm(x[t, h], config.rms_norm_eps) * weights["engram.q_weight"][h]
            key = rms_norm(kv[t, h * dim : (h + 1) * dim], config.rms_norm_eps) * weights["engram.k_weight"][h]
            dot = (query @ key) / math.sqrt(dim)
            root = math.copysign(math.sqrt(max(abs(float(dot)), 1e-6)), float(dot))
            out[t, h] = x[t, h] + value / (1 + math.exp(-root))
    return out


def reference(model, ids, live, compressed, attended=None):
    """Logits [L, vocab] of one sequence. `live` says where Engram is; `attended` where attention is, if it differs."""
    config = model.config
    attended = live if attended is None else attended
    state = {name: value.double() for name, value in model.state_dict().items() if value.is_floating_point()}
    x = state["model.embed_tokens.weight"][ids][:, None].expand(-1, config.hc_mult, -1)
    pre = None
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if index in config.engram_layer_ids:
            layer = config.engram_layer_ids.index(index)
            columns = [hash_columns(ids, live, t, layer, config, compressed) for t in range(len(ids))]
            table = state[f"model.engram_memory.tables.{layer}.weight"]
            x = engram(x, table[torch.tensor(columns)].flatten(1), weights, config, live)
        x, pre = sublayer(
            x,
            pre,
            weights,
            "attn_hc",
            "input_layernorm",
            config,
            lambda h, w=weights: attention(h, w, config, attended),
        )
        x, pre = sublayer(
            x, pre, weights, "mlp_hc", "post_attention_layernorm", config, lambda h, w=weights: mlp(h, w)
        )
    final = x[:, 0] if pre is None else (pre[..., None] * x).sum(1)
    return rms_norm(final, config.rms_norm_eps) * state["model.norm.weight"] @ state["lm_head.weight"].T


@pytest.mark.parametrize("n_padding", [0, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"hc_mult": 4},
        {"hc_mult": 2, "engram_layer_ids": [1], "engram_max_ngram_size": 2, "hc_sinkhorn_iters": 1},
        {"hc_mult": 1, "engram_max_ngram_size": 3},
        {"hc_mult": 3, "engram_layer_ids": []},
        {"hc_mult": 1, "engram_layer_ids": []},
    ],
    ids=str,
)
def test_model_equals_plain_loop(lively_model, random_ids, fields, n_padding):
    """Logits of the fp32 model are those of the fp64 loop, also with padding on the left."""
    model = lively_model(**fields)
    ids = random_ids(1, 9, seed=1)
    ids[:, :n_padding] = 0
    mask = torch.ones_like(ids)
    mask[:, :n_padding] = 0
    position_ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits[0]
    live = mask[0].bool().tolist()
    expected = reference(model, ids[0].tolist(), live, list(range(model.config.vocab_size)))
    scale = expected.abs().max()
    assert ((logits.double() - expected)[n_padding:].abs().max() / scale).item() < 1e-5


@pytest.mark.parametrize("at", [4, 0])
def test_token_mask_equals_plain_loop(lively_model, random_ids, at):
    """A masked token is attended to, but Engram neither reads nor writes there."""
    model = lively_model()
    ids = random_ids(1, 9, seed=2)
    token_mask = torch.ones(1, 9, dtype=torch.bool)
    token_mask[0, at] = False
    with torch.no_grad():
        logits = model(input_ids=ids, token_mask=token_mask).logits[0]
    vocabulary = list(range(model.config.vocab_size))
    expected = reference(model, ids[0].tolist(), token_mask[0].tolist(), vocabulary, attended=[True] * 9)
    assert ((logits.double() - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_token_map_equals_plain_loop(lively_model, random_ids, stand_in_tokenizer):
    """With a token map bound, n-grams are hashed in compressed ids."""
    model = lively_model(engram_compressed_vocab_size=40, engram_pad_token_id=5)
    token_map = (np.arange(model.config.vocab_size) * 7) % 40
    model.bind_tokenizer(stand_in_tokenizer(model.config, token_map))
    ids = random_ids(1, 8, seed=3)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    expected = reference(model, ids[0].tolist(), [True] * 8, token_map.tolist())
    assert ((logits.double() - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_engram_and_copies_matter_in_the_lively_model(lively_model, random_ids):
    """The helper's models are worth testing: n-grams and the copies' mixing change the logits by a lot."""
    model = lively_model(seed=1)
    ids = random_ids(1, 9)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        for mask in (torch.zeros(1, 9, dtype=torch.bool), torch.ones(1, 9, dtype=torch.bool)):
            mask[0, -1] = False
            without = model(input_ids=ids, token_mask=mask).logits
            assert (logits - without)[:, -1].abs().max() > 0.1 * logits.abs().max()
        for layer in model.model.layers:
            layer.attn_hc.scale.zero_()
            layer.mlp_hc.scale.zero_()
        assert (logits - model(input_ids=ids).logits).abs().max() > 0.1 * logits.abs().max()


def test_decoder_layer_hands_pre_on(lively_model, random_ids):
    """The collapsed state that a layer returns is its stream collapsed with the `pre` that it returns."""
    model = lively_model(EngramModel)
    calls = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: calls.append((args, output)))
    with torch.no_grad():
        model(input_ids=random_ids(2, 5))
    first_args = calls[0][0]
    assert first_args[2] is None
    assert torch.equal(first_args[1], first_args[0].unsqueeze(2).expand_as(first_args[1]))
    for (_, output), following in zip(calls, [*calls[1:], None], strict=True):
        hidden_states, stream, pre = output
        assert torch.allclose(hidden_states, (pre.unsqueeze(-1) * stream).sum(2), atol=1e-5)
        if following is not None:
            assert all(a is b for a, b in zip(output, following[0][:3], strict=True))
