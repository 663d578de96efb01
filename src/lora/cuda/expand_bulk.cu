// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for many tokens of many adapters and ranks up to 16, B, h and y of one 16-bit type:
// the kernel of lora_apply for tiles that are mostly not full.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h
// FLOP   = 2 M N r: never the limit
// 8,152 tokens of 317 adapters, 1,024 to 2 x 3,072, r4: 216 MB -> 50 us
// limit  : DRAM; y is 90 % of the bytes
// wrong  : so few tiles that a CTA has a step or two, and B whose rows have gaps
//
// The grid is as large as fits at once. A CTA walks over steps of one tile of up to 16 tokens and
// 512 columns of all slices side by side. Warps of their own, one a stage, look up the steps ahead
// and have the copy engine bring them to a ring of shared memory: a run of 1 KB of each token's y,
// of B a run for each slice, and h as one run, so that what is in flight depends on no register.
// (One warp for all stages takes some 66 clocks a run, and that was the limit.) Eight warps
// multiply, 32 columns at a time, and store from their registers. Neighbouring CTAs have
// neighbouring columns of the same tokens: whole rows of y are open at a time.
#include <algorithm>
#include <cstdint>

#include "device/any_float.cuh"
#include "device/bulk_copy.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda {
namespace {

using device::Bits16;

constexpr int kTokens = 16;  ///< of a tile
constexpr int kWarps = 8;    ///< of a CTA that compute; one more a stage copies
constexpr int kMostThreads = 32 * (kWarps + kBulkMostStages);
constexpr int kCols = kBulkCols;
constexpr int kGroup = 32, kStride = kWarps * kGroup;  ///< columns of a warp at a time
constexpr int kYBytes = kTokens * kBulkYPitch;

/// What lies in a stage.
struct Step {
  std::int64_t y[kTokens];         ///< element of y of each token's first column
  short h_column[kCols / kGroup];  ///< in a row of h, of the slice of each group of columns
  int start, count, cols;          ///< its tile's tokens, and columns; none: it has no weights
  int rank;                        ///< of its adapter
  float scale;
};

struct Shared {
  Step steps[kBulkMostStages];
  device::Mbarrier full[kBulkMostStages], empty[kBulkMostStages];
};

/// Where the parts of a stage lie in it, bytes: y, then B, then h.
struct Room {
  int h, all;
  __device__ __forceinline__ explicit Room(const ExpandParams& p)
      : h(kYBytes + kCols * p.weights.max_rank * 2),
        all(h + kTokens * static_cast<int>(p.h.row_stride) * 2) {}
};

/// A CTA's steps: every n-th, of n CTAs.
struct Share {
  int blocks = 0;  ///< of columns, of a tile
  int num_steps = 0;

  __device__ __forceinline__ explicit Share(const ExpandParams& p) {
    const int4 head = __ldcg(reinterpret_cast<const int4*>(p.groups.plan));
    int columns = 0;
    for (int s = 0; s < p.weights.num_slices; ++s) {
      columns += static_cast<int>(p.weights.widths[s]);
    }
    blocks = ceil_div(columns, kCols);
    const bool ours = is_plan_of(head, p.tiles, p.weights.num_adapters);
    const int tiles = ours ? min(head.z, p.tiles.num) : 0;
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    num_steps = max(0, ceil_div(tiles * blocks - cta, ctas));
  }
};

/// A step that is on its way from the plan: its tile, and the token in place lane % 16.
struct Found {
  int block = 0;
  int4 entry = {};
  int token = -1;
};

struct Producer {
  const ExpandParams& p;
  Shared& shared;
  Room room;
  std::uint32_t to;  ///< address of the stage
  int stage, lane;

  __device__ __forceinline__ Found find(const Share& share, int step) const {
    Found f;
    if (step >= share.num_steps) return f;
    const unsigned item = blockIdx.x + static_cast<unsigned>(step) * gridDim.x;
    const int index = static_cast<int>(item / static_cast<unsigned>(share.blocks));
    f.block = static_cast<int>(item) - index * share.blocks;
    f.entry = __ldcg(reinterpret_cast<const int4*>(p.groups.plan + p.tiles.list) + index);
    f.token = __ldcg(p.groups.plan + p.tiles.tokens + index * kTokens + lane % kTokens);
    return f;
  }

  /// Describes a step and asks for its B; one without weights has no columns.
  __device__ __forceinline__ void tell(const Found& f, int round) {
    const Tile tile{f.entry.x, f.entry.y, f.entry.z};
    const SliceWeights w = weights_of(p, tile, {}, true);  // all slices have its rank and scale
    const int first = f.block * kCols, pitch = static_cast<int>(w.b_row_stride);
    if (round > 0) shared.empty[stage].wait((round - 1) & 1);
    __syncwarp();  // all lanes have read what is overwritten here
    Step& step = shared.steps[stage];
    // A lane's group of columns, and what of the step lies in its slice.
    const int column = first + lane * kGroup;
    int start = 0, own = 0, own_cols = 0, own_first = 0, slice = 0;
    for (int s = 0; s < p.weights.num_slices; ++s) {
      const int end = start + static_cast<int>(p.weights.widths[s]);
      if (column >= start) slice = s;
      if (lane == s) {
        own = max(first, start);
        own_cols = min(first + kCols, end) - own;
        own_first = own - start;
      }
      start = end;
    }
    const int cols = w.rank > 0 ? min(start - first, kCols) : 0;
    if (lane < kTokens) {
      step.y[lane] = std::int64_t{max(f.token, 0)} * p.y.row_stride + p.offset + first;
      step.h_column[lane] = static_cast<short>(slice * static_cast<int>(p.h.slice_stride));
    }
    if (lane == 0) {
      step.start = tile.start;
      step.count = tile.count;
      step.cols = cols;
      step.rank = w.rank;
      step.scale = w.scale;
    }
    __syncwarp();
    device::Mbarrier& full = shared.full[stage];
    if (lane == 0 && cols > 0) {
      const int y_bytes = p.add_inputs ? 2 * tile.count * cols : 0;
      full.arrive_and_expect(2 * cols * pitch + y_bytes + h_bytes(tile.count));
    } else {
      full.arrive();
    }
    __syncwarp();
    if (own_cols > 0 && cols > 0) {
      const StackedSlice& s = p.weights.slices[lane];
      device::copy_bulk(to + kYBytes + 2 * (own - first) * pitch,
                        static_cast<const Bits16*>(s.b) + tile.adapter * s.b_adapter_stride +
                            std::int64_t{own_first} * pitch,
                        2 * own_cols * pitch, &full);
    }
    if (round == 0 && p.early && p.add_inputs) ask_for_rows();
  }
  __device__ __forceinline__ int h_bytes(int count) const {
    return 2 * count * static_cast<int>(p.h.row_stride);
  }

  /// Asks for its y and h.
  __device__ __forceinline__ void copy_rows() {
    const Step& step = shared.steps[stage];
    device::Mbarrier& full = shared.full[stage];
    if (step.cols == 0) return;
    if (p.add_inputs && lane < step.count) {
      device::copy_bulk(to + lane * kBulkYPitch,
                        static_cast<const Bits16*>(p.y.data) + step.y[lane], 2 * step.cols, &full);
    }
    if (lane == kTokens) {
      device::copy_bulk(to + room.h,
                        static_cast<const Bits16*>(p.h.data) + step.start * p.h.row_stride,
                        h_bytes(step.count), &full);
    }
  }
  /// Asks for that y in L2.
  __device__ __forceinline__ void ask_for_rows() const {
    constexpr int kLine = 64, kLines = kCols / kLine;
    const Step& step = shared.steps[stage];
    for (int i = lane; i < step.count * kLines; i += 32) {
      const int column = i % kLines * kLine;
      if (column >= step.cols) continue;
      device::prefetch_l2(static_cast<const Bits16*>(p.y.data) + step.y[i / kLines] + column);
    }
  }

  __device__ __forceinline__ void run(const Share& share) {
    Found next = find(share, stage);
#pragma unroll 1
    for (int step = stage, round = 0; step < share.num_steps; step += p.stages, ++round) {
      const Found found = next;
      next = find(share, step + p.stages);
      tell(found, round);
      if (round == 0) device::pdl_wait();  // B does not depend on the predecessor
      copy_rows();
    }
  }
};

/// Four ranks of a row of h or B, zeros from an adapter's rank on.
struct Ranks {
  int column;  ///< the first of this lane's four in a row
  std::uint32_t keep[2];

  __device__ __forceinline__ Ranks(int lane, int rank) {
    const int left = rank - lane % 4 * 4;
    column = left > 0 ? lane % 4 * 4 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      keep[i] = left >= 2 * i + 2 ? 0xffffffffu : left == 2 * i + 1 ? 0xffffu : 0u;
    }
  }
  __device__ __forceinline__ uint2 load(const Bits16* row) const {
    const uint2 v = *reinterpret_cast<const uint2*>(row + column);
    return make_uint2(v.x & keep[0], v.y & keep[1]);
  }
};

/// y of a step's columns that are this warp's.
template <class T>
__device__ __forceinline__ void multiply_and_store(const ExpandParams& p, const Step& step,
                                                   const unsigned char* stage, const Room& room,
                                                   int warp, int lane) {
  const int row = lane / 4, pitch = p.weights.max_rank;
  const Ranks ranks(lane, step.rank);
  const auto* const h_tile = reinterpret_cast<const Bits16*>(stage + room.h) + row * p.h.row_stride;
  // Columns: inside groups of 32, MMA fragment j takes columns 8a + 2j + b, so that a lane's
  // results are 8 consecutive columns.
  const auto* const b_tile =
      reinterpret_cast<const Bits16*>(stage + kYBytes) + (lane / 8 * 8 + lane / 4 % 2) * pitch;
#pragma unroll
  for (int first = warp * kGroup; first < kCols; first += kStride) {
    if (first >= step.cols) break;
    const Bits16* const own_h = h_tile + step.h_column[first / kGroup];
    const uint2 upper = ranks.load(own_h), lower = ranks.load(own_h + 8 * p.h.row_stride);
    const std::uint32_t h[4] = {upper.x, lower.x, upper.y, lower.y};
    float acc[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint2 b = ranks.load(b_tile + (first + 2 * j) * pitch);
      device::mma_16816<T>(acc[j], h, b.x, b.y);
    }
    const int column = first + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = row + half * 8;
      if (half == 1 && step.count <= 8) break;
      if (place >= step.count || column >= step.cols) continue;
      uint4 old = make_uint4(kMinusZeros, kMinusZeros, kMinusZeros, kMinusZeros);
      if (p.add_inputs) {
        old = *reinterpret_cast<const uint4*>(stage + place * kBulkYPitch + column * 2);
      }
      *reinterpret_cast<uint4*>(static_cast<Bits16*>(p.y.data) + step.y[place] + column) =
          add_products<T>(old, acc, half, step.scale);
    }
  }
}

__global__ void __launch_bounds__(kMostThreads, kBulkPerSm)
    expand_bulk_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ Shared shared;
  device::pdl_begin(p.early);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      // Who writes or reads a step arrives himself: compute-sanitizer sees no order through a lane
      // that arrives for its warp, and it is no faster.
      shared.full[i].init(32);
      shared.empty[i].init(kWarps * 32);
    }
    device::Mbarrier::fence_init();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Room room(p);
  const Share share(p);

  // Load
  if (warp >= kWarps) {
    const int stage = warp - kWarps;
    const std::uint32_t to = device::smem_address(smem) + stage * room.all;
    Producer{p, shared, room, to, stage, lane}.run(share);
    return;
  }

  // Compute and store
  device::pdl_wait();
  int at = 0;
  std::uint32_t round = 0;
#pragma unroll 1
  for (int i = 0; i < share.num_steps; ++i) {
    shared.full[at].wait(round & 1);
    const Step& step = shared.steps[at];
    device::visit_checked_dtype(Float16DTypes(), p.y.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      multiply_and_store<T>(p, step, smem + at * room.all, room, warp, lane);
    });
    shared.empty[at].arrive();
    if (++at == p.stages) {
      at = 0;
      ++round;
    }
  }
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void expand_bulk(const ExpandParams& p, Stream stream) {
  check(p.groups.plan != nullptr && p.h.by_position && p.h.vector && !p.h.raw && p.vector_y &&
            p.tiles.first == 0 && p.cols == kCols && p.stages <= kBulkMostStages,
        "lora_apply: persistent CTAs of low ranks need a plan, its own h and aligned y");
  device::check_dtype<Float16DTypes>(p.y.dtype, "lora_expand");
  std::int64_t columns = 0;
  for (int s = 0; s < p.weights.num_slices; ++s) columns += p.weights.widths[s];
  const std::int64_t steps = p.tiles.num * ceil_div<std::int64_t>(columns, kCols);
  const std::int64_t most = std::int64_t{kBulkPerSm} * device::current_device().num_sms;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(std::min(steps, most)));
  l.threads = static_cast<unsigned>(32 * (kWarps + p.stages));
  l.smem =
      static_cast<std::size_t>(p.stages) *
      static_cast<std::size_t>(bulk_stage(p.weights.max_rank, static_cast<int>(p.h.row_stride)));
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_bulk_kernel>("lora_expand", l, p);
}

}  // namespace mortar::lora::cuda
