// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for few tokens per adapter and ranks up to 16, B and y of one 16-bit type: B goes
// from memory straight into the fragments of the MMA.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 2 sum_a sum_s r N_s (B of adapters in use) + 4 M sum_s N_s (y read and written) + h
// FLOP   = 2 M N r: never the limit
// 230 tokens of 135 adapters, 5120 to 2 x 13824, r4: 55 MB -> 12.9 us
// limit  : DRAM (B and y), and for few tokens the chain of dependent loads
//
// A CTA takes a run of columns of one slice and one tile of 16 tokens. No value of B is used twice,
// so shared memory would only be a detour: a lane loads the ranks that its fragments hold, and a
// warp waits for none of the others. B and y of several groups of columns are in flight at once;
// those of the first ones are asked for before the predecessor has ended (B) and before h is made
// (y). h is made once per CTA, from the split-K partials of shrink or from finished rows.
//
// An MMA step has 16 ranks and 16 tokens, of which rank 4 and up to four tokens fill a sixteenth:
// four groups of 32 columns share a step then. Each has ranks of its own in B and rows of its own
// in h, whose other ranks are zero:
//
//   h: t 0 0 0     B: ranks of group 0     sums: y of token t, group 0
//      0 t 0 0        ranks of group 1           y of token t, group 1
//      0 0 t 0        ...                        ...
//      0 0 0 t
//      u 0 0 0                                   y of token u, group 0
//
// All lanes have B and y to move then, and there are a fourth of the steps. Zero times an Inf or
// NaN of another group would be a NaN: where there is one, a group at a time is multiplied, the
// others' B zero.
#include <type_traits>

#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/h_sum.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTokens = 16;  ///< of a tile

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kAnyOrder = false;
constexpr int kPerSm = 3;  // four would spill
#else
/// Tensor cores add the 16 products of a step at once, in whatever order they lie
/// (docs/numerics.md): a lane takes four neighbouring ranks in one load, and the ranks of several
/// groups share a step.
constexpr bool kAnyOrder = true;
constexpr int kPerSm = 4;  ///< CTAs of an SM, whose registers they share
#endif

using Ranks = RankTile<1>;
static_assert(Ranks::kPitch == kDirectMaxRank, "one MMA step");
/// Runs of y that are asked for before h is made: its partials need registers, too.
constexpr int kEarlyY = 1;

/// How a warp's columns, tokens and ranks lie in a step that so many groups of columns share.
/// kEarlyB: runs of B that are asked for before h is made.
template <int kGroups_, int kEarlyB_>
struct Step {
  static constexpr int kGroups = kGroups_, kEarlyB = kEarlyB_;
  static_assert(kGroups == 1 || kGroups == kDirectGroups);
  static constexpr int kCols = 32 * kGroups;      ///< of a warp at a time
  static constexpr int kStride = kWarps * kCols;  ///< from a run of a warp to its next
  static constexpr int kMostTokens = kTokens / kGroups;
  static constexpr int kAhead = kGroups == 1 ? 4 : 3;  ///< runs of columns in flight
  /// Whether the rounds behind these are asked for in L2: several groups have enough in flight.
  static constexpr bool kAsks = kGroups == 1;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  /// Of this lane in B: its group and its ranks.
  __device__ __forceinline__ static int group_b() { return kGroups == 1 ? 0 : lane() % 4; }
  __device__ __forceinline__ static int ranks() {
    return kGroups > 1 ? 0 : lane() % 4 * (kAnyOrder ? 4 : 2);
  }
  /// The 8 columns that its own are of, and its own one of fragment j. Of several groups it loads
  /// two neighbours at once, those of fragments 2i and 2i + 1.
  __device__ __forceinline__ static int octet_b() { return group_b() * 4 + lane() / 8; }
  __device__ __forceinline__ static int col_b(int j) {
    const int odd = lane() / 4 % 2;
    return octet_b() * 8 + (kGroups == 1 ? 2 * j + odd : j / 2 * 4 + odd * 2 + j % 2);
  }
  /// Of this lane in the sums: its group, the first of its 8 columns, and its token in the first
  /// or the second half of rows.
  __device__ __forceinline__ static int group() { return lane() / 4 % kGroups; }
  __device__ __forceinline__ static int col() { return (group() * 4 + lane() % 4) * 8; }
  __device__ __forceinline__ static int token(int half) {
    return (lane() / 4 + half * 8) / kGroups;
  }
};
constexpr int kSecondRanks = kAnyOrder ? 2 : 8;  ///< a lane's other ranks, from its first on

/// B and y of a run of columns: B's fragments of 8 columns, y's rows, half of the tokens apart.
struct Run {
  uint2 b[4];
  uint4 y[2];

  /// What loads leave where there is nothing to load.
  __device__ __forceinline__ void clear_b() {
#pragma unroll
    for (int j = 0; j < 4; ++j) b[j] = make_uint2(0, 0);
  }
  __device__ __forceinline__ void clear_y() {
    y[0] = y[1] = make_uint4(kMinusZeros, kMinusZeros, kMinusZeros, kMinusZeros);
  }
};

/// A lane's places in B and y.
template <class T, class S>
struct Loader {
  static constexpr int kLoads = S::kGroups == 1 ? 4 : 2;  ///< of B, a run
  const T* b[kLoads];   ///< what it loads of the run of B to be loaded next
  std::int64_t b_step;  ///< elements from there to the next run
  T* y[2];              ///< its columns of a run, in two rows
  int rank;             ///< ranks from its first one on
  int b_left;           ///< columns of the CTA from those of `b` on
  int y_left[2];        ///< and from those of `y` on; none where there is no row

  /// Loads the next run of B. kAligned: its rows start at multiples of 8 bytes, and there are a
  /// multiple of four ranks; of several groups, four side by side.
  template <bool kAligned>
  __device__ __forceinline__ void load_b(Run& to) {
    const int left = b_left > 0 ? rank : 0;
    if constexpr (S::kGroups > 1) {
      static_assert(kAligned);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        uint2 &one = to.b[2 * i], &other = to.b[2 * i + 1];
        uint4 both = make_uint4(one.x, one.y, other.x, other.y);
        device::load_if(b_left > 0, both, b[i]);
        one = make_uint2(both.x, both.y);
        other = make_uint2(both.z, both.w);
        b[i] += S::kStride * (kDirectMaxRank / S::kGroups);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if constexpr (!kAligned) {
          to.b[j].x = device::load_some<T, 2>(b[j], left).word[0];
          to.b[j].y = device::load_some<T, 2>(b[j] + kSecondRanks, left - kSecondRanks).word[0];
        } else if constexpr (kAnyOrder) {
          device::load_if(left > 0, to.b[j], b[j]);
        } else {
          device::load_if(left > 0, to.b[j].x, b[j]);
          device::load_if(left > kSecondRanks, to.b[j].y, b[j] + kSecondRanks);
        }
        b[j] += b_step;
      }
    }
    b_left -= S::kStride;
  }
  /// Loads y of the run that is `ahead` runs further, if wanted.
  __device__ __forceinline__ void load_y(Run& to, int ahead, bool wanted) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::load_if(wanted && y_left[half] > ahead * S::kStride, to.y[half],
                      y[half] + ahead * S::kStride);
    }
  }
  __device__ __forceinline__ void advance_y(int runs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[half] += runs * S::kStride;
      y_left[half] -= runs * S::kStride;
    }
  }
};

/// The sums of a run, 8 neighbouring columns of a lane in order: h B^T.
template <class T, class S>
__device__ __forceinline__ void multiply(float (&sums)[4][4], const std::uint32_t (&h)[4],
                                         const uint2 (&b)[4]) {
  float acc[4][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) device::mma_16816<T>(acc[j], h, b[j].x, b[j].y);
  if constexpr (S::kGroups > 1) {
    float all = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) all += acc[j][0] + acc[j][1];
    if (__any_sync(0xffffffffu, isnan(all))) {
#pragma unroll 1
      for (int group = 0; group < S::kGroups; ++group) {
        const std::uint32_t keep = S::group_b() == group ? 0xffffffffu : 0u;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float own[4] = {};
          device::mma_16816<T>(own, h, b[j].x & keep, b[j].y & keep);
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[j][i] = S::group() == group ? own[i] : acc[j][i];
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // neighbouring columns lie in one fragment, or in two of a load
      sums[j][i] = S::kGroups > 1 ? acc[j / 2 * 2 + i % 2][i / 2 * 2 + j % 2] : acc[j][i];
    }
  }
}

/// h of a fragment: this lane's ranks of its two rows, zeros where its row has another group's.
template <class T, class S>
__device__ __forceinline__ void load_h(std::uint32_t (&h)[4], const T* h_tile, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = S::token(half);
    const auto ranks = [&](int r) {
      return *reinterpret_cast<const std::uint32_t*>(h_tile + Ranks::place(place, r / 8) + r % 8);
    };
    // No branch around loads that everyone waits for.
    const bool mine = S::kGroups == 1 || (S::group() == S::group_b() && place < count);
    const std::uint32_t first = ranks(S::ranks()), second = ranks(S::ranks() + kSecondRanks);
    h[half] = mine ? first : 0u;
    h[2 + half] = mine ? second : 0u;
  }
}

/// What a CTA does once its tile is known.
template <class T, class S>
__device__ __forceinline__ void take_tile(const ExpandParams& p, const CtaWork& work,
                                          const SliceWeights& w, T* h_tile, int* tokens) {
  const Tile& tile = work.tile;
  const Block& block = work.block;
  const int token = work.token;
  const int warp = threadIdx.x / 32;

  // Load: B does not depend on the predecessor.
  const int warp_col = warp * S::kCols;
  Loader<T, S> at;
#pragma unroll
  for (int i = 0; i < at.kLoads; ++i) {
    const int row = warp_col + S::col_b(i * (4 / at.kLoads));
    at.b[i] = static_cast<const T*>(w.b) + (block.first + row) * w.b_row_stride + S::ranks();
  }
  at.b_step = S::kStride * w.b_row_stride;
  at.rank = w.rank - S::ranks();
  at.b_left = block.cols - warp_col - S::octet_b() * 8;
  const bool aligned = S::kGroups > 1 || (device::is_aligned<T, 4>(static_cast<const T*>(w.b)) &&
                                          w.b_row_stride % 4 == 0 && w.rank % 4 == 0);
  Run runs[S::kAhead];
#pragma unroll
  for (int i = 0; i < S::kEarlyB; ++i) {
    runs[i].clear_b();
    if (aligned) at.template load_b<true>(runs[i]);
  }
  if (threadIdx.x < kTokens) tokens[threadIdx.x] = token;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, token, S::token(half));
    at.y_left[half] = t >= 0 ? block.cols - warp_col - S::col() : 0;
    at.y[half] = static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + warp_col + S::col();
  }
  __syncthreads();
  HSum<T, Ranks, kThreads> sum(p, tile, tokens, block.slice, w, h_tile);
  // Asks for B and y of a round of runs, those from `run` on, in L2: what registers hold of them in
  // flight is too little for memory. A line is 64 elements.
  const auto ask = [&](int run) {
    constexpr int kCols = S::kAhead * S::kStride, kLine = 64;
    const int thread = static_cast<int>(threadIdx.x), first = run * S::kStride;
    const int t = tokens[thread % S::kMostTokens], line = thread / S::kMostTokens * kLine;
    if (p.add_inputs && t >= 0 && line < kCols && first + line < block.cols) {
      device::prefetch_l2(static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + first +
                          line);
    }
    const int column = first + thread * (kCols / kThreads);
    if (column < block.cols) {
      device::prefetch_l2(static_cast<const T*>(w.b) + (block.first + column) * w.b_row_stride);
    }
  };
  if (p.early) {  // whatever the predecessor may still write to y
    ask(0);
    if (S::kAsks) ask(S::kAhead);
  }
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
#pragma unroll
  for (int i = 0; i < kEarlyY; ++i) {
    runs[i].clear_y();
    at.load_y(runs[i], i, p.add_inputs);
  }
  if (p.h.raw) {
    sum.store(h_tile);
  } else {
    copy_h<T, Ranks, kThreads>(p.h, tile, tokens, sum.first_row, block.slice * p.h.slice_stride,
                               w.rank, h_tile);
    device::cp_async_commit();
    device::cp_async_wait<0>();
  }
  __syncthreads();
  std::uint32_t h[4];
  load_h<T, S>(h, h_tile, tile.count);
#pragma unroll
  for (int i = 0; i < S::kAhead; ++i) {
    if (i >= S::kEarlyB) {
      runs[i].clear_b();
      if (aligned) at.template load_b<true>(runs[i]);
    }
    if (i >= kEarlyY) {
      runs[i].clear_y();
      at.load_y(runs[i], i, p.add_inputs);
    }
  }

  // Compute and store
  const bool both = tile.count > S::kMostTokens / 2;  // of the MMA's halves of rows
  const auto compute = [&](const Run& run, int ahead) {
    float sums[4][4];
    multiply<T, S>(sums, h, run.b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both) break;
      const uint4 out = add_products<T>(run.y[half], sums, half, w.scale);
      if (at.y_left[half] > ahead * S::kStride) {
        *reinterpret_cast<uint4*>(at.y[half] + ahead * S::kStride) = out;
      }
    }
  };
  const int count = ceil_div(block.cols - warp_col, S::kStride);
  if constexpr (S::kGroups == 1) {
    if (!aligned) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        at.template load_b<false>(runs[0]);
        compute(runs[0], 0);
        at.advance_y(1);
        at.load_y(runs[0], 0, p.add_inputs);
      }
      return;
    }
  }
#pragma unroll 1
  for (int i = 0; i < count; i += S::kAhead) {
    if (S::kAsks) ask(i + 2 * S::kAhead);
#pragma unroll
    for (int u = 0; u < S::kAhead; ++u) {
      if (i + u >= count) break;
      compute(runs[u], u);
      at.template load_b<true>(runs[u]);
      at.load_y(runs[u], u + S::kAhead, p.add_inputs);
    }
    at.advance_y(S::kAhead);
  }
}

template <class T, int kGroups>
__global__ void __launch_bounds__(kThreads, kPerSm)
    expand_direct_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ __align__(128) T h_tile[kTokens * Ranks::kPitch];
  __shared__ int tokens[kTokens];
  device::pdl_begin(p.early);
  const CtaWork work(p);
  const SliceWeights w = weights_of(p, work.tile, work.block, work.live);
  if (w.rank == 0) return device::pdl_wait();
  if constexpr (kGroups > 1 && kAnyOrder) {
    using Few = Step<kGroups, 1>;
    const bool fits = work.tile.count <= Few::kMostTokens && w.rank * kGroups == kDirectMaxRank &&
                      w.b_row_stride == w.rank &&
                      device::is_aligned<T, 8>(static_cast<const T*>(w.b));
    if (fits) return take_tile<T, Few>(p, work, w, h_tile, tokens);
  }
  // Of two kinds of tiles one kernel has fewer registers for either.
  take_tile<T, Step<1, kGroups == 1 ? 2 : 1>>(p, work, w, h_tile, tokens);
}

// ---- host ---------------------------------------------------------------------------------------

}  // namespace

void expand_direct(const ExpandParams& p, Stream stream) {
  check(p.vector_y && p.weights.max_rank * p.groups_a_step <= kDirectMaxRank,
        "lora_expand: B goes straight into fragments for an aligned y and ranks up to ",
        kDirectMaxRank / p.groups_a_step);
  device::Launch l;
  const TileRowGrid rows = tile_row_grid(p.tiles.num, p.tiles.tile_tokens);
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), rows.y, rows.z);
  l.threads = kThreads;
  l.per_sm = p.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.groups_a_step == kDirectGroups) {
      return device::launch<expand_direct_kernel<T, kDirectGroups>>("lora_expand", l, p);
    }
    device::launch<expand_direct_kernel<T, 1>>("lora_expand", l, p);
  });
}

}  // namespace mortar::lora::cuda
