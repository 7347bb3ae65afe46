#include "engine/gate.h"

namespace moe_p2p::engine {

// Behind Requests of the same value. Requests come in the order of values, except those that a
// caller has delayed.
void Gates::hold(Request& request) noexcept {
  Gate& gate = *request.gate;
  if (gate.first_ == nullptr) {
    gate.next_ = first_;
    first_ = &gate;
  }
  Request* before = gate.last_;
  while (before != nullptr && before->gate_value > request.gate_value)
    before = before->rails_[0].previous;
  Request* after = before != nullptr ? before->rails_[0].next : gate.first_;
  request.held_ = true;
  request.rails_[0].previous = before;
  request.rails_[0].next = after;
  (before != nullptr ? before->rails_[0].next : gate.first_) = &request;
  (after != nullptr ? after->rails_[0].previous : gate.last_) = &request;
}

void Gates::unlink(Gate& gate, Request& request) noexcept {
  const Request::Rail links = request.rails_[0];
  (links.previous != nullptr ? links.previous->rails_[0].next : gate.first_) = links.next;
  (links.next != nullptr ? links.next->rails_[0].previous : gate.last_) = links.previous;
  request.rails_[0] = {};
  request.held_ = false;
}

void Gates::remove(Request& request) noexcept {
  Gate& gate = *request.gate;
  unlink(gate, request);
  if (gate.first_ != nullptr) return;
  Gate** link = &first_;
  while (*link != &gate) link = &(*link)->next_;
  *link = gate.next_;
}

Request* Gates::take_open() noexcept {
  for (Gate* gate = first_; gate != nullptr; gate = gate->next_) {
    Request* request = gate->first_;
    if (!gate->reached(request->gate_value)) continue;
    remove(*request);
    return request;
  }
  return nullptr;
}

bool Gates::must_poll() const noexcept {
  for (const Gate* gate = first_; gate != nullptr; gate = gate->next_)
    if (!gate->notified_) return true;
  return false;
}

}  // namespace moe_p2p::engine
