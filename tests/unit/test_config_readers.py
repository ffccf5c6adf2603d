"""Every field of the configuration is obeyed by some code of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config_readers import all_fields, fields_read, sections


def test_every_field_has_a_reader():
    unread = sorted(all_fields() - fields_read().keys())
    assert not unread, f"keys that nobody reads: {unread}"


def test_every_section_is_known():
    assert {"GyreConfig", "WeightsConfig", "ProxyConfig", "Architecture"} <= sections().keys()
    assert len(all_fields()) > 100


@pytest.mark.parametrize(
    "code",
    [
        "def f(config: WeightsConfig): return config.transport",
        "def f(config: WeightsConfig | None = None): return config.transport",
        "def f(config: 'GyreConfig'): return config.weights.transport",
        "def f(config: GyreConfig):\n  w = config.weights\n  return w.transport",
        "class A:\n  def __init__(self, config: GyreConfig): self._c = config.weights\n"
        "  def g(self): return self._c.transport",
        "class A:\n  def __init__(self, c: WeightsConfig | None): self._c = c or WeightsConfig()\n"
        "  def g(self): return self._c.transport",
        "class Shared:\n  config: GyreConfig\ndef f(c: Shared): return c.config.weights.transport",
        "def f(config: GyreConfig):\n  def g(): return config.weights.transport\n  return g",
    ],
)
def test_a_read_is_found(tmp_path: Path, code: str):
    source = tmp_path / "code.py"
    source.write_text(code)
    assert ("WeightsConfig", "transport") in fields_read([source], package=False)


@pytest.mark.parametrize(
    "code",
    [
        "def f(config): return config.transport",
        "def f(config: RouterConfig): return config.transport",
        "def f(config: WeightsConfig): return config.verify",
        "def f(config: WeightsConfig):\n  def g(config): return config.transport\n  return g",
        "def f(config: WeightsConfig):\n  config = object()\n  return config.transport",
    ],
)
def test_what_is_no_read_is_not_counted(tmp_path: Path, code: str):
    source = tmp_path / "code.py"
    source.write_text(code)
    assert ("WeightsConfig", "transport") not in fields_read([source], package=False)


def test_a_validator_is_no_reader(tmp_path: Path):
    source = tmp_path / "code.py"
    source.write_text(
        "class WeightsConfig(Section):\n"
        "  @model_validator(mode='after')\n"
        "  def _check(self): return self.transport\n"
    )
    assert not fields_read([source], package=False)
