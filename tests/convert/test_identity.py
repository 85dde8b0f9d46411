"""A converted model computes what its backbone did, and carries over what belongs to it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_engram import EngramForCausalLM, EngramTokenizer
from hf_engram.convert import FAMILIES, convert_backbone, prepare_conversion


SMALL = {"engram_layer_ids": [1, 2], "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 8}


def logits_of(model, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def test_every_family_is_tested(backbone):
    """A table without a test would be a claim."""
    names = backbone.__globals__["BACKBONES"]
    assert {model_type for model_type, _ in names.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_same_logits(any_name, dtype, backbone, plain_tokenizer, ids):
    """Bit for bit in every family and dtype: plain, left-padded, packed, and beyond the original context."""
    theirs = backbone(any_name, dtype)
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL)
    assert type(model) is EngramForCausalLM and not model.training
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    tokens = ids(2, 11)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]])
    calls = [
        ((tokens,), {}),
        ((tokens,), {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}),
        ((tokens[:1],), {"position_ids": packed}),
        ((ids(1, 80),), {}),
        ((ids(2, 7, seed=3),), {}),
    ]
    for args, kwargs in calls:
        expected, actual = logits_of(theirs, *args, **kwargs), logits_of(model, *args, **kwargs)
        assert expected.abs().max() > 0.1
        assert actual.dtype == dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_generation(any_name, dtype, backbone, plain_tokenizer, ids):
    """Greedy tokens and their scores, with a cache, of a left-padded batch."""
    theirs = backbone(any_name, dtype)
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens)
    tokens[0, :3], mask[0, :3] = 0, 0
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "top_k": None, "temperature": None}
    options |= {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    expected, actual = theirs.generate(tokens, **options), model.generate(tokens, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(torch.equal(a, e) for a, e in zip(actual.logits, expected.logits, strict=True))


def test_a_backbone_that_was_used_before(backbone, plain_tokenizer, ids):
    """Dynamic rotary frequencies have grown with a long sequence; then come one that fits these, and a short one."""
    theirs = backbone("internlm3")
    logits_of(theirs, ids(1, 100))
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL)
    for tokens in (ids(1, 90), ids(1, 9), ids(1, 70)):
        assert torch.equal(logits_of(model, tokens), logits_of(theirs, tokens))


def test_same_sampling(backbone, plain_tokenizer, ids):
    """With the backbone's own generation config and the same seed."""
    theirs = backbone("llama_3_1")
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL)
    assert model.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert model.generation_config.eos_token_id == [2, 3, 4] and model.generation_config.top_k == 7
    model.generation_config.top_k = 3
    assert theirs.generation_config.top_k == 7
    model.generation_config.top_k = 7
    drawn = []
    for decoder in (theirs, model):
        torch.manual_seed(5)
        drawn.append(decoder.generate(ids(3, 6), max_new_tokens=10))
    assert torch.equal(*drawn)


def test_four_copies(any_name, backbone, plain_tokenizer, ids):
    """To 1e-4 in fp32, logits and generation; the stream's parameters are fp32 in a model of any dtype."""
    theirs = backbone(any_name)
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, hc_mult=4, **SMALL)
    expected, actual = logits_of(theirs, ids(2, 11)), logits_of(model, ids(2, 11))
    assert (actual - expected).abs().max() <= 1e-4
    options = {"do_sample": False, "max_new_tokens": 8, "top_k": None, "temperature": None}
    mask = torch.ones(2, 9, dtype=torch.long)
    assert torch.equal(
        theirs.generate(ids(2, 9), attention_mask=mask, **options),
        model.generate(ids(2, 9), attention_mask=mask, **options),
    )
    model = EngramForCausalLM.from_backbone(theirs.to(torch.bfloat16), plain_tokenizer, hc_mult=4, **SMALL)
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.float32 if "_hc." in name else torch.bfloat16), name


def test_memory_that_is_there_is_used(backbone, plain_tokenizer, ids):
    """Else the identity above would be that of a model without memory."""
    theirs = backbone()
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL)
    assert [layer.engram is not None for layer in model.model.layers] == [False, True, True, False]
    before = logits_of(model, ids(1, 9))
    with torch.no_grad():
        model.model.layers[2].engram.wkv.weight.normal_()
    assert (logits_of(model, ids(1, 9)) - before).abs().max() > 0.1


def test_config_is_carried_over(any_name, backbone, plain_tokenizer):
    theirs = backbone(any_name, attn_implementation="eager")
    config = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL).config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps", "attention_dropout", "head_dim"):
        if hasattr(theirs.config, name):
            assert getattr(config, name) == getattr(theirs.config, name), name
    assert config.rope_parameters == theirs.config.rope_parameters
    assert config.rope_parameters is not theirs.config.rope_parameters
    assert config.tie_word_embeddings == theirs.config.tie_word_embeddings
    assert config._attn_implementation == "eager"
    assert config.backbone_model_type == theirs.config.model_type


@pytest.mark.parametrize("hc_mult", [1, 4])
def test_weights_are_moved_not_copied(backbone, plain_tokenizer, hc_mult):
    theirs = backbone("llama_smollm2", torch.bfloat16)
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, hc_mult=hc_mult, **SMALL)
    ours = dict(model.named_parameters())
    assert all(ours[name].data_ptr() == weight.data_ptr() for name, weight in theirs.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saved_and_loaded(tmp_path, any_name, backbone, plain_tokenizer, ids):
    """Through a folder, in bf16: logits, dtype, generation config, chat template, and the tokenizer's bond."""
    theirs = backbone(any_name, torch.bfloat16)
    # As after loading: `.to` has rounded the rotary frequencies, which no checkpoint holds.
    theirs.save_pretrained(tmp_path / "backbone")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    model, tokenizer = convert_backbone(theirs, plain_tokenizer, **SMALL)
    model.save_pretrained(tmp_path / "engram")
    tokenizer.save_pretrained(tmp_path / "engram")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "engram")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits_of(loaded, ids(2, 11)), logits_of(theirs, ids(2, 11)))
    assert loaded.generation_config.to_diff_dict() == theirs.generation_config.to_diff_dict()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "engram")
    messages = [{"role": "user", "content": "The word"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == plain_tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    loaded.bind_tokenizer(tokenizer)


def test_from_path(backbone_folder, plain_tokenizer, ids):
    """The tokenizer beside the weights is taken; a path, a string and a model from there are the same."""
    theirs = AutoModelForCausalLM.from_pretrained(backbone_folder)
    expected = logits_of(theirs, ids(2, 11))
    config, tokenizer = prepare_conversion(backbone_folder, **SMALL)
    assert tokenizer.get_vocab() == plain_tokenizer.get_vocab()
    assert tokenizer.special_tokens_map == plain_tokenizer.special_tokens_map
    for source in (backbone_folder, str(backbone_folder), theirs):
        model = EngramForCausalLM.from_backbone(source, **SMALL)
        assert torch.equal(logits_of(model, ids(2, 11)), expected)
        assert model.config.engram_token_map_sha256 == config.engram_token_map_sha256
        batch = tokenizer(["The word", "A statement"], padding=True, return_tensors="pt")
        without = logits_of(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        assert torch.equal(logits_of(model, **batch), without)


def test_with_an_engram_tokenizer(backbone, plain_tokenizer):
    """Its layout is the model's, and it comes back as it is."""
    layout = {"engram_layer_ids": [0, 3], "engram_vocab_size": 70, "engram_max_ngram_size": 4, "engram_n_heads": 2}
    tokenizer = EngramTokenizer.from_tokenizer(plain_tokenizer, **layout)
    model, returned = convert_backbone(backbone(), tokenizer, engram_head_dim=4)
    assert returned is tokenizer
    assert {name: getattr(model.config, name) for name in layout} == layout
    assert model.config.engram_head_dim == 4
    model, _ = convert_backbone(backbone(), tokenizer, engram_layer_ids=(0, 3), engram_vocab_size=70)
    assert model.config.engram_layer_ids == [0, 3]


@pytest.mark.parametrize(("depth", "expected"), [(1, [0]), (2, [1]), (3, [1]), (4, [1, 2]), (8, [1, 4])])
def test_default_layers(depth, expected, backbone, plain_tokenizer):
    theirs = backbone(num_hidden_layers=depth)
    assert prepare_conversion(theirs, plain_tokenizer)[0].engram_layer_ids == expected


def test_without_memory(backbone, plain_tokenizer, ids):
    theirs = backbone()
    model = EngramForCausalLM.from_backbone(theirs, plain_tokenizer, engram_layer_ids=[])
    assert torch.equal(logits_of(model, ids(2, 11)), logits_of(theirs, ids(2, 11)))


def test_same_seed_same_weights(backbone, plain_tokenizer):
    weights = []
    for seed in (0, 0, 1):
        theirs = backbone()
        torch.manual_seed(seed)
        weights.append(EngramForCausalLM.from_backbone(theirs, plain_tokenizer, **SMALL).state_dict())
    name = "model.engram_memory.tables.1.weight"
    assert torch.equal(weights[0][name], weights[1][name]) and not torch.equal(weights[0][name], weights[2][name])


def test_training_mode_is_kept(backbone, plain_tokenizer):
    assert EngramForCausalLM.from_backbone(backbone().train(), plain_tokenizer, **SMALL).training


def step(model, optimizer, tokens) -> None:
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("hc_mult", [1, 4])
def test_schedule_of_training(backbone, plain_tokenizer, ids, hc_mult):
    """As the docstring has it: the first step moves wkv's value half, the second the rest of Engram and the tables."""
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, hc_mult=hc_mult, **SMALL).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = ids(2, 16)
    rows = model.compute_hash_ids(tokens)
    engram, hidden = model.model.layers[1].engram, model.config.hidden_size
    tables = model.model.engram_memory.tables

    def state() -> dict[str, torch.Tensor]:
        key, value = engram.wkv.weight[: hc_mult * hidden], engram.wkv.weight[hc_mult * hidden :]
        gate = torch.cat([engram.q_weight, engram.k_weight])
        return copy.deepcopy({"key": key.data, "value": value.data, "gate": gate.data, "table": tables[0].weight.data})

    start = state()
    assert not start["value"].any()
    step(model, optimizer, tokens)
    first = state()
    assert {name for name in start if not torch.equal(first[name], start[name])} == {"value"}
    step(model, optimizer, tokens)
    second = state()
    assert {name for name in start if not torch.equal(second[name], first[name])} == set(start)
    moved = (second["table"] != first["table"]).any(1).nonzero().flatten()
    # The last token predicts nothing, so its rows get no gradient.
    assert set(moved.tolist()) == set(rows[:, :-1, 0].flatten().tolist())


@torch.no_grad()
def test_rows_of_zero(backbone, plain_tokenizer, ids):
    """`init_tables="zero"`: the backbone's function all the same, with all of `wkv` random; then the first step moves
    the rows of its batch alone, the second the rest of Engram."""
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, init_tables="zero", **SMALL).train()
    assert torch.equal(model(ids(2, 16)).logits, backbone()(ids(2, 16)).logits)
    engram, table = model.model.layers[1].engram, model.model.engram_memory.tables[0]
    assert not table.weight.any() and engram.wkv.weight.any(1).all()
    before = [engram.wkv.weight.clone(), table.weight.clone()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        step(model, optimizer, ids(2, 16))
        assert torch.equal(engram.wkv.weight, before[0]) and not torch.equal(table.weight, before[1])
        step(model, optimizer, ids(2, 16))
        assert not torch.equal(engram.wkv.weight, before[0])


@pytest.mark.parametrize("hc_mult", [1, 4])
@pytest.mark.parametrize("init_tables", ["zero", "random"])
def test_tables_in_host_memory(tmp_path, backbone, plain_tokenizer, ids, init_tables, hc_mult):
    """They are made, saved and loaded as those beside the model are; and there is no file yet for tables on disk."""
    fields = {**SMALL, "init_tables": init_tables, "hc_mult": hc_mult}
    models = []
    for placement in ("device", "cpu"):
        torch.manual_seed(0)
        theirs = backbone("llama_smollm2", torch.bfloat16)
        model, _ = convert_backbone(theirs, plain_tokenizer, engram_placement=placement, **fields)
        assert [table.placement for table in model.engram_memory.tables] == [placement] * 2
        assert model.config.engram_placement == placement
        models.append(model.eval())
    assert torch.equal(*(logits_of(model, ids(2, 9)) for model in models))
    model.save_pretrained(tmp_path)
    loaded = EngramForCausalLM.from_pretrained(tmp_path).eval()
    assert [table.placement for table in loaded.engram_memory.tables] == ["cpu"] * 2
    for mine, theirs in zip(loaded.engram_memory.tables, models[0].engram_memory.tables, strict=True):
        assert torch.equal(mine.weight, theirs.weight) and mine.weight.any() == (init_tables == "random")
    tokens = model.generate(ids(1, 5), max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, models[0].generate(ids(1, 5), max_new_tokens=4, do_sample=False))
    for placement in ("disk", ["cpu", "disk"]):
        with pytest.raises(ValueError, match=r"`engram_placement` is .*disk.*are in no file yet"):
            convert_backbone(theirs, plain_tokenizer, engram_placement=placement, **fields)


def test_unknown_init_tables(backbone, plain_tokenizer):
    with pytest.raises(ValueError, match=r"`init_tables` must be one of 'random', 'zero', got 'ngram-mean'"):
        EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, init_tables="ngram-mean", **SMALL)


def test_schedule_of_the_stream(backbone, plain_tokenizer, ids):
    """As the docstring has it: the first step moves `scale` and `base`, the second `fn`, too."""
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, hc_mult=4, **SMALL).train()
    stream = model.model.layers[1].mlp_hc
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved = []
    for _ in range(2):
        before = copy.deepcopy(dict(stream.named_parameters()))
        step(model, optimizer, ids(2, 16))
        moved.append({name for name, weight in stream.named_parameters() if not torch.equal(weight, before[name])})
    assert moved == [{"scale", "base"}, {"scale", "base", "fn"}]


def test_copies_separate(backbone, plain_tokenizer, ids):
    """Equal at first, the copies of the stream differ once training has started, and go on to."""
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, hc_mult=4, **SMALL).train()
    streams = []
    model.model.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output[1].detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        step(model, optimizer, ids(2, 16))
    spreads = [((s - s.mean(2, keepdim=True)).norm() / s.norm()).item() for s in streams]
    assert spreads[0] <= 1e-6
    assert spreads[1] > 1e-5 and spreads[3] > 2 * spreads[1]
