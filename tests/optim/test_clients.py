"""Real models in the loops that people use: plain, accelerate, the Trainer."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

from hf_engram import EngramForCausalLM
from hf_engram.optim import EngramOptimizer, clip_grad_norm_, trainer_optimizer


class Tokens(Dataset):
    def __init__(self, n: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 96, (n, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make(tiny_model, dtype=None):
    model = tiny_model(dtype=dtype).train()
    # Keys of zero are divided by next to nothing, which would make the rounding of gradients visible.
    for table in tables(model):
        torch.nn.init.normal_(table, std=0.02)
    model.model.engram_memory.sparse_grad = True
    return model


def tables(model) -> list[torch.Tensor]:
    return [table.weight for table in model.model.engram_memory.tables]


def assert_same_weights(a, b) -> None:
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name


def plain_training(model, steps: int, accumulate: int = 1, clip=clip_grad_norm_) -> list[float]:
    optimizer = EngramOptimizer(model, lr=5e-3)
    losses = []
    batches = list(DataLoader(Tokens(), batch_size=4))
    for step in range(steps):
        for part in range(accumulate):
            loss = model(**batches[(step * accumulate + part) % 4]).loss / accumulate
            loss.backward()
        losses.append(loss.item())
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_learns(tiny_model, dtype):
    model = make(tiny_model, dtype)
    optimizer = EngramOptimizer(model)
    assert sum(len(group["params"]) for group in optimizer.param_groups if group["table"]) == 2
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    no_decay = {id(p) for g in optimizer.param_groups if not g["table"] and not g["weight_decay"] for p in g["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in no_decay}
    assert {name.rsplit(".", 1)[-1] for name in names} <= {"weight", "q_weight", "k_weight", "scale", "base"}
    assert all("norm" in name for name in names if name.endswith(".weight"))
    losses = plain_training(model, 24)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(tiny_model, accumulate, tmp_path):
    """The same bits as a plain loop; saved and loaded, the same again."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = make(tiny_model)
    optimizer = EngramOptimizer(model, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(Tokens(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch():
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    epoch()
    twin = make(tiny_model)
    # Clipped as accelerate does: another norm's last bit would be another model a step later.
    plain_training(twin, 4 // accumulate, accumulate, clip=torch.nn.utils.clip_grad_norm_)
    assert_same_weights(model, twin)
    accelerator.save_state(tmp_path)
    epoch()
    expected = copy.deepcopy(model)
    accelerator.load_state(tmp_path)
    epoch()
    assert_same_weights(model, expected)


def trainer_of(model, folder, steps: int, given: str = "optimizer_cls_and_kwargs", **settings) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=5e-3,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        save_steps=3,
        **settings,
    )
    options = {"optimizer_cls_and_kwargs": trainer_optimizer(args)}
    if given == "optimizers":
        options = {"optimizers": (EngramOptimizer(model, lr=5e-3, weight_decay=args.weight_decay), None)}
    return Trainer(model=model, args=args, train_dataset=Tokens(), **options)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("sparse", [True, False])
def test_trainer(tiny_model, tmp_path, max_grad_norm, sparse):
    """With clipping and without, which measures the norm all the same; as with an optimizer made by hand."""
    model = make(tiny_model)
    model.model.engram_memory.sparse_grad = sparse
    before = [table.detach().clone() for table in tables(model)]
    settings = {"max_grad_norm": max_grad_norm, "save_strategy": "no", "gradient_accumulation_steps": 2}
    trainer = trainer_of(model, tmp_path, 4, **settings)
    trainer.train()
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    assert sum("grad_norm" in entry for entry in trainer.state.log_history) == 4
    for old, new in zip(before, tables(model), strict=True):
        assert not torch.equal(old, new)
    twin = make(tiny_model)
    trainer_of(twin, tmp_path, 4, given="optimizers", **settings).train()
    assert_same_weights(model, twin)


def test_trainer_resumes_with_the_same_bits(tiny_model, tmp_path):
    model = make(tiny_model)
    trainer_of(model, tmp_path, 6).train()
    resumed = make(tiny_model)
    trainer = trainer_of(resumed, tmp_path, 6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 6
    assert_same_weights(model, resumed)


def test_settings_that_the_trainer_passes_on(tiny_model, tmp_path):
    settings = {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.5, report_to=[], use_cpu=True, **settings)
    factory, options = trainer_optimizer(args, table_beta=0.95, weight_decay=0.2)
    optimizer = factory()(tiny_model(), **options)
    dense, _, table = optimizer.param_groups
    assert (dense["lr"], dense["weight_decay"], dense["betas"], dense["eps"]) == (0.5, 0.2, (0.8, 0.9), 1e-6)
    assert (table["lr"], table["weight_decay"], table["beta"]) == (0.5, 0.0, 0.95)
    factory, options = trainer_optimizer(args, dense_cls=torch.optim.SGD)
    assert isinstance(factory()(tiny_model(), **options).dense, torch.optim.SGD)


def test_a_model_without_tables(tiny_model):
    model = tiny_model(engram_layer_ids=[])
    optimizer = EngramOptimizer(model)
    assert not any(group["table"] for group in optimizer.param_groups)
    model(input_ids=Tokens().ids[:2], labels=Tokens().ids[:2]).loss.backward()
    before = model.lm_head.weight.detach().clone()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    assert not torch.equal(before, model.lm_head.weight)


def test_the_class_of_the_model_does_not_matter(tiny_model, tmp_path):
    """A model loaded with its own copy of the code, as from the Hub, is treated alike."""
    tiny_model().save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    groups = EngramOptimizer(model).param_groups
    expected = EngramOptimizer(EngramForCausalLM.from_pretrained(tmp_path)).param_groups
    assert [(len(g["params"]), g["table"]) for g in groups] == [(len(g["params"]), g["table"]) for g in expected]


def test_tables_on_disk_are_not_left_out_silently(lively_model, tmp_path):
    """Where they are meant to be trained: gates are, and the tables are float. The error's remedies are remedies."""
    lively_model().save_pretrained(tmp_path)
    load = EngramForCausalLM.from_pretrained
    model = load(tmp_path, engram_placement=["device", "disk"])
    for params in (model, [{"params": model, "lr": 1e-3}]):
        with pytest.raises(
            ValueError, match=r"^model\.engram_memory\.tables\.1 would not .*engram_placement='device'"
        ):
            EngramOptimizer(params)
    n_tables = [len(group["params"]) for group in EngramOptimizer(model.named_parameters()).param_groups]
    model.model.engram_memory.to_placement("device")
    assert [len(group["params"]) for group in EngramOptimizer(model).param_groups] == [*n_tables[:2], 2]
    assert EngramOptimizer(load(tmp_path, engram_placement="device")).param_groups[-1]["table"]

    adapted = load(tmp_path, engram_placement="disk")
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    assert len(EngramOptimizer(adapted).param_groups) == 1


def test_fp8_tables_are_frozen_wherever_they_are(lively_model, tmp_path):
    model = lively_model(engram_head_dim=32)
    model.quantize_tables()
    model.save_pretrained(tmp_path)
    for placement in ("device", "cpu", "disk"):
        optimizer = EngramOptimizer(EngramForCausalLM.from_pretrained(tmp_path, engram_placement=placement))
        assert not any(group["table"] for group in optimizer.param_groups)
