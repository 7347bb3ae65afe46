// What a polling thread did, for `python -m moe_p2p trace` and `replay`: a ring of events of fixed
// size that the thread fills while it records, and its callers exchange for another ring. Off, a
// place that has an event costs one load and one branch, and a turn without events costs nothing.
// All members belong to the polling thread, or, of a communicator's spans, to the thread in a call;
// Recording is read by whoever took it out.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe_p2p::base {

// moe_p2p/engine/recording.py has the same table, and reads it.
struct Event {
  enum class Kind : uint8_t {
    // A doorbell of a communicator was taken. nic: step slot; detail: detail_of(); peer: the rank
    // it is for; a: step; b, c: the words of abi::BellWords.
    kDoorbell = 1,
    // A NIC took a work request. detail: bit 0 has an immediate, 1 is a read, 2 has a flag; peer:
    // its number at this NIC; a: the id (its Request); b: bytes; c: immediate. The time is that
    // before the post.
    kPosted = 2,
    // A NIC took fewer work requests than it was given (EAGAIN, a full queue). a: given; b: taken.
    kRefused = 3,
    // Posts completed. detail: base::Code; a: their id; b: how many; c: the provider's detail.
    kCompleted = 4,
    // An immediate arrived. detail: 1 counted, 0 dropped, as a GPU could not flush its payload;
    // peer: the source of a keyed one; a: immediate (engine/imm_counter.h).
    kImmediate = 5,
    // An immediate of a partner's farewell. peer: its rank; a: the word of the farewell.
    kFarewell = 6,
    // The word of an arrival was stored, and its waiters notified. nic: step slot; detail:
    // detail_of(), parts that are here as part; peer: source rank; a: step; b: the word; c: 1 with
    // the last part.
    kPublished = 7,
    // A part of a call on a host, in the recording of its communicator. detail: detail_of(), as
    // part 0 it sends, 1 it receives; a: step; b: when it ended. The time is that of its beginning.
    kSpan = 8,
  };
  int64_t time_ns = 0;  // steady clock
  Kind kind{};
  uint8_t nic = 0;
  uint16_t detail = 0;
  uint32_t peer = 0;
  uint64_t a = 0, b = 0, c = 0;

  static constexpr uint32_t kSends = 0, kReceives = 1;  // parts of spans
  static constexpr uint16_t detail_of(uint32_t communicator, uint32_t phase,
                                      uint32_t part) noexcept {
    return static_cast<uint16_t>(communicator | phase << 9 | part << 11);
  }
};
static_assert(sizeof(Event) == 40, "five words of int64 for Python");

class Recording {
 public:
  // Touches the memory, so that add() meets no page that is not there.
  explicit Recording(size_t num_events) : ring_(num_events) {}

  void add(const Event& event) noexcept {
    ring_[num_added_ % ring_.size()] = event;
    ++num_added_;
  }
  size_t size() const noexcept { return num_added_ < ring_.size() ? num_added_ : ring_.size(); }
  // Of the events that are there, the oldest first.
  const Event& operator[](size_t i) const noexcept {
    return ring_[(overwritten() + i) % ring_.size()];
  }
  uint64_t overwritten() const noexcept { return num_added_ - size(); }

 private:
  std::vector<Event> ring_;  // not empty
  uint64_t num_added_ = 0;
};

#if defined(MOE_P2P_TESTING)
inline thread_local uint64_t num_looks = 0;  // what recorders cost that are off
#endif

class Recorder {
 public:
  bool on() const noexcept {
#if defined(MOE_P2P_TESTING)
    ++num_looks;
#endif
    return recording_ != nullptr;
  }
  // While on; now, unless the event has a time.
  void add(Event event) noexcept {
    if (event.time_ns == 0) event.time_ns = now();
    recording_->add(event);
  }
  static int64_t now() noexcept { return ns_of(std::chrono::steady_clock::now()); }
  static int64_t ns_of(std::chrono::steady_clock::time_point time) noexcept {
    return std::chrono::nanoseconds(time.time_since_epoch()).count();
  }
  // Null switches off. Returns what was recorded since the last exchange, or null.
  std::unique_ptr<Recording> exchange(std::unique_ptr<Recording> next) noexcept {
    recording_.swap(next);
    return next;
  }

 private:
  std::unique_ptr<Recording> recording_;
};

// Of the block that it stands in.
class Span {
 public:
  Span(Recorder& recorder, uint64_t step, uint32_t phase, uint32_t part) noexcept
      : recorder_(recorder.on() ? &recorder : nullptr) {
    if (recorder_)
      event_ = {.time_ns = Recorder::now(),
                .kind = Event::Kind::kSpan,
                .detail = Event::detail_of(0, phase, part),
                .a = step};
  }
  ~Span() {
    if (!recorder_) return;
    event_.b = static_cast<uint64_t>(Recorder::now());
    recorder_->add(event_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Recorder* const recorder_;
  Event event_;
};

}  // namespace moe_p2p::base
