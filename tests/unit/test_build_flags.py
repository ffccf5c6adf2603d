"""What a wheel is compiled with runs on any machine of the architecture."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("native", "expected"), [(None, False), ("0", False), ("1", True)])
def test_only_a_local_build_uses_this_machines_instructions(monkeypatch, native, expected) -> None:
    asked: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **fields: asked.update(fields))
    monkeypatch.setenv("GYRE_SKIP_CUDA_BUILD", "1")
    monkeypatch.chdir(ROOT)
    if native is None:
        monkeypatch.delenv("GYRE_NATIVE", raising=False)
    else:
        monkeypatch.setenv("GYRE_NATIVE", native)
    runpy.run_path(str(ROOT / "setup.py"))
    (extension,) = asked["ext_modules"]
    flags = extension.extra_compile_args["cxx"]
    assert "-O3" in flags
    assert any(flag.startswith(("-march", "-mcpu", "-mtune")) for flag in flags) == expected


def test_make_builds_for_this_machine() -> None:
    builds = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "build_ext --inplace" in line or "--no-build-isolation -e ." in line
    ]
    assert len(builds) == 2
    assert all("GYRE_NATIVE=1" in line for line in builds)
