// torch.ops.moe_p2p.signal, and the set-up of the words it stores into.
#include "ops/signals_object.h"

namespace moe_p2p::ops {

namespace {

int64_t signals_create(int64_t engine, const Tensor& words, const Tensor& step,
                       const std::vector<Tensor>& caches, int64_t kernel) {
  return signals().add(std::make_shared<SignalsObject>(engine, words, step, caches, kernel));
}

void signals_close(int64_t number) { signals().take(number); }

// The last step in which the layer was computed.
int64_t signals_value(int64_t number, int64_t layer) {
  return static_cast<int64_t>(signals().get(number)->gate(layer).value());
}

void signal(int64_t number, int64_t layer, const Tensor& kv) {
  signals().get(number)->signal(layer, kv);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("signals_create", TORCH_BOX(&signals_create));
  m.impl("signals_close", TORCH_BOX(&signals_close));
  m.impl("signals_value", TORCH_BOX(&signals_value));
  m.impl("signal", TORCH_BOX(&signal));
}

}  // namespace moe_p2p::ops
