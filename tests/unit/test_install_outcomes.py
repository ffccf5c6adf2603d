"""Every step of an install refused, done with its answer lost, or done only after the publisher
gave up: what the outcome says is what the engine's parameters are, then and later.

The loader, the installer and the parameters are real; what stands for SGLang is its HTTP face: it
runs a command on each rank, keeps the version and whether generation is held.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.engines import loader as weight_loader
from gyre_megatron.errors import EngineError
from gyre_megatron.weights.engine import Outcome, ServingEngine
from gyre_megatron.weights.installer import EngineInstaller
from gyre_megatron.weights.messages import decode_command
from gyre_megatron.weights.shadow import checksums
from tests.unit.test_weight_install import ARCHITECTURE, Engine

TP = 2
STEPS = [
    "/pause_generation",
    "/begin_weight_update",
    "verify",
    "commit",
    "seal",
    "/end_weight_update",
    "/continue_generation",
]


class TwoRanks:
    """An engine of two ranks behind `EngineHttp`.

    `fault` happens once, at the call named `at`, after `arm`.
    """

    url = "http://in-process"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models = [Engine() for _ in range(TP)]
        self.version = "0"
        self.held = False
        self.open = False
        self.queued: list[Callable[[], None]] = []
        self._at = self._fault = ""
        self._monkeypatch = monkeypatch

    def arm(self, at: str, fault: str) -> None:
        self._at, self._fault = at, fault

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        return {"weight_version": self.version}

    def post(self, path: str, body: Any = None, timeout_s: float = 120.0) -> Any:
        name, act = self._action(path, body or {})
        if name == self._at:
            self._at = ""
            if self._fault == "refused":
                raise EngineError(f"{name} was refused")
            if self._fault == "late":
                self.queued.append(act)
            else:
                act()
            raise EngineError(f"{name} did not answer in time")
        act()

    def _action(self, path: str, body: dict[str, Any]) -> tuple[str, Callable[[], None]]:
        if path != "/update_weights_from_tensor":
            return path, lambda: self._control(path, body)
        tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        return decode_command(tensors[0][0]).op, lambda: self._update(tensors, body)

    def _control(self, path: str, body: dict[str, Any]) -> None:
        if path == "/pause_generation":
            self.held = True
        elif path == "/continue_generation":
            self.held = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/begin_weight_update" and self.open:
            raise EngineError("a weight update session is already open")
        elif path.endswith("weight_update"):
            self.open = path.startswith("/begin")

    def _update(self, tensors: Any, body: dict[str, Any]) -> None:
        assert self.held or not self.open, "commands run while generation is held"
        for rank, model in enumerate(self.models):
            self._monkeypatch.setattr(weight_loader, "_tp_rank", lambda rank=rank: rank)
            weight_loader.load(model, tensors)
        self.version = body.get("weight_version", self.version)

    def values(self) -> list[float]:
        """Of every rank's norm, which a version sets to one number."""
        return [float(model.norm[0]) for model in self.models]

    def run_queued(self) -> None:
        for act in self.queued:
            act()
        self.queued.clear()


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.setattr(weight_loader, "_num_stages", lambda: 1)
    monkeypatch.setattr(weight_loader, "_refresh_derived", lambda model: None)  # needs SGLang
    monkeypatch.setattr("gyre_megatron.weights.installer._RESERVED_S", 0.0)
    made = TwoRanks(monkeypatch)
    config = WeightsConfig(shared_memory_dir=tmp_path, timeout_s=5)
    made.installer = EngineInstaller(ServingEngine(made, TP, "loader"), config)
    return made


def _install(engine: TwoRanks, version: int) -> Outcome:
    """Assemble `version` in the shadows and install it."""
    shadows = weight_loader._attached
    if engine.installer._owned is None:
        engine.installer.attach(ARCHITECTURE)
    # Both ranks live in one process here; each has mapped the shadow file of its own.
    sums = []
    for rank in range(TP):
        shadow = shadows[f"{engine.installer.directory}/{rank}"].shadow
        shadow.tensors["norm"].fill_(version)
        sums.append(checksums(shadow.tensors))
    return engine.installer.install(version, sums, limit_s=5, settle_s=0.2)


@pytest.fixture(autouse=True)
def ranks_have_processes_of_their_own(monkeypatch):
    """The loader keeps its shadows by directory, once in each process; here by rank, too."""

    class ByRank(dict):
        def _key(self, directory: str) -> str:
            return f"{directory}/{weight_loader._tp_rank()}"

        def __setitem__(self, directory, value):
            super().__setitem__(self._key(directory), value)

        def get(self, directory, default=None):
            return super().get(self._key(directory), default)

        def pop(self, directory, default=None):
            return super().pop(self._key(directory), default)

        def __iter__(self):
            return iter(())

    monkeypatch.setattr(weight_loader, "_attached", ByRank())


def test_an_install_that_goes_well(engine):
    assert _install(engine, 1) == Outcome("committed")
    assert engine.values() == [1, 1] and engine.version == "1" and not engine.held


@pytest.mark.parametrize("fault", ["refused", "lost", "late"])
@pytest.mark.parametrize("at", STEPS)
def test_the_outcome_is_what_the_parameters_are(engine, at, fault):
    assert _install(engine, 1).state == "committed"
    engine.arm(at, fault)
    outcome = _install(engine, 2)
    if at == "/continue_generation":
        assert outcome == Outcome("committed")  # it is asked again
    else:
        assert at in outcome.problem
    now = engine.values()
    if outcome.state == "committed":
        assert now == [2, 2] and engine.version == "2"
    elif outcome.state == "not committed":
        assert now == [1, 1] and engine.version == outcome.served == "1"
    else:
        assert outcome.held and engine.version == "2-incomplete"
    assert engine.held == outcome.held
    # What is known decides; nobody is left in doubt by anything but a commit in two minds.
    assert outcome.state == (
        "not committed" if STEPS.index(at) <= 2 or (at, fault) in NOT else "committed"
    )
    engine.installer.discard()
    engine.run_queued()  # SGLang gets to it at last
    assert engine.values() == now
    assert _install(engine, 3) == Outcome("committed")
    assert engine.values() == [3, 3] and engine.version == "3" and not engine.held


NOT = {("commit", "refused"), ("commit", "late")}
"""Also these: no rank had taken the permit when the publisher took it back."""


def test_a_commit_that_breaks_on_one_rank_is_held_and_marked(engine, monkeypatch):
    assert _install(engine, 1).state == "committed"
    monkeypatch.setattr(
        weight_loader,
        "_refresh_derived",
        lambda model: 1 / 0 if model is engine.models[1] else None,
    )
    outcome = _install(engine, 2)
    assert outcome.state == "unknown" and "refused commit: ZeroDivisionError" in outcome.problem
    assert outcome.held and engine.held
    assert outcome.served == engine.version == "2-incomplete"


def test_a_rank_that_refuses_to_commit_alone_is_not_taken_for_the_old_version(engine, monkeypatch):
    """Rank 0 commits; rank 1 cannot even begin. That is a mixture, not the old version."""
    assert _install(engine, 1).state == "committed"
    monkeypatch.setattr(
        weight_loader,
        "_shadow",
        lambda command, shadow=weight_loader._shadow: (
            shadow(command) if weight_loader._tp_rank() == 0 or command.op != "commit" else 1 / 0
        ),
    )
    outcome = _install(engine, 2)
    assert engine.values() == [2, 1]
    assert outcome.state == "unknown" and outcome.held


def test_damage_is_refused_with_generation_going_on(engine):
    assert _install(engine, 1).state == "committed"
    sums = [{"norm": 5}] * TP
    outcome = engine.installer.install(2, sums, 5, 1)
    assert outcome.state == "not committed" and "came without a checksum" in outcome.problem
    assert engine.values() == [1, 1] and not engine.held


def test_a_time_limit_that_has_passed_commits_nothing(engine):
    assert _install(engine, 1).state == "committed"
    shadows = [
        weight_loader._attached[f"{engine.installer.directory}/{r}"].shadow for r in range(TP)
    ]
    for shadow in shadows:
        shadow.tensors["norm"].fill_(2)
    sums = [checksums(shadow.tensors) for shadow in shadows]
    outcome = engine.installer.install(2, sums, limit_s=0.0, settle_s=1)
    assert (
        outcome.state == "not committed"
        and "time limit passed before the commit" in outcome.problem
    )
    assert engine.values() == [1, 1]
