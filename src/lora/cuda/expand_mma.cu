// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T on tensor cores, B and y of one 16-bit type.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h
// FLOP   = 2 M N r: never the limit below r of about 256
// 32 tokens of 32 adapters, qkv, r16: 7.1 MB -> 1.7 us;  8192 tokens, 16 adapters: 204 MB -> 48 us
// limit  : DRAM (y in prefill, B in decode); for few tokens the chain of dependent loads
//
// A CTA takes a run of columns of one slice and one tile of 16 tokens (decode: B streams through a
// ring), or a block of columns and a few consecutive tiles of 64 (prefill: B stays in shared memory
// as long as the adapter does). A warp takes 16 tokens and 64 columns at a time and needs no other
// warp: h goes straight from global memory into its MMA fragments, and so does y.
// Two permutations make that possible. Ranks: inside a step of 16, lane q of a quad holds ranks
// 4q .. 4q + 3 (of h and of B alike), so both are 8-byte accesses. Columns: inside groups of 32,
// fragment j takes columns 8a + 2j + b, so a lane's results are 8 consecutive columns: 16 bytes.
#include <algorithm>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/slabs.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kGroupCols = 32;  ///< columns whose results a quad of lanes shares
constexpr int kStages = 4;      ///< column blocks of B in flight when a CTA walks over columns

/// What h is: Mortar's own, rounded; Mortar's own slabs of partial sums; the caller's.
enum class Source { kOwn, kSlabs, kCaller };

template <class T_, int kWarpsM_, int kWarpsN_, Source kSource_, bool kVectorY_, bool kPlan_,
          int kChunkSteps_ = 4>
struct Traits {
  using T = T_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr Source kSource = kSource_;
  static constexpr bool kVectorY = kVectorY_;  ///< y moves as whole, aligned 16-byte packs
  static constexpr bool kPlan = kPlan_;        ///< tokens are grouped by a plan, else by segments
  /// A tile of 16 tokens walks over columns with B in a ring; larger tiles keep their columns and
  /// walk over tiles.
  static constexpr bool kWalkColumns = kWarpsM == 1;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  /// CTAs per SM, for bytes in flight; the rarer element-wise paths may have all registers.
  static constexpr int kMinCtas = kVectorY && kSource == Source::kOwn ? 2 : 1;
  /// A warp has two MMA tiles of 16 tokens and 32 columns beside each other. (One above the other,
  /// a fragment of B serves twice, but y moves in runs of 64 bytes: 40 % slower in prefill.)
  static constexpr int kFragsM = 1;
  static constexpr int kGroups = 2 / kFragsM;
  static constexpr int kChunkSteps = kChunkSteps_;  ///< steps of 16 ranks whose h a warp holds
  static constexpr int kTokens = 16 * kFragsM * kWarpsM;
  static constexpr int kCols = kWarpsN * kGroups * kGroupCols;  ///< columns of one block of B
};

/// Where real column c lies in shared memory: column 8a + 2j + b of a group goes to row 8j + 2a +
/// b, so that fragment j's eight rows are neighbours.
__device__ __forceinline__ int permuted(int c) {
  return (c & ~31) | ((c & 6) << 2) | ((c >> 2) & 6) | (c & 1);
}

/// Elements of a row of B in shared memory: whole MMA steps, and a pitch of 32 or 96 bytes modulo
/// 128, which frees the quads' 8-byte reads from bank conflicts.
__host__ __device__ constexpr int row_pitch(int rank) {
  const int padded = round_up(rank, 16);
  return padded + (padded % 32 == 0 ? 16 : 0);
}

/// A thread's share of copying blocks of B into shared memory: always the same 16-byte piece of
/// every num_threads / pieces-th row.
template <class T>
struct BCopy {
  const T* src;         ///< of the first row of the slice
  std::int64_t stride;  ///< elements between rows
  int rank, pitch;
  int row0, step, column;
  bool whole;  ///< every piece is an aligned, full 16 bytes

  __device__ __forceinline__ BCopy(const SliceWeights& w, int num_threads) {
    const int pieces = ceil_div(w.rank, 16) * 2;
    rank = w.rank;
    pitch = row_pitch(w.rank);
    stride = w.b_row_stride;
    if ((pieces & (pieces - 1)) == 0) {  // the usual ranks: no division
      const int shift = 31 - __clz(pieces);
      row0 = threadIdx.x >> shift;
      step = num_threads >> shift;
    } else {
      row0 = threadIdx.x / pieces;
      step = num_threads / pieces;
      if (row0 >= step) row0 = 1 << 20;  // a thread left over
    }
    column = (threadIdx.x - row0 * pieces) * 8;
    src = static_cast<const T*>(w.b) + row0 * stride + column;
    whole = device::is_aligned<T, 8>(static_cast<const T*>(w.b)) && stride % 8 == 0 &&
            column + 8 <= rank;
  }

  /// Rows [first, first + cols) of the slice; zeros past the rank.
  __device__ __forceinline__ void block(T* sB, std::int64_t first, int cols) const {
    const T* at = src + first * stride;
    for (int c = row0; c < cols; c += step, at += step * stride) {
      T* dst = sB + permuted(c) * pitch + column;
      if (whole) {
        device::cp_async_16(dst, at);
      } else {
        *reinterpret_cast<device::Pack<T, 8>*>(dst) = device::load_pack<T, 8>(at, rank - column);
      }
    }
  }
};

/// Ranks r .. r + 3 of one row of h, scaled and rounded, as two MMA registers; zeros past the rank
/// and for a row of -1.
template <class T, Source kSource>
__device__ __forceinline__ uint2 load_h(const HView& h, std::int64_t row, int slice, int r,
                                        int rank, float scale) {
  if constexpr (kSource == Source::kCaller) {
    if (row < 0 || r >= rank) return make_uint2(0, 0);
    const std::int64_t at =
        slice * h.slice_stride + static_cast<std::int64_t>(row) * h.row_stride + r;
    const int valid = rank - r;
    device::Pack<float, 4> v;
    if (h.dtype == DType::kFloat32) {
      v = device::load_pack<float, 4>(static_cast<const float*>(h.data) + at, valid);
    } else if (h.dtype == DType::kFloat16) {
      const auto u = device::load_pack<__half, 4>(static_cast<const __half*>(h.data) + at, valid);
#pragma unroll
      for (int i = 0; i < 4; ++i) v.v[i] = device::to_float(u.v[i]);
    } else {
      const auto u = device::load_pack<__nv_bfloat16, 4>(
          static_cast<const __nv_bfloat16*>(h.data) + at, valid);
#pragma unroll
      for (int i = 0; i < 4; ++i) v.v[i] = device::to_float(u.v[i]);
    }
    return make_uint2(device::pack2<T>(v.v[0], v.v[1]), device::pack2<T>(v.v[2], v.v[3]));
  } else if constexpr (kSource == Source::kSlabs) {
    if (row < 0 || r >= rank) return make_uint2(0, 0);
    const std::int64_t at =
        slice * h.slice_stride + static_cast<std::int64_t>(row) * h.row_stride + r;
    // The width of a row is a multiple of 8: 4 ranks are one access, here and below.
    const float* slab = static_cast<const float*>(h.data) + at;
    const float4 v = sum_slabs(slab, h.slab_stride, h.num_slabs);
    return make_uint2(
        device::pack2<T>(v.x * scale, r + 1 < rank ? v.y * scale : 0.0f),
        device::pack2<T>(r + 2 < rank ? v.z * scale : 0.0f, r + 3 < rank ? v.w * scale : 0.0f));
  } else {
    // Without a branch: ptxas would make every load of y wait together with this one.
    const bool there = row >= 0 && r < rank;
    const std::int64_t at =
        there ? slice * h.slice_stride + static_cast<std::int64_t>(row) * h.row_stride + r : 0;
    uint2 v = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(h.data) + at));
    const int valid = there ? rank - r : 0;  // what lies past the rank was never written
    v.x &= valid >= 2 ? 0xffffffffu : valid == 1 ? 0xffffu : 0u;
    v.y &= valid >= 4 ? 0xffffffffu : valid == 3 ? 0xffffu : 0u;
    return v;
  }
}

/// What a lane knows of its rows: places 8 apart in a tile.
template <class Tr>
struct LaneRows {
  static constexpr int kRows = 2 * Tr::kFragsM;
  typename Tr::T* y[kRows];  ///< at the lane's first column of the slice, or null
  int h[kRows];              ///< row of h, or -1
};

template <class Tr>
using Sums = float[Tr::kFragsM][Tr::kGroups][4][4];

/// A lane's part of y: 8 columns for each [row][group], two columns to a word.
template <class Tr>
struct YPart {
  using T = typename Tr::T;
  static constexpr int kRows = LaneRows<Tr>::kRows, kGroups = Tr::kGroups;
  uint4 v[kRows][kGroups];

  /// `left`: columns from the lane's first one to the end of the block.
  __device__ __forceinline__ void load(const LaneRows<Tr>& rows, std::int64_t col, int left,
                                       bool add_inputs) {
#pragma unroll
    for (int half = 0; half < kRows; ++half) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const bool there = add_inputs && rows.y[half] != nullptr && left > g * kGroupCols;
        const T* at = rows.y[half] + col + g * kGroupCols;
        v[half][g] = make_uint4(0, 0, 0, 0);
        if constexpr (Tr::kVectorY) {
          if (there) v[half][g] = *reinterpret_cast<const uint4*>(at);
        } else if (there) {
          const auto pack = device::load_pack<T, 8>(at, left - g * kGroupCols);
          v[half][g] = *reinterpret_cast<const uint4*>(&pack);
        }
      }
    }
  }

  /// Adds the warp's products (in float32, rounded once) and writes y.
  __device__ __forceinline__ void store(const LaneRows<Tr>& rows, std::int64_t col, int left,
                                        bool add_inputs, const Sums<Tr>& acc) {
    const auto sum2 = [&](std::uint32_t old, const float(&delta)[4], int half) {
      const float2 y = device::unpack2<T>(old);
      return device::pack2<T>(add_inputs ? y.x + delta[half * 2] : delta[half * 2],
                              add_inputs ? y.y + delta[half * 2 + 1] : delta[half * 2 + 1]);
    };
#pragma unroll
    for (int half = 0; half < kRows; ++half) {
      if (rows.y[half] == nullptr) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (left <= g * kGroupCols) break;
        const uint4 old = v[half][g];
        const auto& delta = acc[half / 2][g];
        const uint4 out =
            make_uint4(sum2(old.x, delta[0], half % 2), sum2(old.y, delta[1], half % 2),
                       sum2(old.z, delta[2], half % 2), sum2(old.w, delta[3], half % 2));
        T* at = rows.y[half] + col + g * kGroupCols;
        if constexpr (Tr::kVectorY) {
          *reinterpret_cast<uint4*>(at) = out;
        } else {
          device::store_pack<T, 8>(at, *reinterpret_cast<const device::Pack<T, 8>*>(&out),
                                   left - g * kGroupCols);
        }
      }
    }
  }
};

/// Up to 16 kChunkSteps ranks of h in MMA fragments.
template <class Tr>
struct HChunk {
  std::uint32_t frag[Tr::kChunkSteps][Tr::kFragsM][4];

  __device__ __forceinline__ void load(const HView& h, const LaneRows<Tr>& rows, int slice,
                                       int rank, int step0, float scale) {
#pragma unroll
    for (int i = 0; i < Tr::kChunkSteps; ++i) {
      const int r = (step0 + i) * 16 + threadIdx.x % 4 * 4;
      if (Tr::kSource != Source::kOwn && (step0 + i) * 16 >= rank) break;
#pragma unroll
      for (int m = 0; m < Tr::kFragsM; ++m) {
        const uint2 top =
            load_h<typename Tr::T, Tr::kSource>(h, rows.h[2 * m], slice, r, rank, scale);
        const uint2 bottom =
            load_h<typename Tr::T, Tr::kSource>(h, rows.h[2 * m + 1], slice, r, rank, scale);
        frag[i][m][0] = top.x;
        frag[i][m][1] = bottom.x;
        frag[i][m][2] = top.y;
        frag[i][m][3] = bottom.y;
      }
    }
  }
};

/// acc += h B^T for a warp's rows and columns. `b_lane` is the lane's first element of B, `cols`
/// the columns of the block from the warp's first one. `h` holds the first ranks; further ones are
/// loaded here, and the first ones again if `reload`.
template <class Tr>
__device__ __forceinline__ void multiply(Sums<Tr>& acc, HChunk<Tr>& h, const ExpandParams& p,
                                         const LaneRows<Tr>& rows, int slice, int rank, float scale,
                                         const typename Tr::T* b_lane, int pitch, int cols,
                                         bool reload) {
  const int num_steps = ceil_div(rank, 16);
  for (int step0 = 0; step0 < num_steps; step0 += Tr::kChunkSteps) {
    if (step0 > 0 || reload) h.load(p.h, rows, slice, rank, step0, scale);
#pragma unroll
    for (int i = 0; i < Tr::kChunkSteps; ++i) {
      if (step0 + i >= num_steps) break;
#pragma unroll
      for (int g = 0; g < Tr::kGroups; ++g) {
        if (g * kGroupCols >= cols) break;
        uint2 b[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          b[j] = *reinterpret_cast<const uint2*>(b_lane + (g * kGroupCols + j * 8) * pitch +
                                                 (step0 + i) * 16);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int m = 0; m < Tr::kFragsM; ++m) {
            device::mma_16816<typename Tr::T>(acc[m][g][j], h.frag[i][m], b[j].x, b[j].y);
          }
        }
      }
    }
  }
}

/// The column block of a CTA.
struct Block {
  int slice = 0;
  std::int64_t first = 0;  ///< column within the slice
  std::int64_t y_col = 0;  ///< column of y
  int cols = 0;
};

__device__ __forceinline__ Block find_block(const ExpandParams& p) {
  Block b;
  b.y_col = p.offset;
  while (b.slice + 1 < p.weights.num_slices &&
         static_cast<int>(blockIdx.x) >= p.block_start[b.slice + 1]) {
    b.y_col += p.weights.widths[b.slice++];
  }
  const int block = static_cast<int>(blockIdx.x) - p.block_start[b.slice];
  b.first = static_cast<std::int64_t>(block) * p.cols;
  b.y_col += b.first;
  b.cols =
      static_cast<int>(min(static_cast<std::int64_t>(p.cols), p.weights.widths[b.slice] - b.first));
  return b;
}

template <class Tr>
__device__ __forceinline__ LaneRows<Tr> lane_rows(const ExpandParams& p, const Tile& tile,
                                                  int place, const int (&early)[2 * Tr::kFragsM],
                                                  int first, std::int64_t y_col) {
  LaneRows<Tr> rows;
#pragma unroll
  for (int k = 0; k < LaneRows<Tr>::kRows; ++k) {
    const int i = place + 8 * k;
    const int t = tile_token<Tr::kPlan>(p.groups, p.tiles, tile, i, early[k]);
    rows.y[k] =
        t < 0 ? nullptr : static_cast<typename Tr::T*>(p.y.data) + t * p.y.row_stride + y_col;
    rows.h[k] = h_row(p.h, tile, first, i, t);
  }
  return rows;
}

/// Few tokens per adapter: B is the work, and streams through a ring.
template <class Tr>
__device__ __forceinline__ void walk_columns(const ExpandParams& p, unsigned char* smem) {
  using T = typename Tr::T;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int place = lane / 4;
  const int local = static_cast<int>(blockIdx.y);
  if (!p.early) device::pdl_wait();

  const int index = p.tiles.first + local;
  const int early[2] = {early_token<Tr::kPlan>(p.groups, p.tiles, index, place),
                        early_token<Tr::kPlan>(p.groups, p.tiles, index, place + 8)};
  Tile tile;
  const bool live = find_tile<Tr::kPlan>(p.groups, p.tiles, p.weights.num_adapters, index, &tile);
  const Block block = find_block(p);
  SliceWeights w;
  if (live) w = p.weights.get(tile.adapter, block.slice);
  w.rank = min(w.rank, p.h.width);
  if (!live || w.rank == 0) {
    device::pdl_wait();
    device::pdl_trigger();
    return;
  }

  // Load: all but h is older than the predecessor.
  const BCopy<T> copy(w, Tr::kThreads);
  const int blocks = ceil_div(block.cols, p.block_cols);
  const int stage_elts = p.block_cols * row_pitch(p.h.width);
  T* ring = reinterpret_cast<T*>(smem);
  const auto copy_block = [&](int i) {
    if (i < blocks) {
      const int first = i * p.block_cols;
      copy.block(ring + i % kStages * stage_elts, block.first + first,
                 min(p.block_cols, block.cols - first));
    }
    device::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy_block(i);
  const int lane_col = warp * Tr::kGroups * kGroupCols + lane % 4 * 8;
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  const LaneRows<Tr> rows = lane_rows<Tr>(p, tile, place, early, first, block.y_col + lane_col);
  YPart<Tr> y;
  y.load(rows, 0, min(p.block_cols, block.cols) - lane_col, p.add_inputs);
  device::pdl_wait();
  device::pdl_trigger();
  const float scale = p.scale * w.scale;
  HChunk<Tr> h;
  h.load(p.h, rows, block.slice, w.rank, 0, scale);
  const bool keep_h = w.rank <= 16 * Tr::kChunkSteps;

  // Compute and store
  for (int i = 0; i < blocks; ++i) {
    device::cp_async_wait<kStages - 2>();
    __syncthreads();
    copy_block(i + kStages - 1);
    const int col = i * p.block_cols, next_col = col + p.block_cols;
    const int left = min(p.block_cols, block.cols - col) - lane_col;
    const int warp_left = left + lane % 4 * 8;
    YPart<Tr> next;
    if (i + 1 < blocks) {
      next.load(rows, next_col, min(p.block_cols, block.cols - next_col) - lane_col, p.add_inputs);
    }
    if (warp_left > 0) {
      Sums<Tr> acc = {};
      const T* b_lane = ring + i % kStages * stage_elts +
                        (warp * Tr::kGroups * kGroupCols + lane / 4) * copy.pitch + lane % 4 * 4;
      multiply<Tr>(acc, h, p, rows, block.slice, w.rank, scale, b_lane, copy.pitch, warp_left,
                   i > 0 && !keep_h);
      y.store(rows, col, left, p.add_inputs, acc);
    }
    if (i + 1 < blocks) y = next;
  }
}

/// Many tokens per adapter: y is the work, and B stays as long as the adapter does.
template <class Tr>
__device__ __forceinline__ void walk_tiles(const ExpandParams& p, unsigned char* smem) {
  using T = typename Tr::T;
  T* sB = reinterpret_cast<T*>(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp % Tr::kWarpsM;
  const int warp_col = warp / Tr::kWarpsM * Tr::kGroups * kGroupCols;
  const int lane_col = warp_col + lane % 4 * 8;
  const int place = warp_m * 16 * Tr::kFragsM + lane / 4;
  const int first_tile = static_cast<int>(blockIdx.y) * p.tiles_per_cta;
  const int end_tile = min(first_tile + p.tiles_per_cta, p.tiles.num);
  if (!p.early) device::pdl_wait();

  const Block block = find_block(p);
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  Tile tile, next_tile;
  constexpr int kRows = LaneRows<Tr>::kRows;
  int early[kRows], next_early[kRows];
  bool live = false, next_live = false;
  const auto look_up = [&](int local, Tile* t, int(&tokens)[kRows]) {
    const int index = p.tiles.first + local;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      tokens[k] = early_token<Tr::kPlan>(p.groups, p.tiles, index, place + 8 * k);
    }
    return find_tile<Tr::kPlan>(p.groups, p.tiles, p.weights.num_adapters, index, t);
  };
  live = look_up(first_tile, &tile, early);

  int adapter = -1, rank = 0;
  float scale = 0;
  bool waited = false;
  for (int local = first_tile; local < end_tile && live; ++local) {
    const LaneRows<Tr> rows = lane_rows<Tr>(p, tile, place, early, first, block.y_col + lane_col);
    YPart<Tr> y;
    y.load(rows, 0, block.cols - lane_col, p.add_inputs);
    const bool reload = tile.adapter != adapter;  // the same for the whole CTA
    if (reload) {
      if (adapter >= 0) __syncthreads();
      adapter = tile.adapter;
      SliceWeights w = p.weights.get(adapter, block.slice);
      rank = w.rank = min(w.rank, p.h.width);
      scale = p.scale * w.scale;
      if (rank > 0) BCopy<T>(w, Tr::kThreads).block(sB, block.first, block.cols);
      device::cp_async_commit();
    }
    if (!waited) {
      device::pdl_wait();
      device::pdl_trigger();
      waited = true;
    }
    HChunk<Tr> h;
    h.load(p.h, rows, block.slice, rank, 0, scale);
    next_live = local + 1 < end_tile;
    if (next_live) next_live = look_up(local + 1, &next_tile, next_early);
    if (reload) {
      device::cp_async_wait<0>();
      __syncthreads();
    }

    const int pitch = row_pitch(rank);
    if (rank > 0 && warp_m * 16 * Tr::kFragsM < tile.count && warp_col < block.cols) {
      Sums<Tr> acc = {};
      const T* b_lane = sB + (warp_col + lane / 4) * pitch + lane % 4 * 4;
      multiply<Tr>(acc, h, p, rows, block.slice, rank, scale, b_lane, pitch, block.cols - warp_col,
                   false);
      y.store(rows, 0, block.cols - lane_col, p.add_inputs, acc);
    }
    tile = next_tile;
#pragma unroll
    for (int k = 0; k < kRows; ++k) early[k] = next_early[k];
    live = next_live;
  }
  if (!waited) {
    device::pdl_wait();
    device::pdl_trigger();
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kMinCtas)
    expand_mma_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  if constexpr (Tr::kWalkColumns) {
    walk_columns<Tr>(p, smem);
  } else {
    walk_tiles<Tr>(p, smem);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(const ExpandParams& p, Stream stream) {
  device::Launch l;
  l.grid = expand_grid(p);
  l.threads = Tr::kThreads;
  // Whole blocks: rows past a block's last column are read, and their results dropped.
  const int blocks = Tr::kWalkColumns ? std::min(kStages, ceil_div(p.cols, p.block_cols)) : 1;
  const int rows = blocks * (Tr::kWalkColumns ? p.block_cols : Tr::kCols);
  l.smem = static_cast<std::size_t>(rows) * row_pitch(p.h.width) * sizeof(typename Tr::T);
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_mma_kernel<Tr>>("lora_expand", l, p);
}

template <class T, int kWarpsM, int kWarpsN, Source kSource, bool kPlan>
void launch_source(const ExpandParams& p, Stream stream) {
  if (p.vector_y)
    return launch_traits<Traits<T, kWarpsM, kWarpsN, kSource, true, kPlan>>(p, stream);
  return launch_traits<Traits<T, kWarpsM, kWarpsN, kSource, false, kPlan>>(p, stream);
}

template <class T, int kWarpsM, int kWarpsN>
void launch_tile(const ExpandParams& p, Stream stream) {
  const bool plan = p.groups.plan != nullptr;
  if (!p.h.by_position && plan) {
    return launch_source<T, kWarpsM, kWarpsN, Source::kCaller, true>(p, stream);
  }
  if (!p.h.by_position) {
    return launch_source<T, kWarpsM, kWarpsN, Source::kCaller, false>(p, stream);
  }
  check(plan, "lora_apply: groups must be a plan, got segments");
  if (!p.h.raw && p.vector_y && p.h.width <= 16) {
    return launch_traits<Traits<T, kWarpsM, kWarpsN, Source::kOwn, true, true, 1>>(p, stream);
  }
  if (!p.h.raw) return launch_source<T, kWarpsM, kWarpsN, Source::kOwn, true>(p, stream);
  if constexpr (kWarpsM == 1) {
    check(p.h.width <= 32, "lora_expand: slabs are added here for ranks up to 32 only");
    if (p.vector_y) {
      return launch_traits<Traits<T, kWarpsM, kWarpsN, Source::kSlabs, true, true, 2>>(p, stream);
    }
    return launch_traits<Traits<T, kWarpsM, kWarpsN, Source::kSlabs, false, true, 2>>(p, stream);
  } else {
    fail(ErrorKind::kRuntime, "lora_expand: no kernel adds slabs for tiles of 64 tokens");
  }
}

template <class T>
void launch_typed(const ExpandParams& p, const ExpandConfig& c, Stream stream) {
  if (c.tile_tokens == 16) return launch_tile<T, 1, 4>(p, stream);
  if (c.tile_tokens == 64) return launch_tile<T, 4, 2>(p, stream);
  fail(ErrorKind::kRuntime, concat("lora_expand: no kernel for tiles of ", c.tile_tokens));
}

}  // namespace

void expand_mma(const ExpandParams& p, const ExpandConfig& c, Stream stream) {
  if (p.y.dtype == DType::kBFloat16) {
    launch_typed<__nv_bfloat16>(p, c, stream);
  } else {
    launch_typed<__half>(p, c, stream);
  }
}

}  // namespace mortar::lora::cuda
