"""The trace: gates and norms are the forward's, n-grams those of the rows, and the model stays as it is."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_engram import EngramForSequenceClassification
from hf_engram.inspect import trace_memory
from hf_engram.inspect.pieces import token_pieces
from hf_engram.inspect.trace import find_decoder


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def watch(model, tokenizer, text):
    """By layer: the stream that enters it, the one that leaves it, and the value, in fp32, of one forward."""
    seen = {}
    handles = []
    for index in model.config.engram_layer_ids:
        engram = model.model.layers[index].engram

        def hook(engram, args, out, index=index):
            value = engram.wkv(args[1].to(args[0].dtype))[..., -engram.hidden_size :]
            seen[index] = tuple(tensor[0].float() for tensor in (args[0], out, value))

        handles.append(engram.register_forward_hook(hook))
    with torch.no_grad():
        model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"])
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hc_mult", [1, 4])
def test_gates_and_norms_are_the_forwards(make_model, tokenizer, text, hc_mult, dtype):
    """The stream that leaves a layer is the one that entered it and the gated value; the trace says which gate."""
    model = make_model(hc_mult=hc_mult, dtype=dtype)
    trace = trace_memory(model, tokenizer, text)
    assert [layer.layer_id for layer in trace.layers] == [0, 2]
    for index, (before, after, value) in watch(model, tokenizer, text).items():
        layer = trace.layer(index)
        gates = torch.from_numpy(layer.gates).unsqueeze(-1)
        assert layer.gates.shape == (len(trace), hc_mult) and layer.gates.std() > 0.05
        written = gates * value.unsqueeze(1)
        torch.testing.assert_close(before + written, after, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        shares = written.norm(dim=-1) / after.norm(dim=-1)
        torch.testing.assert_close(torch.from_numpy(layer.shares), shares, rtol=TOLERANCE[dtype], atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(layer.value_norms), value.norm(dim=-1))


def test_a_gate_can_be_read_off_the_streams_alone(make_model, tokenizer, text):
    """By projecting what the layer added on the value: no formula of a gate in it."""
    model = make_model(hc_mult=4)
    trace = trace_memory(model, tokenizer, text)
    for index, (before, after, value) in watch(model, tokenizer, text).items():
        value = value.unsqueeze(1)
        gates = ((after - before) * value).sum(-1) / value.square().sum(-1)
        torch.testing.assert_close(torch.from_numpy(trace.layer(index).gates), gates, rtol=1e-4, atol=1e-5)


def test_parts_of_the_value(make_model, tokenizer, text):
    """The value is linear in the rows: without the rows of one size, it loses the part that the trace names."""
    model = make_model()
    trace = trace_memory(model, tokenizer, text)
    for index, layer in enumerate(trace.layers):
        np.testing.assert_allclose(layer.size_shares.sum(1), 1, atol=1e-4)
        value = watch(model, tokenizer, text)[layer.layer_id][2]
        layout = model.config.layout()
        for place in range(3):
            again = make_model()
            first = int(layout.offsets[index, place, 0])
            count = int(layout.primes[index, place].sum())
            with torch.no_grad():
                again.model.engram_memory.tables[index].weight[first : first + count] = 0
            rest = watch(again, tokenizer, text)[layer.layer_id][2]
            lost = ((value - rest) * value).sum(-1) / value.square().sum(-1)
            torch.testing.assert_close(torch.from_numpy(layer.size_shares[:, place]), lost, rtol=1e-3, atol=1e-4)


def test_a_fresh_memory_writes_nothing(tokenizer, tiny_model, text):
    model = tiny_model(**tokenizer.engram_fields(), vocab_size=len(tokenizer)).bind_tokenizer(tokenizer)
    for layer in trace_memory(model, tokenizer, text).layers:
        assert not layer.shares.any() and not layer.value_norms.any() and not layer.size_shares.any()
        assert np.isfinite(layer.gates).all()


def row_of(model, index: int, column: int, ngram: list[int]) -> int:
    """The row of an n-gram (compressed ids, oldest first), in Python's integers, from the config alone."""
    config, layout = model.config, model.config.layout()
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    generator = np.random.default_rng(10007 * config.engram_layer_ids[index])
    multipliers = [2 * int(m) + 1 for m in generator.integers(0, bound, (config.engram_max_ngram_size,))]
    mixed = 0
    for token, multiplier in zip(reversed(ngram), multipliers, strict=False):
        mixed ^= int(token) * multiplier
    primes, offsets = layout.primes[index].flatten(), layout.offsets[index].flatten()
    return mixed % int(primes[column]) + int(offsets[column])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.text(min_size=1, max_size=12), masked=st.sets(st.integers(0, 60), max_size=6), size=st.integers(3, 50))
def test_ngrams_are_those_of_the_rows(make_model, tokenizer, words, masked, size):
    """Also where tokens are masked, and where the text is read in windows."""
    model = make_model(max_position_embeddings=size)
    length = len(tokenizer(words)["input_ids"])
    mask = np.array([position not in masked for position in range(length)])
    trace = trace_memory(model, tokenizer, words, token_mask=mask)
    assert trace.window_starts == list(range(0, length, size))
    for ngram_size in trace.sizes:
        ids = trace.ngram_ids(ngram_size)
        for position in range(length):
            assert len(trace.ngram(position, ngram_size)) == min(ngram_size, trace.reach[position])
            for index, layer in enumerate(trace.layers):
                for column in range(3 * (ngram_size - 2), 3 * (ngram_size - 1)):
                    expected = row_of(model, index, column, ids[position].tolist())
                    assert layer.row_ids[position, column] == expected
    assert (trace.reach[~mask] == 0).all() and (trace.reach[mask] > 0).all()


def test_ngrams_as_text(make_model, tokenizer, text):
    trace = trace_memory(make_model(), tokenizer, text)
    assert "".join(trace.pieces) == text
    assert trace.ngram(0, 4) == trace.pieces[:1]
    assert trace.ngram(2, 4) == trace.pieces[:3]
    assert trace.ngram(9, 4) == trace.pieces[6:10]
    assert trace.ngram(9, 2) == trace.pieces[8:10]
    assert list(trace.sizes) == [2, 3, 4]
    with pytest.raises(ValueError, match=r"`layer_id` is 1, but Engram layers are \[0, 2\]"):
        trace.layer(1)


def test_parts_of_characters_are_bytes(make_model, tokenizer, hostile_text):
    """Together they are the text again."""
    trace = trace_memory(make_model(), tokenizer, hostile_text)
    assert "\ufffd" not in "".join(trace.pieces)
    assert "\\xf0" in trace.pieces
    data = b""
    for token_id, piece in zip(trace.token_ids.tolist(), trace.pieces, strict=True):
        is_part = "\ufffd" in tokenizer.backend_tokenizer.decode([token_id])
        data += piece.encode().decode("unicode_escape").encode("latin-1") if is_part else piece.encode()
    assert data.decode() == hostile_text


def test_a_vocabulary_with_word_marks_and_byte_tokens():
    backend = Tokenizer(models.BPE({"<0xF0>": 0, "▁the": 1, "re": 2, "ð": 3}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)

    class Stub:
        backend_tokenizer = backend

    assert token_pieces(Stub(), np.array([1, 2, 0, 3, 1])) == [" the", "re", "<0xF0>", "ð", " the"]


def test_masked_tokens(make_model, tokenizer, text):
    model = make_model(hc_mult=4)
    mask = np.ones(len(tokenizer(text)["input_ids"]), dtype=bool)
    mask[5:8] = False
    trace = trace_memory(model, tokenizer, text, token_mask=mask)
    assert trace.reach[:12].tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 4]
    for layer in trace.layers:
        assert np.isnan(layer.gates[~mask]).all() and np.isfinite(layer.gates[mask]).all()
        assert not layer.shares[~mask].any() and not layer.value_norms[~mask].any()


def test_long_texts_are_read_in_windows(make_model, tokenizer, text):
    """Each by itself: the second window's numbers are those of its tokens alone."""
    model = make_model(max_position_embeddings=20)
    trace = trace_memory(model, tokenizer, text)
    assert trace.window_starts[:3] == [0, 20, 40]
    assert trace.reach[[0, 19, 20, 21, 40]].tolist() == [1, 20, 1, 2, 1]
    alone = trace_memory(model, tokenizer, "".join(trace.pieces[20:40]))
    assert alone.token_ids.tolist() == trace.token_ids[20:40].tolist()
    for whole, part in zip(trace.layers, alone.layers, strict=True):
        np.testing.assert_array_equal(whole.row_ids[20:40], part.row_ids)
        np.testing.assert_allclose(whole.gates[20:40], part.gates, atol=1e-6)


def test_max_tokens(make_model, tokenizer, text):
    model = make_model()
    whole, cut = (trace_memory(model, tokenizer, text, n) for n in (None, 7))
    assert (len(cut), cut.n_cut, whole.n_cut) == (7, len(whole) - 7, 0)
    np.testing.assert_allclose(cut.layers[1].gates, whole.layers[1].gates[:7], atol=1e-5)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_wherever_the_tables_are(make_model, tokenizer, text, tmp_path, placement, is_quantised):
    model = make_model(engram_scale_block_size=8)
    if is_quantised:
        model.quantize_tables()
    model.save_pretrained(tmp_path)
    expected = trace_memory(model, tokenizer, text)
    elsewhere = trace_memory(type(model).from_pretrained(tmp_path, engram_placement=placement), tokenizer, text)
    for one, other in zip(expected.layers, elsewhere.layers, strict=True):
        np.testing.assert_array_equal(one.gates, other.gates)
        np.testing.assert_array_equal(one.size_shares, other.size_shares)


def test_code_from_a_hub_folder(make_model, tokenizer, text, tmp_path, remote_modules):
    """Whose classes are none of the package's."""
    model = make_model(hc_mult=4)
    model.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    names = ("modeling_engram.EngramForCausalLM", "tokenization_engram.EngramTokenizer")
    classes = [get_class_from_dynamic_module(name, tmp_path / "hub") for name in names]
    remote, its_tokenizer = (cls.from_pretrained(tmp_path / "hub") for cls in classes)
    assert type(remote) is not type(model) and type(its_tokenizer) is not type(tokenizer)
    expected, trace = trace_memory(model, tokenizer, text), trace_memory(remote, its_tokenizer, text)
    for one, other in zip(expected.layers, trace.layers, strict=True):
        np.testing.assert_array_equal(one.gates, other.gates)


def test_other_heads_and_the_bare_decoder(make_model, tokenizer, text):
    model = make_model(cls=EngramForSequenceClassification)
    whole, bare = trace_memory(model, tokenizer, text), trace_memory(model.model, tokenizer, text)
    np.testing.assert_array_equal(whole.layers[1].gates, bare.layers[1].gates)


@pytest.mark.parametrize("settings", [{"target_modules": ["wkv"]}, {"modules_to_save": ["engram"]}])
def test_peft_models(make_model, tokenizer, text, settings):
    """The adapter's own layers are what is traced."""
    peft = pytest.importorskip("peft")
    model = make_model()
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], **settings}, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    before = trace_memory(adapted, tokenizer, text)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad and "wkv" in name:
                weight.normal_()
    after = trace_memory(adapted, tokenizer, text)
    assert (before.layers[0].value_norms != after.layers[0].value_norms).all()


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_model_stays_as_it_was(make_model, tokenizer, text, monkeypatch):
    model = make_model()
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    hooks = hooks_of(model)
    trace_memory(model, tokenizer, text)
    assert [module.training for module in model.modules()] == modes and hooks_of(model) == hooks

    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="broken"):
        trace_memory(model, tokenizer, text)
    assert [module.training for module in model.modules()] == modes and hooks_of(model) == hooks


def test_what_it_refuses(make_model, make_tokenizer, tokenizer, tiny_model, text):
    model = make_model()
    with pytest.raises(ValueError, match=r"`text` \(''\) has no tokens"):
        trace_memory(model, tokenizer, "")
    with pytest.raises(ValueError, match="`max_tokens` must be at least 1, got 0"):
        trace_memory(model, tokenizer, text, max_tokens=0)
    with pytest.raises(ValueError, match="`token_mask` must be bool"):
        trace_memory(model, tokenizer, text, token_mask=np.ones(3, dtype=bool))
    with pytest.raises(ValueError, match="`model` has no Engram layers"):
        trace_memory(tiny_model(engram_layer_ids=[]), tokenizer, text)
    with pytest.raises(ValueError, match="Linear without an Engram decoder"):
        find_decoder(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="which has no token map"):
        trace_memory(model, object(), text)
    other = make_tokenizer()
    other.add_tokens(["unheardof"])
    with pytest.raises(ValueError, match=r"The token map of `tokenizer` \(401 ids\) is not the model's \(400 ids\)"):
        trace_memory(model, other, text)
