// The settings of the software NIC, parsed once when a Domain is opened.
//
//   seed=0             0: everything in order. N: the adversary, reproducible from N (chaos.h)
//   ring_kib=1024      payload ring of one channel; a power of two. Smaller: more turns per write
//   channels=256       peers that may be connected *to* this NIC at a time
//   max_in_flight=1024 accepted and not yet completed writes; a small ring takes fewer per channel
//   max_write_bytes=1073741824
//   gbps=0             0: as fast as memory. N: link rate in Gbit/s (link_model.h), not with a seed
//   latency_us=0       one way, added to the link rate
//   fail_nth=0         N: the N-th accepted write (from 1) fails with kTransport
//   ordered=0          1: stores flags behind their writes, in host memory or that of an emulated
//                      GPU. With a seed as strictly as a reliable connection does: the flags of a
//                      channel in order, each some time after its write, all else in any order
//   mutate=none        early_imm: BREAKS the contract, immediates come before their payload;
//                      early_flag: flags do
//   copy_kernel=0      CUfunction of moe_p2p_copy on the one GPU (platform/copy_kernel.h); 0: its
//                      copy engines carry all writes of GPU memory
//   row_kernel=0       CUfunction of moe_p2p_rows, likewise (platform/row_copies.h): carries writes
//                      of up to 4 MiB to memory that peers lend; 0: its copy engines do
//   addressing=virtual offset: peers count from the start of the region, as with some fabrics
//   trace=             PATH: the order of posts and ends, to PATH.<nic> (trace.h)
#pragma once

#include <cstdint>
#include <string>

namespace moe_p2p::provider::loopback {

struct Config {
  uint64_t seed = 0;
  uint64_t ring_bytes = 0;
  uint32_t num_channels = 0;
  uint32_t max_in_flight = 0;
  // Writes one channel can have in flight, a power of two: enough for max_in_flight, and no more
  // than a small ring could hold, or 64 ranks in one process need gigabytes of Partials.
  uint32_t window = 0;
  uint32_t max_write_bytes = 0;
  double gbps = 0;
  double latency_us = 0;
  // Of the timed NIC (timed.h), which is this one with other settings:
  double post_us = 0;     // the link model's cost of posting a write
  double message_us = 0;  // least time between two writes on the link
  bool in_place = false;  // the payload of writes to windows of map_remote() lies there already
  bool hollow = false;    // writes of GPU memory carry no payload at all
  bool flush = false;     // what arrives in GPU memory is flushed as behind a real NIC
  uint64_t fail_nth = 0;
  uint64_t copy_kernel = 0;
  uint64_t row_kernel = 0;
  bool ordered = false;
  bool early_imm = false;
  bool early_flag = false;
  bool offset_addressing = false;
  std::string trace;
};

// Throws Error{kInvalidArgument} that names the key and its valid values.
Config parse_config(const std::string& settings);

}  // namespace moe_p2p::provider::loopback
