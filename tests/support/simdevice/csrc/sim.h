// A simulated accelerator. Its memory is host memory, its kernels are the CPU's, its streams are hostile: a copy is
// carried out as late as the program's own waits allow. Each group of declarations below is one file.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kNumStreams = 33;  // the default one, and a pool of 32 as CUDA has

inline c10::Device device() { return c10::Device(kSim, 0); }
inline c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

// What a test may set; read and written under the lock, or where only one thread runs.
struct Settings {
  int64_t capacity = int64_t(8) << 30;  // bytes
  double fraction = 1;                  // of the capacity, for this process
  int64_t fail_after = -1;              // number of allocations after which one fails; -1: none does
  int patience = 2;                     // how often query() of something unfinished says no before it lets it happen
  int races = 2;                        // accesses without order: 0: do not look, 1: note, 2: raise
  int sync_debug = 0;                   // operators for which the host waits: 0: nothing, 1: warn, 2: raise
  bool is_lazy = true;                  // false: copies are done when they are queued
  bool is_poisoned = true;              // fresh memory and targets of queued copies are 0xFF: NaN, -1
};
Settings& settings();

// One lock for all. Who holds it must not copy or drop a tensor that Python knows: from torch 2.13 on counting its
// references may take Python's lock, which another thread may hold while it waits for this one.
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& mutex();
std::string format_bytes(size_t num_bytes);

// --- order: what the program has said comes before what ---

// A kernel, a copy or an event: the tick-th thing on its stream.
struct Moment {
  int stream = 0;
  int64_t tick = 0;
};

// A vector clock: of each stream, all up to that tick comes before.
class Clock {
 public:
  bool is_after(const Moment& moment) const { return ticks_[moment.stream] >= moment.tick; }
  Moment last_of(int stream) const { return {stream, ticks_[stream]}; }
  Moment tick(int stream) { return {stream, ++ticks_[stream]}; }
  void join(const Clock& other);

 private:
  std::array<int64_t, kNumStreams> ticks_{};
};

// --- regions.cpp: strided memory, of the device or of the host ---

struct Region {
  char* data = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kByte;
  char *begin = nullptr, *end = nullptr;  // it lies in between

  Region() = default;
  explicit Region(const at::Tensor& tensor);
  bool is_empty() const { return begin == end; }
  bool is_dense() const;
  bool overlaps(const Region& other) const { return begin < other.end && other.begin < end; }
  size_t num_bytes() const;                // of its elements
  Region packed_at(char* address) const;   // the same elements, contiguous
};
void copy_region(const Region& target, const Region& source);
void poison(const Region& region);

// --- streams.cpp ---

struct Event {
  int stream = 0;
  int64_t num_entries = 0;  // of the stream's queue that come before, counted from its beginning
  Clock clock;
  double seconds = 0;
  int num_queries = 0;
};

int current_stream();
void set_current_stream(int stream);
int new_stream();
Moment launch(int stream);  // of a kernel, or a copy that the host waits for: what is queued before it happens now
void queue_copy(const Region& target, const Region& source, bool is_to_host, int stream);
Event record(int stream);
void wait(int stream, const Event& event);  // the stream waits, the host goes on
bool query(Event& event);
bool query_stream(int stream);
void synchronize(const Event& event);  // the host waits
void synchronize_stream(int stream);
void synchronize_all();
void refuse_to_wait(const char* what);  // see Settings::sync_debug
const Clock& clock_of(int stream);
const Clock& clock_of_host();
bool is_queued(const char* begin, const char* end);
bool is_done(int stream, int64_t num_entries);
int64_t num_queued(int stream);
std::vector<std::string> pending();

// --- races.cpp ---

struct Access {
  char *begin, *end;
  Moment moment;
  bool is_write;
  std::string what;
};

// A stream reads or writes memory now: nothing that conflicts may be without order to it.
void touch(const Region& region, int stream, bool is_write, const char* what);
// A copy to the device has read pinned memory. A device that lags may be reading still, until the host has waited.
void lend(const Region& source, const Moment& moment);
void take_back(const Clock& clock);                               // the host has waited for what lies before `clock`
void forget_lent(const Region& target);                           // a copy to the host has come in there
void forget_lent_before(const Region& target, const Clock& clock);  // one is queued behind the reader
std::vector<std::string>& races();

// --- device_memory.cpp, pinned_memory.cpp ---

struct Use {
  Moment moment;
  int64_t num_entries;  // of its stream's queue, up to and with this use
};

struct Block {
  char* data = nullptr;
  size_t size = 0, requested = 0;
  int stream = 0;                 // device: where it was allocated
  bool is_owned = true;           // pinned: not a registered one
  bool is_live = true;
  std::set<int> users;            // device: other streams, by record_stream
  std::vector<Use> uses;          // device: at the end of life; pinned: queued copies
  std::vector<Access> accesses;
};

class Blocks {
 public:
  Block* find(const void* address) const;  // the block around it
  Block* add(char* data, size_t size);
  void remove(Block* block);
  static char* reserve(size_t size);

 private:
  std::map<const char*, std::unique_ptr<Block>> blocks_;
};

c10::DeviceAllocator* device_allocator();
Block* find_device_block(const void* address);
bool is_device(const void* address);
void use_on_stream(const at::Tensor& tensor, int stream);  // record_stream
void install_cpu_allocator();
// While a CPU kernel works for the device, what it allocates (results, workspaces) is the device's.
class InKernel {
 public:
  explicit InKernel(bool is_inside = true);
  ~InKernel();

 private:
  bool was_inside_;
};

at::Allocator* pinned_allocator();
Block* find_pinned_block(const void* address);
bool is_pinned(const void* address);
void register_host_memory(void* address, size_t size);
void unregister_host_memory(void* address);

// --- random.cpp ---

at::Generator& default_generator();
at::Generator make_generator();
at::Generator cpu_generator_of(const at::Generator& generator);

// For operators that draw without being given a generator: the CPU's default one plays that of the device.
class BorrowedRandomState {
 public:
  BorrowedRandomState();
  ~BorrowedRandomState();

 private:
  at::Generator cpu_, own_;
  at::Tensor kept_;
};

// --- twins.cpp: device tensors as CPU tensors on the same memory, and back ---

bool is_sim(const at::Tensor& tensor);
at::Tensor alias_on_cpu(const at::Tensor& tensor);  // keeps the memory alive
c10::Storage make_storage(c10::DataPtr&& data, size_t size);

// The tensors of one call of an operator.
class Twins {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor);
  at::Tensor to_sim(const at::Tensor& tensor, bool* is_fresh);
  void follow();  // sizes and storages that the kernel changed (`out=`)

 private:
  at::Tensor adopt(const at::Tensor& tensor);
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;     // the device's, the CPU's
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// --- operators.cpp, tensor_operators.cpp, guard.cpp, collectives.cpp ---

void register_cpu_kernels();
void resize_storage(const c10::Storage& storage, size_t size);
void register_hooks();

}  // namespace sim
