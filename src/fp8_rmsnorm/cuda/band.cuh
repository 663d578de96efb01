// SPDX-License-Identifier: Apache-2.0
// A CTA's part of a band of rows: its tiles of x in shared memory, the statistics of its rows, and
// what the CTAs of a cluster tell each other of them.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_ring.cuh"
#include "fp8_rmsnorm/cuda/tile_codes.cuh"
#include "fp8_rmsnorm/cuda/tile_operands.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// What is made of a band: q and q_t with scales of groups, or with a given scale.
enum class BandPass { kGroup, kGiven };

template <class T, BandPass kPass>
class Band {
 public:
  using Operands = TileOperands<T>;
  static constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  static constexpr int kThreads = BandPlan::kThreads;
  static_assert(kThreads == kTileThreads && BandPlan::kRows == kTileRows);

  const ForwardParams& p;
  const BandPlan& plan;
  unsigned char* memory;  ///< of the CTA
  int c, r;               ///< thread c of the eight that share rows 4 r to 4 r + 3
  int rank, tiles;        ///< of the CTA in its cluster; tiles that it has
  int there;              ///< how many of the thread's rows there are, at most four
  std::int64_t row0;      ///< the band's first row

  __device__ __forceinline__ Band(const ForwardParams& params, uint4* shared)
      : p(params), plan(params.plan.band_plan), memory(reinterpret_cast<unsigned char*>(shared)) {
    const int thread = static_cast<int>(threadIdx.x);
    c = thread % 8;
    r = thread / 8;
    const int log2_cluster = plan.log2_cluster;
    rank = static_cast<int>(blockIdx.x) & (plan.cluster - 1);
    row0 = std::int64_t{blockIdx.x >> log2_cluster} * kTileRows;
    const int across = ceil_div(static_cast<int>(p.input.hidden), kTileColumns);
    tiles = (across - rank + plan.cluster - 1) >> log2_cluster;
    const std::int64_t left = p.input.rows - row0 - kThreadRows * r;
    there = static_cast<int>(max(min(left, std::int64_t{kThreadRows}), std::int64_t{0}));
  }

  /// What lies where in shared memory: see BandPlan.
  __device__ __forceinline__ float* floats(int at) const {
    return reinterpret_cast<float*>(memory + at);
  }
  __device__ __forceinline__ float* all_weights() const { return floats(plan.weights_at); }
  __device__ __forceinline__ float* all_columns() const { return floats(plan.columns_at); }
  /// Of tile j and the thread's group of rows.
  __device__ __forceinline__ float* columns(int j) const {
    const int group = (j << plan.log2_groups) + (kThreadRows * r << plan.log2_groups) / kTileRows;
    return all_columns() + group * kTileColumns;
  }
  __device__ __forceinline__ float* groups() const { return floats(plan.groups_at); }
  __device__ __forceinline__ float* all_sums() const { return floats(plan.sums_at); }
  __device__ __forceinline__ float* all_rstd() const { return floats(plan.rstd_at); }
  __device__ __forceinline__ std::uint32_t* row_maxima() const {
    return reinterpret_cast<std::uint32_t*>(memory + plan.row_maxima_at);
  }

  /// The first column of tile j of the CTA.
  __device__ __forceinline__ int column0(int j) const {
    return (j * plan.cluster + rank) * kTileColumns;
  }
  /// x of tile j.
  __device__ __forceinline__ unsigned char* tile(int j) const {
    return memory + j * Operands::kStage;
  }
  __device__ __forceinline__ uint4 piece(int j, int m, int k) const {
    return *reinterpret_cast<const uint4*>(tile(j) + (m * kPieces + k) * Operands::kStep +
                                           threadIdx.x * 16);
  }
  /// The weights of quad k of the thread's columns in tile j.
  __device__ __forceinline__ float4 weights(int j, int k) const {
    return *reinterpret_cast<const float4*>(all_weights() + j * kTileColumns + 4 * (8 * k + c));
  }

  /// Tile i of the order in which rows are added: all bits of its number turned over, so that what
  /// is added together comes one after the other.
  __device__ __forceinline__ int ordered(int i) const {
    return static_cast<int>(__brev(static_cast<unsigned>(i)) >> (31 - log2_padded()) >> 1);
  }
  /// The number of tiles, filled up to a power of two.
  __device__ __forceinline__ int padded() const { return 1 << log2_padded(); }

  /// Readies the barriers at which the CTA waits for what the cluster tells it. All CTAs have come
  /// so far before any sends.
  __device__ __forceinline__ void init(device::Mbarrier* sums_here,
                                       device::Mbarrier* rstd_here) const {
    constexpr bool kMaxima = kPass != BandPass::kGroup;
    if (threadIdx.x == 0) {
      sums_here->init(1);
      rstd_here->init(1);
      sums_here->arrive_and_expect(kTileRows * 4 * (8 * kPieces + (kMaxima ? 1 : 0)));
      rstd_here->arrive_and_expect(kTileRows * 4);
      device::Mbarrier::fence_init();
    }
    device::cluster_arrive_relaxed();
  }

  /// Asks for all of the CTA's x.
  __device__ __forceinline__ void copy_x() const {
    for (int i = 0; i < padded(); ++i) {
      const int j = ordered(i);
      if (j < tiles) {
        Operands::copy(p, TilePlace{row0, column0(j)}, c, r,
                       device::smem_address(memory) + j * Operands::kStage + threadIdx.x * 16);
      }
      device::cp_async_commit();
    }
  }

  /// Brings the weights of the CTA's columns, zeros behind the last; `meanwhile` is called once,
  /// when they are on their way. Returns whether one of the thread's is infinite.
  template <class Meanwhile>
  __device__ __forceinline__ bool store_weights(const Meanwhile& meanwhile) const {
    const int hidden = static_cast<int>(p.input.hidden), end = tiles * kTileColumns;
    const char* weights = static_cast<const char*>(p.weight.data);
    const bool wide = p.weight.dtype == DType::kFloat32;
    const auto column = [&](int i) {
      return column0(i / kTileColumns) + Operands::column_of_weight(i % kTileColumns);
    };
    const auto load = [&](int i) {
      std::uint32_t word = 0;
      const int n = column(i);
      const bool weighted = p.norm && i < end && n < hidden;
      if (wide) {
        load_word_if<false>(weighted, word, weights + n * 4);
      } else {
        load_word_if<true>(weighted, word, weights + n * 2);
      }
      return word;
    };
    int i = static_cast<int>(threadIdx.x);
    std::uint32_t word = load(i);
    meanwhile();
    bool infinite = false;
#pragma unroll 1
    while (i < end) {
      float w = p.norm ? float_of_word(p.weight.dtype, word) + p.weight_offset : 1.0f;
      if (column(i) >= hidden) w = 0.0f;
      all_weights()[i] = w;
      infinite = infinite || fabsf(w) > kLargestFloat;
      i += kThreads;
      if (i < end) word = load(i);
    }
    return infinite;
  }

  /// Whether none of tile j lies outside.
  __device__ __forceinline__ bool whole(int j) const {
    return row0 + kTileRows <= p.input.rows && column0(j) + kTileColumns <= p.input.hidden;
  }
  /// Stores the codes of piece k of the thread's rows in tile j to q, if it is wanted.
  __device__ __forceinline__ void store_q(int j, int k,
                                          const std::uint32_t (&codes)[kThreadRows][kQuads]) const {
    if (!p.out.q.given()) return;
    store_pieces<kElements>(p, codes, row0 + kThreadRows * r, column0(j) + (8 * k + c) * kElements,
                            whole(j));
  }

  /// The scales of the thread's rows in tile j, which measure() has left.
  __device__ __forceinline__ float4* scales(int j) const {
    return reinterpret_cast<float4*>(memory + plan.scales_at) + j * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ void read_scales(int j, float (&scale)[kThreadRows]) const {
    const float4 of_rows = kIsFloat8<T> ? *scales(j) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    scale[0] = of_rows.x;
    scale[1] = of_rows.y;
    scale[2] = of_rows.z;
    scale[3] = of_rows.w;
  }

  /// Loads the words of the scales of tile j.
  __device__ __forceinline__ void load_scales(int j, std::uint32_t (&scale)[kThreadRows]) const {
    if constexpr (kIsFloat8<T>) {
      const int column = column0(j) + c * kElements;
      const int count = j < tiles && column < p.input.hidden ? there : 0;
      const std::int64_t row = row0 + kThreadRows * r;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) scale[m] = 0;
      if (Operands::narrow_scales(p)) {
        cuda::load_scales<true>(p.input, row, column, count, scale);
      } else {
        cuda::load_scales<false>(p.input, row, column, count, scale);
      }
    }
  }
  __device__ __forceinline__ float scale_of(std::uint32_t word) const {
    return kIsFloat8<T> ? scale_of_word(Operands::narrow_scales(p), word) : 1.0f;
  }

  /// Measures the thread's part of its rows, tile after tile as they come, and sends the sums to
  /// the CTA that adds up these rows. A row's sum is a tree over its 16-byte pieces, which begins
  /// with the highest bit of their numbers: those of tiles in a CTA, of CTAs, of pieces in a tile.
  __device__ __forceinline__ void measure(device::Mbarrier* sums_here) const {
    float level[3][kPieces][kThreadRows] = {}, sum[kPieces][kThreadRows];
    std::uint32_t most[kThreadRows] = {}, word[kThreadRows] = {}, next[kThreadRows] = {};
    load_scales(ordered(0), word);
#pragma unroll 1
    for (int i = 0; i < padded(); ++i) {
      const int j = ordered(i);
      if (i + 1 < padded()) load_scales(ordered(i + 1), next);
      wait_for_copies(padded() - 1 - i);
      if (j < tiles) {
        std::uint32_t of_pieces[kPieces][kThreadRows];
        measure_tile(j, word, sum, of_pieces);
        if constexpr (kPass == BandPass::kGroup) {
          store_groups(j, of_pieces);
        } else {
          for_pieces([&](int k, int m) { most[m] = max(most[m], of_pieces[k][m]); });
        }
      } else {
        for_pieces([&](int k, int m) { sum[k][m] = 0.0f; });
      }
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) word[m] = next[m];
      add_up<0>(i, level, sum);
    }
    send(sum, most, sums_here);
  }

  /// rstd of the rows that this CTA adds up, to all CTAs of the cluster. Returns the largest |y|
  /// that the thread has seen.
  __device__ __forceinline__ float finish_rows(device::Mbarrier* sums_here,
                                               device::Mbarrier* rstd_here) const {
    constexpr int kMost = BandPlan::kMostCluster;
    const int rows = kTileRows >> plan.log2_cluster, lane = c;  // whole warps have rows
    float amax = 0.0f;
    if (r < rows) sums_here->wait(0);
#pragma unroll 1
    for (int row = r; row < rows; row += kThreads / 8) {
      float of_pieces[kPieces];
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        float part[kMost];
#pragma unroll
        for (int s = 0; s < kMost; ++s) {
          part[s] =
              s < plan.cluster ? all_sums()[((s * kPieces + k) * 8 + lane) * rows + row] : 0.0f;
        }
        of_pieces[k] = device::add_halves<kMost>(part);
      }
      float sum = kPieces == 2 ? of_pieces[0] + of_pieces[kPieces - 1] : of_pieces[0];
      sum = device::sum_lanes(sum, 8);
      std::uint32_t most = 0;
      if constexpr (kPass != BandPass::kGroup) {
        for (int s = lane; s < plan.cluster; s += 8) {
          most = max(most, row_maxima()[s * rows + row]);
        }
        most = device::max_lanes(most, 8);
      }
      const int of_band = rank * rows + row;
      const bool is_there = row0 + of_band < p.input.rows;
      const float rstd = is_there ? rstd_of(p, sum, p.input.hidden) : 0.0f;
      const float row_amax = __uint_as_float(most) * rstd;
      for (int s = lane; s < plan.cluster; s += 8) {
        device::send_to_cluster(all_rstd() + of_band, rstd, rstd_here, s);
      }
      if (is_there && lane == 0 && p.rstd != nullptr) p.rstd[row0 + of_band] = rstd;
      if (is_there) amax = device::max_magnitude(amax, row_amax);
    }
    if (threadIdx.x < 32) rstd_here->wait(0);  // the others wait without asking again and again
    __syncthreads();
    return amax;
  }

 private:
  __device__ __forceinline__ int log2_padded() const {
    return 32 - __clz(plan.tiles - 1);  // __clz(0) is 32
  }

  /// Adds item i of a sequence up by a binary tree: as soon as both halves of a level are there.
  template <int kLevel, int kLevels>
  __device__ __forceinline__ static void add_up(int i,
                                                float (&level)[kLevels][kPieces][kThreadRows],
                                                float (&sum)[kPieces][kThreadRows]) {
    if constexpr (kLevel < kLevels) {
      if ((i >> kLevel & 1) == 0) {
        for_pieces([&](int k, int m) { level[kLevel][k][m] = sum[k][m]; });
        return;
      }
      for_pieces([&](int k, int m) { sum[k][m] = level[kLevel][k][m] + sum[k][m]; });
      add_up<kLevel + 1>(i, level, sum);
    }
  }

  template <class Use>
  __device__ __forceinline__ static void for_pieces(const Use& use) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) use(k, m);
    }
  }

  /// The sum of squares and the largest |z w| of each of the thread's pieces of tile j.
  __device__ __forceinline__ void measure_tile(int j, const std::uint32_t (&word)[kThreadRows],
                                               float (&sum)[kPieces][kThreadRows],
                                               std::uint32_t (&most)[kPieces][kThreadRows]) const {
    const float scale[kThreadRows] = {scale_of(word[0]), scale_of(word[1]), scale_of(word[2]),
                                      scale_of(word[3])};
    if constexpr (kIsFloat8<T>) *scales(j) = make_float4(scale[0], scale[1], scale[2], scale[3]);
#pragma unroll
    for (int piece_of = 0; piece_of < kPieces; ++piece_of) {
      float4 w[kQuads];
#pragma unroll
      for (int k = 0; k < kQuads; ++k) w[k] = weights(j, piece_of * kQuads + k);
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        const uint4 raw = piece(j, m, piece_of);
        float squares[4] = {};
        std::uint32_t largest[2] = {};
#pragma unroll
        for (int k = 0; k < kQuads; ++k) {
          float z[4];
          unpack4<T>(raw, k, z);
#pragma unroll
          for (int i = 0; i < 4; ++i) squares[i] = __fmaf_rn(z[i], z[i], squares[i]);
          largest[0] = max(max(largest[0], device::product_bits(z[0], w[k].x)),
                           device::product_bits(z[2], w[k].z));
          largest[1] = max(max(largest[1], device::product_bits(z[1], w[k].y)),
                           device::product_bits(z[3], w[k].w));
        }
        float of_piece = __uint_as_float(max(largest[0], largest[1]));
        sum[piece_of][m] = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        if constexpr (kIsFloat8<T>) {
          sum[piece_of][m] *= scale[m] * scale[m];
          of_piece *= scale[m];
        }
        most[piece_of][m] = device::magnitude_bits(of_piece);
      }
    }
  }

  /// The largest |z w| of the groups of columns of tile j.
  __device__ __forceinline__ void store_groups(int j,
                                               std::uint32_t (&most)[kPieces][kThreadRows]) const {
    constexpr int kTilePieces = 8 * kPieces;  // of a row
    const int log2_pieces = log2_of(kTilePieces) - plan.log2_groups, pieces = 1 << log2_pieces;
    if (kPieces == 2 && pieces == kTilePieces) {
      for_pieces([&](int k, int m) { most[k][m] = max(most[0][m], most[kPieces - 1][m]); });
    }
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      if (pieces <= step) continue;
      for_pieces([&](int k, int m) {
        most[k][m] = max(most[k][m], __shfl_xor_sync(0xffffffffu, most[k][m], step));
      });
    }
    if ((c & (pieces - 1)) != 0 && pieces < kTilePieces) return;
    if (c % 8 != 0 && pieces == kTilePieces) return;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int group = (j << plan.log2_groups) + ((8 * k + c) >> log2_pieces);
      *reinterpret_cast<uint4*>(groups() + group * BandPlan::kGroupPitch + kThreadRows * r) =
          make_uint4(most[k][0], most[k][1], most[k][2], most[k][3]);
    }
  }

  /// To the CTA that adds up the thread's rows: all have as many.
  __device__ __forceinline__ void send(const float (&sum)[kPieces][kThreadRows],
                                       std::uint32_t (&most)[kThreadRows],
                                       device::Mbarrier* sums_here) const {
    const int log2_rows = log2_of(kTileRows) - plan.log2_cluster, row = kThreadRows * r;
    const int rows = 1 << log2_rows, to = row >> log2_rows, in_part = row & (rows - 1);
    if constexpr (kPass != BandPass::kGroup) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) most[m] = device::max_lanes(most[m], 8);
    }
    device::cluster_wait();  // all CTAs have started
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      float* sums = all_sums() + (((rank * kPieces + k) * 8 + c) << log2_rows) + in_part;
      const float4 of_rows = make_float4(sum[k][0], sum[k][1], sum[k][2], sum[k][3]);
      device::send_to_cluster(sums, of_rows, sums_here, to);
    }
    if (kPass != BandPass::kGroup && c == 0) {
      float* maxima = reinterpret_cast<float*>(row_maxima()) + (rank << log2_rows) + in_part;
      device::send_to_cluster(maxima,
                              make_float4(__uint_as_float(most[0]), __uint_as_float(most[1]),
                                          __uint_as_float(most[2]), __uint_as_float(most[3])),
                              sums_here, to);
    }
  }
};

}  // namespace mortar::fp8_rmsnorm::cuda
