// The data path of the fake libibverbs: posting, polling, and what a NIC does in between.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "verbs_fake_world.h"

namespace moe_p2p::test::verbs_world {

// --- completions ---

void add_completion(FakeVerbs& f, Cq* cq, const FakeCq::Entry& entry) {
  auto* queue = static_cast<FakeCq*>(cq);
  if (queue->entries.size() >= static_cast<size_t>(queue->cqe)) ++f.counters.overruns;
  queue->entries.push_back(entry);
  if (!queue->armed || !queue->channel) return;
  queue->armed = false;
  const char event = 1;
  static_cast<FakeChannel*>(queue->channel)->events.put(&event, 1);
}

void complete_send(FakeVerbs& f, FakeQp& qp, const SendWr& wr, int status) {
  ++qp.num_started;
  if (status == kWcSuccess && !(wr.send_flags & kSendSignaled)) return;
  Wc wc{};
  wc.wr_id = wr.wr_id;
  wc.status = status;
  wc.qp_num = qp.qp_num;
  wc.vendor_err = status == kWcSuccess ? 0 : 7;
  add_completion(f, qp.send_cq, {wc, qp.qp_num, qp.num_started});
}

void break_queue(FakeVerbs& f, FakeQp& qp) {
  qp.state = kQpError;
  for (; !qp.pending.empty(); qp.pending.pop_front())
    complete_send(f, qp, qp.pending.front().wr, kWcFlushed);
}

// --- writes ---

bool covered(World& w, uint32_t key, const Pd* pd, uint64_t addr, uint64_t bytes) {
  const auto found = w.regions.find(key);
  if (found == w.regions.end() || found->second->pd != pd) return false;
  const auto begin = reinterpret_cast<uint64_t>(found->second->addr);
  return addr >= begin && bytes <= found->second->length &&
         addr - begin <= found->second->length - bytes;
}

// The status of the write at the front; -1: the target has no receive, later.
int carry_out(FakeVerbs& f, World& w, FakeQp& qp, FakeQp*& target) {
  const Pending& write = qp.pending.front();
  const SendWr& wr = write.wr;
  const uint32_t bytes = wr.num_sge > 0 ? write.sge.length : 0;
  if (f.faults.link_down) return kWcRetriesExceeded;
  if (f.faults.next_status != 0) return std::exchange(f.faults.next_status, 0);
  const bool inlined = (wr.send_flags & kSendInline) != 0;
  if (bytes > 0 && !inlined && !covered(w, write.sge.lkey, qp.pd, write.sge.addr, bytes))
    return kWcLocalProtection;
  const auto found = w.qps.find(qp.peer_qp);
  if (found == w.qps.end() || found->second->peer_qp != qp.qp_num ||
      (found->second->state != kQpReadyToReceive && found->second->state != kQpReadyToSend))
    return kWcRetriesExceeded;
  target = found->second;
  if (bytes > 0 && !covered(w, wr.rkey, target->pd, wr.remote_addr, bytes)) return kWcRemoteAccess;
  auto* receives = static_cast<FakeSrq*>(target->srq);
  if (wr.opcode == kOpWriteImm && receives->num == 0) {
    ++f.counters.receiver_waits;
    return -1;
  }
  if (bytes > 0)
    std::memcpy(reinterpret_cast<void*>(wr.remote_addr),
                inlined ? write.inlined.data() : reinterpret_cast<const void*>(write.sge.addr),
                bytes);
  if (wr.opcode == kOpWriteImm) {
    --receives->num;
    Wc wc{};
    wc.wr_id = ~uint64_t{0};
    wc.imm_data = wr.imm_data;
    wc.wc_flags = kWcWithImm;
    wc.qp_num = target->qp_num;
    add_completion(f, target->recv_cq, {wc, 0, 0});
  }
  return kWcSuccess;
}

void run_queue(FakeVerbs& f, World& w, FakeQp& qp) {
  for (uint64_t budget = 1 + f.random() % 16; budget > 0 && !qp.pending.empty(); --budget) {
    FakeQp* target = nullptr;
    const int status = carry_out(f, w, qp, target);
    if (status < 0) return;
    ++f.counters.writes;
    complete_send(f, qp, qp.pending.front().wr, status);
    qp.pending.pop_front();
    if (status == kWcSuccess) continue;
    break_queue(f, qp);
    if (status == kWcRemoteAccess) target->state = kQpError;
  }
}

int post_send(Qp* plain, SendWr* wr, SendWr** bad) {
  return locked([&](FakeVerbs& f, World&) {
    auto& qp = *static_cast<FakeQp*>(plain);
    const bool fails = f.faults.post_error != 0 && f.faults.num_post_errors > 0;
    if (fails) --f.faults.num_post_errors;
    ++f.counters.doorbells;
    for (uint32_t taken = 0; wr != nullptr; wr = wr->next, ++taken) {
      int error = fails && taken == f.faults.posts_taken ? f.faults.post_error : 0;
      if (qp.num_posted - qp.num_freed >= qp.init.cap.max_send_wr) error = ENOMEM;
      if (qp.state != kQpReadyToSend && qp.state != kQpError) error = EINVAL;
      if (error != 0) {
        *bad = wr;
        return error;
      }
      ++qp.num_posted;
      Pending write{*wr, wr->num_sge > 0 ? *wr->sg_list : Sge{}, {}};
      if (wr->send_flags & kSendInline) {
        ++f.counters.inlined;
        const auto* from = reinterpret_cast<const std::byte*>(write.sge.addr);
        write.inlined.assign(from, from + write.sge.length);
      }
      if (qp.state == kQpError) {
        complete_send(f, qp, *wr, kWcFlushed);
      } else {
        qp.pending.push_back(std::move(write));
      }
    }
    return 0;
  });
}

int poll_cq(Cq* plain, int num_entries, Wc* wcs) {
  return locked([&](FakeVerbs& f, World& w) {
    auto& cq = *static_cast<FakeCq*>(plain);
    std::vector<FakeQp*> order(cq.senders.begin(), cq.senders.end());
    std::ranges::shuffle(order, f.random);
    for (FakeQp* qp : order) run_queue(f, w, *qp);
    int num = 0;
    for (; num < num_entries && !cq.entries.empty(); ++num) {
      const auto entry = cq.entries.front();
      cq.entries.pop_front();
      wcs[num] = entry.wc;
      const auto sender = w.qps.find(entry.send_qp);
      if (sender != w.qps.end()) sender->second->num_freed = entry.sequence;
    }
    return num;
  });
}

int req_notify_cq(Cq* cq, int) {
  return locked([&](FakeVerbs&, World&) { return static_cast<FakeCq*>(cq)->armed = true, 0; });
}

int post_srq_recv(Srq* plain, RecvWr* wr, RecvWr** bad) {
  return locked([&](FakeVerbs&, World&) {
    auto& srq = *static_cast<FakeSrq*>(plain);
    for (; wr != nullptr; wr = wr->next, ++srq.num) {
      if (srq.num < srq.max_wr) continue;
      *bad = wr;
      return ENOMEM;
    }
    return 0;
  });
}

}  // namespace moe_p2p::test::verbs_world
