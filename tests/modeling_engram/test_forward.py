"""What a Transformers user expects of a causal language model's forward, and Engram's own arguments."""

import pytest
import torch

from hf_engram import EngramForCausalLM, EngramModel


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


@pytest.fixture(scope="module")
def ids(random_ids):
    return random_ids(2, 8)


def test_loss(model, ids):
    """`labels` are shifted inside; -100 is left out; the mean runs over what is left."""
    labels = ids.clone()
    labels[0, :3] = -100
    with torch.no_grad():
        output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(output.loss, expected, atol=1e-6)
    assert model(ids).loss is None


def test_loss_with_num_items_in_batch(model, ids):
    """Gradient accumulation passes the number of items, by which the sum is divided."""
    with torch.no_grad():
        plain = model(ids, labels=ids).loss
        summed = model(ids, labels=ids, num_items_in_batch=7).loss
    assert torch.allclose(summed, plain * 14 / 7, rtol=1e-5)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4]), torch.tensor([7])], ids=str)
def test_logits_to_keep(model, ids, keep):
    """The last positions, or those named."""
    with torch.no_grad():
        full = model(ids).logits
        kept = model(ids, logits_to_keep=keep).logits
    assert torch.allclose(kept, full[:, -keep:] if isinstance(keep, int) else full[:, keep], atol=1e-5)


@pytest.mark.parametrize("copies", [1, 4])
def test_hidden_states(lively_model, ids, copies):
    """One [B, L, D] state per layer and the embedding; the last is `last_hidden_state`."""
    model = lively_model(hc_mult=copies)
    with torch.no_grad():
        output = model.model(ids, output_hidden_states=True)
        outer = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(outer.hidden_states) == 4
    assert all(state.shape == (2, 8, 32) for state in output.hidden_states)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(model.lm_head(outer.hidden_states[-1]), outer.logits)
    assert model(ids).hidden_states is None


def test_attentions(lively_model, ids):
    """Eager attention returns its weights: causal, adding up to one."""
    model = lively_model(attn_implementation="eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == 3
    for weights in attentions:
        assert weights.shape == (2, 4, 8, 8)
        assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 8), atol=1e-5)
        assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.gpu)])
def test_attention_implementations_agree(lively_model, ids, attention):
    """Every implementation computes eager's logits, with padding, too. Flex attention only on a GPU: on CPU it gives
    NaN for short sequences (torch 2.13), for a stock Llama as well."""
    device = "cuda" if attention == "flex_attention" else "cpu"
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], device=device)
    kwargs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    logits = []
    for implementation in ("eager", attention):
        model = lively_model(attn_implementation=implementation, head_dim=16).to(device)
        with torch.no_grad():
            logits.append(model(ids.to(device), **kwargs).logits)
    assert (logits[0] - logits[1])[mask.bool()].abs().max() < (1e-4 if device == "cpu" else 1e-2)


def test_attention_implementation_can_be_changed(lively_model, ids):
    """`set_attn_implementation` reaches every layer."""
    model = lively_model(attn_implementation="sdpa")
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("eager")
        assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_inputs_embeds_with_hash_ids(model, ids):
    """Embeddings beside hash ids are as good as token ids."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        actual = model(
            inputs_embeds=model.get_input_embeddings()(ids),
            hash_ids=model.compute_hash_ids(ids, mask),
            attention_mask=mask,
        ).logits
    assert torch.equal(actual, expected)


def test_inputs_embeds_alone(model, lively_model, ids):
    """Embeddings alone raise, and say what to add; a plain model takes them."""
    with pytest.raises(ValueError, match="hash_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    plain = lively_model(engram_layer_ids=[])
    with torch.no_grad():
        assert torch.equal(plain(inputs_embeds=plain.get_input_embeddings()(ids)).logits, plain(ids).logits)


def test_one_of_ids_and_embeddings(model, ids):
    """Both at once, and neither, raise."""
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(input_ids=ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="inputs_embeds"):
        model()


@pytest.mark.parametrize("hash_ids", [False, True])
@pytest.mark.parametrize("mask", ["attention_mask", "token_mask"])
def test_dead_tokens_pass_engram_bit_for_bit(model, ids, mask, hash_ids):
    """At padding and masked tokens, every Engram layer hands on the stream's own bits."""
    live = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    seen = []
    handles = [
        layer.engram.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        for layer in model.model.layers
        if layer.engram is not None
    ]
    kwargs = {mask: live if mask == "token_mask" else live.long()}
    if hash_ids:
        kwargs["hash_ids"] = model.compute_hash_ids(ids, **kwargs)
    with torch.no_grad():
        model(ids, **kwargs)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    for before, after in seen:
        assert torch.equal(before[~live], after[~live])
        assert not (before[live] == after[live]).all(-1).all(-1).any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, random_ids, side):
    """A padded sequence gets the logits that it has alone, from 2D masks of any dtype."""
    ids = random_ids(1, 6)
    with torch.no_grad():
        alone = model(ids).logits
        for dtype in (torch.long, torch.bool, torch.float):
            padding, ones = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)
            order = (lambda a, b: [a, b]) if side == "left" else (lambda a, b: [b, a])
            padded, mask = torch.cat(order(padding, ids), 1), torch.cat(order(padding, ones), 1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            logits = model(padded, attention_mask=mask.to(dtype), position_ids=positions).logits
            assert (logits[mask.bool()] - alone[0]).abs().max() < 1e-4


def causal_4d(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    length = mask.shape[1]
    allowed = torch.ones(length, length).tril().bool() & mask[:, None, None].bool()
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_4d_mask(model, ids, dtype):
    """A prepared 4D mask is used as it is; `token_mask` says beside it where padding is."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        actual = model(ids, attention_mask=causal_4d(mask, dtype), token_mask=mask.bool()).logits
    assert (actual - expected)[mask.bool()].abs().max() < 1e-4


def test_dict_of_masks(model, ids):
    """Masks prepared per kind of layer, as `generate` makes them for static caches."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    masks = {"full_attention": causal_4d(mask, torch.bool), "linear_attention": mask}
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        actual = model(ids, attention_mask=masks).logits
    assert (actual - expected)[mask.bool()].abs().max() < 1e-4


def test_packed_documents(model, random_ids):
    """Documents packed into one row, told apart by positions, get the logits that they have alone."""
    first, second = random_ids(1, 5), random_ids(1, 4, seed=1)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        assert (packed[:, :5] - model(first).logits).abs().max() < 1e-4
        assert (packed[:, 5:] - model(second).logits).abs().max() < 1e-4


def test_all_padding_row(model, ids):
    """A row that is nothing but padding stays finite, and disturbs no other row."""
    mask = torch.tensor([[0] * 8, [1] * 8])
    with torch.no_grad():
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            logits = model(ids, attention_mask=mask).logits
            assert torch.isfinite(logits).all()
            assert (logits[1] - model(ids[1:]).logits[0]).abs().max() < 1e-4
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_shorter_than_an_ngram(model, random_ids, length):
    """Sequences shorter than N work, and agree with the start of longer ones."""
    ids = random_ids(1, 8)
    with torch.no_grad():
        assert (model(ids[:, :length]).logits - model(ids).logits[:, :length]).abs().max() < 1e-4


def test_causality(model, ids):
    """A later token changes no earlier logit."""
    other = ids.clone()
    other[:, 5:] = (ids[:, 5:] + 1) % 90
    with torch.no_grad():
        first, second = model(ids).logits, model(other).logits
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:], atol=1e-3)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("cls", [EngramModel, EngramForCausalLM])
def test_return_dict(lively_model, ids, cls, return_dict):
    """Outputs come as an object or as a tuple."""
    model = lively_model(cls)
    with torch.no_grad():
        output = model(ids, return_dict=return_dict, use_cache=False)
        expected = model(ids, use_cache=False)[0]
    assert isinstance(output, tuple) is not return_dict
    assert torch.equal(output[0], expected)
    assert len(output) == 1


def test_use_cache(model, lively_model, ids):
    """Whether a cache comes back is the argument's, else the config's, word."""

    def cache_of(output):
        return output.get("cache", output.get("past_key_values"))

    with torch.no_grad():
        assert cache_of(model(ids)).get_seq_length() == 8
        assert cache_of(model(ids, use_cache=False)) is None
        assert cache_of(lively_model(use_cache=False)(ids)) is None


def test_two_models_in_one_process(lively_model, random_ids):
    """Models of different layouts work side by side, and leave each other alone."""
    one = lively_model(seed=1)
    two = lively_model(seed=2, engram_layer_ids=[1], engram_max_ngram_size=2, engram_vocab_size=30, hc_mult=2)
    ids = random_ids(2, 6)
    with torch.no_grad():
        expected = one(ids).logits
        other = two(ids).logits
        assert torch.equal(one(ids).logits, expected)
        assert torch.equal(two(ids).logits, other)
    assert one.compute_hash_ids(ids).shape == (2, 6, 2, 6)
    assert two.compute_hash_ids(ids).shape == (2, 6, 1, 2)


def test_embeddings_can_be_set(lively_model, ids):
    """Input and output embeddings are reachable, as adapters and resizing need."""
    model = lively_model()
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    new = torch.nn.Embedding(96, 32)
    model.set_input_embeddings(new)
    assert model.model.embed_tokens is new
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_width(model, ids, dtype):
    """32-bit ids are ids."""
    with torch.no_grad():
        assert torch.equal(model(ids.to(dtype)).logits, model(ids).logits)


def test_compiled_forward(lively_model, ids):
    """The whole forward is one graph, without a break."""
    model = lively_model(num_hidden_layers=1, engram_layer_ids=[0], hc_sinkhorn_iters=2)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert (compiled(ids, use_cache=False).logits - expected).abs().max() < 1e-4
