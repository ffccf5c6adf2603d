// Counters in shared memory between processes of one host: publish with release, wait with acquire.
// Waiting spins briefly, then sleeps, without holding Python's lock; a non-zero cancel counter ends every wait.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace {

std::atomic_ref<int64_t> flag_at(const at::Tensor& flags, int64_t index) {
  TORCH_CHECK(flags.device().is_cpu() && flags.scalar_type() == at::kLong && flags.is_contiguous() && index >= 0 &&
                  index < flags.numel(),
              "flag ", index, " does not exist in a tensor of ", flags.numel(), " int64");
  return std::atomic_ref<int64_t>(flags.mutable_data_ptr<int64_t>()[index]);
}

void flag_set(const at::Tensor& flags, int64_t index, int64_t value) {
  flag_at(flags, index).store(value, std::memory_order_release);
}

int64_t flag_get(const at::Tensor& flags, int64_t index) {
  return flag_at(flags, index).load(std::memory_order_acquire);
}

// Returns 1 once flags[index] >= value, 0 after the timeout, -1 when flags[cancel] is set.
int64_t flag_wait(const at::Tensor& flags, int64_t index, int64_t value, int64_t cancel, double timeout_s) {
  auto flag = flag_at(flags, index), stop = flag_at(flags, cancel);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int64_t round = 0;; ++round) {
    if (flag.load(std::memory_order_acquire) >= value) return 1;
    if (stop.load(std::memory_order_acquire) != 0) return -1;
    if (round < 64) {
      std::this_thread::yield();
      continue;
    }
    if (std::chrono::steady_clock::now() > deadline) return 0;
    std::this_thread::sleep_for(std::chrono::microseconds(round < 256 ? 20 : 200));
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gyre, m) {
  m.def("flag_set(Tensor(a!) flags, int index, int value) -> ()");
  m.def("flag_get(Tensor flags, int index) -> int");
  m.def("flag_wait(Tensor flags, int index, int value, int cancel, float timeout_s) -> int");
}

TORCH_LIBRARY_IMPL(gyre, CPU, m) {
  m.impl("flag_set", flag_set);
  m.impl("flag_get", flag_get);
  m.impl("flag_wait", flag_wait);
}
