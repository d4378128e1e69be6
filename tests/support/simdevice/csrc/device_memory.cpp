// The device's memory: a caching allocator with CUDA's statistics. A freed block goes to the next who asks for the
// same size on the same stream, the last one first: memory is used again as early as can be.
#include "sim.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace sim {
namespace {

constexpr size_t kRounding = 512;  // bytes, as CUDA's

struct State {
  Blocks blocks;
  std::map<std::pair<int, size_t>, std::vector<Block*>> cached;  // by stream and size
  std::vector<Block*> in_use;  // freed, but other streams may work on them
  c10::CachingDeviceAllocator::DeviceStats stats;
  at::Allocator* cpu = nullptr;
};

State& state() {
  static auto* made = new State();  // never destroyed: tensors outlive static objects
  return *made;
}

thread_local bool tls_is_in_kernel = false;

void count(c10::CachingAllocator::StatArray& stat, int64_t amount) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  if (amount >= 0) all.increase(size_t(amount));
  else all.decrease(size_t(-amount));
}

size_t reserved() { return size_t(state().stats.reserved_bytes[0].current); }

void put_into_cache(Block* block) {
  count(state().stats.active, -1);
  count(state().stats.active_bytes, -int64_t(block->size));
  state().cached[{block->stream, block->size}].push_back(block);
}

// Blocks that the streams named by record_stream have done with.
void reclaim() {
  std::vector<Block*> rest;
  for (Block* block : state().in_use) {
    const auto is_over = [](const Use& use) { return is_done(use.moment.stream, use.num_entries); };
    if (!std::all_of(block->uses.begin(), block->uses.end(), is_over)) {
      rest.push_back(block);
      continue;
    }
    block->uses.clear();
    block->accesses.clear();
    put_into_cache(block);
  }
  state().in_use.swap(rest);
}

void release_cached() {
  synchronize_all();  // as cudaFree does
  reclaim();
  for (auto& [key, blocks] : state().cached)
    for (Block* block : blocks) {
      count(state().stats.reserved_bytes, -int64_t(block->size));
      count(state().stats.segment, -1);
      state().stats.num_device_free++;
      state().blocks.remove(block);
    }
  state().cached.clear();
}

Block* take_cached(int stream, size_t size) {
  auto found = state().cached.find({stream, size});
  if (found == state().cached.end() || found->second.empty()) return nullptr;
  Block* block = found->second.back();
  found->second.pop_back();
  return block;
}

[[noreturn]] void raise_out_of_memory(size_t wanted) {
  state().stats.num_ooms++;
  const size_t capacity = size_t(settings().capacity), used = size_t(state().stats.allocated_bytes[0].current);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", format_bytes(wanted),
      ". GPU 0 has a total capacity of ", format_bytes(capacity), " of which ",
      format_bytes(capacity > reserved() ? capacity - reserved() : 0), " is free. Of the allocated memory ",
      format_bytes(used), " is allocated by PyTorch, and ", format_bytes(reserved() - used),
      " is reserved by PyTorch but unallocated.");
  std::abort();  // not reached
}

Block* reserve_block(int stream, size_t size, size_t wanted) {
  const auto allowed = size_t(double(settings().capacity) * std::min(settings().fraction, 1.0));
  if (reserved() + size > allowed) {
    state().stats.num_alloc_retries++;
    state().stats.num_sync_all_streams++;
    release_cached();
  }
  if (reserved() + size > allowed) raise_out_of_memory(wanted);
  Block* block = state().blocks.add(Blocks::reserve(size), size);
  block->stream = stream;
  count(state().stats.reserved_bytes, int64_t(size));
  count(state().stats.segment, 1);
  state().stats.num_device_alloc++;
  return block;
}

char* allocate(size_t wanted) {
  Lock lock(mutex());
  const size_t size = (wanted + kRounding - 1) / kRounding * kRounding;
  if (settings().fail_after >= 0 && settings().fail_after-- == 0) raise_out_of_memory(wanted);
  reclaim();
  Block* block = take_cached(current_stream(), size);
  if (!block) block = reserve_block(current_stream(), size, wanted);
  block->requested = wanted;
  block->is_live = true;
  count(state().stats.allocation, 1);
  count(state().stats.active, 1);
  count(state().stats.allocated_bytes, int64_t(size));
  count(state().stats.active_bytes, int64_t(size));
  count(state().stats.requested_bytes, int64_t(wanted));
  // What a queued copy still uses is left alone: it shows as the reuse that it is.
  if (settings().is_poisoned && !is_queued(block->data, block->data + size)) std::memset(block->data, 0xFF, size);
  return block->data;
}

void release(void* address) {
  if (!address) return;
  Lock lock(mutex());
  Block* block = find_device_block(address);
  if (!block || block->data != address || !block->is_live) return;
  block->is_live = false;
  count(state().stats.allocation, -1);
  count(state().stats.allocated_bytes, -int64_t(block->size));
  count(state().stats.requested_bytes, -int64_t(block->requested));
  for (int user : block->users) block->uses.push_back({clock_of(user).last_of(user), num_queued(user)});
  block->users.clear();
  if (block->uses.empty()) put_into_cache(block);
  else state().in_use.push_back(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? sim::allocate(size) : nullptr;
    return {data, data, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    launch(current_stream());
    std::memcpy(target, source, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex());
    release_cached();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex());
    Block* block = find_device_block(data.get());
    if (block && block->stream != int(stream.id())) block->users.insert(int(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(mutex());
    return state().stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    each_stat([](auto& stat) { stat.reset_accumulated(); });
    state().stats.num_alloc_retries = state().stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    each_stat([](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(mutex());
    const auto total = size_t(settings().capacity);
    return {total > reserved() ? total - reserved() : 0, total};
  }

 private:
  template <class Function>
  void each_stat(Function reset) {
    Lock lock(mutex());
    auto& stats = state().stats;
    for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                        &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      for (auto& stat : *array) reset(stat);
  }
};

void release_of_cpu(void* address) {
  if (is_device(address)) release(address);
  else state().cpu->raw_deleter()(address);
}

// In place of the CPU's own allocator.
struct CpuAllocator final : at::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!tls_is_in_kernel || size == 0) return state().cpu->allocate(size);
    void* data = sim::allocate(size);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_of_cpu; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

}  // namespace

Settings& settings() {
  static auto* made = new Settings();
  return *made;
}

std::recursive_mutex& mutex() {
  static auto* made = new std::recursive_mutex();
  return *made;
}

std::string format_bytes(size_t num_bytes) {
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(2);
  if (num_bytes < (size_t(1) << 20)) text << double(num_bytes) / 1024 << " KiB";
  else if (num_bytes < (size_t(1) << 30)) text << double(num_bytes) / (1 << 20) << " MiB";
  else text << double(num_bytes) / (1 << 30) << " GiB";
  return text.str();
}

Block* Blocks::find(const void* address) const {
  auto next = blocks_.upper_bound(static_cast<const char*>(address));
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second.get();
  return address < block->data + block->size ? block : nullptr;
}

Block* Blocks::add(char* data, size_t size) {
  auto& block = blocks_[data] = std::make_unique<Block>();
  block->data = data;
  block->size = size;
  return block.get();
}

void Blocks::remove(Block* block) {
  if (block->is_owned) std::free(block->data);
  blocks_.erase(block->data);
}

char* Blocks::reserve(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kRounding, size) == 0, "simulated device: the host is out of memory");
  return static_cast<char*>(data);
}

c10::DeviceAllocator* device_allocator() {
  static auto* made = new Allocator();
  return made;
}

Block* find_device_block(const void* address) { return state().blocks.find(address); }

bool is_device(const void* address) {
  Lock lock(mutex());
  return find_device_block(address) != nullptr;
}

void use_on_stream(const at::Tensor& tensor, int stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream_of(stream));
}

InKernel::InKernel(bool is_inside) : was_inside_(std::exchange(tls_is_in_kernel, is_inside)) {}
InKernel::~InKernel() { tls_is_in_kernel = was_inside_; }

void install_cpu_allocator() {
  state().cpu = c10::GetCPUAllocator();
  c10::SetAllocator(kSim, device_allocator());
  pinned_allocator();
  c10::SetAllocator(c10::kCPU, new CpuAllocator(), 100);
}

}  // namespace sim
