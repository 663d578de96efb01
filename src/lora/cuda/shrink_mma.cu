// SPDX-License-Identifier: Apache-2.0
// h = x A^T on tensor cores, x and A of one 16-bit type: what shrink_decode and shrink_wgmma leave,
// unaligned rows, and many tokens on other architectures than sm_90a.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]      K hidden, R = sum over slices of ranks
// bytes  = 2 M K (x, once for all slices) + 2 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 2 M K R: HBM-bound below R of about 140 at the rate of mma.sync
// 32 tokens of 32 adapters, qkv, r16: 12.8 MB -> 3.0 us;  8192 tokens, 16 adapters: 73 MB -> 17 us
// limit  : decode latency and DRAM; prefill instruction issue beside DRAM (few warps fit an SM), so
//          the main loop keeps its addresses in registers
//
// A CTA takes one tile of tokens of one adapter, up to kRows rank rows of all its slices taken
// together, and all of K or (split) one leaf of it. Copies go through a ring of cp.async stages, so
// that the bytes in flight do not depend on the compiler. Tokens are the A operand, weights the B
// operand of the MMA. The summation tree (leaf_size in problem.h) does not depend on the split.
#include <iterator>
#include <type_traits>

#include "device/any_float.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

using device::Bits16;

constexpr int kTileK = 128;
constexpr int kPitch = kTileK + 8;  ///< elements; 272 B rows make ldmatrix free of bank conflicts

template <int kShape>
struct Traits {
  static constexpr MmaShape kOf = kMmaShapes[kShape];
  static constexpr int kWarpsM = kOf.warps_tokens, kWarpsN = kOf.warps_rows;
  static constexpr int kFragsN = kOf.frags;  ///< 8-row fragments of a warp
  static constexpr int kStages = kOf.stages;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kTokens = 16 * kWarpsM;
  static constexpr int kRows = 8 * kWarpsN * kFragsN;
  static constexpr int kStageBytes = (kTokens + kRows) * kPitch * 2;
  static constexpr int kSmem = kStages * kStageBytes;
  static_assert(kSmem == kOf.smem());
  static constexpr int kPieces = kTileK / 8;               ///< 16-byte pieces of a row
  static constexpr int kRowStep = kThreads / kPieces;      ///< rows that one round of copies covers
  static constexpr int kTokenCopies = kTokens / kRowStep;  ///< pieces a thread copies
  static constexpr int kRowCopies = (kRows + kRowStep - 1) / kRowStep;
  static_assert(kTokens % kRowStep == 0, "every thread copies as many pieces of x");
};

constexpr int kSteps = kTileK / 16;  ///< MMA steps of a warp per stage

/// A thread's pieces of kCopies rows, walking along K one stage at a time.
template <class Tr, int kCopies>
struct RowCopies {
  const Bits16* src[kCopies];  ///< null: no such row, its place in the ring stays as it is
  std::uint32_t dst;           ///< of the first piece, in the stage to be filled next
  int stage, left;             ///< elements of K from the piece on

  /// Copies the pieces of a stage; zeros past the end of K. vector: every row is 16-byte aligned.
  __device__ __forceinline__ void next(unsigned char* ring, std::uint32_t ring_address,
                                       bool vector) {
    if (vector) {
      // K is a multiple of 8: a piece is whole or absent, and an absent one is not read.
      each([&](std::uint32_t at, const Bits16* from) {
        device::cp_async_16(at, from, left > 0 ? 16 : 0);
      });
    } else {
      each([&](std::uint32_t at, const Bits16* from) {
        *reinterpret_cast<uint4*>(ring + (at - ring_address)) =
            device::load_some<Bits16, 8>(from, left).piece(0);
      });
    }
    left -= kTileK;
    dst += Tr::kStageBytes;
    if (++stage == Tr::kStages) {
      stage = 0;
      dst -= Tr::kSmem;
    }
  }

 private:
  template <class Copy>
  __device__ __forceinline__ void each(Copy copy) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (src[i] == nullptr) continue;
      copy(dst + i * Tr::kRowStep * kPitch * 2, src[i]);
      src[i] += kTileK;
    }
  }
};

/// Operands of one MMA step of a warp.
template <class Tr>
struct Fragments {
  std::uint32_t x[4];
  std::uint32_t w[Tr::kFragsN][2];

  /// Rows past `live` (fragments of 8 rank rows) are not read: their products are never stored.
  __device__ __forceinline__ void load(std::uint32_t x_at, std::uint32_t w_at, int live) {
    device::ldmatrix_x4(x, x_at);
#pragma unroll
    for (int n = 0; n < Tr::kFragsN; n += 2) {
      const std::uint32_t at = w_at + n * 8 * kPitch * 2;
      if (n + 1 < Tr::kFragsN) {
        std::uint32_t r[4] = {};
        if (n < live) device::ldmatrix_x4(r, at);
        w[n][0] = r[0];
        w[n][1] = r[1];
        w[n + 1][0] = r[2];
        w[n + 1][1] = r[3];
      } else {
        // Lanes 16 to 31 give addresses too, which are not used: those of the others.
        w[n][0] = w[n][1] = 0;
        const std::uint32_t lower = at - threadIdx.x % 32 / 16 * 8 * kPitch * 2;
        if (n < live) device::ldmatrix_x2(w[n][0], w[n][1], lower);
      }
    }
  }
};

/// Adds the products of a stage to a warp's sums.
template <class T, class Tr>
__device__ __forceinline__ void multiply(float (&sum)[Tr::kFragsN][4], std::uint32_t x_at,
                                         std::uint32_t a_at, int live_frags) {
  Fragments<Tr> frags[2];
  frags[0].load(x_at, a_at, live_frags);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i + 1 < kSteps) {
      const int next = (i + 1) * 32;
      frags[(i + 1) % 2].load(x_at + next, a_at + next, live_frags);
    }
#pragma unroll
    for (int n = 0; n < Tr::kFragsN; ++n) {
      const std::uint32_t* w = frags[i % 2].w[n];
      device::mma_16816<T>(sum[n], frags[i % 2].x, w[0], w[1]);
    }
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    shrink_mma_kernel(const __grid_constant__ ShrinkParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RankRows<Tr::kRows> rows;

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp % Tr::kWarpsM, warp_n = warp / Tr::kWarpsM;
  const int split = blockIdx.y;
  const int tile_index = p.tiles.first + static_cast<int>(blockIdx.z);
  const int column = threadIdx.x % Tr::kPieces * 8;
  const int row0 = threadIdx.x / Tr::kPieces;
  device::pdl_begin(p.early);

  // Guard
  Tile tile;
  bool live = static_cast<int>(blockIdx.z) < p.tiles.num;
  int token[Tr::kTokenCopies];
  if (live) {
#pragma unroll
    for (int i = 0; i < Tr::kTokenCopies; ++i) {
      token[i] = early_token(p.groups, p.tiles, tile_index, row0 + i * Tr::kRowStep);
    }
    live = find_tile(p.groups, p.tiles, p.weights.num_adapters, tile_index, &tile);
  }
  if (!live) {
    zero_base_rows(p);
    return;
  }

  // Pointers
  const std::int64_t leaf = leaf_size(p.weights.hidden);
  const bool whole = p.h.num_slabs == 1;
  const std::int64_t k_begin = whole ? 0 : split * leaf;
  const std::int64_t k_end = whole ? p.weights.hidden : min(k_begin + leaf, p.weights.hidden);
  const std::uint32_t ring = device::smem_address(smem);
  const int left = static_cast<int>(k_end - k_begin) - column;
  RowCopies<Tr, Tr::kTokenCopies> copy_tokens;
  copy_tokens.dst = ring + (row0 * kPitch + column) * 2;
  copy_tokens.stage = 0;
  copy_tokens.left = left;
#pragma unroll
  for (int i = 0; i < Tr::kTokenCopies; ++i) {
    const int t = tile_token(p.groups, p.tiles, tile, row0 + i * Tr::kRowStep, token[i]);
    copy_tokens.src[i] =
        t < 0 ? nullptr
              : static_cast<const Bits16*>(p.x.data) + t * p.x.row_stride + k_begin + column;
  }
  rows.fill(p, tile.adapter, blockIdx.x * Tr::kRows);
  __syncthreads();
  const int num_rows = rows.count;
  if (num_rows == 0) {
    device::pdl_wait();
    return;
  }
  RowCopies<Tr, Tr::kRowCopies> copy_weights;
  copy_weights.dst = ring + ((Tr::kTokens + row0) * kPitch + column) * 2;
  copy_weights.stage = 0;
  copy_weights.left = left;
#pragma unroll
  for (int i = 0; i < Tr::kRowCopies; ++i) {
    const int row = row0 + i * Tr::kRowStep;
    const void* a = row < num_rows ? rows.weights[row] : nullptr;
    copy_weights.src[i] = a == nullptr ? nullptr : static_cast<const Bits16*>(a) + k_begin + column;
  }
  const int num_steps = static_cast<int>(ceil_div<std::int64_t>(k_end - k_begin, kTileK));
  const int leaf_steps = static_cast<int>(leaf / kTileK);

  // Load. A range that fits the ring is loaded at once. kStages - 1 groups are committed whatever
  // `ahead` is: the last one may hold two steps, and groups may be empty.
  const int ahead = num_steps <= Tr::kStages ? num_steps : Tr::kStages - 1;
  for (int step = 0; step < ahead; ++step) copy_weights.next(smem, ring, p.vector);
  device::pdl_wait();
#pragma unroll
  for (int step = 0; step < Tr::kStages; ++step) {
    if (step < ahead) copy_tokens.next(smem, ring, p.vector);
    if (step != Tr::kStages - 2) device::cp_async_commit();
  }

  float first_half[Tr::kFragsN][4] = {}, total[Tr::kFragsN][4] = {};
  float sum[Tr::kFragsN][4] = {};
  const int middle =
      static_cast<int>(first_leaves(num_leaves(p.weights.hidden))) * leaf_steps;  // step
  const int live_frags = (num_rows - warp_n * Tr::kFragsN * 8 + 7) / 8;
  const std::uint32_t x_lane = ring + ((warp_m * 16 + lane % 16) * kPitch + lane / 16 * 8) * 2;
  const std::uint32_t a_lane =
      ring + ((Tr::kTokens + warp_n * Tr::kFragsN * 8 + lane / 16 * 8 + lane % 8) * kPitch +
              lane / 8 % 2 * 8) *
                 2;
  std::uint32_t stage = 0;  // bytes from the ring's start
  int leaf_step = 0;
  for (int step = 0; step < num_steps; ++step) {
    device::next_stage<Tr::kStages>([&] {
      if (const int next = step + Tr::kStages - 1; next >= ahead && next < num_steps) {
        copy_weights.next(smem, ring, p.vector);
        copy_tokens.next(smem, ring, p.vector);
      }
    });

    // Compute
    device::visit_checked_dtype(Float16DTypes(), p.x.dtype, [&](auto tag) {
      multiply<typename decltype(tag)::type, Tr>(sum, x_lane + stage, a_lane + stage, live_frags);
    });
    stage = stage + Tr::kStageBytes == Tr::kSmem ? 0 : stage + Tr::kStageBytes;
    if (++leaf_step == leaf_steps || step + 1 == num_steps) {
      leaf_step = 0;
#pragma unroll
      for (int i = 0; i < 4 * Tr::kFragsN; ++i) {
        total[i / 4][i % 4] += sum[i / 4][i % 4];
        sum[i / 4][i % 4] = 0;
        if (step + 1 == middle) {
          first_half[i / 4][i % 4] = total[i / 4][i % 4];
          total[i / 4][i % 4] = 0;
        }
      }
    }
  }

  // Store
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = warp_m * 16 + half * 8 + lane / 4;
    const int row_token = tile_token(p.groups, p.tiles, tile, place,
                                     early_token(p.groups, p.tiles, tile_index, place));
    const int row = h_row(p.h, tile, first, place, row_token);
    if (row < 0) continue;
    const std::int64_t base = split * p.h.slab_stride + row * p.h.row_stride;
#pragma unroll
    for (int n = 0; n < Tr::kFragsN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = (warp_n * Tr::kFragsN + n) * 8 + lane % 4 * 2 + c;
        if (r >= num_rows) continue;
        float v = first_half[n][half * 2 + c] + total[n][half * 2 + c];
        if (!p.h.raw) v *= rows.scale[r];
        if (rows.weights[r] == nullptr) v = 0;
        device::store_from_float(p.h.data, p.h.dtype, base + rows.place[r], v);
      }
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  check(Tr::kTokens == p.tiles.tile_tokens && Tr::kRows == c.rows,
        "lora_shrink: no kernel for a tile of ", p.tiles.tile_tokens, " tokens and ", c.rows,
        " rank rows");
  device::Launch l;
  l.grid = shrink_grid(p, c);
  l.threads = Tr::kThreads;
  l.smem = Tr::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_mma_kernel<Tr>>("lora_shrink", l, p);
}

}  // namespace

void shrink_mma(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  static_assert(std::size(kMmaShapes) == 4);
  check(c.shape >= 0 && c.shape < 4, "lora_shrink: no shape ", c.shape, " of the mma kernel");
  device::check_dtype<Float16DTypes>(p.x.dtype, "lora_shrink");
  if (c.shape == 0) return launch_traits<Traits<0>>(p, c, stream);
  if (c.shape == 1) return launch_traits<Traits<1>>(p, c, stream);
  if (c.shape == 3) return launch_traits<Traits<3>>(p, c, stream);
  launch_traits<Traits<2>>(p, c, stream);
}

}  // namespace mortar::lora::cuda
