"""The one fork server of these tests: what it imports once, every forked rank has at hand.

The list belongs to the server, not to a context, so whoever sets it last sets it for everybody: it is
set here only.
"""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["tests.dist.megatron_on_cpu", "tests.dist.ranks", "tests.dist.fault_jobs"]
)
