// The words of one forward pass under a number: for each layer, the last step in which it was
// computed. Stored by torch.ops.moe_p2p.signal, waited for by requests of one engine.
#pragma once

#include <span>
#include <vector>

#include "engine/gate.h"
#include "ops/engine_object.h"

namespace moe_p2p::ops {

class SignalsObject {
 public:
  // words [L]: host memory, pinned if `kernel` is given. step [1]: where the caches are. kernel: a
  // CUfunction of moe_p2p_signal; 0: the caches are host memory. Tensors stay alive.
  SignalsObject(int64_t engine, const Tensor& words, const Tensor& step,
                const std::vector<Tensor>& caches, int64_t kernel);

  // Stores the step's number, if there is one, behind all earlier work of the current stream.
  // kv: memory of the layer, for the order of calls and for a check.
  void signal(int64_t layer, const Tensor& kv);
  engine::Gate& gate(int64_t layer);
  int64_t engine() const noexcept { return engine_; }  // number of the engine that waits
  int64_t num_layers() const noexcept { return std::ssize(gates_); }

 private:
  void check_in_caches(const Tensor& kv) const;

  const int64_t engine_;  // its number, as requests of the engine keep this object alive
  const Tensor words_, step_;
  const std::vector<Tensor> caches_;
  const int64_t kernel_;
  const int device_;  // CUDA ordinal; -1: host memory
  std::span<uint64_t> word_;
  const uint64_t* step_word_;
  std::vector<engine::Gate> gates_;
};

ObjectTable<SignalsObject>& signals();

}  // namespace moe_p2p::ops
