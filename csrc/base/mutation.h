// Deliberate faults for the tests of the tests: the protocol simulation must catch each of them.
// Outside test builds MOE_P2P_MUTATED is the constant false and nothing of this exists.
#pragma once

#if defined(MOE_P2P_TESTING)
namespace moe_p2p::base {

enum class Mutation {
  kNone,
  kReuseSlotEarly,        // dispatch(e + S) without waiting for combine(e)
  kSkipEmptyPeer,         // combine does not wait for ranks that got no token of ours
  kCountWithoutSource,    // immediates of all sources in one counter
  kPublishBeforePayload,  // an arrival after the first immediate of several
  kLastPartIsAll,         // an arrival once the last part of several came, whatever is before it
  kSumBeforeWeights,      // partial sums without waiting for the weights that they need
  kWriteToMasked,         // what is said to a masked rank although its slots may be in use
  kFailByLeft,            // a partner that left is not told from a lost one, nor it from the others
  kFarewellEarly,         // a rank leaves before what it has sent arrived
  kFarewellOvertakes,     // a partner that left is believed to have sent what is here by then
  kWeightsInEveryStep,  // weights are taken for those of the slot's next use, whichever step has some
};
inline Mutation active_mutation = Mutation::kNone;

}  // namespace moe_p2p::base
#define MOE_P2P_MUTATED(name) (::moe_p2p::base::active_mutation == ::moe_p2p::base::Mutation::name)
#else
#define MOE_P2P_MUTATED(name) false
#endif
