// Streams and events. A stream is a queue of copies and waits. Kernels run when they are launched, and force what is
// queued before them; a copy to the host is seen there only when the host itself has waited for it.
#include "sim.h"

#include <chrono>
#include <deque>
#include <sstream>
#include <variant>

namespace sim {
namespace {

struct Copy {
  Region target, source;
  bool is_to_host;
  Moment moment;
  Clock clock;  // what comes before it
};

struct Wait {
  int stream;
  int64_t num_entries;
};

struct Stream {
  std::deque<std::variant<Copy, Wait>> queue;
  int64_t num_done = 0;
  Clock clock;
  int num_queries = 0;
  int64_t num_entries() const { return num_done + int64_t(queue.size()); }
};

// A copy to the host that the device has done and the host does not know of.
struct Arrival {
  Region target;
  std::vector<char> bytes;
  Moment moment;
};

struct State {
  std::array<Stream, kNumStreams> streams;
  Clock host;
  std::deque<Arrival> arrivals;
  int num_made = 0;
};

State& state() {
  static auto* made = new State();  // never destroyed: tensors outlive static objects
  return *made;
}

thread_local int tls_stream = 0;

// The next thing on the stream: it comes behind all that the host knows of.
Moment tick(int stream) {
  auto& clock = state().streams[stream].clock;
  clock.join(state().host);
  return clock.tick(stream);
}

// Let copies arrive that come before `clock`; all of them, or those that overlap.
void arrive_before(const Clock& clock, const Region* where) {
  std::deque<Arrival> rest;
  for (auto& arrival : state().arrivals) {
    if (!clock.is_after(arrival.moment) || (where && !arrival.target.overlaps(*where))) {
      rest.push_back(std::move(arrival));
      continue;
    }
    forget_lent(arrival.target);
    copy_region(arrival.target, arrival.target.packed_at(arrival.bytes.data()));
  }
  state().arrivals.swap(rest);
}

void carry_out(const Copy& copy) {
  if (copy.is_to_host) {
    Arrival arrival{copy.target, std::vector<char>(copy.target.num_bytes()), copy.moment};
    copy_region(copy.target.packed_at(arrival.bytes.data()), copy.source);
    state().arrivals.push_back(std::move(arrival));
  } else {
    arrive_before(copy.clock, &copy.source);
    copy_region(copy.target, copy.source);
    lend(copy.source, copy.moment);
  }
}

void run_until(int stream, int64_t num_entries) {
  auto& own = state().streams[stream];
  while (own.num_done < num_entries) {
    const auto entry = std::move(own.queue.front());
    own.queue.pop_front();
    own.num_done++;
    if (const auto* copy = std::get_if<Copy>(&entry))
      carry_out(*copy);
    else
      run_until(std::get<Wait>(entry).stream, std::get<Wait>(entry).num_entries);
  }
}

// Before memory is written by something that comes after `clock`: the copies before that which use it.
void settle(const Region& region, const Clock& clock) {
  for (int stream = 0; stream < kNumStreams; stream++) {
    auto& own = state().streams[stream];
    int64_t last = own.num_done;
    for (size_t i = 0; i < own.queue.size(); i++) {
      const auto* copy = std::get_if<Copy>(&own.queue[i]);
      if (copy && clock.is_after(copy->moment) && (copy->target.overlaps(region) || copy->source.overlaps(region)))
        last = own.num_done + int64_t(i) + 1;
    }
    run_until(stream, last);
  }
  arrive_before(clock, &region);
}

bool is_known_to_host(const Event& event) {
  if (!is_done(event.stream, event.num_entries)) return false;
  for (auto& arrival : state().arrivals)
    if (event.clock.is_after(arrival.moment)) return false;
  return true;
}

}  // namespace

void Clock::join(const Clock& other) {
  for (int i = 0; i < kNumStreams; i++) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
}

int current_stream() { return tls_stream; }
void set_current_stream(int stream) { tls_stream = stream; }
const Clock& clock_of(int stream) { return state().streams[stream].clock; }
const Clock& clock_of_host() { return state().host; }
bool is_done(int stream, int64_t num_entries) { return state().streams[stream].num_done >= num_entries; }
int64_t num_queued(int stream) { return state().streams[stream].num_entries(); }

int new_stream() {
  Lock lock(mutex());
  return 1 + state().num_made++ % (kNumStreams - 1);
}

Moment launch(int stream) {
  Lock lock(mutex());
  const Moment moment = tick(stream);
  run_until(stream, state().streams[stream].num_entries());
  return moment;
}

void queue_copy(const Region& target, const Region& source, bool is_to_host, int stream) {
  Lock lock(mutex());
  const Moment moment = tick(stream);
  auto& own = state().streams[stream];
  const char* what = is_to_host ? "a copy to the host" : "a copy to the device";
  touch(source, stream, false, what);
  touch(target, stream, true, what);
  settle(target, own.clock);
  forget_lent_before(target, own.clock);
  if (Block* pinned = find_pinned_block(is_to_host ? target.begin : source.begin))
    pinned->uses.push_back({moment, own.num_entries() + 1});
  if (settings().is_poisoned) poison(target);
  own.queue.push_back(Copy{target, source, is_to_host, moment, own.clock});
  if (settings().is_lazy) return;
  run_until(stream, own.num_entries());
  arrive_before(own.clock, nullptr);
}

Event record(int stream) {
  Lock lock(mutex());
  tick(stream);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto& own = state().streams[stream];
  return {stream, own.num_entries(), own.clock, std::chrono::duration<double>(now).count()};
}

void wait(int stream, const Event& event) {
  Lock lock(mutex());
  auto& own = state().streams[stream];
  own.clock.join(event.clock);
  if (event.stream != stream && !is_done(event.stream, event.num_entries))
    own.queue.push_back(Wait{event.stream, event.num_entries});
}

bool query(Event& event) {
  Lock lock(mutex());
  if (!is_known_to_host(event) && event.num_queries++ < settings().patience) return false;
  synchronize(event);
  return true;
}

bool query_stream(int stream) {
  Lock lock(mutex());
  Event event = record(stream);
  int& num_queries = state().streams[stream].num_queries;
  event.num_queries = num_queries;
  const bool is_over = query(event);
  num_queries = is_over ? 0 : event.num_queries;
  return is_over;
}

void synchronize(const Event& event) {
  Lock lock(mutex());
  run_until(event.stream, event.num_entries);
  take_back(event.clock);
  state().host.join(event.clock);
  arrive_before(state().host, nullptr);
}

void synchronize_stream(int stream) { synchronize(record(stream)); }

void synchronize_all() {
  Lock lock(mutex());
  for (int stream = 0; stream < kNumStreams; stream++) synchronize_stream(stream);
}

void refuse_to_wait(const char* what) {
  const int mode = settings().sync_debug;
  TORCH_CHECK(mode < 2, "called a synchronizing SIM operation: ", what);
  if (mode == 1) TORCH_WARN("called a synchronizing SIM operation: ", what);
}

bool is_queued(const char* begin, const char* end) {
  for (auto& stream : state().streams)
    for (auto& entry : stream.queue) {
      const auto* copy = std::get_if<Copy>(&entry);
      if (!copy) continue;
      for (const auto* region : {&copy->target, &copy->source})
        if (region->begin < end && begin < region->end) return true;
    }
  return false;
}

std::vector<std::string> pending() {
  Lock lock(mutex());
  std::vector<std::string> lines;
  for (int stream = 0; stream < kNumStreams; stream++)
    for (auto& entry : state().streams[stream].queue) {
      std::ostringstream line;
      line << "stream " << stream << ": ";
      if (const auto* copy = std::get_if<Copy>(&entry))
        line << (copy->is_to_host ? "to the host, " : "to the device, ") << format_bytes(copy->target.num_bytes());
      else
        line << "waits for stream " << std::get<Wait>(entry).stream;
      lines.push_back(line.str());
    }
  for (auto& arrival : state().arrivals)
    lines.push_back("not seen by the host: " + format_bytes(arrival.bytes.size()));
  return lines;
}

}  // namespace sim
