// SPDX-License-Identifier: Apache-2.0
// The kernels of LoRA training, as functions that launch them.
#pragma once

#include "lora/train/cuda/params.cuh"
#include "lora/train/cuda/tiles.cuh"
#include "mortar/stream.h"

namespace mortar::lora::train::cuda {

/// Which weights a product takes: A [r, K], or B^T [r, N].
enum class Side { kA, kB };

/// How the weights of all pairs lie, as [r, wide].
struct WeightLayout {
  /// Rows of ranks, dense along the wide dimension; else rows along it, dense in the ranks.
  bool rows_are_ranks;
  bool async, vectors;
  int parts;
};

/// partials[split][position][j] = sum over the columns of a split of wide[row, c] W[j, c], for the
/// columns of h from `first_slice` on (one slice, or all of them).
struct ShrinkParams {
  PairTable pairs;
  RowGroups rows;
  Fetch wide;
  MaskParams mask;
  bool masked;
  Side side;
  int first_slice, num_slices;
  HiddenColumns hidden;
  int first_hidden, width;  ///< columns of h that this launch makes
  WeightLayout weights;
  std::int64_t columns;
  int chunk, splits, ranks;
  std::int64_t max_tiles;
  float* partials;  ///< [splits][M][hidden.width]
};
void shrink(const ShrinkParams& p, Policy policy, Stream stream);

/// h[row, j] = factor * (sum of the splits in order), rounded; zeros past a rank and for base rows.
struct HiddenParams {
  PairTable pairs;
  RowGroups rows;
  HiddenColumns hidden;
  int first_slice, num_slices, first_hidden, width;
  int splits;
  const float* partials;
  void* h;
  DType dtype;
  std::int64_t max_tiles;
};
void reduce_hidden(const HiddenParams& p, Stream stream);

/// out[row, c] = base[row, c] + mask * sum_j h[row, j] W[j, c], over slices from first_slice on.
struct ExpandParams {
  PairTable pairs;
  RowGroups rows;
  Fetch h;
  HiddenColumns hidden;
  Side side;
  int first_slice, num_slices;
  WeightLayout weights;
  std::int64_t columns;
  Matrix base, out;       ///< base null: nothing is added
  bool pairs_of_columns;  ///< two neighbouring columns of out and base move as one
  MaskParams mask;
  bool masked;
  std::int64_t max_tiles;
};
void expand(const ExpandParams& p, Policy policy, Stream stream);

/// partials[tile][j][c] = sum over the rows of a chunk of s[row, first_hidden + j] wide[row, c].
struct OuterParams {
  PairTable pairs;
  RowGroups rows;
  Fetch wide, s;
  MaskParams mask;
  bool masked;
  int first_hidden, width;  ///< columns of s
  std::int64_t columns;
  int chunk_rows, ranks;
  std::int64_t max_tiles;
  float* partials;  ///< [max_tiles][width][columns]
};
void outer(const OuterParams& p, Policy policy, Stream stream);

/// dA or dB of the slices from first_slice on: partials in order, added to what is there if asked.
struct WeightGradParams {
  PairTable pairs;
  RowGroups rows;
  HiddenColumns hidden;
  Side side;
  int first_slice, num_slices, first_hidden, width;
  std::int64_t columns;
  int chunk_rows;
  int num_adapters;
  const float* partials;
};
void reduce_outer(const WeightGradParams& p, Stream stream);

/// Writes up to kUploadEntries entries of the table of pairs into the workspace.
inline constexpr int kUploadEntries = 16;
struct UploadParams {
  PairEntry* to;
  int count;
  PairEntry entries[kUploadEntries];
};
void upload(const UploadParams& p, Stream stream);

}  // namespace mortar::lora::train::cuda
