// SPDX-License-Identifier: Apache-2.0
#include "mortar/tensor.h"

#include "core/check.h"

namespace mortar {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "unknown";
}

Tensor::Tensor(void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_,
               Device device_)
    : data(data_), dtype(dtype_), device(device_), ndim(static_cast<int>(shape_.size())) {
  check(ndim <= kMaxDims, "Tensor: shape must have at most ", kMaxDims, " dimensions, got ", ndim);
  int i = 0;
  for (std::int64_t extent : shape_) shape[i++] = extent;
  std::int64_t stride = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= shape[d];
  }
}

std::int64_t Tensor::numel() const {
  std::int64_t n = ndim < 0 ? 0 : 1;
  for (int d = 0; d < ndim; ++d) n *= shape[d];
  return n;
}

bool Tensor::is_contiguous() const {
  std::int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expected) return numel() == 0;
    expected *= shape[d];
  }
  return true;
}

}  // namespace mortar
