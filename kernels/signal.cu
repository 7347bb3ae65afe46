// Says that a layer is computed: stores the step's number in the layer's word, which the polling
// thread waits for (csrc/engine/gate.h). One thread, launched by csrc/ops/signal_ops.cpp after the
// layer, and by every replay of a graph that captured it. A graph cannot count its replays: it has
// warm-up and dummy batches among them. So the number comes from a word that the host sets on the
// stream before the forward pass.
#include "kernels/abi/layer_signal.h"
#include "kernels/device/ptx.cuh"

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(1)
    moe_p2p_signal(const __grid_constant__ SignalParams p) {
  const u64 step = ld_relaxed_cta_u64(p.step.get());
  if (step == 0) return;
  // Pairs with Gate::reached(). What earlier kernels of the stream wrote is ordered before this one
  // by the end of each (it is launched without overlap); the release at system scope, which is
  // __threadfence_system() and the store, makes it visible to NICs and copies before the word.
  st_release_sys_u64(p.word.get(), step);
}
