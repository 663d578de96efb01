// SPDX-License-Identifier: Apache-2.0
// SIMD kernels over a run of at most kRun adjacent elements of one row. Float32 rows and draws are
// scratch of the backend: 64-byte aligned, with room for kPadding elements past `n`, which `widen`
// sets to zero.
#pragma once

#include <cstdint>

#include "mortar/tensor.h"

namespace mortar::fp8_rmsnorm::cpu {

inline constexpr std::int64_t kRun = 1024;
inline constexpr int kPadding = 32;

/// Element i of a row goes to lane i mod 32, whatever the instruction set.
inline constexpr int kLanesOfSum = 32;
struct alignas(64) Sums {
  float lane[kLanesOfSum] = {};

  /// The fixed tree over the lanes: halves are added until one is left.
  float total() const {
    Sums s = *this;
    for (int half = kLanesOfSum / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) s.lane[i] += s.lane[i + half];
    }
    return s.lane[0];
  }
};

/// Magnitudes as bits, whose order as integers is theirs, with NaN above all.
struct alignas(64) Maxima {
  std::uint32_t lane[kLanesOfSum] = {};

  std::uint32_t total() const {
    std::uint32_t most = 0;
    for (std::uint32_t v : lane) most = v > most ? v : most;
    return most;
  }
};

/// Dtypes of what a call reads and writes. Those that it lacks stay float32.
struct RowTypes {
  DType x = DType::kFloat32, x_scale = DType::kFloat32, weight = DType::kFloat32;
  DType z = DType::kFloat32;     ///< of the z that kernels read: x, the residual, or scratch
  DType side = DType::kFloat32;  ///< of residual, or of dy, residual_grad and dx
  DType dw = DType::kFloat32;
  DType q = DType::kFloat8E4M3;
};

/// A run of one row of the backward.
struct GradientRun {
  const void *dy, *z;
  const void* added;  ///< to dx, rounded with it; or null
  const float* w;
  float rstd, c;  ///< c = rstd^2 * mean(dy * w * z)
  std::int64_t n;
  float* dw;  ///< += dy * (z * rstd); or null
  void* dx;   ///< = rstd * (dy * w - z * c) + added; or null
};

using Widen = void (*)(const void* from, std::int64_t n, float* to);
using Narrow = void (*)(const float* from, std::int64_t n, void* to);
using Quantise = void (*)(const void* z, const float* w, float factor, const std::uint32_t* draws,
                          std::int64_t n, void* to);

struct RowKernels {
  /// z = x * x_scale, where `scales` is that of the first group; null: z = x.
  void (*widen_x)(const void* x, const void* scales, int group, std::int64_t n, float* z);
  Widen widen_weight, widen_side, widen_dw;
  Narrow narrow_side, narrow_dw, narrow_bf16;

  void (*add)(const float* a, std::int64_t n, float* to);  ///< to += a
  void (*add_constant)(float a, std::int64_t n, float* to);
  /// y = (z * w) * factor, and COAT's (z * rstd) * w.
  void (*normalise)(const void* z, const float* w, float factor, std::int64_t n, float* y);
  void (*normalise_compat)(const void* z, const float* w, float rstd, std::int64_t n, float* y);
  void (*round_bf16)(std::int64_t n, float* y);

  /// Codes of (z * w) * factor, or without w of z * factor, and the same of a y in scratch. To
  /// nearest even, or with one draw for each element.
  Quantise quantise, quantise_y;
  /// Codes of y * factors.
  void (*quantise_each)(const float* y, const float* factors, const std::uint32_t* draws,
                        std::int64_t n, void* to);
  void (*quantise_divided)(const float* y, float divisor, const std::uint32_t* draws,
                           std::int64_t n, void* to);

  /// sums += z^2, and maxima of |z * w|.
  void (*sum_squares)(const void* z, const float* w, std::int64_t n, Sums* sums, Maxima* maxima);
  void (*max_row)(const void* z, std::int64_t n, Maxima* maxima);
  void (*max_row_y)(const void* y, std::int64_t n, Maxima* maxima);
  /// Of |(z * w) * factor|, or without w of |z * factor|.
  void (*max_columns)(const void* z, const float* w, float factor, std::int64_t n,
                      std::uint32_t* maxima);
  /// Of each `group` of elements; the last may be shorter.
  void (*max_groups)(const float* y, int group, std::int64_t n, float* maxima);

  /// sums += dy * w * z.
  void (*dot)(const void* dy, const float* w, const void* z, std::int64_t n, Sums* sums);
  void (*gradients)(const GradientRun& run);

  /// Philox draws of elements `first` to `first` + n - 1.
  void (*draw)(const std::int64_t* rng, std::uint64_t first, std::int64_t n, std::uint32_t* draws);
  /// to[c * stride + r] = from[r * pitch + c], `rows` x `columns` bytes. `from` has room for the
  /// next multiples of 16 of both.
  void (*transpose)(const std::uint8_t* from, std::int64_t pitch, std::int64_t rows,
                    std::int64_t columns, std::uint8_t* to, std::int64_t stride);
};

/// The kernels for these dtypes on this machine.
RowKernels row_kernels(const RowTypes& types);

}  // namespace mortar::fp8_rmsnorm::cpu
