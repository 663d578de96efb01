// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for many tokens of an adapter, float32 adapters of ranks up to 64 under a bfloat16
// y, on the warpgroup tensor cores of sm_90a.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 4 sum_a sum_s r N_s (B of adapters in use) + h; h
//          from L2 for every 128 columns: r M N / 32
// FLOP   = 6 M N r: three products of parts (src/device/parts.cuh)
// 8,192 tokens of one adapter, qkv, r64: 201 MB -> 47 us of DRAM, 19 GFLOP -> 30 us
// limit  : DRAM: a tile of 64 tokens and 128 columns takes 32 KB of it (2,400 clocks at 13.5 bytes
//          each) and 770 clocks of tensor cores
// wrong  : adapters of few tokens, whose B is split for each of them; ranks above 64
//
// A CTA has one warpgroup and 128 columns, whose B it splits into parts once, for all tiles of an
// adapter that it walks over. A warp copies its own 16 rows of h, and a thread its own pieces of y,
// a tile ahead: no barrier lies between. Of the two CTAs of an SM one multiplies while the other
// adds to y. Products and sums are in the order of expand_parts.cu.
#include <cstdint>

#include "core/int_math.h"
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_parts.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_parts.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128, kTokens = 64, kCtas = kWideShapes[kWideKeptShape].per_sm;
constexpr int kCols = kWideShapes[kWideKeptShape].cols, kRanks = kWideKeptMaxRank;
constexpr int kGroups = kCols / wide_expand::kGroupCols;
constexpr int kPlaneBytes = kCols * device::kSwizzleBytes, kHBytes = kTokens * kRanks * 4;
constexpr int kStages = kWideShapes[kWideKeptShape].stages, kYBytes = kTokens * kCols * 2;
constexpr int kH = kSplitParts * kPlaneBytes, kY = kH + kStages * kHBytes;
constexpr int kSmem = kY + kStages * kYBytes;
static_assert((kSmem + 1024) * kCtas <= 228 * 1024, "the CTAs fit an SM");
static_assert(kCols == kThreads && kRanks == wide_expand::kStepRanks, "a thread looks up a column");

/// A tile, and the token in place 16 w + l % 16 of it for lane l of warp w.
struct Found {
  Tile tile;
  int token = -1;
  bool live = false;
};

struct Walk {
  const ExpandParams& p;
  const Block block;
  unsigned char* const smem;
  int warp, lane, first_row = 0;

  __device__ __forceinline__ Walk(const ExpandParams& params, unsigned char* shared)
      : p(params),
        block(find_block(params, static_cast<int>(blockIdx.x))),
        smem(shared),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  /// Tile `index` of the launch; `num`: those that the plan has.
  __device__ __forceinline__ Found find(int index, int num) const {
    Found f;
    const int place = warp * 16 + lane % 16, at = p.tiles.first + index;
    if (p.groups.plan == nullptr) {
      f.live = index < p.tiles.num &&
               find_segment_tile(p.groups, p.weights.num_adapters, kTokens, at, &f.tile);
      if (f.live) f.token = sorted_token(p.groups, p.tiles, f.tile, place);
      return f;
    }
    f.live = index < p.tiles.num && at < num;
    if (!f.live) return f;
    const int4 entry = __ldcg(reinterpret_cast<const int4*>(p.groups.plan + p.tiles.list) + at);
    f.token = early_token(p.groups, p.tiles, at, place);
    f.tile = {entry.x, entry.y, entry.z};
    return f;
  }

  /// B of the block in parts. kVector: its rows start at multiples of 16 bytes; asked for each row,
  /// it would keep their loads from being in flight together.
  template <bool kVector>
  __device__ __forceinline__ void split_b(const SliceWeights& w) const {
    constexpr int kRows = 64;
    auto* const rows = reinterpret_cast<const void**>(smem + kH);  // where no h is yet
    const int thread = static_cast<int>(threadIdx.x);
    const auto* b = static_cast<const float*>(w.b) + (block.first + thread) * w.b_row_stride;
    rows[permuted(thread)] = thread < block.cols ? b : nullptr;
    __syncthreads();
    using Rows = SplitRows<kRows, kThreads>;
    Rows part[] = {Rows(thread, kVector), Rows(thread, kVector)};
    static_assert(kCols == 2 * kRows);
#pragma unroll
    for (int i = 0; i < 2; ++i) part[i].load(rows + i * kRows, 0, w.rank);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[i].store_and_load(smem + i * kRows * device::kSwizzleBytes, kPlaneBytes, rows, kRanks,
                             w.rank);
    }
    device::fence_async_proxy();
    __syncthreads();
  }

  /// The warp's rows of h of a tile, as they are; zeros from the rank to two whole MMA steps.
  __device__ __forceinline__ void copy_h(const Found& f, int stage, int rank) const {
    const int piece = lane % 16, left = rank - piece * 4;
    const bool wanted = piece * 4 < round_up(rank, 32);
    const int bytes = min(max(left, 0), 4) * 4;
    const auto* h = static_cast<const float*>(p.h.data) + block.slice * p.h.slice_stride +
                    (left > 0 ? piece * 4 : 0);
    const std::uint32_t to = device::smem_address(smem) + kH + stage * kHBytes;
    // Of the lane's own place: a 64-bit product for each copy would be half of all instructions.
    const int row = h_row(p.h, f.tile, first_row, warp * 16 + lane % 16, f.token);
    const std::int64_t at = row < 0 ? -1 : row * p.h.row_stride;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int own = lane / 16 + 2 * i;
      const std::int64_t from = __shfl_sync(0xffffffffu, at, own);
      if (from < 0 || !wanted) continue;
      device::cp_async_16(to + wide_expand::raw_h_offset(warp * 16 + own, piece), h + from, bytes);
    }
  }

  /// Element of y of the thread's first column in row 8 half + l / 4 of the warp's; negative: none.
  __device__ __forceinline__ std::int64_t y_at(const Found& f, int half) const {
    const std::int64_t token = __shfl_sync(0xffffffffu, f.token, 8 * half + lane / 4);
    return token < 0 ? -1 : token * p.y.row_stride + block.y_col + lane % 4 * 8;
  }
  __device__ __forceinline__ bool has(int group) const {
    return block.cols > group * wide_expand::kGroupCols + lane % 4 * 8;
  }
  /// Where a thread's piece of y waits, which is its alone.
  __device__ __forceinline__ unsigned char* y_place(int stage, int half, int group) const {
    return smem + kY + stage * kYBytes +
           ((half * kGroups + group) * kThreads + static_cast<int>(threadIdx.x)) * 16;
  }
  /// Without y there is what it adds nothing to.
  __device__ __forceinline__ void clear_y() const {
    constexpr uint4 kNone = {kMinusZeros, kMinusZeros, kMinusZeros, kMinusZeros};
    for (int i = static_cast<int>(threadIdx.x); i < kStages * kYBytes / 16; i += kThreads) {
      reinterpret_cast<uint4*>(smem + kY)[i] = kNone;
    }
  }
  __device__ __forceinline__ void copy_y(const Found& f, int stage) const {
    if (!p.add_inputs) return;
    const auto* y = static_cast<const __nv_bfloat16*>(p.y.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = y_at(f, half);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (at < 0 || !has(g)) continue;
        device::cp_async_16(device::smem_address(y_place(stage, half, g)),
                            y + at + g * wide_expand::kGroupCols, 16);
      }
    }
  }

  __device__ __forceinline__ void multiply(int stage, int rank, float (&sum)[kCols / 2]) const {
    const int row = warp * 16 + lane / 4;
    const unsigned char* const h = smem + kH + stage * kHBytes + row * 4 * kRanks;
    const int offset =
        wide_expand::raw_h_offset(row, lane % 4 / 2) - row * 4 * kRanks + lane % 2 * 8;
    const auto b = device::wgmma_descriptor(device::smem_address(smem));
    device::WgmmaRegisters<kSplitParts> own[2];  // one for the products in flight
#pragma unroll
    for (float& v : sum) v = 0;
#pragma unroll 1
    for (int i = 0; i * 16 < rank; i += 2) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        wide_expand::load_raw_h(own[j], h, offset ^ (i + j) * 64);
        device::wgmma_keep(sum);
        device::wgmma_fence();
        wide_expand::multiply_parts<kCols>(sum, own[j], b + (i + j) * device::kDescriptorStep,
                                           kPlaneBytes / 16);
        device::wgmma_commit();
        device::wgmma_wait<1>();
      }
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
  }

  __device__ __forceinline__ void store(const Found& f, int stage, float scale,
                                        const float (&sum)[kCols / 2]) const {
    auto* const y = static_cast<__nv_bfloat16*>(p.y.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = y_at(f, half);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float products[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            products[i][c] = sum[g * 16 + i * 4 + c];
          }
        }
        const uint4 old = *reinterpret_cast<const uint4*>(y_place(stage, half, g));
        const uint4 out = add_products<__nv_bfloat16>(old, products, half, scale);
        if (at < 0 || !has(g)) continue;
        *reinterpret_cast<uint4*>(y + at + g * wide_expand::kGroupCols) = out;
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, kCtas)
    expand_kept_kernel(const __grid_constant__ ExpandParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];

  // Guard
  device::pdl_begin(p.early);
  const int index = static_cast<int>(blockIdx.z) << p.log_run, end = index + (1 << p.log_run);
  Walk walk(p, smem);
  int num = 0;
  if (p.groups.plan != nullptr) {
    const int4 head = __ldcg(reinterpret_cast<const int4*>(p.groups.plan));
    num = is_plan_of(head, p.tiles, p.weights.num_adapters) ? head.w : 0;
    walk.first_row = first_position(p.groups, p.tiles);
  }
  if (!p.add_inputs) walk.clear_y();
  Found now = walk.find(index, num);
  if (!now.live) return device::pdl_leave();
  Found next = index + 1 < end ? walk.find(index + 1, num) : Found();

  SliceWeights w;
  int adapter = -1, stage = 0;
  const auto copy = [&](const Found& f, int to) {
    if (w.rank == 0) return;
    walk.copy_h(f, to, w.rank);
    device::cp_async_commit();
    walk.copy_y(f, to);
    device::cp_async_commit();
  };
#pragma unroll 1
  for (int i = index; now.live; ++i, stage ^= 1) {
    if (now.tile.adapter != adapter) {
      if (i > index) __syncthreads();  // all have multiplied by the last B
      adapter = now.tile.adapter;
      w = weights_of(p, now.tile, walk.block, true);
      if (w.rank > 0) {
        const bool vector =
            device::is_aligned<float, 4>(static_cast<const float*>(w.b)) && w.b_row_stride % 4 == 0;
        vector ? walk.split_b<true>(w) : walk.split_b<false>(w);
      }
      if (i == index) device::pdl_wait();
      copy(now, stage);
    }
    const bool follows = next.live && next.tile.adapter == adapter;
    __syncwarp();  // all lanes have read the h that was there
    if (follows) copy(next, stage ^ 1);
    const Found later = i + 2 < end ? walk.find(i + 2, num) : Found();
    if (w.rank > 0) {
      follows ? device::cp_async_wait<3>() : device::cp_async_wait<1>();
      __syncwarp();
      float sum[kCols / 2];
      walk.multiply(stage, w.rank, sum);
      follows ? device::cp_async_wait<2>() : device::cp_async_wait<0>();
      walk.store(now, stage, w.scale, sum);
    }
    now = next;
    next = later;
  }
#endif
}

}  // namespace

void expand_wide_kept(const ExpandParams& p, Stream stream) {
  check(p.two_parts && p.vector_y && p.y.dtype == DType::kBFloat16 && p.h.rows_by_16 &&
            p.h.dtype == DType::kFloat32 && p.weights.dtype == DType::kFloat32 &&
            p.h.width <= kRanks && p.cols == kCols,
        "lora_expand: the kernel that keeps B takes aligned rows of h and weights in float32, up "
        "to 64 ranks, and an aligned bfloat16 y");
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), 1,
                static_cast<unsigned>(ceil_div(p.tiles.num, 1 << p.log_run)));
  l.threads = kThreads;
  l.smem = kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_kept_kernel>("lora_expand", l, p);
}

}  // namespace mortar::lora::cuda
