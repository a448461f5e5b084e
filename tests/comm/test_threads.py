"""Several threads use one `Communicator`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from comm_core.streams.lanes import Handles


class Waits:
    """Operation that ends when another thread lets it."""

    name = "waits"
    error: Exception | None = None

    def __init__(self) -> None:
        self.waited, self.end = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.end.wait(20)

    settle = wait

    def ended(self) -> bool:
        return self.end.is_set()


@pytest.mark.parametrize("method", ["wait_all", "settle_all"])
def test_a_thread_may_call_while_another_waits_for_all(method: str):
    handles, operations = Handles(), [Waits() for _ in range(3)]
    for operation in operations[:2]:
        handles.new(operation)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(getattr(handles, method))
        assert operations[0].waited.wait(20)
        last = handles.new(operations[2])  # the wait may need what this thread starts now
        assert not handles.done(last)
        for operation in operations:
            operation.end.set()
        ended.result(20)
