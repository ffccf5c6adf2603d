// Index logic of a packed tree's block mask, shared by the CPU and CUDA paths.
//
// Nodes lie in DFS order; token k is visible to q iff k <= q < subtree_end(node(k)). For a block j of keys, the query
// blocks that see any of it are one interval [j, partial_until(j)), and those that see all of it are
// (j, full_until(j)): intervals again, because subtrees nest. The diagonal block is always partial (causal).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GYRE_HD __host__ __device__ __forceinline__
#else
#define GYRE_HD inline
#endif

namespace gyre {

// Smallest and largest subtree end over the keys of one block, turned into rows of query blocks.
struct ColumnBounds {
  int32_t full_until;     // query blocks j < i < full_until see every key of the block
  int32_t partial_until;  // query blocks full_until <= i < partial_until (and i = j) see some of it
};

GYRE_HD ColumnBounds column_bounds(int32_t column, int32_t min_end, int32_t max_end, int32_t block) {
  const int32_t full = min_end / block, partial = (max_end + block - 1) / block;
  return {full > column + 1 ? full : column + 1, partial > column + 1 ? partial : column + 1};
}

GYRE_HD bool is_full(ColumnBounds b, int32_t column, int32_t row) { return row > column && row < b.full_until; }

GYRE_HD bool is_partial(ColumnBounds b, int32_t column, int32_t row) {
  return row == column || (row >= b.full_until && row < b.partial_until);
}

}  // namespace gyre
