#include "moe/device/fault.h"

#include "moe/plan/step.h"

namespace moe_p2p::moe {

using base::Code;

namespace {

// Which word a wait was for, as far as the low halves of the expected and the found value show it
// (kernels/device/wait.cuh). Ranks of other nodes arrive by parts. Ranks of the own node write
// words of a step: headers in every use of a step slot, flags of slots and rows in some; where
// these flag themselves nothing was found.
std::string awaited(const abi::Fault& fault, const Plan& plan, int rank) {
  const auto phase = static_cast<abi::Phase>(fault.phase);
  const int local = plan.shape.ranks_per_node;
  if (fault.source / local != rank / local) {
    const auto before = static_cast<uint32_t>(fault.step * abi::kMaxParts);
    const uint32_t part = static_cast<uint32_t>(fault.expected) - before - 1;
    const uint32_t here = static_cast<uint32_t>(fault.got) - before;
    return base::concat("arrival of ",
                        part + 1 < abi::kMaxParts ? base::concat("part ", part) : "the last part",
                        ", ", here < abi::kMaxParts ? here : 0, " parts arrived");
  }
  if (phase == abi::Phase::kWeights) return "header of its weights";
  const std::string item = phase == abi::Phase::kDispatch ? "slot" : "row";
  if (fault.source == rank) return base::concat("word of its own blocks, header or ", item);
  const auto steps = static_cast<uint64_t>(plan.shape.steps_in_flight);
  const uint64_t last = fault.step >= steps ? fault.step + 1 - steps : 0;  // in a header
  const bool may_be_header = static_cast<uint32_t>(fault.got) == static_cast<uint32_t>(last) ||
                             (phase == abi::Phase::kDispatch && fault.got == 0);
  return base::concat(may_be_header ? "header or " : "", item, fault.got == 0 ? "" : " flag");
}

}  // namespace

base::Error error_of(const abi::Fault& fault, const Plan& plan, int rank, const std::string& gone,
                     const std::string& progress) {
  const char* phase = phase_name(static_cast<abi::Phase>(fault.phase));
  const std::string head = base::concat("rank ", rank, ": ", phase, " of step ", fault.step);
  const auto got = static_cast<int64_t>(fault.got);
  switch (fault.raised) {
    case abi::kTimedOut:
      return {gone.empty() ? Code::kTimeout : Code::kPeerDead,
              base::concat(head, " timed out waiting for rank ", fault.source, ": ",
                           awaited(fault, plan, rank), " (expected word ", fault.expected, ", got ",
                           fault.got, ")", progress, gone.empty() ? "" : "; ", gone)};
    case abi::kCapacity:
      return {Code::kResourceExhausted,
              base::concat(head, ": ",
                           fault.source < 0 ? std::string("this rank")
                                            : base::concat("local expert ", fault.source),
                           " needs ", got, " rows, capacity is ", fault.expected)};
    case abi::kBadExpert:
      return {Code::kInvalidArgument,
              base::concat(head, ": topk_idx of token ", fault.expected, " names expert ", got,
                           ", must be -1 (none) or from 0 to ", plan.shape.num_experts - 1)};
    case abi::kDuplicateExpert:
      return {Code::kInvalidArgument, base::concat(head, ": topk_idx of token ", fault.expected,
                                                   " names expert ", got, " twice")};
    case abi::kTooManyTokens:
      return {Code::kInvalidArgument,
              base::concat(head, ": num_tokens is ", got, ", at most ", fault.expected, " fit")};
    case abi::kOtherMaxTokens:
      return {Code::kProtocol,
              base::concat(head, ": ",
                           other_max_tokens(fault.source, fault.got, rank, fault.expected))};
    case abi::kRowsNotReady:
      return {Code::kTimeout, base::concat(head, ": ", unready(fault.expected, got))};
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
