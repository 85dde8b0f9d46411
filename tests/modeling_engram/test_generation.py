"""Generation equals the uncached run: greedy tokens identical, logits to 1e-4 in fp32."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache


N = 4  # the longest n-gram of the tiny models
NEW = 8
SAME = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


def uncached_logits(model, ids, mask=None):
    """Logits of a plain forward over everything."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def uncached_greedy(model, ids, mask=None, steps=NEW):
    """Greedy continuation, every step over the whole sequence; the tokens and the logits of each step."""
    mask = torch.ones_like(ids) if mask is None else mask
    scores = []
    for _ in range(steps):
        logits = uncached_logits(model, ids, mask)[:, -1]
        scores.append(logits)
        best, tokens = logits.topk(2)
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, "too close to call, as logits are compared: another prompt"
        ids = torch.cat([ids, tokens[:, :1]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids, torch.stack(scores, 1)


def check_greedy(model, ids, mask=None, **kwargs):
    expected_ids, expected_scores = uncached_greedy(model, ids, mask)
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **{**SAME, **kwargs}
    )
    assert torch.equal(output.sequences, expected_ids)
    assert (torch.stack(output.logits, 1) - expected_scores).abs().max() < 1e-4
    return output


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("layer_ids", [[], [0, 2], [1]], ids=str)
def test_greedy(lively_model, random_ids, layer_ids, copies):
    """Greedy decoding with the default cache, for several models."""
    check_greedy(lively_model(engram_layer_ids=layer_ids, hc_mult=copies), random_ids(2, 6))


def test_tokens_vary(model, random_ids):
    """The lively model generates something worth comparing, and Engram has a say in it."""
    ids = random_ids(1, 6)
    tokens, _ = uncached_greedy(model, ids)
    assert len(set(tokens[0, 6:].tolist())) > 3
    quiet = copy.deepcopy(model)
    with torch.no_grad():
        for table in quiet.model.engram_memory.tables:
            table.weight.zero_()
    assert not torch.equal(uncached_greedy(quiet, ids)[0], tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_prompts(model, random_ids, length):
    """Prompts shorter than the history, a single token included."""
    check_greedy(model, random_ids(2, length))


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded_none"])
def test_caches(model, random_ids, cache):
    """Caches made by the caller from the model's config, or by name."""
    ids = random_ids(2, 6)
    if cache == "dynamic":
        check_greedy(model, ids, past_key_values=DynamicCache(config=model.config))
    elif cache == "static":
        check_greedy(model, ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
        check_greedy(model, ids, cache_implementation="static", disable_compile=True)
    else:
        check_greedy(model, ids, use_cache=False)


def test_static_cache_of_a_padded_batch(model, random_ids):
    """Left padding and a static cache."""
    ids, mask = left_padded(random_ids)
    check_greedy(model, ids, mask, cache_implementation="static", disable_compile=True)


def left_padded(random_ids, lengths=(6, 3, 1)):
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = random_ids(1, length, seed=row)
        mask[row, width - length :] = 1
    return ids, mask


def test_left_padded_batch_equals_singles(model, random_ids):
    """Each row of a left-padded batch generates what it generates alone."""
    ids, mask = left_padded(random_ids)
    batch = check_greedy(model, ids, mask).sequences
    for row in range(len(ids)):
        alone = model.generate(ids[row : row + 1, mask[row] == 1], **SAME)
        assert torch.equal(batch[row, ids.shape[1] :], alone[0, int(mask[row].sum()) :])


@pytest.mark.parametrize("chunk", range(1, N + 3))
def test_chunked_prefill(model, random_ids, chunk):
    """`generate` with a prompt fed in chunks."""
    check_greedy(model, random_ids(2, 9), prefill_chunk_size=chunk)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("split", range(1, N + 3))
def test_split_prefill(model, random_ids, split, static):
    """A prompt given in two parts, then token by token: the logits of one pass."""
    ids = random_ids(2, 10)
    expected = uncached_logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for part in (ids[:, :split], ids[:, split : N + 3], *ids[:, N + 3 :].split(1, 1)):
            if part.shape[1]:
                logits.append(model(part, past_key_values=cache).logits)
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("split", range(1, N + 3))
def test_split_prefill_with_padding(model, random_ids, split):
    """The same with left padding, where a chunk may be padding only."""
    ids, mask = left_padded(random_ids, (9, 5, 2))
    expected = uncached_logits(model, ids, mask)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for start, end in ((0, split), (split, N + 3), (N + 3, 9)):
            if end > start:
                part = slice(start, end)
                arguments = {"attention_mask": mask[:, :end], "position_ids": positions[:, part]}
                logits.append(model(ids[:, part], past_key_values=cache, **arguments).logits)
    assert (torch.cat(logits, 1) - expected)[mask.bool()].abs().max() < 1e-4


def test_hash_ids_of_the_prompt(model, random_ids):
    """The tokenizer's hash ids given to `generate` (which passes them on at every step) do no harm."""
    ids, mask = left_padded(random_ids)
    check_greedy(model, ids, mask, hash_ids=model.compute_hash_ids(ids, mask))


def test_hash_ids_beside_a_cache(model, random_ids):
    """Given hash ids are used, and the history moves on all the same."""
    ids = random_ids(2, 9)
    hash_ids = model.compute_hash_ids(ids)
    expected = uncached_logits(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(ids[:, :4], hash_ids=hash_ids[:, :4], past_key_values=cache).logits
        second = model(ids[:, 4:7], hash_ids=hash_ids[:, 4:7], past_key_values=cache).logits
        third = model(ids[:, 7:], past_key_values=cache).logits
    assert (torch.cat([first, second, third], 1) - expected).abs().max() < 1e-4


def test_token_mask_of_the_prompt(model, random_ids):
    """`token_mask` over the prompt holds while generating: masked tokens never become part of an n-gram."""
    ids = random_ids(1, 7)
    token_mask = torch.tensor([[1, 1, 1, 1, 0, 1, 0]]).bool()
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), token_mask=token_mask, **SAME)
    for _ in range(NEW):
        with torch.no_grad():
            step = model(ids, token_mask=token_mask, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
        token_mask = torch.cat([token_mask, torch.ones(1, 1, dtype=torch.bool)], 1)
    assert torch.equal(generated, ids)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [2, 4])
def test_beams(model, random_ids, beams, padded):
    """Beam search with a cache finds what it finds without."""
    ids, mask = left_padded(random_ids) if padded else (random_ids(2, 6), torch.ones(2, 6, dtype=torch.long))
    arguments = {**SAME, "attention_mask": mask, "num_beams": beams, "num_return_sequences": 2}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    cached, uncached = (model.generate(ids, use_cache=use_cache, **arguments) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert (cached.sequences_scores - uncached.sequences_scores).abs().max() < 1e-4


@pytest.mark.parametrize("extra", [{}, {"num_return_sequences": 3}, {"top_k": 5, "temperature": 1.5}], ids=str)
def test_sampling(model, random_ids, extra):
    """Sampling with one seed draws the same tokens with and without a cache."""
    ids = random_ids(2, 6)
    arguments = {**SAME, "do_sample": True, "attention_mask": torch.ones_like(ids), **extra}
    sequences = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        sequences.append(model.generate(ids, use_cache=use_cache, **arguments))
    assert torch.equal(*sequences)
    assert len(sequences[0].unique(dim=0)) > 1


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_continuing_from_a_cache(model, random_ids, padded, static):
    """A second turn on the first one's cache, given all ids."""
    ids, mask = left_padded(random_ids) if padded else (random_ids(3, 6), torch.ones(3, 6, dtype=torch.long))
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, **SAME)
    turn = torch.cat([first, random_ids(3, 5, seed=9)], 1)
    mask = torch.cat([mask, torch.ones(3, turn.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    expected, _ = uncached_greedy(model, turn, mask)
    assert torch.equal(model.generate(turn, attention_mask=mask, past_key_values=cache, **SAME), expected)


def test_continuing_with_only_new_ids(model, random_ids):
    """A second turn on a cache, given the new ids alone, through forward."""
    ids = random_ids(2, 12)
    expected = uncached_logits(model, ids)
    with torch.no_grad():
        output = model(ids[:, :7])
        cache = output.get("cache", output.get("past_key_values"))
        assert (model(ids[:, 7:], past_key_values=cache).logits - expected[:, 7:]).abs().max() < 1e-4


def test_prompt_lookup(model, random_ids):
    """Prompt-lookup decoding: several candidates at once, rejected ones rolled back."""
    ids = random_ids(1, 6).repeat(1, 3)
    expected, _ = uncached_greedy(model, ids, steps=12)
    arguments = {**SAME, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **arguments), expected)


@pytest.mark.parametrize("assistant", ["another", "itself", "plain"])
def test_assistant_model(model, lively_model, random_ids, assistant):
    """Assisted decoding gives the model's own greedy tokens, whoever assists."""
    helper = {
        "another": lambda: lively_model(seed=1, num_hidden_layers=1, engram_layer_ids=[0], engram_max_ngram_size=3),
        "itself": lambda: copy.deepcopy(model),
        "plain": lambda: lively_model(seed=2, num_hidden_layers=1, engram_layer_ids=[], hc_mult=1),
    }[assistant]()
    ids = random_ids(1, 6)
    expected, _ = uncached_greedy(model, ids, steps=12)
    arguments = {**SAME, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, assistant_model=helper, **arguments), expected)


def test_engram_assists_a_plain_model(model, lively_model, random_ids):
    """An Engram model may assist a model without Engram."""
    plain = lively_model(seed=2, engram_layer_ids=[], hc_mult=1)
    ids = random_ids(1, 6)
    expected, _ = uncached_greedy(plain, ids)
    arguments = {**SAME, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(plain.generate(ids, assistant_model=model, **arguments), expected)


@pytest.mark.slow
def test_compiled_static_decoding(model, random_ids):
    """`generate` with a static cache compiles decoding on accelerators; here the step is compiled by hand."""
    ids = random_ids(2, 6)
    expected_ids, expected_scores = uncached_greedy(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=24)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    scores = []
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        for i in range(NEW):
            scores.append(logits)
            token = logits.argmax(-1, keepdim=True)
            assert torch.equal(token[:, 0], expected_ids[:, 6 + i])
            positions = torch.full((2, 1), 6 + i)
            logits = step(token, past_key_values=cache, position_ids=positions).logits[:, -1]
    assert (torch.stack(scores, 1) - expected_scores).abs().max() < 1e-4


@pytest.mark.slow
def test_generate_compiles(lively_model, random_ids):
    """`generate(cache_implementation="static")` with compilation forced on CPU gives the same tokens."""
    from transformers import CompileConfig

    model = lively_model()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    check_greedy(model, random_ids(2, 6), cache_implementation="static", compile_config=config)


def test_inputs_embeds_raise(model, lively_model, random_ids):
    """`generate` from embeddings raises and names `input_ids`; a plain model may."""
    ids = random_ids(1, 6)
    with pytest.raises(ValueError, match="input_ids"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), **SAME)
    with pytest.raises(ValueError, match="input_ids"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), hash_ids=model.compute_hash_ids(ids), **SAME)
    plain = lively_model(engram_layer_ids=[])
    arguments = {**SAME, "attention_mask": torch.ones_like(ids)}
    generated = plain.generate(inputs_embeds=plain.get_input_embeddings()(ids), **arguments)
    assert torch.equal(generated, plain.generate(ids, **arguments)[:, 6:])


def test_end_of_sequence_in_a_batch(model, random_ids):
    """Rows that end early are padded; the others go on as they would alone."""
    ids = random_ids(3, 6)
    free, _ = uncached_greedy(model, ids)
    end = int(free[0, 8])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=end, **SAME)
    for row in range(3):
        tokens = free[row, 6:].tolist()
        tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        generated = output[row, 6:].tolist()
        assert generated[: len(tokens)] == tokens
        assert set(generated[len(tokens) :]) <= {0}


def test_bf16_generation(lively_model, random_ids):
    """A bf16 model generates; logits are those of the uncached run to bf16's precision."""
    model = lively_model(dtype=torch.bfloat16)
    ids = random_ids(2, 6)
    arguments = {**SAME, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    output = model.generate(ids, output_logits=True, **arguments)
    logits = torch.stack(output.logits, 1).float()
    expected = uncached_logits(model, output.sequences)[:, 5:-1].float()
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
