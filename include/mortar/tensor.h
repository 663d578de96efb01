// SPDX-License-Identifier: Apache-2.0
// A small non-owning view of a strided array: the only tensor type of Mortar's public API.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace mortar {

/// The two 8-bit floats are OCP's: E4M3 without infinities (largest 448), E5M2 with them (57344).
enum class DType : std::int8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kUInt8,
  kFloat64,
  kFloat8E4M3,
  kFloat8E5M2
};

/// What vector loads need: plans, tables and workspaces start at a multiple of so many bytes, as do
/// other tensors where their op says so.
inline constexpr std::int64_t kMemoryAlignment = 16;

/// Bytes of one element.
constexpr std::int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

/// "float32", "bfloat16", ... as messages print it.
const char* dtype_name(DType dtype);

enum class DeviceType : std::int8_t { kCPU, kCUDA };

struct Device {
  DeviceType type = DeviceType::kCPU;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Pointer, dtype, shape, strides in elements, device. Owns nothing and is cheap to copy.
/// A default-made Tensor (`defined() == false`) stands for an optional argument left out.
struct Tensor {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int ndim = -1;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};

  Tensor() = default;
  /// A dense row-major view. Throws Error if there are more than kMaxDims dimensions.
  Tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  bool defined() const { return ndim >= 0; }
  std::int64_t size(int dim) const { return shape[dim < 0 ? dim + ndim : dim]; }
  std::int64_t stride(int dim) const { return strides[dim < 0 ? dim + ndim : dim]; }
  std::int64_t numel() const;
  /// True when elements are dense in row-major order (dimensions of size 1 do not count).
  bool is_contiguous() const;
  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
};

}  // namespace mortar
