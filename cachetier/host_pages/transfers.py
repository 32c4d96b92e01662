"""The order of copies between a device pool and a tier, and the thread that runs them. Policy only: no tensors.

A *transfer* is a save or a load of some pages. It runs layer by layer, and after each layer the next transfer is
chosen: a load that comes in waits for one layer of a few pages, not for the saves before it. Saves stay in the order in
which they were issued, and so do loads; a load overtakes the saves before it unless they touch its pages.

Transfers are numbered as they are issued. As each kind ends in order, "all saves up to n have ended" is one number, and
what a page has to wait for is the number of the last transfer that touched it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from mneme.errors import TransferFailed
from mneme.kernels.page_table import IntArray

CopyLayer = Callable[[int], None]


class Transfer:
    """Copies of all layers of some pages."""

    __slots__ = ("after", "copy", "error", "num_done", "number")

    def __init__(self, number: int, copy: CopyLayer | None, after: int = 0) -> None:
        self.number = number
        self.copy = copy  # None once it has ended, so that nobody keeps the buffers alive
        self.after = after  # saves up to this number go first
        self.num_done = 0  # layers
        self.error: TransferFailed | None = None


class QueuedLoad:
    """See `tier.PageLoad`."""

    def __init__(self, transfers: Transfers, transfer: Transfer) -> None:
        self._transfers = transfers
        self._transfer = transfer

    def wait_layer(self, layer: int) -> None:
        if self._transfer.num_done <= layer:
            self._transfers.wait_for(self._transfer, layer + 1)


class Transfers:
    """A queue of saves and one of loads, and a thread that takes from them; it sleeps when both are empty."""

    def __init__(self, num_layers: int, num_device_pages: int, num_host_pages: int) -> None:
        self._num_layers = num_layers
        self._condition = threading.Condition()
        self._saves: deque[Transfer] = deque()
        self._loads: deque[Transfer] = deque()
        self._number = 0  # of the last transfer
        self._saved = self._loaded = 0  # transfers up to these numbers have ended
        self._urgent = 0  # somebody waits for saves up to this number: they overtake loads
        self._error: TransferFailed | None = None  # nobody has been told yet
        self._is_closed = False
        self._wanted: list[Callable[[], bool]] = []  # what callers wait for: they are woken for nothing less
        self._reading_save = np.zeros(num_device_pages, np.int64)  # the last save that reads a device page
        self._writing_load = np.zeros(num_device_pages, np.int64)  # the last load that writes it
        self._writing_save = np.zeros(num_host_pages, np.int64)  # the last save that writes a host page
        self._thread = threading.Thread(target=self._run, name="kv-transfers", daemon=True)
        self._thread.start()

    @property
    def has_saves(self) -> bool:
        return bool(self._saves)

    def save(self, device_pages: IntArray, host_pages: IntArray, copy: CopyLayer) -> None:
        """Append a save; `copy(layer)` is called on the thread."""
        with self._condition:
            transfer = self._issue(copy)
            self._reading_save[device_pages] = transfer.number
            self._writing_save[host_pages] = transfer.number
            self._saves.append(transfer)
            self._condition.notify_all()

    def load(self, host_pages: IntArray, device_pages: IntArray, copy: CopyLayer) -> QueuedLoad:
        """Append a load; it goes behind saves that read its device pages or write its host pages."""
        with self._condition:
            after = max(_latest(self._writing_save, host_pages), _latest(self._reading_save, device_pages))
            transfer = self._issue(copy, after)
            self._writing_load[device_pages] = transfer.number
            self._loads.append(transfer)
            self._condition.notify_all()
        return QueuedLoad(self, transfer)

    def before_reuse(self, device_pages: IntArray) -> None:
        """Return when nothing reads or writes these device pages any more."""
        save, load = _latest(self._reading_save, device_pages), _latest(self._writing_load, device_pages)
        if save <= self._saved and load <= self._loaded and self._error is None:
            return
        with self._condition:
            self._urgent = max(self._urgent, save)
            self._wait(lambda: self._saved >= save and self._loaded >= load)
            self._raise_error()

    def wait_for(self, transfer: Transfer, num_layers: int) -> None:
        """Return when so many layers of it have been copied; raise if they never will be."""
        with self._condition:
            self._wait(lambda: transfer.num_done >= num_layers or transfer.error is not None)
            if transfer.num_done < num_layers and transfer.error is not None:
                if self._error is transfer.error:
                    self._error = None
                raise transfer.error

    def close(self) -> None:
        """Drop what waits and end the thread, after the copy that is under way."""
        with self._condition:
            self._is_closed = True
            self._drop_all(TransferFailed("the tier is closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait(self, is_there: Callable[[], bool]) -> None:
        self._wanted.append(is_there)
        self._condition.wait_for(is_there)
        self._wanted.remove(is_there)

    def _issue(self, copy: CopyLayer, after: int = 0) -> Transfer:
        self._raise_error()
        if self._is_closed:
            raise TransferFailed("the tier is closed")
        self._number += 1
        return Transfer(self._number, copy, after)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            try:
                assert transfer.copy is not None
                transfer.copy(transfer.num_done)
            except BaseException as error:  # whoever waits must hear of it, whatever it is
                self._fail(error)
            else:
                self._advance(transfer)
            del transfer  # while this thread sleeps it keeps nothing alive

    def _next(self) -> Transfer | None:
        """The transfer whose next layer is to be copied; None once closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._saves or self._loads or self._is_closed)
            return None if self._is_closed else self._choose()

    def _choose(self) -> Transfer:
        if not self._saves or not self._loads:
            return (self._loads or self._saves)[0]
        save, load = self._saves[0], self._loads[0]
        # A save that was issued after the load may not overtake it: it may read what the load writes.
        goes_first = save.number < load.number and save.number <= max(self._urgent, load.after)
        return save if goes_first else load

    def _advance(self, transfer: Transfer) -> None:
        with self._condition:
            transfer.num_done += 1
            if transfer.num_done == self._num_layers and transfer.error is None:
                transfer.copy = None
                if self._loads and self._loads[0] is transfer:
                    self._loads.popleft()
                    self._loaded = transfer.number
                else:
                    self._saves.popleft()
                    self._saved = transfer.number
            if any(is_there() for is_there in self._wanted):
                self._condition.notify_all()

    def _fail(self, cause: BaseException) -> None:
        error = TransferFailed(f"KV pages could not be moved: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with self._condition:
            self._error = error
            self._drop_all(error)

    def _drop_all(self, error: TransferFailed) -> None:
        for transfer in (*self._saves, *self._loads):
            transfer.error, transfer.copy = error, None
        self._saves.clear()
        self._loads.clear()
        self._saved = self._loaded = self._number
        self._condition.notify_all()


def _latest(number_by_page: IntArray, pages: IntArray) -> int:
    return int(number_by_page[pages].max(initial=0))
