#include "platform/stream_order.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <vector>

#include "base/log.h"
#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

using base::Code;

// While an order takes all multiprocessors, every launch on the device holds the lock. Otherwise no
// launch does, nor where ranks are threads: a launch that finds the queue of its stream full waits
// for kernels that another thread launches.
struct OrdersOfDevice {
  std::mutex mutex;
  std::vector<StreamOrder*> orders;
  std::atomic<int> num_taking_all = 0, num_rank_pairs = 0;
};

namespace {

void check(int error, const char* what) {
  MOE_P2P_CHECK(error == 0, Code::kTransport, what, ": ", driver_error(error));
}

OrdersOfDevice& orders_of(int device) {
  static std::mutex mutex;
  // Outlives communicators that static objects hold.
  static auto& devices = *new std::map<int, OrdersOfDevice>;
  const std::lock_guard lock(mutex);
  return devices[device];
}

// Called for a stream that differs from the previous launch's.
void refuse_part_of_gpu(const Stream& stream) {
  void* green = nullptr;
  if (!driver().stream_green || driver().stream_green(stream.handle, &green) != 0) return;
  MOE_P2P_CHECK(
      green == nullptr, Code::kInvalidArgument,
      "the stream belongs to a green context, which has fewer multiprocessors than the kernels "
      "of this communicator may need at once: set num_sms to at most what it has");
}

}  // namespace

uint64_t capture_of(const Stream& stream) {
  int status = 0;
  uint64_t id = 0;
  // The call fails for the legacy stream while a stream that synchronizes with it is captured: the
  // launch then fails as well, with an error text.
  const int error = driver().capture_info(stream.handle, &status, &id, nullptr, nullptr, nullptr);
  return error == 0 && status == kIsCapturing ? id : 0;
}

StreamOrder::StreamOrder(int device, uint64_t world, const PrimaryContext& context, bool takes_all)
    : all_(orders_of(device)), world_(world), context_(context), takes_all_(takes_all) {
  const ContextGuard current(context_);
  for (void** event : {&event_, &captured_event_})
    check(driver().event_create(event, kEventWithoutTiming), "making an event");
  const std::lock_guard lock(all_.mutex);
  all_.num_rank_pairs += num_other_ranks();
  all_.orders.push_back(this);
  all_.num_taking_all += takes_all_;
}

StreamOrder::~StreamOrder() {
  {
    const std::lock_guard lock(all_.mutex);
    std::erase(all_.orders, this);
    all_.num_rank_pairs -= num_other_ranks();
    all_.num_taking_all -= takes_all_;
  }
  const ContextGuard current(context_);
  for (void* event : {event_, captured_event_}) driver().event_destroy(event);
}

int StreamOrder::num_other_ranks() const {
  return static_cast<int>(std::ranges::count(
      all_.orders, world_, [](const StreamOrder* other) { return other->world_; }));
}

StreamOrder::Turn StreamOrder::follow(const Stream& stream, uint64_t capture) {
  Turn turn;
  if (takes_all_) {
    const auto& before = capture != 0 ? last_captured_ : last_;
    if (!before || !before->lasting || before->handle != stream.handle) refuse_part_of_gpu(stream);
  }
  if (all_.num_taking_all > 0 && all_.num_rank_pairs == 0) {
    turn.lock = std::unique_lock(all_.mutex);
    for (StreamOrder* other : all_.orders)
      if (other != this && (takes_all_ || other->takes_all_))
        turn.in_stream &= other->precede(stream, capture);
  }
  turn.in_stream &= precede(stream, capture);
  return turn;
}

bool StreamOrder::precede(const Stream& stream, uint64_t capture) {
  if (capture != 0) {
    if (capture != capture_ || last_captured_->handle == stream.handle) return true;
    wait(stream, captured_event_);
    return false;
  }
  if (!last_ || (last_->lasting && last_->handle == stream.handle)) return true;
  if (last_->lasting) {
    // Its capture began after the launch, so an event recorded on it would belong to the capture.
    // The device detects two kernels that run at once (kernels/device/steps.cuh, Launch).
    if (capture_of(*last_) != 0) return false;
    record(event_, *last_);
  }
  wait(stream, event_);
  return false;
}

void StreamOrder::launched(const Turn& turn, const Stream& stream, uint64_t capture) {
  std::unique_lock<std::mutex> lock;
  if (!turn.lock) lock = std::unique_lock(all_.mutex);
  if (capture != 0) {
    record(captured_event_, stream);  // adds nothing to the graph
    last_captured_ = stream;
    capture_ = capture;
    return;
  }
  last_ = stream;
  if (!stream.lasting) record(event_, stream);
}

void StreamOrder::record(void* event, const Stream& stream) {
  check(driver().event_record(event, stream.handle), "recording an event");
}

void StreamOrder::wait(const Stream& stream, void* event) {
  check(driver().stream_wait_event(stream.handle, event, 0), "waiting for an event");
}

}  // namespace moe_p2p::platform
