// SPDX-License-Identifier: Apache-2.0
// Test helpers of the dynamic convolution: guarded strided operands on any device, and the
// tolerance that float32 sums and one rounding allow.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/float_element.h"
#include "devices.h"
#include "mortar/dynamic_conv.h"

namespace mortar::testing {

using Array = std::vector<double>;

inline std::string device_name(const ::testing::TestParamInfo<Device>& info) {
  return device_label(info.param);
}

/// Bytes on a device; every transfer waits.
class Memory {
 public:
  Memory(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
#if MORTAR_HAS_CUDA
    if (device.type == DeviceType::kCUDA) {
      EXPECT_EQ(cudaMalloc(&data_, bytes + 1), cudaSuccess);
      return;
    }
#endif
    data_ = ::operator new (bytes + 1, std::align_val_t{256});
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
#if MORTAR_HAS_CUDA
    if (device_.type == DeviceType::kCUDA) {
      cudaFree(data_);
      return;
    }
#endif
    ::operator delete (data_, std::align_val_t{256});
  }

  char* data() const { return static_cast<char*>(data_); }
  void upload(const std::vector<char>& from) { copy(data_, from.data()); }
  std::vector<char> download() const {
    std::vector<char> to(bytes_);
    copy(to.data(), data_);
    return to;
  }

 private:
  void copy(void* to, const void* from) const {
#if MORTAR_HAS_CUDA
    if (device_.type == DeviceType::kCUDA) {
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(to, from, bytes_, cudaMemcpyDefault), cudaSuccess);
      return;
    }
#endif
    std::memcpy(to, from, bytes_);
  }

  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

/// How an operand lies in memory.
struct Layout {
  std::vector<int> order;             ///< dimensions from slowest to fastest; empty: row-major
  std::vector<std::int64_t> padding;  ///< extra elements per dimension, by dimension; empty: none
  std::int64_t offset = 0;            ///< elements before the first one: misaligns it
};

/// A strided view in a buffer whose every other byte is a guard. The buffer starts out as all ones
/// (a NaN in each float type), so an element that an op forgets to write is seen.
class Operand {
 public:
  Operand(Device device, DType dtype, std::vector<std::int64_t> shape, Layout layout = {})
      : dtype_(dtype), shape_(std::move(shape)) {
    const int ndim = static_cast<int>(shape_.size());
    if (layout.order.empty()) {
      for (int d = 0; d < ndim; ++d) layout.order.push_back(d);
    }
    if (layout.padding.empty()) layout.padding.assign(shape_.size(), 0);
    std::vector<std::int64_t> strides(shape_.size());
    std::int64_t extent = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      const auto d = static_cast<std::size_t>(layout.order[static_cast<std::size_t>(i)]);
      strides[d] = extent;
      extent *= shape_[d] + layout.padding[d];
    }
    constexpr std::int64_t kGuard = 64;
    first_ = kGuard + layout.offset;
    initial_.assign(static_cast<std::size_t>((first_ + extent + kGuard) * dtype_size(dtype)),
                    static_cast<char>(0xff));
    memory_ = std::make_unique<Memory>(device, initial_.size());
    memory_->upload(initial_);
    view_.data = memory_->data() + first_ * dtype_size(dtype);
    view_.dtype = dtype;
    view_.device = device;
    view_.ndim = ndim;
    for (int d = 0; d < ndim; ++d) {
      view_.shape[static_cast<std::size_t>(d)] = shape_[static_cast<std::size_t>(d)];
      view_.strides[static_cast<std::size_t>(d)] = strides[static_cast<std::size_t>(d)];
    }
  }

  const Tensor& view() const { return view_; }
  operator const Tensor&() const { return view_; }

  /// Stores values, in row-major order of the shape, each rounded to the dtype.
  void fill(const Array& values) {
    std::size_t i = 0;
    for_each_element([&](std::int64_t offset) { put(initial_, offset, values[i++]); });
    memory_->upload(initial_);
  }

  Array values() const { return values_of(memory_->download()); }

  /// The view's bits, in row-major order, zero-extended.
  std::vector<std::uint64_t> bits() const {
    const std::vector<char> bytes = memory_->download();
    std::vector<std::uint64_t> out;
    for_each_element([&](std::int64_t offset) {
      std::uint64_t word = 0;
      const auto size = static_cast<std::size_t>(dtype_size(dtype_));
      std::memcpy(&word, bytes.data() + static_cast<std::size_t>(offset) * size, size);
      out.push_back(word);
    });
    return out;
  }

  /// No byte outside the view has changed; with `all`, none inside either.
  void expect_guards_intact(const char* name, bool all = false) const {
    std::vector<char> now = memory_->download(), then = initial_;
    if (!all) {
      const auto size = static_cast<std::size_t>(dtype_size(dtype_));
      for_each_element([&](std::int64_t offset) {
        const auto at = static_cast<std::size_t>(offset) * size;
        std::memset(now.data() + at, 0, size);
        std::memset(then.data() + at, 0, size);
      });
    }
    EXPECT_TRUE(now == then) << name << ": bytes outside the view changed";
  }

 private:
  template <class Body>
  void for_each_element(const Body& body) const {
    std::int64_t count = 1;
    for (std::int64_t n : shape_) count *= n;
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t offset = first_, rest = i;
      for (int d = view_.ndim - 1; d >= 0; --d) {
        offset += rest % view_.size(d) * view_.stride(d);
        rest /= view_.size(d);
      }
      body(offset);
    }
  }
  void put(std::vector<char>& bytes, std::int64_t offset, double value) const {
    if (dtype_ == DType::kInt32) {
      reinterpret_cast<std::int32_t*>(bytes.data())[offset] = static_cast<std::int32_t>(value);
    } else if (dtype_ == DType::kInt64) {
      reinterpret_cast<std::int64_t*>(bytes.data())[offset] = static_cast<std::int64_t>(value);
    } else {
      store_float(bytes.data(), dtype_, offset, static_cast<float>(value));
    }
  }
  Array values_of(const std::vector<char>& bytes) const {
    Array out;
    for_each_element([&](std::int64_t offset) {
      out.push_back(static_cast<double>(load_float(bytes.data(), dtype_, offset)));
    });
    return out;
  }

  DType dtype_;
  std::vector<std::int64_t> shape_;
  std::int64_t first_ = 0;
  Tensor view_;
  std::vector<char> initial_;
  std::unique_ptr<Memory> memory_;
};

/// Normal random numbers, rounded to `dtype`.
inline Array random_values(std::mt19937& rng, std::size_t count, DType dtype) {
  std::normal_distribution<float> normal;
  Array values(count);
  for (double& v : values) v = static_cast<double>(round_to(normal(rng), dtype));
  return values;
}

/// |actual - expected| <= u |expected| + ulps 2^-24 magnitude + the least subnormal, where u is
/// the unit roundoff of the dtype (the one rounding at the end) and `magnitude` the sum of the
/// absolute values of the terms, of which float32 arithmetic loses a few units each.
inline void expect_close(const Array& actual, const Array& expected, const Array& magnitude,
                         DType dtype, double ulps, const std::string& what) {
  const double unit = dtype == DType::kBFloat16  ? 0x1p-8
                      : dtype == DType::kFloat16 ? 0x1p-11
                                                 : 0x1p-24;
  const double least = dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-140;
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double tolerance = unit * std::abs(expected[i]) + ulps * 0x1p-24 * magnitude[i] + least;
    // Negated, so that a NaN fails.
    if (!(std::abs(actual[i] - expected[i]) <= tolerance)) {
      FAIL() << what << " at " << i << ": got " << actual[i] << ", expected " << expected[i]
             << " within " << tolerance;
    }
  }
}

inline void finish(Device device) {
#if MORTAR_HAS_CUDA
  if (device.type == DeviceType::kCUDA) {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
  }
#endif
  (void)device;
}

}  // namespace mortar::testing
