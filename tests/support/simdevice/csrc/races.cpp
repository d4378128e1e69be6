// Races: accesses to the same memory that the program has not put in order. Found by vector clocks, whatever the order
// in which they happen here; what the host writes to pinned memory is found by comparing bytes.
#include "sim.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <sstream>

namespace sim {
namespace {

struct Lent {
  Region source;
  std::vector<char> bytes;
  Moment moment;
};

std::deque<Lent>& lent() {
  static auto* made = new std::deque<Lent>();
  return *made;
}

void note(const std::string& text) {
  races().push_back(text);
  TORCH_CHECK(settings().races < 2, text);
}

std::string describe(const Region& region, int stream, bool is_write, const char* what, const Access& other) {
  std::ostringstream text;
  text << "simulated device: " << what << " on stream " << stream << (is_write ? " writes " : " reads ")
       << format_bytes(region.end - region.begin) << " that " << other.what << " on stream " << other.moment.stream
       << (other.is_write ? " wrote" : " read") << ", and does not wait for it";
  return text.str();
}

// Whoever conflicts with `old` from now on conflicts with what comes now as well, or is behind it anyway.
bool is_needless(const Access& old, const Region& region, int stream, bool is_write) {
  if (clock_of_host().is_after(old.moment)) return true;  // all that is to come is behind it
  const bool is_covered = region.begin <= old.begin && old.end <= region.end;
  const bool is_replaced = is_write || (!old.is_write && old.moment.stream == stream);
  return is_covered && is_replaced && clock_of(stream).is_after(old.moment);
}

template <class Predicate>
void forget(Predicate is_forgotten) {
  auto& all = lent();
  all.erase(std::remove_if(all.begin(), all.end(), is_forgotten), all.end());
}

}  // namespace

std::vector<std::string>& races() {
  static auto* made = new std::vector<std::string>();
  return *made;
}

void touch(const Region& region, int stream, bool is_write, const char* what) {
  if (!settings().races || region.is_empty()) return;
  Lock lock(mutex());
  Block* block = find_device_block(region.begin);
  if (!block) block = find_pinned_block(region.begin);
  if (!block) return;
  const Clock& clock = clock_of(stream);
  std::string found;
  std::vector<Access> kept;
  for (auto& old : block->accesses) {
    const bool is_conflict = (is_write || old.is_write) && old.begin < region.end && region.begin < old.end;
    if (is_conflict && !clock.is_after(old.moment) && found.empty())
      found = describe(region, stream, is_write, what, old);
    if (!is_needless(old, region, stream, is_write)) kept.push_back(std::move(old));
  }
  kept.push_back({region.begin, region.end, clock.last_of(stream), is_write, what});
  block->accesses.swap(kept);
  if (!found.empty()) note(found);
}

void lend(const Region& source, const Moment& moment) {
  if (settings().races && source.is_dense())
    lent().push_back({source, std::vector<char>(source.begin, source.end), moment});
}

void take_back(const Clock& clock) {
  std::deque<Lent> rest, back;
  for (auto& one : lent()) (clock.is_after(one.moment) ? back : rest).push_back(std::move(one));
  lent().swap(rest);
  for (auto& one : back)
    if (std::memcmp(one.source.begin, one.bytes.data(), one.bytes.size()) != 0)
      note("simulated device: the host has written to " + format_bytes(one.bytes.size()) +
           " of pinned memory that a copy to the device on stream " + std::to_string(one.moment.stream) +
           " reads, and did not wait for it");
}

void forget_lent(const Region& target) {
  forget([&](const Lent& one) { return one.source.overlaps(target); });
}

void forget_lent_before(const Region& target, const Clock& clock) {
  forget([&](const Lent& one) { return one.source.overlaps(target) && clock.is_after(one.moment); });
}

}  // namespace sim
