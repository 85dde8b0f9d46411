"""The notebook runs, from the first cell to the last, without a network."""

import os
import socket

import nbformat
import pytest
from doc_pages import REPOSITORY
from nbclient import NotebookClient


NOTEBOOK = REPOSITORY / "examples" / "engram_tour.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_is_kept_without_outputs(notebook):
    """Nothing in it can be out of date, and a change of it is readable."""
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 10
    assert not [cell.id for cell in cells if cell.outputs or cell.execution_count], (
        "clear the outputs: jupyter nbconvert --clear-output --inplace examples/engram_tour.ipynb"
    )


@pytest.mark.slow
def test_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    # Whatever asks for the network gets an error: a proxy that nobody listens at.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, nowhere)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()  # raises where a cell does
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    kinds = {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}
    assert {"image/png", "text/html"} <= kinds
