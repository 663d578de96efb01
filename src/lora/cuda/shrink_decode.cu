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
// to 64 rows, which are in shared memory at once, it has the chains of all stages side by side. Of
// up to 16 or 8 rows and long leaves a CTA may take two leaves or four, side by side in a stage,
// and x of 8 tokens at a time: then an SM has more of A on its way.
//
// Whole: the CTAs of a cluster take turns at all of K, 512 elements each. They send the sums of
// their leaves to the CTA of the cluster that looks after the token, through distributed shared
// memory, and that CTA adds them as leaf_size in problem.h says: the bits of slabs and of the
// kernel that adds them, in one launch. (A second one takes 2.4 us of the host's time.)
#include <algorithm>
#include <bit>
#include <type_traits>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/shrink_decode_traits.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace decode_shrink;

/// Adds the leaves of the tokens that this CTA of the cluster looks after, and writes their h.
/// `h_rows`: rows of h of the tile's tokens; -1: none.
__device__ __forceinline__ void write_whole(const ShrinkParams& p, const RankRowList& rows,
                                            const int* h_rows, const float* sums) {
  const int ctas = static_cast<int>(gridDim.y), cta = static_cast<int>(blockIdx.y);
  const int own_tokens = kTokens / ctas, stride = own_tokens * p.rows_per_cta;
  const int leaves = static_cast<int>(num_leaves(p.weights.hidden));
  const int middle = static_cast<int>(first_leaves(leaves));
  const int count = *rows.count;
  for (int i = threadIdx.x; i < own_tokens * count; i += kThreads) {
    const int own = i / count, r = i % count;
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
    shrink_decode_kernel(const __grid_constant__ DecodeParams params) {
  using T = typename Tr::T;
  const ShrinkParams& p = params.shrink;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int row_count;
  // The CTA's turns at K, 512 elements each, and what the cluster sends it: all leaves of its
  // tokens. Partials are made of all turns at once, which share the rows of a stage.
  const int ctas = Tr::kWhole ? static_cast<int>(gridDim.y) : 1;
  const int log_turns = Tr::kShares ? params.log_turns : 0;
  const int turns = Tr::kTurns ? decode_turns(p.weights.hidden, ctas) : 1 << log_turns;
  const int sent = Tr::kWhole ? turns * Tr::kLeaves * kTokens * p.rows_per_cta : 0;
  float* const sums = reinterpret_cast<float*>(smem);
  const int list = round_up(p.rows_per_cta, 8);
  const void** const row_weights = reinterpret_cast<const void**>(sums + sent);
  std::int64_t* const row_places = reinterpret_cast<std::int64_t*>(row_weights + list);
  float* const row_scales = reinterpret_cast<float*>(row_places + list);
  RankRowList rows{row_weights, row_places, row_scales, &row_count};
  T* const x_tile = reinterpret_cast<T*>(row_scales + list);
  const int x_tokens = Tr::kShares ? params.x_tokens : kTokens;
  T* const ring = x_tile + turns * x_tokens * kPitch;

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  const int index = p.tiles.first + static_cast<int>(blockIdx.z);
  const std::int64_t first_k = static_cast<std::int64_t>(blockIdx.y) * (kK << log_turns);
  const std::int64_t k = first_k + piece * 8;
  const auto left = static_cast<int>(p.weights.hidden - k);  // elements; K is a multiple of 8
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
  const int num_rows = row_count;
  if (!Tr::kWhole && num_rows == 0) {  // of an adapter of a lower rank than others
    device::pdl_wait();
    return;
  }
  const int turn_stages = ceil_div(Tr::kTurns ? max(1, num_rows) : num_rows, Tr::kStageRows);
  const int num_stages = turns * turn_stages;
  const auto turn_of = [&](int stage) {
    return Tr::kTurns ? stage / turn_stages : log_turns > 0 ? stage : 0;
  };
  const int turn_elts = ctas * kK;
  const int stage_rows = min(Tr::kStageRows >> log_turns, p.rows_per_cta);  // of a turn
  const int stage_elts = stage_rows * kPitch;

  // Load: A does not depend on the predecessor.
  const auto copy = [&](std::uint32_t to, const T* row, int turn) {
    const int at = turn * turn_elts;
    const bool there = at < left;
    device::cp_async_16(to, row + (there ? at : 0), there ? 16 : 0);
  };
  const int safe_k = left > 0 ? static_cast<int>(k) : 0;
  const std::uint32_t ring_at = device::smem_address(ring + row0 * kPitch + piece * 8);
  const auto copy_rows = [&](int stage) {
    const std::uint32_t to = ring_at + stage % Tr::kStages * stage_elts * 2;
    const int turn = turn_of(stage), first = (stage - turn * turn_stages) * Tr::kStageRows;
#pragma unroll
    for (int i = 0; i < Tr::kStageRows; i += kRowStep) {
      const int row = i + row0;
      if (first + row >= num_rows) break;
      const T* a = static_cast<const T*>(rows.weights[first + row]);
      if (Tr::kWhole && a == nullptr) continue;  // of a padding row nothing is read but its address
      copy(to + i * kPitch * 2, a + safe_k, turn);
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < min(Tr::kStages, num_stages); ++stage) copy_rows(stage);

  // All addresses before the wait: after it a warp has its scheduler to itself, and every
  // instruction is a delay.
  constexpr int kOwnTokens = kTokens / kRowStep;
  const auto own_x = static_cast<const T*>(p.x.data) + token * p.x.row_stride;
  const unsigned there = __ballot_sync(0xffffffffu, token >= 0) % (1u << kTokens) >> row0;
  if (p.early && token >= 0) {
    // A thread asks for 128 bytes of the token that it knows.
    const std::int64_t line = first_k + threadIdx.x / kTokens * (kK / (kThreads / kTokens));
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const std::int64_t at = line + std::int64_t{turn} * turn_elts;
      if (at < p.weights.hidden) device::prefetch_l2(own_x + at);
    }
  }
  const T* x_rows[kOwnTokens];  // of the tokens from `first` on
  const auto find_x = [&](int first) {
#pragma unroll
    for (int i = 0; i < kOwnTokens; ++i) {
      x_rows[i] = reinterpret_cast<const T*>(
                      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own_x),
                                  first + i * kRowStep + row0)) +
                  safe_k;
    }
  };
  find_x(0);
  const std::uint32_t x_dst = device::smem_address(x_tile + row0 * kPitch + piece * 8);
  const int leaf = warp % Tr::kLeaves, rows8 = warp / Tr::kLeaves * 8;
  const int log_rows =
      std::bit_width(static_cast<unsigned>(Tr::kStageRows)) - 1 - log_turns;  // of a turn
  const int own_turn = rows8 >> log_rows, own_row = rows8 & ((1 << log_rows) - 1);
  const int slab =
      (static_cast<int>(blockIdx.y) * (1 << log_turns) + own_turn) * Tr::kLeaves + leaf;
  const std::uint32_t x_at =
      device::smem_address(x_tile + (own_turn * x_tokens + (lane & (x_tokens - 1))) * kPitch +
                           lane / 16 * 8 + leaf * Tr::kSteps * 16);
  const int a_row = own_turn * stage_rows + min(own_row + lane % 8, stage_rows - 1);
  const std::uint32_t a_at =
      device::smem_address(ring + a_row * kPitch + lane / 8 * 8 + leaf * Tr::kSteps * 16);
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  __shared__ int h_rows[kTokens];
  float* out[2];  // rows of h, or of the sums of a CTA of the cluster; null: none
  const auto find_out = [&](int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = first + lane / 4 + 8 * half;
      const int t = __shfl_sync(0xffffffffu, token, place);
      const int row = h_row(p.h, tile, first_row, place, 8 * half < x_tokens ? t : -1);
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
  };
  find_out(0);
  const auto copy_x = [&](int first) {
    const unsigned own = (there >> first) & ((1u << x_tokens) - 1);
#pragma unroll
    for (int i = 0; i < kOwnTokens; ++i) {
      copy_if(own & (1u << (i * kRowStep)), x_dst + i * kRowStep * kPitch * 2, x_rows[i],
              left > 0 ? 16 : 0);
    }
#pragma unroll 1
    for (int turn = 1; turn < turns; ++turn) {
      const std::uint32_t to = x_dst + turn * x_tokens * kPitch * 2;
      const int at = turn * turn_elts, bytes = at < left ? 16 : 0, shift = at < left ? at : 0;
#pragma unroll
      for (int i = 0; i < kOwnTokens; ++i) {
        if (i == kOwnTokens / 4 && own >> (i * kRowStep) == 0) break;
        copy_if(own & (1u << (i * kRowStep)), to + i * kRowStep * kPitch * 2, x_rows[i] + shift,
                bytes);
      }
    }
    device::cp_async_commit();
  };
  device::pdl_wait();
  copy_x(0);

  // Compute: several stages side by side, as each step of a chain waits for the one before it.
  std::uint32_t x_frags[Tr::kKeepX ? Tr::kSteps : 2][4];
  const auto multiply = [&](int stage, auto load_x) {
    const int turn = Tr::kTurns ? turn_of(stage) : 0;
    const int row = (stage - turn * turn_stages) * Tr::kStageRows + own_row;
    if (row >= num_rows) return;
    const std::uint32_t x = x_at + turn * x_tokens * kPitch * 2;
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
#pragma unroll 1
  for (int first = 0;;) {
    device::cp_async_wait<0>();
    __syncthreads();
    if constexpr (Tr::kWhole) device::cluster_wait();  // all CTAs run, so their memory is there
    multiply(0, std::true_type{});
    if constexpr (Tr::kAtOnce == 1) {
#pragma unroll 1
      for (int stage = 1; log_turns == 0 && stage < num_stages; ++stage) {
        device::next_stage<Tr::kStages>([&] {
          if (stage + Tr::kStages - 1 < num_stages) copy_rows(stage + Tr::kStages - 1);
        });
        multiply(stage, std::false_type{});
      }
    }
    first += x_tokens;
    if (!Tr::kShares || first >= tile.count) break;
    // The tile's other tokens, past the same rank rows.
    __syncthreads();
    find_x(first);
    find_out(first);
    copy_x(first);
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
  p.rows_per_cta = Tr::kWhole ? c.rows : std::min(c.rows, rows);
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div(rows, p.rows_per_cta)),
                static_cast<unsigned>(std::max<std::int64_t>(
                    1, ceil_div<std::int64_t>(p.weights.hidden, kK * c.leaves))),
                shrink_depth(p));
  // A is in shared memory at once where x comes in two parts, or of several turns.
  check((c.leaves == 1 && c.x_tokens == kTokens) ||
            (Tr::kShares && std::has_single_bit(static_cast<unsigned>(c.leaves)) &&
             c.leaves * std::max(8, p.rows_per_cta) <=
                 Tr::kStageRows * (c.leaves > 1 ? 1 : Tr::kStages) &&
             (c.x_tokens == kTokens || c.x_tokens == 8)),
        "lora_shrink: no CTAs of ", c.leaves, " K chunks, ", p.rows_per_cta, " rank rows and ",
        c.x_tokens, " tokens");
  l.threads = kThreads;
  if constexpr (Tr::kWhole) {
    l.grid.y = l.cluster_y = static_cast<unsigned>(decode_cluster(p.weights.hidden));
    l.smem = static_cast<std::size_t>(decode_cluster_smem(p.weights.hidden, c.rows));
  } else {
    int smem = decode_smem(p.weights.hidden, p.rows_per_cta, Tr::kStages, c.leaves, c.x_tokens);
    // Elsewhere as few CTAs an SM as with the longest lists: more would take the room of expand's.
    // (us on an H100: 12 tokens of 420 adapters, rank 16, 13,824 to 5,120, 4.3 and 4.7; 8 of 8,
    // 14,336 to 4,096, 4.4 and 4.7.)
    if (c.leaves == 1 && c.x_tokens == kTokens) {
      smem += decode_list_bytes(kDecodeMaxRows) - decode_list_bytes(p.rows_per_cta);
    }
    l.smem = static_cast<std::size_t>(smem);
  }
  l.per_sm = c.per_sm == kDenseShrinkPerSm ? 0 : c.per_sm;
  l.stream = stream;
  l.pdl = true;
  const DecodeParams params{p, std::countr_zero(static_cast<unsigned>(c.leaves)), c.x_tokens};
  device::launch<shrink_decode_kernel<Tr>>("lora_shrink", l, params);
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
