"""History in `generate`: decoding methods, kinds of cache, threads, streams, and what cannot work."""

import itertools
import threading

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hf_engram.modeling_engram.modeling_engram import CACHE_NAME


@pytest.mark.parametrize("n_beams", [1, 2, 3, 4, 5])
def test_beams(model, draw, left_padded, watch, generate, n_beams):
    """Beam search with a cache found other texts than without: a beam kept the history of the one it replaced."""
    ids, mask = left_padded([draw(1, 6, 1), draw(1, 3, 2)])
    fields = {"num_beams": n_beams, "attention_mask": mask, "num_return_sequences": n_beams}
    if n_beams == 1:
        fields.pop("num_return_sequences")
    with watch(model) as seen:
        out = generate(model, ids, 8, **fields)
    seen.check_steps()
    assert torch.equal(out, generate(model, ids, 8, use_cache=False, **fields))
    if n_beams > 2:
        moved = [(after[:, :-1] != before).any() for (before, _), (after, _) in itertools.pairwise(seen.steps)]
        assert len(seen.steps[0][0]) == 2 * n_beams
        assert any(moved), "no beam was replaced, so nothing was reordered"


def test_sampled_beams(model, draw, watch, generate):
    """Beams that are sampled: as for beam search."""
    ids = draw(2, 5)
    with watch(model) as seen:
        torch.manual_seed(0)
        out = generate(model, ids, 8, num_beams=4, do_sample=True, num_return_sequences=2, top_k=20)
    seen.check_steps()
    torch.manual_seed(0)
    assert torch.equal(
        out, generate(model, ids, 8, num_beams=4, do_sample=True, num_return_sequences=2, top_k=20, use_cache=False)
    )


def test_num_return_sequences(model, draw, left_padded, watch, generate):
    """A group of samples of one prompt (as for GRPO) shared one history."""
    ids, mask = left_padded([draw(1, 6, 1), draw(1, 2, 2)])
    fields = {"do_sample": True, "num_return_sequences": 4, "attention_mask": mask, "top_k": 0}
    with watch(model) as seen:
        torch.manual_seed(0)
        out = generate(model, ids, 8, **fields)
    seen.check_steps()
    seen.check_sequences(out, mask.repeat_interleave(4, dim=0))
    assert len({tuple(row) for row in out.tolist()}) > 4, "the samples do not differ"
    torch.manual_seed(0)
    assert torch.equal(out, generate(model, ids, 8, use_cache=False, **fields))


@pytest.mark.parametrize("given", ["by_name", "by_object"])
def test_static_cache(model, draw, left_padded, watch, generate, plain_greedy, given):
    """A static cache's history was padded with zeros up to its length, or kept from the run before."""
    cache = StaticCache(config=model.config, max_cache_len=32) if given == "by_object" else None
    for seed in (1, 4):
        ids, mask = left_padded([draw(1, 7, seed), draw(1, 4, seed + 1), draw(1, 1, seed + 2)])
        fields = {"cache": cache} if cache is not None else {"cache_implementation": "static"}
        with watch(model) as seen:
            out = generate(model, ids, 8, attention_mask=mask, **fields)
        assert torch.equal(out, plain_greedy(model, ids, 8, mask)[0])
        seen.check_sequences(out, mask)
        if cache is not None:
            cache.reset()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_static_cache_compiled(own_model, draw, plain_greedy, run_cached, backend):
    """A compiled decoding step froze the history of the step that it was compiled at, or broke the graph."""
    torch._dynamo.reset()
    model, ids = own_model, draw(2, 6)
    expected, plain_logits = plain_greedy(model, ids, 6)
    step = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    cache = StaticCache(config=model.config, max_cache_len=16)
    for _ in range(2):
        full, logits = ids, [run_cached(model, ids, cache)[:, -1]]
        for position in range(6, 12):
            full = torch.cat([full, expected[:, position : position + 1]], 1)
            positions = torch.full((2, 1), position)
            logits.append(run_cached(step, full[:, -1:].clone(), cache, position_ids=positions)[:, -1])
        torch.testing.assert_close(torch.stack(logits[:6], 1), plain_logits, atol=1e-4, rtol=1e-4)
        cache.reset()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_offloaded_history_stays_on_its_device(model, kind):
    """With `cache_implementation="offloaded"` the history went to host memory, and the next token's hash found it on
    another device. (The meta device stands for the GPU: nothing can be copied from it to host memory.)"""
    from hf_engram.modeling_engram.ngram_history import history_layer

    config = model.config
    layer_idx, length = config.engram_layer_ids[0], config.engram_max_ngram_size - 1
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=32)
    cache.offloading = True
    for started in (False, True):
        layer = history_layer(cache, layer_idx)
        assert layer.last_window().is_meta if started else layer.ngram_windows is None
        layer.append_windows(torch.zeros(2, length, 5, dtype=torch.long, device="meta"))
        keys = torch.zeros(2, config.num_key_value_heads, 5, config.head_dim)
        # What `Cache.update` does for every layer of an offloaded cache.
        cache.layers[layer_idx].update(keys, keys)
        cache.layers[layer_idx].offload()
        cache.layers[layer_idx].prefetch()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_cache(own_model, draw, left_padded, watch, generate, plain_greedy, kind):
    """`cache_implementation="offloaded"`: as above, in `generate`."""
    model = own_model.to("cuda")
    ids, mask = (tensor.to("cuda") for tensor in left_padded([draw(1, 7, 1), draw(1, 4, 2)]))
    with watch(model) as seen:
        out = generate(model, ids, 8, attention_mask=mask, cache_implementation=kind, disable_compile=True)
    assert torch.equal(out, plain_greedy(model, ids, 8, mask)[0])
    seen.check_sequences(out, mask)


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
def test_quantized_cache(model, draw, left_padded, watch, generate, backend):
    """A quantised KV cache had no place for the history, or quantised token ids; one made by hand was refused."""
    if backend == "fp8":
        pytest.importorskip("transformers", "5.24", reason="this Transformers has no fp8 KV cache")
    elif backend == "quanto":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    else:
        pytest.importorskip("hqq", reason="hqq is not installed")
    options = {} if backend == "fp8" else {"nbits": 4, "q_group_size": model.config.head_dim, "residual_length": 4}
    if backend == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}
    ids, mask = left_padded([draw(1, 9, 1), draw(1, 4, 2)])
    by_name = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **options}}
    for beams in (1, 3):
        outs = []
        for by_hand in (False, True):
            caches = {CACHE_NAME: QuantizedCache(backend, model.config, **options)} if by_hand else by_name
            with watch(model) as seen:
                outs.append(generate(model, ids, 8, attention_mask=mask, num_beams=beams, **caches))
            seen.check_steps()
        assert outs[0].shape == (2, 17)
        assert torch.equal(outs[0][:, :9], ids) and torch.equal(*outs)


def test_threads(model, draw, generate, plain_greedy):
    """Requests served by threads of one process got each other's history."""
    prompts = [draw(1, length, seed) for seed, length in enumerate((2, 5, 9, 3))]
    expected = [plain_greedy(model, prompt, 8)[0] for prompt in prompts]
    barrier = threading.Barrier(len(prompts))
    results: list[list] = [[] for _ in prompts]

    def serve(i: int) -> None:
        for _ in range(3):
            barrier.wait(timeout=600)
            results[i].append(generate(model, prompts[i], 8))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    for answers, right in zip(results, expected, strict=True):
        assert len(answers) == 3, "a thread failed"
        assert all(torch.equal(answer, right) for answer in answers)


class Tokens(BaseStreamer):
    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamer(model, draw, watch, generate, plain_greedy):
    """Streamed tokens were not those of the finished text."""
    ids = draw(1, 5)
    streamer = Tokens()
    with watch(model) as seen:
        out = generate(model, ids, 8, streamer=streamer)
    seen.check_sequences(out)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist() == plain_greedy(model, ids, 8)[0][0].tolist()


def test_text_streamer_in_a_thread(model, tokenizer, generate, plain_greedy):
    """A chat server's set-up: a `TextIteratorStreamer` read here while a thread generates."""
    inputs = tokenizer("The for statement", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
    thread = threading.Thread(target=generate, args=(model, inputs["input_ids"], 8), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(timeout=600)
    expected = plain_greedy(model, inputs["input_ids"], 8)[0][0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(expected)


def test_stop_strings(model, tokenizer, watch, generate, plain_greedy):
    """Stopping at a string ended a text elsewhere than without the cache."""
    ids = tokenizer("The while statement", return_tensors="pt")["input_ids"]
    expected = plain_greedy(model, ids, 24)[0]
    new = expected[0, ids.shape[1] :].tolist()
    texts = [tokenizer.decode([token]) for token in new[3:20]]
    # Parts of a character's bytes decode to a replacement character each, and to others together.
    stop = next(text for text in texts if text.isascii() and text.isprintable() and text.strip())
    with watch(model) as seen:
        out = generate(model, ids, 24, stop_strings=[stop], tokenizer=tokenizer)
    seen.check_sequences(out)
    uncached = generate(model, ids, 24, stop_strings=[stop], tokenizer=tokenizer, use_cache=False)
    assert torch.equal(out, uncached)
    n_new = out.shape[1] - ids.shape[1]
    assert 0 < n_new < 24
    assert torch.equal(out, expected[:, : out.shape[1]])
    assert stop in tokenizer.decode(out[0, ids.shape[1] :])


def test_prompt_of_hash_ids(model, tokenizer, watch, generate, plain_greedy):
    """`generate(**tokenizer(...))` passed the prompt's `hash_ids` on at every step: every token had the last ones."""
    inputs = tokenizer(["The for statement", "An"], padding=True, padding_side="left", return_tensors="pt")
    assert "hash_ids" in inputs
    with watch(model) as seen:
        out = generate(model, n=8, **{"input_ids": inputs["input_ids"], **inputs})
    expected = plain_greedy(model, inputs["input_ids"], 8, inputs["attention_mask"])[0]
    assert torch.equal(out, expected)
    seen.check_sequences(out, inputs["attention_mask"])


@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "with_ids"])
def test_prompt_of_embeddings(model, draw, generate, with_ids):
    """A prompt of `inputs_embeds` was generated from without memory, silently."""
    ids = draw(1, 5)
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=r"inputs_embeds.*input_ids|input_ids.*inputs_embeds"):
        generate(model, ids if with_ids else None, 4, inputs_embeds=embeddings)


def test_cache_made_without_the_config(model, draw, watch, generate, plain_greedy):
    """`DynamicCache()`, made without the model's config, dropped the history: it must work, or say what to do."""
    ids = draw(1, 5)
    with watch(model) as seen:
        try:
            out = generate(model, ids, 4, cache=DynamicCache())
        except ValueError as error:
            assert "DynamicCache(config=model.config)" in str(error)
        else:
            seen.check_sequences(out)
            assert torch.equal(out, plain_greedy(model, ids, 4)[0])
