// SPDX-License-Identifier: Apache-2.0
// What a backend of LoRA training gets: plain pointers and sizes, already checked. All strides are
// in elements.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "lora/train/dropout.h"
#include "mortar/lora_train.h"

namespace mortar::lora::train {

/// Columns of h per slice are a multiple of this, so that its rows of 16-bit values are 16-byte
/// aligned.
inline constexpr int kHiddenGranule = 8;

/// A matrix of any strides. Null: not there (or empty, which nobody reads).
struct Matrix {
  void* data = nullptr;
  std::int64_t row_stride = 0, col_stride = 0;
  DType dtype = DType::kFloat32;
};

/// One (adapter, slice). rank 0: nothing to do.
struct Pair {
  Matrix a, b;    ///< [r, K], [N_s, r]
  Matrix da, db;  ///< null: frozen
  int rank = 0;
  float factor = 0;             ///< scale / (1 - p); 0 with p = 1
  std::uint32_t threshold = 0;  ///< of dropout
  bool add_a = false, add_b = false;

  bool drops_whole() const { return rank > 0 && threshold >= kDropAll; }
};

/// One slice's outputs or their gradients.
struct SliceView {
  std::int64_t width = 0;         ///< N_s
  std::int64_t first_column = 0;  ///< among the columns of all slices
  int rank = 0;                   ///< R_s: the largest rank of any adapter
  int first_hidden = 0;           ///< column of h
  Matrix base, y, dy;
};

/// Rows by segments, by plan, or (both null) all of adapter 0.
struct RowsOf {
  const std::int32_t* offsets = nullptr;
  const std::int32_t* plan = nullptr;
};

/// One call, forward or backward.
struct Problem {
  std::int64_t num_rows = 0;     ///< M
  std::int64_t hidden = 0;       ///< K
  std::int64_t total_width = 0;  ///< sum of N_s
  std::int64_t num_adapters = 1;
  int num_slices = 1;
  int hidden_width = 0;  ///< columns of h
  DType weight = DType::kFloat32;
  bool drops = false;        ///< some adapter has p > 0
  bool drops_whole = false;  ///< some adapter has p = 1
  bool without_dropped =
      false;  ///< pair() has nothing of these: a factor of 0 would keep their NaN
  LoraDropoutOn drop_on = LoraDropoutOn::kInput;
  const std::int64_t* rng = nullptr;
  RowsOf rows;
  SliceView slices[kLoraMaxSlices];
  Matrix x, dx;
  void* h = nullptr;  ///< dense [M, hidden_width] of `weight`
  bool add_dx = false;
  bool wants_da = false, wants_db = false;  ///< of any pair
  void* workspace = nullptr;

  // The caller's spans, which live as long as the call.
  const LoraTrainProblem* given = nullptr;
  const LoraTrainGrads* grads = nullptr;

  Pair pair(std::int64_t adapter, int slice) const;
  bool drops_input() const { return drops && drop_on == LoraDropoutOn::kInput; }
  bool drops_delta() const { return drops && drop_on == LoraDropoutOn::kDelta; }
};

struct Backend {
  void (*forward)(const Problem& p, Stream stream);
  void (*backward)(const Problem& p, Stream stream);
  /// Bytes, from sizes, dtypes and what is wanted; no pointer is followed.
  std::int64_t (*forward_workspace)(const Problem& p);
  std::int64_t (*backward_workspace)(const Problem& p);
  /// Copies `count` entries of the offsets to the host and waits for them.
  void (*read_offsets)(const std::int32_t* offsets, std::int64_t count, std::int32_t* to,
                       Stream stream);
};

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kBackend;  ///< only in builds with MORTAR_HAS_CUDA
}

}  // namespace mortar::lora::train
