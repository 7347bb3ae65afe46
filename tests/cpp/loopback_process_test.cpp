// The software NIC between processes: peers that are killed, and what they leave in /dev/shm.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "fake_driver.h"
#include "platform/shm.h"
#include "provider/loopback/segment.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

using platform::SharedMemory;

// A forked process that runs `body` and is killed at the end of the test. The child reports with
// report(); bodies never return to the test program.
class Child {
 public:
  using Report = std::function<void(std::span<const std::byte>)>;

  explicit Child(const std::function<void(const Report&)>& body) {
    REQUIRE(pipe(pipe_) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ > 0) return;
    try {
      body([this](std::span<const std::byte> bytes) {
        const auto size = static_cast<uint32_t>(bytes.size());
        if (write(pipe_[1], &size, sizeof size) < 0 || write(pipe_[1], bytes.data(), size) < 0)
          _exit(2);
      });
    } catch (...) {
    }
    _exit(1);
  }
  ~Child() {
    kill_now();
    close(pipe_[0]);
    close(pipe_[1]);
  }

  base::Bytes receive() const {
    uint32_t size = 0;
    REQUIRE(read(pipe_[0], &size, sizeof size) == sizeof size);
    base::Bytes bytes(size);
    REQUIRE(read(pipe_[0], bytes.data(), size) == size);
    return bytes;
  }
  void kill_now() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  int pipe_[2];
  pid_t pid_ = -1;
};

// What a node tells others: its address and one region.
base::Bytes introduce(const Node& node, const MemoryKey& key) {
  base::WireWriter writer;
  writer.put_bytes(node.domain->address());
  writer.put(key);
  return writer.take();
}
struct Introduction {
  explicit Introduction(std::span<const std::byte> bytes) {
    base::WireReader reader(bytes, "introduction");
    const auto raw = reader.get_bytes();
    address.assign(raw.begin(), raw.end());
    key = reader.get<MemoryKey>();
  }
  base::Bytes address;
  MemoryKey key;
};

WorkRequest write_to(const Introduction& to, uint64_t wr_id, PeerId peer, const Memory& from) {
  WorkRequest request;
  request.wr_id = wr_id;
  request.local = from.data.data();
  request.local_key = from.key.local_key;
  request.remote_addr = to.key.remote_addr;
  request.remote_key = to.key.remote_key;
  request.bytes = static_cast<uint32_t>(from.data.size());
  request.peer = peer;
  return with_imm(request, static_cast<uint32_t>(wr_id));
}

const char* const kSettings[] = {"", "ring_kib=16", "seed=4,ring_kib=16"};

TEST_CASE("loopback process: payload reaches another process, acknowledgements come back") {
  for (const char* settings : kSettings) {
    INFO("settings ", std::string(settings));
    // The child copies what arrives into a page that both can see.
    auto* shared = static_cast<std::byte*>(
        mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    Child child([&](const Child::Report& report) {
      Node node("loopback", settings);
      Memory target(node, 5000);
      node.on_imm = [&](uint32_t) { std::ranges::copy(target.data, shared); };
      report(introduce(node, target.key));
      for (;;)
        if (node.poll() > 0) report(std::as_bytes(std::span("seen")));
    });
    const Introduction introduction(child.receive());
    Node node("loopback", settings);
    Memory source(node, 5000);
    fill(source.data, 6);
    const PeerId peer = node.domain->connect(introduction.address);
    REQUIRE(node.post(write_to(introduction, 1, peer, source)));
    CHECK(pump({&node}, [&] { return node.done.size() == 1; }));
    CHECK(node.code(1) == Code::kOk);
    child.receive();
    CHECK(holds({shared, 5000}, 6));
    munmap(shared, 8192);
  }
}

TEST_CASE("loopback process: a killed receiver fails its writers") {
  for (const char* settings : kSettings) {
    INFO("settings ", std::string(settings));
    Child child([&](const Child::Report& report) {
      Node node("loopback", settings);
      Memory target(node, 5000);
      report(introduce(node, target.key));
      for (;;) node.poll();
    });
    const Introduction introduction(child.receive());
    Node node("loopback", settings);
    Memory source(node, 5000);
    const PeerId peer = node.domain->connect(introduction.address);
    uint64_t posted = 0;
    const auto post_more = [&] {
      while (posted < 100'000 && node.post(write_to(introduction, posted, peer, source))) ++posted;
    };
    CHECK(pump({&node}, [&] {
      post_more();
      return node.done.size() >= 200;
    }));
    CHECK(node.num_failed() == 0);
    child.kill_now();
    CHECK(pump({&node}, [&] {
      post_more();
      return node.num_failed() > 0;
    }));
    CHECK(pump({&node}, [&] { return node.done.size() == posted; }));
    for (const auto& [wr_id, status] : node.status())
      if (!status.ok()) CHECK(status.code == Code::kPeerDead);
    CHECK(node.domain->idle());
    REQUIRE(node.post(write_to(introduction, posted, peer, source)));  // at once from now on
    node.poll_entries = 64;
    CHECK(pump({&node}, [&] { return node.code(posted) == Code::kPeerDead; }));
    CHECK_THROWS_AS(SharedMemory::open("/moe_p2p.not_there"), base::Error);
  }
}

TEST_CASE("loopback process: the channel of a killed sender is freed by its receiver") {
  for (const char* settings : {"channels=1", "channels=1,seed=8"}) {
    INFO("settings ", std::string(settings));
    int to_child[2];
    REQUIRE(pipe(to_child) == 0);
    Child child([&](const Child::Report& report) {
      base::Bytes bytes(4096);
      const ssize_t size = read(to_child[0], bytes.data(), bytes.size());
      if (size <= 0) return;
      bytes.resize(static_cast<size_t>(size));
      const Introduction introduction{bytes};
      Node node("loopback", "seed=3");
      Memory source(node, 3000);
      const PeerId peer = node.domain->connect(introduction.address);
      report({});
      for (uint64_t i = 0;; ++i) {
        node.post(write_to(introduction, i, peer, source));
        node.poll();
      }
    });
    Node node("loopback", settings);
    Memory target(node, 3000);
    const base::Bytes bytes = introduce(node, target.key);
    REQUIRE(write(to_child[1], bytes.data(), bytes.size()) > 0);
    child.receive();
    CHECK(pump({&node}, [&] { return node.imms.size() > 50; }));
    CHECK_THROWS_AS(node.connect(node), base::Error);  // the only channel is taken
    child.kill_now();
    PeerId peer = 0;
    CHECK(pump({&node}, [&] {
      try {
        peer = node.connect(node);
        return true;
      } catch (const base::Error&) {
        return false;
      }
    }));
    Memory source(node, 3000);
    fill(source.data, 2);
    post_all(node, {&node}, make_write(1, peer, source, 0, target, 0, 3000));
    CHECK(pump({&node}, [&] { return node.done.size() == 1; }));
    CHECK(holds(target.data, 2));
    close(to_child[0]);
    close(to_child[1]);
  }
}

// Closes this process's locks of NICs' memory, as the system does some time before it ends the
// GPU's work of a process that is killed.
void let_go_of_locks() {
  for (int fd = 3; fd < 256; ++fd) {
    char file[256];
    const auto link = base::concat("/proc/self/fd/", fd);
    const ssize_t size = readlink(link.c_str(), file, sizeof file);
    if (size > 0 && std::string_view(file, static_cast<size_t>(size)).find("moe_p2p.nic") !=
                        std::string_view::npos)
      close(fd);
  }
}

TEST_CASE("loopback process: copies of a killed peer end before lent memory is given back") {
  int to_child[2];
  REQUIRE(pipe(to_child) == 0);
  const auto flag = SharedMemory::create("test", 4096);
  std::atomic_ref<uint64_t> ended(*reinterpret_cast<uint64_t*>(flag.data()));
  Child child([&](const Child::Report& report) {
    base::Bytes bytes(4096);
    bytes.resize(static_cast<size_t>(read(to_child[0], bytes.data(), bytes.size())));
    Node node("loopback", "");
    node.domain->connect(Introduction(bytes).address);
    const base::Bytes named = node.domain->address();
    base::WireReader own(named, "own address");
    own.get<uint32_t>(), own.get<uint64_t>();  // tag and letter
    auto& words = provider::loopback::Segment::open(own.get_string())->header().copies;
    std::atomic_ref(words.rows_begun).store(1);
    let_go_of_locks();
    report({});
    char byte = 0;
    if (read(to_child[0], &byte, 1) != 1) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ended.store(1);  // the copy
    for (uint64_t& word : words.rows_done) std::atomic_ref(word).store(1);
    for (;;) pause();
  });
  test::FakeDriver::install();
  Node node("loopback", "");
  std::vector<std::byte> memory(3000);
  const auto key =
      node.domain->register_memory({memory.data(), memory.size(), MemoryKind::kCuda, 0});
  const base::Bytes bytes = introduce(node, key);
  REQUIRE(write(to_child[1], bytes.data(), bytes.size()) > 0);
  child.receive();
  const auto start = platform::Clock::now();
  REQUIRE(write(to_child[1], "", 1) == 1);
  node.domain->unregister_memory(key);
  // On a machine with much to do the child may come too late.
  const bool waited = platform::Clock::now() - start >= std::chrono::milliseconds(100);
  CHECK((ended.load() == 1 || waited));
  close(to_child[0]);
  close(to_child[1]);
}

TEST_CASE("shared memory: what a killed process left is removed, what is in use is not") {
  Child child([](const Child::Report& report) {
    Node node("loopback", "");
    const auto shm = SharedMemory::create("test", 4096);
    report(std::as_bytes(std::span(shm.name())));
    for (;;) pause();
  });
  const base::Bytes bytes = child.receive();
  const std::string name(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto mine = SharedMemory::create("test", 4096);
  const auto mapped = SharedMemory::open(name);
  CHECK(mapped.owner_alive());
  CHECK(SharedMemory::owner_alive(name.c_str()));
  SharedMemory::remove_stale();
  CHECK_NOTHROW(SharedMemory::open(name));  // its owner lives
  child.kill_now();
  CHECK_FALSE(mapped.owner_alive());
  CHECK_FALSE(SharedMemory::owner_alive(name.c_str()));
  CHECK(SharedMemory::remove_stale() >= 2);  // the object and the NIC's segment
  CHECK_THROWS_AS(SharedMemory::open(name), base::Error);
  CHECK_FALSE(SharedMemory::owner_alive(name.c_str()));
  CHECK_NOTHROW(SharedMemory::open(mine.name()));
  mapped.data()[0] = std::byte{1};  // still mapped here
}

}  // namespace
}  // namespace moe_p2p::provider_test
