"""Entry point of every SGLang server: `python -m gyre_megatron.cpu.sglang.launch SGLANG_ARGS`.

Where CUDA exists this is `sglang.launch_server` unchanged. On a CPU it first mends five
assumptions (`enable_cpu`) and says so in the log:

| SGLang assumes | here | why it is safe |
|---|---|---|
| `sgl_kernel` is installed | a stub on this process's path | its CPU fallback paths are plain PyTorch |
| `torchvision` is installed | a stub on this process's path | only vision models use it |
| the device is found by CUDA | SGLANG_USE_CPU_ENGINE=1 | SGLang's own switch |
| tensors are shared as file descriptors | through the file system | same memory, another name |
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


def enable_cpu() -> str:
    """Make `import sglang` and its server work in this process without CUDA, and say how.

    Nothing is changed where CUDA exists. Only this module's own run calls it: a process that
    imports it is left alone.

    Raises:
        VersionError: SGLang is missing or was not tested.
    """
    require(SGLANG)
    import torch

    if torch.cuda.is_available():
        return "launch: CUDA is available, so SGLang runs unchanged"
    sys.path.insert(0, str(STUBS))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_fork
    # With the default, file descriptors, a tensor sent to the server kills it
    torch.multiprocessing.set_sharing_strategy("file_system")
    return (
        "launch: SGLang runs on the CPU: stubs for sgl_kernel and torchvision, "
        "SGLANG_USE_CPU_ENGINE=1, workers forked, tensors shared through the file system"
    )


def _keep_fork(*_args, **_kwargs) -> None:
    """SGLang asks for spawn; keep the fork method chosen above."""


if __name__ == "__main__":
    die_with_parent()
    print(enable_cpu(), flush=True)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
