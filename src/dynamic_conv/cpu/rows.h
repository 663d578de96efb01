// SPDX-License-Identifier: Apache-2.0
// SIMD kernels over the channels of one time step. Float32 rows are scratch of the backend: they
// are 64-byte aligned and have room for kRowPadding elements past `n`.
#pragma once

#include <cstdint>

#include "dynamic_conv/problem.h"

namespace mortar::dynamic_conv::cpu {

inline constexpr int kRowPadding = 16;  ///< lanes of the widest vector

/// What becomes of a row of sums.
struct Finish {
  bool silu = false;
  /// Writes past the caches if the row is aligned to the vectors; whoever asks for it calls
  /// hwy::FlushStream at the end.
  bool stream = false;
};

/// `n` counts channels. Taps and states are dense in (channel, tap).
struct RowKernels {
  /// to[c] = from[c], from a row of x's dtype; narrow rounds to nearest even on the way back.
  void (*widen)(const void* from, std::int64_t n, float* to);
  void (*narrow)(const float* from, std::int64_t n, void* to);
  /// rows[j][c] = state[c][j] for a state of x's dtype and length L = W or W - 1, and back.
  void (*widen_state)(const void* state, std::int64_t n, float* const* rows);
  void (*narrow_state)(const float* const* rows, std::int64_t n, void* state);
  /// y[c] = f(sum_w k[c][w] * x[W - 1 - w][c]) rounded once, where f is SiLU or nothing; x[j] is
  /// the input j steps ago. Rows of x and y are of x's dtype, at any address; `convolve_scratch`
  /// has float32 ones.
  void (*convolve)(const void* const* x, const void* k, std::int64_t n, Finish finish, void* y);
  void (*convolve_scratch)(const void* const* x, const void* k, std::int64_t n, Finish finish,
                           void* y);
  /// pending[j][c] += g[c] * k[c][W - 1 - j], but pending[0] is set; dk[c][w] = g[c] * x[W-1-w][c]
  /// unless dk is null.
  void (*scatter)(const float* const* x, const void* k, const float* g, std::int64_t n, void* dk,
                  float* const* pending);
  /// g *= d silu(s) / ds.
  void (*silu_gradient)(const float* s, std::int64_t n, float* g);
};

/// The kernels for these dtypes on this machine. state_length 0: the state kernels are null.
RowKernels row_kernels(DType x_dtype, DType k_dtype, int width, int state_length);

}  // namespace mortar::dynamic_conv::cpu
