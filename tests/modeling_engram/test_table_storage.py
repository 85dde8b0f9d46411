"""Tables on disk: the safetensors header, gathers, sharing, threads, and files that are not as they must be."""

import copy
import gc
import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_engram.modeling_engram import table_storage
from hf_engram.modeling_engram.row_request import distinct_ids
from hf_engram.modeling_engram.table_storage import find_tensors, open_table, read_header


ROWS, DIM = 5000, 24


def random_table(rows: int = ROWS, dim: int = DIM, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def path(tmp_path):
    """A file with a table between other tensors, whose bytes start at no page and at no multiple of 8."""
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "table": random_table(), "z": torch.ones(7)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def rows_of(table, ids) -> torch.Tensor:
    return table.request(np.asarray(ids, dtype=np.int64)).result()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 31, 33, 700, ROWS])
def test_gather(tmp_path, dtype, count):
    """Rows are those of the tensor, for few rows and for so many that threads read them."""
    weight = random_table(dtype=dtype)
    save_file({"w": weight, "b": torch.ones(3)}, tmp_path / "t.safetensors")
    ids = np.sort(np.random.default_rng(0).choice(ROWS, count, replace=False))
    assert torch.equal(rows_of(open_table(tmp_path / "t.safetensors", "w"), ids), weight[ids])


@pytest.mark.parametrize("cached", [True, False])
def test_gather_from_disk_and_from_cache(path, monkeypatch, cached):
    """The way for rows in the kernel's cache and that for rows on disk give the same."""
    monkeypatch.setattr(table_storage.MappedTensor, "is_cached", lambda self, row_ids: cached)
    monkeypatch.setattr(table_storage, "CACHED_ROWS", 100)
    table = open_table(path, "table")
    for count in (5, 1000):
        ids = np.arange(0, ROWS, ROWS // count)
        request = table.request(ids)
        assert bool(request.futures) == (count == 1000)
        assert torch.equal(request.result()[0], random_table()[ids])


def test_cache_is_noticed(path):
    """A file that was just written is in the kernel's cache, where that can be asked."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("no preadv2 here")
    path.read_bytes()
    assert open_table(path, "table").weight.is_cached(np.arange(100))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_distinct_ids(ids):
    """As np.unique, with ids that repeat and large ones."""
    ids = np.asarray(ids, dtype=np.int64)
    ids = np.concatenate([ids, ids[::3]])
    unique, inverse = distinct_ids(ids)
    expected, expected_inverse = np.unique(ids, return_inverse=True)
    assert np.array_equal(unique, expected) and np.array_equal(inverse, expected_inverse)


def test_distinct_ids_of_any_size():
    """Where id and position do not fit one number, and where ids are negative."""
    for ids in ([2**62, 5, 2**62], [-3, 4, -3], []):
        unique, inverse = distinct_ids(np.asarray(ids, dtype=np.int64))
        assert unique[inverse].tolist() == ids and sorted(set(ids)) == unique.tolist()


def test_header(path):
    """Names, shapes, dtypes and bytes are those of the safetensors library."""
    entries = read_header(path)
    assert set(entries) == {"a", "table", "z"}
    entry = entries["table"]
    assert entry.dtype == "F32" and entry.shape == (ROWS, DIM)
    assert path.read_bytes()[entry.start : entry.stop] == random_table().numpy().tobytes()


def test_folder_and_shards(tmp_path):
    """A folder is known by its index or its only file; weight and scales may lie in different shards."""
    weight = torch.randint(0, 126, (40, 64), dtype=torch.uint8)
    scale = torch.randint(120, 130, (40, 2), dtype=torch.uint8)
    save_file({"w": weight.view(torch.float8_e4m3fn), "x": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"s": scale.view(torch.float8_e8m0fnu)}, tmp_path / "two.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        find_tensors(tmp_path)
    weight_map = {"w": "one.safetensors", "x": "one.safetensors", "s": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    table = open_table(tmp_path, "w", "s")
    rows, scales = table.request(np.array([3, 9])).result()
    assert rows.dtype == torch.float8_e4m3fn and scales.dtype == torch.float8_e8m0fnu
    assert torch.equal(rows.view(torch.uint8), weight[[3, 9]]) and torch.equal(scales.view(torch.uint8), scale[[3, 9]])
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert open_table(tmp_path, "w").rows == 4
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors"):
        open_table(tmp_path, "w", "s")


def test_one_open_table_for_all(path):
    """Whoever opens a table gets the one that is open, also by a link; it closes with its last user."""
    table = open_table(path, "table")
    assert open_table(str(path), "table") is table and copy.deepcopy(table) is table
    link = path.with_name("link.safetensors")
    link.symlink_to(path)
    assert open_table(link, "table") is table
    assert torch.equal(rows_of(pickle.loads(pickle.dumps(table)), [1]), random_table()[[1]])
    file = table.weight.file
    del table
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)


def test_another_file_under_the_name_is_another_table(path):
    """A table that was opened before does not stand for a file that came later."""
    old = open_table(path, "table")
    other = path.with_name("other")
    save_file({"table": random_table(seed=1)}, other)
    os.replace(other, path)
    new = open_table(path, "table")
    assert new is not old
    assert torch.equal(rows_of(new, [7]), random_table(seed=1)[[7]])


def test_threads(path):
    """Many threads read from one table at a time."""
    weight = random_table()

    def read(seed: int) -> bool:
        generator = np.random.default_rng(seed)
        return all(
            torch.equal(rows_of(open_table(path, "table"), ids), weight[ids])
            for ids in (np.unique(generator.integers(0, ROWS, generator.integers(1, 900))) for _ in range(20))
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


@pytest.mark.parametrize("ids", [[ROWS], [-1, 0], [0, 2**40]])
def test_ids_out_of_range(path, ids):
    with pytest.raises(IndexError, match=f"{ROWS - 1}, the last row of table in .*x.safetensors"):
        open_table(path, "table").request(np.array(ids))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1000), "truncated|written to"),
        (lambda path: os.truncate(path, 0), "truncated"),
        (lambda path: (shutil.copy(path, f"{path}2"), os.replace(f"{path}2", path)), "replaced"),
        (lambda path: path.open("r+b").write(b"12345678"), "written to"),
        (lambda path: path.unlink(), "removed"),
    ],
    ids=["truncated", "emptied", "replaced", "written", "removed"],
)
def test_file_that_changes_while_open(path, change, word):
    """Never rows of another file, and never the end of the process, which is what a page beyond a file's end is."""
    table = open_table(path, "table")
    rows_of(table, [1])
    change(path)
    gc.collect()
    with pytest.raises(RuntimeError, match=rf"x\.safetensors.*table.*({word})"):
        table.request(np.array([ROWS - 1]))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("count", [3, 2000])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1000), "truncated"),
        (lambda path: os.truncate(path, 4096), "truncated"),
        (lambda path: (shutil.copy(path, f"{path}2"), os.replace(f"{path}2", path)), "replaced"),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), "written to"),
        (lambda path: path.unlink(), "removed"),
    ],
    ids=["truncated", "truncated to a page", "replaced", "written", "removed"],
)
def test_file_that_changes_while_it_is_read(path, monkeypatch, change, word, count, moment):
    """Between the request and the read, and between the read and its end: an error, no other rows, and no signal."""
    os.utime(path, (1, 1))
    table, gather, once = open_table(path, "table"), table_storage.MappedTensor._gather, []

    def change_and_gather(self, row_ids, out):
        if moment == "after":
            gather(self, row_ids, out)
        if not once:
            once.append(change(path))
        if moment == "before":
            gather(self, row_ids, out)

    monkeypatch.setattr(table_storage.MappedTensor, "_gather", change_and_gather)
    request = table.request(np.arange(ROWS - count, ROWS))
    with pytest.raises(RuntimeError, match=rf"x\.safetensors.*table.*({word})"):
        request.result()


@pytest.mark.skipif(table_storage.writev is None, reason="rows are read one by one here")
@pytest.mark.parametrize("dim", [1, 24, 5000, 40000])
def test_rows_that_do_not_fit_the_pipe(tmp_path, dim):
    """Rows of any width, more of them than one call takes; after an error, the next read is right."""
    rows = 3000 if dim < 100 else 20
    weight = random_table(rows, dim)
    path, other = tmp_path / "t.safetensors", tmp_path / "o.safetensors"
    for file in (path, other):
        save_file({"w": weight}, file)
    table, broken = open_table(path, "w"), open_table(other, "w")
    ids = np.sort(np.random.default_rng(0).choice(rows, rows - 3, replace=False))
    assert torch.equal(rows_of(table, ids), weight[ids])
    with pytest.raises(RuntimeError):
        os.truncate(other, 4096)
        broken.weight.gather(ids, np.empty((len(ids), 4 * dim), np.uint8))
    assert torch.equal(rows_of(table, ids), weight[ids])


def test_without_writev(path, monkeypatch):
    monkeypatch.setattr(table_storage, "writev", None)
    table, ids = open_table(path, "table"), np.arange(0, ROWS, 7)
    assert torch.equal(rows_of(table, ids), random_table()[ids])
    os.truncate(path, 4096)
    with pytest.raises(RuntimeError, match="truncated"):
        table.weight.gather(ids, np.empty((len(ids), 4 * DIM), np.uint8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_process_has_pipes_of_its_own(path):
    table, ids = open_table(path, "table"), np.arange(0, ROWS, 2)
    assert torch.equal(rows_of(table, ids[:3]), random_table()[ids[:3]])
    child = os.fork()
    if child == 0:
        try:
            right = all(torch.equal(rows_of(table, ids[:50]), random_table()[ids[:50]]) for _ in range(50))
            os._exit(not right)
        finally:
            os._exit(2)
    assert all(torch.equal(rows_of(table, ids[:50]), random_table()[ids[:50]]) for _ in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_truncated_file_is_not_opened(path):
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="truncated"):
        open_table(path, "table")


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 64, (5).to_bytes(8, "little") + b"{nope", (2).to_bytes(8, "little") + b"[]"]
)
def test_not_safetensors(tmp_path, content):
    """Other files, a pickle among them, are refused by their header."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        open_table(path, "table")


def test_unreadable(path):
    with pytest.raises(FileNotFoundError):
        open_table(path.with_name("missing.safetensors"), "table")
    if os.geteuid():
        path.chmod(0)
        with pytest.raises(PermissionError):
            open_table(path, "table")


def test_tensors_that_are_no_table(path, tmp_path):
    """A name that is not there, one dimension, an integer dtype, and scales that do not fit."""
    with pytest.raises(KeyError, match="no tensor nope; there are a, table, z"):
        open_table(path, "nope")
    with pytest.raises(ValueError, match="not a table"):
        open_table(path, "a")
    fp8 = torch.zeros(6, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def scales(rows: int, blocks: int) -> torch.Tensor:
        return torch.zeros(rows, blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    other = tmp_path / "fp8.safetensors"
    save_file(
        {"w": fp8, "s": scales(6, 2), "rows": scales(5, 2), "blocks": scales(6, 3), "f": torch.ones(6, 2)}, other
    )
    assert open_table(other, "w", "s").dim == 64
    for scale in (None, "rows", "blocks", "f"):
        with pytest.raises(ValueError, match="scales"):
            open_table(other, "w", scale)
    with pytest.raises(ValueError, match="has scales"):
        open_table(other, "f", "s")
