// SPDX-License-Identifier: Apache-2.0
// Test helpers of FP8 RMSNorm: tensors of all its dtypes, scales in both layouts, and how far a
// result may lie from the exact one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dtype_visitor.h"
#include "fp8_rmsnorm/reference.h"
#include "guarded_tensor.h"

namespace mortar::testing {

using fp8_rmsnorm::reference::Array;
using fp8_rmsnorm::reference::Bytes;
using fp8_rmsnorm::reference::Floats;

inline constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
inline constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2;
using AllFloats = DTypeList<kF32, kF16, kBF16, kE4M3, kE5M2>;

inline std::string device_name(const ::testing::TestParamInfo<Device>& info) {
  return device_label(info.param);
}

inline double get_value(const GuardedTensor& t, std::int64_t index) {
  return visit_dtype<AllFloats>(t.host().dtype, "test", [&](auto tag) {
    return static_cast<double>(to_float(t.data<typename decltype(tag)::type>()[index]));
  });
}

inline void set_value(GuardedTensor& t, std::int64_t index, double value) {
  visit_dtype<AllFloats>(t.host().dtype, "test", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 1) {
      t.data<T>()[index] = float8_nearest<T>(static_cast<float>(value));
    } else {
      t.data<T>()[index] = from_float<T>(static_cast<float>(value));
    }
  });
}

/// Random values of a trial, one after another.
class Draws {
 public:
  explicit Draws(unsigned seed) : engine_(seed) {}

  Array normal(std::int64_t count) { return draw(count, normal_); }
  /// Of 0.5 to 2, for what values are multiplied by.
  Array factors(std::int64_t count) { return draw(count, factors_); }
  std::mt19937& engine() { return engine_; }

 private:
  template <class Distribution>
  Array draw(std::int64_t count, Distribution& distribution) {
    Array values(static_cast<std::size_t>(count));
    for (double& v : values) v = distribution(engine_);
    return values;
  }

  std::mt19937 engine_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> factors_{0.5, 2.0};
};

/// All elements, row by row.
inline Array values_of(const GuardedTensor& t) {
  Array values;
  t.for_each([&](std::int64_t i) { values.push_back(get_value(t, i)); });
  return values;
}

inline Bytes bytes_of(const GuardedTensor& t) {
  Bytes bytes;
  const std::int64_t size = dtype_size(t.host().dtype);
  t.for_each([&](std::int64_t i) {
    const std::uint8_t* p = t.data<std::uint8_t>() + i * size;
    bytes.insert(bytes.end(), p, p + size);
  });
  return bytes;
}

inline Floats floats_of(const Array& values) { return Floats(values.begin(), values.end()); }

/// A tensor with these values, rounded to its dtype.
inline GuardedTensor make_tensor(DType dtype, std::vector<std::int64_t> shape, const Array& values,
                                 Layout layout, Device device) {
  GuardedTensor t(dtype, std::move(shape), layout, device);
  std::size_t next = 0;
  t.for_each([&](std::int64_t i) { set_value(t, i, values[next++]); });
  t.upload();
  return t;
}

inline GuardedTensor make_rng(std::int64_t seed, std::int64_t offset, Device device) {
  GuardedTensor t(DType::kInt64, {2}, {}, device);
  t.data<std::int64_t>()[0] = seed;
  t.data<std::int64_t>()[1] = offset;
  t.upload();
  return t;
}

/// Where the contract allows: at a multiple of 16 bytes, but not of 32.
inline GuardedTensor make_workspace(std::int64_t bytes, Device device) {
  return GuardedTensor(DType::kUInt8, {bytes}, {.lead = 16}, device);
}

/// Scales of a matrix of `rows` x `columns`: one, [rows] or [rows, groups], the last row by row or
/// column by column with columns of a multiple of 4 floats.
struct ScaleTensor {
  GuardedTensor memory;
  std::int64_t groups = 1, row_stride = 0, group_stride = 0;
  std::int64_t rows = 1;
  Tensor view;

  ScaleTensor() = default;
  ScaleTensor(std::int64_t rows_, std::int64_t columns, Fp8Scaling scaling, std::int64_t group,
              bool by_columns, Device device) {
    if (scaling == Fp8Scaling::kTensor) {
      memory = GuardedTensor(kF32, {}, {}, device);
      view = memory.view();
      return;
    }
    rows = rows_;
    row_stride = 1;
    if (scaling == Fp8Scaling::kRow) {
      memory = GuardedTensor(kF32, {rows}, {}, device);
      view = memory.view();
      return;
    }
    groups = (columns + group - 1) / group;
    if (by_columns) {
      group_stride = (rows + 3) / 4 * 4;
      memory = GuardedTensor(kF32, {groups, rows}, {.row_gap = group_stride - rows}, device);
      view = memory.view();
      std::swap(view.shape[0], view.shape[1]);
      std::swap(view.strides[0], view.strides[1]);
    } else {
      row_stride = groups + 1;
      group_stride = 1;
      memory = GuardedTensor(kF32, {rows, groups}, {.row_gap = 1}, device);
      view = memory.view();
    }
  }

  double at(std::int64_t row, std::int64_t group) const {
    return get_value(memory, row * row_stride + group * group_stride);
  }
  void fill(std::mt19937& rng) {
    std::uniform_real_distribution<double> uniform(0.005, 0.02);
    memory.for_each([&](std::int64_t i) { set_value(memory, i, uniform(rng)); });
    memory.upload();
  }
};

/// The distance of neighbours around v among the values of an 8-bit dtype.
inline double step_at(double v, DType dtype) {
  const int least = dtype == kE4M3 ? -6 : -14, mantissa = dtype == kE4M3 ? 3 : 2;
  const int exponent = v == 0 ? least : std::max(least, std::ilogb(v));
  return std::ldexp(1.0, exponent - mantissa);
}

inline double largest_of(DType dtype) { return dtype == kE4M3 ? 448 : 57344; }

/// How far y made in float32 may lie from the exact one, relative to it. A square enters at most
/// N / 32 + 8 additions, each good to 2^-24, of which the root keeps half; z, the root, the
/// division and the products with rstd, weight and 1 / scale take a few roundings more.
inline double relative_error(std::int64_t columns) {
  return (static_cast<double>(columns) / 64 + 16) * 0x1p-24;
}

}  // namespace mortar::testing
