// FlexAttention's block tables of a packed tree on GPU. Index logic is shared with the CPU path (tree_blocks.h).
//
// Bounds: one warp per node updates the key blocks it touches. Key tables: one warp per query block tests all key blocks
// above the diagonal against their bounds and compacts hits by ballot (a test is two compares on cached data; 1M tokens
// are 8,192 blocks). Query tables: one warp per key block writes intervals.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "tree_blocks.h"

namespace {

using gyre::ColumnBounds;
constexpr int kWarp = 32, kThreads = 256;

__device__ __forceinline__ int warp_index() { return (blockIdx.x * blockDim.x + threadIdx.x) / kWarp; }
__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarp; }

__global__ void subtree_extremes_i32(const int32_t* starts, const int32_t* ends, const int32_t* until, int32_t nodes,
                                     int32_t block, int32_t* low, int32_t* high) {
  const int n = warp_index();
  if (n >= nodes) return;
  for (int32_t b = starts[n] / block + lane_index(); b <= (ends[n] - 1) / block; b += kWarp) {
    atomicMin(low + b, until[n]);
    atomicMax(high + b, until[n]);
  }
}

__global__ void bounds_i32(const int32_t* low, const int32_t* high, int32_t num_blocks, int32_t block,
                           ColumnBounds* bounds) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < num_blocks) bounds[b] = gyre::column_bounds(b, low[b], high[b], block);
}

// With null tables only the counts are written.
__global__ void key_rows_i32(const ColumnBounds* bounds, const int32_t* held, int32_t rows, int32_t* some_count,
                             int32_t* some, int64_t some_width, int32_t* all_count, int32_t* all, int64_t all_width) {
  const int r = warp_index(), lane = lane_index();
  if (r >= rows) return;
  const int32_t i = held[r];
  int32_t num_some = 0, num_all = 0;
  for (int32_t base = 0; base <= i; base += kWarp) {
    const int32_t j = base + lane;
    const ColumnBounds b = j <= i ? bounds[j] : ColumnBounds{0, 0};
    const bool whole = j <= i && gyre::is_full(b, j, i), part = j <= i && gyre::is_partial(b, j, i);
    const unsigned whole_mask = __ballot_sync(0xffffffffu, whole), part_mask = __ballot_sync(0xffffffffu, part);
    const unsigned before = (1u << lane) - 1;
    if (all != nullptr && whole) all[r * all_width + num_all + __popc(whole_mask & before)] = j;
    if (some != nullptr && part) some[r * some_width + num_some + __popc(part_mask & before)] = j;
    num_all += __popc(whole_mask);
    num_some += __popc(part_mask);
  }
  if (lane == 0) {
    all_count[r] = num_all;
    some_count[r] = num_some;
  }
}

__global__ void query_rows_i32(const ColumnBounds* bounds, const int32_t* place, int32_t num_blocks, int32_t* some_count,
                               int32_t* some, int64_t some_width, int32_t* all_count, int32_t* all, int64_t all_width) {
  const int j = warp_index(), lane = lane_index();
  if (j >= num_blocks) return;
  const ColumnBounds b = bounds[j];
  const int32_t whole_first = place[j + 1], whole_last = place[b.full_until];
  const int32_t part_last = place[b.partial_until];
  const int32_t diagonal = place[j + 1] - place[j];
  if (all != nullptr)
    for (int32_t t = whole_first + lane; t < whole_last; t += kWarp) all[j * all_width + t - whole_first] = t;
  if (some != nullptr) {
    if (lane == 0 && diagonal) some[j * some_width] = place[j];
    for (int32_t t = whole_last + lane; t < part_last; t += kWarp) some[j * some_width + diagonal + t - whole_last] = t;
  }
  if (lane == 0) {
    all_count[j] = whole_last > whole_first ? whole_last - whole_first : 0;
    some_count[j] = diagonal + part_last - whole_last;
  }
}

int64_t grid(int64_t items, int64_t per_block) { return (items + per_block - 1) / per_block; }

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
tree_block_mask(const at::Tensor& starts, const at::Tensor& ends, const at::Tensor& subtree_ends, int64_t num_tokens,
                int64_t block, const std::optional<at::Tensor>& query_blocks, const std::optional<at::Tensor>& scratch) {
  TORCH_CHECK_VALUE(!scratch.has_value(), "scratch is for CPU; torch's CUDA allocator already keeps freed memory");
  for (const auto* t : {&starts, &ends, &subtree_ends})
    TORCH_CHECK_VALUE(t->is_cuda() && t->dim() == 1 && t->scalar_type() == at::kInt && t->is_contiguous(),
                      "tree_block_mask takes contiguous int32 [nodes] on one device; found ", t->sizes());
  const c10::cuda::CUDAGuard guard(starts.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto options = starts.options();
  const auto n = static_cast<int32_t>((num_tokens + block - 1) / block), nodes = static_cast<int32_t>(starts.size(0));
  const auto size = static_cast<int32_t>(block);

  const auto low = at::full({n}, INT32_MAX, options), high = at::zeros({n}, options);
  const auto bounds = at::empty({n, 2}, options);
  auto* b = reinterpret_cast<ColumnBounds*>(bounds.mutable_data_ptr<int32_t>());
  subtree_extremes_i32<<<grid(nodes, kThreads / kWarp), kThreads, 0, stream>>>(
      starts.const_data_ptr<int32_t>(), ends.const_data_ptr<int32_t>(), subtree_ends.const_data_ptr<int32_t>(), nodes,
      size, low.mutable_data_ptr<int32_t>(), high.mutable_data_ptr<int32_t>());
  bounds_i32<<<grid(n, kThreads), kThreads, 0, stream>>>(low.const_data_ptr<int32_t>(), high.const_data_ptr<int32_t>(), n,
                                                         size, b);
  const auto held = query_blocks.has_value() ? query_blocks->to(options.dtype()).contiguous() : at::arange(n, options);
  const auto rows = static_cast<int32_t>(held.size(0));
  const auto place = at::searchsorted(held, at::arange(n + 1, options), /*out_int32=*/true);

  const auto some_k = at::empty({1, 1, rows}, options), all_k = at::empty({1, 1, rows}, options);
  const auto some_q = at::empty({1, 1, n}, options), all_q = at::empty({1, 1, n}, options);
  auto launch = [&](int32_t* sk, int64_t skw, int32_t* ak, int64_t akw, int32_t* sq, int64_t sqw, int32_t* aq, int64_t aqw) {
    if (rows > 0)
      key_rows_i32<<<grid(rows, kThreads / kWarp), kThreads, 0, stream>>>(
          b, held.const_data_ptr<int32_t>(), rows, some_k.mutable_data_ptr<int32_t>(), sk, skw,
          all_k.mutable_data_ptr<int32_t>(), ak, akw);
    query_rows_i32<<<grid(n, kThreads / kWarp), kThreads, 0, stream>>>(
        b, place.const_data_ptr<int32_t>(), n, some_q.mutable_data_ptr<int32_t>(), sq, sqw,
        all_q.mutable_data_ptr<int32_t>(), aq, aqw);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  launch(nullptr, 0, nullptr, 0, nullptr, 0, nullptr, 0);  // counts, which give the widths of the tables
  const auto most = at::stack({some_k.numel() ? some_k.max() : at::zeros({}, options),
                               all_k.numel() ? all_k.max() : at::zeros({}, options), some_q.max(), all_q.max()})
                        .clamp_min(1)
                        .cpu();
  const auto* w = most.const_data_ptr<int32_t>();
  // Views report the width FlexAttention expects; memory is as wide as the longest row (see the CPU path).
  auto table = [&](int64_t r, int64_t width, int64_t full) {
    return at::empty({r * width + std::max<int64_t>(full - width, 0)}, options)
        .as_strided({1, 1, r, std::max(full, width)}, {r * width, r * width, width, 1});
  };
  const auto ski = table(rows, w[0], n), aki = table(rows, w[1], n), sqi = table(n, w[2], rows), aqi = table(n, w[3], rows);
  launch(ski.mutable_data_ptr<int32_t>(), w[0], aki.mutable_data_ptr<int32_t>(), w[1], sqi.mutable_data_ptr<int32_t>(),
         w[2], aqi.mutable_data_ptr<int32_t>(), w[3]);
  return {some_k, ski, all_k, aki, some_q, sqi, all_q, aqi};
}

}  // namespace

TORCH_LIBRARY_IMPL(gyre, CUDA, m) { m.impl("tree_block_mask", tree_block_mask); }
