"""The models that the suite runs on, and a watch on the table rows that they look up.

`pytest tests/conformance --model DIR` runs everything on the model saved in DIR, in fp32, with the tokenizer saved
there; without the option it runs on four small models that are made here. Fixtures are shared by all cases: a case
that changes a model or a tokenizer takes a copy.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.masking_utils import create_causal_mask

from hf_engram import EngramForCausalLM, EngramTokenizer


# Every value of hc_mult, tied and untied, one and three Engram layers, the first layer among them and not.
SHAPES = {
    "hc1_tied_first": {"hc_mult": 1, "tie_word_embeddings": True, "layers": [0], "ngram": 3, "heads": 2, "rows": 50},
    "hc4_untied_three": {"hc_mult": 4, "tie_word_embeddings": False, "layers": [0, 1, 3], "ngram": 4, "heads": 4},
    "hc1_untied_three": {"hc_mult": 1, "tie_word_embeddings": False, "layers": [1, 2, 3], "ngram": 2, "heads": 3},
    "hc4_tied_late": {"hc_mult": 4, "tie_word_embeddings": True, "layers": [2], "ngram": 5, "heads": 2, "rows": 64},
}
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", metavar="DIR", help="tests/conformance: run on the model saved in DIR")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Unknown where pytest was started on a folder above this one, since the command line was read before this file.
    folder = metafunc.config.getoption("--model", default=None)
    if "shape" in metafunc.fixturenames:
        shapes = [Path(folder).resolve()] if folder else list(SHAPES)
        metafunc.parametrize("shape", shapes, ids=lambda shape: getattr(shape, "name", shape), scope="session")


def train_tokenizer(vocab_size: int, first_topic: int = 0) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sorted(topics.values())[first_topic : first_topic + 12], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 360 ids, not yet wrapped."""
    return train_tokenizer(360)


@pytest.fixture(scope="session")
def other_plain_tokenizer() -> PreTrainedTokenizerFast:
    """As many ids, other words."""
    return train_tokenizer(360, first_topic=40)


@pytest.fixture(scope="session")
def make_model(lively_model) -> Callable[..., EngramForCausalLM]:
    """`make_model(tokenizer, **fields)`: a model made for the tokenizer, in which memory and stream have an effect."""

    def make(tokenizer: EngramTokenizer, cls=EngramForCausalLM, seed: int = 0, **fields):
        sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "pad_token_id": tokenizer.pad_token_id}
        return lively_model(cls, seed=seed, **{**sizes, **tokenizer.engram_fields(), **fields}).bind_tokenizer(
            tokenizer
        )

    return make


@pytest.fixture(scope="session")
def wrap() -> Callable[..., EngramTokenizer]:
    """`wrap(plain_tokenizer, layers, ngram, heads, rows, **settings)`: the Engram tokenizer of a layout."""

    def make(plain, layers=(0, 2), ngram: int = 3, heads: int = 2, rows: int = 900, **settings) -> EngramTokenizer:
        return EngramTokenizer.from_tokenizer(
            plain,
            engram_layer_ids=layers,
            engram_max_ngram_size=ngram,
            engram_n_heads=heads,
            engram_vocab_size=rows,
            **settings,
        )

    return make


@pytest.fixture(scope="session")
def model_and_tokenizer(shape, plain_tokenizer, wrap, make_model):
    """One of the models under test, and its tokenizer (None if its folder has none)."""
    if isinstance(shape, Path):
        model = EngramForCausalLM.from_pretrained(shape, dtype=torch.float32).eval()
        has_tokenizer = (shape / "tokenizer.json").is_file()
        return model, EngramTokenizer.from_pretrained(shape) if has_tokenizer else None
    fields = dict(SHAPES[shape])
    layout = {name: fields.pop(name) for name in ("layers", "ngram", "heads", "rows") if name in fields}
    tokenizer = wrap(plain_tokenizer, **layout)
    return make_model(tokenizer, vocab_size=len(tokenizer) + 8, engram_head_dim=16, **fields), tokenizer


@pytest.fixture(scope="session")
def model(model_and_tokenizer) -> EngramForCausalLM:
    """A model under test; shared, not to be changed."""
    return model_and_tokenizer[0]


@pytest.fixture
def own_model(model) -> EngramForCausalLM:
    """A copy of the model under test, which the case may change."""
    return copy.deepcopy(model)


@pytest.fixture(scope="session")
def tokenizer(model_and_tokenizer) -> EngramTokenizer:
    """The tokenizer of the model under test; shared, not to be changed."""
    if model_and_tokenizer[1] is None:
        pytest.skip("the folder given with --model holds no tokenizer")
    return model_and_tokenizer[1]


@pytest.fixture(scope="session")
def saved_folder(model, tmp_path_factory) -> Path:
    """The model under test, saved; to be read only."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def draw(model) -> Callable[..., torch.Tensor]:
    """`draw(batch, length, seed=0)`: token ids of the model under test, without special ones."""
    known = model.config.engram_token_map_size or model.config.vocab_size
    special = special_ids(model.config)
    plain = torch.tensor([i for i in range(known) if i not in special])

    def make(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return plain[torch.randint(len(plain), (batch, length), generator=generator)]

    return make


@pytest.fixture(scope="session")
def left_padded(model) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`left_padded([ids, ...], side="left")`: one batch of rows `[1, length]` of different lengths, and its mask."""

    def make(rows: list[torch.Tensor], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
        length = max(row.shape[1] for row in rows)
        pad_id = model.config.engram_pad_token_id
        ids = torch.full((len(rows), length), pad_id)
        mask = torch.zeros(len(rows), length, dtype=torch.long)
        for i, row in enumerate(rows):
            place = slice(length - row.shape[1], length) if side == "left" else slice(0, row.shape[1])
            ids[i, place], mask[i, place] = row[0], 1
        return ids, mask

    return make


class Watch:
    """What a model looked up.

    Attributes:
        used: int64 `[B, L, n_engram_layers, C]` for every forward: the rows that the memory was asked for.
        steps: (token ids from the sequence's start `[B, T]`, attention mask or None) for every step of `generate`.
    """

    def __init__(self, model: EngramForCausalLM) -> None:
        self.model = model
        self.used: list[torch.Tensor] = []
        self.steps: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def check_sequences(self, sequences: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """The rows used over all forwards are, one after another, those of the full `sequences`."""
        used = torch.cat(self.used, 1)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1)
        expected = self.model.compute_hash_ids(sequences, attention_mask=mask)[:, : used.shape[1]]
        assert used.shape[1] >= sequences.shape[1] - 1
        assert_same_rows(used, expected, None if mask is None else mask[:, : used.shape[1]])

    def check_steps(self) -> None:
        """At every step of `generate`, the rows used are those of that step's full sequences (beams move about)."""
        assert len(self.steps) == len(self.used) > 0
        for (ids, mask), used in zip(self.steps, self.used, strict=True):
            assert mask is None or mask.shape == ids.shape
            length = used.shape[1]
            expected = self.model.compute_hash_ids(ids, attention_mask=mask)[:, -length:]
            assert_same_rows(used, expected, None if mask is None else mask[:, -length:])


def assert_same_rows(used: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Equal at every token that is not padding; what is looked up at padding is never written anywhere."""
    assert used.shape == expected.shape
    differs = (used != expected).flatten(2).any(-1)
    if mask is not None:
        differs &= mask != 0
    assert not differs.any(), f"other rows at [row, position] {differs.nonzero().tolist()}"


@contextlib.contextmanager
def watching(model: EngramForCausalLM) -> Iterator[Watch]:
    watch = Watch(model)

    def record_lookup(module, args, kwargs) -> None:
        hash_ids = kwargs["hash_ids"] if "hash_ids" in kwargs else args[0]
        watch.used.append(hash_ids.detach().clone())

    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def record_step(input_ids, *args, **kwargs):
        mask = kwargs.get("attention_mask")
        watch.steps.append((input_ids.clone(), mask.clone() if isinstance(mask, torch.Tensor) else None))
        return prepare(input_ids, *args, **kwargs)

    handle = model.model.engram_memory.register_forward_pre_hook(record_lookup, with_kwargs=True)
    model.prepare_inputs_for_generation = record_step
    try:
        yield watch
    finally:
        handle.remove()
        del model.prepare_inputs_for_generation


@pytest.fixture(scope="session")
def watch() -> Callable[[EngramForCausalLM], contextlib.AbstractContextManager[Watch]]:
    """`with watch(model) as seen:` records every lookup and every step of `generate` in a [`Watch`]."""
    return watching


@pytest.fixture(scope="session")
def same_rows() -> Callable[..., None]:
    """`same_rows(used, expected, mask=None)`: raises unless two sets of rows are equal where `mask` is not 0."""
    return assert_same_rows


def special_ids(config) -> list[int]:
    """Ids that no prompt of ours holds and that no text of ours goes on with: it must not end, and a generated pad
    token would be taken for padding where `generate` starts again (for an assistant), which is Transformers' guess."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = {config.pad_token_id, config.bos_token_id, config.engram_pad_token_id, *eos}
    return sorted(i for i in ids if i is not None)


@pytest.fixture(scope="session")
def generate() -> Callable[..., torch.Tensor]:
    """`generate(model, input_ids, n, cache=None, **kwargs)`: `model.generate` of n tokens, none of them special,
    greedy unless `kwargs` say otherwise; the cache goes under the name that this version of Transformers uses."""

    def run(model, input_ids, n: int = 8, cache=None, **kwargs):
        config = model.config
        if cache is not None:
            kwargs[CACHE_ARGUMENT] = cache
        pad_token_id = config.engram_pad_token_id if config.pad_token_id is None else config.pad_token_id
        defaults = {"max_new_tokens": n, "do_sample": False, "pad_token_id": pad_token_id}
        return model.generate(input_ids, **{**defaults, "suppress_tokens": special_ids(config), **kwargs})

    return run


@pytest.fixture(scope="session")
def run_cached() -> Callable[..., torch.Tensor]:
    """`run_cached(model, input_ids, cache, **kwargs)`: logits of the tokens that continue the cache."""

    @torch.no_grad()
    def run(model, input_ids, cache, **kwargs) -> torch.Tensor:
        return model(input_ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs).logits

    return run


@pytest.fixture(scope="session")
def plain_greedy() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`plain_greedy(model, input_ids, n, attention_mask=None)`: the sequences `[B, T + n]` and the last n logits
    `[B, n, V]` of greedy decoding without any cache: the whole sequence goes through the model at every step."""

    @torch.no_grad()
    def run(model, input_ids, n: int = 8, attention_mask=None):
        ids, mask, logits = input_ids, attention_mask, []
        for _ in range(n):
            logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1])
            scores = logits[-1].index_fill(1, torch.tensor(special_ids(model.config)), float("-inf"))
            best, tokens = scores.topk(2)
            assert (best[:, 0] - best[:, 1]).min() > 1e-4, "too close to call, as logits are compared: another prompt"
            ids = torch.cat([ids, tokens[:, :1]], 1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return ids, torch.stack(logits, 1)

    return run


@pytest.fixture(scope="session")
def spelled_out_hash() -> Callable[..., torch.Tensor]:
    """`spelled_out_hash(model, ids, dead=(), starts=())`: the rows `[L, n_engram_layers, C]` of one list of token ids,
    token by token with Python's integers; `dead` and `starts` are positions."""

    def compute(model, ids: list[int], dead=(), starts=()) -> torch.Tensor:
        hasher, config = model.model.engram_hasher, model.config
        token_map, primes = hasher.token_map.tolist(), hasher.primes.tolist()
        multipliers, offsets = hasher.multipliers.tolist(), hasher.offsets.tolist()
        rows = []
        for end in range(len(ids)):
            window = []
            for position in range(end, max(end - config.engram_max_ngram_size, -1), -1):
                if position in dead:
                    break
                window.append(token_map[ids[position]])
                if position in starts:
                    break
            absent = config.engram_max_ngram_size - len(window)
            window += [token_map[config.engram_pad_token_id]] * absent
            rows.append([])
            for layer, factors in enumerate(multipliers):
                products = [token * factor for token, factor in zip(window, factors, strict=True)]
                mixed, columns = products[0], []
                for size, product in enumerate(products[1:]):
                    mixed ^= product
                    heads = zip(primes[layer][size], offsets[layer][size], strict=True)
                    columns += [mixed % prime + offset for prime, offset in heads]
                rows[-1].append(columns)
        return torch.tensor(rows)

    return compute
