"""The control plane's side of the cells: who is there, what each was ordered, what came back.

`order` sends one order to some cells and waits for all their reports; micro-steps are claimed by the cells
themselves. A cell that reports a failure, or is silent for too long, fails the run with a clear
error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from gyre_megatron import metrics
from gyre_megatron.errors import CellError
from gyre_megatron.runtime import protocol
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.scheduler import Role

MakeOrder = Callable[..., Any]


class CellBoard:
    """Roles, pending orders and reports of all cells.

    Args:
        num_cells: cells of the job.
        micro_steps: the queue that cells in training claim from.
        poll_s: how long `next_order` waits before it answers `Wait`.
        order_timeout_s: how long a cell may take to carry out an order.
        on_micro_step: called with the metrics of each micro-step that was trained.
    """

    def __init__(
        self,
        num_cells: int,
        micro_steps: MicroStepQueue,
        poll_s: float,
        order_timeout_s: float,
        on_micro_step: Callable[[dict[str, float]], None],
    ) -> None:
        self.roles: list[Role] = [Role.ROLLOUT] * num_cells
        self.registrations: dict[int, protocol.Register] = {}
        self.all_registered = asyncio.Event()
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._micro_steps = micro_steps
        self._poll_s = poll_s
        self._order_timeout_s = order_timeout_s
        self._on_micro_step = on_micro_step
        self._ids = itertools.count(1)
        self._pending: dict[int, deque[Any]] = defaultdict(deque)
        self._reports: dict[int, asyncio.Future[protocol.Report]] = {}
        self._claims: dict[int, int] = {}
        self._changed = asyncio.Condition()

    def register(self, cell: int, registration: protocol.Register) -> None:
        """A cell is ready to serve.

        Raises:
            CellError: there is no such cell.
        """
        self._check(cell)
        self.registrations[cell] = registration
        if len(self.registrations) == len(self.roles):
            self.all_registered.set()

    async def order(self, cells: Iterable[int], make: MakeOrder) -> dict[int, protocol.Report]:
        """Give each cell the order `make(order_id=...)` and wait for every report.

        Raises:
            CellError: a cell failed, or did not report within the time limit.
        """
        return await self.order_each(dict.fromkeys(cells, make))

    async def order_each(self, orders: Mapping[int, MakeOrder]) -> dict[int, protocol.Report]:
        """As `order`, with an order of its own for each cell."""
        futures: dict[int, asyncio.Future[protocol.Report]] = {}
        name = ""
        for cell, make in orders.items():
            order = make(order_id=next(self._ids))
            name = type(order).__name__
            futures[cell] = self._reports[order.order_id] = (
                asyncio.get_running_loop().create_future()
            )
            self._pending[cell].append(order)
        await self.wake()
        gathered = asyncio.gather(*futures.values())
        await asyncio.wait(
            (gathered, self.failure), timeout=self._order_timeout_s, return_when="FIRST_COMPLETED"
        )
        if self.failure.done():
            gathered.cancel()
            raise CellError(self.failure.result())
        if not gathered.done():
            gathered.cancel()
            silent = [
                cell for cell, future in futures.items() if not future.done() or future.cancelled()
            ]
            raise CellError(
                f"cells {silent} did not carry out {name} within {self._order_timeout_s} s; see "
                "logs/"
            )
        for report in gathered.result():
            metrics.order_seconds.labels(name).observe(report.seconds)
        return dict(zip(futures, gathered.result(), strict=True))

    async def next_order(self, cell: int) -> bytes:
        """What `cell` should do now, encoded; waits a while for something to come up."""
        self._check(cell)
        try:
            async with asyncio.timeout(self._poll_s), self._changed:
                while True:
                    if self._pending[cell]:
                        return msgspec.msgpack.encode(self._pending[cell].popleft())
                    if (
                        self.roles[cell] is Role.TRAIN
                        and (claimed := self._claim(cell)) is not None
                    ):
                        return msgspec.msgpack.encode(claimed)
                    await self._changed.wait()
        except TimeoutError:
            return msgspec.msgpack.encode(protocol.Wait())

    def _claim(self, cell: int) -> protocol.MicroStep | None:
        claimed = self._micro_steps.claim(cell)
        if claimed is None:
            return None
        claim, bins = claimed
        order_id = next(self._ids)
        self._claims[order_id] = claim
        return protocol.MicroStep(order_id, bins)

    async def report(self, cell: int, report: protocol.Report) -> None:
        """A cell carried out an order, or could not."""
        self._check(cell)
        if report.error:
            self.fail(f"cell {cell}: {report.error}")
            return
        if report.order_id in self._claims:
            self._micro_steps.done(self._claims.pop(report.order_id), cell)
            self._on_micro_step(report.metrics)
        elif report.order_id in self._reports:
            self._reports.pop(report.order_id).set_result(report)
        else:
            raise CellError(f"cell {cell} reported order {report.order_id}, which was never given")

    def fail(self, message: str) -> None:
        """End the run with `message`; the first failure counts."""
        if not self.failure.done():
            self.failure.set_result(message)

    async def wake(self) -> None:
        """Let waiting cells look again; call after putting micro-steps or changing a role."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self, reason: str) -> None:
        """Tell every cell to end, also one that has yet to register; does not wait."""
        for cell in range(len(self.roles)):
            self._pending[cell].append(protocol.Stop(next(self._ids), reason))
        await self.wake()

    async def all_told(self, timeout_s: float) -> None:
        """Wait until every registered cell has fetched its last order, or `timeout_s` has
        passed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(self._pending[cell] for cell in self.registrations):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.02)

    def _check(self, cell: int) -> None:
        if not 0 <= cell < len(self.roles):
            raise CellError(f"there is no cell {cell}; cluster.num_cells is {len(self.roles)}")
