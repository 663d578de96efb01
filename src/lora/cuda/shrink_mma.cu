// SPDX-License-Identifier: Apache-2.0
// h = x A^T on tensor cores, x and A of one 16-bit type.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]      K hidden, R = sum over slices of ranks
// bytes  = 2 M K (x, once for all slices) + 2 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 2 M K R: HBM-bound below R of about 140 at the rate of mma.sync
// 32 tokens of 32 adapters, qkv, r16: 12.8 MB -> 3.0 us;  8192 tokens, 16 adapters: 73 MB -> 17 us
// limit  : decode latency and DRAM; prefill DRAM, then L2 (A is read once per tile of tokens)
//
// A CTA takes one tile of tokens of one adapter, up to kRows rank rows of all its slices taken
// together, and all of K or (split) one leaf of it. Copies go through a ring of cp.async stages, so
// that the bytes in flight do not depend on the compiler. Tokens are the A operand, weights the B
// operand of the MMA; a warp sums a leaf in one MMA chain and adds leaves in order, so splitting
// over CTAs or not gives the same bits.
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kTileK = 64;
constexpr int kPitch = kTileK + 8;  ///< elements; 144 B rows make ldmatrix free of bank conflicts

template <class T_, int kWarpsM_, int kWarpsN_, int kFragsM_, int kFragsN_, int kStages_>
struct Traits {
  using T = T_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kFragsM = kFragsM_;  ///< 16-token fragments of a warp
  static constexpr int kFragsN = kFragsN_;  ///< 8-row fragments of a warp
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kTokens = 16 * kWarpsM * kFragsM;
  static constexpr int kRows = 8 * kWarpsN * kFragsN;
  static constexpr int kStageElts = (kTokens + kRows) * kPitch;
  static constexpr int kSmem = kStages * kStageElts * 2;
  static constexpr int kChunks = kTileK / 8;  ///< 16-byte pieces of a row
  static constexpr int kTokenCopies = kTokens * kChunks / kThreads;
  static constexpr int kRowCopies = (kRows * kChunks + kThreads - 1) / kThreads;
  static_assert(kTokens * kChunks % kThreads == 0, "every thread copies as many pieces of x");
  static_assert(kThreads % kChunks == 0, "a thread keeps its column through all its pieces");
};

/// Copies elements [k, k + 8) of a row; zeros past k_end. Rows that are not 16-byte aligned (odd
/// hidden sizes, sliced views) go element by element.
template <class T>
__device__ __forceinline__ void copy_piece(T* dst, const T* row, std::int64_t k,
                                           std::int64_t k_end) {
  const T* src = row + k;
  if (k + 8 <= k_end && device::is_aligned<T, 8>(src)) {
    device::cp_async_16(dst, src);
  } else {
    *reinterpret_cast<device::Pack<T, 8>*>(dst) = device::load_pack<T, 8>(src, k_end - k);
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    shrink_mma_kernel(const __grid_constant__ ShrinkParams p) {
  using T = typename Tr::T;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RankRows<Tr::kRows> rows;
  __shared__ int tokens[Tr::kTokens];

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp % Tr::kWarpsM, warp_n = warp / Tr::kWarpsM;
  const int split = blockIdx.y;
  const int tile_index = p.tiles.first + static_cast<int>(blockIdx.z);

  // Guard
  Tile tile;
  const bool live = static_cast<int>(blockIdx.z) < p.tiles.num &&
                    find_tile(p.groups, p.tiles, p.weights.num_adapters, Tr::kTokens, tile_index,
                              &tile);
  if (!live) {
    device::pdl_wait();
    device::pdl_trigger();
    zero_base_rows(p);
    return;
  }
  const int first = p.h.by_position ? first_position(p.groups, p.tiles, p.weights.num_adapters,
                                                     Tr::kTokens)
                                    : 0;

  // Pointers
  rows.fill(p, tile.adapter, blockIdx.x * Tr::kRows);
  for (int i = threadIdx.x; i < Tr::kTokens; i += Tr::kThreads) {
    tokens[i] = tile_token(p.groups, p.tiles, tile, i);
  }
  __syncthreads();
  const int num_rows = rows.count;
  if (num_rows == 0) {
    device::pdl_wait();
    device::pdl_trigger();
    return;
  }
  const std::int64_t leaf = leaf_size(p.weights.hidden);
  const bool whole = p.h.num_slabs == 1;
  const std::int64_t k_begin = whole ? 0 : split * leaf;
  const std::int64_t k_end = whole ? p.weights.hidden
                                   : min(k_begin + leaf, p.weights.hidden);
  const int num_steps = static_cast<int>(ceil_div<std::int64_t>(k_end - k_begin, kTileK));
  const int leaf_steps = static_cast<int>(leaf / kTileK);

  const int column = threadIdx.x % Tr::kChunks * 8;
  const int row0 = threadIdx.x / Tr::kChunks;
  constexpr int kRowStep = Tr::kThreads / Tr::kChunks;
  T* ring = reinterpret_cast<T*>(smem);
  const T* x_row[Tr::kTokenCopies];
#pragma unroll
  for (int i = 0; i < Tr::kTokenCopies; ++i) {
    const int token = tokens[row0 + i * kRowStep];
    x_row[i] = token < 0 ? nullptr : static_cast<const T*>(p.x.data) + token * p.x.row_stride;
  }
  const auto copy_weights = [&](int step) {
    T* stage = ring + step % Tr::kStages * Tr::kStageElts + Tr::kTokens * kPitch;
    const std::int64_t k = k_begin + std::int64_t{step} * kTileK + column;
#pragma unroll
    for (int i = 0; i < Tr::kRowCopies; ++i) {
      const int row = row0 + i * kRowStep;
      if (row >= num_rows) break;
      const T* source = static_cast<const T*>(rows.weights[row]);
      if (source != nullptr) copy_piece(stage + row * kPitch + column, source, k, k_end);
    }
  };
  const auto copy_tokens = [&](int step) {
    T* stage = ring + step % Tr::kStages * Tr::kStageElts;
    const std::int64_t k = k_begin + std::int64_t{step} * kTileK + column;
#pragma unroll
    for (int i = 0; i < Tr::kTokenCopies; ++i) {
      if (x_row[i] != nullptr) {
        copy_piece(stage + (row0 + i * kRowStep) * kPitch + column, x_row[i], k, k_end);
      }
    }
  };

  // Load: weights before the wait, x after it. A range that fits the ring is loaded at once.
  const int ahead = num_steps <= Tr::kStages ? num_steps : Tr::kStages - 1;
  for (int step = 0; step < ahead; ++step) copy_weights(step);
  device::pdl_wait();
  device::pdl_trigger();
  // kStages - 1 groups, whatever `ahead` is: the last one may hold two steps, or groups be empty.
#pragma unroll
  for (int step = 0; step < Tr::kStages; ++step) {
    if (step < ahead) copy_tokens(step);
    if (step != Tr::kStages - 2) device::cp_async_commit();
  }

  float total[Tr::kFragsM][Tr::kFragsN][4] = {};
  float sum[Tr::kFragsM][Tr::kFragsN][4] = {};
  const int live_frags = (num_rows - warp_n * Tr::kFragsN * 8 + 7) / 8;
  for (int step = 0; step < num_steps; ++step) {
    device::cp_async_wait<Tr::kStages - 2>();
    __syncthreads();
    if (const int next = step + Tr::kStages - 1; next >= ahead && next < num_steps) {
      copy_weights(next);
      copy_tokens(next);
    }
    device::cp_async_commit();

    // Compute
    const T* x_stage = ring + step % Tr::kStages * Tr::kStageElts;
    const T* a_stage = x_stage + Tr::kTokens * kPitch;
#pragma unroll
    for (int kk = 0; kk < kTileK; kk += 16) {
      std::uint32_t x_frag[Tr::kFragsM][4];
#pragma unroll
      for (int m = 0; m < Tr::kFragsM; ++m) {
        const int row = (warp_m * Tr::kFragsM + m) * 16 + lane % 16;
        device::ldmatrix_x4(x_frag[m], x_stage + row * kPitch + kk + lane / 16 * 8);
      }
#pragma unroll
      for (int n = 0; n < Tr::kFragsN; n += 2) {
        if (n >= live_frags) break;
        const int row0_n = (warp_n * Tr::kFragsN + n) * 8;
        std::uint32_t w[4];
        if (n + 1 < Tr::kFragsN) {
          const int row = row0_n + lane / 16 * 8 + lane % 8;
          device::ldmatrix_x4(w, a_stage + row * kPitch + kk + lane / 8 % 2 * 8);
        } else {
          device::ldmatrix_x2(w[0], w[1],
                              a_stage + (row0_n + lane % 8) * kPitch + kk + lane / 8 % 2 * 8);
        }
#pragma unroll
        for (int m = 0; m < Tr::kFragsM; ++m) {
          device::mma_16816<T>(sum[m][n], x_frag[m], w[0], w[1]);
          if (n + 1 < Tr::kFragsN) device::mma_16816<T>(sum[m][n + 1], x_frag[m], w[2], w[3]);
        }
      }
    }
    if ((step + 1) % leaf_steps == 0 || step + 1 == num_steps) {
#pragma unroll
      for (int m = 0; m < Tr::kFragsM; ++m) {
#pragma unroll
        for (int n = 0; n < Tr::kFragsN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[m][n][i] += sum[m][n][i];
            sum[m][n][i] = 0;
          }
        }
      }
    }
  }

  // Store
#pragma unroll
  for (int m = 0; m < Tr::kFragsM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = (warp_m * Tr::kFragsM + m) * 16 + half * 8 + lane / 4;
      const std::int64_t row = h_row(p.h, tile, first, place, tokens[place]);
      if (row < 0) continue;
      const std::int64_t base = split * p.h.slab_stride + row * p.h.row_stride;
#pragma unroll
      for (int n = 0; n < Tr::kFragsN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = (warp_n * Tr::kFragsN + n) * 8 + lane % 4 * 2 + c;
          if (r >= num_rows) continue;
          float v = total[m][n][half * 2 + c];
          if (!p.h.raw) v *= rows.scale[r];
          if (rows.weights[r] == nullptr) v = 0;
          device::store_from_float(p.h.data, p.h.dtype, base + rows.place[r], v);
        }
      }
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, int kWarpsM, int kWarpsN, int kFragsM, int kFragsN, int kStages>
void launch_tile(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  using Tr = Traits<T, kWarpsM, kWarpsN, kFragsM, kFragsN, kStages>;
  check(Tr::kTokens == c.tile_tokens && Tr::kRows == c.tile_rows,
        "lora_shrink: no kernel for a tile of ", c.tile_tokens, " tokens and ", c.tile_rows,
        " rank rows");
  device::Launch l;
  l.grid = shrink_grid(p, c);
  l.threads = Tr::kThreads;
  l.smem = Tr::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_mma_kernel<Tr>>("lora_shrink", l, p);
}

template <class T>
void launch_typed(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  if (c.tile_tokens == 16) {
    if (c.tile_rows == 32) return launch_tile<T, 1, 4, 1, 1, 8>(p, c, stream);
    return launch_tile<T, 1, 4, 1, 2, 8>(p, c, stream);
  }
  if (c.tile_tokens == 64) {
    if (c.tile_rows == 48) return launch_tile<T, 4, 2, 1, 3, 4>(p, c, stream);
    return launch_tile<T, 4, 2, 1, 6, 4>(p, c, stream);
  }
  fail(ErrorKind::kRuntime, concat("lora_shrink: no kernel for tiles of ", c.tile_tokens));
}

}  // namespace

void shrink_mma(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  if (p.x.dtype == DType::kBFloat16) {
    launch_typed<__nv_bfloat16>(p, c, stream);
  } else {
    launch_typed<__half>(p, c, stream);
  }
}

}  // namespace mortar::lora::cuda
