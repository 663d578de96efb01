// SPDX-License-Identifier: Apache-2.0
// h = x A^T for every pair of dtypes, on tensor cores that multiply parts of values: float32
// adapters under 16-bit models, and float32 models.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]     K hidden, R = sum over slices of ranks
// bytes  = e_x M K + e_A K sum_a R_a + h           e: bytes of an element
// FLOP   = 2 M K R per product of parts: 3 for 16-bit x and float32 A, 6 for float32 both; 2 in
//          lora_apply under bfloat16 x and y, where two parts of A count
// 32 tokens of 32 adapters, qkv, r16, float32 A: 25 MB -> 5.9 us
// limit  : DRAM (A) in decode; in prefill DRAM (x) beside splitting A and the tensor cores
//
// A CTA takes 16, 32 or 64 tokens of one adapter, a run of its rank rows, and all leaves of K or
// (split) one or two. Parts of a leaf of x wait in registers (16 tokens) or, of more and beside
// 16-bit A, in planes in shared memory; rank rows stream past them, as they are, through a ring of
// cp.async stages that is filled before the predecessor has ended. Each of the four warps
// multiplies a quarter of the leaf, all tokens and all 16 rank rows of a stage, so that every
// element is split once and no warp idles at low ranks; the quarters meet in shared memory and are
// added in one order. Leaves are added as leaf_size in problem.h says.
#include <algorithm>
#include <type_traits>

#include "device/any_float.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/shrink_parts_operands.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace parts_shrink;

/// Compiled for older architectures, x of long leaves spills in the registers of four CTAs, for
/// which most of these have no shared memory either.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostCtas = 3;
#else
constexpr int kMostCtas = 4;
#endif

template <class Tr>
__global__ void __launch_bounds__(kThreads, std::min(Tr::kMinCtas, kMostCtas))
    shrink_parts_kernel(const __grid_constant__ ShrinkParams p) {
  using TX = typename Tr::TX;
  using TW = typename Tr::TW;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RankRows<kMaxRows> rows;
  __shared__ int tokens[Tr::kTokens];

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int shares = static_cast<int>(gridDim.x) / (p.tiles.tile_tokens / Tr::kTokens);
  const int share = static_cast<int>(blockIdx.x) % shares;
  const int split = static_cast<int>(blockIdx.y);
  device::pdl_begin(p.early);

  // Guard
  Tile tile;
  const bool live = static_cast<int>(blockIdx.z) < p.tiles.num &&
                    find_tile(p.groups, p.tiles, p.weights.num_adapters,
                              p.tiles.first + static_cast<int>(blockIdx.z), &tile);
  if (!live) {
    zero_base_rows(p);
    return;
  }
  // Tiles of 64 tokens come in shares that a CTA has room for.
  const int first_place = static_cast<int>(blockIdx.x) / shares * Tr::kTokens;
  tile.start += first_place;
  tile.count = min(tile.count - first_place, Tr::kTokens);
  if (tile.count > 0) {
    rows.fill(p, tile.adapter, share * p.rows_per_cta, p.rows_per_cta);
    __syncthreads();
  }
  if (tile.count <= 0 || rows.count == 0) {
    device::pdl_wait();
    return;
  }
  const int row_stages = ceil_div(rows.count, kStageRows);

  // Load: A does not depend on the predecessor.
  const int leaf = static_cast<int>(leaf_size(p.weights.hidden));
  const bool whole = p.h.num_slabs == 1;
  const int leaves = static_cast<int>(num_leaves(p.weights.hidden));
  const int most_own = ceil_div(leaves, static_cast<int>(gridDim.y));
  const int first_leaf = split * most_own, num_own = min(most_own, leaves - first_leaf);
  const std::int64_t k_begin = static_cast<std::int64_t>(first_leaf) * leaf;
  const DType x_dtype = p.x.dtype, w_dtype = p.weights.dtype;
  const int a_pitch = Tr::a_pitch(leaf, w_dtype);
  unsigned char* const planes = smem;
  unsigned char* const sums = planes + Tr::x_bytes(leaf, x_dtype);
  unsigned char* const totals = sums + Tr::kSumBytes;
  unsigned char* const ring = totals + (whole ? Tr::total_bytes(p.rows_per_cta / kStageRows) : 0);
  RowCopy<Tr> copy(p, rows, ring, leaf, k_begin, num_own * row_stages, row_stages);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy.next();
  if (threadIdx.x < Tr::kTokens) {
    tokens[threadIdx.x] = sorted_token(p.groups, p.tiles, tile, threadIdx.x);
  }
  __syncthreads();

  // Pointers
  const int middle = static_cast<int>(first_leaves(leaves));
  const int quarter = warp * (leaf / kWarps);
  const std::uint32_t x_lane =
      device::smem_address(planes) + lane % 16 * Tr::x_pitch(leaf) + (quarter + lane / 16 * 8) * 2;
  const unsigned char* const a_lane =
      ring + lane / 4 * a_pitch + (quarter + lane % 4 * 4) * device::float_bytes<TW>(w_dtype);
  float2* const sum_lane = reinterpret_cast<float2*>(sums) + warp * Tr::kSumPairs + lane;
  // A thread adds the quarters of one token of every MMA tile and two rank rows of a stage.
  const int own_row = static_cast<int>(threadIdx.x) / 64 * 8 + lane % 4 * 2;
  const int own_place = lane / 4 + static_cast<int>(threadIdx.x) / 32 % 2 * 8;
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  if (p.early) {
    // x to L2, a line of a token each, whatever the predecessor may still write there.
    constexpr int kLine = 128, kStep = kThreads / Tr::kTokens * kLine;
    const int own = tokens[threadIdx.x % Tr::kTokens], size = device::float_bytes<TX>(x_dtype);
    const auto* x = static_cast<const char*>(p.x.data) + (own * p.x.row_stride + k_begin) * size;
    const std::int64_t first = whole ? leaf : num_own * leaf;  // elements
    const std::int64_t end = own < 0 ? 0 : min(first, p.weights.hidden - k_begin) * size;
    for (int c = static_cast<int>(threadIdx.x) / Tr::kTokens * kLine; c < end; c += kStep) {
      device::prefetch_l2(x + c);
    }
  }
  int h_rows[Tr::kFrags];
#pragma unroll
  for (int m = 0; m < Tr::kFrags; ++m) {
    h_rows[m] = h_row(p.h, tile, first_row, m * 16 + own_place, tokens[m * 16 + own_place]);
  }
  int x_tokens[2];  // of the lane's rows of x
#pragma unroll
  for (int half = 0; half < 2; ++half) x_tokens[half] = tokens[lane / 4 + 8 * half];
  device::pdl_wait();

  KeptX<Tr> kept;
  int stage = 0;
  bool refill = false;
#pragma unroll 1
  for (int own_leaf = 0; own_leaf < num_own; ++own_leaf) {
    // The last reads of x before this lie in front of a barrier.
    const std::int64_t k = k_begin + static_cast<std::int64_t>(own_leaf) * leaf;
    if constexpr (Tr::kKeepX) {
      kept.load(p, x_tokens, k + quarter + lane % 4 * 4);
    } else {
      device::visit_float<TX>(x_dtype, [&](auto x) {
        load_x<Tr, typename decltype(x)::type>(p, tokens, k, leaf, planes);
      });
    }
#pragma unroll 1
    for (int row_stage = 0; row_stage < row_stages; ++row_stage) {
      device::wait_for_stage<kStages>(refill);
      __syncthreads();  // the stage and x are there; the one before is free, and so are the sums
      if (refill) copy.next();
      refill = true;

      // Compute
      device::SumsBy<TW> acc[Tr::kFrags][2];
      const unsigned char* a = a_lane + stage * kStageRows * a_pitch;
      if constexpr (Tr::kKeepX) {
        multiply<Tr>(acc, kept, a, a_pitch);
      } else {
        device::visit_float<TX>(x_dtype, [&](auto x) {
          device::visit_float<TW>(w_dtype, [&](auto w) {
            multiply<typename decltype(x)::type, typename decltype(w)::type, Tr>(acc, x_lane, a,
                                                                                 a_pitch, leaf);
          });
        });
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
      for (int m = 0; m < Tr::kFrags; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            sum_lane[((m * 2 + n) * 2 + half) * 32] =
                make_float2(acc[m][n].total(2 * half), acc[m][n].total(2 * half + 1));
          }
        }
      }
      __syncthreads();  // all quarters are there

      // Reduce and store
#pragma unroll
      for (int m = 0; m < Tr::kFrags; ++m) {
        const float2* q = reinterpret_cast<const float2*>(sums) + m * kThreads + threadIdx.x;
        const float2 q0 = q[0], q1 = q[Tr::kSumPairs], q2 = q[2 * Tr::kSumPairs],
                     q3 = q[3 * Tr::kSumPairs];
        const auto leaf_sum = [](float a, float b, float c, float d) {
          constexpr bool kInOrder = std::is_same_v<TW, device::TwoParts>;
          return kInOrder ? ((a + b) + c) + d : (a + b) + (c + d);
        };
        float2 v = make_float2(leaf_sum(q0.x, q1.x, q2.x, q3.x), leaf_sum(q0.y, q1.y, q2.y, q3.y));
        if (whole) {
          // The same thread reads what it has written.
          float2* total = reinterpret_cast<float2*>(totals) +
                          (row_stage * Tr::kFrags + m) * kThreads + threadIdx.x;
          float2* const half = total + (own_leaf < middle ? 0 : row_stages * Tr::kSumPairs);
          const bool first = own_leaf == 0 || own_leaf == middle;
          const float2 before = first ? make_float2(0, 0) : *half;
          v = make_float2(before.x + v.x, before.y + v.y);
          *half = v;
          if (own_leaf + 1 < num_own) continue;
          const float2 lower = num_own > 1 ? *total : make_float2(0, 0);
          v = make_float2(lower.x + v.x, lower.y + v.y);
        }
        if (h_rows[m] < 0) continue;
        const std::int64_t base = (whole ? 0 : first_leaf + own_leaf) * p.h.slab_stride +
                                  static_cast<std::int64_t>(h_rows[m]) * p.h.row_stride;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = row_stage * kStageRows + own_row + c;
          if (r >= rows.count) continue;
          const float own = c == 0 ? v.x : v.y;
          const float scaled = p.h.raw ? own : own * rows.scale[r];
          device::store_from_float(p.h.data, p.h.dtype, base + rows.place[r],
                                   rows.weights[r] == nullptr ? 0.0f : scaled);
        }
      }
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
std::size_t smem_bytes(const ShrinkParams& p, const ShrinkPlan& c) {
  const int leaf = static_cast<int>(leaf_size(p.weights.hidden));
  const int row_stages = c.rows / kStageRows;
  const bool whole = p.h.num_slabs == 1;
  const int items = row_stages * static_cast<int>(whole ? num_leaves(p.weights.hidden) : c.leaves);
  return static_cast<std::size_t>(
      Tr::x_bytes(leaf, p.x.dtype) + Tr::kSumBytes + (whole ? Tr::total_bytes(row_stages) : 0) +
      std::min(kStages, items) * kStageRows * Tr::a_pitch(leaf, p.weights.dtype));
}
template <class Tr>
bool fits(const ShrinkParams& p, const ShrinkPlan& c) {
  return device::fits<shrink_parts_kernel<Tr>>("lora_shrink", smem_bytes<Tr>(p, c));
}

template <class Tr>
void launch_traits(ShrinkParams p, const ShrinkPlan& c, Stream stream) {
  check(p.tiles.tile_tokens == c.tile_tokens && c.rows <= kMaxRows && c.rows % kStageRows == 0,
        "lora_shrink: no kernel of parts for a tile of ", c.tile_tokens, " tokens and ", c.rows,
        " rank rows");
  p.rows_per_cta = c.rows;
  device::Launch l;
  l.grid = shrink_grid(p, c);
  l.grid.x *= static_cast<unsigned>(c.tile_tokens / Tr::kTokens);
  l.grid.y = ceil_div(l.grid.y, static_cast<unsigned>(c.leaves));
  l.threads = kThreads;
  l.smem = smem_bytes<Tr>(p, c);
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_parts_kernel<Tr>>("lora_shrink", l, p);
}

template <class TX, class TW>
void launch_typed(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  constexpr int kShort = leaf_size(1) / (16 * kWarps);  // MMA steps of a warp in a leaf
  constexpr bool kOnePart = device::kParts<TX> == 1;
  const bool large = c.tile_tokens == 64, whole = p.h.num_slabs == 1;
  if (leaf_size(p.weights.hidden) == leaf_size(1)) {
    // 1,024 tokens, qkv, rank 16: 14.8 us with 64 tokens of one part, 19.9 with 16. With all of K:
    // 130 and 102 (8,192 tokens, rank 16), but 264 and 392 (rank 64).
    if constexpr (kOnePart) {
      using Large = Traits<TX, TW, 4, 0>;
      const bool few = p.weights.num_slices * p.weights.max_rank <= kPartsMaxTotals;
      if (large && !(whole && few) && fits<Large>(p, c)) {
        return launch_traits<Large>(p, c, stream);
      }
    }
    return launch_traits<Traits<TX, TW, 1, kShort>>(p, c, stream);
  }
  // Long leaves of two or three parts, down, rank 16: 49 us with 16 tokens, 57 with 32, 1,024
  // tokens; 441 and 326, 8,192 tokens, with all of K.
  using Pair = Traits<TX, TW, 2, 0>;
  if (large && (kOnePart || whole) && fits<Pair>(p, c)) return launch_traits<Pair>(p, c, stream);
  launch_traits<Traits<TX, TW, 1, 2 * kShort>>(p, c, stream);
}

/// Weights of 16 bits beside x or y of another type are rare: two kernels for all of these, with x
/// in planes. (us of shrink on an H100, these and one for the two types, with x in registers: 256
/// tokens of 4 adapters, qkv, rank 32, float32 x and bfloat16 A, 20.5 and 16.8.)
void launch_half_weights(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  using TX = device::AnyFloat;
  using TW = device::AnyFloat16;
  device::check_dtype<FloatDTypes>(p.x.dtype, "lora_shrink");
  device::check_dtype<Float16DTypes>(p.weights.dtype, "lora_shrink");
  using Pair = Traits<TX, TW, 2, 0>;
  const bool pair = c.tile_tokens == 64 && p.h.num_slabs == 1 && fits<Pair>(p, c);
  pair ? launch_traits<Pair>(p, c, stream) : launch_traits<Traits<TX, TW, 1, 0>>(p, c, stream);
}

}  // namespace

void shrink_parts(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  if (p.two_parts) return launch_typed<__nv_bfloat16, device::TwoParts>(p, c, stream);
  if (p.weights.dtype != DType::kFloat32) return launch_half_weights(p, c, stream);
  device::visit_dtype<FloatDTypes>(p.x.dtype, "lora_shrink", [&](auto x) {
    launch_typed<typename decltype(x)::type, float>(p, c, stream);
  });
}

}  // namespace mortar::lora::cuda
