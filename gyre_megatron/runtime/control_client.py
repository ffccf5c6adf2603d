"""A cell leader's connection to the control plane."""

from __future__ import annotations

import requests

from gyre_megatron.errors import CellError
from gyre_megatron.runtime.protocol import Register, Report, encode

CONTROL_TOKEN_HEADER = "x-gyre-control-token"


class ControlClient:
    """Asks for orders and reports results.

    Args:
        url: base URL of the control plane.
        token: the run's control token; harnesses do not have it.
        cell: the cell this leader speaks for.
        poll_s: how long the control plane may hold a request for an order.
    """

    def __init__(self, url: str, token: str, cell: int, poll_s: float) -> None:
        self.url = url
        self.cell = cell
        self._poll_s = poll_s
        self._session = requests.Session()
        self._session.headers[CONTROL_TOKEN_HEADER] = token

    def register(self, registration: Register) -> None:
        """Tell the control plane that the cell is ready."""
        self._post("register", encode(registration), timeout_s=30)

    def next_order(self) -> bytes:
        """The next order in its envelope, encoded; `Wait` if there was none for a while."""
        return self._post("next", b"", timeout_s=self._poll_s + 30)

    def report(self, report: Report) -> None:
        """Tell the control plane how an order went."""
        self._post("report", encode(report), timeout_s=30)

    def fail(self, message: str) -> None:
        """Tell the control plane that this cell ends, and why."""
        self._post("fail", message.encode(), timeout_s=5)

    def _post(self, action: str, body: bytes, timeout_s: float) -> bytes:
        try:
            response = self._session.post(
                f"{self.url}/cells/{self.cell}/{action}", data=body, timeout=timeout_s
            )
            response.raise_for_status()
        except requests.RequestException as error:
            raise CellError(
                f"cell {self.cell} lost the control plane at {self.url} ({action}): {error}; if "
                "its process ended, it has said why in the output of the job"
            ) from error
        return response.content
