// The state behind the fake libibverbs: its objects, and what both of its halves share.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "verbs_fake.h"

namespace moe_p2p::test::verbs_world {

using namespace provider::verbs;

struct FakePipe {
  FakePipe() {
    if (pipe(ends) != 0) ends[0] = ends[1] = -1;
    fcntl(ends[1], F_SETFL, O_NONBLOCK);  // written with the lock held
  }
  ~FakePipe() {
    close(ends[0]);
    close(ends[1]);
  }
  void put(const void* data, size_t bytes) const {
    [[maybe_unused]] const ssize_t put = write(ends[1], data, bytes);
  }
  int get(void* data, size_t bytes) const {
    return read(ends[0], data, bytes) == static_cast<ssize_t>(bytes) ? 0 : -1;
  }
  int ends[2];
};

struct FakeContext : ExtendedOps, Context {  // in this order in memory
  FakePipe events;
};
struct FakeTd {
  int num_users = 0;
  std::atomic<bool> posting{false};
};
struct FakePd {
  FakeContext* context;
  FakePd* parent = nullptr;  // of a parent domain: the one that memory is registered with
  FakeTd* thread = nullptr;
  int num_users = 0;
};
struct FakeChannel : CompChannel {
  FakePipe events;
};
struct FakeMr : Mr {
  int access = 0;
};
struct Pending {
  SendWr wr;
  Sge sge;
  std::vector<std::byte> inlined;
  int polls_left = -1;  // of a read, until its answer is here; -1: not started
};
struct FakeQp;
struct FakeSrq : Srq {
  uint32_t max_wr = 0;
  uint32_t num = 0;     // posted, for peers to take
  uint32_t num_cq = 0;  // taken; their places are free once their completions are polled or purged
  int num_users = 0;
};
struct FakeCq : Cq {
  struct Entry {
    Wc wc;
    uint64_t sequence;  // of a write: those of its queue pair up to here have left the queue
    FakeSrq* srq;       // of a receive
  };
  std::deque<Entry> entries;
  std::set<FakeQp*> users;  // all queue pairs are made with one queue for both directions
  bool armed = false;
};
struct FakeQp : Qp {
  QpInitAttr init;
  uint32_t peer_qp = 0;
  unsigned access = 0;
  uint32_t max_reads_sent = 0, max_reads_served = 0;
  uint64_t num_posted = 0, num_started = 0, num_freed = 0;
  std::deque<Pending> pending;
  std::deque<FakeCq::Entry> late;  // acknowledged to the peer, not yet in the completion queue
  bool last_receive_reported = false;
  bool lost = false;  // what it sends does not arrive
  FakeTd* thread = nullptr;
};

// A write that its NIC has accepted and memory has not.
struct Accepted {
  void* device;  // the context
  uint32_t qp_num, key;
  uint64_t addr;
  std::vector<std::byte> data;
};

struct World {
  std::deque<Accepted> accepted;
  std::map<uint32_t, FakeQp*> qps;
  std::map<uint32_t, FakeMr*> regions;  // by key, lkey == rkey
  std::vector<FakeContext*> contexts;
  std::set<FakeCq*> cqs;
  uint32_t next_qp = 100, next_key = 0x1000;
};

inline FakeVerbs& fake() {
  static FakeVerbs verbs;
  return verbs;
}
inline World& world() {
  static World world;
  return world;
}

template <typename Step>
auto locked(Step&& step) {
  return fake().locked([&](FakeVerbs& f) { return step(f, world()); });
}

// --- data path, verbs_fake_datapath.cpp ---

void break_queue(FakeVerbs& f, FakeQp& qp);
void report_last_receive(FakeVerbs& f, FakeQp& qp);
void purge(FakeQp& qp);
// Those of `which`, in their order.
size_t let_through(const std::function<bool(const Accepted&)>& which);
int post_send(Qp* plain, SendWr* wr, SendWr** bad);
int poll_cq(Cq* plain, int num_entries, Wc* wcs);
int req_notify_cq(Cq* cq, int);
int post_srq_recv(Srq* plain, RecvWr* wr, RecvWr** bad);

}  // namespace moe_p2p::test::verbs_world
