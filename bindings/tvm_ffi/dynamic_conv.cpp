// SPDX-License-Identifier: Apache-2.0
// The dynamic convolution as TVM-FFI functions. Optional tensors may be None; the stream is the
// framework's current one on the device of the tensors. Packed calls, in this order:
//
//   dynamic_conv_forward   x, kernels, cu_seqlens, initial_state, y, final_state, silu
//   dynamic_conv_backward  x, kernels, cu_seqlens, initial_state, dy, dfinal_state, dx, dk,
//                          dinitial_state, silu
//   dynamic_conv_step      x, kernels, state, slots, y, silu        x and y [N, D] or [N, 1, D]
//   dynamic_conv_check     cu_seqlens, num_tokens, slots, num_slots
//
// and torch_dynamic_conv_* (packed_call.h).
#include "mortar/dynamic_conv.h"

#include <tvm/ffi/container/array.h>

#include "convert.h"
#include "packed_call.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Any;

template <class Source>
void forward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "dynamic_conv_forward");
  const Tensor x = args.tensor("x"), kernels = args.tensor("kernels");
  const Tensor cu_seqlens = args.tensor("cu_seqlens");
  const Tensor initial_state = args.tensor("initial_state");
  const Tensor y = args.tensor("y"), final_state = args.tensor("final_state");
  const bool silu = args.template value<bool>("silu");
  const typename Source::Call call(x.device);
  dynamic_conv_forward(x, kernels, cu_seqlens, initial_state, y, final_state, silu, call.stream);
}

template <class Source>
void backward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "dynamic_conv_backward");
  const Tensor x = args.tensor("x"), kernels = args.tensor("kernels");
  const Tensor cu_seqlens = args.tensor("cu_seqlens");
  const Tensor initial_state = args.tensor("initial_state");
  const Tensor dy = args.tensor("dy"), dfinal_state = args.tensor("dfinal_state");
  const Tensor dx = args.tensor("dx"), dk = args.tensor("dk");
  const Tensor dinitial_state = args.tensor("dinitial_state");
  const bool silu = args.template value<bool>("silu");
  const typename Source::Call call(x.device);
  dynamic_conv_backward(x, kernels, cu_seqlens, initial_state, dy, dfinal_state, dx, dk,
                        dinitial_state, silu, call.stream);
}

template <class Source>
void step(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "dynamic_conv_step");
  Tensor x = args.tensor("x");
  const Tensor kernels = args.tensor("kernels"), state = args.tensor("state"),
               slots = args.tensor("slots");
  Tensor y = args.tensor("y");
  const bool silu = args.template value<bool>("silu");
  drop_second(x, 3);
  drop_second(y, 3);
  const typename Source::Call call(x.device);
  dynamic_conv_step(x, kernels, state, slots, y, silu, call.stream);
}

void check_contents(PackedArgs packed, Any*) {
  ArgReader<FfiObjects> args(packed, "dynamic_conv_check");
  const Tensor cu_seqlens = args.tensor("cu_seqlens");
  const std::int64_t num_tokens = args.integer("num_tokens");
  const Tensor slots = args.tensor("slots");
  const std::int64_t num_slots = args.integer("num_slots");
  const FfiObjects::Call call(cu_seqlens.defined() ? cu_seqlens.device : slots.device);
  dynamic_conv_check(cu_seqlens, num_tokens, slots, num_slots, call.stream);
}

/// [forward, backward, step] bytes.
tvm::ffi::Array<std::int64_t> traffic(std::int64_t batch, std::int64_t time, std::int64_t channels,
                                      std::int64_t width, std::int64_t state_length,
                                      std::int64_t x_bytes, std::int64_t k_bytes) {
  const DynamicConvTraffic t =
      dynamic_conv_traffic(batch, time, channels, static_cast<int>(width),
                           static_cast<int>(state_length), x_bytes, k_bytes);
  return {t.forward, t.backward, t.step};
}

}  // namespace
}  // namespace mortar::ffi

MORTAR_EXPORT_PACKED(dynamic_conv_forward, mortar::ffi::forward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(dynamic_conv_backward, mortar::ffi::backward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(dynamic_conv_step, mortar::ffi::step<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(dynamic_conv_check, mortar::ffi::check_contents);
MORTAR_EXPORT_TORCH(torch_dynamic_conv_forward, forward, TorchObjects);
MORTAR_EXPORT_TORCH(torch_dynamic_conv_backward, backward, TorchObjects);
MORTAR_EXPORT_TORCH(torch_dynamic_conv_step, step, TorchObjects);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_traffic, mortar::ffi::wrapped<mortar::ffi::traffic>)
