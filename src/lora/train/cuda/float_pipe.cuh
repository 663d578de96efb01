// SPDX-License-Identifier: Apache-2.0
// Dense float32 rows through warpgroup MMAs of sm_90a: the copy engine brings boxes of the wide
// matrix, a warpgroup splits the narrow operand into planes of bfloat16 parts, and one or two
// others split what they read of the boxes in registers, as the first operand of wgmma.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/bulk_copy.cuh"
#include "device/launch.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_parts.cuh"
#include "lora/train/cuda/float_ring.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kPipeDepth = 64;     ///< elements of the sums in a step
inline constexpr int kPipeSteps = 4;      ///< MMA steps of it
inline constexpr int kBoxFloats = 32;     ///< columns of a box, 128 bytes
inline constexpr int kPipeThreads = 128;  ///< of a warpgroup

inline constexpr int kPipeMemory = 220 * 1024;  ///< of a thread block that has an SM
inline constexpr int kHalfMemory =
    108 * 1024;  ///< of one of two, beside what they have of their own

/// Shared memory of a thread block whose kGroups warpgroups multiply; kWideBytes: of the boxes of a
/// step. As many steps of these are on their way as fit, and two or three of the planes.
template <int kRanks_, int kGroups_, int kWideBytes_, int kMemory>
struct FloatPipe {
  static constexpr int kRanks = kRanks_, kGroups = kGroups_, kWideBytes = kWideBytes_;
  static constexpr int kThreads = (kGroups + 1) * kPipeThreads;
  static constexpr int kPlaneBytes = kRanks * device::kSwizzleBytes;
  static constexpr int kNarrowBytes = kFloatPlanes * kPlaneBytes;
  static constexpr int kNarrowStages = (kMemory - 3 * kNarrowBytes) / kWideBytes >= 3 ? 3 : 2;
  static constexpr int kWideStages =
      std::min((kMemory - kNarrowStages * kNarrowBytes) / kWideBytes, 8);
  static constexpr int kNarrowAt = kWideStages * kWideBytes;
  static constexpr int kSmem = kNarrowAt + kNarrowStages * kNarrowBytes;
  static_assert(kWideStages >= kNarrowStages && kWideBytes % 1024 == 0);
};

template <class Pipe>
struct PipeBarriers {
  device::Mbarrier wide[Pipe::kWideStages], narrow[Pipe::kNarrowStages];
  device::Mbarrier empty[Pipe::kNarrowStages];  ///< a step has been multiplied

  /// By one thread; a barrier must follow.
  __device__ __forceinline__ void init() {
    for (device::Mbarrier& b : wide) b.init(1);
    for (device::Mbarrier& b : narrow) b.init(kPipeThreads);
    for (device::Mbarrier& b : empty) b.init(Pipe::kGroups * kPipeThreads / 32);
    device::Mbarrier::fence_init();
  }
};

/// Elements along the sums of one rank of the narrow operand.
struct NarrowLine {
  const float* data;
  std::int64_t stride;
  bool there;  ///< else zeros
};

/// What a thread splits of the narrow operand in every step: eight neighbours along the sums, of
/// one or two ranks or places.
template <int kRanks>
struct NarrowPieces {
  static constexpr int kPieces = kRanks / 16;
  NarrowLine from[kPieces];
  int at[kPieces];     ///< where they lie in a plane
  int first[kPieces];  ///< the first of the eight in a step
  int count;           ///< elements of all steps
  bool vectors;

  /// `by_ranks`: threads side by side have neighbours of the sums, else neighbouring ranks.
  template <class LineOf>
  __device__ __forceinline__ NarrowPieces(int thread, bool by_ranks, int count_, bool vectors_,
                                          const LineOf& line_of)
      : count(count_), vectors(vectors_) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int rank = by_ranks ? thread / 8 + 16 * i : thread % kRanks;
      const int piece = by_ranks ? thread % 8 : thread / kRanks + i * (kPipeThreads / kRanks);
      first[i] = 8 * piece;
      at[i] = static_cast<int>(device::swizzled(rank, piece));
      from[i] = line_of(rank);
      from[i].data += first[i] * from[i].stride;
      if (!from[i].there) first[i] = count;  // nothing is left
    }
  }

  using Values = float[kPieces][8];
  __device__ __forceinline__ void load(Values& v, int step) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int left = count - step * kPipeDepth - first[i];
      const float* own = from[i].data + step * kPipeDepth * from[i].stride;
      if (vectors && left >= 8) {
        const float4 low = __ldcg(reinterpret_cast<const float4*>(own));
        const float4 high = __ldcg(reinterpret_cast<const float4*>(own) + 1);
        v[i][0] = low.x, v[i][1] = low.y, v[i][2] = low.z, v[i][3] = low.w;
        v[i][4] = high.x, v[i][5] = high.y, v[i][6] = high.z, v[i][7] = high.w;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j, own += from[i].stride) v[i][j] = j < left ? __ldcg(own) : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void store(const Values& v, char* planes, int plane_bytes) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      split_eight(make_float4(v[i][0], v[i][1], v[i][2], v[i][3]),
                  make_float4(v[i][4], v[i][5], v[i][6], v[i][7]), planes + at[i], plane_bytes);
    }
  }
};

/// The warpgroup that fills the pipe: copy(step, to, barrier) asks for the boxes of a step.
/// begin(): called when the first pieces are on their way, before anything else is read.
template <class Pipe, class Begin, class Copy>
__device__ __forceinline__ void fill_pipe(PipeBarriers<Pipe>& barriers, char* smem, int steps,
                                          const NarrowPieces<Pipe::kRanks>& pieces,
                                          const Begin& begin, const Copy& copy) {
  constexpr int kNarrow = Pipe::kNarrowStages, kWide = Pipe::kWideStages;
  const bool asks = threadIdx.x % kPipeThreads == 0;
  typename NarrowPieces<Pipe::kRanks>::Values v[2];
  pieces.load(v[0], 0);
  pieces.load(v[1], 1);
  begin();
  const auto ask = [&](int step) {
    if (!asks || step >= steps) return;
    device::Mbarrier* barrier = &barriers.wide[step % kWide];
    barrier->arrive_and_expect(Pipe::kWideBytes);
    copy(step, device::smem_address(smem) + step % kWide * Pipe::kWideBytes, barrier);
  };
  for (int step = 0; step < kWide; ++step) ask(step);
  int stage = 0;
  std::uint32_t parity = 1;
  const auto fill = [&](int step, typename NarrowPieces<Pipe::kRanks>::Values& own) {
    if (step >= steps) return;
    if (step >= kNarrow) {
      barriers.empty[stage].wait(parity);
      ask(step - kNarrow + kWide);
    }
    pieces.store(own, smem + Pipe::kNarrowAt + stage * Pipe::kNarrowBytes, Pipe::kPlaneBytes);
    device::fence_async_proxy();
    barriers.narrow[stage].arrive();
    pieces.load(own, step + 2);
    if (++stage == kNarrow) {
      stage = 0;
      parity ^= 1;
    }
  };
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    fill(step, v[0]);
    fill(step + 1, v[1]);
  }
}

/// A warpgroup's walk over the steps of the pipe.
template <class Pipe>
struct PipeWalk {
  PipeBarriers<Pipe>& barriers;
  std::uint32_t smem;
  int wide_stage = 0, narrow_stage = 0, last = -1;
  std::uint32_t wide_parity = 0, narrow_parity = 0;

  __device__ __forceinline__ std::uint32_t wide() const {
    return smem + wide_stage * Pipe::kWideBytes;
  }
  __device__ __forceinline__ std::uint64_t planes() const {
    return device::wgmma_descriptor(smem + Pipe::kNarrowAt + narrow_stage * Pipe::kNarrowBytes);
  }
  __device__ __forceinline__ void wait() {
    barriers.wide[wide_stage].wait(wide_parity);
    barriers.narrow[narrow_stage].wait(narrow_parity);
  }
  /// The MMAs of the step before have read its planes.
  __device__ __forceinline__ void leave_last() {
    if (last >= 0 && threadIdx.x % 32 == 0) barriers.empty[last].arrive();
    last = -1;
  }
  __device__ __forceinline__ void next() {
    last = narrow_stage;
    if (++wide_stage == Pipe::kWideStages) {
      wide_stage = 0;
      wide_parity ^= 1;
    }
    if (++narrow_stage == Pipe::kNarrowStages) {
      narrow_stage = 0;
      narrow_parity ^= 1;
    }
  }
};

/// Whether the copy engine takes a matrix of float32, as one of twice as many 16-bit elements.
inline bool takes_float_boxes(const Fetch& wide, std::int64_t rows, std::int64_t columns) {
  return device::current_device().arch == 90 &&
         device::takes_tensor_map(wide.m.data, 2 * columns, rows, 2 * wide.m.row_stride);
}
inline void set_float_boxes(CUtensorMap& map, const Fetch& wide, std::int64_t rows,
                            std::int64_t columns, int box_rows) {
  device::set_tensor_map(map, DType::kBFloat16, wide.m.data, 2 * columns, rows,
                         2 * wide.m.row_stride, box_rows);
}

}  // namespace mortar::lora::train::cuda
