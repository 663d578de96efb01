// SPDX-License-Identifier: Apache-2.0
// A row in the registers of the threads that share it: its pieces, and the weights from shared
// memory.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "fp8_rmsnorm/cuda/row_weights.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr int kHeld = kHeldPieces;  ///< slots of a thread

/// Slot i of the order in which sums of pieces are made, so that few of them wait for each other.
constexpr int slot_at(int i) { return (i & 1) << 2 | (i & 2) | i >> 2; }
static_assert(kHeld == 8, "slot_at turns over three bits");

/// The pieces of x that a thread holds, and the words of their scales: in slot v, piece v *
/// row_threads + lane of a row.
template <class T>
class HeldPieces {
 public:
  uint4 raw[kHeld] = {};  ///< zeros behind the end of a row

  __device__ __forceinline__ HeldPieces(const ForwardParams& p, int lane, int pieces) : p_(p) {
    const HeldRowsPlan& plan = p.plan.held_plan;
    x_ = static_cast<const char*>(p.input.x.data) + lane * 16;
    in_last_ = lane < pieces - (plan.slots - 1) * plan.row_threads;
    if constexpr (kIsFloat8<T>) {
      shift_ = log2_of(p.input.x_group) - 4;
      const int bytes = narrow() ? 2 : 4;
      scales_ = static_cast<const char*>(p.input.x_scale.data) + (lane >> shift_) * bytes;
      scale_step_ = (plan.row_threads >> shift_) * bytes;
      ahead_ = (lane >> shift_) * (plan.slots - 1) * bytes;
    }
  }

  /// Points at a row, or at none.
  __device__ __forceinline__ void seek(std::int64_t row) {
    in_rows_ = row < p_.input.rows;
    next_x_ = x_ + row * p_.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    if constexpr (kIsFloat8<T>) {
      next_scales_ = scales_ + row * p_.input.x_scale.row_stride * (narrow() ? 2 : 4);
    }
  }
  __device__ __forceinline__ bool used(int v) const { return v < p_.plan.held_plan.slots; }
  __device__ __forceinline__ bool in_columns(int v) const {
    return v < p_.plan.held_plan.slots - 1 || (used(v) && in_last_);
  }
  __device__ __forceinline__ int first_piece(int v) const {
    return v * p_.plan.held_plan.row_threads;
  }

  /// Loads the row's pieces.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      device::load_if(in_rows_ && in_columns(v), raw[v], next_x_ + first_piece(v) * 16);
    }
    if constexpr (kIsFloat8<T>) {
      if (narrow()) {
        load_scales<true>();
      } else {
        load_scales<false>();
      }
    }
  }
  /// Asks for them in L2.
  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (in_rows_ && in_columns(v)) device::prefetch_l2(next_x_ + first_piece(v) * 16);
    }
    // A thread's share of the row's scales is 32 bytes at most.
    if (kIsFloat8<T> && in_rows_ && in_last_) device::prefetch_l2(next_scales_ + ahead_);
  }
  __device__ __forceinline__ float scale(int v) const {
    if constexpr (!kIsFloat8<T>) return 1.0f;
    return scale_of_word(narrow(), word_[v]);
  }

 private:
  template <bool kNarrow>
  __device__ __forceinline__ void load_scales() {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      load_word_if<kNarrow>(in_rows_ && in_columns(v), word_[v], next_scales_ + v * scale_step_);
    }
  }
  __device__ __forceinline__ bool narrow() const {
    return p_.input.x_scale.dtype != DType::kFloat32;
  }

  const ForwardParams& p_;
  const char *x_, *next_x_ = nullptr, *scales_ = nullptr, *next_scales_ = nullptr;
  std::uint32_t word_[kHeld] = {};
  int shift_ = 0, scale_step_ = 0, ahead_ = 0;
  bool in_last_, in_rows_ = false;
};

/// The weights of a thread's pieces.
template <class T>
class HeldWeights {
 public:
  __device__ __forceinline__ HeldWeights(const ForwardParams& p, const float4* weights, int lane)
      : first_(device::smem_address(weights) + lane * kPieceBytes),
        slot_bytes_(p.plan.held_plan.row_threads * kPieceBytes) {
    asm volatile("" : "+r"(first_));  // kept, not made anew for each use
  }
  /// Of quad k of the piece in slot v.
  __device__ __forceinline__ float4 get(int v, int k) const {
    float4 w;  // volatile: slots that are not used lie outside the memory
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(w.x), "=f"(w.y), "=f"(w.z), "=f"(w.w)
                 : "r"(first_ + v * slot_bytes_ + k * 16));
    return w;
  }

 private:
  static constexpr int kPieceBytes = SharedWeights<kPiece<T>>::kPitch * 16;
  std::uint32_t first_;
  int slot_bytes_;
};

}  // namespace mortar::fp8_rmsnorm::cuda
