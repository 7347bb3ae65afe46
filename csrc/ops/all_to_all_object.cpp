#include "ops/all_to_all_object.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/log.h"
#include "kernels/abi/handle.h"

namespace moe_p2p::ops {

using base::Code;

ObjectTable<AllToAllObject>& communicators() {
  static auto* const table = new ObjectTable<AllToAllObject>("communicator");
  return *table;
}

void check(const std::vector<int64_t>& comms) {
  for (const int64_t comm : comms) {
    const auto object = communicators().get(comm);
    const std::unique_lock lock(object->in_use, std::try_to_lock);
    if (lock.owns_lock()) object->all_to_all.check();
  }
}

Caller::Caller(int64_t comm)
    : object_(communicators().get(comm)),
      lock_(object_->in_use, std::try_to_lock),
      on_device_(object_->device) {
  MOE_P2P_CHECK(lock_.owns_lock(), Code::kInvalidArgument, "communicator ", comm,
                " is in a call of another thread; all calls must come in one order");
  object_->caller.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

namespace {

template <typename T>
const T* optional_input(const std::optional<Tensor>& tensor, const Expected& expected) {
  return tensor ? input<T>(*tensor, expected) : nullptr;
}
template <typename T>
T* optional_output(const std::optional<Tensor>& tensor, const Expected& expected) {
  return tensor ? output<T>(*tensor, expected) : nullptr;
}

void set_num_tokens(moe::DispatchSend& send, const std::optional<Tensor>& num_tokens, int64_t host,
                    bool on_device) {
  send.num_tokens = host < 0 ? send.num_rows : host;
  if (!num_tokens) return;
  check_placed(*num_tokens, "num_tokens");
  const ScalarType dtype = dtype_of(*num_tokens);
  MOE_P2P_CHECK(num_tokens->numel() == 1 && (dtype == ScalarType::Int || dtype == ScalarType::Long),
                Code::kInvalidArgument, "num_tokens is ", describe(*num_tokens),
                ", must be one torch.int32 or torch.int64");
  const void* data = num_tokens->const_data_ptr();
  if (on_device) {
    send.device_num_tokens = data;
    send.num_tokens_is_int64 = dtype == ScalarType::Long;
  } else {
    send.num_tokens = dtype == ScalarType::Int ? *static_cast<const int32_t*>(data)
                                               : *static_cast<const int64_t*>(data);
  }
}

uint64_t row_bytes(const Tensor& rows) {
  return static_cast<uint64_t>(rows.size(rows.dim() - 1)) * rows.element_size();
}

// Bytes of a row of x that is the caller's bytes; 0: x is of values.
uint64_t bytes_of_rows(const Tensor& x) {
  if (dtype_of(x) != ScalarType::Byte) return 0;
  const int64_t width = x.dim() >= 2 ? x.size(x.dim() - 1) : 0;
  MOE_P2P_CHECK(width > 0 && width % 16 == 0, Code::kInvalidArgument, "x is ", describe(x),
                ", rows of bytes must be a multiple of 16 bytes");
  return static_cast<uint64_t>(width);
}

// Bytes travel as fp8 does.
abi::DType wire_type(const Tensor& x) {
  return dtype_of(x) == ScalarType::Byte ? abi::DType::kFloat8E4M3 : payload_type(dtype_of(x), "x");
}

// `rows` has one row of `width` (kAny: any) for each of num_rows, as [num_rows, width] or with the
// rows of each expert apart.
void check_rows(const Tensor& rows, const char* name, int64_t num_rows, int64_t width) {
  check_placed(rows, name);
  const int64_t dims = rows.dim();
  const bool fits = dims >= 2 && (width == kAny || rows.size(dims - 1) == width);
  int64_t have = fits ? 1 : -1;
  for (int64_t i = 0; fits && i + 1 < dims; ++i) have *= rows.size(i);
  MOE_P2P_CHECK(have == num_rows, Code::kInvalidArgument, name, " is ", describe(rows),
                ", must hold ", num_rows, " rows",
                width == kAny ? std::string() : base::concat(" of ", width, " values"));
}

// The 4-byte scales of column_scales: [.., capacity, P] with the rows of a scale side by side.
void check_column_scales(const Tensor& scales, const Layout& layout) {
  check_on_device(scales, "scales");
  const int64_t dims = layout.options.rows().apart ? 3 : 2, ld = layout.scale_stride();
  const bool fits = scales.dim() == dims && scales.size(dims - 2) == layout.capacity &&
                    (dims == 2 || scales.size(0) == layout.experts);
  const int64_t width = fits ? scales.size(dims - 1) : 0;
  const auto strides_of = [&](int64_t dim, int64_t stride) {
    return scales.size(dim) <= 1 || scales.stride(dim) == stride;
  };
  MOE_P2P_CHECK(fits && strides_of(dims - 1, ld) && strides_of(dims - 2, 1) &&
                    (dims == 2 || strides_of(0, width * ld)),
                Code::kInvalidArgument, "scales is ", describe(scales), ", must hold ",
                layout.capacity, " rows", layout.options.rows().apart ? " for each expert" : "",
                ", with column_scales in columns of stride ", ld);
}

}  // namespace

moe::Handle handle_from(const Tensor& handle) {
  return {output<int32_t>(handle, {"handle", {ScalarType::Int}, {kAny}}), handle.numel()};
}

moe::DispatchSend dispatch_send_from(AllToAllObject& comm, const DispatchArguments& in,
                                     const Tensor& handle) {
  moe::DispatchSend send;
  send.stream = current_stream(comm.device);
  send.x_bytes = bytes_of_rows(in.x);
  send.x = send.x_bytes > 0 ? input<void>(in.x, {"x", {ScalarType::Byte}, {kAny, kAny}})
                            : input<void>(in.x, {"x", kPayloadTypes, {kAny, comm.hidden_dim()}});
  send.x_dtype = wire_type(in.x);
  send.num_rows = in.x.size(0);
  const bool is_fp8 = send.x_dtype == abi::DType::kFloat8E4M3;  // or bytes
  send.options = in.options;
  MOE_P2P_CHECK(!in.options.quantize || !is_fp8, Code::kInvalidArgument, "x is ", describe(in.x),
                "; quantize takes torch.bfloat16, torch.float16 or torch.float32");
  MOE_P2P_CHECK(!in.scales || is_fp8, Code::kInvalidArgument, "scales are given for x of ",
                dtype_name(dtype_of(in.x)), ", must go with torch.float8_e4m3fn");
  send.scales = optional_input<void>(
      in.scales, {"scales", {ScalarType::Float, ScalarType::Int}, {send.num_rows, kAny}});
  if (in.scales) {
    send.scale_bytes = row_bytes(*in.scales);
    send.opaque_scales = dtype_of(*in.scales) != ScalarType::Float ||
                         in.scales->size(1) != comm.num_scales() || send.x_bytes > 0;
  }
  MOE_P2P_CHECK(!in.scales || send.scale_bytes > 0, Code::kInvalidArgument, "scales is ",
                describe(*in.scales), ", must have at least one column");
  MOE_P2P_CHECK(in.extras.size() <= abi::kMaxExtras, Code::kInvalidArgument, in.extras.size(),
                " extras are given, must be at most ", abi::kMaxExtras);
  for (const Tensor& extra : in.extras)
    send.extras.push_back(
        {input<void>(extra, {"an extra", {}, {send.num_rows, kAny}}), row_bytes(extra)});
  send.topk_idx = input<void>(
      in.topk_idx, {"topk_idx", {ScalarType::Int, ScalarType::Long}, {send.num_rows, comm.topk()}});
  send.topk_is_int64 = dtype_of(in.topk_idx) == ScalarType::Long;
  send.topk_weights = optional_input<float>(
      in.topk_weights, {"topk_weights", {ScalarType::Float}, {send.num_rows, comm.topk()}});
  set_num_tokens(send, in.num_tokens, in.num_tokens_host, comm.device >= 0);
  send.max_tokens = in.max_tokens;
  send.handle = handle_from(handle);
  if (comm.releases_oldest && comm.device >= 0)  // a kernel reads it then
    send.handle_owner = std::make_shared<Tensor>(handle);
  return send;
}

Layout::Layout(const AllToAllObject& comm, const moe::DispatchOptions& asked, int64_t rows)
    : options(asked),
      capacity(rows),
      experts(comm.num_local_experts()),
      ranks(comm.plan().shape.world_size),
      topk(comm.topk()),
      num_rows(asked.rows().apart ? experts * rows : rows) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // rows are numbered in 32 bits
  MOE_P2P_CHECK(capacity >= 0 && capacity <= kMost, Code::kInvalidArgument, "capacity is ",
                capacity, ", must be from 0 to ", kMost);
}

void check_outputs(const AllToAllObject& comm, const Layout& layout, const DispatchOutputs& to) {
  const int64_t rows = layout.num_rows;
  (void)wire_type(to.x);
  check_rows(to.x, "x", rows, bytes_of_rows(to.x) > 0 ? kAny : comm.hidden_dim());
  if (to.scales) {
    if (layout.options.column_scales) {
      check_column_scales(*to.scales, layout);
    } else {
      check_rows(*to.scales, "scales", rows, kAny);
    }
    MOE_P2P_CHECK(to.scales->element_size() == 4, Code::kInvalidArgument, "scales is ",
                  describe(*to.scales), ", must be torch.float32 or torch.int32");
  }
  for (const Tensor& extra : to.extras) check_rows(extra, "an extra", rows, kAny);
  const auto check = [](const std::optional<Tensor>& tensor, const Expected& expected) {
    if (tensor) check_tensor(*tensor, expected);
  };
  check_tensor(to.row_weights, {"row_weights", {ScalarType::Float}, layout.row_weights()});
  check_tensor(to.counts, {"counts", {ScalarType::Int}, layout.counts()});
  check_tensor(to.offsets, {"offsets", {ScalarType::Int}, layout.offsets()});
  check(to.source, {"source", {ScalarType::Int}, layout.source()});
  check(to.ranges, {"ranges", {ScalarType::Long}, layout.ranges()});
  const abi::LayoutFacts facts = layout.options.rows();
  MOE_P2P_CHECK(!to.ranges || facts.apart, Code::kInvalidArgument,
                "ranges are of rows within an expert's; they need layout ",
                abi::layout_with(&abi::LayoutFacts::apart));
  check(to.wait_ticks, {"wait_ticks", {ScalarType::Long}, layout.wait_ticks()});
  MOE_P2P_CHECK(to.row_topk.has_value() == facts.per_token, Code::kInvalidArgument,
                "row_topk goes with layout ", abi::layout_with(&abi::LayoutFacts::per_token),
                ", and only with it");
  check(to.row_topk, {"row_topk", {ScalarType::Int, ScalarType::Long}, layout.row_topk()});
}

moe::DispatchRecv dispatch_recv_from(const AllToAllObject& comm, const Layout& layout,
                                     const DispatchOutputs& to, const moe::Handle& handle) {
  const auto in = [](const std::optional<Tensor>& tensor) {
    return tensor ? mutable_data_of(*tensor) : nullptr;
  };
  moe::DispatchRecv recv;
  recv.stream = current_stream(comm.device);
  recv.handle = handle;
  recv.options = layout.options;
  recv.capacity = layout.capacity;
  recv.x_bytes = bytes_of_rows(to.x);
  recv.x_dtype = wire_type(to.x);
  recv.x = mutable_data_of(to.x);
  if (to.scales) {
    recv.scales = mutable_data_of(*to.scales);
    recv.scale_bytes = row_bytes(*to.scales);
    recv.scale_stride = layout.scale_stride();
  }
  for (const Tensor& extra : to.extras)
    recv.extras.push_back({mutable_data_of(extra), row_bytes(extra)});
  recv.row_weights = static_cast<float*>(mutable_data_of(to.row_weights));
  recv.counts = static_cast<int32_t*>(mutable_data_of(to.counts));
  recv.offsets = static_cast<int32_t*>(mutable_data_of(to.offsets));
  recv.source = static_cast<int32_t*>(in(to.source));
  recv.ranges = static_cast<int64_t*>(in(to.ranges));
  recv.wait_ticks = static_cast<int64_t*>(in(to.wait_ticks));
  recv.row_topk = in(to.row_topk);
  recv.topk_is_int64 = to.row_topk && dtype_of(*to.row_topk) == ScalarType::Long;
  return recv;
}

// Nothing goes from node to node where there is one.
static abi::Partials partials_among(const AllToAllObject& comm, abi::Partials partials) {
  const bool far_only = partials == abi::Partials::kInt10Nodes;
  return far_only && comm.plan().shape.num_nodes() == 1 ? abi::Partials::kSame : partials;
}

static void check_counters(const Tensor& tensor, const char* name) {
  const ScalarType dtype = dtype_of(tensor);
  MOE_P2P_CHECK(dtype == ScalarType::Int || dtype == ScalarType::UInt32, Code::kInvalidArgument,
                name, " is ", describe(tensor), ", must be of torch.int32 or torch.uint32");
  check_placed(tensor, name);
}

static int32_t checked_sms(const AllToAllObject& comm, int64_t num_sms, const char* who) {
  MOE_P2P_CHECK(comm.device < 0 || (num_sms >= 1 && num_sms <= INT32_MAX), Code::kInvalidArgument,
                "num_sms is ", num_sms, ", must be at least 1: ", who,
                " may hold as many multiprocessors, which the product must not need");
  return static_cast<int32_t>(num_sms);
}

void fill_ready(const AllToAllObject& comm, const Layout& layout, const Tensor& counters,
                int64_t num_sms, moe::DispatchRecv& recv) {
  MOE_P2P_CHECK(layout.options.rows().apart && !layout.options.zero_padding, Code::kInvalidArgument,
                "ready: counters are of rows in layout 'padded', without zero_padding: no counter "
                "says that padding is zero");
  check_counters(counters, "ready");
  const int64_t each = abi::arrival_counters(layout.capacity);
  MOE_P2P_CHECK(counters.numel() == layout.experts * each, Code::kInvalidArgument, "ready is ",
                describe(counters), ", must be [", layout.experts, ", ", each,
                "]: a counter for each ", abi::kArrivalRows, " of ", layout.capacity, " rows");
  recv.ready = static_cast<uint32_t*>(mutable_data_of(counters));
  recv.num_sms = checked_sms(comm, num_sms, "dispatch_recv");
}

// Rows of y that are written meanwhile.
static void fill_ready(const AllToAllObject& comm, const CombineArguments& in,
                       moe::CombineSend& send) {
  MOE_P2P_CHECK(in.y.dim() == 3, Code::kInvalidArgument, "y is ", describe(in.y),
                ", must be [E_local, capacity, H] with `ready`: of a dispatch in layout 'padded'");
  const int64_t num_experts = in.y.size(0), capacity = in.y.size(1);
  MOE_P2P_CHECK(in.ready_rows >= 1 && in.ready_rows <= INT32_MAX, Code::kInvalidArgument,
                "rows of a counter are ", in.ready_rows, ", must be at least 1");
  const int64_t per_expert = (capacity + in.ready_rows - 1) / in.ready_rows;
  moe::ReadyRows& to = send.ready;
  check_counters(*in.ready, "ready");
  to.counters = static_cast<const uint32_t*>(data_of(*in.ready));
  MOE_P2P_CHECK(in.ready->numel() >= num_experts * per_expert, Code::kInvalidArgument, "ready is ",
                describe(*in.ready), ", must have ", per_expert, " counters for each of the ",
                num_experts, " local experts: one for ", in.ready_rows, " of ", capacity, " rows");
  if (in.ready_base) {
    check_counters(*in.ready_base, "ready_base");
    MOE_P2P_CHECK(in.ready_base->numel() == 1, Code::kInvalidArgument, "ready_base is ",
                  describe(*in.ready_base), ", must be one number");
    to.base = static_cast<const uint32_t*>(data_of(*in.ready_base));
  }
  to.want = static_cast<uint32_t>(in.ready_want);
  to.rows = static_cast<int32_t>(in.ready_rows);
  to.per_expert = static_cast<int32_t>(per_expert);
  to.num_sms = checked_sms(comm, in.num_sms, "combine_send");
  send.capacity = capacity;
}

moe::CombineSend combine_send_from(AllToAllObject& comm, const CombineArguments& in,
                                   const Tensor& handle) {
  moe::CombineSend send;
  send.stream = current_stream(comm.device);
  send.handle = handle_from(handle);
  const int64_t dims = in.y.dim();
  send.y_rows = dims >= 2 && comm.hidden_dim() > 0 ? in.y.numel() / comm.hidden_dim() : 0;
  check_rows(in.y, "y", send.y_rows, comm.hidden_dim());
  send.y_dtype = payload_type(dtype_of(in.y), "y", kCombineTypes);
  send.y = data_of(in.y);
  send.layout = in.layout;
  // row_weights are the dispatch's, not given by the caller: y does not fit.
  MOE_P2P_CHECK(!in.row_weights || in.row_weights->numel() == send.y_rows, Code::kInvalidArgument,
                "y is ", describe(in.y), ", must hold the ", in.row_weights->numel(),
                " rows that dispatch returned: row_weights is ", describe(*in.row_weights));
  send.row_weights =
      optional_input<float>(in.row_weights, {"row_weights", {ScalarType::Float}, {send.y_rows}});
  send.topk_scalars = in.row_scalars && in.row_scalars->dim() == 2;
  const Expected by_topk{"row_scalars", {ScalarType::Float}, {send.y_rows, comm.topk()}};
  send.row_scalars = optional_input<float>(
      in.row_scalars,
      send.topk_scalars ? by_topk : Expected{"row_scalars", {ScalarType::Float}, {send.y_rows}});
  send.topk_weights = optional_input<float>(
      in.topk_weights, {"topk_weights", {ScalarType::Float}, {kAny, comm.topk()}});
  MOE_P2P_CHECK(!in.row_weights || !in.topk_weights, Code::kInvalidArgument,
                "row_weights and topk_weights are given, must be one of them");
  if (in.topk_weights) send.num_rows = in.topk_weights->size(0);
  send.out_dtype = payload_type(in.out_dtype, "out_dtype", kCombineTypes);
  send.order = in.order;
  MOE_P2P_CHECK(in.partials == abi::Partials::kSame || in.order == abi::SumOrder::kRanks,
                Code::kInvalidArgument,
                "partials is given with an order of top-k; it takes sums in order='ranks' only");
  send.partials = partials_among(comm, in.partials);
  MOE_P2P_CHECK(in.order != abi::SumOrder::kRows || (!in.row_weights && !in.topk_weights),
                Code::kInvalidArgument,
                "rows that travel one by one are added as they are; pass weighted=False, and no "
                "topk_weights");
  send.max_tokens = in.max_tokens;
  if (in.ready) fill_ready(comm, in, send);
  return send;
}

moe::CombineRecv combine_recv_from(AllToAllObject& comm, const CombineOutputs& to,
                                   const moe::Handle& handle) {
  moe::CombineRecv recv;
  recv.stream = current_stream(comm.device);
  recv.handle = handle;
  recv.out = output<void>(to.out, {"out", kCombineTypes, {kAny, comm.hidden_dim()}});
  recv.num_rows = to.out.size(0);
  recv.out_dtype = payload_type(dtype_of(to.out), "out");
  recv.order = to.order;
  recv.partials = partials_among(comm, to.partials);
  if (to.topk_idx) {
    recv.topk_idx = input<void>(
        *to.topk_idx,
        {"topk_idx", {ScalarType::Int, ScalarType::Long}, {recv.num_rows, comm.topk()}});
    recv.topk_is_int64 = dtype_of(*to.topk_idx) == ScalarType::Long;
  }
  recv.out_scalars = optional_output<float>(
      to.out_scalars, {"out_scalars", {ScalarType::Float}, {recv.num_rows, comm.topk()}});
  MOE_P2P_CHECK(to.bias.size() <= std::size(recv.bias), Code::kInvalidArgument, to.bias.size(),
                " tensors of bias are given, must be at most ", std::size(recv.bias));
  for (size_t i = 0; i < to.bias.size(); ++i)
    recv.bias[i] =
        input<void>(to.bias[i], {"bias", {dtype_of(to.out)}, {recv.num_rows, comm.hidden_dim()}});
  recv.wait_ticks = optional_output<int64_t>(
      to.wait_ticks, {"wait_ticks", {ScalarType::Long}, {comm.plan().shape.world_size}});
  return recv;
}

}  // namespace moe_p2p::ops
