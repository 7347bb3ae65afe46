// Launches on streams that change, over a driver that knows what is behind what and refuses what
// CUDA refuses: handles that are gone, and events of a capture outside of it or the other way
// round.
#include "platform/stream_order.h"

#include <doctest/doctest.h>

#include <map>
#include <set>

#include "base/log.h"
#include "fake_driver.h"

namespace moe_p2p::test {
namespace {

using platform::Stream;

constexpr int kInvalidHandle = 400, kCaptureIsolation = 905;

struct Events {
  struct Line {            // a stream, or what an event has recorded of it
    std::set<int> behind;  // numbers of launches
    uint64_t capture = 0;
  };
  std::map<void*, Line> streams;  // those that live
  std::map<void*, Line> events;
  int num_recorded = 0, num_waits = 0, num_launches = 0;
} model;

int event_create(void** event, unsigned) {
  static uint64_t last = 0;
  return *event = reinterpret_cast<void*>(++last), 0;
}
int event_record(void* event, void* stream) {
  if (!model.streams.contains(stream)) return kInvalidHandle;
  ++model.num_recorded;
  model.events[event] = model.streams[stream];
  return 0;
}
int stream_wait_event(void* stream, void* event, unsigned) {
  if (!model.streams.contains(stream) || !model.events.contains(event)) return kInvalidHandle;
  // A stream that waits for an event of a capture would become part of it.
  if (model.streams[stream].capture != model.events[event].capture) return kCaptureIsolation;
  ++model.num_waits;
  model.streams[stream].behind.merge(std::set(model.events[event].behind));
  return 0;
}
int capture_info(void* stream, int* status, uint64_t* id, void**, void**, size_t*) {
  if (!model.streams.contains(stream)) return kInvalidHandle;
  *id = model.streams[stream].capture;
  *status = *id != 0 ? platform::kIsCapturing : 0;
  return 0;
}

void* const kGreen = reinterpret_cast<void*>(96);  // the stream of a green context
int stream_green(void* stream, void** green) {
  if (!model.streams.contains(stream)) return kInvalidHandle;
  *green = stream == kGreen ? &model : nullptr;
  return 0;
}

class Driver {
 public:
  Driver() {
    table_ = *before_;
    table_.event_create = event_create;
    table_.event_record = event_record;
    table_.event_destroy = [](void*) { return 0; };
    table_.stream_wait_event = stream_wait_event;
    table_.capture_info = capture_info;
    table_.stream_green = stream_green;
    platform::set_driver_for_tests(&table_);
    model = {};
  }
  ~Driver() { platform::set_driver_for_tests(before_); }

 private:
  static const platform::DriverTable* installed() {
    FakeDriver::install();
    return &platform::driver();
  }

  const platform::DriverTable* const before_ = installed();
  platform::DriverTable table_;
};

// Of one communicator.
class Launches {
 public:
  explicit Launches(bool takes_all = true, int device = 0)
      : Launches(++num_worlds, takes_all, device) {}
  Launches(uint64_t world, bool takes_all, int device)
      : order_(device, world, context_, takes_all) {}

  static Stream make(uint64_t handle, bool lasting = true) {
    const Stream stream{reinterpret_cast<void*>(handle), lasting};
    model.streams[stream.handle] = {};
    return stream;
  }
  static void destroy(const Stream& stream) { model.streams.erase(stream.handle); }
  static void begin_capture(const Stream& stream, uint64_t id) {
    model.streams[stream.handle] = {{}, id};
  }
  static void end_capture(const Stream& stream) { model.streams[stream.handle].capture = 0; }

  void follow(const Stream& stream) { order_.follow(stream, 0); }
  // Whether it comes behind launch number `after`; 0: behind nothing.
  bool launch(const Stream& stream, int after) {
    const uint64_t capture = platform::capture_of(stream);
    auto& line = model.streams[stream.handle];
    const bool was_behind = after == 0 || line.behind.contains(after);
    const auto turn = order_.follow(stream, capture);
    if (turn.in_stream) CHECK(was_behind);
    const bool is_behind = after == 0 ? line.behind.empty() : line.behind.contains(after);
    line.behind.insert(++model.num_launches);
    order_.launched(turn, stream, capture);
    return is_behind;
  }

 private:
  static inline uint64_t num_worlds = 1000;
  const platform::PrimaryContext context_{0};
  platform::StreamOrder order_;
};

TEST_CASE("stream order: nothing is recorded while the stream is the same") {
  const Driver driver;
  Launches l;
  const Stream a = Launches::make(0);
  for (int i = 0; i < 5; ++i) CHECK(l.launch(a, i));
  CHECK(model.num_recorded == 0);
  CHECK(model.num_waits == 0);
}

TEST_CASE("stream order: a launch is behind the one before it on another stream") {
  const Driver driver;
  Launches l;
  const Stream a = Launches::make(0), b = Launches::make(16), c = Launches::make(32);
  int number = 0;
  for (const Stream& stream : {a, b, b, a, c, b}) {
    CHECK(l.launch(stream, number));
    ++number;
  }
  CHECK(model.num_waits == 4);
}

TEST_CASE("stream order: a stream that was destroyed is not touched, nor taken for its successor") {
  const Driver driver;
  Launches l;
  const Stream a = Launches::make(16), given = Launches::make(32, false);
  CHECK(l.launch(a, 0));
  CHECK(l.launch(given, 1));
  Launches::destroy(given);
  CHECK(l.launch(a, 2));
  const Stream again = Launches::make(32, false);
  CHECK(l.launch(again, 3));
  Launches::destroy(again);
  const Stream third = Launches::make(32, false);  // by the same name at once
  CHECK(l.launch(third, 4));
}

TEST_CASE("stream order: a green context is refused to kernels that may need the whole GPU") {
  const Driver driver;
  {
    Launches l;
    const Stream a = Launches::make(16), green = Launches::make(96);
    CHECK(l.launch(a, 0));
    CHECK_THROWS_WITH_AS(l.follow(green), doctest::Contains("green context"), base::Error);
    CHECK(l.launch(a, 1));
  }
  Launches limited(false);
  const Stream green = Launches::make(96);
  CHECK(limited.launch(green, 0));
  CHECK(limited.launch(green, 3));
}

TEST_CASE("stream order: within a capture by events of the capture, outside by others") {
  const Driver driver;
  Launches l;
  const Stream a = Launches::make(16), b = Launches::make(32), c = Launches::make(48);
  CHECK(l.launch(a, 0));  // 1
  Launches::begin_capture(b, 7);
  CHECK(l.launch(b, 0));  // 2
  Launches::begin_capture(c, 7);
  CHECK(l.launch(c, 2));  // 3
  Launches::destroy(c);
  CHECK(l.launch(b, 3));  // 4
  CHECK(l.launch(a, 1));  // 5: not part of the capture
  Launches::end_capture(b);
  CHECK(l.launch(b, 5));  // 6
  Launches::begin_capture(a, 8);
  CHECK(l.launch(a, 0));  // 7: another graph
  Launches::end_capture(a);
  CHECK(l.launch(a, 6));  // 8
}

TEST_CASE("stream order: communicators that may take the whole GPU are behind each other") {
  const Driver driver;
  Launches first, second, elsewhere(true, 1);
  const Stream a = Launches::make(16), b = Launches::make(32), c = Launches::make(48);
  CHECK(first.launch(a, 0));      // 1
  CHECK(second.launch(b, 1));     // 2
  CHECK(elsewhere.launch(c, 0));  // 3: on another GPU
  CHECK(first.launch(a, 2));      // 4
  CHECK(second.launch(a, 4));     // 5
  CHECK(first.launch(a, 5));      // 6
  CHECK(model.num_waits == 3);    // the last one is in the stream of the two before it
  Launches limited(false);
  CHECK(limited.launch(b, 6));  // 7
  CHECK(second.launch(a, 7));   // 8
}

TEST_CASE("stream order: communicators with parts of the GPU are not behind each other") {
  const Driver driver;
  Launches first(false), second(false);
  const Stream a = Launches::make(16), b = Launches::make(32);
  CHECK(first.launch(a, 0));
  CHECK(second.launch(b, 0));
  CHECK(model.num_recorded == 0);
  {
    Launches whole;
  }  // it is gone by the next launch
  CHECK(first.launch(a, 1));
  CHECK(model.num_recorded == 0);
}

TEST_CASE("stream order: ranks that are threads are not behind each other") {
  const Driver driver;
  Launches first(7, true, 0), second(7, true, 0), other(8, true, 0);
  const Stream a = Launches::make(16), b = Launches::make(32), c = Launches::make(48);
  CHECK(first.launch(a, 0));
  CHECK(second.launch(b, 0));
  CHECK(other.launch(c, 0));
  CHECK(second.launch(c, 2));  // its own launches are in order
}

TEST_CASE("stream order: communicators in one capture are ordered by its events") {
  const Driver driver;
  Launches first, second;
  const Stream a = Launches::make(16), b = Launches::make(32);
  CHECK(first.launch(a, 0));  // 1: runs
  Launches::begin_capture(a, 7);
  Launches::begin_capture(b, 7);
  CHECK(second.launch(b, 0));  // 2
  CHECK(first.launch(a, 2));   // 3
}

TEST_CASE("stream order: a stream that has begun a capture since is left alone") {
  const Driver driver;
  Launches l;
  const Stream a = Launches::make(16), b = Launches::make(32);
  CHECK(l.launch(a, 0));
  Launches::begin_capture(a, 7);
  CHECK(!l.launch(b, 1));
  CHECK(model.num_recorded == 0);
}

}  // namespace
}  // namespace moe_p2p::test
