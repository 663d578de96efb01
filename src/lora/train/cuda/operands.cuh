// SPDX-License-Identifier: Apache-2.0
// How the operands of a call lie: weights of all pairs by what they have in common.
#pragma once

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {

inline Matrix transposed(const Matrix& m) { return {m.data, m.col_stride, m.row_stride, m.dtype}; }

inline Fetch fetch_of(const Matrix& m, Policy policy) {
  return {m, policy != Policy::kSplit && copies_async(m), loads_vectors(m), parts_of(m.dtype)};
}
inline bool moves_in_pairs(const Matrix& m) {
  return m.col_stride == 1 && m.row_stride % 2 == 0 &&
         reinterpret_cast<std::uintptr_t>(m.data) % (2 * dtype_size(m.dtype)) == 0;
}

/// Of h and ds; float32 weights beside bfloat16 are columns of parts.
inline Policy product_policy(DType wide, DType weight) {
  return in_part_columns(wide, weight) ? Policy::kBFloat16 : policy_of(wide, weight);
}

/// ExpandParams::lean, where its plan says. dA then starts while dx with dropout still runs, which
/// pays where dx does not fit L2: a backward with p = 0.1 and rank 16, 8192 x 4096 x 14336, 180.0
/// to 176.0 us; but 4096 x 4096 x 4096, 67.6 to 68.8.
inline bool leaves_room(const ExpandParams& e) {
  constexpr std::int64_t kManyElements = 24 << 20;
  const int panel = expand_warp_columns(e.plan.ranks) * (kThreads / 32) / e.plan.row_warps;
  return e.plain || (e.vectors && e.base.data == nullptr && e.columns % panel == 0 &&
                     e.rows.num_rows * e.columns >= kManyElements);
}

class WeightLayouts {
 public:
  void note(const Pair& pair) {
    if (pair.rank == 0) return;
    ranks_a_.note(pair.a);
    wide_a_.note(transposed(pair.a));
    ranks_b_.note(transposed(pair.b));
    wide_b_.note(pair.b);
  }
  WeightLayout of(Side side, Policy policy, DType weight) const {
    const Common& by_ranks = side == Side::kA ? ranks_a_ : ranks_b_;
    const Common& by_wide = side == Side::kA ? wide_a_ : wide_b_;
    WeightLayout l;
    l.rows_are_ranks = by_ranks.dense || !by_wide.dense;
    const Common& own = l.rows_are_ranks ? by_ranks : by_wide;
    l.async = policy != Policy::kSplit && own.async;
    l.vectors = own.vectors;
    l.parts = parts_of(weight);
    return l;
  }

 private:
  /// Of weights seen as [r, wide], or as [wide, r].
  struct Common {
    bool dense = true, async = true, vectors = true;
    void note(const Matrix& m) {
      dense = dense && m.col_stride == 1;
      async = async && copies_async(m);
      vectors = vectors && loads_vectors(m);
    }
  };
  Common ranks_a_, wide_a_, ranks_b_, wide_b_;
};

}  // namespace mortar::lora::train::cuda
