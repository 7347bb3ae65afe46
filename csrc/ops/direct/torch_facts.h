// What direct calls know of this torch beyond its stable ABI. moe_p2p/moe/direct.py finds and
// verifies each fact, and makes no direct call where one is missing;
// tests/moe/test_direct_facts.py names them all.
#pragma once

#include <dlfcn.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "ops/direct/python_calls.h"

namespace moe_p2p::ops::direct {

// The fields of Facts in moe_p2p/moe/direct.py, in its order.
struct Torch {
  Object *tensor, *parameter;  // the types
  int64_t head;           // bytes of an object before its at::Tensor; its type is the last word
  int64_t keys;           // offset of the dispatch keys in a TensorImpl
  uint64_t plain_keys;    // those of tensors that are nothing but memory of a CPU or a GPU
  uint64_t inference[2];  // a thread's keys under inference_mode; none without any mode
  Object* (*wrap)(AtenTensorHandle);
  bool (*observed)();  // by a profiler
  bool (*in_function_mode)();
  bool (*requires_grad)(const void* impl);
  void* libc10;
};
inline Torch torch_of_process;

inline Object* type_of(Object* object) {
  return *reinterpret_cast<Object**>(static_cast<char*>(object) + torch_of_process.head -
                                     sizeof(void*));
}

// Whether the dispatcher would do more than to call the op.
inline bool watched() {
  thread_local const auto* const keys = static_cast<const uint64_t*>(
      dlsym(torch_of_process.libc10, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  const auto& inference = torch_of_process.inference;
  if ((keys[0] | keys[1]) != 0 && (keys[0] != inference[0] || keys[1] != inference[1])) return true;
  return torch_of_process.observed() || torch_of_process.in_function_mode();
}

}  // namespace moe_p2p::ops::direct
