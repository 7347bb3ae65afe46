#include "provider/verbs/control.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "base/log.h"
#include "platform/thread.h"

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;
using base::Error;
using platform::Clock;
using platform::Deadline;
using std::chrono::milliseconds;

namespace {

// How long one address of a peer is tried before the next, at first.
constexpr milliseconds kFirstTry{1000};
constexpr milliseconds kPause{50};
// So often all addresses must refuse before the peer counts as gone.
constexpr int kMaxRefusals = 3;
// Between two looks at repairs that take too long.
constexpr int kLookMs = 250;

std::string own_label(const Nic& nic) {
  char host[256] = "?";
  gethostname(host, sizeof host - 1);
  return base::concat(nic.context->device->name, " of ", host, " (pid ", getpid(), ")");
}

uint64_t random_id() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

Control::Control(const Nic& nic, PeerTable& table, const Kick& kick, Changes& changes,
                 platform::EventCount* waker)
    : nic_(nic),
      table_(table),
      kick_(kick),
      changes_(changes),
      waker_(waker),
      listener_(Socket::listen()),
      address_{random_id(), own_label(nic), listener_.local_port(),
               own_hosts(nic.config.host, nic)},
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  watch(kick_.fd(), Source::kKick);
  watch(listener_.fd(), Source::kListener);
  watch(nic_.context->async_fd, Source::kDevice);
  if (nic_.channel) watch(nic_.channel->fd, Source::kCompletions);
  thread_ = std::thread([this] { run(); });
}

Control::~Control() {
  stop_.store(true, std::memory_order_release);  // pairs with the acquire in run()
  kick_();
  thread_.join();
}

void Control::watch(int fd, Source source, uint32_t id) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = uint64_t{id} << 32 | static_cast<uint32_t>(source);
  MOE_P2P_CHECK(epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0, Code::kResourceExhausted,
                nic_.name(), ": watching a file descriptor failed");
}

// --- the thread ---

void Control::run() noexcept {
  platform::set_current_thread("moe_p2p.verbs", -1);
  while (!stop_.load(std::memory_order_acquire)) {  // pairs with the destructor
    epoll_event events[16];
    const int num = epoll_wait(epoll_.fd(), events, 16, kLookMs);
    for (int i = 0; i < num; ++i) {
      const auto source = static_cast<Source>(static_cast<uint32_t>(events[i].data.u64));
      try {
        handle(source, static_cast<uint32_t>(events[i].data.u64 >> 32));
      } catch (const std::exception& error) {
        MOE_P2P_LOG(base::LogLevel::kError, nic_.name(), ": ", error.what());
      }
    }
    const std::lock_guard lock(mutex_);
    give_up_late_repairs();
  }
}

void Control::handle(Source source, uint32_t id) {
  switch (source) {
    case Source::kListener: return accept_sessions();
    case Source::kSession: return serve(id);
    case Source::kDevice: return read_device_events();
    case Source::kCompletions: {
      Cq* cq = nullptr;
      void* context = nullptr;
      while (nic_.api.get_cq_event(nic_.channel.get(), &cq, &context) == 0)
        nic_.api.ack_cq_events(cq, 1);
      platform::notify_all(*waker_);
      return;
    }
    case Source::kKick: {
      kick_.clear();
      const std::lock_guard lock(mutex_);
      return look_at_peers();
    }
    case Source::kPeer: {
      const std::lock_guard lock(mutex_);
      const auto found = peers_.find(id);
      if (found != peers_.end() && found->second->link) hear(*found->second);
      return;
    }
  }
}

void Control::changed() {
  changes_.num_changes.fetch_add(1, std::memory_order_release);  // pairs with VerbsDomain::poll
  if (waker_) platform::notify_all(*waker_);
}

void Control::read_device_events() {
  AsyncEvent event{};
  while (nic_.api.get_async_event(nic_.context.get(), &event) == 0) {
    nic_.api.ack_async_event(&event);
    if (event.type == kEventPortError) {
      MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": the link went down");
    } else if (event.type == kEventPortActive) {
      MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": the link is up again");
    } else if (event.type == kEventDeviceFatal) {
      MOE_P2P_LOG(base::LogLevel::kError, nic_.name(), ": the device reports a fatal error");
      const std::lock_guard lock(mutex_);
      for (auto& [id, peer] : peers_)
        end_peer(*peer, Code::kTransport, "the own device reports a fatal error");
    }
  }
}

// --- peers that connect to us ---

void Control::accept_sessions() {
  while (Socket link = listener_.accept()) {
    const uint32_t id = next_session_++;
    watch(link.fd(), Source::kSession, id);
    sessions_[id].link = std::move(link);
  }
}

void Control::serve(uint32_t session_id) {
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  Bytes message;
  Socket::Got got = Socket::Got::kNothing;
  try {
    while ((got = session.link.receive(message)) == Socket::Got::kMessage) {
      const Hello hello = Hello::decode(message);
      // Not for us: a host and port of somebody else that is ours by chance.
      if (hello.nic_id != address_.nic_id || !session.link.send(answer(session, hello).encode()))
        got = Socket::Got::kEnd;
      if (got == Socket::Got::kEnd) break;
    }
  } catch (const Error& error) {  // not a message of ours
    MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": ", error.what());
    got = Socket::Got::kEnd;
  }
  if (got == Socket::Got::kEnd) end_session(session_id);
}

Answer Control::answer(Session& session, const Hello& hello) {
  Answer answer;
  answer.port = own_port(nic_);
  try {
    for (const QpAddress& lane : hello.lanes) {
      const auto old = session.lanes.find(lane.lane);
      if (old != session.lanes.end()) {
        session.lanes.erase(old);
        changes_.num_lost_receives.fetch_add(1, std::memory_order_relaxed);
        changed();
      }
      Owned<Qp> qp = make_qp(nic_, false);
      make_ready_to_receive(nic_, *qp, hello.port, lane, hello.label);
      answer.lanes.push_back({lane.lane, qp->qp_num, 0});
      session.lanes.emplace(lane.lane, std::move(qp));
    }
  } catch (const Error& error) {
    answer.refusal = error.what();
  }
  return answer;
}

void Control::end_session(uint32_t session_id) {
  const auto found = sessions_.find(session_id);
  const size_t num = found->second.lanes.size();
  sessions_.erase(found);
  changes_.num_lost_receives.fetch_add(num, std::memory_order_relaxed);
  changed();
}

// --- peers that we connect to ---

PeerId Control::connect(std::span<const std::byte> address) {
  auto peer = std::make_unique<Peer>();
  peer->address = NicAddress::decode(address);
  for (uint32_t i = 0; i < nic_.config.qps_per_peer; ++i) {
    auto& lane = *peer->lanes.emplace_back(std::make_unique<Lane>());
    lane.peer = peer.get();
    lane.index = i;
    lane.owner = make_qp(nic_, true);
    lane.qp = lane.owner.get();
    lane.psn = random_psn();
  }
  peer->link = shake_hands(*peer);
  return add(std::move(peer));
}

PeerId Control::add(std::unique_ptr<Peer> peer) {
  const std::lock_guard lock(mutex_);
  for (size_t tried = 0; tried < PeerTable::kCapacity; ++tried) {
    const PeerId id = next_id_++;
    auto& entry = table_.entries[id % PeerTable::kCapacity];
    if (entry.load(std::memory_order_acquire) != nullptr) continue;
    peer->id = id;
    watch(peer->link.fd(), Source::kPeer, id);
    Peer* const shown = peer.get();
    peers_.emplace(id, std::move(peer));
    entry.store(shown, std::memory_order_release);  // pairs with PeerTable::find
    return id;
  }
  throw Error(Code::kResourceExhausted, base::concat(nic_.name(), ": ", PeerTable::kCapacity,
                                                     " peers are connected already"));
}

Bytes Control::hello_for(Peer& peer, std::span<Lane* const> lanes) const {
  Hello hello{peer.address.nic_id, address_.label, own_port(nic_), {}};
  for (const Lane* lane : lanes)
    hello.lanes.push_back({lane->index, lane->owner->qp_num, lane->psn});
  return hello.encode();
}

// Every address of the peer in turn, again and again with more patience until the deadline. Asking
// twice does no harm: what the peer made for a connection that ended is gone with it.
Socket Control::shake_hands(Peer& peer) {
  const Deadline deadline = Clock::now() + nic_.config.handshake_timeout;
  std::vector<Lane*> lanes;
  for (const auto& lane : peer.lanes) lanes.push_back(lane.get());
  const Bytes hello = hello_for(peer, lanes);
  int num_refusals = 0;
  Code code = Code::kTimeout;
  for (milliseconds patience = kFirstTry;; patience *= 2) {
    std::string tried;
    bool all_refused = true;
    for (const std::string& host : peer.address.hosts) {
      const Deadline until = std::min(deadline, Clock::now() + patience);
      try {
        Socket link = Socket::dial(host, peer.address.tcp_port, until);
        MOE_P2P_CHECK(link.send(hello), Code::kPeerDead, host, ": the connection ended");
        const Answer answer = Answer::decode(link.wait_message(until));
        finish(peer, answer);
        return link;
      } catch (const Error& error) {
        if (error.code() == Code::kTransport) throw;  // reached, and it cannot work
        all_refused = all_refused && error.code() == Code::kPeerDead;
        tried += base::concat(tried.empty() ? "" : "; ", host, ": ", error.what());
      }
    }
    num_refusals = all_refused ? num_refusals + 1 : 0;
    if (num_refusals == kMaxRefusals) code = Code::kPeerDead;
    MOE_P2P_CHECK(Clock::now() < deadline && code == Code::kTimeout, code, nic_.name(),
                  ": no handshake with ", peer.address.label, ". Tried ", tried,
                  ". Does the process still run, and may TCP pass between the hosts? host= names "
                  "another address of a process, handshake_ms= gives more time");
    poll(nullptr, 0, static_cast<int>(kPause.count()));
  }
}

void Control::finish(Peer& peer, const Answer& answer) const {
  MOE_P2P_CHECK(answer.refusal.empty(), Code::kTransport, nic_.name(), ": ", peer.address.label,
                " cannot be connected: ", answer.refusal);
  for (const QpAddress& end : answer.lanes) {
    MOE_P2P_CHECK(end.lane < peer.lanes.size(), Code::kTransport, nic_.name(), ": ",
                  peer.address.label, " answers for a lane that there is not");
    Lane& lane = *peer.lanes[end.lane];
    make_ready_to_receive(nic_, *lane.owner, answer.port, end, peer.address.label);
    make_ready_to_send(nic_, *lane.owner, lane.psn);
  }
}

void Control::disconnect(PeerId id) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  MOE_P2P_CHECK(found != peers_.end() && !found->second->leaving.load(std::memory_order_relaxed),
                Code::kInvalidArgument, nic_.name(),
                ": disconnecting a peer that is not connected");
  Peer& peer = *found->second;
  peer.leaving.store(true, std::memory_order_release);  // pairs with Sender::look_at
  end_peer(peer, Code::kClosed, "");
  peer.link = Socket();
}

std::string Control::peer_label(PeerId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? "a peer that was disconnected" : found->second->address.label;
}

std::string Control::first_loss() const {
  const std::lock_guard lock(mutex_);
  return first_loss_;
}

// --- with the mutex held ---

void Control::hear(Peer& peer) {
  Bytes message;
  for (;;) {
    const Socket::Got got = peer.link.receive(message);
    if (got == Socket::Got::kNothing) return;
    if (got == Socket::Got::kEnd) {
      peer.link = Socket();
      return end_peer(peer, Code::kPeerDead,
                      "its process has ended or closed the NIC: the handshake's connection closed");
    }
    try {
      const Answer answer = Answer::decode(message);
      finish(peer, answer);
      for (const QpAddress& end : answer.lanes) {
        Lane& lane = *peer.lanes[end.lane];
        lane.qp = lane.owner.get();
        // release: pairs with the acquire in Sender::look_at, which then posts to `qp`.
        lane.repair.store(Lane::Repair::kRepaired, std::memory_order_release);
      }
      peer.answer_by = Deadline::max();
      changed();
    } catch (const Error& error) {
      MOE_P2P_LOG(base::LogLevel::kError, error.what());
      return end_peer(peer, Code::kTransport, "a connection could not be made anew");
    }
  }
}

void Control::end_peer(Peer& peer, Code why, const char* sign) {
  Code none = Code::kOk;
  // release: pairs with the acquire in Sender::look_at; before the queue pairs break.
  peer.end.compare_exchange_strong(none, why, std::memory_order_release, std::memory_order_relaxed);
  if (none == Code::kOk && why != Code::kClosed && first_loss_.empty())
    first_loss_ = base::concat(nic_.name(), ": lost ", peer.address.label, ": ", sign);
  for (const auto& lane : peer.lanes) break_qp(nic_, *lane->owner);
  peer.answer_by = Deadline::max();
  changed();
}

void Control::look_at_peers() {
  // acquire: pairs with Sender::look_at_peers, which does not touch the peer after that.
  std::erase_if(peers_, [](const auto& entry) {
    return entry.second->released.load(std::memory_order_acquire);
  });
  for (auto& [id, peer] : peers_) {
    for (const auto& lane : peer->lanes) {
      // acquire: pairs with the release in Sender: the polling thread has let go of the queue pair.
      const auto wish = lane->repair.load(std::memory_order_acquire);
      if (wish == Lane::Repair::kBreak) {
        break_qp(nic_, *lane->owner);
        lane->repair.store(Lane::Repair::kNone, std::memory_order_relaxed);
      } else if (wish == Lane::Repair::kWanted &&
                 peer->end.load(std::memory_order_relaxed) == Code::kOk) {
        begin_repair(*peer, *lane);
      }
    }
  }
}

void Control::begin_repair(Peer& peer, Lane& lane) {
  try {
    lane.owner = make_qp(nic_, true);
    lane.psn = random_psn();
    lane.repair.store(Lane::Repair::kRepairing, std::memory_order_relaxed);
    peer.answer_by = Clock::now() + nic_.config.handshake_timeout;
    Lane* const lanes[] = {&lane};
    if (!peer.link.send(hello_for(peer, lanes)))
      end_peer(peer, Code::kPeerDead, "it cannot be asked for a new connection");
  } catch (const Error& error) {
    MOE_P2P_LOG(base::LogLevel::kError, error.what());
    end_peer(peer, Code::kTransport, "a connection could not be made anew");
  }
}

void Control::give_up_late_repairs() {
  const auto now = Clock::now();
  for (auto& [id, peer] : peers_) {
    if (peer->answer_by > now) continue;
    end_peer(*peer, Code::kPeerDead, "it did not answer when a connection had to be made anew");
  }
}

}  // namespace moe_p2p::provider::verbs
