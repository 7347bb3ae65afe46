#include "engine/finished_queue.h"

namespace moe_p2p::engine {

// The system call is made for the first Request only: who takes it takes all that follow.
void FinishedQueue::push(MailboxNode& request) noexcept {
  if (ended_.push(request)) signal();
}

}  // namespace moe_p2p::engine
