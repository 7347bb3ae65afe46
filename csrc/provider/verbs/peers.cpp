#include "provider/verbs/peers.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "platform/process.h"
#include "platform/thread.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;
using base::Error;
using platform::Clock;
using platform::Deadline;
using std::chrono::milliseconds;

namespace {

// First time limit of one address of a peer, until its greeting arrives; then the next is tried.
// The target accepts connections before it makes queue pairs for earlier ones (Sessions::accept),
// so this need not grow with the number of peers; the answer may take all of handshake_ms.
constexpr milliseconds kFirstTry{1000};
constexpr milliseconds kPause{50};
// Times that all addresses must refuse before the peer counts as dead.
constexpr int kMaxRefusals = 3;
// How long a queue pair in error may take to complete all its writes. Too short: a lane that could
// be repaired fails.
constexpr milliseconds kEndOfLane{2000};
// Time between two checks of deadlines.
constexpr int kLookMs = 250;

std::string own_label(const Nic& nic) {
  return base::concat(nic.context->device->name, " of ", platform::host_name(), " (pid ", getpid(),
                      ")");
}

template <typename T>
T random_bytes() {
  T value{};
  base::fill_random(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

}  // namespace

Control::Control(const Nic& nic, PeerTable& table, const Kick& kick, Changes& changes,
                 platform::EventCount* waker)
    : nic_(nic),
      table_(table),
      kick_(kick),
      changes_(changes),
      waker_(waker),
      shared_secret_(environment_secret()),
      secret_(shared_secret_ ? *shared_secret_ : random_bytes<Secret>()),
      events_(nic.name()),
      sessions_(nic, events_, changes, secret_),
      address_{random_bytes<uint64_t>(), own_label(nic), sessions_.port(),
               own_hosts(nic.config.host, nic),
               shared_secret_ ? std::nullopt : std::optional(secret_)} {
  sessions_.set_id(address_.nic_id);
  events_.add(kick_.fd(), Source::kKick);
  events_.add(nic_.context->async_fd, Source::kDevice);
  if (nic_.channel) events_.add(nic_.channel->fd, Source::kCompletions);
  thread_ = std::thread([this] { run(); });
}

Control::~Control() {
  stop_.store(true, std::memory_order_release);  // pairs with the acquire in run()
  kick_();
  thread_.join();
}

// --- the thread ---

void Control::run() noexcept {
  platform::set_current_thread("moe_p2p.verbs", -1);
  while (!stop_.load(std::memory_order_acquire)) {  // pairs with the destructor
    const auto guarded = [this](auto&& step) {
      try {
        step();
      } catch (const std::exception& error) {
        MOE_P2P_LOG(base::LogLevel::kError, nic_.name(), ": ", error.what());
      }
    };
    events_.wait(kLookMs, [&](Events::Event event) { guarded([&] { handle(event); }); });
    guarded([&] { look(); });
  }
}

void Control::handle(Events::Event event) {
  switch (event.source) {
    case Source::kListener: return sessions_.accept();
    case Source::kSession: return sessions_.serve(event.id);
    case Source::kDevice: return read_device_events();
    case Source::kCompletions: {
      Cq* cq = nullptr;
      void* context = nullptr;
      while (nic_.api.get_cq_event(nic_.channel.get(), &cq, &context) == 0)
        nic_.api.ack_cq_events(cq, 1);
      platform::notify_all(*waker_);
      return;
    }
    case Source::kKick: return kick_.clear();  // for look()
    case Source::kPeer: {
      const std::lock_guard lock(mutex_);
      const auto found = peers_.find(event.id);
      if (found != peers_.end() && found->second->link) read_answers(*found->second);
      return;
    }
  }
}

// Serves the polling thread's requests, and deadlines.
void Control::look() {
  sessions_.look();
  const std::lock_guard lock(mutex_);
  // acquire: pairs with Sender::look_at_peers, which does not use the peer after that.
  std::erase_if(peers_, [](const auto& entry) {
    return entry.second->released.load(std::memory_order_acquire);
  });
  const auto now = Clock::now();
  for (auto& [id, peer] : peers_) {
    for (const auto& lane : peer->lanes) look_at_lane(*peer, *lane);
    if (peer->answer_by <= now)
      end_peer(*peer, Code::kPeerDead, "it did not answer when a connection had to be made anew");
  }
  for (auto& [tag, over] : severed_) {
    if (over) continue;
    sessions_.sever(tag);
    over = !holds(tag);
  }
  severed_one_.notify_all();
  // acquire: pairs with the release in VerbsDomain::refill.
  if (gave_up_ || changes_.receive_error.load(std::memory_order_acquire) == 0) return;
  gave_up_ = true;
  end_peers("the own NIC takes no more receives");
  sessions_.end_all();
}

void Control::read_device_events() {
  AsyncEvent event{};
  while (nic_.api.get_async_event(nic_.context.get(), &event) == 0) {
    nic_.api.ack_async_event(&event);
    note_device_event(event);
  }
}

void Control::note_device_event(const AsyncEvent& event) {
  switch (event.type) {
    case kEventLastReceive: return sessions_.last_receive(event.element);
    case kEventDeviceFatal: return lose_nic("the own device reports a fatal error");
    case kEventCqError:
      return lose_nic("the own device reports an error of its completion queue (IBV_EVENT_CQ_ERR)");
    case kEventSrqError:
      return lose_nic("the own device reports an error of its receive queue (IBV_EVENT_SRQ_ERR)");
    case kEventQpFatal: return report_qp(event.element, "failed (IBV_EVENT_QP_FATAL)");
    case kEventQpRequestError:
      return report_qp(event.element, "had a request that is not valid (IBV_EVENT_QP_REQ_ERR)");
    case kEventQpAccessError:
      return report_qp(event.element, "named memory that it may not use (IBV_EVENT_QP_ACCESS_ERR)");
    case kEventGidChange:
    case kEventLidChange: return report_addresses();
    case kEventPortError:
    case kEventPortActive:
      MOE_P2P_LOG(
          base::LogLevel::kWarning, nic_.name(),
          event.type == kEventPortError ? ": the link went down" : ": the link is up again");
      return;
    default: return;  // a path that migrated, a new subnet manager: nothing to do or report
  }
}

// No completion comes any more, so nothing else would end what is under way here, or what peers
// send here.
void Control::lose_nic(const char* sign) {
  const std::string text = base::concat(nic_.name(), ": ", sign,
                                        "; all peers of this NIC are given up. See the kernel log");
  MOE_P2P_LOG(base::LogLevel::kError, text);
  {
    const std::lock_guard lock(mutex_);
    if (nic_loss_.empty()) nic_loss_ = text;
    end_peers(sign);
  }
  sessions_.end_all();
}

// The queue pair's own writes fail, or its peer's: this names the connection beside them.
void Control::report_qp(const void* qp, const char* sign) {
  std::string of = sessions_.host_of(qp);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : peers_)
      for (const auto& lane : peer->lanes)
        if (lane->owner.get() == qp) of = "to " + peer->address.label;
  }
  MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": a connection ",
              of.empty() ? "that has ended" : of, " ", sign);
}

void Control::report_addresses() {
  const uint8_t number = nic_.config.port;
  PortAttr port{};
  Gid gid{};
  if (nic_.api.query_port(nic_.context.get(), number, &port) != 0 ||
      nic_.api.query_gid(nic_.context.get(), number, static_cast<int>(nic_.gid.index), &gid) != 0)
    return;
  const auto changed = [&](const auto&... what) {
    MOE_P2P_LOG(base::LogLevel::kWarning, nic_.name(), ": its ", what...,
                ": peers can no longer be connected from here, and connections that are open may "
                "break; make this engine anew");
  };
  if (gid_text(gid) != gid_text(nic_.gid.gid))
    changed("GID ", nic_.gid.index, " changed from ", gid_text(nic_.gid.gid), " to ",
            gid_text(gid));
  if (!nic_.ethernet && port.lid != nic_.port.lid)
    changed("LID changed from ", nic_.port.lid, " to ", port.lid);
}

// --- peers that we connect to ---

PeerId Control::connect(std::span<const std::byte> address, int priority, uint64_t tag) {
  const std::string loss = nic_loss();
  MOE_P2P_CHECK(loss.empty(), Code::kTransport, loss);
  auto peer = std::make_unique<Peer>();
  peer->priority = priority;
  peer->tag = tag;
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
  MOE_P2P_CHECK(!severed_.contains(peer->tag), Code::kClosed, nic_.name(),
                ": connections of this tag were severed");
  for (size_t tried = 0; tried < PeerTable::kCapacity; ++tried) {
    const PeerId id = next_id_++;
    auto& entry = table_.entries[id % PeerTable::kCapacity];
    if (entry.load(std::memory_order_acquire) != nullptr) continue;
    peer->id = id;
    events_.add(peer->link.fd(), Source::kPeer, id);
    Peer* const shown = peer.get();
    peers_.emplace(id, std::move(peer));
    entry.store(shown, std::memory_order_release);  // pairs with PeerTable::find
    return id;
  }
  throw Error(Code::kResourceExhausted,
              base::concat(nic_.name(), ": ", PeerTable::kCapacity,
                           " peers are connected already; disconnect some"));
}

Bytes Control::hello_for(Peer& peer, std::span<Lane* const> lanes) const {
  Hello hello{peer.address.nic_id, address_.label, peer.tag, own_port(nic_, peer.priority), {}};
  for (const Lane* lane : lanes)
    hello.lanes.push_back({lane->index, lane->owner->qp_num, lane->psn});
  return hello.encode();
}

const Secret& Control::secret_of(const NicAddress& address) const {
  MOE_P2P_CHECK(address.secret || shared_secret_, Code::kInvalidArgument, nic_.name(), ": ",
                address.label,
                " was started with MOE_P2P_SECRET and this process without; give it the same");
  return address.secret ? *address.secret : *shared_secret_;
}

// `first` is the deadline of the greeting, `last` of the answer.
Socket Control::try_host(Peer& peer, const std::string& host, Deadline first, Deadline last) const {
  std::vector<Lane*> lanes;
  for (const auto& lane : peer.lanes) lanes.push_back(lane.get());
  Socket link = Socket::dial(host, peer.address.tcp_port, first);
  const auto greeting = Greeting::decode(link.wait_message(first));
  const auto nonce = random_bytes<Nonce>();
  peer.proof.emplace(Proof::Side::kConnector, secret_of(peer.address), greeting.nonce, nonce);
  Bytes hello(nonce.begin(), nonce.end());
  const Bytes sealed = peer.proof->seal(hello_for(peer, lanes));
  hello.insert(hello.end(), sealed.begin(), sealed.end());
  MOE_P2P_CHECK(link.send(hello), Code::kPeerDead, host, ": the connection ended");
  const auto answer = peer.proof->open(link.wait_message(last));
  MOE_P2P_CHECK(answer, Code::kPeerDead, "the answer does not prove knowledge of the secret");
  finish(peer, Answer::decode(*answer));
  return link;
}

// Tries every address of the peer in turn, repeatedly with longer time limits, until the deadline.
// A repeated request is harmless: what the peer made for a connection ends with it.
Socket Control::shake_hands(Peer& peer) {
  const Deadline deadline = Clock::now() + nic_.config.handshake_timeout;
  static_cast<void>(secret_of(peer.address));
  int num_refusals = 0;
  Code code = Code::kTimeout;
  for (milliseconds patience = kFirstTry;; patience *= 2) {
    std::string tried;
    bool all_refused = true;
    for (const std::string& host : peer.address.hosts) {
      const Deadline until = std::min(deadline, Clock::now() + patience);
      try {
        return try_host(peer, host, until, deadline);
      } catch (const Error& error) {
        // The peer was reached and cannot be connected, or a signal arrived.
        if (error.code() == Code::kTransport || error.code() == Code::kAborted) throw;
        all_refused = all_refused && error.code() == Code::kPeerDead;
        tried += base::concat(tried.empty() ? "" : "; ", host, ": ", error.what());
      }
    }
    num_refusals = all_refused ? num_refusals + 1 : 0;
    if (num_refusals == kMaxRefusals) code = Code::kPeerDead;
    MOE_P2P_CHECK(Clock::now() < deadline && code == Code::kTimeout, code, nic_.name(),
                  ": no handshake with ", peer.address.label, ". Tried ", tried,
                  ". Does the process still run, may TCP pass between the hosts, and have both the "
                  "same MOE_P2P_SECRET, if any? host= names another address of a process, "
                  "handshake_ms= gives more time");
    poll(nullptr, 0, static_cast<int>(kPause.count()));
    check_interrupt();
  }
}

void Control::finish(Peer& peer, const Answer& answer) const {
  MOE_P2P_CHECK(answer.refusal.empty(), Code::kTransport, nic_.name(), ": ", peer.address.label,
                " cannot be connected: ", answer.refusal);
  for (const QpAddress& end : answer.lanes) {
    MOE_P2P_CHECK(end.lane < peer.lanes.size(), Code::kTransport, nic_.name(), ": ",
                  peer.address.label, " answers for a lane that does not exist");
    Lane& lane = *peer.lanes[end.lane];
    make_ready_to_receive(nic_, *lane.owner, answer.port, end, peer.address.label);
    make_ready_to_send(nic_, *lane.owner, answer.port, lane.psn);
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

// The control thread ends what leads here, in look().
bool Control::sever(uint64_t tag, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (const auto& [id, peer] : peers_)
    MOE_P2P_CHECK(peer->tag != tag || peer->leaving.load(std::memory_order_relaxed),
                  Code::kInvalidArgument, nic_.name(),
                  ": severing a peer that is connected; disconnect it first");
  severed_.try_emplace(tag, false);
  kick_();
  return severed_one_.wait_until(lock, deadline, [&] { return severed_[tag]; });
}

std::string Control::peer_label(PeerId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? "a peer that was disconnected" : found->second->address.label;
}

std::string Control::nic_loss() const {
  const std::lock_guard lock(mutex_);
  return nic_loss_;
}

std::string Control::first_loss() const {
  const std::lock_guard lock(mutex_);
  return first_loss_;
}

// --- with the mutex held ---

void Control::read_answers(Peer& peer) {
  Bytes sealed;
  for (;;) {
    const Socket::Got got = peer.link.receive(sealed);
    if (got == Socket::Got::kNothing) return;
    if (got == Socket::Got::kEnd) {
      peer.link = Socket();
      return end_peer(peer, Code::kPeerDead,
                      "its process has ended or closed the NIC: the handshake's connection closed");
    }
    try {
      const auto opened = peer.proof->open(sealed);
      MOE_P2P_CHECK(opened, Code::kTransport, nic_.name(), ": ", peer.address.label,
                    " answers without proof of the secret");
      const Answer answer = Answer::decode(*opened);
      finish(peer, answer);
      for (const QpAddress& end : answer.lanes) {
        Lane& lane = *peer.lanes[end.lane];
        lane.qp = lane.owner.get();
        // release: pairs with the acquire in Sender::look_at, which then posts to `qp`.
        lane.repair.store(Lane::Repair::kRepaired, std::memory_order_release);
      }
      peer.answer_by = Deadline::max();
      changes_.announce();
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
  for (const auto& lane : peer.lanes)
    if (lane->owner) break_qp(nic_, *lane->owner);
  peer.answer_by = Deadline::max();
  changes_.announce();
}

void Control::end_peers(const char* sign) {
  for (auto& [id, peer] : peers_) end_peer(*peer, Code::kTransport, sign);
}

bool Control::holds(uint64_t tag) const {
  return sessions_.holds(tag) ||
         std::ranges::any_of(peers_, [&](const auto& entry) { return entry.second->tag == tag; });
}

void Control::look_at_lane(Peer& peer, Lane& lane) {
  // acquire: pairs with the releases in Sender: the polling thread does not use the queue pair.
  const auto wish = lane.repair.load(std::memory_order_acquire);
  if (wish == Lane::Repair::kWanted && peer.end.load(std::memory_order_relaxed) == Code::kOk)
    begin_repair(peer, lane);
  if (wish != Lane::Repair::kEnding) {
    lane.end_by = Deadline::max();
    lane.end_ticket = 0;
  } else if (lane.end_by == Deadline::max()) {
    break_qp(nic_, *lane.owner);
    lane.end_by = Clock::now() + kEndOfLane;
  } else if (lane.end_ticket == 0 && Clock::now() >= lane.end_by) {
    // The polling thread may not have run. release: pairs with VerbsDomain::take_changes.
    lane.end_ticket = 1 + changes_.drain_wanted.fetch_add(1, std::memory_order_release);
    changes_.announce();
  } else if (lane.end_ticket != 0 &&  // acquire: pairs with VerbsDomain::drained
             changes_.drain_done.load(std::memory_order_acquire) >= lane.end_ticket) {
    lane.owner.reset();
    auto expected = Lane::Repair::kEnding;
    // acq_rel: pairs with Sender::marker_came: exactly one of the two exchanges succeeds.
    lane.repair.compare_exchange_strong(expected, Lane::Repair::kGivenUp,
                                        std::memory_order_acq_rel);
    changes_.announce();
  }
}

void Control::begin_repair(Peer& peer, Lane& lane) {
  try {
    lane.owner = make_qp(nic_, true);
    lane.psn = random_psn();
    lane.repair.store(Lane::Repair::kRepairing, std::memory_order_relaxed);
    peer.answer_by = Clock::now() + nic_.config.handshake_timeout;
    Lane* const lanes[] = {&lane};
    if (!peer.link.send(peer.proof->seal(hello_for(peer, lanes))))
      end_peer(peer, Code::kPeerDead, "the request for a new connection could not be sent");
  } catch (const Error& error) {
    MOE_P2P_LOG(base::LogLevel::kError, error.what());
    end_peer(peer, Code::kTransport, "a connection could not be made anew");
  }
}

}  // namespace moe_p2p::provider::verbs
