"""Fine-tune an Engram model on conversations with TRL: a LoRA adapter, and the table rows that they use.

    python examples/sft.py FOLDER OUTPUT

FOLDER holds a model and its tokenizer, which has a chat template, as scripts/convert_backbone.py makes them from an
instruction-tuned decoder. OUTPUT gets the adapter and the changed rows. Needs TRL: pip install -e '.[trl]'
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_engram import EngramForCausalLM
from hf_engram.adapters import LORA_TARGETS, TableDelta, unfreeze_tables
from hf_engram.optim import trainer_optimizer
from hf_engram.processes import check_processes


FACTS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Chad": "N'Djamena",
}

parser = argparse.ArgumentParser(
    description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("folder", help="folder or Hub id of the model to train")
parser.add_argument("output", help="folder for the adapter and the table rows that changed")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--batch-size", type=int, default=5, help="conversations a step")
parser.add_argument("--lr", type=float, default=2e-3, help="learning rate; five times that for tables")
parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
options = parser.parse_args()

dataset = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "completion": [{"role": "assistant", "content": f"The capital of {country} is {capital}."}],
        }
        for country, capital in FACTS.items()
    ]
)
arguments = SFTConfig(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch_size,
    learning_rate=options.lr,
    max_length=128,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    bf16=False,
    use_cpu=not torch.accelerator.is_available(),  # said, or several processes would each train a model of their own
)
check_processes(arguments.world_size)
trainer = SFTTrainer(
    model=EngramForCausalLM.from_pretrained(options.folder, engram_placement="device"),
    args=arguments,
    train_dataset=dataset,
    processing_class=AutoTokenizer.from_pretrained(options.folder),
    peft_config=LoraConfig(r=options.rank, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"),
    optimizer_cls_and_kwargs=trainer_optimizer(arguments),
)
unfreeze_tables(trainer.model)  # PEFT has frozen them; the rows that change are part of the adapter
trainer.train()
trainer.save_model(options.output)
print(f"changed table rows: {sum(len(rows) for rows in TableDelta.load(options.output).rows)}")

# How anyone uses the result.
model = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(options.folder), options.output)
