"""What is said of a model's training on its card: where the data came from, how much of it there was, and the losses.

scripts/train.py reads it from the run's folder; with Transformers' Trainer, [`RecordTraining`] does it.
"""

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .run_folder import METRICS_FILE, load_arguments


def data_record(sources: list[str], name: str = "data") -> dict[str, Any]:
    """The sources by name: files and folders by their last part, since a card says nothing of whose disk they are on;
    others are on the Hub, `owner/name[:config]`, and also named in the card's metadata."""
    on_hub = [source for source in sources if not os.path.exists(source) and not os.path.isabs(source)]
    names = [source if source in on_hub else Path(source).resolve().name for source in sources]
    return {name: ", ".join(names)} | ({"datasets": [s.partition(":")[0] for s in on_hub]} if on_hub else {})


def run_record(output: Path, step: int) -> dict[str, Any]:
    """What a run of scripts/train.py has recorded in its folder, up to a step."""
    arguments = load_arguments(output)
    lines = [json.loads(line) for line in (output / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["step"] <= step]
    blocks = step * arguments["batch_size"] * arguments["accumulate"] * arguments["processes"]
    record = data_record(arguments["data"])
    if arguments["eval_data"]:
        record["held-out data"] = data_record(arguments["eval_data"])["data"]
    elif arguments["eval_share"]:
        record["held-out data"] = f"{arguments['eval_share']:.3g} of the documents"
    record |= {"steps": step, "tokens": blocks * arguments["block_size"], "highest learning rate": arguments["lr"]}
    for name, key in (("training loss", "loss"), ("held-out loss", "eval_loss")):
        if found := [line for line in lines if key in line]:
            record[f"{name}, nats per token"] = f"{found[-1][key]:.4f} at step {found[-1]['step']:,}"
            if key == "eval_loss" and found[0]["step"] == 0:
                record[f"{name}, nats per token"] += f", {found[0][key]:.4f} before"
    return record


class RecordTraining(TrainerCallback):
    """Puts what Transformers' Trainer records on the model's card, with every save.

        Trainer(..., callbacks=[RecordTraining(["corpus/"])])

    Args:
        data: where the training data came from: files, folders or Hub ids.
    """

    def __init__(self, data: list[str]) -> None:
        if isinstance(data, (str, os.PathLike)):
            raise TypeError(f"`data` must be a list of sources, got {data!r}: write [{data!r}].")
        self.data = [os.fspath(source) for source in data]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        record = data_record(self.data)
        record |= {"steps": state.global_step, "epochs": state.epoch, "highest learning rate": args.learning_rate}
        if state.num_input_tokens_seen:
            record["tokens"] = state.num_input_tokens_seen
        for name, key in (("training loss", "loss"), ("held-out loss", "eval_loss")):
            if found := [entry for entry in state.log_history if key in entry]:
                record[f"{name}, nats per token"] = f"{found[-1][key]:.4f} at step {found[-1]['step']:,}"
        model.training_record = record

    # Evaluations and logs follow the step, saves follow them.
    on_log = on_evaluate = on_step_end


__all__ = ["RecordTraining", "data_record", "run_record"]
