#include "fake_driver.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "fake_driver_kernels.h"
#include "fake_driver_memory.h"

namespace {
std::atomic<long> host_page_bytes{0};  // 0: as the system says
}

// glibc's own, under the name that it has besides. Called before sanitizers have started.
extern "C" long __sysconf(int name) noexcept;
extern "C" __attribute__((no_sanitize("address", "thread", "undefined"))) long sysconf(
    int name) noexcept {
  const long bytes = host_page_bytes.load(std::memory_order_relaxed);
  return name == _SC_PAGESIZE && bytes != 0 ? bytes : __sysconf(name);
}

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
char primary[kNumDevices];  // contexts

FakeDriver& fake() {
  static FakeDriver& driver = *new FakeDriver;  // its threads may outlive main()
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
  constexpr int kFlushOptions = 117, kWritesOrdering = 118, kWritesWordsOf64Bits = 122;
  *value = fake().locked([&](FakeDriver& f) {
    switch (attribute) {
      case kFlushOptions: return f.flush_options;
      case kWritesOrdering: return f.writes_ordering;
      case kWritesWordsOf64Bits: return static_cast<int>(f.writes_words);
      default: return 0;
    }
  });
  return 0;
}
int flush_writes(int, int scope) {
  FakeDriver::install().locked([&](FakeDriver& f) { f.flush_scope = scope; });
  if (contexts.empty()) return kInvalidContext;
  return fake().flush(static_cast<int>(static_cast<char*>(contexts.back()) - primary));
}
// A descriptor that says nothing: what passes for GPU memory has an address already.
int export_dmabuf(int* fd, uint64_t address, size_t bytes, int, unsigned long long) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (address % page != 0 || bytes % page != 0) return kInvalidValue;
  const int error = fake().locked([&](FakeDriver& f) {
    f.exported = {reinterpret_cast<std::byte*>(address), bytes};
    return f.dmabuf_error;
  });
  if (error == 0) *fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  return error;
}
int context_retain(void** context, int device) {
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
  return fake().locked(
      [&](FakeDriver& f) { return f.streams.insert(static_cast<Stream*>(*stream)), 0; });
}
int stream_destroy(void* stream) {
  return fake().locked([&](FakeDriver& f) {
    auto* const it = static_cast<Stream*>(stream);
    for (const auto& operation : it->operations)
      if (!operation.event && !operation.word && !(operation.ended && *operation.ended)) {
        ++f.broken_off;
        break;
      }
    f.streams.erase(it);
    delete it;
    f.changed.notify_all();
    return 0;
  });
}
// No stream is captured. One that waits goes on at once: tests of order have a driver of their own.
int stream_wait_event(void*, void*, unsigned) { return contexts.empty() ? kInvalidContext : 0; }
int capture_info(void*, int* status, uint64_t*, void**, void**, size_t*) {
  *status = 0;
  return 0;
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

int host_alloc(void** memory, size_t bytes, unsigned) {
  if (const int error = refusal(); error != 0) return error;
  return *memory = std::calloc(1, bytes), 0;
}
int host_free(void* memory) { return std::free(memory), 0; }

int host_pointer(uint64_t* address, void* memory, unsigned) {
  *address = reinterpret_cast<uint64_t>(memory);
  return contexts.empty() ? kInvalidContext : 0;
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
    .stream_wait_event = stream_wait_event,
    .capture_info = capture_info,
    .event_create = event_create,
    .event_record = event_record,
    .event_query = event_query,
    .event_destroy = event_destroy,
    .copy_async = copy_async,
    .copy_any_async = copy_async,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .launch = launch,
    .flush_writes = flush_writes,
    .export_dmabuf = export_dmabuf,
    .address_range = address_range,
    .ipc_get = ipc_get,
    .ipc_open = ipc_open,
    .ipc_close = ipc_close,
    .enable_peer = enable_peer,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .host_pointer = host_pointer,
    .stream_write = stream_write,
};

}  // namespace

int refusal() {
  if (contexts.empty()) return kInvalidContext;
  return capture_mode != kRelaxed ? kCaptureUnsupported : 0;
}
bool has_context() { return !contexts.empty(); }
void* current_context() { return contexts.empty() ? nullptr : contexts.back(); }

bool FakeDriver::stands_still(const Stream& stream) const {
  if (stream.operations.empty()) return false;
  const Operation& next = stream.operations.front();
  if (next.ended) return !*next.ended;
  return held && !next.event && !next.word;
}
// One query's worth of progress.
void FakeDriver::advance(Stream& stream) {
  while (!stream.operations.empty()) {
    const Operation operation = stream.operations.front();
    if (operation.ended) {
      if (!*operation.ended) return;
    } else if (operation.word) {
      std::atomic_ref(*operation.word).store(operation.value, std::memory_order_release);
    } else if (!operation.event) {
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

void FakeDriver::place(std::span<std::byte> memory, int device, int readers) {
  locked([&](FakeDriver& f) { f.placed_.push_back({memory, device, readers}); });
}
void FakeDriver::take_back(std::span<std::byte> memory) {
  locked([&](FakeDriver& f) {
    std::erase_if(f.placed_, [&](const Placed& p) { return p.memory.data() == memory.data(); });
    std::erase_if(f.unseen_, [&](const Unseen& write) {
      return write.to >= memory.data() && write.to < memory.data() + memory.size();
    });
  });
}
void FakeDriver::write_by_nic(void* to, const void* from, size_t bytes) {
  fake().locked([&](FakeDriver& f) {
    auto* const target = static_cast<std::byte*>(to);
    const auto* const source = static_cast<const std::byte*>(from);
    for (const Placed& p : f.placed_) {
      if (target < p.memory.data() || target >= p.memory.data() + p.memory.size()) continue;
      if (f.writes_ordering >= p.readers) break;
      f.unseen_.push_back({p.device, target, {source, source + bytes}});
      return;
    }
    std::memcpy(to, from, bytes);
  });
}
int FakeDriver::flush(int device) {
  return locked([&](FakeDriver& f) {
    ++f.flushes;
    if (f.flush_error != 0) return f.flush_error;
    std::erase_if(f.unseen_, [&](const Unseen& write) {
      if (write.device == device) std::ranges::copy(write.bytes, write.to);
      return write.device == device;
    });
    return 0;
  });
}
void FakeDriver::set_max_queries(uint32_t num) {
  locked([&](FakeDriver& f) { f.max_queries = num; });
}
void FakeDriver::set_host_page(long bytes) { host_page_bytes = bytes; }
void FakeDriver::hold(bool on) {
  change([&](FakeDriver& f) { f.held = on; });
}
void FakeDriver::hold_rows(bool on) {
  change([&](FakeDriver& f) { f.rows_held = on; });
}
void FakeDriver::keep_kernels_out(bool out) {
  change([&](FakeDriver& f) { f.kernels_out = out; });
}
bool FakeDriver::runs_by_itself() {
  return locked([](FakeDriver& f) {
    return std::ranges::any_of(f.streams, [](const Stream* stream) {
      return std::ranges::any_of(stream->operations, [](const Operation& each) {
        return each.word || (each.ended && !*each.ended);
      });
    });
  });
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
