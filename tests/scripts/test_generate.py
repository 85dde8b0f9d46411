"""scripts/generate.py: what it writes is what `generate` gives; one prompt, a chat, a file, an interrupted file."""

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def test_the_prompt_may_follow_the_options(run, folders, answer):
    printed = run(folders["engram"], *NEW, PROMPTS[0])
    assert printed.out.rstrip("\n") == answer(PROMPTS[0]).rstrip("\n")


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


def test_an_assistant_of_another_vocabulary(run, folders, answer, plain_tokenizer, tmp_path):
    backend = plain_tokenizer.train_new_from_iterator([topics["with"]], 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, eos_token_id=0, bos_token_id=None)).save_pretrained(
        tmp_path / "other vocabulary"
    )
    backend.save_pretrained(tmp_path / "other vocabulary")
    assert backend.get_vocab() != plain_tokenizer.get_vocab()
    printed = run(folders["engram"], PROMPTS[0], *NEW, "--assistant", tmp_path / "other vocabulary")
    assert printed.out.rstrip("\n") == answer(PROMPTS[0]).rstrip("\n")


def test_other_architectures(run, folders, plain_tokenizer, tmp_path):
    assert "tokens/s" in run(folders["plain"], PROMPTS[0], *NEW).err
    # Without rotary positions there is no bound to the length.
    BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    plain_tokenizer.save_pretrained(tmp_path)
    assert "tokens/s" in run(tmp_path, PROMPTS[0], *NEW).err


def test_lines_end_where_the_file_says(run, folders, answer, tmp_path):
    """A mark at the file's start is none of the prompt's, and what else may count as the end of a line is."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    texts = ["for\u2028while", "a\x0cb", "c\x85d"]
    prompts.write_bytes(("\ufeff" + "\r\n".join(texts) + "\r\n\r\n").encode())
    command = [folders["engram"], "--file", prompts, "--output", output, *NEW]
    run(*command)
    whole = output.read_text(encoding="utf-8")
    entries = [json.loads(line) for line in whole.split("\n")[:-1]]
    assert [entry["prompt"] for entry in entries] == texts
    assert [entry["answer"] for entry in entries] == [answer(text) for text in texts]
    again = run(*command)
    assert "has 3 of 3 answers" in again.err and output.read_text(encoding="utf-8") == whole


def test_a_model_without_special_tokens(run, folders, answer, tmp_path):
    """One prompt needs no padding token; several at a time do."""
    folder, prompts, output = tmp_path / "model", tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    shutil.copytree(folders["engram"], folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        drop = ("pad_token", "eos_token", "pad_token_id", "eos_token_id")
        (folder / name).write_text(json.dumps({key: value for key, value in fields.items() if key not in drop}))
    assert run(folder, PROMPTS[0], *NEW).out.rstrip("\n") == answer(PROMPTS[0]).rstrip("\n")
    prompts.write_text("one\ntwo\n")
    command = [folder, "--file", prompts, "--output", output, *NEW]
    with pytest.raises(SystemExit, match="--batch-size 1"):
        run(*command)
    run(*command, "--batch-size", "1")
    assert len(output.read_text(encoding="utf-8").split("\n")) == 3


def test_a_generation_config_with_stop_strings(run, folders, answer, tmp_path):
    shutil.copytree(folders["engram"], tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    whole = answer(PROMPTS[0])
    stop = whole[len(whole) // 2]
    fields = {"stop_strings": [stop], "num_return_sequences": 2, "do_sample": True, "top_p": 0.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    printed = run(tmp_path / "model", PROMPTS[0], *NEW).out.rstrip("\n")
    assert stop in printed and whole.startswith(printed) and len(printed) < len(whole)


def test_an_interruption_is_no_success(run, script, folders, monkeypatch, capsys):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Speed, "generate", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run(folders["engram"], PROMPTS[0], *NEW)
    assert stopped.value.code == 130 and "tokens/s" in capsys.readouterr().err


def test_a_template_that_refuses(run, folders, tmp_path):
    shutil.copytree(folders["engram"], tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(SystemExit, match="no system messages"):
        run(tmp_path / "model", "x", "--chat", *NEW)


def test_what_is_refused(run, folders, tmp_path):
    prompts, answers, other = tmp_path / "prompts.txt", tmp_path / "answers.jsonl", tmp_path / "other.jsonl"
    prompts.write_text("one\n", encoding="utf-8")
    other.write_text('{"prompt": "two", "answer": "x"}\n', encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    lines = ['{"prompt": 5}', '{"prompt": null}', '{"prompt": ["a", "b"]}', '{"prompt": "\\ud800"}', "[]", "5"]
    for number, line in enumerate(lines):
        (tmp_path / f"bad{number}.jsonl").write_text('{"prompt": "x"}\n\n' + line)
    chats = ['{"messages": []}', '{"messages": [5]}', '{"messages": {"role": "user"}}', '{"messages": [{"rol": "x"}]}']
    for number, line in enumerate(chats):
        (tmp_path / f"chat{number}.jsonl").write_text(line)
    (tmp_path / "none.jsonl").write_text('{"prompt": "x"}\n{"prompt": ""}\n')
    (tmp_path / "long.txt").write_text("x\n\n" + "import " * 300)
    questions = '{"prompt": "one"}\n{"prompt": "two"}'
    (tmp_path / "questions.jsonl").write_text(questions)
    (tmp_path / "questions2.jsonl").write_text(questions + "\n")
    (tmp_path / "notes").write_text("a line without an end")
    engram, plain = folders["engram"], folders["plain"]
    for name in ("run/checkpoint-9", "run/checkpoint-10", "run/checkpoint-none2", "adapter"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    cases = [
        ([tmp_path / "nothing", "x"], "nothing"),
        ([tmp_path / "run", "x"], "one of its checkpoints, such as .*checkpoint-10"),
        ([tmp_path / "adapter", "x"], "is an adapter: merge it"),
        ([engram, "x", "--assistant", tmp_path / "adapter"], "is an adapter: merge it"),
        ([plain, "x", "--engram-placement", "disk"], "has no tables"),
        ([plain, "x", "--chat"], "no chat template"),
        ([engram, ""], "prompt is empty"),
        ([engram, "x", "--max-new-tokens", "128"], "max_position_embeddings"),
        ([engram, "--file", tmp_path / "none.txt", "--output", answers], "none.txt"),
        ([engram, "--file", tmp_path / "empty.txt", "--output", answers], "holds no prompt"),
        ([engram, "--file", tmp_path / "bad.jsonl", "--output", answers], "entry 1"),
        ([engram, "--file", prompts, "--output", other], "answers other prompts"),
        ([engram, "--file", prompts, "--output", prompts], "would be overwritten"),
        ([engram, "--file", tmp_path / "questions.jsonl", "--output", tmp_path / "questions.jsonl"], "overwritten"),
        (
            [engram, "--file", tmp_path / "questions.jsonl", "--output", tmp_path / "questions2.jsonl"],
            "not a file of answers",
        ),
        ([engram, "--file", prompts, "--output", tmp_path / "notes"], "not a file of answers"),
        ([engram, "--file", prompts, "--output", tmp_path / "no" / "answers.jsonl"], "folder that does not exist"),
        ([engram, "--file", tmp_path / "latin.txt", "--output", answers], "latin.txt is not UTF-8"),
        ([engram, "--file", tmp_path / "none.jsonl", "--output", answers, *NEW], "entry 2: The prompt is empty"),
        ([engram, "--file", tmp_path / "long.txt", "--output", answers, *NEW], "entry 2: A prompt of"),
        ([engram, "a\udc80"], "not UTF-8"),
        *(([engram, "--file", tmp_path / f"bad{n}.jsonl", "--output", answers], "entry 2: no") for n in range(6)),
        *(
            ([engram, "--chat", "--file", tmp_path / f"chat{n}.jsonl", "--output", answers], "no JSON")
            for n in range(4)
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit, match=message):
            run(*arguments)
    assert not answers.exists() and prompts.read_text() == "one\n"
    assert (tmp_path / "questions.jsonl").read_text() == questions
    assert (tmp_path / "notes").read_text() == "a line without an end"
    for arguments in (
        ["x", "--temperature", "-1"],
        ["x", "--file", prompts],
        ["--file", prompts],
        ["x", "--system", "y"],
        ["x", "--device", "nowhere"],
        ["x", "--device", "cuda:99"],
    ):
        with pytest.raises(SystemExit) as refused:
            run(engram, *arguments)
        assert refused.value.code == 2
