"""Texts for training: how they are read, split and packed."""

import itertools

import pytest
import torch
from train_runs import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_engram.text_blocks import hold_out, make_batch, pack, read_documents, step_indices


def test_packing(finished):
    """Documents follow each other with an end of text, positions restart with documents and blocks."""
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint-4")
    eos = tokenizer.eos_token_id
    rows = [tokenizer(text)["input_ids"] for text in ("a b c", "d", "e f g h i j")]
    stream = [token for row in rows for token in [*row, eos]]
    blocks = pack(tokenizer, ["a b c", "d", "e f g h i j"], 7, "text")
    n = len(stream) // 7
    assert blocks["input_ids"].flatten().tolist() == stream[: 7 * n]
    positions = [i for row in rows for i in range(len(row) + 1)][: 7 * n]
    expected = []
    for i, position in enumerate(positions):
        expected.append(0 if position == 0 or i % 7 == 0 else expected[-1] + 1)
    assert blocks["position_ids"].flatten().tolist() == expected
    labels = make_batch(blocks, [1, 0], torch.device("cpu"))["labels"]
    assert (labels == -100).tolist() == (blocks["position_ids"][[1, 0]] == 0).tolist()


def test_evaluation_equals_documents_alone(finished):
    """The loss of packed blocks is that of their documents, each alone: nothing is seen across a boundary."""
    model = AutoModelForCausalLM.from_pretrained(finished / "checkpoint-12").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint-12")
    with torch.no_grad():
        for table in model.model.engram_memory.tables:  # so that n-grams matter
            table.weight.normal_()
        for layer in model.model.layers:
            layer.engram.wkv.weight.normal_(std=0.3)
    texts = [text[:40] for text in TEXTS]
    blocks = pack(tokenizer, texts, 64, "text")
    n_blocks = len(blocks["input_ids"])
    assert n_blocks >= 2
    batch = make_batch(blocks, list(range(n_blocks)), torch.device("cpu"))
    assert (batch["position_ids"] == 0).sum() > 2 * n_blocks
    total, targets = 0.0, 0
    with torch.no_grad():
        packed = model(**batch, use_cache=False)
        for ids, positions, logits in zip(batch["input_ids"], batch["position_ids"], packed.logits, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                alone = model(input_ids=ids[None, start:stop], labels=ids[None, start:stop])
                torch.testing.assert_close(logits[start:stop], alone.logits[0], rtol=1e-4, atol=1e-4)
                if stop - start > 1:
                    total += alone.loss.item() * (stop - start - 1)
                    targets += stop - start - 1
    assert packed.loss.item() == pytest.approx(total / targets, abs=1e-4)


def test_every_epoch_takes_every_block_once():
    taken = [step_indices(10, 3, step, 4) for step in range(5)]
    flat = [index for step in taken for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert taken[0] != step_indices(10, 4, 0, 4)


def test_hold_out():
    """By document, and of few documents by their ends."""
    many = [str(i) * 10 for i in range(40)]
    kept, held_out = hold_out(many, 0.05, 0)
    assert len(held_out) == 2 and sorted(kept + held_out) == sorted(many)
    assert (kept, held_out) == hold_out(many, 0.05, 0) != hold_out(many, 0.05, 1)
    assert hold_out(["a" * 19 + "b", "c" * 38 + "dd"], 0.05, 0) == (["a" * 19, "c" * 38], ["b", "dd"])


def test_folders(tmp_path, capsys):
    """All text below, in order; nothing hidden; files that are no text are named."""
    for name in ("b.txt", "a/z.md", "a/b.py", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert read_documents([str(tmp_path)], "text", "train") == ["a/b.py", "a/z.md", "b.txt"]
    assert "skipped 1 files that are not UTF-8 text" in capsys.readouterr().out
    assert read_documents([str(tmp_path / ".hidden")], "text", "train") == [".hidden"]
