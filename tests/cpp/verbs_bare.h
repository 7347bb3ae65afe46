// A bare loop of libibverbs' own calls between two devices: what the verbs provider is measured
// beside. Everything but the set-up is the library's own interface.
#pragma once

#include <arpa/inet.h>

#include "provider/verbs/queue_pair.h"
#include "provider_harness.h"

namespace moe_p2p::provider_test::verbs_bare {

using namespace provider::verbs;  // NOLINT(google-build-using-namespace): all of the interface
using platform::Clock;

inline constexpr size_t kMemoryBytes = 16 << 20;
inline constexpr uint32_t kWindow = 64;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct BareEnd {
  explicit BareEnd(const char* device)
      : nic(parse_config(base::concat("timeout=18,devices=", device)), 0, false),
        bytes(kMemoryBytes),
        mr(nic.api.reg_mr(nic.pd.get(), bytes.data(), bytes.size(), 3), nic.api.dereg_mr),
        qp(make_qp(nic, true)) {
    add_receives(nic.num_receives);
  }
  void connect(BareEnd& to) {
    make_ready_to_receive(nic, *qp, own_port(to.nic), {0, to.qp->qp_num, 0}, "peer");
    make_ready_to_send(nic, *qp, own_port(to.nic), 0);
  }
  void add_receives(uint32_t num) {
    RecvWr wr{kReceiveId, nullptr, nullptr, 0}, *bad = nullptr;
    for (; num > 0; --num) REQUIRE(nic.context->ops.post_srq_recv(nic.srq.get(), &wr, &bad) == 0);
  }
  int post(BareEnd& to, uint64_t offset, uint32_t size, bool imm) {
    Sge sge{reinterpret_cast<uint64_t>(bytes.data() + offset), size, mr->lkey};
    SendWr wr{}, *bad = nullptr;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = imm ? kOpWriteImm : kOpWrite;
    wr.send_flags = kSendSignaled | (size <= 64 ? unsigned{kSendInline} : 0u);
    wr.imm_data = htonl(7);
    wr.remote_addr = reinterpret_cast<uint64_t>(to.bytes.data() + offset);
    wr.rkey = to.mr->rkey;
    return nic.context->ops.post_send(qp.get(), &wr, &bad);
  }
  void poll() {
    Wc wcs[32];
    const int num = nic.context->ops.poll_cq(nic.cq.get(), 32, wcs);
    uint64_t received = 0;
    for (int i = 0; i < num; ++i) {
      REQUIRE(wcs[i].status == 0);
      (wcs[i].wr_id == kReceiveId ? received : sent) += 1;
    }
    seen += received;
    add_receives(static_cast<uint32_t>(received));
  }
  Nic nic;
  std::vector<std::byte> bytes;
  Owned<Mr> mr;
  Owned<Qp> qp;
  uint64_t sent = 0, seen = 0;
};

struct Bare {
  Bare(const char* from, const char* to) : a(from), b(to) { a.connect(b), b.connect(a); }
  double run(uint32_t num, uint32_t size, bool imm) {
    const uint64_t sent = a.sent + num, seen = b.seen + (imm ? num : 0);
    const auto start = Clock::now();
    for (uint32_t posted = 0; a.sent < sent || b.seen < seen;) {
      while (posted < num && posted - (a.sent + num - sent) < kWindow)
        REQUIRE(a.post(b, (uint64_t{posted++} * size) % (kMemoryBytes - size), size, imm) == 0);
      a.poll();
      if (imm) b.poll();
    }
    return seconds_since(start);
  }
  double ping_pong(uint32_t num, uint32_t size) {
    const auto start = Clock::now();
    for (uint32_t i = 0; i < num; ++i) {
      const uint64_t at_b = b.seen + 1, at_a = a.seen + 1;
      REQUIRE(a.post(b, 0, size, true) == 0);
      while (b.seen < at_b) b.poll();
      REQUIRE(b.post(a, 0, size, true) == 0);
      while (a.seen < at_a) a.poll();
    }
    while (a.sent < num) a.poll();
    return seconds_since(start) / num / 2;
  }
  double post_pages(uint32_t num) {
    const uint64_t sent = a.sent + num;
    const auto start = Clock::now();
    for (uint32_t i = 0; i < num; ++i) REQUIRE(a.post(b, i * 8192, 8192, false) == 0);
    const double seconds = seconds_since(start);
    while (a.sent < sent) a.poll();
    return seconds / num;
  }
  BareEnd a, b;
};

}  // namespace moe_p2p::provider_test::verbs_bare
