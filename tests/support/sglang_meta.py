"""SGLang's own model classes built without memory for one tensor-parallel rank, and their probed
geometry.

`python -m tests.support.sglang_meta OUT CHECKPOINT:TP:EP:DP_ATTENTION ...` writes the first and last rank's tensors and
local boxes as OUT/<case number>-<rank>.json, each in a process forked after the imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path


def _import_sglang() -> None:
    from gyre_megatron.cpu.sglang import launch

    launch.enable_cpu()
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # names that qwen3_5 binds at import
    for schema in (
        "fused_sigmoid_mul_cpu(Tensor x, Tensor g) -> ()",
        "fused_qk_gemma_rmsnorm_cpu(Tensor x) -> Tensor",
        "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor x) -> Tensor",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor x) -> Tensor",
    ):
        library.define(schema)
    globals()["_library"] = library
    import sglang.srt.model_loader.loader
    import sglang.srt.models.deepseek_v2
    import sglang.srt.models.qwen3_moe
    import sglang.srt.models.qwen3_next  # noqa: F401


def build(checkpoint: str, tp: int, rank: int, ep: int = 1, dp: int = 1, device: str = "meta"):
    """SGLang's model for one rank, its process groups faked; once per process."""
    import sglang.srt.distributed.parallel_state as parallel_state
    import torch
    import torch.distributed as dist
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    extra = dict(dp_size=dp, enable_dp_attention=True) if dp > 1 else {}
    args = ServerArgs(
        model_path=checkpoint,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        dtype="float32",
        tp_size=tp,
        ep_size=ep,
        disable_cuda_graph=True,
        disable_custom_all_reduce=True,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        **extra,
    )
    args = (args.resolve() if hasattr(args, "resolve") else args) or args
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    model_config = ModelConfig(model_path=checkpoint, dtype="float32")
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
    ):  # a server's model runner sets these on a CPU
        if hasattr(model_config.hf_config, name):
            setattr(model_config.hf_config, f"{name}_cpu", getattr(model_config.hf_config, name))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})
    parallel_state.init_model_parallel_group = lambda *a, **k: make_group(
        *a, **{**k, "use_message_queue_broadcaster": False}
    )
    parallel_state.init_distributed_environment(
        backend="fake", world_size=tp, rank=rank, local_rank=0, distributed_init_method="env://"
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(args)
    init_dp_gathered_buffer(model_config)
    with set_default_torch_dtype(torch.float32), torch.device(device):
        return _initialize_model(model_config, LoadConfig(), None)


def geometry(checkpoint: str, tp: int, rank: int, ep: int = 1, dp: int = 1) -> bytes:
    """Tensors and local boxes of one rank, as the loader in a server would report them."""
    from gyre_megatron.config.model import Architecture
    from gyre_megatron.engines.probe import probe
    from gyre_megatron.weights.messages import Status, encode
    from gyre_megatron.weights.shadow import tensor_specs

    model = build(checkpoint, tp, rank, ep, dp)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    local_boxes = probe(model, Architecture.from_checkpoint(checkpoint), parameters)
    answer = Status(rank, 1, True, tensors=tensor_specs(parameters), local_boxes=local_boxes)
    return encode(answer)


def _rank(checkpoint: str, tp: int, rank: int, ep: int, dp: int, out: Path) -> None:
    out.write_bytes(geometry(checkpoint, tp, rank, ep, dp))


def main(out: Path, cases: list[str]) -> None:
    _import_sglang()
    context = multiprocessing.get_context("fork")
    for number, case in enumerate(cases):
        checkpoint, tp, ep, dp = case.split(":")
        for rank in sorted(
            {0, int(tp) - 1}
        ):  # the first and the last: where padding and replication show
            arguments = (checkpoint, int(tp), rank, int(ep), int(dp), out / f"{number}-{rank}.json")
            process = context.Process(target=_rank, args=arguments)
            process.start()
            process.join(60)
            if process.exitcode != 0:
                process.kill()
                sys.exit(f"rank {rank} of {case} failed with exit code {process.exitcode}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]), sys.argv[2:])
