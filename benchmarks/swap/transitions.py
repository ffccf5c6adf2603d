"""The two role changes of a cell, whole and by stage, with a real SGLang server.

train -> rollout: resume the engine's memory, write and install the weights, first token.
rollout -> train: cancel the calls in flight, release the engine's memory, take the core's weights
down the chain of cells, clear the gradients. On a CPU releasing memory frees nothing that the other
role needs; its time is the calls'.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.swap import models
from benchmarks.swap.ranks import run_ranks
from gyre_megatron.config.cluster import EngineConfig
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.engines.client import EngineHttp
from gyre_megatron.engines.loader import LOADER
from gyre_megatron.engines.server import ServerSpec, SglangServer
from gyre_megatron.training import parallel
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.cell_sync import CellWeightSync
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.engine import ServingEngine
from gyre_megatron.weights.process_groups import CellTopology

PROMPT = list(range(20, 84))


def write_checkpoint(arch: Architecture, folder: Path) -> Path:
    """A checkpoint of random weights without a tokenizer."""
    assert arch.moe is not None
    config = dict(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        num_hidden_layers=arch.num_layers,
        head_dim=arch.head_dim,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        intermediate_size=arch.intermediate_size,
        num_experts=arch.moe.num_experts,
        hidden_act="silu",
        num_experts_per_tok=arch.moe.experts_per_token,
        moe_intermediate_size=arch.moe.intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        attention_bias=False,
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if "norm" in name
        else (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in canonical_tensors(arch).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def transitions(scale: str, to_rollout: bool, to_train: bool) -> dict[str, Any]:
    """Start a server for the model and time the transitions asked for."""
    arch, result = models.architecture(scale), {"scale": scale}
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = write_checkpoint(arch, Path(temporary) / "checkpoint")
        engine = EngineConfig(
            dtype="bfloat16",
            context_length=2048,
            max_total_tokens=8192,
            max_running_requests=8,
            mem_fraction_static=0.3,
            extra_args=["--skip-tokenizer-init"],
        )
        server = SglangServer(
            ServerSpec(checkpoint, 1, "cpu", "127.0.0.1", 0, Path(temporary) / "log"), engine
        )
        server.start()
        try:
            server.wait_until_ready()
            if to_rollout:
                result["train_to_rollout"] = run_ranks(
                    _train_to_rollout, models.NUM_RANKS, arch, server.url
                )[0]
            if to_train:
                result["rollout_to_train"] = _rollout_to_train(server, arch)
        finally:
            server.stop()
    return result


def _generate(url: str, tokens: int) -> None:
    body = dict(
        input_ids=PROMPT,
        sampling_params=dict(max_new_tokens=tokens, temperature=1, ignore_eos=True),
    )
    requests.post(f"{url}/generate", json=body, timeout=300).raise_for_status()


def _train_to_rollout(arch: Architecture, url: str) -> dict[str, Any]:
    _, tensors, chunks = models.build(arch, models.TRAIN)
    for tensor in tensors.values():
        tensor.fill_(0.01)
    place = parallel.parallel_rank(models.TRAIN, arch)
    sync = CellWeightSync(chunks, arch, place, ServingEngine(EngineHttp(url), 1, LOADER))
    runs = []
    for version in (1, 2, 3):
        stages: dict[str, float] = {}
        for name, path in (
            ("release", "release_memory_occupation"),
            ("resume", "resume_memory_occupation"),
        ):
            stages[name] = _once(
                lambda path=path: requests.post(
                    f"{url}/{path}", json={}, timeout=60
                ).raise_for_status()
            )
        dist.barrier()
        start = time.perf_counter()
        report = sync.publish(version)
        stages |= dict(
            plan=report.plan_seconds,
            write=report.pack_seconds,
            install=report.install_seconds,
            publish=time.perf_counter() - start,
        )
        stages["first_token"] = _once(lambda: _generate(url, 1))
        stages.pop("release")  # belongs to the way before
        stages["total"] = stages["resume"] + stages["publish"] + stages["first_token"]
        runs.append(stages)
    return dict(cold=runs[0], warm=runs[-1], bytes_written_rank0=report.bytes_written)


def _once(action) -> float:
    """Seconds of `action` on the leader, while the others wait."""
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == 0:
        action()
    dist.barrier()
    return time.perf_counter() - start


def _rollout_to_train(server: SglangServer, arch: Architecture) -> dict[str, Any]:
    calls = [threading.Thread(target=_generate, args=(server.url, 400)) for _ in range(4)]
    for call in calls:
        call.start()
    time.sleep(1.0)
    start = time.perf_counter()
    server.post("/abort_request", {"abort_all": True})
    for call in calls:
        call.join()
    cancelled = time.perf_counter()
    server.offload()
    released = time.perf_counter()
    chain = run_ranks(
        _chain,
        2 * models.NUM_RANKS,
        sum(torch.Size(s).numel() for s in canonical_tensors(arch).values()),
    )
    server.onload()
    stages = dict(
        cancel_calls=cancelled - start,
        release=released - cancelled,
        **max(chain, key=lambda c: c["weights"]),
    )
    return {**stages, "total": sum(stages.values())}


def _chain(num_parameters: int) -> dict[str, float]:
    """Two cells of four ranks: shards go from cell 0 to cell 1 at every position; then gradients
    are cleared."""
    rank = dist.get_rank()
    topology = CellTopology(2 * models.NUM_RANKS, 2)
    store = dist.distributed_c10d._get_default_store()
    chain = CellChain(WeightsConfig(), store, topology, rank)
    size = num_parameters // models.NUM_RANKS
    shard = torch.full((size,), float(chain.cell), dtype=torch.bfloat16)
    gradients = torch.ones(size)
    chain.take_core_weights([shard], [1])
    seconds = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        chain.take_core_weights([shard], [1])
        dist.barrier()
        middle = time.perf_counter()
        gradients.zero_()
        seconds.append((middle - start, time.perf_counter() - middle))
    if shard.float().abs().max() != 0:
        raise RuntimeError("the chain did not deliver the core's weights")
    weights, clear = sorted(seconds)[1]
    return dict(weights=weights, clear_gradients=clear)
