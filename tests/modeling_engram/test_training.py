"""Training: checkpointing, sparse gradients, the Trainer, adapters."""

import copy

import pytest
import torch
from torch.utils.data import Dataset

from hf_engram import EngramForCausalLM


def gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("copies", [1, 4])
def test_gradient_checkpointing(lively_model, random_ids, copies, reentrant):
    """Recomputed layers give the same loss and gradients, tables and mixing weights included."""
    model = lively_model(hc_mult=copies).train()
    ids = random_ids(2, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    loss, expected = gradients(model, ids, attention_mask=mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls = []
    handle = model.model.layers[0].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    loss_again, actual = gradients(model, ids, attention_mask=mask)
    handle.remove()
    assert len(calls) == 2
    assert torch.equal(loss, loss_again)
    for name in expected:
        scale = expected[name].abs().max().clamp_min(1e-6)
        assert (actual[name] - expected[name]).abs().max() <= 1e-5 * scale, name
    model.gradient_checkpointing_disable()
    gradients(model, ids)


def test_every_parameter_gets_a_gradient(lively_model, random_ids):
    """Nothing is left out of the graph, apart from what writes into a stream that nobody reads any more."""
    _, grads = gradients(lively_model().train(), random_ids(2, 8))
    for name, grad in grads.items():
        assert torch.isfinite(grad).all(), name
        assert grad.abs().max() > 0, name


def test_gradients_by_finite_differences(lively_model, random_ids):
    """The fp64 model's gradients are the slopes of its loss, in a random direction for each kind of parameter."""
    model = lively_model(dtype=torch.float64)
    ids = random_ids(1, 6)
    _, grads = gradients(model, ids)
    generator = torch.Generator().manual_seed(0)
    for kind in ("tables.1", "wkv", "q_weight", "k_weight", "hc.fn", "hc.base", "hc.scale", "o_proj", "embed_tokens"):
        names = [name for name in grads if kind in name]
        assert names, kind
        parameters = dict(model.named_parameters())
        direction = {n: torch.randn(grads[n].shape, generator=generator, dtype=torch.float64) for n in names}
        slope = sum((grads[n] * direction[n]).sum() for n in names)
        losses = []
        step = 1e-4
        for sign in (1, -2):
            with torch.no_grad():
                for n in names:
                    parameters[n].add_(direction[n], alpha=sign * step)
                losses.append(model(ids, labels=ids).loss)
        with torch.no_grad():
            for n in names:
                parameters[n].add_(direction[n], alpha=step)
        # RMS norms run in fp32, as in every Transformers model: hence a loss that is good to about 1e-7.
        assert abs((losses[0] - losses[1]) / (2 * step) - slope) < 5e-3 * max(1.0, abs(slope)), kind


def test_sparse_gradients(lively_model, random_ids):
    """`sparse_grad` gives tables sparse gradients of the same values, of the batch's rows only."""
    model = lively_model()
    ids = random_ids(2, 8)
    _, dense = gradients(model, ids)
    model.model.engram_memory.sparse_grad = True
    _, sparse = gradients(model, ids)
    for name, grad in dense.items():
        assert sparse[name].is_sparse == ("engram_memory" in name), name
        assert torch.allclose(sparse[name].to_dense() if sparse[name].is_sparse else sparse[name], grad, atol=1e-7)
    table = sparse["model.engram_memory.tables.0.weight"].coalesce()
    rows = model.compute_hash_ids(ids)[:, :, 0].unique()
    assert torch.equal(table.indices()[0], rows)


def test_sparse_adam_equals_adam(lively_model, random_ids):
    """With every row in the batch, SparseAdam on sparse gradients takes Adam's steps on dense ones."""
    dense = lively_model(engram_layer_ids=[1], engram_vocab_size=2, engram_max_ngram_size=2, engram_n_heads=1)
    assert dense.config.engram_num_embeddings == [2]
    sparse = copy.deepcopy(dense)
    sparse.model.engram_memory.sparse_grad = True
    ids = random_ids(2, 16)
    assert len(dense.compute_hash_ids(ids).unique()) == 2
    optimizers = []
    for model, cls in ((dense, torch.optim.Adam), (sparse, torch.optim.SparseAdam)):
        tables = list(model.model.engram_memory.parameters())
        rest = [p for n, p in model.named_parameters() if "engram_memory" not in n]
        optimizers.append((cls(tables, lr=1e-2), torch.optim.Adam(rest, lr=1e-3)))
    for _ in range(3):
        for model, pair in zip((dense, sparse), optimizers, strict=True):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            for optimizer in pair:
                optimizer.step()
    for (name, one), (_, two) in zip(dense.named_parameters(), sparse.named_parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


def test_sparse_gradients_with_checkpointing(lively_model, random_ids):
    """Sparse gradients and recomputed layers go together, since rows are fetched outside the layers."""
    model = lively_model().train()
    ids = random_ids(2, 8)
    _, expected = gradients(model, ids)
    model.model.engram_memory.sparse_grad = True
    model.gradient_checkpointing_enable()
    _, actual = gradients(model, ids)
    name = "model.engram_memory.tables.1.weight"
    assert torch.allclose(actual[name].to_dense(), expected[name], atol=1e-6)


class Sequences(Dataset):
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(tiny_model, random_ids, tmp_path, checkpointing):
    """The Trainer takes three steps, evaluates, saves a checkpoint that loads, and resumes from it."""
    from transformers import Trainer, TrainingArguments

    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=2,
        seed=0,
    )
    data = Sequences(random_ids(1, 8).repeat(12, 1))
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    after = model.state_dict()
    for name in ("model.engram_memory.tables.0.weight", "model.layers.0.attn_hc.scale", "lm_head.weight"):
        assert not torch.equal(before[name], after[name]), name

    checkpoint = tmp_path / "checkpoint-3"
    assert (checkpoint / "modeling_engram.py").is_file()
    loaded = EngramForCausalLM.from_pretrained(checkpoint).eval()
    assert all(torch.equal(loaded.state_dict()[name], after[name]) for name in after)
    if not checkpointing:
        arguments.max_steps = 4
        trainer = Trainer(model=tiny_model(seed=1), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 4


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Of the next token: `epsilon` of the weight is spread evenly over the vocabulary."""
    log_p, following = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    there = following != -100
    of_label = log_p.gather(-1, following.clamp_min(0)[..., None])[..., 0]
    return -((1 - epsilon) * of_label + epsilon * log_p.mean(-1))[there].mean()


@pytest.mark.parametrize("kind", ["plain", "adapter", "subclass", "hub"])
def test_label_smoothing(lively_model, random_ids, tmp_path, remote_modules, monkeypatch, kind):
    """The Trainer smooths the loss of the next token, not that of the token it was given."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model, ids = lively_model(), random_ids(2, 8)
    labels = ids.clone()
    labels[1, 5:] = -100
    expected = smoothed_loss(model(ids).logits, labels, 0.1)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    elif kind == "subclass":
        model.__class__ = type("OurCausalLM", (EngramForCausalLM,), {})
    elif kind == "hub":
        model.save_pretrained(tmp_path / "hub")
        # As in a process that has not imported the package.
        monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "EngramForCausalLM")
        remote_class = get_class_from_dynamic_module("modeling_engram.EngramForCausalLM", str(tmp_path / "hub"))
        model = remote_class.from_pretrained(tmp_path / "hub")
        assert type(model) is not EngramForCausalLM
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True, label_smoothing_factor=0.1, disable_tqdm=True
    )
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(loss, expected)


def test_dropout_is_off_in_eval(tiny_model, random_ids):
    """Attention dropout acts in training only."""
    model = tiny_model(attention_dropout=0.5, initializer_range=0.2)
    ids = random_ids(1, 8)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", ["wkv"]], ids=str)
def test_lora(lively_model, random_ids, targets):
    """LoRA adapters train, and merge into what they computed."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(lively_model(), LoraConfig(target_modules=targets, r=2, task_type="CAUSAL_LM"))
    ids = random_ids(2, 8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        assert isinstance(merged, EngramForCausalLM)
        assert (merged(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max().clamp_min(1)
