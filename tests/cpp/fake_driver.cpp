#include "fake_driver.h"

#include <fcntl.h>

#include <cstring>
#include <vector>

namespace moe_p2p::test {
namespace {

using Stream = FakeDriver::Stream;
using Event = FakeDriver::Event;

// CUresult
constexpr int kInvalidValue = 1;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kCaptureUnsupported = 900;

constexpr int kRelaxed = 2;
constexpr int kNumDevices = 2;

thread_local std::vector<void*> contexts;  // the last is current
thread_local int capture_mode = 0;

FakeDriver& fake() {
  static FakeDriver driver;
  return driver;
}

int error_string(int, const char** text) {
  *text = "fake error";
  return 0;
}
int init(unsigned) { return 0; }
int device_get(int* device, int ordinal) {
  *device = ordinal + 70;  // not the ordinal: they must not be mixed up
  return ordinal >= 0 && ordinal < kNumDevices ? 0 : kInvalidDevice;
}
int device_attribute(int* value, int attribute, int) {
  constexpr int kWritesOrdering = 118;
  *value = fake().locked([&](FakeDriver& f) {
    return attribute == kWritesOrdering ? f.writes_ordering : f.flush_options;
  });
  return 0;
}
int flush_writes(int, int) {
  if (contexts.empty()) return kInvalidContext;
  return fake().locked([](FakeDriver& f) { return ++f.flushes, f.flush_error; });
}
// A descriptor that says nothing: what passes for GPU memory has an address already.
int export_dmabuf(int* fd, uint64_t address, size_t bytes, int, unsigned long long) {
  if (address % 4096 != 0 || bytes % 4096 != 0) return kInvalidValue;
  const int error = fake().locked([](FakeDriver& f) { return f.dmabuf_error; });
  if (error == 0) *fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  return error;
}
int context_retain(void** context, int device) {
  static char primary[kNumDevices];
  *context = &primary[device - 70];
  return fake().locked([](FakeDriver& f) { return ++f.contexts, 0; });
}
int context_release(int) {
  return fake().locked([](FakeDriver& f) { return --f.contexts, 0; });
}
int context_set(void* context) {
  contexts.assign(1, context);
  return 0;
}
int context_push(void* context) {
  contexts.push_back(context);
  return 0;
}
int context_pop(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
int exchange_capture_mode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
int priority_range(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return contexts.empty() ? kInvalidContext : 0;
}

int stream_create(void** stream, unsigned flags, int priority) {
  if (contexts.empty()) return kInvalidContext;
  if (flags != 1 || priority != -5) return kInvalidValue;
  *stream = new Stream;
  return 0;
}
int stream_destroy(void* stream) {
  return fake().locked([&](FakeDriver& f) {
    auto* const it = static_cast<Stream*>(stream);
    for (const auto& operation : it->operations)
      if (!operation.event) {
        ++f.broken_off;
        break;
      }
    delete it;
    return 0;
  });
}
int event_create(void** event, unsigned flags) {
  if (contexts.empty()) return kInvalidContext;
  if (flags != 2) return kInvalidValue;
  *event = new Event;
  return 0;
}
int event_destroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int event_record(void* event, void* stream) {
  return fake().locked([&](FakeDriver&) {
    auto* const it = static_cast<Event*>(event);
    if (contexts.empty()) return kInvalidContext;
    it->stream = static_cast<Stream*>(stream);
    ++it->num_pending;
    it->stream->operations.push_back({{}, it});
    return 0;
  });
}
int event_query(void* event) {
  if (capture_mode != kRelaxed) return kCaptureUnsupported;
  return fake().locked([&](FakeDriver& f) {
    if (f.query_error != 0) return f.query_error;
    auto* const it = static_cast<Event*>(event);
    if (it->num_pending > 0) f.advance(*it->stream);
    return it->num_pending > 0 ? platform::kDriverNotReady : 0;
  });
}
int copy_async(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return fake().locked([&](FakeDriver& f) {
    if (contexts.empty()) return kInvalidContext;
    if (f.copy_error != 0) return f.copy_error;
    ++f.copies;
    static_cast<Stream*>(stream)->operations.push_back({{to, from, bytes}, nullptr});
    return 0;
  });
}

constexpr platform::DriverTable kTable = {
    .error_string = error_string,
    .init = init,
    .device_get = device_get,
    .device_attribute = device_attribute,
    .context_retain = context_retain,
    .context_release = context_release,
    .context_set = context_set,
    .context_push = context_push,
    .context_pop = context_pop,
    .capture_mode = exchange_capture_mode,
    .priority_range = priority_range,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .event_create = event_create,
    .event_record = event_record,
    .event_query = event_query,
    .event_destroy = event_destroy,
    .copy_async = copy_async,
    .launch = nullptr,
    .flush_writes = flush_writes,
    .export_dmabuf = export_dmabuf,
};

}  // namespace

// One query's worth of progress.
void FakeDriver::advance(Stream& stream) {
  while (!stream.operations.empty()) {
    const Operation operation = stream.operations.front();
    if (!operation.event) {
      if (held) return;
      if (stream.queries_left < 0)
        stream.queries_left = static_cast<int64_t>(stream.random() % (max_queries + 1));
      if (stream.queries_left-- > 0) return;
      std::memcpy(reinterpret_cast<void*>(operation.copy.to),
                  reinterpret_cast<const void*>(operation.copy.from), operation.copy.bytes);
    } else {
      --operation.event->num_pending;
    }
    stream.operations.pop_front();
  }
}

FakeDriver& FakeDriver::install() {
  static const bool installed = (platform::set_driver_for_tests(&kTable), true);
  static_cast<void>(installed);
  return fake();
}

void FakeDriver::set_max_queries(uint32_t num) {
  locked([&](FakeDriver& f) { f.max_queries = num; });
}
void FakeDriver::hold(bool on) {
  locked([&](FakeDriver& f) { f.held = on; });
}
void FakeDriver::fail_copies(int error) {
  locked([&](FakeDriver& f) { f.copy_error = error; });
}
void FakeDriver::fail_queries(int error) {
  locked([&](FakeDriver& f) { f.query_error = error; });
}
uint64_t FakeDriver::num_copies() {
  return locked([](FakeDriver& f) { return f.copies; });
}
int FakeDriver::num_contexts() {
  return locked([](FakeDriver& f) { return f.contexts; });
}
int FakeDriver::num_broken_off() {
  return locked([](FakeDriver& f) { return f.broken_off; });
}

}  // namespace moe_p2p::test
