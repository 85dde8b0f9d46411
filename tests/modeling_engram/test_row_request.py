"""Rows that travel on a stream of their own; the streams are stand-ins, which note what is asked of them in order."""

from unittest import mock

import pytest
import torch

from hf_engram.modeling_engram import row_request
from hf_engram.modeling_engram.row_request import RowRequest, awaited


@pytest.fixture
def streams(monkeypatch) -> mock.MagicMock:
    """Attributes `main` and `side` are the two streams; the calls of both are in `mock_calls`."""
    calls = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: calls.on(stream))
    monkeypatch.setattr(row_request, "side_stream", lambda device: calls.side)
    return calls


@pytest.mark.parametrize("in_thread", [False, True])
def test_memory_is_kept_for_both_streams(streams, in_thread):
    """What the side stream reads was allocated on the main one, and its result is used there."""
    request = RowRequest(streams.work, torch.device("cuda", 0), in_thread, streams.ids)
    rows = awaited(request)
    assert rows is streams.work.return_value
    calls = [call for call in streams.mock_calls if not call[0].startswith("on()")]
    assert calls == [
        mock.call.main.record_event(),
        mock.call.ids.record_stream(streams.side),
        mock.call.on(streams.side),
        mock.call.side.wait_event(streams.main.record_event()),
        mock.call.work(streams.ids),
        mock.call.side.record_event(),
        mock.call.main.wait_event(streams.side.record_event()),
        mock.call.work().record_stream(streams.main),
    ]


def test_without_streams():
    ids = torch.tensor([3, 1])
    request = RowRequest(lambda tensor: tensor + 1, torch.device("cpu"), False, ids)
    assert awaited(request).tolist() == [4, 2]
    assert awaited(ids) is ids
