// How other threads reach the polling thread, and it them (finished_queue.h): an intrusive
// lock-free stack of Requests and closures. push() is one compare-and-swap; take_all() empties it
// in one exchange, in order of arrival. Nothing is allocated: each node belongs to its pusher until
// it is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace moe_p2p::engine {

using Closure = std::function<void()>;

// What a Request and a PollerCall have in common. `next` belongs to the mailbox while the node is
// in it and to the polling thread afterwards.
struct MailboxNode {
  enum class Kind : uint8_t { kRequest, kCall };

  explicit MailboxNode(Kind node_kind) noexcept : kind(node_kind) {}

  const Kind kind;
  MailboxNode* next = nullptr;
};

// Many pushers, one taker. Nodes are only ever taken all together, so a node that is pushed again
// during another push (the ABA case) does no harm.
class Mailbox {
 public:
  // Any thread. The node must not be in a mailbox. True when the mailbox was empty.
  bool push(MailboxNode& node) noexcept {
    MailboxNode* newest = newest_.load(std::memory_order_relaxed);
    // release: pairs with the acquire in take_all(), which then sees all earlier writes to the
    // node. Later pushes are read-modify-writes and keep this release visible.
    do {
      node.next = newest;
    } while (!newest_.compare_exchange_weak(newest, &node, std::memory_order_release,
                                            std::memory_order_relaxed));
    return newest == nullptr;
  }

  // Polling thread. Returns a list linked by `next`, oldest first; null when the mailbox is empty.
  MailboxNode* take_all() noexcept {
    // relaxed: an empty mailbox costs a load and no locked instruction in every turn of the poller.
    if (newest_.load(std::memory_order_relaxed) == nullptr) return nullptr;
    // acquire: pairs with the release in push().
    MailboxNode* newest = newest_.exchange(nullptr, std::memory_order_acquire);
    MailboxNode* oldest = nullptr;
    while (newest != nullptr) {
      MailboxNode* older = newest->next;
      newest->next = oldest;
      oldest = newest;
      newest = older;
    }
    return oldest;
  }

  // relaxed: only a hint; the order comes from take_all() or from the waker.
  bool empty() const noexcept { return newest_.load(std::memory_order_relaxed) == nullptr; }

 private:
  std::atomic<MailboxNode*> newest_{nullptr};
};

}  // namespace moe_p2p::engine
