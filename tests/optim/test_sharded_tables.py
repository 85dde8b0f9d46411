"""FSDP2: two processes, each with its part of every table, do what one does with twice the batch."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sharded_worker as worker
import torch


SECONDS = 900  # for both processes and all cases
WAYS = ["own", "sharded", "full", "whole"]
# Gradients, of about 1 in fp64, differ by the order of their sums: 1e-14 at most. A row's step is 0.05 (lr * 5 over
# the root of 1 - beta) times the gradient over a root, at least eps = 1e-6: so it differs by 5e-10, and an element's
# under Adam, with 1e-3 and 1e-8, by 1e-9. The rows' second moment is fp32, where an error may cost one more rounding,
# 1.2e-7 of it: half of that in its root, so 3e-9 in a step. Four steps of both: 1.6e-8.
TOLERANCE = {"rtol": 1e-7, "atol": 2e-8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lively_model) -> Path:
    """A model, whose stream has one copy so that all of it is fp64, and batches [4, 12]."""
    folder = tmp_path_factory.mktemp("sharded")
    # Tables of odd numbers of rows, of which one process has one more than the other.
    lively_model(hc_mult=1, engram_vocab_size=500, engram_n_heads=1).save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(worker.STEPS):
        ids = torch.randint(3, 96, (4, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 9:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    torch.save(batches, folder / "batches.pt")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """`results(name)`: what each of the two processes has found."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes, ends = [], time.monotonic() + SECONDS
    logs = [folder / f"log-{rank}.txt" for rank in range(worker.PROCESSES)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, worker.__file__, str(rank), str(folder)]
            with log.open("w") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        # Where one fails, the other would wait for it.
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < ends, [log.read_text()[-3000:] for log in logs]
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return lambda name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(case)`: what one process finds with the whole batch at once."""
    batches = torch.load(folder / "batches.pt", weights_only=True)
    found: dict[worker.Case, dict] = {}

    def get(case: worker.Case) -> dict:
        if case not in found:
            model = worker.load(case, folder)
            optimizer = worker.make_optimizer(case, model)
            found[case] = worker.result(model, optimizer, worker.take_steps(model, optimizer, batches))
        return found[case]

    return get


def assert_same(found: dict, expected: dict) -> None:
    torch.testing.assert_close(torch.stack(found["norms"]), torch.stack(expected["norms"]), **TOLERANCE)
    assert all(norm > worker.CLIP for norm in expected["norms"])
    for kind in ("weights", "state"):
        assert found[kind].keys() == expected[kind].keys()
        for name, wanted in expected[kind].items():
            # The momentum is kept in bf16: where rounding decides, the next number of bf16.
            tolerance = {"rtol": 2**-7, "atol": 1e-6} if wanted.dtype == torch.bfloat16 else TOLERANCE
            if wanted.dtype == torch.float32:
                tolerance = {"rtol": 1e-5, "atol": 1e-9}
            torch.testing.assert_close(
                found[kind][name], wanted, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("case", [c for c in worker.CASES if c.table_dtype == torch.float64], ids=lambda c: c.name)
def test_as_one_process(results, alone, case):
    """Norms before clipping, weights and the tables' state; each process keeps the state of its rows alone."""
    one, two = results(case.name)
    for found in (one, two):
        assert_same(found, alone(case))
    rows = alone(case)["rows_here"]
    assert [a + b for a, b in zip(one["rows_here"], two["rows_here"], strict=True)] == rows
    assert all(abs(a - b) <= 1 for a, b in zip(one["rows_here"], two["rows_here"], strict=True))
    assert any(n % 2 for n in rows)


def test_tables_of_bf16(results, alone):
    """Rounded at random in each process: to other bits than in one, and to one of the two nearest numbers."""
    case = next(case for case in worker.CASES if case.table_dtype == torch.bfloat16)
    found, expected = results(case.name)[0]["weights"], alone(case)["weights"]
    for name, wanted in expected.items():
        if ".engram_memory." in name:
            torch.testing.assert_close(found[name], wanted, rtol=2**-6, atol=1e-3)
            assert found[name].dtype == torch.bfloat16


@pytest.mark.parametrize("how", WAYS)
def test_state_goes_on(results, alone, how):
    """Saved by torch.save, or by torch's own sharded or full checkpoints, or by one process: training goes on as if
    it had not been interrupted."""
    case = next(case for case in worker.CASES if case.momentum)
    for found in results(f"resumed-{how}"):
        assert_same(found, alone(case))


def test_refusals(results):
    """Also by the process whose own part is in order, so that no other waits for it."""
    names = ("infinity", "sparse", "sparse_grad", "columns", "columns later", "unchanged")
    for found in results("refusals"):
        assert found == dict.fromkeys(names, True)
