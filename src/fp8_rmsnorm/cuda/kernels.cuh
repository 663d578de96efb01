// SPDX-License-Identifier: Apache-2.0
// The passes of the CUDA backend, one per .cu file, and the parameters they share.
#pragma once

#include "fp8_rmsnorm/backward_config.h"
#include "fp8_rmsnorm/config.h"
#include "fp8_rmsnorm/problem.h"
#include "mortar/stream.h"

namespace mortar::fp8_rmsnorm::cuda {

/// How CTAs walk over tiles of aligned rows, from the last to the first: what takes divisions.
struct TileWalk {
  int down = 0, across = 1;  ///< tiles of a column of them, of a row
  std::uint64_t magic = 0;   ///< 2^32 / across, rounded up: divides numbers below 2^32 / across
  int step_down = 0, step_across = 0;  ///< tiles back from one of a CTA to its next
  int rows = 0;                        ///< from a tile to the one below

  TileWalk() = default;
  TileWalk(const TilesPlan& plan, int tiles_across)
      : down(static_cast<int>(plan.tiles / tiles_across)),
        across(tiles_across),
        magic(((std::uint64_t{1} << 32) + static_cast<unsigned>(across) - 1) /
              static_cast<unsigned>(across)),
        step_down(plan.grid / across),
        step_across(plan.grid % across),
        rows(plan.step) {}
};

/// A forward, or a quantisation alone: then y is x, `norm` is false and there are no weights.
struct ForwardParams {
  const char* op = "fp8_rmsnorm_forward";
  Input input;
  Rows weight, residual, normed;
  float eps = 0.0f, weight_offset = 0.0f;
  bool norm = false;
  float* rstd = nullptr;
  Quantize out;
  ForwardPlan plan;
  std::uint32_t* maxima = nullptr;  ///< of |y|, one per CTA of the kernel that makes them
  int maxima_count = 0;
  std::uint32_t* column_maxima = nullptr;  ///< [N], of |y|
  TileWalk walk;
  float* partials = nullptr;  ///< of rows in strips, see row_blocks.cu
  float* weights = nullptr;   ///< [N] + offset in float32, as the rows kernel reads them
  /// The tiles' predecessor is of this call and does not write x: they may read it at once.
  bool x_is_there = false;
  bool scales_in_rows = false;  ///< a row's scales are whole accesses of 16 bytes too
  bool x_aligned = false;  ///< 16-byte pieces of x, and what lies beside them, are whole accesses
  bool q_aligned = false, q_t_aligned = false;

  /// Whether the maxima are wanted at all.
  MORTAR_HOST_DEVICE bool makes_maxima() const {
    return out.scaling == Fp8Scaling::kTensor && (!out.given_scale || out.amax != nullptr);
  }
  /// Whether the tiles make them, as there is no pass over rows.
  MORTAR_HOST_DEVICE bool tiles_make_maxima() const { return makes_maxima() && !plan.rows; }
};

/// All that a few elements need.
void small(const ForwardParams& p, Stream stream);
void convert_weights(const ForwardParams& p, Stream stream);
/// For aligned rows that a CTA holds, rounding to nearest; and for any.
void rows(const ForwardParams& p, Stream stream);
void any_rows(const ForwardParams& p, Stream stream);
/// For aligned rows, rounding to nearest; where no tile reaches beyond the matrix; and for any.
void tiles(const ForwardParams& p, Stream stream);
void whole_tiles(const ForwardParams& p, Stream stream);
void any_tiles(const ForwardParams& p, Stream stream);
/// Both for aligned rows, rounding to nearest, in one look at x: with scales of groups or a given
/// one; with scales of rows all but q_t, and the maxima of its columns.
void bands(const ForwardParams& p, Stream stream);
/// Both for aligned rows, with one scale for all of the tensor.
void fused(const ForwardParams& p, Stream stream);
/// For aligned rows: their statistics; with scales of rows q, and the maxima of the columns.
void row_blocks(const ForwardParams& p, Stream stream);
void clear_column_maxima(const ForwardParams& p, Stream stream);
void column_maxima(const ForwardParams& p, Stream stream);
void any_column_maxima(const ForwardParams& p, Stream stream);
void reduce_amax(const ForwardParams& p, Stream stream);
/// Scales of the columns of no rows.
void empty_columns(const ForwardParams& p, Stream stream);

/// `plan` null: choose()'s; tests inject others.
void forward(const ForwardProblem& p, const ForwardPlan* plan, Stream stream);
void quantize(const QuantizeProblem& p, const ForwardPlan* plan, Stream stream);
void backward(const BackwardProblem& p, const BackwardPlan* plan, Stream stream);

ForwardShape shape_of(const ForwardProblem& p);
ForwardShape shape_of(const QuantizeProblem& p);
BackwardShape shape_of(const BackwardProblem& p);
GpuShape this_gpu();

}  // namespace mortar::fp8_rmsnorm::cuda
