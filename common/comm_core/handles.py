"""Which operations a `Communicator`'s handles stand for, and what became of them."""

from __future__ import annotations

import itertools

from .streams import Operation

_EACH = 1 << 40  # handles of different communicators never coincide
_serials = itertools.count()


class Handles:
    """Operations by handle; those that ended well are forgotten, the errors of others are kept."""

    def __init__(self) -> None:
        self._first = next(_serials) * _EACH
        self._next = self._first
        self._pending: dict[int, tuple[Operation, ...]] = {}
        self._failed: dict[int, RuntimeError] = {}
        self._unreported: set[int] = set()

    def new(self, *operations: Operation) -> int:
        """A handle for `operations`."""
        self._forget_ended()
        handle = self._next
        self._next += 1
        self._pending[handle] = operations
        return handle

    def wait(self, handle: int) -> None:
        """Waits as `Operation.wait` does; raises as `Communicator.sync_stream` says."""
        self._check(handle)
        # What is not pending any more has ended.
        for operation in self._pending.get(handle, ()):
            operation.wait()
            self._note_error(handle, operation)
        if handle in self._failed:
            self._unreported.discard(handle)
            raise self._failed[handle]

    def done(self, handle: int) -> bool:
        """True once all operations of `handle` have ended, well or badly; never blocks."""
        self._check(handle)
        return all(operation.ended() for operation in self._pending.get(handle, ()))

    def wait_all(self) -> None:
        """Waits for all; raises the first error that has not been raised yet."""
        for handle, operations in self._pending.items():
            for operation in operations:
                operation.wait()
                self._note_error(handle, operation)
        self._forget_ended()
        if errors := self.take_unreported():
            raise errors[0]

    def settle_all(self) -> None:
        """Blocks the host until all have ended; raises nothing."""
        for operations in self._pending.values():
            for operation in operations:
                operation.settle()
        self._forget_ended()

    def take_unreported(self) -> list[RuntimeError]:
        """Errors that have not been raised, oldest first; they count as reported from now on."""
        errors = [self._failed[handle] for handle in sorted(self._unreported)]
        self._unreported.clear()
        return errors

    def _check(self, handle: int) -> None:
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise TypeError(f"a handle is an int, got {handle!r}")
        if not self._first <= handle < self._next:
            raise ValueError(f"unknown handle {handle}: this communicator never returned it")

    def _forget_ended(self) -> None:
        # Oldest first, and no further than the first that runs: most end in that order.
        while self._pending:
            handle, operations = next(iter(self._pending.items()))
            if not all(operation.ended() for operation in operations):
                return
            for operation in operations:
                operation.settle()  # does not block any more, but finds the error
                self._note_error(handle, operation)
            del self._pending[handle]

    def _note_error(self, handle: int, operation: Operation) -> None:
        if operation.error is not None and handle not in self._failed:
            failed = RuntimeError(f"{operation.name} failed: {operation.error}")
            failed.__cause__ = operation.error
            self._failed[handle] = failed
            self._unreported.add(handle)
