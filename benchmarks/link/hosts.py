"""Two hosts on one machine: network namespaces joined by a link of a limited rate."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST = "256kb"
QUEUE = "50ms"


@contextlib.contextmanager
def two_hosts(mbit_per_s: int) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, for `ip netns exec`; removed at the end.

    Raises:
        SystemExit: they cannot be made here.
    """
    names = (f"gyre1-{os.getpid()}", f"gyre2-{os.getpid()}")
    links = (f"gv1-{os.getpid() % 100_000}", f"gv2-{os.getpid() % 100_000}")
    rate = f"{mbit_per_s}mbit"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        first = ("ip", "link", "add", links[0], "netns", names[0], "type", "veth")
        _run(*first, "peer", "name", links[1], "netns", names[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", *shape)
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or error
        raise SystemExit(
            f"error: no network namespaces with a limited link could be made ({detail}); run as "
            "root with iproute2 and the kernel's tbf queue"
        ) from None
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
