// Deliberate faults for the tests of the tests, which must catch each: tests/kernel_mutations.py
// runs them on the emulated GPU. In kernels MOE_P2P_MUTATED is the constant false, and nothing of
// this exists. Fences, releases, acquires and waits for copies need no name: the emulated GPU
// leaves out any of them.
#pragma once

namespace moe_p2p::device {

enum class Mutation {
  kReuseSlotEarly,    // (R1): dispatch(e + S) without waiting for combine(e)
  kRingWithoutNode,   // (R4): a gateway rings before its node has read the dispatch
  kPartBefore,        // dispatch takes slots of another node once the part before has arrived
  kFirstPartIsAll,    // combine takes any row of another node once the first part has arrived
  kFlagOfOneNic,      // a part is taken with the first NIC's flag, the others' shares missing
  kSumBeforeNode,     // a gateway adds rows of its node that have not arrived
  kSumsOverwritten,   // a combine of many chunks ignores sums that are still to be read
  kSoloReadByFirst,   // a solo dispatch is acknowledged by the first worker, not by the last
  kSumBeforeWeights,  // partial sums without waiting for late weights
  kRowsUnasked,       // rows of y are read whether their counters are up or not
  kMaskAtOnce,        // a late rank is masked at the first deadline, however many are missing
  kStepOfOneWord,     // blocks that start late read the step that the first has already left
  kScaleRoundedDown,  // a scale barely above a power of two becomes that power
  kBlockOfOnes,       // a block's largest number may have all bits set
};

}  // namespace moe_p2p::device

#ifndef MOE_P2P_MUTATED
#define MOE_P2P_MUTATED(name) false
#endif
