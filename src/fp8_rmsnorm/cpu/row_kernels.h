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
  DType side = DType::kFloat32;  ///< of residual, or of dy, residual_grad and dx
  DType dw = DType::kFloat32;
  DType q = DType::kFloat8E4M3;
};

using Widen = void (*)(const void* from, std::int64_t n, float* to);
using Narrow = void (*)(const float* from, std::int64_t n, void* to);

struct RowKernels {
  /// z = x * x_scale, where `scales` is that of the first group; null: z = x.
  void (*widen_x)(const void* x, const void* scales, int group, std::int64_t n, float* z);
  Widen widen_weight, widen_side, widen_dw;
  Narrow narrow_side, narrow_dw, narrow_bf16;
  /// To nearest even, or with one draw for each element.
  void (*narrow_q)(const float* from, const std::uint32_t* draws, std::int64_t n, void* to);

  void (*add)(const float* a, std::int64_t n, float* to);  ///< to += a
  void (*add_constant)(float a, std::int64_t n, float* to);
  /// y = (z * w) * factor, and COAT's (z * rstd) * w.
  void (*normalise)(const float* z, const float* w, float factor, std::int64_t n, float* y);
  void (*normalise_compat)(const float* z, const float* w, float rstd, std::int64_t n, float* y);
  void (*round_bf16)(std::int64_t n, float* y);
  void (*multiply)(const float* y, float factor, std::int64_t n, float* to);
  void (*multiply_each)(const float* y, const float* factors, std::int64_t n, float* to);
  void (*divide)(const float* y, float divisor, std::int64_t n, float* to);

  /// sums += z^2, and maxima of |z * w|.
  void (*sum_squares)(const float* z, const float* w, std::int64_t n, Sums* sums, Maxima* maxima);
  void (*max_row)(const float* y, std::int64_t n, Maxima* maxima);
  void (*max_columns)(const float* y, std::int64_t n, std::uint32_t* maxima);
  /// Of each `group` of elements; the last may be shorter.
  void (*max_groups)(const float* y, int group, std::int64_t n, float* maxima);

  /// sums += dy * w * z.
  void (*dot)(const float* dy, const float* w, const float* z, std::int64_t n, Sums* sums);
  /// dz = rstd * (dy * w - z * c).
  void (*gradient)(const float* dy, const float* w, const float* z, float rstd, float c,
                   std::int64_t n, float* dz);
  /// dw += dy * (z * rstd).
  void (*weight_gradient)(const float* dy, const float* z, float rstd, std::int64_t n, float* dw);

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
