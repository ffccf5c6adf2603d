// Index logic of box copies, shared by the CPU and CUDA paths.
//
// A box is up to three nested loops over elements, with its own strides on either side. `collapse` joins loops that
// are contiguous on both sides, so that most boxes become a few long runs. A task is a range of a box's outer
// iterations, small enough to balance threads or thread blocks.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GYRE_HD __host__ __device__ __forceinline__
#else
#define GYRE_HD inline
#endif

namespace gyre {

constexpr int kBoxColumns = 13;

struct Box {
  int64_t source, source_offset, target, target_offset;
  int64_t size[3], source_stride[3], target_stride[3];
};

struct Task {
  int64_t box, first, count;  // outer iterations [first, first + count) of the box
};

GYRE_HD Box read_box(const int64_t* row) {
  Box b{row[0], row[1], row[2], row[3], {}, {}, {}};
  for (int d = 0; d < 3; ++d) {
    b.size[d] = row[4 + d];
    b.source_stride[d] = row[7 + d];
    b.target_stride[d] = row[10 + d];
  }
  return b;
}

// Moves size-1 loops outwards and joins neighbours that are contiguous on both sides; the element order is kept.
GYRE_HD Box collapse(Box b) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int d = 2; d > 0; --d) {
      const bool joins = b.source_stride[d - 1] == b.size[d] * b.source_stride[d] &&
                         b.target_stride[d - 1] == b.size[d] * b.target_stride[d];
      if (b.size[d] == 1) {
        b.size[d] = b.size[d - 1];
        b.source_stride[d] = b.source_stride[d - 1];
        b.target_stride[d] = b.target_stride[d - 1];
        b.size[d - 1] = 1;
      } else if (joins && b.size[d - 1] != 1) {
        b.size[d] *= b.size[d - 1];
        b.size[d - 1] = 1;
      }
      if (b.size[d - 1] == 1) b.source_stride[d - 1] = b.target_stride[d - 1] = 0;
    }
  }
  return b;
}

GYRE_HD int64_t outer_count(const Box& b) { return b.size[0] * b.size[1]; }

GYRE_HD void outer_offsets(const Box& b, int64_t outer, int64_t* source, int64_t* target) {
  const int64_t i = outer / b.size[1], j = outer % b.size[1];
  *source = b.source_offset + i * b.source_stride[0] + j * b.source_stride[1];
  *target = b.target_offset + i * b.target_stride[0] + j * b.target_stride[1];
}

// Largest element offset reached from the box's first element.
GYRE_HD int64_t reach(const Box& b, const int64_t* stride) {
  int64_t sum = 0;
  for (int d = 0; d < 3; ++d) sum += (b.size[d] - 1) * stride[d];
  return sum;
}

// Weight of an element in a checksum; 31 bits, so that a product with 32 bits of data fits 64.
constexpr int64_t kPositionMask = 0x7fffffff;

GYRE_HD uint64_t checksum_weight(int64_t position) {
  return static_cast<uint32_t>(2 * static_cast<uint64_t>(position & kPositionMask) + 1);
}

}  // namespace gyre
