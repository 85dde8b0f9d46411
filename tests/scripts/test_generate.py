"""scripts/generate.py: what it writes is what `generate` gives; one prompt, a chat, a file, an interrupted file."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "generate.py"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}<assistant>"
PROMPTS = ["The for statement", "An assignment is", "while", "The import statement and its", "def"]
NEW = ["--max-new-tokens", "12", "--temperature", "0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, monkeypatch, capsys):
    """`run(*arguments, stdin="")`: what the script prints to its standard output and to its error output."""

    def call(*arguments: object, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        capsys.readouterr()
        script.main()
        return capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([topics["for"], topics["while"], topics["import"]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, plain_tokenizer) -> dict[str, Path]:
    """An Engram model whose memory matters, and a plain one with the same vocabulary."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = EngramTokenizer.from_tokenizer(
        plain_tokenizer, engram_layer_ids=[0, 1], engram_max_ngram_size=3, engram_n_heads=2, engram_vocab_size=300
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    config = EngramConfig(**sizes, **ids, engram_head_dim=8, max_position_embeddings=128, initializer_range=0.3,
                          **tokenizer.engram_fields())  # fmt: skip
    model = EngramForCausalLM(config).bind_tokenizer(tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.engram.wkv.weight.normal_()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(root / "engram")
    tokenizer.save_pretrained(root / "engram")
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, max_position_embeddings=64)).save_pretrained(root / "plain")
    plain_tokenizer.save_pretrained(root / "plain")
    return {"engram": root / "engram", "plain": root / "plain"}


@pytest.fixture(scope="module")
def answer(folders):
    """`answer(text)`: the model's own greedy continuation, twelve tokens of one row without padding."""
    model = EngramForCausalLM.from_pretrained(folders["engram"]).eval()
    tokenizer = EngramTokenizer.from_pretrained(folders["engram"])

    def call(text: str) -> str:
        batch = tokenizer(text, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=12, do_sample=False)[0, batch["input_ids"].shape[1] :]
        return tokenizer.decode(output, skip_special_tokens=True)

    return call


@pytest.mark.parametrize("placement", [[], ["--engram-placement", "disk"]])
def test_a_text_is_completed(run, folders, answer, placement):
    printed = run(folders["engram"], PROMPTS[0], *NEW, *placement)
    assert printed.out.rstrip("\n") == answer(PROMPTS[0]).rstrip("\n") and answer(PROMPTS[0]).strip()
    assert "12 tokens in" in printed.err and "tokens/s" in printed.err
    assert run(folders["engram"], *NEW, stdin=PROMPTS[0]).out == printed.out


def test_a_chat_uses_the_template(run, folders, answer):
    expected = answer("<system>Be brief.<eos><user>Why?<eos><assistant>")
    printed = run(folders["engram"], "Why?", "--chat", "--system", "Be brief.", *NEW)
    assert printed.out.rstrip("\n") == expected.rstrip("\n")


def test_a_conversation_remembers(run, folders, answer, script, monkeypatch):
    """In a terminal, each line is the next message."""
    lines = iter(["Why?", "", "How?"])

    def typed(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    printed = run(folders["engram"], "--chat", *NEW, stdin=Terminal())
    first = answer("<user>Why?<eos><assistant>")
    second = answer(f"<user>Why?<eos><assistant>{first}<eos><user>How?<eos><assistant>")
    assert printed.out.replace("\n", "") == (first + second).replace("\n", "")


def test_a_file_is_answered_in_its_order(run, folders, answer, tmp_path):
    """Batches, padding and an interruption in the middle of a batch change nothing."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    command = [folders["engram"], "--file", prompts, "--output", output, "--batch-size", "2", *NEW]
    printed = run(*command)
    assert "tokens/s" in printed.err
    whole = output.read_text(encoding="utf-8")
    entries = [json.loads(line) for line in whole.splitlines()]
    assert [entry["prompt"] for entry in entries] == PROMPTS
    assert [entry["answer"] for entry in entries] == [answer(prompt) for prompt in PROMPTS]
    lines = whole.splitlines(keepends=True)
    output.write_text("".join(lines[:3]) + lines[3][:10], encoding="utf-8")
    run(*command)
    assert output.read_text(encoding="utf-8") == whole
    assert "0 tokens in" in run(*command).err and output.read_text(encoding="utf-8") == whole


def test_an_interrupted_file_samples_the_same(run, folders, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    command = [folders["engram"], "--file", prompts, "--output", output, "--batch-size", "2", "--max-new-tokens", "8",
               "--temperature", "1"]  # fmt: skip
    run(*command)
    whole = output.read_text(encoding="utf-8")
    output.write_text("".join(whole.splitlines(keepends=True)[:3]), encoding="utf-8")
    run(*command)
    assert output.read_text(encoding="utf-8") == whole


def test_chats_of_a_file(run, folders, answer, tmp_path):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x"},
                {"role": "user", "content": "How?"}]  # fmt: skip
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "Why?"}) + "\n")
    run(folders["engram"], "--chat", "--file", prompts, "--output", output, *NEW)
    found = [json.loads(line)["answer"] for line in output.read_text(encoding="utf-8").splitlines()]
    chats = ["<user>Why?<eos><assistant>x<eos><user>How?<eos><assistant>", "<user>Why?<eos><assistant>"]
    assert found == [answer(chat) for chat in chats]


def test_an_assistant_changes_no_answer(run, folders, answer):
    printed = run(folders["engram"], PROMPTS[0], *NEW, "--assistant", folders["plain"])
    assert printed.out.rstrip("\n") == answer(PROMPTS[0]).rstrip("\n")


def test_other_architectures(run, folders):
    assert "tokens/s" in run(folders["plain"], PROMPTS[0], *NEW).err


def test_what_is_refused(run, folders, tmp_path):
    prompts, answers, other = tmp_path / "prompts.txt", tmp_path / "answers.jsonl", tmp_path / "other.jsonl"
    prompts.write_text("one\n", encoding="utf-8")
    other.write_text('{"prompt": "two", "answer": "x"}\n', encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n')
    engram, plain = folders["engram"], folders["plain"]
    cases = [
        ([tmp_path / "nothing", "x"], "nothing"),
        ([plain, "x", "--engram-placement", "disk"], "has no tables"),
        ([plain, "x", "--chat"], "no chat template"),
        ([engram, ""], "prompt is empty"),
        ([engram, "x", "--max-new-tokens", "128"], "max_position_embeddings"),
        ([engram, "--file", tmp_path / "none.txt", "--output", answers], "none.txt"),
        ([engram, "--file", tmp_path / "empty.txt", "--output", answers], "holds no prompt"),
        ([engram, "--file", tmp_path / "bad.jsonl", "--output", answers], "entry 1"),
        ([engram, "--file", prompts, "--output", other], "answers other prompts"),
        ([engram, "--file", prompts, "--output", prompts], "not a file of answers"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit, match=message):
            run(*arguments)
    assert not answers.exists() and prompts.read_text() == "one\n"
    for arguments in (
        ["x", "--temperature", "-1"],
        ["x", "--file", prompts],
        ["--file", prompts],
        ["x", "--system", "y"],
    ):
        with pytest.raises(SystemExit) as refused:
            run(engram, *arguments)
        assert refused.value.code == 2
