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
  kPublishBeforePayload,  // reports an arrival after the first immediate of several
  kLastPartIsAll,         // reports an arrival with the last part, earlier ones missing
  kSumBeforeWeights,      // forms partial sums without waiting for their weights
  kWriteToMasked,         // writes to a masked rank although its slots may be in use
  kCleanWithoutJump,      // goes on counting from the first step after a clean of masks
  kCleanWithoutWait,      // uses slots after a clean whether or not others have cleaned
  kFailByLeft,            // treats a partner that left as lost; sends no farewell after a failure
  kFarewellEarly,         // a rank leaves before what it has sent arrived
  kFarewellOvertakes,     // assumes that all a partner sent is here when its farewell is
  kFlagOfOneNic,          // takes a part with the first NIC's flag, the others' shares missing
  kFlagOfEarlierStep,     // takes the flags of the step before in the same slot
  kWeightsInEveryStep,    // takes weights for the slot's next use, whichever step has some
};
inline Mutation active_mutation = Mutation::kNone;

}  // namespace moe_p2p::base
#define MOE_P2P_MUTATED(name) (::moe_p2p::base::active_mutation == ::moe_p2p::base::Mutation::name)
#else
#define MOE_P2P_MUTATED(name) false
#endif
