// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory, some of them on their way, and the weights beside them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/bulk_copy.cuh"
#include "device/cache_policy.cuh"
#include "fp8_rmsnorm/cuda/row_ring.cuh"
#include "fp8_rmsnorm/cuda/row_weights.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr int kHeld = kHeldPieces;  ///< slots of a thread

/// Slot i of the order in which sums of pieces are made, so that few of them wait for each other.
constexpr int slot_at(int i) { return (i & 1) << 2 | (i & 2) | i >> 2; }
static_assert(kHeld == 8, "slot_at turns over three bits");

/// Calls f with the slots that a thread uses, as a constant, where kernels are made for their
/// number: rows of the fewest threads use more than half of them, and seven are made eight. Else
/// with 0.
template <class F>
void visit_slots(int slots, const F& f) {
  switch (slots) {
    case 5:
      return f(std::integral_constant<int, 5>());
    case 6:
      return f(std::integral_constant<int, 6>());
    case kHeld:
      return f(std::integral_constant<int, kHeld>());
    default:
      return f(std::integral_constant<int, 0>());
  }
}

/// A ring of the rows of the threads that share one: the row that they work on, and those behind
/// it. In slot v a thread has piece v * row_threads + lane; behind the end of a row are zeros.
///
/// From sm_90 on one thread has the copy engine bring a whole row and its scales. Before, each
/// thread copies the pieces that it reads. Where a row's scales are not whole copies, a thread
/// loads those of its pieces one row ahead.
///
/// kKeeps: the first plan.kept_bytes of a row go to a place of its own, where they stay. kAdds:
/// rows of the residual come beside those of x. kSlots: of a thread, 0 where plan.slots tells it:
/// without branches between them, the loads of several pieces may be in flight together.
template <class T, bool kKeeps = false, bool kAdds = false, int kSlots = 0>
class HeldRows {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kBulk = true;
#else
  static constexpr bool kBulk = false;
#endif
  /// Barriers in shared memory: one for each row that is there.
  static constexpr int kBarriers =
      HeldRowsPlan::kThreads / HeldRowsPlan::kLeastThreads * HeldRowsPlan::kMostStages;

  /// `ring`, `kept`: of the whole CTA, which has the rows from row - in_step on to `end`. The
  /// threads' first row is `row`, the next `step` rows on.
  __device__ __forceinline__ HeldRows(const ForwardParams& p, const HeldRowsPlan& plan,
                                      unsigned char* kept, unsigned char* ring,
                                      device::Mbarrier* barriers, int in_step, int lane, int pieces,
                                      std::int64_t row, std::int64_t step, std::int64_t end)
      : p_(p), plan_(plan), lane_(lane), pieces_(pieces), step_(step), next_(row), end_(end) {
    stage_bytes_ = plan.x_bytes - kept_bytes() + plan.scale_bytes + plan.added_bytes;
    stages_ = device::smem_address(ring) + in_step * plan.stages * stage_bytes_;
    barriers_ = barriers + in_step * plan.stages;
    here_ = stages_ + lane * 16 - kept_bytes();
    if constexpr (kKeeps) {
      fill_kept_ = device::smem_address(kept) + in_step * plan.kept_bytes;
      kept_ = fill_kept_ + lane * 16;
      kept_slots_ = plan.kept_bytes / (plan.row_threads * 16);
    }
    if constexpr (kIsFloat8<T>) {
      shift_ = log2_of(p.input.x_group) - 4;
      const int bytes = narrow() ? 2 : 4;
      scales_ = plan.x_bytes - lane * 16 + (lane >> shift_) * bytes;
      scale_step_ = (plan.row_threads >> shift_) * bytes;
      for (int i = 0; i < 2; ++i) {
        const bool upper =
            p.scales_in_rows && ((lane >> shift_) * bytes + i * scale_step_) % 4 != 0;
        scale_bytes_[i] = !narrow() ? 0x3210u : upper ? 0x3244u : 0x1044u;
      }
      // Kept, not made anew for each piece.
      asm volatile("" : "+r"(scale_bytes_[0]), "+r"(scale_bytes_[1]), "+r"(scales_));
    }
  }

  /// Readies the ring: barriers, and zeros behind the rows' ends. A barrier of the CTA must follow.
  __device__ __forceinline__ void init() {
    const HeldRowsPlan& plan = plan_;
    if (kBulk && lane_ == 0) {
      for (int i = 0; i < plan.stages; ++i) barriers_[i].init(1);
      device::Mbarrier::fence_init();
    }
    const int last = plan.slots - 1;
    if (in_columns(last)) return;
    for (int i = 0; i < plan.stages; ++i) {
      const std::uint32_t stage = here_ + i * stage_bytes_;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(stage + first_piece(last) * 16),
                   "r"(0)
                   : "memory");
      if (!kIsFloat8<T> || !p_.scales_in_rows) continue;
      const std::uint32_t scale = stage + scales_ + last * scale_step_;
      if (narrow()) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(scale), "h"(std::uint16_t{0}) : "memory");
      } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(scale), "r"(0) : "memory");
      }
    }
  }

  /// Asks for the first row in L2.
  __device__ __forceinline__ void prefetch() const {
    if (next_ >= end_) return;
    const auto of_row = [&](const Rows& rows, int bytes, int size) {
      const char* row = static_cast<const char*>(rows.data) + next_ * rows.row_stride * size;
      for (int at = lane_ * 128; at < bytes; at += plan_.row_threads * 128) {
        device::prefetch_l2(row + at);
      }
    };
    of_row(p_.input.x, pieces_ * 16, static_cast<int>(sizeof(T)));
    if constexpr (kIsFloat8<T>) {
      const int size = narrow() ? 2 : 4;
      of_row(p_.input.x_scale, (pieces_ >> shift_) * size, size);
    }
    if constexpr (kAdds) of_row(p_.residual, pieces_ * 16, static_cast<int>(sizeof(T)));
  }

  /// Asks for the first row.
  __device__ __forceinline__ void start() {
    load_scales(next_);
    refill(0);
  }
  /// Asks for more rows: when all threads of the CTA have asked for their first, which are then the
  /// first to come.
  __device__ __forceinline__ void fill() {
    for (int i = 1; i < plan_.stages; ++i) refill(i);
  }

  /// Waits for the row that is worked on; `there`: there is one.
  __device__ __forceinline__ void wait(bool there) {
    if constexpr (kBulk) {
      if (there) barriers_[stage_].wait(parity_);
    } else {
      wait_for_copies(ahead_);
    }
  }

  /// All threads of the row have read it: asks for one that takes its place, and goes on to the
  /// next, `row`.
  __device__ __forceinline__ void advance(std::int64_t row) {
    refill(stage_);
    next(row);
  }
  /// The same in two steps. refill_last(): all threads of the row have read the row before it, for
  /// which next() was called. There are two stages or more.
  __device__ __forceinline__ void refill_last() {
    if (last_stage_ >= 0) refill(last_stage_);
  }
  __device__ __forceinline__ void next(std::int64_t row) {
    last_stage_ = stage_;
    --ahead_;
    load_scales(row);
    here_ += stage_bytes_;
    if constexpr (kKeeps) kept_ += static_cast<int>(step_) * plan_.kept_bytes;
    if (++stage_ < plan_.stages) return;
    here_ = stages_ + lane_ * 16 - kept_bytes();
    stage_ = 0;
    parity_ ^= 1;
  }

  /// Adds the residual's `row` to the thread's pieces and rounds the sums, which take the place of
  /// both, of x in the ring and of the residual in memory. The ring may be refilled when all
  /// threads of the row have met.
  __device__ __forceinline__ void add_residual(std::int64_t row) {
    static_assert(sizeof(T) == 2 && kAdds && !kKeeps);
    T* const to = static_cast<T*>(p_.residual.data) + row * p_.residual.row_stride + lane_ * 8;
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (!in_columns(v)) continue;
      const std::uint32_t at = here_ + first_piece(v) * 16;
      const uint4 x = read_shared<16>(at), added = read_shared<16>(at + plan_.x_bytes);
      const std::uint32_t of_x[4] = {x.x, x.y, x.z, x.w};
      const std::uint32_t of_added[4] = {added.x, added.y, added.z, added.w};
      std::uint32_t sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = device::unpack2<T>(of_x[i]), b = device::unpack2<T>(of_added[i]);
        sum[i] = device::pack2<T>(a.x + b.x, a.y + b.y);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(sum[0]), "r"(sum[1]),
                   "r"(sum[2]), "r"(sum[3])
                   : "memory");
      *reinterpret_cast<uint4*>(to + first_piece(v) * 8) =
          make_uint4(sum[0], sum[1], sum[2], sum[3]);
    }
    device::fence_async_proxy();  // before the copy engine writes there again
  }

  __device__ __forceinline__ bool used(int v) const {
    return v < (kSlots > 0 ? kSlots : plan_.slots);
  }
  __device__ __forceinline__ bool in_columns(int v) const {
    return used(v) && first_piece(v) + lane_ < pieces_;
  }
  /// Slots of the thread that have columns, which are its first.
  __device__ __forceinline__ int slots_in_columns() const {
    return plan_.slots - (in_columns(plan_.slots - 1) ? 0 : 1);
  }
  __device__ __forceinline__ int first_piece(int v) const { return v * plan_.row_threads; }
  __device__ __forceinline__ uint4 piece(int v) const {
    return read_shared<16>((kKeeps && v < kept_slots_ ? kept_ : here_) + first_piece(v) * 16);
  }
  __device__ __forceinline__ float scale(int v) const {
    if constexpr (!kIsFloat8<T>) return 1.0f;
    std::uint32_t word = word_[v];
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.shared.u32 %0, [%1];\n}"
        : "+r"(word)
        : "r"((here_ + scales_ + v * scale_step_) & ~3u), "r"(static_cast<int>(p_.scales_in_rows)));
    return __uint_as_float(__byte_perm(word, 0, scale_bytes_[v % 2]));
  }

 private:
  /// Asks for the row that comes next.
  __device__ __forceinline__ void refill(int stage) {
    const HeldRowsPlan& plan = plan_;
    const bool there = next_ < end_;
    const char* x = static_cast<const char*>(p_.input.x.data) +
                    next_ * p_.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    const std::uint32_t to = stages_ + stage * stage_bytes_;
    if constexpr (kBulk) {
      if (there && lane_ == 0) {
        device::Mbarrier* barrier = barriers_ + stage;
        const int bytes = pieces_ * 16;
        int others = 0;  // bytes of its scales and of the residual
        if (kIsFloat8<T> && p_.scales_in_rows) {
          const int size = narrow() ? 2 : 4;
          others = (pieces_ >> shift_) * size;
          device::copy_bulk(to + plan.x_bytes - kept_bytes(),
                            static_cast<const char*>(p_.input.x_scale.data) +
                                next_ * p_.input.x_scale.row_stride * size,
                            others, barrier);
        }
        if constexpr (kAdds) {
          device::copy_bulk(to + plan.x_bytes, residual_row(), bytes, barrier);
          others += bytes;
        }
        const int kept = min(kept_bytes(), bytes);
        // What is kept is not read again, nor what L2 has no room for.
        const std::uint64_t policy =
            end_ - next_ > plan.late_rows ? device::kEvictFirst : device::kEvictNormal;
        if (kKeeps && kept > 0) {
          device::copy_bulk(fill_kept_, x, kept, barrier, device::kEvictFirst);
        }
        if (!kKeeps || bytes > kept) device::copy_bulk(to, x + kept, bytes - kept, barrier, policy);
        barrier->arrive_and_expect(bytes + others);
      }
    } else {
      x += lane_ * 16;
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        const int ahead = first_piece(v) * 16;
        if (there && in_columns(v)) {
          const bool kept = kKeeps && v < kept_slots_;
          device::cp_async_16((kept ? fill_kept_ : to - kept_bytes()) + lane_ * 16 + ahead,
                              x + ahead);
          if constexpr (kAdds) {
            device::cp_async_16(to + plan.x_bytes + lane_ * 16 + ahead,
                                residual_row() + lane_ * 16 + ahead);
          }
        }
      }
      device::cp_async_commit();
    }
    ++ahead_;
    next_ += step_;
    if constexpr (kKeeps) fill_kept_ += static_cast<int>(step_) * plan.kept_bytes;
  }

  /// The residual's row that comes next.
  __device__ __forceinline__ const char* residual_row() const {
    return static_cast<const char*>(p_.residual.data) +
           next_ * p_.residual.row_stride * static_cast<std::int64_t>(sizeof(T));
  }

  __device__ __forceinline__ void load_scales(std::int64_t row) {
    if (!kIsFloat8<T> || p_.scales_in_rows) return;
    narrow() ? load_words<true>(row) : load_words<false>(row);
  }
  template <bool kNarrow>
  __device__ __forceinline__ void load_words(std::int64_t row) {
    const char* scales =
        static_cast<const char*>(p_.input.x_scale.data) +
        (row * p_.input.x_scale.row_stride + (lane_ >> shift_)) * (kNarrow ? 2 : 4);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      load_word_if<kNarrow>(row < end_ && in_columns(v), word_[v], scales + v * scale_step_);
    }
  }
  __device__ __forceinline__ bool narrow() const {
    return p_.input.x_scale.dtype != DType::kFloat32;
  }

  __device__ __forceinline__ int kept_bytes() const { return kKeeps ? plan_.kept_bytes : 0; }

  const ForwardParams& p_;
  const HeldRowsPlan& plan_;
  device::Mbarrier* barriers_;
  /// The ring, and the thread's place in the row that is worked on, were all of it there; the same
  /// of what is kept.
  std::uint32_t stages_, here_, kept_ = 0, fill_kept_ = 0;
  int kept_slots_ = 0;
  int stage_bytes_;
  int scales_ = 0, scale_step_ = 0;  ///< from there to the first scale, from one to the next
  /// Which bytes of the word around it are a scale: in even slots, in odd ones.
  std::uint32_t scale_bytes_[2] = {};
  std::uint32_t word_[kHeld] = {};
  int lane_, pieces_, shift_ = 0, stage_ = 0, last_stage_ = -1;
  int ahead_ = -1;  ///< rows that were asked for behind the one that is worked on
  std::uint32_t parity_ = 0;
  std::int64_t step_, next_, end_;
};

/// The weights of a thread's pieces.
template <class T>
class HeldWeights {
 public:
  __device__ __forceinline__ HeldWeights(const HeldRowsPlan& plan, const float4* weights, int lane)
      : first_(device::smem_address(weights) + lane * kPieceBytes),
        slot_bytes_(plan.row_threads * kPieceBytes) {
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
