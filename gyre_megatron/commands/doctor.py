"""`gyre doctor`: what this machine has, what it lacks, and the command that mends each.

Owns the list of checks; each reads one fact and changes nothing. Invariant: a check that cannot find
out says so (warn), and never ends the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from gyre_megatron import __version__
from gyre_megatron.commands import clock
from gyre_megatron.versions import MEGATRON, SGLANG, Tested, installed_version, untested_allowed

State = Literal["ok", "warn", "fail"]

MIN_SHARED_MEMORY_GIB = 1.0
"""A container's usual 64 MiB holds no weights at all: publishing would end with SIGBUS."""
USUAL_SHARED_MEMORY_GIB = 8.0
"""Below this an 8B model's shadow (2 bytes a parameter, once for each engine) does not fit."""
MIN_OPEN_FILES = 4096
"""Each harness holds several sockets, and gloo one for every peer and group."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
        name: what was looked at.
        state: ok; warn: some runs will miss it; fail: no run can work.
        found: what is there.
        mend: the command that helps; empty where nothing is to be done.
    """

    name: str
    state: State
    found: str
    mend: str = ""


def main(arguments: Sequence[str]) -> int:
    """The command line; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="gyre doctor", description="Check this machine, and say how to mend it."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    findings = examine()
    failed = any(finding.state == "fail" for finding in findings)
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(f) for f in findings]}, indent=1))
    else:
        print("\n".join(line for finding in findings for line in _lines(finding)))
    return 1 if failed else 0


def examine() -> list[Finding]:
    """Every finding about this machine, in the order that a run would need things."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            found = check()
        except Exception as error:  # a broken package raises whatever it likes while it is imported
            reason = f"could not be checked: {type(error).__name__}: {error}"
            found = Finding(check.__name__.replace("_", " "), "warn", reason)
        findings += found if isinstance(found, list) else [found]
    return findings


def _lines(finding: Finding) -> list[str]:
    first = f"{finding.state:<4}  {finding.name}: {finding.found}"
    return [first, f"      -> {finding.mend}"] if finding.mend else [first]


# Packages


def python_and_gyre() -> list[Finding]:
    place = Path(__file__).resolve().parent.parent
    return [
        Finding("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        Finding("gyre-megatron", "ok", f"{__version__} at {place}"),
    ]


def dependencies() -> Finding:
    """What the package declares, extras left out: installed, and in range."""
    declared = [Requirement(line) for line in requires("gyre-megatron") or ()]
    needed = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    # Megatron-Core has a line of its own, about tested versions instead of possible ones.
    wanted = [r for r in needed if r.name != MEGATRON.package]
    wrong = [r for r in wanted if not r.specifier.contains(installed_version(r.name) or "0", True)]
    if not wrong:
        return Finding(
            "dependencies", "ok", f"all {len(wanted)}; torch {installed_version('torch')}"
        )
    found = ", ".join(f"{r} (found {installed_version(r.name) or 'nothing'})" for r in wrong)
    return Finding("dependencies", "fail", found, f"pip install {shlex.join(map(str, wrong))}")


def tested_versions() -> list[Finding]:
    return [_tested(MEGATRON), _tested(SGLANG)]


def _tested(tested: Tested) -> Finding:
    found = installed_version(tested.package)
    mend = f"pip install {tested.package}=={tested.pin}"
    if found is None:
        return Finding(tested.package, "fail", "not installed", mend)
    if tested.matches(found):
        return Finding(tested.package, "ok", found)
    state: State = "warn" if untested_allowed() else "fail"
    return Finding(tested.package, state, f"{found}; {tested.wanted} was tested", mend)


def transformer_engine() -> Finding:
    found = installed_version("transformer-engine")
    if found is not None:
        return Finding("transformer-engine", "ok", found)
    if not _has_nvidia_device():
        return Finding("transformer-engine", "ok", "not installed (needs a GPU)")
    mend = "pip install 'transformer-engine[pytorch]'"
    return Finding("transformer-engine", "warn", "not installed; Megatron's own layers", mend)


def apex() -> Finding:
    """NVIDIA's apex and an old web toolkit have one name; Megatron-Core imports whichever is there."""
    from importlib.util import find_spec

    spec = find_spec("apex")
    if spec is None:
        return Finding("apex", "ok", "not installed (optional; NVIDIA's own, never PyPI's)")
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    version = installed_version("apex") or "unknown version"
    if any((place / "multi_tensor_apply").is_dir() for place in places):
        return Finding("apex", "ok", f"NVIDIA's ({version})")
    found = f"{version}: the unrelated package of that name on PyPI, not NVIDIA's"
    return Finding("apex", "fail", found, "pip uninstall apex")


# Devices and the native extension


def _has_nvidia_device() -> bool:
    return NVIDIA_DEVICE.exists()


def devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        return Finding("devices", "ok", f"{count} x {', '.join(names)}; CUDA {torch.version.cuda}")
    cores = len(os.sched_getaffinity(0))
    if not _has_nvidia_device():
        return Finding("devices", "ok", f"no GPU; {cores} CPU cores")
    if torch.version.cuda is None:
        found = f"a GPU is here, but torch {torch.__version__} was built without CUDA"
        return Finding("devices", "fail", found, "pip install -r requirements/gpu.txt")
    found = f"a GPU is here, but torch cannot use it (CUDA {torch.version.cuda})"
    return Finding("devices", "fail", found, "nvidia-smi   # its driver may be too old for torch")


def native_extension() -> Finding:
    name, mend = "native extension", "make build   # or install a wheel made for this torch"
    import torch

    try:
        from gyre_megatron.ops import library  # noqa: F401  importing it loads the extension
    except ImportError as error:
        return Finding(name, "fail", str(error), mend)
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("gyre::copy_boxes", "CUDA")
    if torch.cuda.is_available() and not on_cuda:
        mend = "make build   # with nvcc on the PATH, and without GYRE_SKIP_CUDA_BUILD"
        return Finding(name, "fail", "built without its CUDA kernels", mend)
    operators = [o for o in torch._C._dispatch_get_all_op_names() if o.startswith("gyre::")]
    kernels = "CPU and CUDA" if on_cuda else "CPU"
    return Finding(name, "ok", f"{len(operators)} operators, {kernels}")


# The system


def shared_memory() -> Finding:
    """Weights go to engines of the same host through /dev/shm."""
    try:
        about = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "fail", str(error), "mount -t tmpfs tmpfs /dev/shm")
    size, free = (count * about.f_frsize / 2**30 for count in (about.f_blocks, about.f_bavail))
    found = f"{size:.1f} GiB, {free:.1f} free"
    mend = "mount -o remount,size=64G /dev/shm   # docker run --shm-size=64g"
    if free < MIN_SHARED_MEMORY_GIB:
        return Finding("/dev/shm", "fail", found, mend)
    if size < USUAL_SHARED_MEMORY_GIB:
        return Finding("/dev/shm", "warn", found, mend)
    return Finding("/dev/shm", "ok", found)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_OPEN_FILES or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", str(soft))
    target = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    return Finding("open files", "warn", f"at most {soft} (limit {hard})", f"ulimit -n {target}")


def rdma() -> list[Finding]:
    """RDMA devices, and what they need: unlimited locked memory."""
    devices = RDMA_DEVICES.iterdir() if RDMA_DEVICES.is_dir() else ()
    found = sorted(device.name for device in devices)
    if not found:
        return [Finding("RDMA devices", "ok", "none: weights cross nodes over TCP")]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return [
        Finding("RDMA devices", "ok", ", ".join(found)),
        Finding(
            "locked memory",
            "ok" if unlimited else "warn",
            "unlimited" if unlimited else f"{soft // 1024} KiB: RDMA cannot register buffers",
            "" if unlimited else "ulimit -l unlimited   # docker run --ulimit memlock=-1",
        ),
    ]


def system_clock() -> Finding:
    """The journals of several nodes are laid side by side by wall-clock time."""
    state = clock.read()
    if state is None:
        return Finding("clock", "warn", "the kernel does not say whether it is synchronised")
    if state.synchronised:
        return Finding("clock", "ok", f"synchronised, within {state.max_error_ms:.0f} ms")
    mend = "systemctl enable --now chrony   # matters on several nodes"
    return Finding("clock", "warn", "not synchronised", mend)


CHECKS: tuple[Callable[[], Finding | list[Finding]], ...] = (
    python_and_gyre,
    dependencies,
    tested_versions,
    transformer_engine,
    apex,
    devices,
    native_extension,
    shared_memory,
    open_files,
    rdma,
    system_clock,
)
