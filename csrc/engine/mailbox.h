// How other threads reach the polling thread: an intrusive lock-free stack of Requests and closures.
// push() is one compare-and-swap; take_all() empties it in one exchange, in order of arrival. Nothing
// is allocated: each node belongs to whoever pushed it until it is done.
#pragma once

#include <atomic>
#include <functional>

#include "engine/request.h"

namespace moe_p2p::engine {

using Closure = std::function<void()>;

}  // namespace moe_p2p::engine
