// Dispatch and combine of one rank: the calls behind torch.ops.moe_p2p.*, on plain pointers.
//
// A call is one or more steps (docs/protocol.md). A *paired* dispatch of one chunk leaves its step
// open for the combine that follows. A *solo* call closes its steps itself: dispatches that need
// more than one chunk or ask for it, and combines whose handle's step is already closed.
// All ranks make the same calls in the same order with the same max_tokens, solo and types.
//
// One caller thread at a time per object. Bad input throws Error{kInvalidArgument} before anything
// is sent, and the object stays usable. Timeouts, dead peers and protocol errors break it: the
// error text is latched and every later call throws it again. With options.masks a rank that is
// late or gone is left out instead, in that call and all later ones.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "engine/transfer_engine.h"
#include "moe/call.h"
#include "moe/options.h"
#include "moe/plan/plan.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe {

class DeviceBackend;
class HostBackend;
struct Counters;
struct Progress;
struct DeviceMemory;

class AllToAll {
 public:
  // `proxy` is the thread that polls `engine`; null when the caller turns the loop (simulations).
  AllToAll(engine::TransferEngine& engine, proxy::ProxyThread* proxy,
           const AllToAllOptions& options);
  ~AllToAll();  // close()

  const Plan& plan() const noexcept;
  // What every other rank's connect() needs.
  base::Bytes address() const;
  // Ranks of this node whose process has ended before they closed. Once connected; any thread.
  std::vector<int> ended() const;
  // Takes the addresses of all ranks, in rank order; empty: no process has that rank, and it is
  // masked. Every rank may call dispatch once all ranks
  // have returned from connect() (the bootstrap's barrier).
  void connect(std::span<const base::Bytes> addresses);
  // Waits until all that this rank has sent arrived, reports it to its partners and neighbours, and
  // frees everything. Idempotent. With options.device no kernel may run any more.
  void close() noexcept;

  // With options.device: sets the GPU's memory. Calls then return once their kernels are launched.
  void use_device(const DeviceMemory& memory);
  DeviceBackend& device();
  // The node's signal memory as this process maps it, [L]; use_signals() takes the GPU's addresses.
  std::vector<std::span<std::byte>> signals() const;
  void use_signals(const std::vector<uint64_t>& device_addresses);
  // Where the world changes: the calls of this rank are from now on those of this object, no longer
  // those of `before`, which is closed next; null: it is the first. Between two calls, in the order
  // of the stream.
  void enter(AllToAll* before, const platform::Stream& stream);

  int64_t handle_words(int64_t num_rows, int64_t max_tokens) const;

  // Either half of a call, or both; null leaves a half out. A send half returns as soon as its own
  // work is done. For calls of at most steps_in_flight chunks; larger ones must be whole.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv);
  void combine(const CombineSend* send, const CombineRecv* recv);
  // Closes the step of a paired dispatch that gets no combine. All ranks release it.
  void release(Handle handle, const platform::Stream& stream = {});

  // Takes masked ranks back, where all ranks are of one node. Each rank calls it, equally often,
  // and waits for nobody: a rank that then calls before another has called this waits for it in
  // that call, and masks it at the deadline. Open calls end. No call of this rank may run, nor a
  // graph's; captured calls stay valid.
  void clean_masks(const platform::Stream& stream = {});

  // From now on a call that needs the step of an older paired dispatch releases it, instead of
  // being refused. All ranks call it; with options.device after use_device().
  void release_oldest();

  // Gathers the same number of values from every rank, [W, n] on each; waits for all ranks. Runs on
  // the host, with or without options.device, and independently of kernels.
  void gather_counts(std::span<const int32_t> values, std::span<int32_t> gathered);

  // Waits until a kernel before this call in its stream has stored `number` into the word, in
  // memory that both see.
  void await_counts(const uint32_t& word, uint32_t number);

  // Exchange::times of dispatch, then of combine.
  std::array<int64_t, 4> exchange_times();

  // What a replay must know beside events (moe/replay/rank.h). Once connected; any thread.
  struct Snapshot {
    std::vector<int64_t> flags;  // [3, S, W] this rank's flags (kernels/abi/signal.h)
    std::vector<int64_t> nics;   // [N] of this rank and its partners
  };
  Snapshot snapshot() const;
  // Records the parts of calls on a host from now on, as TransferEngine::record() does.
  std::unique_ptr<base::Recording> record(size_t num_events);

  // How arrivals from other nodes are seen, as connect() has chosen: "write", "gdrcopy" or "relay",
  // or "none" within a node.
  const char* arrival_flags() const noexcept;

  // Empty while the object is usable; else the error text.
  std::string broken() const;
  // Throws that error, as the next call would. Neither waits nor launches anything. Throws once,
  // too, with options.poison, for what has been lost since it did so last; no call throws that.
  void check();

  Lost lost() const noexcept;
  // Any thread, beside calls.
  const Counters& counters() const noexcept;
  // Tells neighbours how far kernels of this rank are, which have begun step `step` last, and
  // returns which ranks are behind, but for `masked`; names them where it has waited so long, and
  // not 0. Once connected; a thread beside calls, not beside close().
  std::vector<int> watch(const Progress& progress, uint64_t step, std::chrono::milliseconds waited,
                         const std::vector<int64_t>& masked);

  // For a simulation, which turns the loop itself and advances calls (moe/host/calls.h) one by one.
  HostBackend& host();
  proxy::ProxyTask* task() noexcept;
  // The first half of close(), and whether it is done, which close() waits for where there is a
  // proxy.
  void leave();
  bool has_left() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe_p2p::moe
