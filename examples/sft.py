"""Fine-tune an Engram model on conversations with TRL: a LoRA adapter, and the table rows that they use.

python examples/sft.py FOLDER OUTPUT: FOLDER holds a model and its tokenizer, which has a chat template, as
scripts/convert_backbone.py makes them from an instruction-tuned decoder. OUTPUT gets the adapter and the changed rows.
"""

import sys

from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_engram import EngramForCausalLM
from hf_engram.adapters import LORA_TARGETS, load_table_delta, save_table_delta, unfreeze_tables
from hf_engram.optim import trainer_optimizer


FACTS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Chad": "N'Djamena",
}

folder, output = sys.argv[1:]
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
    output_dir=output,
    max_steps=20,
    per_device_train_batch_size=5,
    learning_rate=2e-3,
    max_length=128,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    bf16=False,
)
trainer = SFTTrainer(
    model=EngramForCausalLM.from_pretrained(folder),
    args=arguments,
    train_dataset=dataset,
    processing_class=AutoTokenizer.from_pretrained(folder),
    peft_config=LoraConfig(r=8, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"),
    optimizer_cls_and_kwargs=trainer_optimizer(arguments),
)
unfreeze_tables(trainer.model)  # PEFT has frozen them
trainer.train()
trainer.save_model(output)
delta = save_table_delta(trainer.model, folder, output)
print(f"changed table rows: {sum(len(rows) for rows in delta.rows)}")

# How anyone uses the result.
model = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(folder), output)
load_table_delta(model, output)
