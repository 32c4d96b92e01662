"""Says how long a load may still take of the time that it costs the request. Policy only: no tensors.

Time counts while the sequence could run but for its chunks. What is brought while it waits for its turn, for pages or
for an earlier request costs nothing, and layers that are in memory by the time they are loaded are due from then. What
a step loads for several sequences comes layer by layer of all, so each may take as long as the others' loads do, too,
and as the step computes others' rows between its layers. What was read ahead is not late any more: a copy is left, and
where that takes long (a busy machine, pages of the pool that were never written), computing would too. All of it is due
when the last layer is, and as much later as computing it then would take.
"""

from __future__ import annotations

from collections.abc import Callable

from mneme.cachetier.policy.load_controller import LoadPlan


class LoadClock:
    """The clock of one fetch. The engine's thread calls it, but for `begin_bringing` and `num_brought`."""

    def __init__(self, plan: LoadPlan, num_layers: int, clock: Callable[[], float]) -> None:
        self.num_brought = 0  # layers of which all is in memory
        self._plan, self._num_layers, self._clock = plan, num_layers, clock
        self._spent_s = 0.0  # before the clock was last stopped
        self._since_s: float | None = None  # when it was started; None: it stands
        self._waited_s: float | None = None  # what was spent before a thread began to bring; None: none has
        self._num_ready, self._load_began_s = 0, 0.0  # layers that were in memory when the load began
        self._beside_s = 0.0  # the step's other loads

    def start(self) -> None:
        """Start the clock: the sequence waits for nothing else."""
        if self._since_s is None:
            self._since_s = self._clock()

    def stop(self) -> None:
        """Stop the clock: the sequence waits for something else, or for nothing."""
        self._spent_s, self._since_s = self._so_far_s(), None

    def begin_bringing(self) -> None:
        self._waited_s = self._so_far_s()

    def begin_load(self, beside_s: float = 0.0) -> None:
        """Begin a load into pages taken for all or a part of it; the step's other loads should take so long."""
        self.start()
        self._num_ready, self._load_began_s, self._beside_s = self.num_brought, self._clock(), beside_s

    @property
    def is_all_brought(self) -> bool:
        return self.num_brought == self._num_layers

    def left_to_wait_s(self) -> float:
        """Return the seconds, beside others, until the next layer must be in memory, or somebody must begin to read."""
        self.start()
        if self._waited_s is None:
            return self._plan.slack_s - self._so_far_s()
        return self._due_s(self.num_brought, is_alone=False) - self._so_far_s()

    def left_s(self, layer: int, computed_s: float = 0.0) -> float:
        """Return the seconds until a layer must be in its pages.

        `computed_s`: of the step, in which it waited for no load: the rows of others cost as much without this one.
        """
        beside_s = self._beside_s * (layer + 1) / self._num_layers
        beside_s += max(computed_s - self._plan.first_s * layer / self._num_layers, 0.0)
        paced = layer
        if self._waited_s is not None and layer < self.num_brought:  # who reads was in time, and a copy is left
            paced = self._num_layers - 1
            beside_s += self._plan.predicted_recompute_s
        if layer < self._num_ready:
            return self._plan.due_s(paced, self._num_layers) + beside_s - (self._clock() - self._load_began_s)
        return self._due_s(paced, is_alone=True) + beside_s - self._so_far_s()

    def _due_s(self, layer: int, *, is_alone: bool) -> float:
        return self._plan.due_s(layer, self._num_layers, waited_s=self._waited_s or 0.0, is_alone=is_alone)

    def _so_far_s(self) -> float:
        return self._spent_s + (0.0 if self._since_s is None else self._clock() - self._since_s)
