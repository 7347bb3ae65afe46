// The file descriptors that a NIC's control thread waits for, each with its source.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/log.h"
#include "provider/verbs/socket.h"

namespace moe_p2p::provider::verbs {

enum class Source : uint32_t { kKick, kListener, kDevice, kCompletions, kSession, kPeer };

class Events {
 public:
  struct Event {
    Source source;
    uint32_t id;  // of the session or peer
  };
  // `name` is the NIC's.
  explicit Events(const std::string& name) : name_(name), epoll_(epoll_create1(EPOLL_CLOEXEC)) {}

  // Watches `fd` until it is closed or removed.
  void add(int fd, Source source, uint32_t id = 0) const {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = uint64_t{id} << 32 | static_cast<uint32_t>(source);
    MOE_P2P_CHECK(epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0,
                  base::Code::kResourceExhausted, name_, ": watching a file descriptor failed");
  }
  void remove(int fd) const noexcept { epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr); }

  template <typename Handle>
  void wait(int milliseconds, Handle&& handle) const {
    epoll_event events[16];
    const int num = epoll_wait(epoll_.fd(), events, 16, milliseconds);
    for (int i = 0; i < num; ++i)
      handle(Event{static_cast<Source>(static_cast<uint32_t>(events[i].data.u64)),
                   static_cast<uint32_t>(events[i].data.u64 >> 32)});
  }

 private:
  const std::string name_;
  const Socket epoll_;  // closes its descriptor
};

}  // namespace moe_p2p::provider::verbs
