"""Versions that were tested, others that are allowed on request, and the pins that repeat them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gyre_megatron import versions
from gyre_megatron.errors import VersionError
from gyre_megatron.versions import MEGATRON, SGLANG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version of everything is installed."""
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    return lambda found: monkeypatch.setattr(versions, "installed_version", lambda _: found)


@pytest.mark.parametrize(
    ("tested", "found"),
    [(MEGATRON, "0.16.1"), (MEGATRON, "0.16.9"), (SGLANG, "0.5.23"), (SGLANG, "0.5.23+cpu")],
)
def test_tested_versions_pass(tested, found, installed, capsys):
    installed(found)
    versions.require(tested)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tested", "found"),
    [(MEGATRON, "0.17.0"), (MEGATRON, "0.1.6"), (SGLANG, "0.5.24"), (SGLANG, "0.5.2")],
)
def test_others_are_refused_and_can_be_allowed(tested, found, installed, capsys, monkeypatch):
    installed(found)
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "0")
    with pytest.raises(VersionError, match=f"{found} is installed, {tested.wanted} was tested"):
        versions.require(tested)
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    versions.require(tested)
    said = capsys.readouterr().err
    assert found in said and tested.relies_on in said and said.count("\n") == 1
    monkeypatch.setenv("RANK", "3")
    versions.require(tested)
    assert capsys.readouterr().err == "", "one rank says it for all"


def test_a_missing_package_is_never_allowed(installed, monkeypatch):
    installed(None)
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    with pytest.raises(VersionError, match="sglang is not installed; install sglang="):
        versions.require(SGLANG)


def pins() -> dict[str, dict[str, str]]:
    """requirements/NAME.txt -> package -> pinned version."""
    found = {}
    for file in (ROOT / "requirements").glob("*.txt"):
        lines = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", file.read_text(), re.MULTILINE)
        found[file.stem] = dict(lines)
    return found


def test_pins_and_tested_versions_are_the_same():
    for tested in (MEGATRON, SGLANG):
        everywhere = {
            pinned[tested.package] for pinned in pins().values() if tested.package in pinned
        }
        assert everywhere == {tested.pin}


def test_the_installed_ones_are_the_tested_ones():
    versions.require(MEGATRON)
    versions.require(SGLANG)
