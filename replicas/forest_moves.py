"""What a step is to do with pages before its forward pass, in this order: save, hide, load. Policy only: no tensors.

A save counts as done when it is listed, because whatever reads or reuses its pages later is ordered behind it.
"""

from __future__ import annotations

from typing import NamedTuple


class LoadedPage(NamedTuple):
    """A page that comes back from the host: the keys of its first `num_tokens` tokens are rotated from `start` on."""

    host_page: int
    device_page: int
    start: int
    num_tokens: int


class Moves(NamedTuple):
    """No page stands twice in one column."""

    saves: list[tuple[int, int]]  # (device page, host page), as the device page was before this step
    fresh: list[int]  # device pages with a new owner: nothing of what they held may be seen
    loads: list[LoadedPage]


class PendingMoves:
    """Gathers a step's moves while it is scheduled."""

    def __init__(self) -> None:
        self._device_by_host_page: dict[int, int] = {}
        self._load_by_device_page: dict[int, LoadedPage] = {}
        self._fresh: dict[int, None] = {}

    @property
    def has_loads(self) -> bool:
        return bool(self._load_by_device_page)

    def is_fresh(self, device_page: int | None) -> bool:
        """Whether what it is to hold will be there only when the step has run."""
        return device_page in self._fresh

    def save(self, device_page: int, host_page: int) -> None:
        self._device_by_host_page[host_page] = device_page

    def forget_save(self, host_page: int) -> None:
        """The host page is nobody's any more."""
        self._device_by_host_page.pop(host_page, None)

    def take(self, device_page: int) -> None:
        """The device page has a new owner."""
        self._fresh[device_page] = None

    def load(self, load: LoadedPage) -> None:
        self._load_by_device_page[load.device_page] = load

    def cancel_load(self, device_page: int | None) -> bool:
        """Whether there was one: what the device page is said to hold is not there then."""
        return device_page is not None and self._load_by_device_page.pop(device_page, None) is not None

    def forget(self) -> None:
        """Pages taken are still to be hidden; nothing else of them counts."""
        self._device_by_host_page.clear()
        self._load_by_device_page.clear()

    def drain(self) -> Moves:
        saves = [(device, host) for host, device in self._device_by_host_page.items()]
        moves = Moves(saves, list(self._fresh), list(self._load_by_device_page.values()))
        self.forget()
        self._fresh.clear()
        return moves
