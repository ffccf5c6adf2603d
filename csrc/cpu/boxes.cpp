// copy_boxes / checksum_boxes, and both in one pass, on the CPU: checks, then threads over tasks of about 1 MiB.

#include "boxes.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using gyre::Box;
using gyre::Task;

constexpr int64_t kTaskBytes = 1 << 20;
constexpr int64_t kTile = 32;
constexpr int64_t kChunkBytes = 4 << 10;    // stays in the first cache between adding up and copying
constexpr int64_t kStreamBytes = 8 << 20;  // more than this does not stay in a core's caches anyway

// With `writes` false only the targets' dtypes matter, and they may be empty.
std::vector<Box> read_table(const at::Tensor& table, at::TensorList sources, at::TensorList targets, bool writes) {
  TORCH_CHECK(table.device().is_cpu() && table.scalar_type() == at::kLong && table.dim() == 2 &&
                  table.size(1) == gyre::kBoxColumns && table.is_contiguous(),
              "table must be a contiguous int64 CPU tensor of shape [boxes, ", gyre::kBoxColumns, "], found ",
              table.sizes());
  std::vector<Box> boxes;
  boxes.reserve(table.size(0));
  const auto elements = [](const at::Tensor& t) {
    return static_cast<int64_t>(t.storage().nbytes() / t.element_size()) - t.storage_offset();
  };
  for (int64_t row = 0; row < table.size(0); ++row) {
    const Box b = gyre::read_box(table.const_data_ptr<int64_t>() + row * gyre::kBoxColumns);
    TORCH_CHECK(b.source >= 0 && b.source < static_cast<int64_t>(sources.size()) && b.target >= 0 &&
                    b.target < static_cast<int64_t>(targets.size()),
                "box ", row, " names source ", b.source, " of ", sources.size(), " and target ", b.target, " of ",
                targets.size());
    for (int d = 0; d < 3; ++d)
      TORCH_CHECK(b.size[d] > 0 && b.source_stride[d] >= 0 && b.target_stride[d] >= 0, "box ", row,
                  " has an empty or negative dimension");
    const int64_t source_end = b.source_offset + gyre::reach(b, b.source_stride);
    const int64_t target_end = b.target_offset + gyre::reach(b, b.target_stride);
    TORCH_CHECK(b.source_offset >= 0 && source_end < elements(sources[b.source]), "box ", row, " ends at element ",
                source_end, " of source ", b.source, ", which holds ", elements(sources[b.source]));
    TORCH_CHECK(!writes || (b.target_offset >= 0 && target_end < elements(targets[b.target])), "box ", row, " ends at element ",
                target_end, " of target ", b.target, ", which holds ", elements(targets[b.target]));
    boxes.push_back(gyre::collapse(b));
  }
  return boxes;
}

std::vector<Task> split(const std::vector<Box>& boxes, at::TensorList targets) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t run = boxes[i].size[2] * targets[boxes[i].target].element_size();
    const int64_t step = std::max<int64_t>(1, kTaskBytes / run), outer = gyre::outer_count(boxes[i]);
    for (int64_t first = 0; first < outer; first += step)
      tasks.push_back({static_cast<int64_t>(i), first, std::min(step, outer - first)});
  }
  return tasks;
}

template <typename S, typename T>
void copy_run(const S* source, int64_t ss, T* target, int64_t ts, int64_t n) {
  if constexpr (std::is_same_v<S, T>) {
    if (ss == 1 && ts == 1) {
      std::memcpy(target, source, n * sizeof(S));
      return;
    }
  }
  if (ss == 1 && ts == 1) {
    for (int64_t i = 0; i < n; ++i) target[i] = static_cast<T>(source[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) target[i * ts] = static_cast<T>(source[i * ss]);
  }
}

// Rows of a transposition, in tiles that stay in the cache.
template <typename S, typename T>
void copy_tiles(const Box& b, const S* source, T* target, int64_t first, int64_t count) {
  for (int64_t r0 = first; r0 < first + count; r0 += kTile) {
    const int64_t r1 = std::min(first + count, r0 + kTile);
    for (int64_t c0 = 0; c0 < b.size[2]; c0 += kTile) {
      const int64_t width = std::min(kTile, b.size[2] - c0);
      for (int64_t r = r0; r < r1; ++r) {
        int64_t so, to;
        gyre::outer_offsets(b, r, &so, &to);
        copy_run(source + so + c0 * b.source_stride[2], b.source_stride[2],
                 target + to + c0 * b.target_stride[2], b.target_stride[2], width);
      }
    }
  }
}

template <typename S, typename T>
void copy_task(const Box& b, const S* source, T* target, const Task& task) {
  if (b.source_stride[2] != 1 || b.target_stride[2] != 1) {
    copy_tiles(b, source, target, task.first, task.count);
    return;
  }
  for (int64_t r = task.first; r < task.first + task.count; ++r) {
    int64_t so, to;
    gyre::outer_offsets(b, r, &so, &to);
    copy_run(source + so, 1, target + to, 1, b.size[2]);
  }
}

template <typename F>
void dispatch_float(at::ScalarType type, const F& f) {
  AT_DISPATCH_SWITCH(type, "copy_boxes", AT_DISPATCH_CASE(at::kFloat, [&] { f(scalar_t{}); })
                     AT_DISPATCH_CASE(at::kBFloat16, [&] { f(scalar_t{}); })
                     AT_DISPATCH_CASE(at::kHalf, [&] { f(scalar_t{}); }));
}

// Calls f(source pointer, target pointer) with the right types; equal dtypes move as plain words of their size.
template <typename F>
void dispatch_pair(const at::Tensor& source, const at::Tensor& target, const F& f) {
  void* s = const_cast<void*>(source.const_data_ptr());
  void* t = const_cast<void*>(target.const_data_ptr());
  if (source.scalar_type() == target.scalar_type()) {
    switch (source.element_size()) {
      case 1: return f(static_cast<const uint8_t*>(s), static_cast<uint8_t*>(t));
      case 2: return f(static_cast<const uint16_t*>(s), static_cast<uint16_t*>(t));
      case 4: return f(static_cast<const uint32_t*>(s), static_cast<uint32_t*>(t));
      case 8: return f(static_cast<const uint64_t*>(s), static_cast<uint64_t*>(t));
      default: TORCH_CHECK(false, "boxes of ", source.scalar_type(), " are not supported");
    }
  }
  dispatch_float(source.scalar_type(), [&](auto from) {
    dispatch_float(target.scalar_type(), [&](auto to) {
      f(static_cast<const decltype(from)*>(s), static_cast<decltype(to)*>(t));
    });
  });
}

void copy_boxes_cpu(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  const auto boxes = read_table(table, sources, targets, true);
  const auto tasks = split(boxes, targets);
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Box& b = boxes[tasks[i].box];
      dispatch_pair(sources[b.source], targets[b.target],
                    [&](auto* s, auto* t) { copy_task(b, s, t, tasks[i]); });
    }
  });
}

template <typename T>
uint64_t bits_of(T value) {
  if constexpr (std::is_integral_v<T>) {
    return value;
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
  } else {
    return value.x;
  }
}

template <typename S, typename T>
uint64_t checksum_elements(const S* source, int64_t stride, int64_t n, int64_t position, int64_t position_stride) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i)
    sum += bits_of(static_cast<T>(source[i * stride])) * gyre::checksum_weight(position + i * position_stride);
  return sum;
}

// Some words of a run side by side, and sums of as many lanes. GCC's vectors: written as arrays, the sums of the
// loop below stay in memory.
template <typename Word>
struct Lanes;
template <>
struct Lanes<uint16_t> {
  typedef uint16_t Words __attribute__((vector_size(16), aligned(2), may_alias));
  typedef uint32_t Sums __attribute__((vector_size(32)));
};
template <>
struct Lanes<uint32_t> {
  typedef uint32_t Words __attribute__((vector_size(16), aligned(4), may_alias));
  typedef uint64_t Sums __attribute__((vector_size(32)));
};

// A run of words whose positions follow one another, by additions only, which all machines have vectors of.
// With x_i the words and p the first position, sum x_i (2 (p + i) + 1) = (2p + 1) S0 + 2 S1, S0 = sum x_i and
// S1 = sum i x_i. Each lane adds up every kLanes-th word, and its running sums.
template <typename Word>
uint64_t checksum_run(const Word* words, int64_t n, int64_t position) {
  const int64_t start = position & gyre::kPositionMask;
  if constexpr (sizeof(Word) != 2 && sizeof(Word) != 4) {
    return checksum_elements<Word, Word>(words, 1, n, position, 1);
  } else {
    using Words = typename Lanes<Word>::Words;
    using Sums = typename Lanes<Word>::Sums;
    constexpr int64_t kLanes = sizeof(Words) / sizeof(Word);
    constexpr int64_t kSteps = 256;  // running sums of 256^2 / 2 words of 16 bits fit 32 bits
    if (start + n > gyre::kPositionMask) return checksum_elements<Word, Word>(words, 1, n, position, 1);
    uint64_t total = 0;
    int64_t done = 0;
    while (n - done >= kLanes) {
      const int64_t steps = std::min(kSteps, (n - done) / kLanes);
      Sums sums = {}, running = {};
      for (int64_t step = 0; step < steps; ++step) {
        running += sums;
        sums += __builtin_convertvector(*reinterpret_cast<const Words*>(words + done + step * kLanes), Sums);
      }
      uint64_t plain = 0, weighted = 0;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const uint64_t sum = sums[lane];
        plain += sum;
        weighted += kLanes * ((steps - 1) * sum - running[lane]) + lane * sum;
      }
      total += static_cast<uint64_t>(2 * (start + done) + 1) * plain + 2 * weighted;
      done += steps * kLanes;
    }
    return total + checksum_elements<Word, Word>(words + done, 1, n - done, start + done, 1);
  }
}

// Copies past the caches: what does not fit them would only push other data out, and cost reading the target first.
void stream_bytes(const char* source, char* target, int64_t n) {
#ifdef __SSE2__
  const int64_t head = std::min<int64_t>(n, -reinterpret_cast<uintptr_t>(target) & 15);
  std::memcpy(target, source, head);
  int64_t at = head;
  for (; at + 16 <= n; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
  std::memcpy(target + at, source + at, n - at);
#else
  std::memcpy(target, source, n);
#endif
}

template <typename S, typename T>
uint64_t checksum_task(const Box& b, const S* source, const T*, const Task& task) {
  uint64_t sum = 0;
  for (int64_t r = task.first; r < task.first + task.count; ++r) {
    int64_t so, to;
    gyre::outer_offsets(b, r, &so, &to);
    if constexpr (std::is_same_v<S, T> && std::is_integral_v<T>) {
      if (b.source_stride[2] == 1 && b.target_stride[2] == 1) {
        sum += checksum_run(source + so, b.size[2], to);
        continue;
      }
    }
    sum += checksum_elements<S, T>(source + so, b.source_stride[2], b.size[2], to, b.target_stride[2]);
  }
  return sum;
}

// Copies and adds up what was read while it is in the cache.
template <typename S, typename T>
uint64_t copy_checksum_task(const Box& b, const S* source, T* target, const Task& task, bool streams) {
  if (b.source_stride[2] != 1 || b.target_stride[2] != 1) {
    copy_task(b, source, target, task);
    return checksum_task(b, source, target, task);
  }
  constexpr int64_t kChunk = kChunkBytes / sizeof(T);
  uint64_t sum = 0;
  for (int64_t r = task.first; r < task.first + task.count; ++r) {
    int64_t so, to;
    gyre::outer_offsets(b, r, &so, &to);
    for (int64_t at = 0; at < b.size[2]; at += kChunk) {
      const int64_t n = std::min(kChunk, b.size[2] - at);
      const S* from = source + so + at;
      if constexpr (std::is_same_v<S, T> && std::is_integral_v<T>) {
        sum += checksum_run(from, n, to + at);
        if (streams) {
          stream_bytes(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(target + to + at), n * sizeof(T));
          continue;
        }
      } else {
        sum += checksum_elements<S, T>(from, 1, n, to + at, 1);
      }
      copy_run(from, 1, target + to + at, 1, n);
    }
  }
#ifdef __SSE2__
  _mm_sfence();  // before anybody is told that the target is written
#endif
  return sum;
}

// Runs `sum_task` over all boxes; returns the sums of each target.
template <typename F>
at::Tensor sum_tasks(at::TensorList sources, at::TensorList targets, const at::Tensor& table, bool writes,
                     const F& sum_task) {
  const auto boxes = read_table(table, sources, targets, writes);
  const auto tasks = split(boxes, targets);
  std::vector<uint64_t> sums(tasks.size());
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Box& b = boxes[tasks[i].box];
      dispatch_pair(sources[b.source], targets[b.target],
                    [&](auto* s, auto* t) { sums[i] = sum_task(b, s, t, tasks[i]); });
    }
  });
  at::Tensor result = at::zeros({static_cast<int64_t>(targets.size())}, at::kLong);
  auto* total = reinterpret_cast<uint64_t*>(result.mutable_data_ptr<int64_t>());
  for (size_t i = 0; i < tasks.size(); ++i) total[boxes[tasks[i].box].target] += sums[i];
  return result;
}

at::Tensor checksum_boxes_cpu(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  return sum_tasks(sources, targets, table, false,
                   [](const Box& b, auto* s, auto* t, const Task& task) { return checksum_task(b, s, t, task); });
}

at::Tensor copy_boxes_with_checksums_cpu(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  int64_t nbytes = 0;
  for (const at::Tensor& target : targets) nbytes += target.numel() * target.element_size();
  const bool streams = nbytes >= kStreamBytes;
  return sum_tasks(sources, targets, table, true, [streams](const Box& b, auto* s, auto* t, const Task& task) {
    return copy_checksum_task(b, s, t, task, streams);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gyre, m) {
  m.def("copy_boxes(Tensor[] sources, Tensor(a!)[] targets, Tensor table) -> ()");
  m.def("checksum_boxes(Tensor[] sources, Tensor[] targets, Tensor table) -> Tensor");
  m.def("copy_boxes_with_checksums(Tensor[] sources, Tensor(a!)[] targets, Tensor table) -> Tensor");
}

TORCH_LIBRARY_IMPL(gyre, CPU, m) {
  m.impl("copy_boxes", copy_boxes_cpu);
  m.impl("checksum_boxes", checksum_boxes_cpu);
  m.impl("copy_boxes_with_checksums", copy_boxes_with_checksums_cpu);
}
