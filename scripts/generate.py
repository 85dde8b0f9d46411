"""Generate with a model: complete a text, chat, or answer a file of prompts.

    python scripts/generate.py runs/quickstart "def main("              # streams the rest
    python scripts/generate.py my-smollm --chat "Why is the sky blue?"  # one answer; without a text, a conversation
    python scripts/generate.py my-smollm --chat --file questions.txt --output answers.jsonl

The model is a folder or a Hub id, of Engram or of any other architecture of Transformers. A file holds one prompt a
line; a .jsonl file, objects with "prompt" or, for --chat, "messages". Its answers are written as they come, one JSON
object a line, in the prompts' order; run the same command again, and it goes on where it was interrupted.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

import hf_engram  # noqa: F401 - registers the architecture with the Auto classes; no code from the Hub is run
from hf_engram.processes import check_processes
from hf_engram.run_folder import check_is_model


ANSWER = '{"prompt": '  # what each line of --output begins with
PLACEMENTS = ("device", "cpu", "disk")


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    def temperature(text: str) -> float:
        if not 0 <= (value := float(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a temperature: 0 is greedy, 1 the model's distribution")
        return value

    def device(text: str) -> str:
        try:
            torch.zeros(1, device=text).item()
        except (RuntimeError, AssertionError) as error:
            raise argparse.ArgumentTypeError(f"{text} cannot be used: {str(error).splitlines()[0]}") from error
        return text

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("prompt", nargs="?", default=argparse.SUPPRESS,
                        help="the text; by default standard input: in a terminal each line is one")  # fmt: skip
    parser.add_argument("--chat", action="store_true", help="the text is a user's message: use the chat template")
    parser.add_argument("--system", default=argparse.SUPPRESS, help="system message of a chat")
    parser.add_argument("--file", type=Path, default=argparse.SUPPRESS,
                        help='prompts to answer: one a line, or .jsonl with "prompt" or "messages"')  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=argparse.SUPPRESS, help="file for the answers to --file, .jsonl"
    )
    parser.add_argument("--batch-size", type=count, default=8, help="prompts of --file at a time")
    parser.add_argument("--max-new-tokens", type=count, default=256, help="longest answer")
    parser.add_argument("--temperature", type=temperature, default=argparse.SUPPRESS,
                        help="0 is greedy; by default the model's generation config decides")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled answers")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                        help="of the weights; auto is as they were saved")  # fmt: skip
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to compute: cpu, cuda, cuda:1, ...")  # fmt: skip
    parser.add_argument("--engram-placement", choices=PLACEMENTS, default=argparse.SUPPRESS,
                        help="where the tables live; by default as the model's config says")  # fmt: skip
    parser.add_argument("--assistant", default=argparse.SUPPRESS,
                        help="a smaller model, folder or Hub id, that guesses ahead")  # fmt: skip
    args = parser.parse_intermixed_args()  # the prompt may follow the options
    if ("file" in args) != ("output" in args):
        parser.error("--file and --output go together")
    if "file" in args and "prompt" in args:
        parser.error("give a prompt or --file, not both")
    if "system" in args and not args.chat:
        parser.error("--system is for --chat")
    return args


# --- the model -------------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace):
    """Model, tokenizer, and options of `generate` that hold for all prompts."""
    for source in (args.model, *([args.assistant] if "assistant" in args else [])):
        check_is_model(source)
    config = AutoConfig.from_pretrained(args.model)
    options = {"dtype": args.dtype}
    if "engram_placement" in args:
        if config.model_type != "engram":
            raise ValueError(f"--engram-placement {args.engram_placement}: {args.model} is a {config.model_type} "
                             "model, which has no tables.")  # fmt: skip
        options["engram_placement"] = args.engram_placement
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if args.chat and tokenizer.chat_template is None:
        raise ValueError(f"--chat: the tokenizer of {args.model} has no chat template; leave --chat out to complete "
                         "texts.")  # fmt: skip
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, **options).to(args.device).eval()
    # Some configs bound the length of prompt and answer together, which --max-new-tokens is not to be held against.
    how = {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "num_return_sequences": 1}
    if "temperature" in args:
        how |= {"do_sample": args.temperature > 0}
        how |= (
            {"temperature": args.temperature}
            if args.temperature
            else {"temperature": None, "top_p": None, "top_k": None}
        )
    if "assistant" in args:
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=args.dtype).to(args.device).eval()
        how["assistant_model"] = assistant
        other = AutoTokenizer.from_pretrained(args.assistant)
        if other.get_vocab() != tokenizer.get_vocab():
            how["assistant_tokenizer"] = other
    return model, tokenizer, how


def encode(args: argparse.Namespace, model, tokenizer, prompts: list[str | list[dict]]) -> dict[str, torch.Tensor]:
    """The model's inputs, padded on the left: of texts, or of chats as lists of messages."""
    padding = len(prompts) > 1  # one needs no padding token, which some tokenizers lack
    if args.chat:
        batch = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=padding, return_dict=True, return_tensors="pt"
        )
    else:
        batch = tokenizer(prompts, padding=padding, return_tensors="pt")
    length = batch["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # some have no bound
    if length == 0:
        raise ValueError("The prompt is empty: give at least one token.")
    if limit is not None and length + args.max_new_tokens > limit:
        raise ValueError(
            f"A prompt of {length} tokens and --max-new-tokens {args.max_new_tokens} are more than the {limit} "
            "positions of the model (max_position_embeddings): shorten one."
        )
    batch.pop("hash_ids", None)  # the model computes them itself, and an assistant may know no such thing
    return batch.to(model.device)


class Speed:
    """Counts new tokens and the seconds that they took."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __str__(self) -> str:
        return f"{self.tokens} tokens in {self.seconds:.1f} s: {self.tokens / max(self.seconds, 1e-9):.1f} tokens/s"

    def generate(self, model, tokenizer, batch, **how) -> list[list[int]]:
        """The new token ids of each row, up to and with the end of its text."""
        start = time.perf_counter()
        output = model.generate(**batch, tokenizer=tokenizer, **how)[:, batch["input_ids"].shape[1] :].tolist()
        self.seconds += time.perf_counter() - start
        ends = model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        answers = []
        for ids in output:
            end = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
            answers.append(ids[:end])
        self.tokens += sum(map(len, answers))
        return answers


# --- what it is used for ---------------------------------------------------------------------------------------------


def converse(args: argparse.Namespace, model, tokenizer, how: dict, speed: Speed) -> None:
    """Streams the answer to the prompt, or to one line of the terminal after the other; a chat remembers them."""
    terminal = "prompt" not in args and sys.stdin.isatty()
    history = [{"role": "system", "content": args.system}] if "system" in args else []
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    while True:
        if terminal:
            try:
                text = input("> ")
            except EOFError:
                return
            if not text:
                continue
        else:
            text = args.prompt if "prompt" in args else sys.stdin.read()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"The prompt is not UTF-8: {error}.") from error
        if args.chat:
            history.append({"role": "user", "content": text})
        batch = encode(args, model, tokenizer, [history if args.chat else text])
        (answer,) = speed.generate(model, tokenizer, batch, streamer=streamer, **how)
        history.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        if not terminal:
            return


def prompt_of(entry: object, chat: bool) -> str | list[dict]:
    """What an object of a .jsonl file asks.

    Raises:
        KeyError, TypeError, ValueError: it is not one that can be asked.
    """
    if not isinstance(entry, dict):
        raise TypeError
    prompt = entry["messages"] if chat and "messages" in entry else entry["prompt"]
    are_messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not (isinstance(prompt, str) or (chat and are_messages)):
        raise TypeError
    json.dumps(prompt, ensure_ascii=False).encode()  # half a character, as \ud800, is none
    return prompt


def read_prompts(args: argparse.Namespace) -> list[str | list[dict]]:
    """The prompts of --file: texts, or with --chat, lists of messages."""
    try:
        text = args.file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {args.file} is not UTF-8 ({error}): convert it, e.g. with iconv.") from error
    # Not `splitlines`, to which some characters within a prompt end a line, too.
    entries = [line for line in text.split("\n") if line.strip()]
    if not entries:
        raise ValueError(f"--file {args.file} holds no prompt.")
    if args.file.suffix == ".jsonl":
        for number, line in enumerate(entries, 1):
            try:
                entries[number - 1] = prompt_of(json.loads(line), args.chat)
            except (ValueError, KeyError, TypeError) as error:
                what = "a text 'prompt'" + (" or a list 'messages' of objects with 'role'" if args.chat else "")
                raise ValueError(
                    f"--file {args.file}, entry {number}: no JSON object with {what}: {line[:80]}"
                ) from error
    if not args.chat:
        return entries
    system = [{"role": "system", "content": args.system}] if "system" in args else []
    return [system + ([{"role": "user", "content": e}] if isinstance(e, str) else e) for e in entries]


def batch_size(args: argparse.Namespace) -> int:
    return 1 if "assistant" in args else args.batch_size  # assisted decoding takes one row


def answers_so_far(args: argparse.Namespace, prompts: list) -> int:
    """How many prompts the output file has answers to; those must be to these prompts. Answers of a batch that was
    interrupted are removed."""
    if not args.output.exists():
        if not args.output.parent.is_dir():
            raise ValueError(f"--output {args.output} lies in a folder that does not exist: make it first.")
        return 0
    if args.output.samefile(args.file):
        raise ValueError(f"--output {args.output} is --file, which would be overwritten: name another.")
    text = args.output.read_text(encoding="utf-8", errors="replace")  # the last character may be cut off
    *lines, rest = text.split("\n")
    try:
        answers = [json.loads(line) for line in lines]
        if not all("answer" in entry for entry in answers) or not ANSWER.startswith(rest[: len(ANSWER)]):
            raise ValueError("These are no answers.")
        asked = [entry["prompt"] for entry in answers]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--output {args.output} is not a file of answers: name another.") from error
    if asked != prompts[: len(asked)]:
        raise ValueError(f"--output {args.output} answers other prompts than those of {args.file}: name another.")
    if len(lines) < len(prompts):
        lines = lines[: len(lines) // batch_size(args) * batch_size(args)]
    if (whole := "".join(f"{line}\n" for line in lines)) != text:
        args.output.write_text(whole, encoding="utf-8")
    return len(lines)


def answer_file(args: argparse.Namespace, prompts: list, model, tokenizer, how: dict, speed: Speed) -> None:
    """Answers the prompts that have no answer yet, a batch at a time; all are checked before the first is."""
    done, size = answers_so_far(args, prompts), batch_size(args)
    if done:
        print(f"{args.output} has {done} of {len(prompts)} answers, which stay as they are, whatever the model and "
              "the options. To answer anew, name another file.", file=sys.stderr)  # fmt: skip
    if tokenizer.pad_token is None and min(size, len(prompts)) > 1:
        raise ValueError(f"The tokenizer of {args.model} has no padding token: use --batch-size 1.")
    for number, prompt in enumerate(prompts[done:], done + 1):
        try:
            encode(args, model, tokenizer, [prompt])
        except (ValueError, TypeError, TemplateError) as error:
            raise ValueError(f"--file {args.file}, entry {number}: {error}") from error
    with (
        args.output.open("a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=done, desc="answers") as bar,
    ):
        for start in range(done, len(prompts), size):
            some = prompts[start : start + size]
            set_seed(args.seed + start)  # so that an interrupted run samples what it would have
            batch = encode(args, model, tokenizer, some)
            for prompt, ids in zip(some, speed.generate(model, tokenizer, batch, **how), strict=True):
                answer = {"prompt": prompt, "answer": tokenizer.decode(ids, skip_special_tokens=True)}
                file.write(json.dumps(answer | {"tokens": len(ids)}, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(some))


def main() -> None:
    args = parse_args()
    check_processes()
    speed = Speed()
    try:
        if "file" in args:
            prompts = read_prompts(args)
            answers_so_far(args, prompts)
        model, tokenizer, how = load(args)
        set_seed(args.seed)
        if "file" in args:
            answer_file(args, prompts, model, tokenizer, how, speed)
        else:
            converse(args, model, tokenizer, how, speed)
    except (OSError, ValueError, TemplateError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt as error:
        print(f"\n{speed}", file=sys.stderr)
        raise SystemExit(130) from error  # as shells have it: nothing that waits for this to succeed goes on
    print(speed, file=sys.stderr)


if __name__ == "__main__":
    main()
