"""Entry point of every SGLang server: `python -m gyre_megatron.cpu.sglang.launch SGLANG_ARGS`.

Where CUDA exists this is `sglang.launch_server` unchanged. On a CPU it first mends four
assumptions:

| SGLang assumes | here | why it is safe |
|---|---|---|
| `sgl_kernel` is installed | a stub on this process's path | its CPU fallback paths are plain PyTorch |
| `torchvision` is installed | a stub on this process's path | only vision models use it |
| the device is found by CUDA | SGLANG_USE_CPU_ENGINE=1 | SGLang's own switch |
| workers are spawned | they are forked | no CUDA context exists; saves importing everything three times |
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from gyre_megatron.processes import die_with_parent
from gyre_megatron.versions import SGLANG, require

STUBS = Path(__file__).parent / "stubs"


def install() -> None:
    """Make `import sglang` and its server work in this process without CUDA; does nothing where
    CUDA exists.

    Raises:
        VersionError: SGLang is missing, or is a version that was not tested.
    """
    require(SGLANG)
    import torch

    if torch.cuda.is_available():
        return
    sys.path.insert(0, str(STUBS))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_fork
    torch.multiprocessing.set_sharing_strategy("file_system")


def _keep_fork(*_args, **_kwargs) -> None:
    """SGLang asks for spawn; keep the fork method chosen above."""


if __name__ == "__main__":
    die_with_parent()
    install()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
