"""Train an Engram model with Transformers' Trainer; the tables' rows get steps of their own.

python examples/trainer.py FOLDER TEXT_FILE OUTPUT: FOLDER holds a model and its tokenizer, as scripts/train.py,
scripts/convert_backbone.py and scripts/quickstart.py write them.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from hf_engram import EngramForCausalLM
from hf_engram.optim import trainer_optimizer


BLOCK = 64

folder, text_file, output = sys.argv[1:]
model, tokenizer = EngramForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
model.model.engram_memory.sparse_grad = True  # gradients of the batch's rows alone

# The model computes hash_ids itself, so the tokenizer need not.
ids = tokenizer(Path(text_file).read_text(encoding="utf-8"), return_hash_ids=False)["input_ids"]
blocks = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK)]
dataset = [{"input_ids": block, "labels": block} for block in blocks]

arguments = TrainingArguments(
    output_dir=output,
    max_steps=20,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=5,
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=dataset,
    data_collator=default_data_collator,
    processing_class=tokenizer,  # saved with every checkpoint
    optimizer_cls_and_kwargs=trainer_optimizer(arguments),
)
trainer.train()
trainer.save_model(output)  # a complete Hub folder
