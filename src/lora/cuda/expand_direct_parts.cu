// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for few tokens per adapter and float32 adapters of ranks up to 16 under a bfloat16
// y: B goes from memory straight into the fragments of the MMA, as in expand_direct.cu.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 sum_a sum_s r N_s (B of adapters in use) + 4 M sum_s N_s (y read and written) + h
// FLOP   = 6 M N r: never the limit
// 29 tokens of some 20 adapters, 3,584 to 2 x 18,944, r4: 16 MB -> 3.4 us
// limit  : DRAM (B and y), and for few tokens the chain of dependent loads
//
// A lane has of a step four neighbouring ranks, 16 bytes of B, and splits them where it multiplies.
// h is made once per CTA, in planes of parts. Products and sums are those of expand_parts.cu.
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/part_planes.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = kPartsThreads, kPerSm = 4;
constexpr int kTokens = 16;                       ///< of a tile
constexpr int kWarpCols = 32;                     ///< of a warp at a time
constexpr int kCols = kThreads / 32 * kWarpCols;  ///< from a run of a warp to its next
constexpr int kAhead = 3;                         ///< runs of columns in flight
/// Those that are asked for before h is made: its partials need registers, too.
constexpr int kEarlyB = 1, kEarlyY = 1;

struct Planes {
  using TW = device::TwoParts;
  static constexpr int kTokens = 16, kPartsH = device::kParts<TW>;
};
constexpr int kPitch = h_pitch(kDirectMaxRank);
constexpr int kPlaneBytes = kTokens * kPitch * 2;

/// B and y of a run of columns: a lane's ranks of B of four columns, and y of its 8 columns in two
/// rows, half of the tokens apart.
struct Run {
  uint4 b[4];
  uint4 y[2];
};

/// A lane's places in B and y.
struct Loader {
  const float* b;           ///< its ranks of its first column of the run to be loaded next
  std::int64_t row_stride;  ///< of B
  __nv_bfloat16* y[2];      ///< its columns of a run, in two rows
  int rank;                 ///< ranks from its first one on
  int b_left;               ///< columns of the CTA from that one on
  int y_left[2];            ///< and from those of `y` on; none where there is no row
  bool aligned;             ///< rows of B start at multiples of 16 bytes, and have whole pieces

  __device__ __forceinline__ void load_b(Run& to) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // columns of one block of 8: all of them exist, or none
      const float* at = b + 2 * j * row_stride;
      to.b[j] = make_uint4(0, 0, 0, 0);
      if (aligned) {
        device::load_if(b_left > 0 && rank > 0, to.b[j], at);
      } else if (b_left > 0) {
        to.b[j] = device::load_some<float, 4>(at, rank).piece(0);
      }
    }
    b += kCols * row_stride;
    b_left -= kCols;
  }
  /// y of the run that is `ahead` runs further, if wanted.
  __device__ __forceinline__ void load_y(Run& to, int ahead, bool wanted) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to.y[half] = make_uint4(kMinusZeros, kMinusZeros, kMinusZeros, kMinusZeros);
      device::load_if(wanted && y_left[half] > ahead * kCols, to.y[half], y[half] + ahead * kCols);
    }
  }
  __device__ __forceinline__ void advance_y(int runs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[half] += runs * kCols;
      y_left[half] -= runs * kCols;
    }
  }
};

/// Asks for B and y of a round of runs, those from column `first` of the CTA on, in L2: what
/// registers hold of them in flight is too little for memory.
__device__ __forceinline__ void ask(const ExpandParams& p, const CtaWork& work,
                                    const SliceWeights& w, const int* tokens, int first) {
  constexpr int kRound = kAhead * kCols, kLine = 128;
  const int thread = static_cast<int>(threadIdx.x);
  const int num = min(work.block.cols - first, kRound);
  const int t = tokens[thread % kTokens], line = thread / kTokens * (kLine / 2);
  if (p.add_inputs && t >= 0 && line < num) {
    device::prefetch_l2(static_cast<__nv_bfloat16*>(p.y.data) + t * p.y.row_stride +
                        work.block.y_col + first + line);
  }
  const auto* b = reinterpret_cast<const char*>(static_cast<const float*>(w.b) +
                                                (work.block.first + first) * w.b_row_stride);
  const std::int64_t bytes = num * w.b_row_stride * static_cast<int>(sizeof(float));
  for (std::int64_t at = thread * kLine; at < bytes; at += kThreads * kLine) {
    device::prefetch_l2(b + at);
  }
}

__global__ void __launch_bounds__(kThreads, kPerSm)
    expand_direct_parts_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ __align__(128) unsigned char planes[Planes::kPartsH * kPlaneBytes];
  __shared__ int tokens[kTokens];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  // Guard
  device::pdl_begin(p.early);
  const CtaWork work(p);
  const SliceWeights w = weights_of(p, work.tile, work.block, work.live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  const int warp_col = warp * kWarpCols, octet = lane / 8 * 8;
  Loader at;
  at.row_stride = w.b_row_stride;
  at.rank = w.rank - lane % 4 * 4;
  at.b = static_cast<const float*>(w.b) +
         (work.block.first + warp_col + octet + lane / 4 % 2) * w.b_row_stride + lane % 4 * 4;
  at.b_left = work.block.cols - warp_col - octet;
  at.aligned = device::is_aligned<float, 4>(static_cast<const float*>(w.b)) &&
               w.b_row_stride % 4 == 0 && w.rank % 4 == 0;
  Run runs[kAhead];
#pragma unroll
  for (int i = 0; i < kEarlyB; ++i) at.load_b(runs[i]);
  if (threadIdx.x < kTokens) tokens[threadIdx.x] = work.token;
  const int col = warp_col + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, work.token, lane / 4 + 8 * half);
    at.y_left[half] = t >= 0 ? work.block.cols - col : 0;
    at.y[half] =
        static_cast<__nv_bfloat16*>(p.y.data) + t * p.y.row_stride + work.block.y_col + col;
  }
  __syncthreads();
  if (p.early) {  // whatever the predecessor may still write to y
    ask(p, work, w, tokens, 0);
    ask(p, work, w, tokens, kAhead * kCols);
  }
  const HPlanes<Planes> to(planes, kDirectMaxRank, w.rank, DType::kFloat32, DType::kBFloat16);
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  HSum<Planes> sum(to, p.h, work.tile, tokens, first_row, work.block.slice);
  if (p.h.raw) sum.seek(static_cast<int>(threadIdx.x) / 2);
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
#pragma unroll
  for (int i = 0; i < kEarlyY; ++i) at.load_y(runs[i], i, p.add_inputs);
  if (p.h.raw) {
    sum.make();
  } else {
    make_h<Planes>(to, p.h, work.tile, tokens, first_row, work.block.slice);
  }
  __syncthreads();
  std::uint32_t h[Planes::kPartsH][4];
#pragma unroll
  for (int i = 0; i < Planes::kPartsH; ++i) {
    device::ldmatrix_x4(h[i], device::smem_address(planes) + i * kPlaneBytes +
                                  lane % 16 * kPitch * 2 + lane / 16 * 16);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i >= kEarlyB) at.load_b(runs[i]);
    if (i >= kEarlyY) at.load_y(runs[i], i, p.add_inputs);
  }

  // Compute and store
  const int count = ceil_div(work.block.cols - warp_col, kCols);
  const bool both = work.tile.count > kTokens / 2;  // of the MMA's halves of rows
#pragma unroll 1
  for (int i = 0; i < count; i += kAhead) {
    ask(p, work, w, tokens, (i + 2 * kAhead) * kCols);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (i + u >= count) break;
      float products[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        device::SumsBy<device::TwoParts> sums;
        std::uint32_t b[device::kParts<device::TwoParts>][2];
        const uint4& v = runs[u].b[j];
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
        device::split4<device::TwoParts>(words, b);
        sums.add(h, b);
#pragma unroll
        for (int k = 0; k < 4; ++k) products[j][k] = sums.total(k);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !both) break;
        const uint4 out = add_products<__nv_bfloat16>(runs[u].y[half], products, half, w.scale);
        if (at.y_left[half] > u * kCols) {
          *reinterpret_cast<uint4*>(at.y[half] + u * kCols) = out;
        }
      }
      at.load_b(runs[u]);
      at.load_y(runs[u], u + kAhead, p.add_inputs);
    }
    at.advance_y(kAhead);
  }
}

}  // namespace

void expand_direct_parts(const ExpandParams& p, Stream stream) {
  check(p.two_parts && p.vector_y && p.h.width <= kDirectMaxRank,
        "lora_expand: float32 B goes straight into fragments for an aligned bfloat16 y and ranks "
        "up to ",
        kDirectMaxRank);
  device::Launch l;
  const TileRowGrid rows = tile_row_grid(p.tiles.num, p.tiles.tile_tokens);
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), rows.y, rows.z);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_direct_parts_kernel>("lora_expand", l, p);
}

}  // namespace mortar::lora::cuda
