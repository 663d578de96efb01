// SPDX-License-Identifier: Apache-2.0
// Between TVM-FFI and Mortar: tensors, streams, devices and errors. No logic of any op.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "mortar/error.h"
#include "mortar/stream.h"
#include "mortar/tensor.h"

#if defined(MORTAR_HAS_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace mortar::ffi {

using tvm::ffi::AnyView;
using tvm::ffi::PackedArgs;
using tvm::ffi::TensorView;

inline Device to_device(DLDevice device, const char* op, const char* name) {
  const bool on_cuda = device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
  check_type(on_cuda || device.device_type == kDLCPU || device.device_type == kDLCUDAHost, op, ": ",
             name, " must be on cpu or cuda, got another kind of device");
  return on_cuda ? Device{DeviceType::kCUDA, device.device_id} : Device{};
}

inline std::string dtype_string(DLDataType dtype) {
  // TVM-FFI has no name for these.
  if (dtype.code == kDLComplex) return concat("complex", static_cast<int>(dtype.bits));
  return std::string(tvm::ffi::DLDataTypeToString(dtype));
}

inline DType to_dtype(DLDataType dtype, const char* op, const char* name) {
  struct Pair {
    int code, bits;
    DType dtype;
  };
  constexpr Pair kPairs[] = {
      {kDLBfloat, 16, DType::kBFloat16},
      {kDLFloat, 16, DType::kFloat16},
      {kDLFloat, 32, DType::kFloat32},
      {kDLFloat, 64, DType::kFloat64},
      {kDLInt, 32, DType::kInt32},
      {kDLInt, 64, DType::kInt64},
      {kDLUInt, 8, DType::kUInt8},
      {kDLFloat8_e4m3fn, 8, DType::kFloat8E4M3},
      {kDLFloat8_e5m2, 8, DType::kFloat8E5M2},
  };
  for (const Pair& p : kPairs) {
    if (dtype.code == p.code && dtype.bits == p.bits && dtype.lanes == 1) return p.dtype;
  }
  fail(ErrorKind::kType,
       concat(op, ": ", name,
              " must have dtype bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2, ",
              "int32, int64 or uint8, whichever the op takes, got ", dtype_string(dtype)));
}

/// False for a tensor that has elements but no memory, such as PyTorch's fake ones.
inline bool has_memory(const DLTensor& t) {
  return t.data != nullptr || std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
}

/// Whether it is one bool, or one byte in its place, in the memory of the CPU.
inline bool is_flag(const DLTensor& t) {
  const bool is_byte = (t.dtype.code == kDLBool || t.dtype.code == kDLUInt) && t.dtype.bits == 8;
  const bool is_one = std::all_of(t.shape, t.shape + t.ndim, [](auto size) { return size == 1; });
  return is_byte && t.dtype.lanes == 1 && is_one && t.device.device_type == kDLCPU &&
         t.data != nullptr;
}

inline bool value_of_flag(const DLTensor& t) {
  return *(static_cast<const std::uint8_t*>(t.data) + t.byte_offset) != 0;
}

/// The view behind a DLPack tensor. A message opens with "<op>: <name>".
inline Tensor to_tensor(const DLTensor& t, const char* op = "mortar", const char* name = "tensor") {
  Tensor out;
  out.device = to_device(t.device, op, name);
  out.dtype = to_dtype(t.dtype, op, name);
  check(has_memory(t), op, ": ", name, " must hold memory, got a fake or meta tensor");
  check(t.ndim <= Tensor::kMaxDims, op, ": ", name, " must have at most ", Tensor::kMaxDims,
        " dimensions, got ", t.ndim);
  out.ndim = t.ndim;
  std::int64_t dense = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    out.shape[d] = t.shape[d];
    out.strides[d] = t.strides != nullptr ? t.strides[d] : dense;
    dense *= t.shape[d];
  }
  out.data = static_cast<char*>(t.data) + t.byte_offset;
  return out;
}

inline Tensor to_tensor(const TensorView& t, const char* op = "mortar",
                        const char* name = "tensor") {
  DLTensor view{};
  view.data = t.data_ptr();
  view.device = t.device();
  view.ndim = t.ndim();
  view.dtype = t.dtype();
  view.shape = const_cast<std::int64_t*>(t.shape().data());
  view.strides = t.ndim() > 0 ? const_cast<std::int64_t*>(t.strides().data()) : nullptr;
  view.byte_offset = t.byte_offset();
  return to_tensor(view, op, name);
}

/// What an argument is, in Python's words.
inline const char* kind_of(AnyView value) {
  switch (value.type_index()) {
    case TVMFFITypeIndex::kTVMFFINone:
      return "None";
    case TVMFFITypeIndex::kTVMFFIBool:
      return "bool";
    case TVMFFITypeIndex::kTVMFFIInt:
      return "int";
    case TVMFFITypeIndex::kTVMFFIFloat:
      return "float";
    case TVMFFITypeIndex::kTVMFFISmallStr:
    case TVMFFITypeIndex::kTVMFFIStr:
      return "str";
    case TVMFFITypeIndex::kTVMFFIArray:
      return "list or tuple";
    case TVMFFITypeIndex::kTVMFFIMap:
      return "dict";
    default:
      return "another type";
  }
}

/// An argument of a packed call: a tensor, or None for an undefined one, which the op refuses where
/// it needs a tensor.
inline Tensor to_tensor(AnyView arg, const char* op = "mortar", const char* name = "tensor") {
  if (arg == nullptr) return {};
  const std::optional<DLTensor*> t = arg.try_cast<DLTensor*>();
  check_type(t.has_value(), op, ": ", name, " must be a tensor, got ", kind_of(arg));
  return to_tensor(**t, op, name);
}

/// Leaves out the second dimension of a tensor of `ndim` dimensions if its size is 1.
inline void drop_second(Tensor& t, int ndim) {
  if (t.ndim != ndim || t.shape[1] != 1) return;
  for (int d = 1; d + 1 < ndim; ++d) {
    t.shape[d] = t.shape[d + 1];
    t.strides[d] = t.strides[d + 1];
  }
  t.ndim = ndim - 1;
}

/// A tensor [..., N] of more than two dimensions as [M, N]: its leading dimensions, in order, are
/// rows that lie equally far apart, unless they have no columns.
inline void fold_rows(Tensor& t, const char* op, const char* name) {
  if (t.ndim <= 2) return;
  const bool bare = t.shape[t.ndim - 1] == 0;
  std::int64_t rows = 1, stride = 0;
  for (int d = t.ndim - 2; d >= 0; --d) {
    if (t.shape[d] != 1 && rows == 1) stride = t.strides[d];
    check(bare || t.shape[d] == 1 || rows == 0 || t.shape[d] == 0 || t.strides[d] == rows * stride,
          op, ": ", name,
          " must have leading dimensions that one stride steps through, got strides ", t.strides[d],
          " and ", stride, " for shape ", shape_string(t));
    rows *= t.shape[d];
  }
  t.shape[0] = rows;
  t.strides[0] = stride;
  t.shape[1] = t.shape[t.ndim - 1];
  t.strides[1] = t.strides[t.ndim - 1];
  t.ndim = 2;
}

/// The caller's current stream of a device: TVM-FFI takes it from the framework that owns the
/// tensors of the call (torch.cuda.current_stream()).
inline Stream current_stream(Device device) {
  if (device.type == DeviceType::kCPU) return {};
  return {TVMFFIEnvGetStream(kDLCUDA, device.index)};
}

/// Whether a stream is being captured into a CUDA graph.
inline bool is_capturing([[maybe_unused]] Stream stream) {
#if defined(MORTAR_HAS_CUDA)
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();  // of the legacy stream, while another one is captured
#endif
  return false;
}

/// Makes `device` the current one for its lifetime; free of charge where it already is.
class DeviceGuard {
 public:
  explicit DeviceGuard([[maybe_unused]] Device device) {
#if defined(MORTAR_HAS_CUDA)
    if (device.type != DeviceType::kCUDA) return;
    int current = 0;
    throw_on_error(cudaGetDevice(&current));
    if (current == device.index) return;
    throw_on_error(cudaSetDevice(device.index));
    previous_ = current;
#else
    check_type(device.type == DeviceType::kCPU,
               "mortar: tensors must be on cpu in a build without CUDA, got ",
               device_string(device));
#endif
  }
  ~DeviceGuard() {
#if defined(MORTAR_HAS_CUDA)
    if (previous_ >= 0) (void)cudaSetDevice(previous_);
#endif
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

#if defined(MORTAR_HAS_CUDA)
 private:
  static void throw_on_error(cudaError_t error) {
    if (error != cudaSuccess) {
      fail(ErrorKind::kRuntime, concat("mortar: CUDA failed: ", cudaGetErrorString(error)));
    }
  }
  int previous_ = -1;
#endif
};

/// Runs `body` and turns mortar::Error into the TVM-FFI error of the same kind, which Python sees
/// as ValueError, TypeError or RuntimeError. No backtrace is taken: the message says it all.
template <class Body>
decltype(auto) translate_errors(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& e) {
    const char* kind = e.kind() == ErrorKind::kValue  ? "ValueError"
                       : e.kind() == ErrorKind::kType ? "TypeError"
                                                      : "RuntimeError";
    throw tvm::ffi::Error(kind, e.what(), "");
  }
}

template <auto F>
struct Wrapped;
template <class R, class... Args, R (*F)(Args...)>
struct Wrapped<F> {
  static R call(Args... args) {
    return translate_errors([&]() -> R { return F(std::forward<Args>(args)...); });
  }
};

/// `function` with its errors translated: TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, wrapped<function>).
template <auto F>
inline constexpr auto wrapped = &Wrapped<F>::call;

}  // namespace mortar::ffi

/// Exports `void function(PackedArgs args, Any* result)` for calls with any number of arguments:
/// lists of tensors are passed flat, which costs less than converting them to a container.
#define MORTAR_EXPORT_PACKED(name, function)                                                    \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args,              \
                                                     int32_t num_args, TVMFFIAny* result) {     \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                  \
    ::mortar::ffi::translate_errors([&] {                                                       \
      function(                                                                                 \
          ::tvm::ffi::PackedArgs(reinterpret_cast<const ::tvm::ffi::AnyView*>(args), num_args), \
          reinterpret_cast<::tvm::ffi::Any*>(result));                                          \
    });                                                                                         \
    TVM_FFI_SAFE_CALL_END();                                                                    \
  }                                                                                             \
  static_assert(true, "")
