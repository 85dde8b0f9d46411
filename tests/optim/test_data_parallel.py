"""Data parallel training: two processes do what one does with twice the batch, and tables' gradients stay sparse."""

import os
import subprocess
import sys
import time
from pathlib import Path

import data_parallel_worker as worker
import pytest
import torch


SECONDS = 900  # for both processes and all cases
EVERY = pytest.mark.parametrize("case", worker.CASES, ids=lambda case: case.name)
# fp32's rounding is made visible by any token next to zero at a gate, where the gradient of its root is large.
EXACT = [case for case in worker.CASES if case.dtype == torch.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lively_model) -> Path:
    """Models, and batches [8, 12] of which the second process's share has nothing but padding at one step."""
    folder = tmp_path_factory.mktemp("data_parallel")
    for hc_mult in (1, 4):
        # Tables of many more rows than a batch touches.
        lively_model(hc_mult=hc_mult, engram_vocab_size=2000).save_pretrained(folder / f"model-{hc_mult}")
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(worker.STEPS):
        ids = torch.randint(3, 96, (8, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 9:] = mask[3, 5:] = 0  # processes and parts with different numbers of tokens
        if step == worker.DEAD_STEP:
            mask[1::2] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    torch.save(batches, folder / "batches.pt")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict[str, list[dict]]:
    """By case, what each of two processes found."""
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
    names = [case.name for case in worker.CASES]
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)] for name in names}


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(case)`: what one process finds with the whole batch at once."""
    found: dict[worker.Case, dict] = {}

    def get(case: worker.Case) -> dict:
        case = worker.Case("alone", case.hc_mult, case.dtype, case.table_dtype)
        if case not in found:
            model, optimizer = worker.make(case, folder)
            found[case] = worker.train(case, model, optimizer, torch.load(folder / "batches.pt", weights_only=True))
        return found[case]

    return get


def flat(result: dict) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name."""
    state = {f"{n}.{key}": torch.as_tensor(v) for n, values in result["state"].items() for key, v in values.items()}
    return {**result["weights"], **state}


@EVERY
def test_processes_end_with_the_same_bits(results, case):
    """Weights, optimizer state and norms; with tables of bf16 that means the same random bits."""
    one, two = results[case.name]
    assert torch.equal(torch.stack(one["norms"]), torch.stack(two["norms"]))
    one, two = flat(one), flat(two)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_as_one_process_with_twice_the_batch(results, alone, case):
    """Also where one of the two has no token at a step, and where gradients are exchanged only after the last part."""
    expected = alone(case)
    for result in results[case.name]:
        torch.testing.assert_close(torch.stack(result["norms"]), torch.stack(expected["norms"]), rtol=1e-6, atol=1e-6)
        assert all(norm > worker.CLIP for norm in expected["norms"])
        found, wanted = flat(result), flat(expected)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(
                found[name], wanted[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(
    "case", [case for case in worker.CASES if case.table_dtype == torch.bfloat16], ids=lambda case: case.name
)
def test_tables_of_bf16(results, alone, folder, case):
    """Their gradients are rounded before they are added up; what comes of it is seldom another number of bf16."""
    start = [table.clone() for table in worker.tables(worker.make(case, folder)[0])]
    expected = alone(case)
    for index, before in enumerate(start):
        name = f"model.engram_memory.tables.{index}.weight"
        found, wanted = results[case.name][0]["weights"][name], expected["weights"][name]
        moved = wanted != before
        assert moved.sum() > 500
        assert (found != wanted).sum() < moved.sum() / 20
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-4)


def test_fp32(results, alone):
    """As far as rounding lets one see: the gradient of the first step, before rows have been moved by its noise."""
    case = next(case for case in worker.CASES if case.table_dtype == torch.float32)
    for result in results[case.name]:
        torch.testing.assert_close(result["norms"][0], alone(case)["norms"][0], rtol=1e-5, atol=0)


@EVERY
def test_gradients_hold_the_rows_of_the_batch(results, alone, case):
    """After the exchange: sparse, of the rows that either process has touched and no others."""
    expected = alone(case)["rows"]
    for result in results[case.name]:
        assert result["layouts"] == [{"torch.sparse_coo" if case.sparse else "torch.strided"}] * worker.STEPS
        for rows, wanted in zip(result["rows"], expected, strict=True):
            for index, (one, other) in enumerate(zip(rows, wanted, strict=True)):
                size = len(result["weights"][f"model.engram_memory.tables.{index}.weight"])
                assert 0 < len(one) <= len(other) < size / 10
                if case.sparse:
                    assert torch.equal(one, other)


@pytest.mark.parametrize("case", [case for case in worker.CASES if not case.accelerate], ids=lambda case: case.name)
def test_what_is_not_finite_is_refused_by_all(results, case):
    """Also by the process whose own gradient was finite."""
    assert all(result["refuses_infinity"] for result in results[case.name])
