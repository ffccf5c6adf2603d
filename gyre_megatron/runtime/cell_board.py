"""The control plane's side of the cells: who is there, what each was ordered, what came back.

`order` sends one order to some cells and waits for all their reports; micro-steps are claimed by
the cells themselves. A cell that reports a failure, or is silent for too long, fails the run with a
clear error. Single asyncio loop, no locks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from gyre_megatron import metrics
from gyre_megatron.config.cluster import ClusterConfig
from gyre_megatron.errors import CellError
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.runtime.protocol import Envelope, Register, Report, encode
from gyre_megatron.runtime.run_state import RunState
from gyre_megatron.scheduler.orders import CellOrder, MicroStep, Stop, Wait


class CellBoard:
    """Pending orders and reports of all cells.

    Args:
        run: roles and versions, which say who may claim micro-steps.
        micro_steps: the queue that cells in training claim from.
        config: how long a request for an order is held, and how long an order may take.
        on_micro_step: called with cell and report of each micro-step that was trained.
    """

    def __init__(
        self,
        run: RunState,
        micro_steps: MicroStepQueue,
        config: ClusterConfig,
        on_micro_step: Callable[[int, Report], None],
    ) -> None:
        self.registrations: dict[int, Register] = {}
        self.all_registered = asyncio.Event()
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._run = run
        self._micro_steps = micro_steps
        self._config = config
        # A collective that hangs fails in the cell itself after collective_timeout_s, with a better
        # message than ours: give it the time to say so.
        self._order_timeout_s = 2 * config.collective_timeout_s
        self._on_micro_step = on_micro_step
        self._last_id = 0
        self._pending: dict[int, deque[Envelope]] = defaultdict(deque)
        self._awaited: dict[int, asyncio.Future[Report]] = {}
        self._claims: dict[int, int] = {}
        self._changed = asyncio.Event()

    @property
    def num_cells(self) -> int:
        return len(self._run.roles)

    def register(self, cell: int, registration: Register) -> None:
        """A cell is ready to serve.

        Raises:
            CellError: there is no such cell.
        """
        self._check(cell)
        self.registrations[cell] = registration
        if len(self.registrations) == self.num_cells:
            self.all_registered.set()

    # orders ------------------------------

    async def order(self, cells: Iterable[int], order: CellOrder) -> dict[int, Report]:
        """Give each of `cells` the order and wait for every report.

        Raises:
            CellError: a cell failed, or did not report within the time limit.
        """
        name = type(order).__name__
        reports: dict[int, asyncio.Future[Report]] = {}
        for cell in cells:
            envelope = self._envelope(order)
            reports[cell] = asyncio.get_running_loop().create_future()
            self._awaited[envelope.order_id] = reports[cell]
            self._pending[cell].append(envelope)
        self.wake()
        gathered = asyncio.gather(*reports.values())
        await asyncio.wait(
            (gathered, self.failure), timeout=self._order_timeout_s, return_when="FIRST_COMPLETED"
        )
        if self.failure.done():
            gathered.cancel()
            raise CellError(self.failure.result())
        if not gathered.done():
            silent = [cell for cell, report in reports.items() if not report.done()]
            gathered.cancel()
            raise CellError(
                f"cells {silent} did not carry out {name} within {self._order_timeout_s} s; see "
                "logs/"
            )
        for report in gathered.result():
            metrics.order_seconds.labels(name).observe(report.seconds)
        return dict(zip(reports, gathered.result(), strict=True))

    async def next_order(self, cell: int) -> bytes:
        """What `cell` should do now, encoded; waits a while for something to come up."""
        self._check(cell)
        try:
            async with asyncio.timeout(self._config.order_poll_s):
                while (envelope := self._take(cell)) is None:
                    await self._changed.wait()
        except TimeoutError:
            envelope = self._envelope(Wait())
        return encode(envelope)

    def _take(self, cell: int) -> Envelope | None:
        # Orders before micro-steps: what was decided must not wait behind the whole queue.
        if self._pending[cell]:
            return self._pending[cell].popleft()
        if not self._run.may_claim(cell) or (claimed := self._micro_steps.claim(cell)) is None:
            return None
        claim, bins = claimed
        envelope = self._envelope(MicroStep(tuple(bins)))
        self._claims[envelope.order_id] = claim
        return envelope

    def _envelope(self, order: CellOrder) -> Envelope:
        self._last_id += 1
        return Envelope(self._last_id, order)

    def report(self, cell: int, report: Report) -> None:
        """A cell carried out an order, or could not. A report that comes twice counts once.

        Raises:
            CellError: no such order was ever given.
        """
        self._check(cell)
        if report.error:
            self.fail(f"cell {cell}: {report.error}")
        elif report.order_id in self._claims:
            self._micro_steps.done(self._claims.pop(report.order_id), cell)
            self._on_micro_step(cell, report)
        elif report.order_id in self._awaited:
            awaited = self._awaited.pop(report.order_id)
            if not awaited.done():  # cancelled where the order was given up
                awaited.set_result(report)
        elif not 0 < report.order_id <= self._last_id:
            raise CellError(f"cell {cell} reported order {report.order_id}, which was never given")

    # life ------------------------------

    def fail(self, message: str) -> None:
        """End the run with `message`; the first failure counts."""
        if not self.failure.done():
            self.failure.set_result(message)

    def wake(self) -> None:
        """Let waiting cells look again; call after putting micro-steps or letting a cell claim."""
        # Every waiter holds the old event: it wakes exactly those that wait now.
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self, reason: str) -> None:
        """Tell every cell to end, also one that has yet to register; does not wait."""
        for cell in range(self.num_cells):
            self._pending[cell].append(self._envelope(Stop(reason)))
        self.wake()

    async def all_told(self, timeout_s: float) -> None:
        """Wait until every registered cell has fetched its last order, or `timeout_s` has
        passed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(self._pending[cell] for cell in self.registrations):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.02)

    def _check(self, cell: int) -> None:
        if not 0 <= cell < self.num_cells:
            raise CellError(f"there is no cell {cell}; cluster.num_cells is {self.num_cells}")
