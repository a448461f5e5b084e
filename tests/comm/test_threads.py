"""Several threads use one `Communicator`."""

from __future__ import annotations

import threading

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


def test_a_thread_may_call_while_another_waits_for_all():
    for method in ("wait_all", "settle_all"):
        handles = Handles()
        first, second = Waits(), Waits()
        handles.new(first)
        handles.new(second)
        errors: list[Exception] = []

        def wait(method: str = method, handles: Handles = handles) -> None:
            try:
                getattr(handles, method)()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert first.waited.wait(20)
        last = Waits()
        handle = handles.new(last)  # the wait may need what this thread starts now
        assert not handles.done(handle)
        for operation in (first, second, last):
            operation.end.set()
        thread.join(20)
        assert not thread.is_alive() and errors == []
