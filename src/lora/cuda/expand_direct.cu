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
// A CTA takes a run of columns of one slice and one tile of 16 tokens; of its columns a warp takes
// every fourth group of 32. No value of B is used twice, so shared memory would only be a detour:
// a lane loads the ranks that its fragments hold, and a warp waits for none of the others. B and y
// of several groups are in flight at once; those of the first ones are asked for before the
// predecessor has ended (B) and before h is made (y). h is made once per CTA, from the split-K
// partials of shrink or from finished rows. The permutation of columns is that of the prefill
// kernel.
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
constexpr int kTokens = 16;     ///< of a tile
constexpr int kGroupCols = 32;  ///< of a warp at a time

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kAnyOrder = false;
constexpr int kPerSm = 3;  // four would spill
#else
/// Tensor cores add the 16 products of a step at once, in whatever order they lie
/// (docs/numerics.md): a lane takes four neighbouring ranks in one load.
constexpr bool kAnyOrder = true;
constexpr int kPerSm = 4;  ///< CTAs of an SM, whose registers they share
#endif

using Ranks = RankTile<1>;
static_assert(Ranks::kPitch == kDirectMaxRank, "one MMA step");
constexpr int kStride = kWarps * kGroupCols;  ///< from a group of a warp to its next
static_assert(kStride == kDirectCols);
constexpr int kAhead = 4;  ///< groups of columns in flight
/// Of these, groups that are asked for before h is made: its partials need registers, too.
constexpr int kEarlyB = 2, kEarlyY = 1;

/// The ranks that lane `quad` of four has in a fragment: two from each on.
__device__ __forceinline__ int first_ranks(int quad) { return kAnyOrder ? 4 * quad : 2 * quad; }
constexpr int kSecondRanks = kAnyOrder ? 2 : 8;  ///< the others, counted from the first

/// B and y of a group of columns: B's fragments of 8 columns, y's rows, 8 apart.
struct Group {
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
template <class T>
struct Loader {
  const T* b[4];        ///< its ranks of its rows of the group of B to be loaded next
  std::int64_t b_step;  ///< elements from there to the next group
  T* y[2];              ///< its columns of a group, in two rows
  int rank;             ///< ranks from its first one on
  int b_left;           ///< columns of the CTA from those of `b` on
  int y_left[2];        ///< and from those of `y` on; none where there is no row

  /// Loads the next group of B. kAligned: its rows start at multiples of 8 bytes, and there are a
  /// multiple of four ranks.
  template <bool kAligned>
  __device__ __forceinline__ void load_b(Group& to) {
    const int left = b_left > 0 ? rank : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
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
    b_left -= kStride;
  }
  /// Loads y of the group that is `ahead` groups further, if wanted.
  __device__ __forceinline__ void load_y(Group& to, int ahead, bool wanted) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::load_if(wanted && y_left[half] > ahead * kStride, to.y[half],
                      y[half] + ahead * kStride);
    }
  }
  __device__ __forceinline__ void advance_y(int groups) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[half] += groups * kStride;
      y_left[half] -= groups * kStride;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kPerSm)
    expand_direct_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ __align__(128) T h_tile[kTokens * Ranks::kPitch];
  __shared__ int tokens[kTokens];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  device::pdl_begin(p.early);

  // Coordinates
  const CtaWork work(p);
  const Tile& tile = work.tile;
  const Block& block = work.block;
  const int token = work.token;
  const SliceWeights w = weights_of(p, tile, block, work.live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  const int warp_col = warp * kGroupCols;
  Loader<T> at;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = warp_col + lane / 8 * 8 + 2 * j + lane / 4 % 2;
    at.b[j] = static_cast<const T*>(w.b) + (block.first + row) * w.b_row_stride + first_ranks(quad);
  }
  at.b_step = kStride * w.b_row_stride;
  at.rank = w.rank - first_ranks(quad);
  at.b_left = block.cols - warp_col - lane / 8 * 8;
  const bool aligned = device::is_aligned<T, 4>(static_cast<const T*>(w.b)) &&
                       w.b_row_stride % 4 == 0 && w.rank % 4 == 0;
  Group groups[kAhead];
#pragma unroll
  for (int i = 0; i < kEarlyB; ++i) {
    groups[i].clear_b();
    if (aligned) at.template load_b<true>(groups[i]);
  }
  if (threadIdx.x < kTokens) tokens[threadIdx.x] = token;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, token, lane / 4 + 8 * half);
    at.y_left[half] = t >= 0 ? block.cols - warp_col - quad * 8 : 0;
    at.y[half] = static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + warp_col + quad * 8;
  }
  __syncthreads();
  HSum<T, Ranks, kThreads> sum(p, tile, tokens, block.slice, w);
  if (p.early && p.add_inputs) {
    // The first 512 columns of y to L2, whatever the predecessor may still write there.
    const int col = (warp * 2 + lane / kTokens) * 64;
    const int t = __shfl_sync(0xffffffffu, token, lane % kTokens);
    if (t >= 0 && col < block.cols) {
      device::prefetch_l2(static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + col);
    }
  }
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
#pragma unroll
  for (int i = 0; i < kEarlyY; ++i) {
    groups[i].clear_y();
    at.load_y(groups[i], i, p.add_inputs);
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
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto ranks = [&](int r) {
      return *reinterpret_cast<const std::uint32_t*>(
          h_tile + Ranks::place(lane / 4 + 8 * half, r / 8) + r % 8);
    };
    h[half] = ranks(first_ranks(quad));
    h[2 + half] = ranks(first_ranks(quad) + kSecondRanks);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i >= kEarlyB) {
      groups[i].clear_b();
      if (aligned) at.template load_b<true>(groups[i]);
    }
    if (i >= kEarlyY) {
      groups[i].clear_y();
      at.load_y(groups[i], i, p.add_inputs);
    }
  }

  // Compute and store
  const bool both = tile.count > 8;  // rows of the MMA's second half
  const auto compute = [&](const Group& group, int ahead) {
    float acc[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      device::mma_16816<T>(acc[j], h, group.b[j].x, group.b[j].y);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both) break;
      const uint4 out = add_products<T>(group.y[half], acc, half, w.scale);
      if (at.y_left[half] > ahead * kStride) {
        *reinterpret_cast<uint4*>(at.y[half] + ahead * kStride) = out;
      }
    }
  };
  const int count = ceil_div(block.cols - warp_col, kStride);
  if (!aligned) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      at.template load_b<false>(groups[0]);
      compute(groups[0], 0);
      at.advance_y(1);
      at.load_y(groups[0], 0, p.add_inputs);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; i += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (i + u >= count) break;
      compute(groups[u], u);
      at.template load_b<true>(groups[u]);
      at.load_y(groups[u], u + kAhead, p.add_inputs);
    }
    at.advance_y(kAhead);
  }
}

// ---- host ---------------------------------------------------------------------------------------

}  // namespace

void expand_direct(const ExpandParams& p, Stream stream) {
  check(p.vector_y && p.h.width <= kDirectMaxRank,
        "lora_expand: B goes straight into fragments for an aligned y and ranks up to ",
        kDirectMaxRank);
  device::Launch l;
  const TileRowGrid rows = tile_row_grid(p.tiles.num, p.tiles.tile_tokens);
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), rows.y, rows.z);
  l.threads = kThreads;
  l.per_sm = p.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    device::launch<expand_direct_kernel<T>>("lora_expand", l, p);
  });
}

}  // namespace mortar::lora::cuda
