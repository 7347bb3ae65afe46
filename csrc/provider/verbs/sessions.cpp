#include "provider/verbs/sessions.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;
using base::Error;
using platform::Clock;

namespace {

// Too small: many peers that connect at once push each other out before they have sent anything.
// Each costs a descriptor.
constexpr size_t kMaxPending = 256;
constexpr size_t kMaxSessions = 4096;
// Connections accepted at once; messages of others are handled in between.
constexpr int kAcceptBatch = 64;
constexpr std::chrono::seconds kLogPause{10};

bool out_of_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

Sessions::Sessions(const Nic& nic, const Events& events, Changes& changes, const Secret& secret)
    : nic_(nic),
      events_(events),
      listener_(Socket::listen(nic.config.bind)),
      drain_(nic, changes),
      secret_(secret) {
  events_.add(listener_.fd(), Source::kListener);
}

void Sessions::accept() {
  for (int i = 0; i < kAcceptBatch; ++i) {
    if (pending_.size() >= kMaxPending) make_room();
    Socket link = listener_.accept();
    if (link) {
      accept(std::move(link));
      continue;
    }
    if (!out_of_room(errno)) return;
    if (pending_.empty()) {  // look() tries again; watching it would be a busy loop
      events_.remove(listener_.fd());
      paused_ = true;
      return;
    }
    make_room();
  }
}

void Sessions::accept(Socket link) {
  const uint32_t id = next_session_++;
  Session session;
  base::fill_random(session.nonce);
  session.prove_by = Clock::now() + nic_.config.handshake_timeout;
  if (!link.send(Greeting{session.nonce}.encode())) return;
  events_.add(link.fd(), Source::kSession, id);
  session.link = std::move(link);
  sessions_.emplace(id, std::move(session));
  pending_.insert(id);
}

// The oldest may have sent its message by now: then it is served, not refused.
void Sessions::make_room() {
  const uint32_t oldest = *pending_.begin();
  serve(oldest);
  if (pending_.contains(oldest)) refuse(oldest, "others wait, and it has sent nothing");
}

// Handles one message, so that no session occupies the thread.
void Sessions::serve(uint32_t session_id) {
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  Bytes message;
  const Socket::Got got = session.link.receive(message);
  if (got == Socket::Got::kNothing) return;
  if (got == Socket::Got::kEnd && !session.proof)
    return refuse(session_id, "it sent no valid handshake, or closed without one");
  if (got == Socket::Got::kEnd) return end(session_id);
  if (!open(session_id, session, message))
    return refuse(session_id, "it does not prove that it knows the secret of this NIC");
  try {
    const Hello hello = Hello::decode(message);
    // Else it wants another NIC, whose host and port are ours by chance.
    session.tag = hello.tag;
    if (hello.nic_id == nic_id_ && !severed_.contains(hello.tag) &&
        session.link.send(session.proof->seal(answer(session, hello).encode())))
      return;
  } catch (const Error& error) {  // of another version
    MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": ", error.what());
  }
  end(session_id);
}

// True when the message proves knowledge of the secret; then `message` becomes the Hello.
bool Sessions::open(uint32_t id, Session& session, Bytes& message) {
  std::span<const std::byte> sealed = message;
  std::optional<Proof> proof = session.proof;
  if (!proof) {
    Nonce nonce;
    if (sealed.size() < nonce.size()) return false;
    std::ranges::copy(sealed.first(nonce.size()), nonce.begin());
    sealed = sealed.subspan(nonce.size());
    proof.emplace(Proof::Side::kTarget, secret_, session.nonce, nonce);
  }
  auto opened = proof->open(sealed);
  if (!opened) return false;
  session.proof = proof;
  pending_.erase(id);
  message = std::move(*opened);
  return true;
}

void Sessions::look() {
  drain_.look();
  while (!pending_.empty() && sessions_.at(*pending_.begin()).prove_by <= Clock::now())
    refuse(*pending_.begin(), "it sent no proof within handshake_ms");
  if (!paused_) return;
  events_.add(listener_.fd(), Source::kListener);
  paused_ = false;
}

void Sessions::refuse(uint32_t session_id, const char* why) {
  const uint64_t num = 1 + num_refused_.fetch_add(1, std::memory_order_relaxed);
  if (Clock::now() >= log_after_) {
    log_after_ = Clock::now() + kLogPause;
    MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": refused ", num,
                " connections to its port ", port(), " so far, the last from ",
                sessions_.at(session_id).link.peer_host(), ": ", why,
                ". bind= listens on one network only; ranks with different MOE_P2P_SECRET are "
                "refused, too");
  }
  end(session_id);
}

Answer Sessions::answer(Session& session, const Hello& hello) {
  Answer answer;
  answer.port = own_port(nic_, hello.port.priority);
  try {
    MOE_P2P_CHECK(!drain_.full(), Code::kResourceExhausted, nic_.name(),
                  ": too many queue pairs wait to be drained; does its polling thread run?");
    MOE_P2P_CHECK(sessions_.size() - pending_.size() <= kMaxSessions, Code::kResourceExhausted,
                  nic_.name(), ": ", kMaxSessions, " peers are connected already");
    for (const QpAddress& lane : hello.lanes) {
      Owned<Qp> qp = make_qp(nic_, false);
      make_ready_to_receive(nic_, *qp, hello.port, lane, hello.label);
      answer.lanes.push_back({lane.lane, qp->qp_num, 0});
      const auto old = session.lanes.find(lane.lane);
      if (old != session.lanes.end())
        drain_.add(std::move(old->second.qp), old->second.has_ended, session.tag);
      session.lanes.insert_or_assign(lane.lane, Lane{std::move(qp), false});
    }
  } catch (const Error& error) {
    answer.refusal = error.what();
  }
  return answer;
}

void Sessions::end(uint32_t session_id) {
  const auto found = sessions_.find(session_id);
  for (auto& [index, lane] : found->second.lanes)
    drain_.add(std::move(lane.qp), lane.has_ended, found->second.tag);
  pending_.erase(session_id);
  sessions_.erase(found);
}

void Sessions::last_receive(const void* qp) noexcept {
  drain_.last_receive(qp);
  for (auto& [id, session] : sessions_)
    for (auto& [index, lane] : session.lanes) lane.has_ended |= lane.qp.get() == qp;
}

std::string Sessions::host_of(const void* qp) const {
  for (const auto& [id, session] : sessions_)
    for (const auto& [index, lane] : session.lanes)
      if (lane.qp.get() == qp) return "from " + session.link.peer_host();
  return "";
}

void Sessions::sever(uint64_t tag) {
  severed_.insert(tag);
  std::vector<uint32_t> ids;
  for (const auto& [id, session] : sessions_)
    if (session.tag == tag) ids.push_back(id);
  for (const uint32_t id : ids) end(id);
}

bool Sessions::holds(uint64_t tag) const noexcept {
  return drain_.holds(tag) ||
         std::ranges::any_of(sessions_, [&](const auto& one) { return one.second.tag == tag; });
}

void Sessions::end_all() {
  while (!sessions_.empty()) end(sessions_.begin()->first);
}

}  // namespace moe_p2p::provider::verbs
