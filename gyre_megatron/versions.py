"""Which versions of the packages we build on were tested, and what happens with others.

Owns those numbers; requirements/*.txt pins the same, which a test compares. Megatron-Core and SGLang
are checked before they are imported, because we rely on details of theirs that no release promises.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from gyre_megatron.errors import VersionError

ALLOW_UNTESTED = "GYRE_ALLOW_UNTESTED"


@dataclass(frozen=True)
class Tested:
    """A package that is relied on beyond its public interface.

    Attributes:
        package: its name as pip knows it.
        pin: the version that the tests run with.
        series: leading parts of the version that have to agree; later ones may differ.
        relies_on: what of ours depends on its details, for the warning.
    """

    package: str
    pin: str
    series: int
    relies_on: str

    @property
    def wanted(self) -> str:
        """The tested versions in words."""
        parts = self.pin.split(".")
        return self.pin if self.series >= len(parts) else ".".join([*parts[: self.series], "x"])

    def matches(self, found: str) -> bool:
        """Whether `found` is one of the tested versions; a local suffix (`+cpu`) does not count."""
        return self._series(found) == self._series(self.pin)

    def _series(self, text: str) -> list[str]:
        return text.split("+")[0].split(".")[: self.series]


MEGATRON = Tested(
    "megatron-core",
    "0.16.1",
    2,
    "tree layers, gradient sums, checkpoints and the CPU layer (gyre_megatron/training, cpu)",
)
SGLANG = Tested(
    "sglang",
    "0.5.23",
    3,
    "installing weights in place, moving calls and the CPU server (gyre_megatron/engines, cpu)",
)


def installed_version(package: str) -> str | None:
    """The installed version, or None; reads metadata only, imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def untested_allowed() -> bool:
    """Whether the user took it upon themselves to run versions that were not tested."""
    return os.environ.get(ALLOW_UNTESTED, "0") not in ("", "0")


def require(tested: Tested) -> None:
    """Check that a tested version of a package is installed.

    With GYRE_ALLOW_UNTESTED=1 another version is let through, and rank 0 says on standard error
    what has not been tested with it.

    Raises:
        VersionError: the package is missing, or is another version and nobody allowed it.
    """
    found = installed_version(tested.package)
    if found is None:
        raise VersionError(
            f"{tested.package} is not installed; install {tested.package}=={tested.pin} "
            "(`make setup` in a checkout does)"
        )
    if tested.matches(found):
        return
    problem = f"{tested.package} {found} is installed, {tested.wanted} was tested"
    if not untested_allowed():
        raise VersionError(
            f"{problem}; install {tested.package}=={tested.pin}, or set {ALLOW_UNTESTED}=1 to run "
            "with what is there"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {problem}. Untested: {tested.relies_on}.", file=sys.stderr, flush=True)
