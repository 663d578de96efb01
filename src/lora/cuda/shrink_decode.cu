// SPDX-License-Identifier: Apache-2.0
// h = x A^T for few tokens per adapter, on tensor cores: one slab of partial sums per leaf of K, or
// (lora_shrink on sm_90) h itself.
//
// slab[l, s, t, r] = sum_{k in leaf l} x[t, k] A_{a(t), s}[r, k]     K hidden, R = sum of ranks
// h[s, t, r] = scale * sum_l slab[l, s, t, r]
// bytes  = 2 K sum_a R_a (A of the adapters in use) + 2 M K (x) + 4 M R Z (slabs, Z leaves, to L2,
//          or to shared memory for h)
// FLOP   = 2 M K R: never the limit
// 32 tokens of 32 adapters, qkv: 12.8 MB -> 3.0 us (r16), 50.6 MB -> 11.8 us (r64)
// limit  : DRAM (A), and for few tokens the chain of dependent loads
//
// A CTA takes a tile of 16 tokens of one adapter, 512 elements of K and a run of its rank rows. x
// waits in shared memory (and in MMA fragments) while rank rows stream past it through a ring of
// cp.async stages that is filled before the predecessor has ended. A warp owns one leaf and 8 rank
// rows of a stage: no sum crosses warps, and a leaf is one MMA chain as in the other kernels. Of 33
// to 64 rows, which are in shared memory at once, it has the chains of all stages side by side.
//
// Whole: the CTAs of a cluster take turns at all of K, 512 elements each. They send the sums of
// their leaves to the CTA of the cluster that looks after the token, through distributed shared
// memory, and that CTA adds them as leaf_size in problem.h says: the bits of slabs and of the
// kernel that adds them, in one launch. (A second one takes 2.4 us of the host's time.)
#include <algorithm>
#include <type_traits>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
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

template <class T_, bool kWhole_, int kLeaves_, int kStages_ = kDecodeStages, int kAtOnce_ = 1,
          bool kDense_ = false>
struct Traits {
  using T = T_;
  static constexpr bool kWhole = kWhole_;                  ///< h, not slabs
  static constexpr int kLeaves = kLeaves_;                 ///< leaves per CTA
  static constexpr int kStages = kStages_;                 ///< of the ring of rank rows
  static constexpr int kAtOnce = kAtOnce_;                 ///< stages multiplied side by side
  static constexpr int kSteps = kK / 16 / kLeaves;         ///< MMA steps of a leaf
  static constexpr int kStageRows = 8 * kWarps / kLeaves;  ///< rank rows per stage
  static constexpr int kStageElts = kStageRows * kPitch;
  /// Fragments of x stay in registers while a leaf's fit, for the stages that stream past them.
  static constexpr bool kKeepX = kSteps <= 16 && kAtOnce == 1 && !kDense_;
  /// Two leaves per CTA are those of K up to 4,096, which a cluster holds at once.
  static constexpr bool kTurns = kWhole && kLeaves == 1;
  /// Of long leaves as few registers as they need, so that CTAs of expand find room beside them.
  static constexpr int kPerSm = kAtOnce == 2 || kDense_ ? kDenseShrinkPerSm : 4;
};

/// Adds the leaves of the tokens that this CTA of the cluster looks after, and writes their h.
/// `h_rows`: rows of h of the tile's tokens; -1: none.
template <class Rows>
__device__ __forceinline__ void write_whole(const ShrinkParams& p, const Rows& rows,
                                            const int* h_rows, const float* sums) {
  const int ctas = static_cast<int>(gridDim.y), cta = static_cast<int>(blockIdx.y);
  const int own_tokens = kTokens / ctas, stride = own_tokens * p.rows_per_cta;
  const int leaves = static_cast<int>(num_leaves(p.weights.hidden));
  const int middle = static_cast<int>(first_leaves(leaves));
  for (int i = threadIdx.x; i < own_tokens * rows.count; i += kThreads) {
    const int own = i / rows.count, r = i % rows.count;
    const int row = h_rows[own * ctas + cta];
    if (row < 0) continue;
    const float* leaf = sums + own * p.rows_per_cta + r;
    float first = 0, second = 0;
#pragma unroll 8
    for (int l = 0; l < middle; ++l) first += leaf[l * stride];
#pragma unroll 8
    for (int l = middle; l < leaves; ++l) second += leaf[l * stride];
    const float h = rows.weights[r] == nullptr ? 0.0f : (first + second) * rows.scale[r];
    device::store_from_float(p.h.data, p.h.dtype, row * p.h.row_stride + rows.place[r], h);
  }
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kPerSm)
    shrink_decode_kernel(const __grid_constant__ ShrinkParams p) {
  using T = typename Tr::T;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RankRows<kDecodeMaxRows> rows;
  // The CTA's turns at K, and what the cluster sends it: all leaves of its tokens.
  const int ctas = Tr::kWhole ? static_cast<int>(gridDim.y) : 1;
  const int turns = Tr::kTurns ? decode_turns(p.weights.hidden, ctas) : 1;
  const int sent = Tr::kWhole ? turns * Tr::kLeaves * kTokens * p.rows_per_cta : 0;
  float* const sums = reinterpret_cast<float*>(smem);
  T* x_tile = reinterpret_cast<T*>(sums + sent);
  T* ring = x_tile + turns * kTokens * kPitch;

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  const int index = p.tiles.first + static_cast<int>(blockIdx.z);
  const std::int64_t k = static_cast<std::int64_t>(blockIdx.y) * kK + piece * 8;
  const int bytes = k < p.weights.hidden ? 16 : 0;  // K is a multiple of 8
  device::pdl_begin(p.early);

  // Guard
  if (Tr::kWhole && static_cast<int>(blockIdx.z) >= p.tiles.num) return zero_base_rows(p);
  const int early = early_token(p.groups, p.tiles, index, lane % kTokens);
  Tile tile;
  if (!find_cta_tile(p.groups, p.tiles, p.weights.num_adapters, index, &tile)) {
    device::pdl_wait();
    return;
  }
  const int token = tile_token(p.groups, p.tiles, tile, lane % kTokens, early);
  if constexpr (Tr::kWhole) device::cluster_arrive();
  rows.fill(p, tile.adapter, static_cast<int>(blockIdx.x) * p.rows_per_cta, p.rows_per_cta);
  __syncthreads();
  const int num_rows = rows.count;
  const int turn_stages = ceil_div(Tr::kTurns ? max(1, num_rows) : num_rows, Tr::kStageRows);
  const int num_stages = turns * turn_stages;
  const auto turn_of = [&](int stage) { return Tr::kTurns ? stage / turn_stages : 0; };
  const int turn_elts = ctas * kK;
  const int stage_elts = Tr::kTurns ? min(Tr::kStageRows, p.rows_per_cta) * kPitch : Tr::kStageElts;
  const auto bytes_of = [&](int turn) {
    return Tr::kTurns && k + std::int64_t{turn} * turn_elts >= p.weights.hidden ? 0 : bytes;
  };

  // Load: A does not depend on the predecessor.
  const auto copy_rows = [&](int stage) {
    T* at = ring + stage % Tr::kStages * stage_elts + piece * 8;
    const int turn = turn_of(stage), first = (stage - turn * turn_stages) * Tr::kStageRows;
    const int own = bytes_of(turn);
#pragma unroll
    for (int i = row0; i < Tr::kStageRows; i += kRowStep) {
      if (first + i >= num_rows) break;
      const T* a = static_cast<const T*>(rows.weights[first + i]);
      if (Tr::kWhole && a == nullptr) continue;  // of a padding row nothing is read but its address
      const T* from = own > 0 ? a + k + std::int64_t{turn} * turn_elts : a;
      device::cp_async_16(device::smem_address(at + i * kPitch), from, own);
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < min(Tr::kStages, num_stages); ++stage) copy_rows(stage);

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
  __shared__ int h_rows[kTokens];
  float* out[2];  // rows of h, or of the sums of a CTA of the cluster; null: none
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane / 4 + 8 * half;
    const int row = h_row(p.h, tile, first_row, place, __shfl_sync(0xffffffffu, token, place));
    if constexpr (Tr::kWhole) {
      if (warp == 0 && lane % 4 == 0) h_rows[place] = row;
      const int at = slab * (kTokens / ctas) + place / ctas;
      out[half] = row < 0 || slab >= num_leaves(p.weights.hidden)
                      ? nullptr
                      : device::in_cluster(sums, place % ctas) + at * p.rows_per_cta;
    } else {
      out[half] =
          row < 0 || slab >= p.h.num_slabs
              ? nullptr
              : static_cast<float*>(p.h.data) + slab * p.h.slab_stride + row * p.h.row_stride;
    }
  }
  device::pdl_wait();
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < kOwnTokens; ++i) {
      if (x_tokens[i] >= 0) {
        const int own = bytes_of(turn);
        device::cp_async_16(x_dst + (turn * kTokens + i * kRowStep) * kPitch * 2,
                            x_rows[i] + (own > 0 ? std::int64_t{turn} * turn_elts : 0), own);
      }
    }
  }
  device::cp_async_commit();

  // Compute: several stages side by side, as each step of a chain waits for the one before it.
  std::uint32_t x_frags[Tr::kKeepX ? Tr::kSteps : 2][4];
  const auto multiply = [&](int stage, auto load_x) {
    const int turn = turn_of(stage), row = (stage - turn * turn_stages) * Tr::kStageRows + rows8;
    if (row >= num_rows) return;
    const std::uint32_t x = x_at + turn * kTokens * kPitch * 2;
    const std::uint32_t at = a_at + stage % Tr::kStages * stage_elts * 2;
    std::uint32_t own[Tr::kAtOnce];  // of rows past the last those of the first stage
#pragma unroll
    for (int g = 0; g < Tr::kAtOnce; ++g) {
      own[g] = at + (row + g * Tr::kStageRows < num_rows ? g * Tr::kStageElts * 2 : 0);
    }
    float sum[Tr::kAtOnce][4] = {};
#pragma unroll
    for (int i = 0; i < Tr::kSteps; i += 2) {
      auto* const frag = &x_frags[Tr::kKeepX ? i : 0];
      if (!Tr::kKeepX || load_x) {
        device::ldmatrix_x4(frag[0], x + i * 32);
        device::ldmatrix_x4(frag[1], x + (i + 1) * 32);
      }
#pragma unroll
      for (int g = 0; g < Tr::kAtOnce; ++g) {
        std::uint32_t a[4];
        device::ldmatrix_x4(a, own[g] + i * 32);
        device::mma_16816<T>(sum[g], frag[0], a[0], a[1]);
        device::mma_16816<T>(sum[g], frag[1], a[2], a[3]);
      }
    }
    // Store
#pragma unroll
    for (int g = 0; g < Tr::kAtOnce; ++g) {
      const int first = row + g * Tr::kStageRows + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Tr::kWhole) {
          if (first < num_rows && out[half] != nullptr) {
            *reinterpret_cast<float2*>(out[half] + turn * Tr::kLeaves * kTokens * p.rows_per_cta +
                                       first) = make_float2(sum[g][half * 2], sum[g][half * 2 + 1]);
          }
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int r = first + c;
            if (r < num_rows && out[half] != nullptr) {
              out[half][rows.place[r]] = sum[g][half * 2 + c];
            }
          }
        }
      }
    }
  };
  device::cp_async_wait<0>();
  __syncthreads();
  if constexpr (Tr::kWhole) device::cluster_wait();  // all CTAs run, so their memory is there
  multiply(0, std::true_type{});
  if constexpr (Tr::kAtOnce == 1) {
#pragma unroll 1
    for (int stage = 1; stage < num_stages; ++stage) {
      device::next_stage<Tr::kStages>([&] {
        if (stage + Tr::kStages - 1 < num_stages) copy_rows(stage + Tr::kStages - 1);
      });
      multiply(stage, std::false_type{});
    }
  }
  if constexpr (Tr::kWhole) {
    device::cluster_arrive();
    device::cluster_wait();
    write_whole(p, rows, h_rows, sums);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(ShrinkParams p, const ShrinkPlan& c, Stream stream) {
  const int rows = rank_rows(p);
  p.rows_per_cta = c.rows;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div(rows, p.rows_per_cta)),
                static_cast<unsigned>(
                    std::max<std::int64_t>(1, ceil_div<std::int64_t>(p.weights.hidden, kK))),
                shrink_depth(p));
  l.threads = kThreads;
  if constexpr (Tr::kWhole) {
    l.grid.y = l.cluster_y = static_cast<unsigned>(decode_cluster(p.weights.hidden));
    l.smem = static_cast<std::size_t>(decode_cluster_smem(p.weights.hidden, c.rows));
  } else {
    const int most = std::min(p.rows_per_cta, rows);
    l.smem = static_cast<std::size_t>(decode_smem(p.weights.hidden, most, Tr::kStages));
  }
  l.per_sm = c.per_sm == kDenseShrinkPerSm ? 0 : c.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_decode_kernel<Tr>>("lora_shrink", l, p);
}

template <class T, bool kWhole>
void launch_leaves(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  // More rows than a stage of long leaves has, and no more than the ring of short ones.
  const bool at_once = c.rows > kThreads / 4 && c.rows <= decode_ring_rows(1);
  const bool leaves_of_k = leaf_size(p.weights.hidden) == kK;
  static_assert(leaf_size(1) * 2 == kK && leaf_size(1 << 20) == kK);
  if constexpr (!kWhole) {
    if (!leaves_of_k && c.stages == kFewDecodeStages) {
      return launch_traits<Traits<T, kWhole, 2, kFewDecodeStages>>(p, c, stream);
    }
    if (at_once && leaves_of_k) {
      return launch_traits<Traits<T, kWhole, 1, kDecodeStages, 2>>(p, c, stream);
    }
    if (at_once) return launch_traits<Traits<T, kWhole, 2, kDecodeStages, 4>>(p, c, stream);
    if (!leaves_of_k && c.per_sm == kDenseShrinkPerSm) {
      return launch_traits<Traits<T, kWhole, 2, kDecodeStages, 1, true>>(p, c, stream);
    }
  }
  leaves_of_k ? launch_traits<Traits<T, kWhole, 1>>(p, c, stream)
              : launch_traits<Traits<T, kWhole, 2>>(p, c, stream);
}

}  // namespace

void shrink_decode(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  check(p.vector && p.tiles.tile_tokens == kTokens && c.rows <= kDecodeMaxRows &&
            (c.split() ? p.h.raw && !p.pad : !p.h.raw && !p.h.by_position && c.rows % 2 == 0),
        "lora_shrink: the decode kernel takes tiles of 16 tokens and aligned rows, and leaves "
        "partials or a caller's h");
  device::visit_dtype<Float16DTypes>(p.x.dtype, "lora_shrink", [&](auto tag) {
    using T = typename decltype(tag)::type;
    c.split() ? launch_leaves<T, false>(p, c, stream) : launch_leaves<T, true>(p, c, stream);
  });
}

}  // namespace mortar::lora::cuda
