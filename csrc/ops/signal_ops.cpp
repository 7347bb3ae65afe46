// torch.ops.moe_p2p.signal, and the set-up of the words it stores into.
#include "ops/signals_object.h"

namespace moe_p2p::ops {

namespace {

int64_t signals_create(int64_t engine, const Tensor& words, const Tensor& step,
                       const std::vector<Tensor>& caches, int64_t kernel) {
  return signals().add(std::make_shared<SignalsObject>(engine, words, step, caches, kernel));
}

void signals_close(int64_t number) { signals().take(number); }

// [layers]: the last step in which each was computed.
Tensor signals_values(int64_t number) {
  const auto object = signals().get(number);
  Tensor tensor = make_tensor({object->num_layers()}, ScalarType::Long);
  auto* const values = static_cast<int64_t*>(tensor.mutable_data_ptr());
  for (int64_t layer = 0; layer < object->num_layers(); ++layer)
    values[layer] = static_cast<int64_t>(object->gate(layer).value());
  return tensor;
}

void signal(int64_t number, int64_t layer, const Tensor& kv) {
  signals().get(number)->signal(layer, kv);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("signals_create", TORCH_BOX(&signals_create));
  m.impl("signals_close", TORCH_BOX(&signals_close));
  m.impl("signals_values", TORCH_BOX(&signals_values));
  m.impl("signal", TORCH_BOX(&signal));
}

}  // namespace moe_p2p::ops
