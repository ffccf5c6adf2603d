"""Build gyre_megatron and its native extension.

Every `csrc/cpu/*.cpp` is compiled; every `csrc/cuda/*.cu` too where a CUDA build of torch and nvcc
exist. `GYRE_SKIP_CUDA_BUILD=1` leaves the CUDA sources out. `GYRE_NATIVE=1` uses all instructions of
this machine, which `make build` sets; without it, as for a wheel, the code runs on any machine of
the architecture. Operators register themselves under `torch.ops.gyre`.
"""

import os
import shutil
from glob import glob
from pathlib import Path

import torch
from setuptools import find_namespace_packages, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

CXX_FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-Wall", "-Wextra", "-Werror=return-type"]
if os.environ.get("GYRE_NATIVE", "0") == "1":
    # For the machine that builds it only: a wheel with these instructions dies elsewhere.
    CXX_FLAGS.append("-march=native")
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo"]


def with_cuda() -> bool:
    skip = os.environ.get("GYRE_SKIP_CUDA_BUILD", "0") == "1"
    return (
        not skip
        and torch.version.cuda is not None
        and CUDA_HOME is not None
        and shutil.which("nvcc") is not None
    )


def extension():
    cpu, cuda = sorted(glob("csrc/cpu/*.cpp")), sorted(glob("csrc/cuda/*.cu"))
    common = dict(name="gyre_megatron._C", include_dirs=[os.path.abspath("csrc/include")])
    link = ["-fopenmp"]
    if with_cuda() and cuda:
        args = {"cxx": [*CXX_FLAGS, "-DGYRE_WITH_CUDA"], "nvcc": NVCC_FLAGS}
        return CUDAExtension(
            sources=cpu + cuda, extra_compile_args=args, extra_link_args=link, **common
        )
    return CppExtension(
        sources=cpu, extra_compile_args={"cxx": CXX_FLAGS}, extra_link_args=link, **common
    )


def shipped(folder):
    """A folder of the checkout's root, where people look for it, as a part of the package in a
    wheel: gyre_megatron/shipped.py finds it in either place. Returns package -> directory."""
    below = [str(path) for path in Path(folder).rglob("*") if path.is_dir()]
    return {
        f"gyre_megatron.{path.replace(os.sep, '.')}": path
        for path in [folder, *below]
        if not any(part.startswith((".", "__")) for part in Path(path).parts)
    }


SHIPPED = shipped("configs") | shipped("examples")
# Namespace packages too: the stand-ins below cpu/sglang/stubs are found by path, not by import.
PACKAGES = find_namespace_packages(include=["gyre_megatron", "gyre_megatron.*"])

setup(
    packages=[*PACKAGES, *SHIPPED],
    package_dir=SHIPPED,
    package_data={"": ["py.typed", "*.jinja", "*.yaml", "*.json", "*.html"]},
    ext_modules=[extension()] if glob("csrc/cpu/*.cpp") else [],
    cmdclass={"build_ext": BuildExtension},
)
