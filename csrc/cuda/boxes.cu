// copy_boxes / checksum_boxes on the GPU: one launch for all boxes, 16-byte accesses where both sides allow them.
// Blocks walk a list of tasks of about 64 KiB; the index logic is that of the CPU path (boxes.h).

#include "boxes.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace {

using gyre::Box;
using gyre::Task;

constexpr int64_t kTaskBytes = 64 << 10;
constexpr int kThreads = 256;

enum class Kind : int32_t { kFloat, kBfloat16, kHalf, kByte, kWord8 };

// One box with resolved addresses, as the kernels read it.
struct DeviceBox {
  const char* source;
  char* target;
  int64_t target_index;
  Box box;
  Kind from, to;
  int32_t source_size, target_size;
};

__device__ float to_float(const char* at, Kind kind) {
  switch (kind) {
    case Kind::kFloat: return *reinterpret_cast<const float*>(at);
    case Kind::kBfloat16: return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
    default: return __half2float(*reinterpret_cast<const __half*>(at));
  }
}

// Bits of the element at `at` after conversion to kind `to`.
__device__ uint64_t element_bits(const char* at, Kind from, Kind to, int32_t size) {
  if (from == to) {
    switch (size) {
      case 1: return *reinterpret_cast<const uint8_t*>(at);
      case 2: return *reinterpret_cast<const uint16_t*>(at);
      case 4: return *reinterpret_cast<const uint32_t*>(at);
      default: return *reinterpret_cast<const uint64_t*>(at);
    }
  }
  const float value = to_float(at, from);
  if (to == Kind::kFloat) return __float_as_uint(value);
  if (to == Kind::kBfloat16) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return __half_as_ushort(__float2half_rn(value));
}

__device__ void store_bits(char* at, uint64_t bits, int32_t size) {
  switch (size) {
    case 1: *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(bits); break;
    case 2: *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(bits); break;
    case 4: *reinterpret_cast<uint32_t*>(at) = static_cast<uint32_t>(bits); break;
    default: *reinterpret_cast<uint64_t*>(at) = bits;
  }
}

__global__ void copy_boxes_sm80(const DeviceBox* boxes, const Task* tasks, int64_t num_tasks) {
  for (int64_t t = blockIdx.x; t < num_tasks; t += gridDim.x) {
    const Task task = tasks[t];
    const DeviceBox& d = boxes[task.box];
    const Box& b = d.box;
    const bool contiguous = b.source_stride[2] == 1 && b.target_stride[2] == 1 && d.from == d.to;
    for (int64_t outer = task.first; outer < task.first + task.count; ++outer) {
      int64_t so, to;
      gyre::outer_offsets(b, outer, &so, &to);
      const char* source = d.source + so * d.source_size;
      char* target = d.target + to * d.target_size;
      const int64_t bytes = b.size[2] * d.source_size;
      const uint64_t alignment = reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(target);
      if (contiguous && (alignment & 15) == 0) {
        const int64_t words = bytes / 16;
        for (int64_t i = threadIdx.x; i < words; i += blockDim.x)
          reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
        for (int64_t i = words * 16 + threadIdx.x; i < bytes; i += blockDim.x) target[i] = source[i];
      } else {
        for (int64_t i = threadIdx.x; i < b.size[2]; i += blockDim.x) {
          const char* element = source + i * b.source_stride[2] * d.source_size;
          const uint64_t bits = element_bits(element, d.from, d.to, d.source_size);
          store_bits(target + i * b.target_stride[2] * d.target_size, bits, d.target_size);
        }
      }
    }
  }
}

__global__ void checksum_boxes_sm80(const DeviceBox* boxes, const Task* tasks, int64_t num_tasks,
                                    unsigned long long* sums) {
  for (int64_t t = blockIdx.x; t < num_tasks; t += gridDim.x) {
    const Task task = tasks[t];
    const DeviceBox& d = boxes[task.box];
    const Box& b = d.box;
    uint64_t sum = 0;
    for (int64_t outer = task.first; outer < task.first + task.count; ++outer) {
      int64_t so, to;
      gyre::outer_offsets(b, outer, &so, &to);
      for (int64_t i = threadIdx.x; i < b.size[2]; i += blockDim.x) {
        const char* element = d.source + (so + i * b.source_stride[2]) * d.source_size;
        sum += element_bits(element, d.from, d.to, d.source_size) *
               gyre::checksum_weight(to + i * b.target_stride[2]);
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sums + d.target_index, static_cast<unsigned long long>(sum));
  }
}

Kind kind_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Kind::kFloat;
    case at::kBFloat16: return Kind::kBfloat16;
    case at::kHalf: return Kind::kHalf;
    default: return tensor.element_size() == 1 ? Kind::kByte : Kind::kWord8;
  }
}

// Sources or targets may be page-locked host memory, which the device reaches by the same address; not both.
at::Device device_of(at::TensorList sources, at::TensorList targets) {
  for (const auto& list : {sources, targets})
    for (const at::Tensor& tensor : list)
      if (tensor.is_cuda()) return tensor.device();
  TORCH_CHECK(false, "no tensor of this call is on a GPU");
}

struct Launch {
  at::Tensor boxes, tasks;  // on the device, as bytes
  int64_t num_tasks;
};

at::Tensor to_device(const void* data, int64_t bytes, at::Device device) {
  at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::copy_n(static_cast<const uint8_t*>(data), bytes, host.mutable_data_ptr<uint8_t>());
  return host.to(device, /*non_blocking=*/true);
}

// With `writes` false only the targets' dtypes matter, and they may be empty.
Launch prepare(at::TensorList sources, at::TensorList targets, const at::Tensor& table, at::Device device,
               bool writes) {
  TORCH_CHECK(table.device().is_cpu() && table.scalar_type() == at::kLong && table.dim() == 2 &&
                  table.size(1) == gyre::kBoxColumns && table.is_contiguous(),
              "table must be a contiguous int64 CPU tensor of shape [boxes, ", gyre::kBoxColumns, "], found ",
              table.sizes());
  std::vector<DeviceBox> boxes;
  std::vector<Task> tasks;
  for (int64_t row = 0; row < table.size(0); ++row) {
    const Box raw = gyre::read_box(table.const_data_ptr<int64_t>() + row * gyre::kBoxColumns);
    TORCH_CHECK(raw.source >= 0 && raw.source < static_cast<int64_t>(sources.size()) && raw.target >= 0 &&
                    raw.target < static_cast<int64_t>(targets.size()),
                "box ", row, " names source ", raw.source, " and target ", raw.target);
    const at::Tensor &source = sources[raw.source], &target = targets[raw.target];
    for (const auto& [tensor, offset, stride] :
         {std::tuple{&source, raw.source_offset, raw.source_stride}, {&target, raw.target_offset, raw.target_stride}}) {
      const int64_t end = offset + gyre::reach(raw, stride);
      const int64_t have = static_cast<int64_t>(tensor->storage().nbytes() / tensor->element_size()) -
                           tensor->storage_offset();
      const bool touched = writes || tensor == &source;
      TORCH_CHECK(!touched || (offset >= 0 && end < have), "box ", row, " ends at element ", end, " of a tensor of ", have);
    }
    const bool same = source.scalar_type() == target.scalar_type();
    TORCH_CHECK(same || (source.is_floating_point() && target.is_floating_point() && source.element_size() > 1 &&
                         target.element_size() > 1),
                "boxes from ", source.scalar_type(), " to ", target.scalar_type(), " are not supported");
    const Kind from = kind_of(source), to = same ? from : kind_of(target);
    const Box box = gyre::collapse(raw);
    boxes.push_back({static_cast<const char*>(source.const_data_ptr()),
                     static_cast<char*>(const_cast<void*>(target.const_data_ptr())), raw.target, box, from, to,
                     static_cast<int32_t>(source.element_size()), static_cast<int32_t>(target.element_size())});
    const int64_t step = std::max<int64_t>(1, kTaskBytes / (box.size[2] * target.element_size()));
    const int64_t outer = gyre::outer_count(box), index = static_cast<int64_t>(boxes.size()) - 1;
    for (int64_t first = 0; first < outer; first += step) tasks.push_back({index, first, std::min(step, outer - first)});
  }
  return {to_device(boxes.data(), boxes.size() * sizeof(DeviceBox), device),
          to_device(tasks.data(), tasks.size() * sizeof(Task), device), static_cast<int64_t>(tasks.size())};
}

int blocks_for(int64_t num_tasks) {
  int device = 0, processors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t resident = 4L * processors;
  return static_cast<int>(std::min(num_tasks, resident));
}

void copy_boxes_cuda(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  if (table.size(0) == 0) return;
  const at::Device device = device_of(sources, targets);
  const c10::cuda::CUDAGuard guard(device);
  const Launch launch = prepare(sources, targets, table, device, true);
  copy_boxes_sm80<<<blocks_for(launch.num_tasks), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const DeviceBox*>(launch.boxes.const_data_ptr()),
      reinterpret_cast<const Task*>(launch.tasks.const_data_ptr()), launch.num_tasks);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor checksum_boxes_cuda(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  const at::Device device = device_of(sources, targets);
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor sums = at::zeros({static_cast<int64_t>(targets.size())}, at::TensorOptions(device).dtype(at::kLong));
  if (table.size(0) == 0) return sums;
  const Launch launch = prepare(sources, targets, table, device, false);
  checksum_boxes_sm80<<<blocks_for(launch.num_tasks), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const DeviceBox*>(launch.boxes.const_data_ptr()),
      reinterpret_cast<const Task*>(launch.tasks.const_data_ptr()), launch.num_tasks,
      reinterpret_cast<unsigned long long*>(sums.mutable_data_ptr<int64_t>()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sums;
}

at::Tensor copy_boxes_with_checksums_cuda(at::TensorList sources, at::TensorList targets, const at::Tensor& table) {
  copy_boxes_cuda(sources, targets, table);
  return checksum_boxes_cuda(sources, targets, table);
}

}  // namespace

TORCH_LIBRARY_IMPL(gyre, CUDA, m) {
  m.impl("copy_boxes", copy_boxes_cuda);
  m.impl("checksum_boxes", checksum_boxes_cuda);
  m.impl("copy_boxes_with_checksums", copy_boxes_with_checksums_cuda);
}
