"""Train an Engram model with Transformers' Trainer; the tables' rows get steps of their own.

    python examples/trainer.py FOLDER TEXT_FILE OUTPUT

FOLDER holds a model and its tokenizer, as scripts/train.py, scripts/convert_backbone.py and scripts/quickstart.py
write them; OUTPUT becomes one like it.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from hf_engram import EngramForCausalLM
from hf_engram.optim import trainer_optimizer
from hf_engram.processes import check_processes
from hf_engram.training_record import RecordTraining


parser = argparse.ArgumentParser(
    description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("folder", help="folder or Hub id of the model to train")
parser.add_argument("text_file", type=Path, help="text to train on, UTF-8")
parser.add_argument("output", help="folder for checkpoints and the trained model")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--batch-size", type=int, default=4, help="blocks a step")
parser.add_argument("--block-size", type=int, default=64, help="tokens a block")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate; five times that for tables")
options = parser.parse_args()

model = EngramForCausalLM.from_pretrained(options.folder, engram_placement="device")
tokenizer = AutoTokenizer.from_pretrained(options.folder)
model.model.engram_memory.sparse_grad = True  # gradients of the batch's rows alone

# The model computes hash_ids itself, so the tokenizer need not.
ids = tokenizer(options.text_file.read_text(encoding="utf-8"), return_hash_ids=False)["input_ids"]
size = options.block_size
blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
dataset = [{"input_ids": block, "labels": block} for block in blocks]

arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch_size,
    learning_rate=options.lr,
    logging_steps=5,
    report_to="none",
    use_cpu=not torch.accelerator.is_available(),  # said, or several processes would each train a model of their own
)
check_processes(arguments.world_size)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=dataset,
    data_collator=default_data_collator,
    processing_class=tokenizer,  # saved with every checkpoint
    optimizer_cls_and_kwargs=trainer_optimizer(arguments),
    callbacks=[RecordTraining([options.text_file])],  # for the model card
)
trainer.train()
trainer.save_model(options.output)  # a complete Hub folder
