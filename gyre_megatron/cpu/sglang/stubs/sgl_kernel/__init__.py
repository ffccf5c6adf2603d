"""Stands in for SGLang's kernel package, of which only CUDA builds are published.

On a CPU, SGLang imports these names while loading. The first one is used by its scheduler; the
others serve speculative decoding only and refuse to run. Because
`torch.ops.sgl_kernel.convert_weight_packed` is absent, SGLang takes its plain PyTorch paths.
"""


def assign_req_to_token_pool_cpu(
    req_indices, req_to_token, starts, ends, cache_locations, _pool_width
):
    """Write each request's new KV-cache slots into its row of the request-to-token table."""
    offset = 0
    for row, start, end in zip(req_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots = cache_locations[offset : offset + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        offset += end - start


def _speculative_only(name):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} needs SGLang's own CPU kernel build (speculative decoding)"
        )

    return refuse


assign_draft_cache_locs_contiguous_cpu = _speculative_only("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _speculative_only("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _speculative_only("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _speculative_only("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _speculative_only("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _speculative_only("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _speculative_only("verify_tree_greedy_cpu")
