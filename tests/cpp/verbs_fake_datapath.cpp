// The data path of the fake libibverbs: posting, polling, and what a NIC does in between.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fake_driver.h"
#include "verbs_fake_world.h"

namespace moe_p2p::test::verbs_world {

// --- completions ---

// A queue that overruns is over (mlx5: a CQ in error), and so is whoever completes into it.
void add_completion(FakeVerbs& f, FakeCq& queue, const FakeCq::Entry& entry) {
  if (queue.entries.size() >= static_cast<size_t>(queue.cqe)) {
    ++f.counters.overruns;
    for (FakeQp* qp : queue.users) qp->state = kQpError;
    return;
  }
  queue.entries.push_back(entry);
  if (!queue.armed || !queue.channel) return;
  queue.armed = false;
  const char event = 1;
  static_cast<FakeChannel*>(queue.channel)->events.put(&event, 1);
}

void complete_send(FakeVerbs& f, FakeQp& qp, const SendWr& wr, int status) {
  ++qp.num_started;
  const bool signaled = (wr.send_flags & kSendSignaled) != 0;
  if (!signaled && (status == kWcSuccess || f.faults.signaled_errors_only)) return;
  if (status != kWcSuccess && f.faults.no_errors) return;
  Wc wc{};
  wc.wr_id = wr.wr_id;
  wc.status = status;
  wc.qp_num = qp.qp_num;
  wc.vendor_err = status == kWcSuccess ? 0 : 7;
  add_completion(f, *static_cast<FakeCq*>(qp.send_cq), {wc, qp.num_started, nullptr});
}

// IBV_EVENT_QP_LAST_WQE_REACHED of a queue pair in error with a shared receive queue: everything it
// took has been given to its completion queue (InfiniBand specification 1.4, section 10.2.9.3).
void report_last_receive(FakeVerbs& f, FakeQp& qp) {
  if (qp.state != kQpError || !qp.late.empty() || qp.last_receive_reported) return;
  qp.last_receive_reported = true;
  if (f.faults.no_last_receive) return;
  AsyncEvent event{};
  event.type = kEventLastReceive;
  event.element = &qp;
  static_cast<FakeContext*>(qp.context)->events.put(&event, sizeof event);
}

void break_queue(FakeVerbs& f, FakeQp& qp) {
  qp.state = kQpError;
  for (; !qp.pending.empty(); qp.pending.pop_front())
    complete_send(f, qp, qp.pending.front().wr, kWcFlushed);
  report_last_receive(f, qp);
}

// What nobody has polled goes with its queue pair, and the places of its receives are free again:
// as mlx5 does (rdma-core v64, providers/mlx5/verbs.c:3024 mlx5_destroy_qp, cq.c:1807
// __mlx5_cq_clean and :1785 free_res_cqe).
void purge(FakeQp& qp) {
  auto& cq = *static_cast<FakeCq*>(qp.recv_cq);
  const auto drop = [&](const FakeCq::Entry& entry) {
    if (entry.wc.qp_num != qp.qp_num) return false;
    if (entry.srq) --entry.srq->num_cq;
    return true;
  };
  std::erase_if(cq.entries, drop);
  std::erase_if(qp.late, drop);
}

size_t let_through(const std::function<bool(const Accepted&)>& which) {
  return std::erase_if(world().accepted, [&](const Accepted& write) {
    if (!which(write)) return false;
    FakeDriver::write_by_nic(reinterpret_cast<void*>(write.addr), write.data.data(),
                             write.data.size());
    return true;
  });
}

// An acknowledgement may leave the NIC before the completion is written: what the queue pairs of
// this queue have acknowledged shows itself now.
void show_late(FakeVerbs& f, FakeCq& cq) {
  for (FakeQp* qp : cq.users) {
    if (!qp->late.empty())  // the completion is written behind the payload
      let_through([&](const Accepted& write) { return write.qp_num == qp->qp_num; });
    for (; !qp->late.empty(); qp->late.pop_front()) add_completion(f, cq, qp->late.front());
    report_last_receive(f, *qp);
  }
}

// --- writes ---

bool covered(World& w, uint32_t key, const Qp& qp, uint64_t addr, uint64_t bytes, int access) {
  const auto* domain = reinterpret_cast<const FakePd*>(qp.pd);
  const void* pd = domain->parent ? domain->parent : domain;
  const auto found = w.regions.find(key);
  if (found == w.regions.end() || found->second->pd != pd) return false;
  if ((found->second->access & access) != access) return false;
  const auto begin = reinterpret_cast<uint64_t>(found->second->addr);
  return addr >= begin && bytes <= found->second->length &&
         addr - begin <= found->second->length - bytes;
}

// Starts the reads at the front of the queue, as many as may be under way. Others wait, and what is
// behind them (InfiniBand specification 1.4, section 9.7.7.1).
void start_reads(FakeVerbs& f, FakeQp& qp) {
  uint32_t num = 0;
  for (Pending& read : qp.pending) {
    if (read.wr.opcode != kOpRead) return;
    if (num++ == qp.max_reads_sent) {
      ++f.counters.read_waits;
      return;
    }
    if (read.polls_left >= 0) continue;
    read.polls_left = static_cast<int>(f.random() % 8);
    ++f.counters.reads;
  }
}

// How the target refuses a read or write; kWcSuccess: it does not. A queue pair without the right
// calls the request invalid, and so it does with more reads than it serves (drivers/infiniband/sw/
// rxe/rxe_resp.c, check_op_valid; InfiniBand specification 1.4, section 9.7.4.1).
int refusal(World& w, const FakeQp& qp, const FakeQp& target, const SendWr& wr, uint32_t bytes) {
  const bool read = wr.opcode == kOpRead;
  const int right = read ? kAccessRemoteRead : kAccessRemoteWrite;
  const auto started = [](const Pending& pending) { return pending.polls_left >= 0; };
  if (!(target.access & static_cast<unsigned>(right))) return kWcRemoteInvalidRequest;
  if (read && std::ranges::count_if(qp.pending, started) > target.max_reads_served)
    return kWcRemoteInvalidRequest;
  if (bytes > 0 && !covered(w, wr.rkey, target, wr.remote_addr, bytes, right))
    return kWcRemoteAccess;
  return kWcSuccess;
}

// The status of the write or read at the front; -1: later, because the target has no receive or the
// answer is under way.
int carry_out(FakeVerbs& f, World& w, FakeQp& qp, FakeQp*& target) {
  Pending& write = qp.pending.front();
  const SendWr& wr = write.wr;
  const uint32_t bytes = wr.num_sge > 0 ? write.sge.length : 0;
  if (f.faults.link_down || qp.lost) return kWcRetriesExceeded;
  if (f.faults.next_status != 0) return std::exchange(f.faults.next_status, 0);
  const bool inlined = (wr.send_flags & kSendInline) != 0;
  const bool read = wr.opcode == kOpRead;
  if (read && qp.max_reads_sent == 0) return kWcLocalQpOperation;
  if (bytes > 0 && !inlined &&
      !covered(w, write.sge.lkey, qp, write.sge.addr, bytes, read ? kAccessLocalWrite : 0))
    return kWcLocalProtection;
  const auto found = w.qps.find(qp.peer_qp);
  if (found == w.qps.end() || found->second->peer_qp != qp.qp_num ||
      (found->second->state != kQpReadyToReceive && found->second->state != kQpReadyToSend))
    return kWcRetriesExceeded;
  target = found->second;
  if (const int refused = refusal(w, qp, *target, wr, bytes); refused != kWcSuccess) return refused;
  if (read && write.polls_left-- > 0) return -1;
  auto* receives = static_cast<FakeSrq*>(target->srq);
  if (wr.opcode == kOpWriteImm && receives->num == 0) {
    ++f.counters.receiver_waits;
    return -1;
  }
  if (bytes > 0 && read)  // PCIe: a read pushes writes, and does not pass them
    let_through([&](const Accepted& before) {
      const FakeMr& region = *w.regions.at(before.key);
      const auto begin = reinterpret_cast<uint64_t>(region.addr);
      return before.device == target->context && !(region.access & kAccessRelaxedOrdering) &&
             wr.remote_addr >= begin && wr.remote_addr < begin + region.length;
    });
  if (bytes > 0 && read)
    FakeDriver::write_by_nic(reinterpret_cast<void*>(write.sge.addr),
                             reinterpret_cast<const void*>(wr.remote_addr), bytes);
  else if (bytes > 0) {
    const auto* from =
        inlined ? write.inlined.data() : reinterpret_cast<const std::byte*>(write.sge.addr);
    w.accepted.push_back({target->context, target->qp_num, wr.rkey, wr.remote_addr, {}});
    w.accepted.back().data.assign(from, from + bytes);
    if (!f.faults.slow_memory) let_through([](const Accepted&) { return true; });
  }
  if (wr.opcode == kOpWriteImm) {
    --receives->num;
    ++receives->num_cq;
    Wc wc{};
    wc.wr_id = ~uint64_t{0};
    wc.imm_data = wr.imm_data;
    wc.wc_flags = kWcWithImm;
    wc.qp_num = target->qp_num;
    target->late.push_back({wc, 0, receives});
    auto& cq = *static_cast<FakeCq*>(target->recv_cq);
    if (cq.armed) show_late(f, cq);  // nobody polls there, which is when others are shown
  }
  return kWcSuccess;
}

void run_queue(FakeVerbs& f, World& w, FakeQp& qp) {
  for (uint64_t budget = 1 + f.random() % 16; budget > 0 && !qp.pending.empty(); --budget) {
    FakeQp* target = nullptr;
    start_reads(f, qp);
    const int status = carry_out(f, w, qp, target);
    if (status < 0) return;
    ++f.counters.writes;
    complete_send(f, qp, qp.pending.front().wr, status);
    qp.pending.pop_front();
    if (status == kWcSuccess) continue;
    break_queue(f, qp);
    if ((status == kWcRemoteAccess || status == kWcRemoteInvalidRequest) && target)
      break_queue(f, *target);
  }
}

int post_send(Qp* plain, SendWr* wr, SendWr** bad) {
  auto& qp = *static_cast<FakeQp*>(plain);
  const bool alone = !qp.thread || !qp.thread->posting.exchange(true);  // mlx5.h: mlx5_spin_lock
  return locked([&](FakeVerbs& f, World&) {
    f.counters.lock_violations += !alone;
    if (qp.thread) qp.thread->posting = false;
    const bool fails = f.faults.post_error != 0 && f.faults.num_post_errors > 0;
    if (fails) --f.faults.num_post_errors;
    ++f.counters.doorbells;
    for (uint32_t taken = 0; wr != nullptr; wr = wr->next, ++taken) {
      int error = fails && taken == f.faults.posts_taken ? f.faults.post_error : 0;
      if (qp.num_posted - qp.num_freed >= qp.init.cap.max_send_wr) error = ENOMEM;
      if (qp.state != kQpReadyToSend && qp.state != kQpError) error = EINVAL;
      if ((wr->send_flags & kSendInline) && wr->opcode == kOpRead) error = EINVAL;
      if ((wr->send_flags & kSendInline) && wr->sg_list->length > qp.init.cap.max_inline_data)
        error = ENOMEM;  // mlx5, qp.c: set_data_inl_seg
      if (error != 0) {
        *bad = wr;
        return error;
      }
      ++qp.num_posted;
      Pending write{*wr, wr->num_sge > 0 ? *wr->sg_list : Sge{}, {}, -1};
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
    for (FakeCq* other : w.cqs)
      if (other != &cq) show_late(f, *other);
    std::vector<FakeQp*> order(cq.users.begin(), cq.users.end());
    std::ranges::shuffle(order, f.random);
    for (FakeQp* qp : order) run_queue(f, w, *qp);
    int num = 0;
    for (; num < num_entries && !cq.entries.empty(); ++num) {
      const auto entry = cq.entries.front();
      cq.entries.pop_front();
      wcs[num] = entry.wc;
      if (entry.srq) {
        --entry.srq->num_cq;
      } else {
        w.qps.at(entry.wc.qp_num)->num_freed = entry.sequence;
      }
    }
    show_late(f, cq);
    return num;
  });
}

int req_notify_cq(Cq* cq, int) {
  return locked([&](FakeVerbs&, World&) { return static_cast<FakeCq*>(cq)->armed = true, 0; });
}

// Full counts what is taken and not yet polled: mlx5, srq.c: mlx5_post_srq_recv.
int post_srq_recv(Srq* plain, RecvWr* wr, RecvWr** bad) {
  return locked([&](FakeVerbs& f, World&) {
    auto& srq = *static_cast<FakeSrq*>(plain);
    for (uint32_t taken = 0; wr != nullptr; wr = wr->next, ++srq.num, ++taken) {
      int error = srq.num + srq.num_cq >= srq.max_wr ? ENOMEM : 0;
      if (f.faults.receive_error != 0 && taken == f.faults.receives_taken)
        error = f.faults.receive_error;
      if (error == 0) continue;
      if (error == ENOMEM) ++f.counters.full_receives;
      *bad = wr;
      return error;
    }
    return 0;
  });
}

}  // namespace moe_p2p::test::verbs_world
