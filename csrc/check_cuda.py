"""Compile every csrc/cuda/*.cu for the architectures we support, on a machine with nvcc but no
GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

ARCHITECTURES = ("80", "90a", "100a")
ROOT = Path(__file__).resolve().parent
TORCH = Path(torch.__path__[0]) / "include"
GENERATED = "c10/cuda/impl/cuda_cmake_macros.h"
"""A CUDA build of torch generates this header; a CPU build ships every other one."""


def include_folders(scratch: Path) -> list[str]:
    """Include flags, with the generated header filled in where torch is a CPU build."""
    folders = [
        ROOT / "include",
        TORCH,
        TORCH / "torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    if not (TORCH / GENERATED).exists():
        (scratch / GENERATED).parent.mkdir(parents=True)
        (scratch / GENERATED).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        folders.append(scratch)
    return [f"-I{folder}" for folder in folders]


def main() -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check-cuda: nvcc was not found; install the CUDA toolkit (no GPU is needed)")
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        flags = [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "-Werror",
            "all-warnings",
            "-diag-suppress=20012,20013,20014,20015",
        ]
        flags += include_folders(Path(scratch))
        for source in sorted((ROOT / "cuda").glob("*.cu")):
            for architecture in ARCHITECTURES:
                target = f"arch=compute_{architecture},code=sm_{architecture}"
                command = [
                    nvcc,
                    *flags,
                    "-gencode",
                    target,
                    "-c",
                    str(source),
                    "-o",
                    f"{scratch}/out.o",
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                print(
                    f"check-cuda: {source.name} sm_{architecture}: "
                    f"{'ok' if done.returncode == 0 else 'FAILED'}"
                )
                if done.returncode:
                    failed += 1
                    print(done.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
