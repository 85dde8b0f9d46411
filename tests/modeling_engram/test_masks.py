"""What n-grams may look at, from every kind of mask that a forward, `generate` or a pipeline hands over."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast, StaticCache

from hf_engram import EngramTokenizer


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


@torch.no_grad()
def logits(model, *args, **kwargs) -> torch.Tensor:
    return model(*args, **kwargs).logits


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return (actual - expected).abs().max() < 1e-4


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("step", [1, 3])
def test_a_mask_as_long_as_the_cache(model, random_ids, cache_class, step):
    """A mask that is allocated once, and filled while decoding: its columns belong to the cache's places."""
    ids = random_ids(2, 9)
    live = torch.ones(2, 9, dtype=torch.long)
    live[1, :2] = 0
    sizes = {"max_cache_len": 16} if cache_class is StaticCache else {}
    cache, mask, parts = cache_class(config=model.config, **sizes), torch.zeros(2, 16, dtype=torch.long), []
    for start in range(0, 9, step):
        mask[:, start : start + step] = live[:, start : start + step]
        shown = mask if cache_class is StaticCache else mask[:, : start + step]
        parts.append(logits(model, ids[:, start : start + step], attention_mask=shown, past_key_values=cache))
    expected = logits(model, ids, attention_mask=live)
    assert close(torch.cat(parts, 1)[live.bool()], expected[live.bool()])


@pytest.mark.parametrize("additive", [False, True])
def test_documents_in_a_mask_of_four_dimensions(model, random_ids, additive):
    """Tokens that may not attend to the one before them begin a document, whatever `position_ids` say."""
    row = random_ids(1, 12)
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    mask[..., :7, :7] = mask[..., 7:, 7:] = True
    mask &= torch.ones(12, 12, dtype=torch.bool).tril()
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = torch.arange(12)[None]
    positions[:, 7:] -= 7
    for extra in ({}, {"position_ids": positions}):
        actual = logits(model, row, attention_mask=mask, **extra)
        assert close(actual[:, :7], logits(model, row[:, :7]))
        # Rotary embeddings are relative.
        assert close(actual[:, 7:], logits(model, row[:, 7:]))


def test_padding_in_a_mask_of_four_dimensions(model, random_ids):
    """Whatever ids stand where nobody may attend, the others do not see them."""
    ids = random_ids(2, 8)
    visible = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8).clone()
    visible[1, :, :, :3] = False
    visible[1, :, torch.arange(3), torch.arange(3)] = True
    other = ids.clone()
    other[1, :3] = 90
    first, second = (logits(model, i, attention_mask=visible) for i in (ids, other))
    assert torch.equal(first[0], second[0]) and close(first[1, 3:], second[1, 3:])
    assert close(first[1, 3:], logits(model, ids[1:, 3:])[0])


def test_a_causal_mask_of_four_dimensions_beside_a_cache(model, random_ids):
    """It hides nothing from n-grams, in one go or continued."""
    ids = random_ids(1, 9)
    expected = logits(model, ids)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    assert close(logits(model, ids, attention_mask=causal), expected)
    cache = DynamicCache(config=model.config)
    parts = [
        logits(model, ids[:, start:end], attention_mask=causal[..., start:end, :end], past_key_values=cache)
        for start, end in ((0, 4), (4, 9))
    ]
    assert close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("chunk", [None, 1, 3, 5, 12])
def test_token_mask_in_chunked_prefill(model, random_ids, chunk):
    """Every chunk of the prompt gets its own columns of `token_mask`; and so does a second turn."""
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.bool)
    mask[:, 2:5] = False
    arguments = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first = model.generate(ids, token_mask=mask, prefill_chunk_size=chunk, **arguments)
    assert close(first.logits[0], logits(model, ids, token_mask=mask)[:, -1])
    whole = torch.cat([mask, torch.ones(2, 6, dtype=torch.bool)], 1)
    expected = logits(model, first.sequences, token_mask=whole)[:, 11:-1]
    assert close(torch.stack(first.logits, 1), expected)


def test_hash_ids_padded_by_a_collator(model, random_ids):
    """A pipeline's collator pads what it does not know with zeros; under the mask anything may stand."""
    ids, mask = random_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    hash_ids = model.compute_hash_ids(ids, attention_mask=mask)
    expected = logits(model, ids, attention_mask=mask)
    hash_ids[0, :2] = 0
    assert torch.equal(logits(model, ids, attention_mask=mask, hash_ids=hash_ids), expected)
    embeds = model.get_input_embeddings()(ids)
    assert close(logits(model, inputs_embeds=embeds, attention_mask=mask, hash_ids=hash_ids), expected)
    with pytest.raises(ValueError, match="bucket ranges"):
        model(ids, hash_ids=hash_ids)
    # What a collator for labels pads with is no row at all.
    for masked in (-100, 2**40):
        hash_ids[0, :2] = masked
        assert torch.equal(logits(model, ids, attention_mask=mask, hash_ids=hash_ids), expected)
        assert close(logits(model, inputs_embeds=embeds, attention_mask=mask, hash_ids=hash_ids), expected)
        token_mask = mask.bool()
        assert close(
            logits(model, inputs_embeds=embeds, token_mask=token_mask, hash_ids=hash_ids),
            logits(model, ids, token_mask=token_mask),
        )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32], ids=str
)
def test_masks_of_every_type(model, random_ids, dtype):
    """A padding mask means the same in every type; `token_mask` is bool, and says so."""
    ids, mask = random_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    expected = logits(model, ids, attention_mask=mask)
    assert torch.equal(logits(model, ids, attention_mask=mask.to(dtype)), expected)
    new = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, attention_mask=mask.to(dtype), max_new_tokens=3, do_sample=False), new)
    if dtype == torch.bool:
        assert close(logits(model, ids, token_mask=mask.bool())[1], expected[1])
    else:
        with pytest.raises(ValueError, match=r"`token_mask` must be bool .* pass `token_mask.bool\(\)`"):
            model(ids, token_mask=mask.to(dtype))


def test_a_padding_mask_that_is_added(model, random_ids):
    """A padding mask of zeros and infinities means the opposite, and is refused."""
    with pytest.raises(ValueError, match=r"`attention_mask` .* pass 1 at tokens"):
        model(random_ids(1, 2), attention_mask=torch.tensor([[float("-inf"), 0.0]]))


class TestMiddleOfASequence:
    """Tokens whose positions tell of others before them need the history of those."""

    @pytest.mark.parametrize(
        ("positions", "mask", "message"),
        [
            ([[4]], None, "middle of a sequence"),
            ([[1, 2, 3]], None, "middle of a sequence"),
            ([[0, 1, 7]], None, "middle of a sequence"),
            ([[0, 1, 2, 5, 6]], None, "middle of a sequence"),
            ([[0, 1, 1]], None, "middle of a sequence"),
            ([[1, 1, 9]], [[0, 0, 1]], "middle of a sequence"),
            ([[[0, 1]], [[0, 1]], [[0, 1]]], None, r"`position_ids` must be \[batch, length\]"),
            ([[0, 1, 2, 3]], [[1, 1]], "`position_ids` must be|`attention_mask`"),
        ],
        ids=str,
    )
    def test_refused(self, model, random_ids, positions, mask, message):
        positions = torch.tensor(positions)
        ids = random_ids(1, positions.shape[-1] if mask is None else len(mask[0]))
        mask = None if mask is None else torch.tensor(mask)
        for use_cache in (False, True):
            with pytest.raises(ValueError, match=message):
                model(ids, attention_mask=mask, position_ids=positions, use_cache=use_cache)

    @pytest.mark.parametrize(
        ("positions", "mask"),
        [
            ([[0, 1, 2, 0, 1, 0]], None),
            ([[0, 0, 0, 0, 0, 0]], None),
            ([[1, 1, 1, 0, 1, 2]], [[0, 0, 0, 1, 1, 1]]),
            ([[0, 0, 0, 0, 1, 2]], [[0, 0, 0, 1, 1, 1]]),
            ([[-1, -1, -1, 0, 1, 2]], [[0, 0, 0, 1, 1, 1]]),
            ([[0, 1, 2, 3, 4, 5]], [[0, 0, 0, 1, 1, 1]]),
            ([[0, 1, 2, 1, 1, 1]], [[1, 1, 1, 0, 0, 0]]),
            ([[0, 1, 1, 1, 2, 3]], [[1, 1, 0, 0, 1, 1]]),
            ([[0, 1, 2, 3, 4, 5]], [[1, 1, 0, 0, 1, 1]]),
        ],
        ids=str,
    )
    def test_not_refused(self, model, random_ids, positions, mask):
        """Packed documents, and whatever positions padding has; for the rows of a batch, or all at once."""
        ids, positions = random_ids(2, 6), torch.tensor(positions)
        mask = None if mask is None else torch.tensor(mask).expand(2, -1)
        shared = logits(model, ids, attention_mask=mask, position_ids=positions)
        assert torch.equal(shared, logits(model, ids, attention_mask=mask, position_ids=positions.expand(2, -1)))

    def test_an_engine_that_keeps_keys_and_values_itself(self, model, random_ids):
        """Sequences behind each other in one row, as vLLM hands them over: prompts are right, later tokens refused."""
        ids = random_ids(1, 7)
        arguments = {"use_cache": False, "return_dict": True, "attention_instances": {}}
        prompts = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        apart = torch.cat([model.compute_hash_ids(ids[:, :3]), model.compute_hash_ids(ids[:, 3:])], 1)
        assert torch.equal(model.compute_hash_ids(ids, position_ids=prompts), apart)
        model(ids, position_ids=prompts, **arguments)
        for steps in ([[3, 4]], [[0, 1, 2, 4]], [[4, 0, 1, 2]], [[512, 513, 514]]):
            with pytest.raises(ValueError, match="vLLM"):
                model(ids[:, : len(steps[0])], position_ids=torch.tensor(steps), **arguments)

    @pytest.mark.parametrize("static", [False, True])
    def test_a_new_cache_at_every_step(self, model, random_ids, static):
        ids = random_ids(1, 6)
        sizes = {"max_cache_len": 16} if static else {}
        cache = (StaticCache if static else DynamicCache)(config=model.config, **sizes)
        logits(model, ids[:, :3], past_key_values=cache, position_ids=torch.arange(3)[None])
        with pytest.raises(ValueError, match="middle of a sequence"):
            model(ids[:, 3:4], past_key_values=cache, position_ids=torch.tensor([[5]]))
        continued = logits(model, ids[:, 3:], past_key_values=cache, position_ids=torch.arange(3, 6)[None])
        assert close(continued, logits(model, ids)[:, 3:])
        with pytest.raises(ValueError, match="middle of a sequence"):
            fresh = (StaticCache if static else DynamicCache)(config=model.config, **sizes)
            model(ids[:, 3:4], past_key_values=fresh, position_ids=torch.tensor([[3]]))

    def test_keys_that_others_put_in_or_took_out(self, model, random_ids):
        """Keys and values without their history are refused, in caches that grow and that do not."""
        ids = random_ids(1, 6)
        grown, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=8)
        for cache in (grown, static):
            logits(model, ids[:, :4], past_key_values=cache)
        for layer in grown.layers:
            layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
        for layer in static.layers:
            layer.cumulative_length.sub_(1)
        for cache in (grown, static):
            with pytest.raises(ValueError, match="by other means"):
                model(ids[:, 4:], past_key_values=cache)

    def test_given_hash_ids(self, model, random_ids):
        """Whoever hands over embeddings and their rows says what the n-grams are."""
        ids = random_ids(1, 6)
        embeds, hash_ids = model.get_input_embeddings()(ids), model.compute_hash_ids(ids)
        later = {"inputs_embeds": embeds[:, 3:], "hash_ids": hash_ids[:, 3:]}
        offset = logits(model, **later, position_ids=torch.tensor([[3, 4, 5]]))
        assert close(offset, logits(model, **later))  # rotary embeddings are relative


def test_tokens_added_after_binding(tiny_model):
    """The tokenizer hashes an added token as itself, the model does not know it: an error, until it is bound again."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["for while for while"], trainers.BpeTrainer(special_tokens=["<pad>"], initial_alphabet=alphabet)
    )
    plain_tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>")
    tokenizer = EngramTokenizer.from_tokenizer(
        plain_tokenizer, engram_layer_ids=[0, 2], engram_compressed_vocab_size=len(plain_tokenizer)
    )
    model = tiny_model(vocab_size=len(plain_tokenizer) + 8, **tokenizer.engram_fields()).bind_tokenizer(tokenizer)
    tokenizer.add_tokens(["<|added|>"])
    batch = tokenizer("<|added|>for while", return_tensors="pt")
    with pytest.raises(ValueError, match=r"model\.bind_tokenizer\(tokenizer\)"):
        model(**batch)
    model.bind_tokenizer(tokenizer)
    assert torch.equal(model(**batch).logits, model(batch["input_ids"]).logits)


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_assistant_that_exits_before_the_memory(lively_model, random_ids, exit_layer):
    """Drafts by the first layers alone change nothing about what is generated."""
    model = lively_model(engram_layer_ids=[1, 2])
    ids = random_ids(1, 8)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    drafted = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_early_exit=exit_layer)
    assert torch.equal(drafted, expected) and model.config.num_hidden_layers == 3


def test_continuous_batching_is_refused(model, random_ids):
    """Pages of keys and values have no place for the n-gram history."""
    with pytest.raises(NotImplementedError, match="n-gram history"):
        model.generate_batch(inputs=[random_ids(1, 4)[0].tolist()])


@pytest.mark.parametrize("narrow", [torch.int8, torch.uint8])
def test_rows_keep_the_streams_dtype(model, random_ids, narrow):
    """A quantised projection has a weight of integers; the rows that it reads stay what they are."""
    layer, seen = model.model.layers[0].engram, []

    class Quantised(torch.nn.Module):
        weight = torch.zeros(1, dtype=narrow)

        def forward(self, rows):
            seen.append(rows)
            return torch.zeros(*rows.shape[:-1], (model.config.hc_mult + 1) * model.config.hidden_size)

    wkv = layer.wkv
    layer.wkv = Quantised()
    try:
        logits(model, random_ids(1, 5))
    finally:
        layer.wkv = wkv
    assert seen[0].dtype == torch.float32 and (seen[0] != 0).any()


def test_tracing(lively_model, random_ids):
    """Ids are inputs of what was traced, not constants in it."""
    model = lively_model(use_cache=False).requires_grad_(False)
    ids, others = random_ids(2, 6), random_ids(2, 6, seed=5)
    with torch.no_grad():
        traced = torch.jit.trace(lambda i: model(input_ids=i).logits, (ids,), check_trace=False)
        assert close(traced(others), model(input_ids=others).logits)


def test_generate_checks_the_prompts_hash_ids(model, random_ids):
    """Another tokenizer's hash ids are refused by `generate`, too, which hashes by itself from then on."""
    ids, mask = random_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    hash_ids = model.compute_hash_ids(ids, attention_mask=mask)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    for beams in (1, 3):
        given = model.generate(
            ids, attention_mask=mask, hash_ids=hash_ids, max_new_tokens=4, do_sample=False, num_beams=beams
        )
        assert beams > 1 or torch.equal(given, expected)
        with pytest.raises(ValueError, match="`hash_ids` are not"):
            model.generate(ids, attention_mask=mask, hash_ids=hash_ids.flip(1), max_new_tokens=4, num_beams=beams)
