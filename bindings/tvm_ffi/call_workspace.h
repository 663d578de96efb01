// SPDX-License-Identifier: Apache-2.0
// A workspace for the time of one call: the given one, memory of the framework's allocator, or what
// Python keeps for several calls.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <optional>
#include <type_traits>

#include "convert.h"
#include "packed_call.h"

namespace mortar::ffi {

/// The workspace of a call by its way of handing tensors over: the given one, or `bytes` of the
/// framework's memory until the call is done.
template <class Source>
class Workspace;

template <>
class Workspace<FfiObjects> {
 public:
  Workspace(const Tensor& given, std::int64_t bytes, Device device) : tensor_(given) {
    if (given.defined() || bytes == 0) return;
    const DLDevice where{device.type == DeviceType::kCUDA ? kDLCUDA : kDLCPU, device.index};
    own_ = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(&bytes, 1),
                                          DLDataType{kDLUInt, 8, 1}, where);
    tensor_ = to_tensor(*own_->GetDLTensorPtr());
  }
  operator const Tensor&() const { return tensor_; }

 private:
  Tensor tensor_;
  std::optional<tvm::ffi::Tensor> own_;
};

template <>
class Workspace<TorchObjects> {
 public:
  Workspace(const Tensor& given, std::int64_t bytes, Device device) : tensor_(given) {
    if (given.defined() || bytes == 0) return;
    own_.emplace(bytes, device);
    tensor_ = own_->tensor();
  }
  operator const Tensor&() const { return tensor_; }

 private:
  Tensor tensor_;
  std::optional<TorchBytes> own_;
};

/// What a query says, or nothing for arguments that the op will refuse.
template <class Query>
std::int64_t bytes_of(const Tensor& workspace, const Query& query) {
  if (workspace.defined()) return 0;
  try {
    return query();
  } catch (const Error&) {
    return 0;
  }
}

/// For whom a given workspace was taken: argument `stream` of the torch_ functions of ops for which
/// Python keeps one (python/mortar/_lora_memory.py). kAnyStream: the caller answers for it.
constexpr std::int64_t kAnyStream = -1;

template <class Source>
std::int64_t read_stream_of_workspace(ArgReader<Source>& args) {
  return std::is_same_v<Source, TorchObjects> ? args.integer("stream") : kAnyStream;
}

/// Whether a kept workspace is none for this call: its memory belongs to another stream, or would
/// enter a graph.
inline bool is_out_of_place(std::int64_t stream_of_workspace, Stream stream) {
  if (stream_of_workspace == kAnyStream) return false;
  return reinterpret_cast<std::int64_t>(stream.handle) != stream_of_workspace ||
         is_capturing(stream);
}

/// The workspace of such an op: PyTorch's eager calls bring it, and are told how much they need
/// where they bring less. Others get memory of their own where they bring none.
template <class Source, class Query>
Workspace<Source> kept_workspace(const Tensor& given, std::int64_t stream_of_workspace,
                                 Device device, Stream stream, const Query& query) {
  if constexpr (std::is_same_v<Source, TorchObjects>) {
    const std::int64_t bytes = bytes_of(Tensor(), query);
    const std::int64_t held = given.defined() ? given.numel() : 0;
    if (bytes > held || (bytes > 0 && is_out_of_place(stream_of_workspace, stream))) {
      throw NeedsWorkspace{bytes};
    }
    return Workspace<Source>(given, 0, device);
  } else {
    return Workspace<Source>(given, bytes_of(given, query), device);
  }
}

}  // namespace mortar::ffi
