// SPDX-License-Identifier: Apache-2.0
// Blocks of rows in shared memory: the one that a CTA works on, and the next on its way there.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/row_ring.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// A thread's pieces of a block, in kSlots slots of each of kRows rows: it alone fills and reads
/// their places, so no barrier is needed. Where there is no row or column come zeros.
template <class T>
class RowBlockRing {
 public:
  static constexpr int kElements = kPiece<T>, kSlots = sizeof(T);
  static constexpr int kRows = RowBlockPlan::rows(sizeof(T));
  static_assert(RowBlockPlan::kStages == 2 && RowBlockPlan::kPieces == kRows * kSlots);

  /// The thread has pieces first, first + step, ... of its rows.
  __device__ __forceinline__ RowBlockRing(const ForwardParams& p, const uint4* stages, int first,
                                          int step)
      : p_(p),
        first_(first),
        step_(step),
        pieces_(static_cast<int>(p.input.hidden) / kElements),
        place_bytes_(blockDim.x * 16),
        here_(device::smem_address(stages) + threadIdx.x * 16),
        there_(here_ + RowBlockPlan::kPieces * place_bytes_) {}

  /// The piece in a slot, and whether there is one.
  __device__ __forceinline__ int piece_of(int slot) const { return first_ + slot * step_; }
  __device__ __forceinline__ bool has(int slot) const { return piece_of(slot) < pieces_; }

  /// Asks for the block from row `first` on, behind the one that is worked on.
  __device__ __forceinline__ void load(std::int64_t first) {
    const std::int64_t rows = p_.input.rows - first;
    const auto left = static_cast<int>(max(min(rows, std::int64_t{kRows}), std::int64_t{0}));
    const std::int64_t row_bytes = p_.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    const char* x = static_cast<const char*>(p_.input.x.data) + first * row_bytes;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int count = has(s) ? left : 0;
      const char* from = x + piece_of(s) * 16;
#pragma unroll
      for (int r = 0; r < kRows; ++r, from += row_bytes) {
        device::cp_async_16(there_ + (r * kSlots + s) * place_bytes_,
                            r < count ? from : p_.input.x.data, r < count ? 16 : 0);
      }
    }
    device::cp_async_commit();
    if constexpr (kIsFloat8<T>) {
      const int count = has(0) ? left : 0;
      if (count < kRows) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) next_word_[r] = 0;
      }
      narrow() ? load_scales<true>(first, count) : load_scales<false>(first, count);
    }
  }
  /// Goes on to the block that was asked for last, once the next is asked for too: from row `first`
  /// on.
  __device__ __forceinline__ void advance(std::int64_t first) {
    const std::uint32_t used = here_;
    here_ = there_;
    there_ = used;
#pragma unroll
    for (int r = 0; r < kRows; ++r) scale_word_[r] = next_word_[r];
    load(first);
    device::cp_async_wait<1>();
  }

  __device__ __forceinline__ uint4 piece(int row, int slot) const {
    return read_shared<16>(here_ + (row * kSlots + slot) * place_bytes_);
  }
  /// Of the thread's pieces of a row of 8-bit x.
  __device__ __forceinline__ float scale(int row) const {
    return kIsFloat8<T> ? scale_of_word(narrow(), scale_word_[row]) : 1.0f;
  }

 private:
  template <bool kNarrow>
  __device__ __forceinline__ void load_scales(std::int64_t first, int count) {
    constexpr int kBytes = kNarrow ? 2 : 4;
    const std::int64_t row_bytes = p_.input.x_scale.row_stride * kBytes;
    const char* from = static_cast<const char*>(p_.input.x_scale.data) + first * row_bytes +
                       (piece_of(0) * kElements >> log2_of(p_.input.x_group)) * kBytes;
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += row_bytes) {
      load_word_if<kNarrow>(r < count, next_word_[r], from);
    }
  }
  __device__ __forceinline__ bool narrow() const {
    return p_.input.x_scale.dtype != DType::kFloat32;
  }

  const ForwardParams& p_;
  int first_, step_, pieces_;
  std::uint32_t place_bytes_;  ///< from a thread's place to its next
  std::uint32_t here_, there_;
  std::uint32_t scale_word_[kRows] = {}, next_word_[kRows] = {};
};

}  // namespace mortar::fp8_rmsnorm::cuda
