// SPDX-License-Identifier: Apache-2.0
// What a backend gets: plain pointers and sizes, already checked. All strides are in elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/int_math.h"
#include "mortar/fp8_rmsnorm.h"

namespace mortar::fp8_rmsnorm {

/// Scales are taken of max(amax, kLeastAmax).
inline constexpr float kLeastAmax = 1e-10f;

/// A matrix of dense rows, or a row (stride 0). Null data: absent.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t row_stride = 0;

  MORTAR_HOST_DEVICE bool given() const { return data != nullptr; }
};

/// float32 scales by two strides: that of group g of row m lies at m * row_stride + g *
/// group_stride. Both strides are 0 for a scale per tensor, the latter for a scale per row.
struct Scales {
  float* data = nullptr;
  std::int64_t row_stride = 0, group_stride = 0;

  MORTAR_HOST_DEVICE bool given() const { return data != nullptr; }
};

/// Where y goes, and how.
struct Quantize {
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  int group = 128;
  bool pow2_scale = false, given_scale = false;
  Fp8Numerics numerics = Fp8Numerics::kFast;
  const std::int64_t* rng = nullptr;  ///< seed, offset; null: round to nearest even
  DType dtype = DType::kFloat8E4M3;   ///< of q and q_t
  Rows q, q_t;                        ///< q_t: [N, M]
  Scales scale, scale_t;
  float* amax = nullptr;

  /// Whether scales come from values of other rows, so that all of x must be seen first.
  bool needs_whole_tensor() const {
    if (given_scale) return false;
    return scaling == Fp8Scaling::kTensor || (scaling == Fp8Scaling::kRow && q_t.given());
  }
};

/// x by its dtype and scales, with what it is multiplied with and added to.
struct Input {
  std::int64_t rows = 0, hidden = 0;  ///< M, N
  Rows x;
  Rows x_scale;     ///< [M, N / group]; float32 or bfloat16
  int x_group = 0;  ///< elements of x per scale; 0 without scales
};

struct ForwardProblem {
  Input input;
  Rows weight, residual, normed;
  float eps = 1e-5f, weight_offset = 0.0f;
  float* rstd = nullptr;
  Quantize out;
  std::byte* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

struct BackwardProblem {
  Input input;
  Rows dy, weight, residual_grad, dx, dw;
  const float* rstd = nullptr;
  float weight_offset = 0.0f;
  bool accumulate_dw = false;
  std::byte* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

/// The forward's second half alone: `input.x` is y, without scales.
struct QuantizeProblem {
  Input input;
  Quantize out;
  std::byte* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

/// What every backend does. Arguments are checked, N is at least 1, and the workspace is as large
/// as the query said. M is 0 only where something has to be written all the same: a scale and amax
/// of the whole tensor or scales of its columns (of zeros), or dw (zeros, or what it was). Queries
/// get problems whose pointers may be null apart from whether q, q_t and rng are given.
struct Backend {
  void (*forward)(const ForwardProblem& p, Stream stream);
  void (*backward)(const BackwardProblem& p, Stream stream);
  void (*quantize)(const QuantizeProblem& p, Stream stream);
  std::int64_t (*forward_workspace)(const ForwardProblem& p, Device device);
  std::int64_t (*backward_workspace)(const BackwardProblem& p, Device device);
  std::int64_t (*quantize_workspace)(const QuantizeProblem& p, Device device);
};

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kBackend;  ///< only in builds with MORTAR_HAS_CUDA
}

}  // namespace mortar::fp8_rmsnorm
