// The part of FakeDriver that goes on by itself, whether or not somebody polls: kernels, which each
// stream runs one after the other, and words that streams write.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace moe_p2p::test {

// The thread of a stream's kernels. What it was given runs to its end, also once the stream is
// gone.
class Kernels {
 public:
  Kernels();
  ~Kernels();
  void run(std::function<void()> kernel);

 private:
  struct Waiting;
  std::shared_ptr<Waiting> waiting_;
};

int launch(const void* config, void* function, void** params, void**);
int stream_write(void* stream, uint64_t address, uint64_t value, unsigned flags);

}  // namespace moe_p2p::test
