"""Prometheus metrics of the control plane, served at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

registry = CollectorRegistry()

waterlevel = Gauge(
    "gyre_waterlevel", "Unfinished executions (dispatched - finished)", registry=registry
)
running = Gauge("gyre_executions_running", "Executions whose harness runs now", registry=registry)
step = Gauge("gyre_step", "Optimizer steps trained", registry=registry)
weight_version = Gauge(
    "gyre_weight_version", "Weight version that the engines serve", registry=registry
)
cell_role = Gauge(
    "gyre_cell_role", "1 for the role a cell has", ["cell", "role"], registry=registry
)
totals = {
    "role_switches": Gauge(
        "gyre_role_switches_total", "Completed role changes of cells", registry=registry
    ),
    "rerouted_calls": Gauge(
        "gyre_rerouted_calls", "Model calls that moved to another engine", registry=registry
    ),
    "lost_calls": Gauge(
        "gyre_lost_calls", "Model calls that could not be answered", registry=registry
    ),
    "harness_errors": Gauge(
        "gyre_harness_errors", "Harnesses that ended with an error of their own", registry=registry
    ),
}
"""Counts over the whole run. Gauges, not counters: they are set to what the timeline says, so that
they go on where a resumed run goes on."""
reward = Gauge("gyre_reward_mean", "Mean reward of the last step's executions", registry=registry)
logprob_gap = Gauge(
    "gyre_logprob_gap", "Trainer vs engine log-probability difference, nats", registry=registry
)
order_seconds = Histogram(
    "gyre_order_seconds",
    "Wall time cells took for an order",
    ["order"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64),
    registry=registry,
)
