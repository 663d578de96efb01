// SPDX-License-Identifier: Apache-2.0
// Partial sums of h = x A^T for few tokens per adapter, on tensor cores: one slab per leaf of K.
//
// slab[l, s, t, r] = sum_{k in leaf l} x[t, k] A_{a(t), s}[r, k]     K hidden, R = sum of ranks
// bytes  = 2 K sum_a R_a (A of the adapters in use) + 2 M K (x) + 4 M R Z (slabs, Z leaves, to L2)
// FLOP   = 2 M K R: never the limit
// 32 tokens of 32 adapters, qkv: 12.8 MB -> 3.0 us (r16), 50.6 MB -> 11.8 us (r64)
// limit  : DRAM (A), and for few tokens the chain of dependent loads
//
// A CTA takes a tile of 16 tokens of one adapter, 512 elements of K and a run of its rank rows. x
// waits in shared memory (and in MMA fragments) while rank rows stream past it through a ring of
// cp.async stages that is filled before the predecessor has ended. A warp owns one leaf and 8 rank
// rows of a stage: no sum crosses warps, and a leaf is one MMA chain as in the other kernels.
#include <algorithm>
#include <type_traits>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTokens = 16;      ///< of a tile
constexpr int kK = kDecodeK;     ///< elements of K per CTA
constexpr int kPitch = kK + 8;   ///< elements; 1040 B rows make ldmatrix free of bank conflicts
constexpr int kPieces = kK / 8;  ///< 16-byte pieces of a row
constexpr int kRowStep = kThreads / kPieces;
constexpr int kStages = 4;

template <class T_, bool kPlan_, int kLeaves_>
struct Traits {
  using T = T_;
  static constexpr bool kPlan = kPlan_;                    ///< a plan, else segments
  static constexpr int kLeaves = kLeaves_;                 ///< leaves per CTA
  static constexpr int kSteps = kK / 16 / kLeaves;         ///< MMA steps of a leaf
  static constexpr int kStageRows = 8 * kWarps / kLeaves;  ///< rank rows per stage
  static constexpr int kStageElts = kStageRows * kPitch;
  /// Fragments of x stay in registers while a leaf's fit.
  static constexpr bool kKeepX = kSteps <= 16;
};

template <class Tr>
__global__ void __launch_bounds__(kThreads, 4)
    shrink_decode_kernel(const __grid_constant__ ShrinkParams p) {
  using T = typename Tr::T;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RankRows<kDecodeMaxRows> rows;
  T* x_tile = reinterpret_cast<T*>(smem);
  T* ring = x_tile + kTokens * kPitch;

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  const int index = p.tiles.first + static_cast<int>(blockIdx.z);
  const std::int64_t k = static_cast<std::int64_t>(blockIdx.y) * kK + piece * 8;
  const int bytes = k < p.weights.hidden ? 16 : 0;  // K is a multiple of 8
  device::pdl_begin(p.early);

  // Guard
  const int early = early_token<Tr::kPlan>(p.groups, p.tiles, index, lane % kTokens);
  Tile tile;
  if (!find_cta_tile<Tr::kPlan>(p.groups, p.tiles, p.weights.num_adapters, index, &tile)) {
    device::pdl_wait();
    return;
  }
  const int token = tile_token<Tr::kPlan>(p.groups, p.tiles, tile, lane % kTokens, early);
  rows.fill(p, tile.adapter, static_cast<int>(blockIdx.x) * p.rows_per_cta, p.rows_per_cta);
  __syncthreads();
  const int num_rows = rows.count;
  const int num_stages = ceil_div(num_rows, Tr::kStageRows);

  // Load: A does not depend on the predecessor.
  const auto copy_rows = [&](int stage) {
    T* at = ring + stage % kStages * Tr::kStageElts + piece * 8;
    const int first = stage * Tr::kStageRows;
#pragma unroll
    for (int i = row0; i < Tr::kStageRows; i += kRowStep) {
      if (first + i >= num_rows) break;
      const T* a = static_cast<const T*>(rows.weights[first + i]);
      device::cp_async_16(device::smem_address(at + i * kPitch), bytes > 0 ? a + k : a, bytes);
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < min(kStages, num_stages); ++stage) copy_rows(stage);

  // All addresses before the wait: after it a warp has its scheduler to itself, and every
  // instruction is a delay.
  constexpr int kOwnTokens = kTokens / kRowStep;
  int x_tokens[kOwnTokens];
  const T* x_rows[kOwnTokens];
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    const int t = __shfl_sync(0xffffffffu, token, i * kRowStep + row0);
    x_tokens[i] = t;
    x_rows[i] = static_cast<const T*>(p.x.data) + t * p.x.row_stride + (bytes > 0 ? k : 0);
    if (p.early && t >= 0 && bytes > 0 && piece % 8 == 0) device::prefetch_l2(x_rows[i]);
  }
  const std::uint32_t x_dst = device::smem_address(x_tile + row0 * kPitch + piece * 8);
  const int leaf = warp % Tr::kLeaves, rows8 = warp / Tr::kLeaves * 8;
  const int slab = static_cast<int>(blockIdx.y) * Tr::kLeaves + leaf;
  const std::uint32_t x_at =
      device::smem_address(x_tile + lane % 16 * kPitch + lane / 16 * 8 + leaf * Tr::kSteps * 16);
  const std::uint32_t a_at = device::smem_address(ring + (rows8 + lane % 8) * kPitch +
                                                  lane / 8 * 8 + leaf * Tr::kSteps * 16);
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  float* out[2];  // rows of h; null: none
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane / 4 + 8 * half;
    const int row = h_row(p.h, tile, first_row, place, __shfl_sync(0xffffffffu, token, place));
    out[half] = row < 0 || slab >= p.h.num_slabs
                    ? nullptr
                    : static_cast<float*>(p.h.data) + slab * p.h.slab_stride + row * p.h.row_stride;
  }
  device::pdl_wait();
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    if (x_tokens[i] >= 0) {
      device::cp_async_16(x_dst + i * kRowStep * kPitch * 2, x_rows[i], bytes);
    }
  }
  device::cp_async_commit();

  // Compute
  std::uint32_t x_frags[Tr::kKeepX ? Tr::kSteps : 1][4];
  const auto multiply = [&](int stage, auto load_x) {
    const int row = stage * Tr::kStageRows + rows8;
    if (row >= num_rows) return;
    const std::uint32_t at = a_at + stage % kStages * Tr::kStageElts * 2;
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < Tr::kSteps; i += 2) {
      std::uint32_t a[4];
      device::ldmatrix_x4(a, at + i * 32);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        auto& frag = x_frags[Tr::kKeepX ? i + j : 0];
        if (!Tr::kKeepX || load_x) device::ldmatrix_x4(frag, x_at + (i + j) * 32);
        device::mma_16816<T>(sum, frag, a[2 * j], a[2 * j + 1]);
      }
    }
    // Store
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = row + lane % 4 * 2 + c;
        if (r < num_rows && out[half] != nullptr) out[half][rows.place[r]] = sum[half * 2 + c];
      }
    }
  };
  device::cp_async_wait<0>();
  __syncthreads();
  multiply(0, std::true_type{});
#pragma unroll 1
  for (int stage = 1; stage < num_stages; ++stage) {
    device::cp_async_wait<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < num_stages) copy_rows(stage + kStages - 1);
    device::cp_async_commit();
    multiply(stage, std::false_type{});
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(ShrinkParams p, const ShrinkPlan& c, Stream stream) {
  const int rows = p.weights.num_slices * p.weights.max_rank;
  p.rows_per_cta = c.rows;
  const int most = std::min(p.rows_per_cta, rows);
  // Fewer rows than a stage holds take no more memory than they need.
  const int ring_rows = std::min(kStages * Tr::kStageRows, round_up(most, 8));
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div(rows, p.rows_per_cta)),
                static_cast<unsigned>(
                    std::max<std::int64_t>(1, ceil_div<std::int64_t>(p.weights.hidden, kK))),
                static_cast<unsigned>(p.tiles.num));
  l.threads = kThreads;
  l.smem = static_cast<std::size_t>(kTokens + ring_rows) * kPitch * 2;
  l.per_sm = c.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_decode_kernel<Tr>>("lora_shrink", l, p);
}

template <class T, bool kPlan>
void launch_leaves(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  if (leaf_size(p.weights.hidden) == kK) {
    return launch_traits<Traits<T, kPlan, 1>>(p, c, stream);
  }
  static_assert(leaf_size(1) * 2 == kK && leaf_size(1 << 20) == kK);
  launch_traits<Traits<T, kPlan, 2>>(p, c, stream);
}

template <class T>
void launch_typed(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  if (p.groups.plan != nullptr) return launch_leaves<T, true>(p, c, stream);
  launch_leaves<T, false>(p, c, stream);
}

}  // namespace

void shrink_decode(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  check(p.vector && p.h.raw && !p.pad && p.tiles.tile_tokens == kTokens && c.rows <= kDecodeMaxRows,
        "lora_shrink: the decode kernel leaves partials of tiles of 16 tokens and of aligned rows");
  device::visit_dtype<Float16DTypes>(p.x.dtype, "lora_shrink", [&](auto tag) {
    launch_typed<typename decltype(tag)::type>(p, c, stream);
  });
}

}  // namespace mortar::lora::cuda
