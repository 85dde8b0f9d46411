"""The optimizer as an object: groups, state, errors, and the training loops that it must fit."""

import copy
import io
import math

import pytest
import torch
from dense_rule import DenseRule
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hf_engram.optim import EngramOptimizer


ROWS, DIM = 30, 6


class Lookup(nn.Module):
    """Two tables where an Engram model has them, a matrix, a vector, and a weight of a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.engram_memory = nn.Module()
        self.engram_memory.tables = nn.ModuleList(nn.Embedding(ROWS + i, DIM, dtype=dtype) for i in range(2))
        self.engram = nn.Module()
        self.engram.q_weight = nn.Parameter(torch.ones(2, DIM))
        self.linear = nn.Linear(DIM, 3)
        self.sparse = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> a loss."""
        # Times 1, so that the two do not share the memory of one gradient.
        rows = sum(F.embedding(ids, table.weight, sparse=self.sparse) * 1 for table in self.engram_memory.tables)
        return self.linear(rows.float() * self.engram.q_weight[0]).square().sum(1).mean()

    @property
    def tables(self) -> list[torch.Tensor]:
        return [table.weight for table in self.engram_memory.tables]


def batches(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS - 4, (8,), generator=generator) for _ in range(n)]


def train(model, optimizer, ids_of_steps, scheduler=None) -> None:
    for ids in ids_of_steps:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name


def table_groups(optimizer) -> list[dict]:
    return [group for group in optimizer.param_groups if group["table"]]


@given(
    ids=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=6), min_size=1, max_size=8),
    beta=st.sampled_from([0.5, 0.99]),
    decay=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_dense_rule(ids, beta, decay, seed):
    """Learning rates that a scheduler changes, tables of which no row is used, rows used often or never."""
    torch.manual_seed(seed)
    table = nn.Parameter(torch.randn(ROWS, DIM))
    optimizer = EngramOptimizer(
        [{"params": [table], "table": True}], lr=0.01, table_beta=beta, table_lr_multiplier=2, table_weight_decay=decay
    )
    dense = DenseRule(table, beta=beta, weight_decay=decay)
    for step, rows in enumerate(ids):
        lr = 0.01 if decay else 0.01 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        grads = torch.randn(len(rows), DIM)
        indices = torch.tensor([rows], dtype=torch.long)
        table.grad = torch.sparse_coo_tensor(indices, grads, table.shape, check_invariants=True)
        dense.step(table.grad.to_dense(), 2 * lr)
        optimizer.step()
    torch.testing.assert_close(table.detach().double(), dense.table, rtol=1e-5, atol=1e-5)


def test_the_rest_is_adamws():
    """Bit for bit, with matrices decayed and vectors not."""
    model, reference = Lookup(), Lookup()
    optimizer = EngramOptimizer(model, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95))
    dense = [
        {"params": [reference.linear.weight], "weight_decay": 0.1},
        {"params": [reference.engram.q_weight, reference.linear.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(dense, lr=0.01, betas=(0.8, 0.95), fused=True)
    for ids in batches(4):
        model(ids).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = None if ours.grad.is_sparse else ours.grad.clone()
        optimizer.step()
        adamw.step()
        optimizer.zero_grad()
    for name in ("linear.weight", "linear.bias", "engram.q_weight"):
        assert torch.equal(model.get_parameter(name), reference.get_parameter(name)), name
    assert isinstance(optimizer.dense, torch.optim.AdamW)
    assert optimizer.dense.param_groups[0]["fused"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_gradients_give_the_same_bits(dtype, momentum):
    models = [Lookup(dtype), Lookup(dtype)]
    optimizers = [EngramOptimizer(m, table_momentum=momentum, table_weight_decay=0.1) for m in models]
    for ids in batches(6):
        models[0](ids).backward()
        for sparse, dense in zip(models[0].parameters(), models[1].parameters(), strict=True):
            dense.grad = sparse.grad.to_dense() if sparse.grad.is_sparse else sparse.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(*models)
    for sparse, dense in zip(models[0].tables, models[1].tables, strict=True):
        for name in ("second_moment", "last_step"):
            assert torch.equal(optimizers[0].state[sparse][name], optimizers[1].state[dense][name])


def test_accumulated_gradients():
    """As many backward passes, one step: as one pass over all (sums of sparse gradients are not coalesced)."""
    split, whole = Lookup(), Lookup()
    for model, parts in ((split, 4), (whole, 1)):
        optimizer = EngramOptimizer(model)
        for ids in batches(3):
            for part in ids.view(parts, -1):
                (model(part) / parts).backward()
            assert model.tables[0].grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)
    assert not torch.equal(split.tables[0], Lookup().tables[0])


def test_sums_of_bf16_gradients_are_made_in_fp32():
    table = nn.Parameter(torch.zeros(3, 1, dtype=torch.bfloat16))
    other = nn.Parameter(torch.zeros(3, 1))
    values = torch.full((1001, 1), 2.0**-9)
    values[0] = 1.0
    for parameter in (table, other):
        rows = torch.ones(1, 1001, dtype=torch.long)
        parameter.grad = torch.sparse_coo_tensor(rows, values.to(parameter.dtype), (3, 1), check_invariants=True)
        optimizer = EngramOptimizer([{"params": [parameter], "table": True}])
        optimizer.step()
        assert optimizer.state[parameter]["second_moment"][1].item() == pytest.approx((1 + 1000 * 2.0**-9) ** 2)


def test_state_is_eight_bytes_a_row():
    model = Lookup()
    optimizer = EngramOptimizer(model)
    train(model, optimizer, batches(1))
    for table in model.tables:
        tensors = [value for value in optimizer.state[table].values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) == 8 * len(table)
    optimizer = EngramOptimizer(model, table_momentum=0.9)
    train(model, optimizer, batches(1))
    for table in model.tables:
        tensors = [value for value in optimizer.state[table].values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) == (12 + 2 * DIM) * len(table)


def test_rows_of_no_batch_are_not_touched():
    model = Lookup()
    before = [table.detach().clone() for table in model.tables]
    optimizer = EngramOptimizer(model, table_weight_decay=0.5)
    train(model, optimizer, batches(3))
    for old, new in zip(before, model.tables, strict=True):
        assert torch.equal(old[ROWS - 4 :], new[ROWS - 4 :])
        assert not torch.equal(old[: ROWS - 4], new[: ROWS - 4])


def test_rounding_is_random_but_repeatable():
    weights = []
    for seed in (0, 0, 1):
        model = Lookup(torch.bfloat16)
        train(model, EngramOptimizer(model, seed=seed), batches(3))
        weights.append(torch.cat(model.tables))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    # Two tables with the same rows and gradients round differently.
    model = Lookup(torch.bfloat16)
    with torch.no_grad():
        model.tables[0][:] = model.tables[1][:ROWS]
    train(model, EngramOptimizer(model), batches(3))
    assert not torch.equal(model.tables[0], model.tables[1][:ROWS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_resume_continues_with_the_same_bits(dtype, momentum):
    model = Lookup(dtype)
    optimizer = EngramOptimizer(model, table_momentum=momentum, seed=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    train(model, optimizer, batches(4), scheduler)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(model, optimizer, batches(4, seed=1), scheduler)

    again = Lookup(dtype)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    # Everything but the constructor's `params` comes from the saved state, the seed too.
    restored = EngramOptimizer(again, lr=123.0, table_momentum=momentum)
    resumed = torch.optim.lr_scheduler.CosineAnnealingLR(restored, T_max=8)
    for target, state in zip((again, restored, resumed), saved, strict=True):
        target.load_state_dict(state)
    for table in again.tables:
        assert restored.state[table]["second_moment"].dtype == torch.float32
        assert not momentum or restored.state[table]["momentum"].dtype == torch.bfloat16
    kept = copy.deepcopy(saved[1])
    train(again, restored, batches(4, seed=1), resumed)
    assert_same_weights(model, again)
    # The loaded dict is a copy's source, and not what training writes into.
    for number, state in kept["state"].items():
        for name in ("second_moment", "last_step"):
            if name in state:
                assert torch.equal(state[name], saved[1]["state"][number][name])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent_and_whole(how):
    model = Lookup()
    optimizer = EngramOptimizer(model)
    train(model, optimizer, batches(2))
    if how == "deepcopy":
        twin, copied = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        twin, copied = torch.load(file, weights_only=False)
    train(twin, copied, batches(2, seed=1))
    assert not torch.equal(twin.linear.weight, model.linear.weight)
    train(model, optimizer, batches(2, seed=1))
    assert_same_weights(model, twin)


def test_state_of_another_optimizer_is_refused():
    model = Lookup()
    optimizer = EngramOptimizer(model)
    train(model, optimizer, batches(1))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="groups are tables' "):
        EngramOptimizer(model.linear.named_parameters()).load_state_dict(saved)
    wider = Lookup()
    wider.engram_memory.tables[1] = nn.Embedding(99, DIM)
    with pytest.raises(ValueError, match=r"`second_moment` of \[31\] for a table of \[99, 6\]"):
        EngramOptimizer(wider).load_state_dict(saved)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=1e-3),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False),
    ],
)
def test_schedulers_move_all_groups_alike(make):
    """Also those that set a rate rather than scale it: the multiplier is no part of the group's `lr`."""
    model = Lookup()
    optimizer = EngramOptimizer(model, lr=0.01)
    scheduler = make(optimizer)
    seen = set()
    for ids in batches(5):
        train(model, optimizer, [ids], scheduler)
        rates = {group["lr"] for group in optimizer.param_groups}
        assert len(rates) == 1
        seen |= rates
    assert len(seen) == 5


def test_learning_rate_and_multiplier():
    """Each group at its own rate; the very first step of a row has the rms that the documentation says."""
    model = Lookup()
    before = model.tables[0].detach().clone()
    groups = [
        {"params": model.engram_memory.named_parameters(prefix="engram_memory"), "lr": 0.02},
        {"params": model.linear.named_parameters()},
    ]
    optimizer = EngramOptimizer(groups, lr=0.5, table_lr_multiplier=3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.02]
    ids = torch.arange(4)
    train(model, optimizer, [ids])
    moved = (model.tables[0] - before)[:4].square().mean(1).sqrt()
    torch.testing.assert_close(moved, torch.full((4,), 3 * 0.02 / math.sqrt(1 - 0.99)))


def test_closure():
    model, plain = Lookup(), Lookup()
    optimizer, reference = EngramOptimizer(model), EngramOptimizer(plain)
    for ids in batches(3):

        def closure(ids=ids):
            optimizer.zero_grad()
            loss = model(ids)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == plain(ids).item()
        train(plain, reference, [ids])
    assert_same_weights(model, plain)


def test_groups_added_later():
    """Unfreezing: a table, and what is not one."""
    model, whole = Lookup(), Lookup()
    optimizer = EngramOptimizer([{"params": [model.tables[0]], "table": True}])
    assert optimizer.dense is None
    optimizer.add_param_group({"params": model.linear.named_parameters(prefix="linear")})
    optimizer.add_param_group({"params": [model.tables[1]], "table": True, "lr_multiplier": 5.0})
    optimizer.add_param_group({"params": [("engram.q_weight", model.engram.q_weight)]})
    assert [group["table"] for group in optimizer.param_groups] == [True, False, False, True, False]
    train(model, optimizer, batches(4))
    train(whole, EngramOptimizer(whole), batches(4))
    assert_same_weights(model, whole)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(model, optimizer, batches(2, seed=1))
    with pytest.raises(ValueError):  # in the words of PyTorch
        optimizer.add_param_group({"params": [model.tables[1]], "table": True})
    train(model, optimizer, batches(1))


def test_parameters_without_a_gradient():
    """They are left alone, and their clocks stand still."""
    model = Lookup()
    optimizer = EngramOptimizer(model)
    before = copy.deepcopy(model)
    optimizer.step()
    assert_same_weights(model, before)
    for ids in batches(3):
        F.embedding(ids, model.tables[1], sparse=True).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.tables[1]]["step"] == 3
    assert not optimizer.state[model.tables[0]]
    assert torch.equal(model.linear.weight, before.linear.weight)
    model.tables[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in EngramOptimizer(model).param_groups) == 4


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_gradients_that_are_not_finite_change_nothing(sparse, wrong):
    model = Lookup()
    model.sparse = sparse
    optimizer = EngramOptimizer(model)
    train(model, optimizer, batches(2))
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    ids = torch.arange(5)
    model(ids).backward()
    grad = model.tables[1].grad
    (grad._values() if sparse else grad)[3, 2] = wrong
    with pytest.raises(FloatingPointError, match=r"table 1 \(\[31, 6\]\) is not finite.*rows \[3\]"):
        optimizer.step()
    assert_same_weights(model, before)
    for number, old in state.items():
        for name, value in optimizer.state_dict()["state"][number].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(old[name])), name
    optimizer.zero_grad()
    train(model, optimizer, batches(1))
    train(before, restored := EngramOptimizer(before), [])
    restored.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    train(before, restored, batches(1))
    assert_same_weights(model, before)


@pytest.mark.parametrize("given", ["class", "function"])
def test_another_optimizer_for_the_rest(given):
    model = Lookup()
    bias = model.linear.bias.detach().clone()

    def sgd(groups, lr, nesterov):
        return torch.optim.SGD(groups, lr=lr, momentum=0.5, nesterov=nesterov)

    options = {"dense_cls": sgd} if given == "function" else {"dense_cls": torch.optim.SGD, "momentum": 0.5}
    optimizer = EngramOptimizer(model, lr=0.1, nesterov=True, **options)
    model(batches(1)[0]).backward()
    grad = model.linear.bias.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model.linear.bias.detach(), bias - 0.1 * 1.5 * grad)
    restored = EngramOptimizer(model, lr=0.1, nesterov=True, **options)
    restored.load_state_dict(optimizer.state_dict())
    assert torch.equal(restored.state[model.linear.bias]["momentum_buffer"], grad)


def test_an_optimizer_that_makes_its_state_at_once():
    """As Adagrad, whose state must not be lost when it becomes part of ours."""
    model = Lookup()
    optimizer = EngramOptimizer(model, dense_cls=torch.optim.Adagrad)
    train(model, optimizer, batches(2))
    assert optimizer.state[model.linear.weight]["sum"].abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "`lr` must be at least 0 and below inf, got -1.0"),
        ({"lr": math.nan}, ValueError, "`lr` must be"),
        ({"lr": math.inf}, ValueError, "`lr` must be"),
        ({"lr": "fast"}, TypeError, "`lr` must be a number, got 'fast'"),
        ({"lr": None}, TypeError, "`lr` must be a number, got None"),
        ({"weight_decay": -0.1}, ValueError, "`weight_decay` must be"),
        ({"table_lr_multiplier": -5}, ValueError, "`table_lr_multiplier` must be"),
        ({"table_beta": 1.0}, ValueError, "`table_beta` must be above 0 and below 1, got 1.0"),
        ({"table_beta": 0.0}, ValueError, "`table_beta` must be above 0"),
        ({"table_momentum": 1.0}, ValueError, "`table_momentum` must be at least 0 and below 1"),
        ({"table_eps": -1e-9}, ValueError, "`table_eps` must be"),
        ({"table_weight_decay": math.nan}, ValueError, "`table_weight_decay` must be"),
        ({"seed": 0.5}, TypeError, "`seed` must be an int, got 0.5"),
        ({"betas": (2.0, 0.9)}, ValueError, "Invalid beta"),
        ({"table_betas": 0.9}, TypeError, "table_betas"),
        ({"dense_cls": lambda groups, lr: None}, TypeError, "`dense_cls` must give a torch.optim.Optimizer"),
    ],
)
def test_arguments_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        EngramOptimizer(Lookup(), **options)


def test_parameters_that_are_wrong():
    model = Lookup()
    for params, error, message in [
        (list(model.parameters()), ValueError, "without names"),
        ([{"params": list(model.parameters())}], ValueError, "without names"),
        (model.tables[0], TypeError, "`params` must be a model"),
        ([], ValueError, "`params` holds no parameter"),
        (nn.ReLU(), ValueError, "`params` holds no parameter"),
        ([{"params": [nn.Parameter(torch.ones(3))], "table": True}], ValueError, r"must be \[rows, d\].*got \[3\]"),
        ([{"params": [model.tables[0]], "table": True, "betas": (0, 1)}], ValueError, r"no options \['betas'\]"),
        ([{"params": [model.tables[0]], "table": True, "beta": 2}], ValueError, "`beta` must be"),
        ([{"params": [model.tables[0]], "table": True, "lr": -2}], ValueError, "`lr` must be"),
    ]:
        with pytest.raises(error, match=message):
            EngramOptimizer(params)


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("model.engram_memory.tables.0.weight", True),
        ("engram_memory.tables.12.weight", True),
        ("module._orig_mod.model.engram_memory.tables.1.weight", True),
        ("base_model.model.model.engram_memory.tables.0.base_layer.weight", True),
        ("base_model.model.model.engram_memory.tables.0.modules_to_save.default.weight", True),
        ("base_model.model.model.engram_memory.tables.0.lora_embedding_A.default", False),
        ("model.layers.0.engram.wkv.weight", False),
        ("model.my_engram_memory.tables.0.weight", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_tables_are_known_by_name(name, is_table):
    optimizer = EngramOptimizer([(name, nn.Parameter(torch.ones(3, 4)))])
    assert [group["table"] for group in optimizer.param_groups] == [is_table]


def test_a_gradient_scaler_unscales_and_skips():
    model, plain = Lookup(), Lookup()
    optimizer, reference = EngramOptimizer(model), EngramOptimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for ids in batches(3):
        scaler.scale(model(ids)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(plain, reference, batches(3))
    assert_same_weights(model, plain)
    scaler.scale(model(batches(1)[0])).backward()
    model.tables[0].grad._values()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same_weights(model, plain)
    assert scaler.get_scale() == 512.0
