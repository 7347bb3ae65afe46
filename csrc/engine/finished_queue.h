// Requests that have ended, for somebody who waits for thousands at once: one eventfd becomes
// readable when the first of them ends. Filled by the polling thread, which allocates nothing for
// it, emptied by the user. A Request is in one of these at most (Request::watch).
#pragma once

#include "engine/mailbox.h"

namespace moe_p2p::engine {

class Request;  // request.h

class FinishedQueue {
 public:
  FinishedQueue();  // throws Error{kResourceExhausted} when there are no descriptors left
  ~FinishedQueue();
  FinishedQueue(const FinishedQueue&) = delete;
  FinishedQueue& operator=(const FinishedQueue&) = delete;

  // Readable when a watched Request has ended, and sometimes when none has. Nonblocking.
  int fd() const noexcept { return fd_; }

  // One thread at a time. Calls taken(Request&) for each Request that has ended since the last
  // call; it is done, not watched any more, and may be destroyed.
  template <typename Ended = Request, typename Taken>
  void take(Taken&& taken) {
    clear();
    for (MailboxNode* node = ended_.take_all(); node != nullptr;) {
      auto& request = static_cast<Ended&>(*node);
      node = node->next;  // before `taken`, which may destroy the Request
      request.take_from_queue();
      taken(request);
    }
  }
  // Makes the descriptor readable. Any thread.
  void signal() noexcept;

 private:
  friend class Request;

  void push(MailboxNode& request) noexcept;
  void clear() noexcept;

  const int fd_;
  Mailbox ended_;
};

}  // namespace moe_p2p::engine
