// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm as TVM-FFI functions. Optional tensors may be None; 8-bit floats come as what they
// are (DLPack 1.1 has them). The stream is the framework's current one on the device of the
// tensors, and a workspace of None is taken from the framework's allocator for the call. Packed
// calls, in this order:
//
//   fp8_rmsnorm_forward   x, x_scale, weight, eps, weight_offset, residual, FORMAT, OUTPUTS, rstd,
//                         normed, workspace
//   fp8_rmsnorm_backward  dy, x, x_scale, weight, weight_offset, rstd, residual_grad, dx, dw,
//                         accumulate_dw, workspace
//   fp8_quantize          y, FORMAT, OUTPUTS, workspace
//
//   FORMAT   scaling, group, pow2_scale, given_scale, numerics, rng
//   OUTPUTS  q, scale, q_t, scale_t, amax
//
// x, y, dy and what has their shape may have more than two dimensions, the leading ones being rows.
// scaling is 0, 1, 2 for tensor, row, group; numerics 0, 1 for fast, compat; rng a tensor or None.
// And torch_* (packed_call.h): the tensors, rng among them, in that order in a tuple, then the
// rest.
#include "mortar/fp8_rmsnorm.h"

#include <tvm/ffi/container/array.h>

#include "call_workspace.h"
#include "convert.h"
#include "packed_call.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Any;

/// A matrix, which may come with more than two dimensions.
template <class Source>
Tensor read_rows(ArgReader<Source>& args, const char* name) {
  Tensor t = args.tensor(name);
  fold_rows(t, args.op(), name);
  return t;
}

template <class Source>
Fp8Format read_format(ArgReader<Source>& args) {
  // A number that an enum cannot hold would become another.
  const auto choice = [&args](const char* name, std::int64_t num) {
    const std::int64_t value = args.integer(name);
    check(value >= 0 && value < num, args.op(), ": ", name, " must be in [0, ", num, "), got ",
          value);
    return value;
  };
  Fp8Format format;
  format.scaling = static_cast<Fp8Scaling>(choice("scaling", 3));
  format.group = args.integer("group");
  format.pow2_scale = args.template value<bool>("pow2_scale");
  format.given_scale = args.template value<bool>("given_scale");
  format.numerics = static_cast<Fp8Numerics>(choice("numerics", 2));
  format.rng = args.tensor("rng");
  return format;
}

template <class Source>
Fp8Quantized read_outputs(ArgReader<Source>& args) {
  Fp8Quantized out;
  out.q = read_rows(args, "q");
  out.scale = args.tensor("scale");
  out.q_t = args.tensor("q_t");
  out.scale_t = args.tensor("scale_t");
  out.amax = args.tensor("amax");
  return out;
}

template <class Source>
void forward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "fp8_rmsnorm_forward");
  const Tensor x = read_rows(args, "x"), x_scale = read_rows(args, "x_scale");
  const Tensor weight = args.tensor("weight");
  const auto eps = static_cast<float>(args.template value<double>("eps"));
  const auto offset = static_cast<float>(args.template value<double>("weight_offset"));
  const Tensor residual = read_rows(args, "residual");
  const Fp8Format format = read_format(args);
  const Fp8Quantized out = read_outputs(args);
  const Tensor rstd = args.tensor("rstd"), normed = read_rows(args, "normed");
  const Tensor given = args.tensor("workspace");
  const typename Source::Call call(x.device);
  const std::int64_t bytes =
      bytes_of(given, [&] { return fp8_rmsnorm_forward_workspace(x, format, out); });
  const Workspace<Source> workspace(given, bytes, x.device);
  fp8_rmsnorm_forward(x, x_scale, weight, eps, offset, residual, format, out, rstd, normed,
                      workspace, call.stream);
}

template <class Source>
void backward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "fp8_rmsnorm_backward");
  const Tensor dy = read_rows(args, "dy"), x = read_rows(args, "x"),
               x_scale = read_rows(args, "x_scale");
  const Tensor weight = args.tensor("weight");
  const auto offset = static_cast<float>(args.template value<double>("weight_offset"));
  const Tensor rstd = args.tensor("rstd"), residual_grad = read_rows(args, "residual_grad");
  const Tensor dx = read_rows(args, "dx"), dw = args.tensor("dw");
  const bool accumulate = args.template value<bool>("accumulate_dw");
  const Tensor given = args.tensor("workspace");
  const typename Source::Call call(x.device);
  const std::int64_t bytes = bytes_of(given, [&] { return fp8_rmsnorm_backward_workspace(x); });
  const Workspace<Source> workspace(given, bytes, x.device);
  fp8_rmsnorm_backward(dy, x, x_scale, weight, offset, rstd, residual_grad, dx, dw, accumulate,
                       workspace, call.stream);
}

template <class Source>
void quantize(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "fp8_quantize");
  const Tensor y = read_rows(args, "y");
  const Fp8Format format = read_format(args);
  const Fp8Quantized out = read_outputs(args);
  const Tensor given = args.tensor("workspace");
  const typename Source::Call call(y.device);
  const std::int64_t bytes =
      bytes_of(given, [&] { return fp8_quantize_workspace(y, format, out); });
  const Workspace<Source> workspace(given, bytes, y.device);
  fp8_quantize(y, format, out, workspace, call.stream);
}

/// [forward, backward] bytes.
tvm::ffi::Array<std::int64_t> traffic(std::int64_t rows, std::int64_t hidden, std::int64_t x_bytes,
                                      std::int64_t group, std::int64_t scale_bytes,
                                      std::int64_t outputs, std::int64_t dy_bytes) {
  const Fp8RmsNormTraffic t = fp8_rmsnorm_traffic(rows, hidden, x_bytes, group, scale_bytes,
                                                  static_cast<int>(outputs), dy_bytes);
  return {t.forward, t.backward};
}

}  // namespace
}  // namespace mortar::ffi

MORTAR_EXPORT_PACKED(fp8_rmsnorm_forward, mortar::ffi::forward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(fp8_rmsnorm_backward, mortar::ffi::backward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(fp8_quantize, mortar::ffi::quantize<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_TORCH(torch_fp8_rmsnorm_forward, forward, TorchObjects);
MORTAR_EXPORT_TORCH(torch_fp8_rmsnorm_backward, backward, TorchObjects);
MORTAR_EXPORT_TORCH(torch_fp8_quantize, quantize, TorchObjects);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_rmsnorm_traffic, mortar::ffi::wrapped<mortar::ffi::traffic>)
