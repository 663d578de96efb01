// SPDX-License-Identifier: Apache-2.0
// The dynamic convolution as TVM-FFI functions. Optional tensors may be None; the stream is the
// framework's current one on the device of the tensors.
#include "mortar/dynamic_conv.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/optional.h>

#include "convert.h"

namespace mortar::ffi {
namespace {

using Optional = tvm::ffi::Optional<TensorView>;

Tensor to_tensor(const Optional& t, const char* what) {
  return t.has_value() ? ffi::to_tensor(t.value(), what) : Tensor{};
}
using ffi::to_tensor;

void forward(TensorView x, TensorView k, Optional cu_seqlens, Optional initial_state, TensorView y,
             Optional final_state, bool silu) {
  const Tensor x_view = to_tensor(x, "dynamic_conv_forward: x");
  const DeviceGuard guard(x_view.device);
  dynamic_conv_forward(x_view, to_tensor(k, "dynamic_conv_forward: k"),
                       to_tensor(cu_seqlens, "dynamic_conv_forward: cu_seqlens"),
                       to_tensor(initial_state, "dynamic_conv_forward: initial_state"),
                       to_tensor(y, "dynamic_conv_forward: y"),
                       to_tensor(final_state, "dynamic_conv_forward: final_state"), silu,
                       current_stream(x_view.device));
}

void backward(TensorView x, TensorView k, Optional cu_seqlens, Optional initial_state,
              TensorView dy, Optional dfinal_state, TensorView dx, TensorView dk,
              Optional dinitial_state, bool silu) {
  const Tensor x_view = to_tensor(x, "dynamic_conv_backward: x");
  const DeviceGuard guard(x_view.device);
  dynamic_conv_backward(x_view, to_tensor(k, "dynamic_conv_backward: k"),
                        to_tensor(cu_seqlens, "dynamic_conv_backward: cu_seqlens"),
                        to_tensor(initial_state, "dynamic_conv_backward: initial_state"),
                        to_tensor(dy, "dynamic_conv_backward: dy"),
                        to_tensor(dfinal_state, "dynamic_conv_backward: dfinal_state"),
                        to_tensor(dx, "dynamic_conv_backward: dx"),
                        to_tensor(dk, "dynamic_conv_backward: dk"),
                        to_tensor(dinitial_state, "dynamic_conv_backward: dinitial_state"), silu,
                        current_stream(x_view.device));
}

void step(TensorView x, TensorView k, TensorView state, Optional slots, TensorView y, bool silu) {
  const Tensor x_view = to_tensor(x, "dynamic_conv_step: x");
  const DeviceGuard guard(x_view.device);
  dynamic_conv_step(x_view, to_tensor(k, "dynamic_conv_step: k"),
                    to_tensor(state, "dynamic_conv_step: state"),
                    to_tensor(slots, "dynamic_conv_step: slots"),
                    to_tensor(y, "dynamic_conv_step: y"), silu, current_stream(x_view.device));
}

void check_contents(Optional cu_seqlens, std::int64_t num_tokens, Optional slots,
                    std::int64_t num_slots) {
  const Tensor starts = to_tensor(cu_seqlens, "dynamic_conv_check: cu_seqlens");
  const Tensor rows = to_tensor(slots, "dynamic_conv_check: slots");
  const Device device = starts.defined() ? starts.device : rows.device;
  const DeviceGuard guard(device);
  dynamic_conv_check(starts, num_tokens, rows, num_slots, current_stream(device));
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_forward, mortar::ffi::wrapped<mortar::ffi::forward>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_backward, mortar::ffi::wrapped<mortar::ffi::backward>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_step, mortar::ffi::wrapped<mortar::ffi::step>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_check, mortar::ffi::wrapped<mortar::ffi::check_contents>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_conv_traffic, mortar::ffi::wrapped<mortar::ffi::traffic>)
