// An eventfd: a descriptor that one thread makes readable and another sleeps on.
#pragma once

namespace moe_p2p::engine {

class EventFd {
 public:
  // Throws Error{kResourceExhausted} when there are no descriptors left. what: "finished requests".
  explicit EventFd(const char* what);
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const noexcept { return fd_; }
  void signal() noexcept;  // makes it readable; any thread
  void clear() noexcept;

 private:
  const int fd_;
};

}  // namespace moe_p2p::engine
