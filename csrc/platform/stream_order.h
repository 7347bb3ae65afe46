// Launches that must run one after the other, on any streams. A launch waits for an event of the
// previous one when that was on another stream; on one stream they are in order anyway, and no
// event is recorded.
//
// The event is recorded on the previous launch's stream at the next launch, when that stream is
// known to live: torch destroys none of its own. On any other stream it is recorded right after
// each launch, because by the next one the handle may be gone or name a new stream.
//
// Launches of one capture are ordered within it. Between a capture and other launches there is no
// order: a graph runs when, and where, its owner replays it.
//
// A kernel whose blocks wait for other ranks needs all of them resident, so two kernels that may
// take the whole GPU must not run at once. Orders of one device of this process know each other: a
// launch also follows the last one of every other order, unless neither takes all multiprocessors.
// Not where ranks of one communicator are threads of this process: they wait for each other.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "platform/cuda_context.h"

namespace moe_p2p::platform {

struct Stream {
  void* handle = nullptr;
  bool lasting = true;  // never destroyed
};

// The capture that a stream belongs to; 0: none, launches on it run.
uint64_t capture_of(const Stream& stream);

struct OrdersOfDevice;  // of this process

class StreamOrder {
 public:
  // Lives until its launch is made: none of the launches that it keeps away comes between.
  struct Turn {
    bool in_stream = true;  // the launches before it precede it in the stream itself
    std::unique_lock<std::mutex> lock;
  };

  // world: number of the communicator, the same for its other ranks. takes_all: launches may take
  // all multiprocessors of the GPU, so a stream of a green context is refused.
  StreamOrder(int device, uint64_t world, const PrimaryContext& context, bool takes_all);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Call follow() before each launch and launched() after it, with the context current; `capture`
  // is capture_of(stream). Both throw Error{kTransport} with the driver's text when it refuses,
  // follow() also Error{kInvalidArgument} for a stream that has too few multiprocessors.
  Turn follow(const Stream& stream, uint64_t capture);
  void launched(const Turn& turn, const Stream& stream, uint64_t capture);

 private:
  int num_other_ranks() const;  // of the same world
  // Puts the stream behind the last launch. Returns whether it was already.
  bool precede(const Stream& stream, uint64_t capture);
  static void record(void* event, const Stream& stream);
  static void wait(const Stream& stream, void* event);

  OrdersOfDevice& all_;
  const uint64_t world_;
  const PrimaryContext& context_;
  const bool takes_all_;
  // One for launches that run, one for the last capture: a stream that is not captured must not
  // wait for an event of a capture.
  void *event_ = nullptr, *captured_event_ = nullptr;
  std::optional<Stream> last_, last_captured_;
  uint64_t capture_ = 0;  // of last_captured_
};

}  // namespace moe_p2p::platform
