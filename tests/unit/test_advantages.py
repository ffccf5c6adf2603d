"""The advantage hook: our own two, and what a user's function is held to."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import ConfigError, TrajectoryError
from gyre_megatron.trajectory.advantages import ADVANTAGES, group_advantages
from gyre_megatron.trajectory.processor import process_group
from tests.support.trees import TreeBuilder, open_store


def test_our_own() -> None:
    rewards = np.asarray([0.0, 0.5, 1.0])
    assert group_advantages(rewards, ProcessorConfig(advantage="mean")) == [-0.5, 0.0, 0.5]
    assert group_advantages(rewards, ProcessorConfig()) == pytest.approx(
        [-1.2247449, 0.0, 1.2247449]
    )
    assert group_advantages(np.asarray([0.3, 0.3]), ProcessorConfig()) == [0.0, 0.0]
    assert group_advantages(np.asarray([0.7]), ProcessorConfig()) == [0.0]
    assert group_advantages(np.asarray([]), ProcessorConfig()) == []


def test_the_contract_of_the_hook() -> None:
    assert ADVANTAGES.key == "rollout.processor.advantage"
    assert ADVANTAGES.parameters == ("rewards", "config")
    assert list(ADVANTAGES.builtin) == ["mean_std", "mean"]
    for hook in ADVANTAGES.builtin.values():
        assert tuple(inspect.signature(hook).parameters) == ADVANTAGES.parameters
        advantages = hook(np.asarray([0.0, 1.0]), ProcessorConfig())
        assert type(advantages) is list and all(type(a) is float for a in advantages)


def write_hook(folder: Path, body: str) -> str:
    file = folder / "own.py"
    file.write_text(body)
    return f"{file}:own"


def test_a_function_of_the_users_own(tmp_path: Path) -> None:
    """It gets the rewards of the executions that count, as float64, and the processor's section."""
    own = write_hook(
        tmp_path,
        "def own(rewards, config):\n"
        "    assert rewards.dtype == 'float64' and config.max_trajectories == 5\n"
        "    return rewards - 0.5\n",
    )
    with open_store(tmp_path) as store:
        for execution_id, reward in zip(
            store.add_group("g", {}, 3, 0), (1.0, None, 0.75), strict=True
        ):
            builder = TreeBuilder(store, execution_id)
            builder.call(builder.context(None, 3), 2)
            builder.finish(reward, "excluded" if reward is None else "scored")
        group = process_group(store, "g", ProcessorConfig(advantage=own))
    assert [t.advantage for t in group.trees] == [0.5, 0.25]


@pytest.mark.parametrize(
    "returned", ["[1.0]", "[1.0, 2.0, 3.0]", "[1.0, float('nan')]", "[float('inf'), 0.0]"]
)
def test_a_function_that_answers_wrongly_is_named(tmp_path: Path, returned: str) -> None:
    own = write_hook(tmp_path, f"def own(rewards, config):\n    return {returned}\n")
    with pytest.raises(TrajectoryError, match=r"own\.py:own gave .* expected one finite float"):
        group_advantages(np.asarray([0.0, 1.0]), ProcessorConfig(advantage=own))


def test_names_and_signatures_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean mean_std"):
        ADVANTAGES.load("mean_sdt")
    with pytest.raises(ConfigError, match=r"cannot be called as \(rewards, config\)"):
        ADVANTAGES.load(write_hook(tmp_path, "def own(rewards):\n    return rewards\n"))
