// SPDX-License-Identifier: Apache-2.0
// RMSNorm that ends in FP8: forward with quantisation and transpose, backward, and the quantisation
// alone.
//
//   z = x * x_scale (+ residual)      rstd = 1 / sqrt(mean(z^2) + eps)
//   y = z * rstd * (weight + weight_offset)      y ~ q * scale
//
// Sources: RMSNorm is Zhang and Sennrich, 2019; group-scaled FP8 activations are COAT's (Xi et al.,
// 2024); 1xG block scales are DeepSeek-V3's (2024).
#pragma once

#include <cstdint>

#include "mortar/stream.h"
#include "mortar/tensor.h"

namespace mortar {

inline constexpr std::int64_t kFp8RmsNormMaxHidden = 65536;

/// What shares one scale: the whole tensor, a row, or a group of adjacent elements of a row.
enum class Fp8Scaling : std::int8_t { kTensor, kRow, kGroup };

/// kFast: float32 throughout, one rounding. kCompat: COAT's chain of roundings, byte for byte (its
/// scaling is kTensor, without pow2_scale): y = (z * rstd) * weight in float32, scale = the largest
/// over rows of (max|y| + 1e-10) / 448 (57344 for float8_e5m2) rounded to bfloat16, y rounded to
/// bfloat16 (fp8_quantize takes y as it comes), q = y / scale by a correctly rounded division.
enum class Fp8Numerics : std::int8_t { kFast, kCompat };

/// How a matrix y [M, N] becomes FP8.
struct Fp8Format {
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  std::int64_t group = 128;  ///< G of kGroup: 16, 32, 64 or 128; the last of a row may be shorter
  bool pow2_scale = false;   ///< scales are rounded up to a power of two
  bool given_scale = false;  ///< `scale` (and `scale_t`) are inputs; positive, finite
  Fp8Numerics numerics = Fp8Numerics::kFast;
  /// int64 [2], seed and offset of Philox 4x32-10: stochastic rounding. Undefined: to nearest even.
  /// Read on the device. Element (m, n) of y draws by its index m * N + n, for q and q_t alike.
  Tensor rng;
};

/// What becomes of y. Undefined tensors are not made; at least one of q and q_t is.
/// Both are float8_e4m3fn or float8_e5m2, of one dtype. Scales are float32, max(amax, 1e-10) / 448
/// (57344 for float8_e5m2), such that y is about q * scale.
struct Fp8Quantized {
  Tensor q;        ///< [M, N], rows dense
  Tensor scale;    ///< [] for kTensor, [M] for kRow, [M, ceil(N / G)] of any strides for kGroup
  Tensor q_t;      ///< [N, M], rows dense: y^T by the same scheme along its own rows
  Tensor scale_t;  ///< [N] for kRow, [N, ceil(M / G)] for kGroup; undefined for kTensor
  Tensor amax;     ///< float32 []: max|y|; kTensor alone, optional
};

/// Forward.
///
/// x         [M, N]: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; rows dense.
/// x_scale   [M, N / G] for 8-bit x: bfloat16 or float32, G = 16, 32, 64 or 128; else undefined.
/// weight    [N]: float32, float16 or bfloat16.
/// residual  [M, N] or undefined: float32, float16 or bfloat16. The sum x * x_scale + residual is
///           rounded once to its dtype, written back into it, and that value is normalised.
/// rstd      float32 [M], written; undefined: not wanted.
/// normed    bfloat16 [M, N], y rounded once; undefined: not wanted.
/// workspace uint8, of at least fp8_rmsnorm_forward_workspace bytes, 16-byte aligned; what it holds
///           does not matter.
///
/// A NaN is not quantised away: with kTensor it reaches the scale and every value, else it stays in
/// its row or group. Conversions saturate. Results are the same bits every time. M may be 0: the
/// scale of an empty tensor, or scale_t of its columns, is that of zeros.
/// Throws Error, with nothing written, if an argument does not fit.
void fp8_rmsnorm_forward(const Tensor& x, const Tensor& x_scale, const Tensor& weight, float eps,
                         float weight_offset, const Tensor& residual, const Fp8Format& format,
                         const Fp8Quantized& out, const Tensor& rstd, const Tensor& normed,
                         const Tensor& workspace, Stream stream);

/// Backward. dz = rstd * (g - z * rstd^2 * mean(g * z)) with g = dy * (weight + weight_offset);
/// dx = dz (+ residual_grad); dw = sum over rows of dy * z * rstd.
///
/// dy             [M, N]: float32, float16 or bfloat16, rows dense.
/// x, x_scale     what was normalised: as in the forward, or its residual as it was left.
/// rstd           float32 [M] of the forward.
/// residual_grad  [M, N] of dy's dtype, or undefined: added into dx before its one rounding.
/// dx             [M, N] of dy's dtype; may be dy or residual_grad itself. Undefined: not wanted.
/// dw             [N]: float32, float16 or bfloat16. Undefined: not wanted.
/// accumulate_dw  dw += instead of dw =; the sum is made in float32 and rounded once.
void fp8_rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& x_scale,
                          const Tensor& weight, float weight_offset, const Tensor& rstd,
                          const Tensor& residual_grad, const Tensor& dx, const Tensor& dw,
                          bool accumulate_dw, const Tensor& workspace, Stream stream);

/// The second half alone: y [M, N] of float32, float16 or bfloat16, rows dense.
void fp8_quantize(const Tensor& y, const Fp8Format& format, const Fp8Quantized& out,
                  const Tensor& workspace, Stream stream);

/// Bytes of workspace. They depend on sizes, dtypes, the format and the device alone.
std::int64_t fp8_rmsnorm_forward_workspace(const Tensor& x, const Fp8Format& format,
                                           const Fp8Quantized& out);
std::int64_t fp8_rmsnorm_backward_workspace(const Tensor& x);
std::int64_t fp8_quantize_workspace(const Tensor& y, const Fp8Format& format,
                                    const Fp8Quantized& out);

/// Fewest bytes that an op can move: each operand once.
struct Fp8RmsNormTraffic {
  std::int64_t forward = 0, backward = 0;
};
/// `group` of 0: x has no scales. `outputs`: how many of q and q_t are made.
Fp8RmsNormTraffic fp8_rmsnorm_traffic(std::int64_t rows, std::int64_t hidden, std::int64_t x_bytes,
                                      std::int64_t group, std::int64_t scale_bytes, int outputs,
                                      std::int64_t dy_bytes);

}  // namespace mortar
