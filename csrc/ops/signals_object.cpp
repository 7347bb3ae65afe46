#include "ops/signals_object.h"

#include <algorithm>
#include <atomic>

#include "base/log.h"
#include "kernels/abi/layer_signal.h"
#include "platform/cuda.h"
#include "platform/cuda_context.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

std::span<uint64_t> words_of(const Tensor& words) {
  auto* const first = output<int64_t>(words, {"words", {ScalarType::Long}, {kAny}});
  return {reinterpret_cast<uint64_t*>(first), static_cast<size_t>(words.numel())};
}

const uint64_t* step_word_of(const Tensor& step) {
  const OnDevice placed(device_of(step));
  return reinterpret_cast<const uint64_t*>(input<int64_t>(step, {"step", {ScalarType::Long}, {1}}));
}

}  // namespace

ObjectTable<SignalsObject>& signals() {
  static auto* const table = new ObjectTable<SignalsObject>("signals");
  return *table;
}

SignalsObject::SignalsObject(int64_t engine, const Tensor& words, const Tensor& step,
                             const std::vector<Tensor>& caches, int64_t kernel)
    : engine_(engine),
      words_(words),
      step_(step),
      caches_(caches),
      kernel_(kernel),
      device_(device_of(step)),
      word_(words_of(words)),
      step_word_(step_word_of(step)) {
  MOE_P2P_CHECK(kernel != 0 || device_ < 0, Code::kInvalidArgument,
                "kernel is 0, must be one for a GPU");
  for (const uint64_t& word : word_) gates_.emplace_back(&word, kernel == 0);
}

engine::Gate& SignalsObject::gate(int64_t layer) {
  MOE_P2P_CHECK(layer >= 0 && layer < std::ssize(gates_), Code::kInvalidArgument, "layer is ",
                layer, ", must be from 0 to ", std::ssize(gates_) - 1);
  return gates_[static_cast<size_t>(layer)];
}

// Whoever compiles a graph may call an op with a copy of what it mutates and copy it back later:
// the signal would come before the bytes.
void SignalsObject::check_in_caches(const Tensor& kv) const {
  const auto* const at = static_cast<const std::byte*>(kv.data_ptr());
  const auto holds = [&](const Tensor& cache) {
    const auto* const begin = static_cast<const std::byte*>(cache.data_ptr());
    return at >= begin && at < begin + cache.numel() * static_cast<int64_t>(cache.element_size());
  };
  MOE_P2P_CHECK(
      std::ranges::any_of(caches_, holds), Code::kInvalidArgument, "kv is ", describe(kv),
      " outside of the tensors of the KVCache: pass the layer's part of the cache itself. "
      "A compiled graph may have copied it: compile by inductor, with the cache of each "
      "layer as an input, or call it outside of the compiled part");
}

void SignalsObject::signal(int64_t layer, const Tensor& kv) {
  gate(layer);
  check_in_caches(kv);
  uint64_t& word = word_[static_cast<size_t>(layer)];
  if (kernel_ != 0) {
    const abi::SignalParams params{{reinterpret_cast<uint64_t>(step_word_)},
                                   {reinterpret_cast<uint64_t>(&word)}};
    const OnDevice here(device_);
    const platform::ContextGuard current(platform::context_of(device_));
    platform::launch_kernel({.kernel = static_cast<uint64_t>(kernel_),
                             .num_blocks = 1,
                             .num_threads = 1,
                             .stream = current_stream(device_).handle},
                            &params);
    return;
  }
  if (*step_word_ == 0) return;
  // release: pairs with Gate::value(); what this thread wrote to the cache comes first.
  std::atomic_ref(word).store(*step_word_, std::memory_order_release);
  platform::notify_all(engines().get(engine_)->engine().waker());
}

}  // namespace moe_p2p::ops
