#include "engine/outbox.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "base/log.h"
#include "engine/peer.h"
#include "platform/interrupt.h"

namespace moe_p2p::engine {

using base::Code;
using platform::Clock;
using platform::Deadline;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

// How late a sender that waits notices a signal, or end().
constexpr milliseconds kSlice{50};
// Between reads of an entry that has no owner yet, doubled each time.
constexpr microseconds kFirstPause{20}, kLongestPause{2000};

std::mt19937_64& random_numbers() {
  static thread_local std::mt19937_64 numbers{std::random_device{}()};
  return numbers;
}

// Of two senders with one name both would have the ring: 61 random bits.
uint64_t new_name(Purpose purpose) {
  std::random_device device;
  const uint64_t random = uint64_t{device()} << 32 | device();
  return (random >> 2 | 1) << 1 | static_cast<uint64_t>(purpose);
}

}  // namespace

Outbox::Outbox(TransferEngine& engine, const Peer* peer, Purpose purpose, std::string label)
    : engine_(engine), peer_(peer), label_(std::move(label)), name_(new_name(purpose)) {}

const InboxPlace& Outbox::place() const noexcept { return peer_->address().inbox; }

const RingEntry& Outbox::entry(uint32_t ring) const noexcept {
  return reinterpret_cast<const RingEntry*>(memory_.data())[ring];
}

void Outbox::fail(Code code, const std::string& text) {
  failure_.emplace(code, text);
  throw *failure_;
}

void Outbox::check_alive() const {
  MOE_P2P_CHECK(!ending_.load(std::memory_order_acquire), Code::kClosed, label_,
                ": the peer that messages go to was disconnected");
  if (failure_) throw *failure_;
}

void Outbox::send(std::span<const std::byte> data, Deadline deadline, const Submit& submit) {
  MOE_P2P_CHECK(place().num_rings > 0, Code::kInvalidArgument, label_,
                ": the peer takes no messages: its engine had no inbox when its address was given "
                "out; open the inbox (messages()) first, then give out the address");
  MOE_P2P_CHECK(data.size() <= place().max_bytes, Code::kInvalidArgument, label_, ": a message of ",
                data.size(), " bytes; the peer's inbox takes at most ", place().max_bytes);
  const std::lock_guard lock(mutex_);
  check_alive();
  if (target_ == nullptr) claim(deadline);
  note_ended();
  make_room(deadline);
  const auto slot = static_cast<uint32_t>(sent_ % place().num_slots);
  if (requests_[slot]) wait(*requests_[slot], deadline);  // it arrived, and its copy is free
  note_ended();
  const MessageImm imm{MessageImm::Kind::kMessage, ring_, static_cast<uint32_t>(generation_), slot};
  requests_[slot] = submit({handle_, stage(data), imm.pack()});
  ++sent_;
}

Slice Outbox::stage(std::span<const std::byte> data) {
  const uint64_t in_ring = sent_ % place().num_slots * slot_bytes(place());
  const uint64_t here = memory_.size() - ring_bytes(place()) + in_ring;
  SlotHead head{.bytes = static_cast<uint32_t>(data.size()), .label = {}};
  std::copy_n(label_.begin(), std::min(label_.size(), head.label.size() - 1), head.label.begin());
  std::memcpy(memory_.data() + here, &head, sizeof head);
  if (!data.empty()) std::memcpy(memory_.data() + here + sizeof head, data.data(), data.size());
  return {here, target_, in_ring, sizeof head + data.size()};
}

// --- the ring ---

// What was read from the directory, 64 bytes for the claim, and a copy of the ring.
void Outbox::open() {
  if (handle_ == nullptr) {
    memory_.resize(directory_bytes(place()) + 64 + ring_bytes(place()));
    handle_ = engine_.register_memory({memory_.data(), memory_.size()});
    requests_.resize(place().num_slots);
  }
  if (directory_ == nullptr) directory_ = resolve(directory_bytes(place()), place().rails);
}

const RemoteRegion* Outbox::resolve(uint64_t bytes, std::span<const RemoteKey> rails) {
  MemoryDescriptor descriptor{.owner = peer_->address(), .bytes = bytes, .rails = {}};
  descriptor.rails.assign(rails.begin(), rails.begin() + std::ssize(peer_->address().nics));
  return engine_.resolve(descriptor, peer_);
}

void Outbox::claim(Deadline deadline) {
  open();
  for (;;) {
    if (own_.active()) wait(own_, deadline);  // of an earlier call, which has given up
    begin_reading(0, place().num_rings);
    end_reading(deadline);
    const auto ring = choose();
    MOE_P2P_CHECK(ring, Code::kResourceExhausted, label_, ": the peer's inbox has room for ",
                  place().num_rings,
                  " senders, and all of it is taken; give it room for more "
                  "(max_senders), or let it forget senders that have died");
    if (entry(*ring).owner == name_ || write_claim(*ring, deadline)) return use(*ring);
  }
}

// The ring that an earlier claim got, after its caller had given up; else any free one.
std::optional<uint32_t> Outbox::choose() {
  std::vector<uint32_t> found;
  for (uint32_t ring = 0; ring < place().num_rings; ++ring) {
    if (entry(ring).owner == name_) return ring;
    if (entry(ring).owner == 0) found.push_back(ring);
  }
  if (found.empty()) return std::nullopt;
  return found[random_numbers()() % found.size()];
}

// False when another sender has the ring.
bool Outbox::write_claim(uint32_t ring, Deadline deadline) {
  const uint64_t generation = entry(ring).generation;
  const uint64_t here = directory_bytes(place());
  std::memcpy(memory_.data() + here, &name_, sizeof name_);
  own_slice_ = {here, directory_, ring * sizeof(RingEntry) + offsetof(RingEntry, claim),
                sizeof name_};
  const MessageImm imm{MessageImm::Kind::kClaim, ring, static_cast<uint32_t>(generation)};
  submit_own(Scatter{handle_, {&own_slice_, 1}, Scatter::Sharding::kByPeer, imm.pack()});
  wait(own_, deadline);
  for (microseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    begin_reading(ring, 1);
    end_reading(deadline);
    if (entry(ring).owner != 0 || entry(ring).generation != generation)
      return entry(ring).owner == name_;
    MOE_P2P_CHECK(
        Clock::now() < deadline, Code::kTimeout, label_,
        ": the peer's engine has not answered the first message; is its process stopped?");
    check_alive();
    std::this_thread::sleep_for(pause);
  }
}

void Outbox::use(uint32_t ring) {
  ring_ = ring;
  generation_ = entry(ring).generation;
  target_ = resolve(ring_bytes(place()), entry(ring).keys);
}

// --- room ---

// Reads ahead from half a ring on, so that who takes in time holds nobody up.
void Outbox::make_room(Deadline deadline) {
  const uint64_t num_slots = place().num_slots;
  if (reading_ && own_.done()) end_reading(deadline);
  if (sent_ - taken_ == num_slots && reading_) end_reading(deadline);
  if (2 * (sent_ - taken_) >= num_slots && !reading_) begin_reading(ring_, 1);
  if (sent_ - taken_ == num_slots) end_reading(deadline);
  MOE_P2P_CHECK(sent_ - taken_ < num_slots, Code::kResourceExhausted, label_,
                ": the peer's inbox is full: its receiver has not taken ", num_slots,
                " messages from here, the most that it holds; send again once it has");
}

void Outbox::begin_reading(uint32_t first, uint32_t num) {
  const uint64_t at = first * sizeof(RingEntry);
  submit_own(Read{handle_, at, directory_, at, num * sizeof(RingEntry)});
  reading_ = true;
}

void Outbox::end_reading(Deadline deadline) {
  wait(own_, deadline);
  reading_ = false;
  if (target_ != nullptr) note_taken();
}

void Outbox::note_taken() {
  const RingEntry& now = entry(ring_);
  if (now.owner != name_)
    fail(
        Code::kClosed,
        label_ + ": the receiver has forgotten this sender; disconnect the peer and connect again");
  taken_ = std::max(taken_, now.taken);
}

// Keeps the first failure of a message.
void Outbox::note_ended() {
  for (; ended_ < sent_; ++ended_) {
    const Request& request = *requests_[ended_ % place().num_slots];
    if (!request.done()) return;
    const base::Status status = request.status();
    if (!status.ok())
      fail(status.code,
           base::concat(label_, ": message ", ended_, " to the peer failed (",
                        base::describe(status),
                        "), and none follows it; disconnect the peer and connect again",
                        engine_.first_failure()));
  }
}

// --- waits ---

void Outbox::submit_own(Operation operation) {
  own_.operation = std::move(operation);
  own_.priority = static_cast<uint8_t>(peer_->priority());
  engine_.submit(own_);
}

void Outbox::wait(Request& request, Deadline deadline) {
  while (!request.wait(std::min(deadline, Clock::now() + kSlice))) {
    check_alive();
    MOE_P2P_CHECK(Clock::now() < deadline, Code::kTimeout, label_,
                  ": the NIC of a peer that messages go to has not answered in time");
    MOE_P2P_CHECK(!platform::interrupted(), Code::kAborted, label_,
                  ": a signal interrupted the sending of a message, which was not sent");
  }
  const base::Status status = request.status();
  if (&request == &own_ && !status.ok()) {
    reading_ = false;
    fail(status.code,
         base::concat(label_, ": the inbox of a peer cannot be reached (", base::describe(status),
                      "); disconnect it and connect again", engine_.first_failure()));
  }
}

bool Outbox::all_arrived(Deadline deadline) {
  if (own_.active() && !own_.wait(deadline)) return false;
  for (; ended_ < sent_; ++ended_) {
    Request& request = *requests_[ended_ % place().num_slots];
    if (!request.wait(deadline) || !request.status().ok()) return false;
  }
  return true;
}

void Outbox::end(Deadline deadline) noexcept {
  ending_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  try {
    if (target_ != nullptr && !failure_ && all_arrived(deadline) &&
        engine_.may_write_to_departed()) {
      const MessageImm bye{MessageImm::Kind::kBye, ring_, static_cast<uint32_t>(generation_),
                           static_cast<uint32_t>(sent_)};
      submit_own(Imm{peer_, bye.pack()});
      own_.wait(deadline);
    }
    // A NIC that may still write to it keeps it, and it lives as long as the engine.
    target_ = nullptr;
    if (handle_ != nullptr) engine_.unregister_memory(std::exchange(handle_, nullptr));
  } catch (const base::Error& error) {
    MOE_P2P_LOG(base::LogLevel::kWarning, label_, ": the end of an outbox: ", error.what());
  }
}

}  // namespace moe_p2p::engine
