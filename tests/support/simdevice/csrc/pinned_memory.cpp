// Pinned memory of the host: rounded up to powers of two and cached, as CUDA's; what copies may still use is not
// handed out again before the host knows that they are over.
#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kSmallest = 512;  // bytes

struct State {
  Blocks blocks;
  std::map<size_t, std::vector<Block*>> cached;
  std::vector<Block*> in_use;  // freed, but copies may be on their way
  at::HostStats stats;
};

State& state() {
  static auto* made = new State();
  return *made;
}

void release(void* address) {
  if (!address) return;
  Lock lock(mutex());
  Block* block = find_pinned_block(address);
  if (!block) return;
  state().stats.active_requests.decrease(1);
  state().stats.active_bytes.decrease(block->size);
  state().in_use.push_back(block);
}

void reclaim() {
  std::vector<Block*> rest;
  for (Block* block : state().in_use) {
    const auto is_over = [](const Use& use) { return clock_of_host().is_after(use.moment); };
    if (!std::all_of(block->uses.begin(), block->uses.end(), is_over)) {
      rest.push_back(block);
      continue;
    }
    block->uses.clear();
    block->accesses.clear();
    state().cached[block->size].push_back(block);
  }
  state().in_use.swap(rest);
}

Block* make_block(size_t size) {
  state().stats.allocations.increase(1);
  state().stats.allocated_bytes.increase(size);
  state().stats.num_host_alloc++;
  return state().blocks.add(Blocks::reserve(size), size);
}

char* allocate(size_t wanted) {
  Lock lock(mutex());
  reclaim();
  size_t size = kSmallest;
  while (size < wanted) size *= 2;
  auto& cached = state().cached[size];
  Block* block = cached.empty() ? make_block(size) : cached.back();
  if (!cached.empty()) cached.pop_back();
  state().stats.active_requests.increase(1);
  state().stats.active_bytes.increase(size);
  if (settings().is_poisoned) std::memset(block->data, 0xFF, size);
  return block->data;
}

struct Allocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? sim::allocate(size) : nullptr;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
  bool record_event(void* address, void*, c10::Stream stream) override {
    Lock lock(mutex());
    Block* block = find_pinned_block(address);
    const int id = int(stream.id());
    if (block) block->uses.push_back({clock_of(id).last_of(id), num_queued(id)});
    return block != nullptr;
  }
  void empty_cache() override {
    Lock lock(mutex());
    synchronize_all();
    reclaim();
    for (auto& [size, blocks] : state().cached)
      for (Block* block : blocks) {
        state().stats.allocations.decrease(1);
        state().stats.allocated_bytes.decrease(size);
        state().stats.num_host_free++;
        state().blocks.remove(block);
      }
    state().cached.clear();
  }
  at::HostStats get_stats() override {
    Lock lock(mutex());
    return state().stats;
  }
  void reset_accumulated_stats() override {
    each_stat([](auto& stat) { stat.reset_accumulated(); });
  }
  void reset_peak_stats() override {
    each_stat([](auto& stat) { stat.reset_peak(); });
  }

 private:
  template <class Function>
  void each_stat(Function reset) {
    Lock lock(mutex());
    auto& stats = state().stats;
    for (auto* stat : {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes})
      reset(*stat);
  }
};

}  // namespace

at::Allocator* pinned_allocator() {
  static auto* allocator = [] {
    auto* made = new Allocator();
    at::setHostAllocator(kSim, made);
    return made;
  }();
  return allocator;
}

Block* find_pinned_block(const void* address) { return state().blocks.find(address); }

bool is_pinned(const void* address) {
  Lock lock(mutex());
  return find_pinned_block(address) != nullptr;
}

void register_host_memory(void* address, size_t size) {
  Lock lock(mutex());
  TORCH_CHECK(!find_pinned_block(address), "simulated device: this memory is pinned already");
  state().blocks.add(static_cast<char*>(address), size)->is_owned = false;
}

void unregister_host_memory(void* address) {
  Lock lock(mutex());
  Block* block = find_pinned_block(address);
  const bool is_registered = block && block->data == address && !block->is_owned;
  TORCH_CHECK(is_registered, "simulated device: this memory is not registered");
  synchronize_all();
  state().blocks.remove(block);
}

}  // namespace sim
