#include "moe/device/fault.h"

#include "moe/plan/step.h"

namespace moe_p2p::moe {

using base::Code;

base::Error error_of(const abi::Fault& fault, int rank, int num_experts, const std::string& gone) {
  const char* phase = phase_name(static_cast<abi::Phase>(fault.phase));
  const std::string head = base::concat("rank ", rank, ": ", phase, " of step ", fault.step);
  const auto got = static_cast<int64_t>(fault.got);
  switch (fault.raised) {
    case abi::kTimedOut:
      return {gone.empty() ? Code::kTimeout : Code::kPeerDead,
              base::concat(head, " timed out waiting for rank ", fault.source, ": expected word ",
                           fault.expected, ", got ", fault.got, gone.empty() ? "" : "; ", gone)};
    case abi::kCapacity:
      return {Code::kResourceExhausted,
              base::concat(head, ": ",
                           fault.source < 0 ? std::string("this rank")
                                            : base::concat("local expert ", fault.source),
                           " needs ", got, " rows, capacity is ", fault.expected)};
    case abi::kBadExpert:
      return {Code::kInvalidArgument,
              base::concat(head, ": topk_idx of token ", fault.expected, " names expert ", got,
                           ", must be -1 (none) or from 0 to ", num_experts - 1)};
    case abi::kDuplicateExpert:
      return {Code::kInvalidArgument, base::concat(head, ": topk_idx of token ", fault.expected,
                                                   " names expert ", got, " twice")};
    case abi::kTooManyTokens:
      if (fault.source != rank)
        return {Code::kProtocol,
                base::concat(head, ": rank ", fault.source, " sent ", got,
                             " tokens, max_tokens of this rank's call is ", fault.expected,
                             "; it must be the same on all ranks")};
      return {Code::kInvalidArgument,
              base::concat(head, ": num_tokens is ", got, ", at most ", fault.expected, " fit")};
    case abi::kTwoAtOnce:
      return {Code::kInvalidArgument,
              base::concat(head,
                           " began while another call of this communicator was running; let one "
                           "wait for the other where graphs are replayed on several streams, or "
                           "give each stream a communicator")};
    case abi::kBadHandle:
      return {Code::kInvalidArgument,
              base::concat(
                  head,
                  ": the handle was not made by a dispatch of this max_tokens and of communicator ",
                  fault.expected)};
    default:
      return {Code::kProtocol, base::concat(head, ": rank ", fault.source,
                                            " sent rows of another type, layout or size (", got,
                                            " bytes a slot, expected ", fault.expected,
                                            "); all ranks must make the same calls")};
  }
}

}  // namespace moe_p2p::moe
