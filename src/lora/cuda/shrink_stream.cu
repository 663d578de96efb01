// SPDX-License-Identifier: Apache-2.0
// h = x A^T for few tokens of many adapters, on tensor cores, x and A of one 16-bit type: one slab
// of partial sums per leaf of K, by persistent warps.
//
// slab[l, s, t, r] = sum_{k in leaf l} x[t, k] A_{a(t), s}[r, k]     K hidden, R = sum of ranks
// bytes  = 2 K sum_a R_a (A of the adapters in use) + 2 M K (x) + 4 M R Z (slabs, Z leaves, to L2)
// FLOP   = 2 M K R: never the limit
// 296 tokens of 103 of 434 adapters, K=5120, ranks of 3 slices up to 64: 97 MB -> 23 us
// limit  : DRAM (A)
// wrong  : so few tiles that all CTAs of shrink_decode.cu run at once, and many tokens of an
//          adapter, for every 8 of which A is read
//
// An SM has one to three CTAs. A piece of work is up to 8 tokens of a tile, 16 rank rows of its
// adapter and 512 elements of K: rows of 1 KB of A and of x, which cp.async brings to a part of
// shared memory that is the warp's own. A warp waits for its own copies alone, and looks up its
// next piece meanwhile. Tiles that are not there, where the host has to assume more than there are,
// and rank rows that an adapter does not have cost nothing (tile_list.cuh). What limits a warp is
// the chain of its instructions, some 600 a piece, so there are many, and none copies two pieces at
// a time.
//
// Rank rows are the rows of the MMA and tokens its columns.
#include <algorithm>

#include "device/any_float.cuh"
#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/tile_list.cuh"

namespace mortar::lora::cuda {
namespace {

using device::Bits16;

constexpr int kTokens = kStreamTokens;  ///< of a piece: half a tile
constexpr int kK = kDecodeK;            ///< elements of K of a piece
constexpr int kPitch = kK + 8;   ///< elements; 1040 B rows make ldmatrix free of bank conflicts
constexpr int kPairs = kK / 32;  ///< pairs of MMA steps of a piece
constexpr int kHalfRow = 512;    ///< bytes: what a warp copies at a time
static_assert(2 * kHalfRow == 2 * kK);

/// What a warp takes at a time.
struct Piece {
  Tile tile;      ///< its tokens
  int token = 0;  ///< the first of these in the plan's list
  int rank = 0;   ///< the largest of the adapter
  int first = 0;  ///< rank row
  int rows = 0;   ///< so many; 0: there is no piece
  int chunk = 0;  ///< of K
};

__device__ __forceinline__ int chunks_of(const ShrinkParams& p) {
  return static_cast<int>(ceil_div<std::int64_t>(p.weights.hidden, kK));
}
__device__ __forceinline__ int rows_of(const ShrinkParams& p, int adapter, int rank) {
  int rows = 0;
  for (int s = 0; s < p.weights.num_slices; ++s) {
    rows += slice_rank(p.weights, adapter, rank, s, p.h.width);
  }
  return rows;
}

/// A warp's next piece: those of the first tokens of a tile come before those of the others, and
/// chunks of K follow each other.
__device__ __forceinline__ Piece next_piece(const ShrinkParams& p,
                                            const TileList<kStreamThreads>& list) {
  const ListedTile found = list.next();
  Piece piece;
  if (found.piece < 0) return piece;
  const int chunks = chunks_of(p), all = rows_of(p, found.tile.adapter, found.rank);
  const int group = found.piece / chunks, groups = ceil_div(all, kStreamRows);
  const int skipped = group >= groups ? kTokens : 0;
  piece.chunk = found.piece - group * chunks;
  piece.first = (group - (skipped > 0 ? groups : 0)) * kStreamRows;
  piece.rows = min(all - piece.first, kStreamRows);
  piece.rank = found.rank;
  piece.token = found.index * 2 * kTokens + skipped;
  piece.tile = found.tile;
  piece.tile.start += skipped;
  piece.tile.count = min(piece.tile.count - skipped, kTokens);
  return piece;
}

/// What a warp does with a piece.
struct Worker {
  const ShrinkParams& p;
  std::uint32_t rows_at, x_at;  ///< shared-memory addresses
  Piece piece;
  int place = 0;  ///< element of h of the rank row that a lane of the first sixteen looks after

  __device__ __forceinline__ Worker(const ShrinkParams& params, std::uint32_t at)
      : p(params), rows_at(at), x_at(at + p.rows_per_cta * kPitch * 2) {}

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  /// Bytes of a row.
  __device__ __forceinline__ int bytes() const {
    const std::int64_t left = p.weights.hidden - std::int64_t{piece.chunk} * kK;
    return 2 * static_cast<int>(min(left, std::int64_t{kK}));
  }
  /// Copies `count` rows a stride apart, with zeros past their end.
  __device__ __forceinline__ void copy(std::uint32_t to, const Bits16* from, std::int64_t stride,
                                       int count) const {
    const int all = bytes(), left = all - lane() * 16;
    const char* at = reinterpret_cast<const char*>(from) + (left > 0 ? lane() * 16 : 0);
    to += lane() * 16;
    stride *= 2;
    if (all == 2 * kHalfRow) {
#pragma unroll 4
      for (int i = 0; i < count; ++i, at += stride, to += kPitch * 2) {
        device::cp_async_16(to, at);
        device::cp_async_16(to + kHalfRow, at + kHalfRow);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i, at += stride, to += kPitch * 2) {
      device::cp_async_16(to, at, left > 0 ? 16 : 0);
      device::cp_async_16(to + kHalfRow, at + (left > kHalfRow ? kHalfRow : 0),
                          left > kHalfRow ? 16 : 0);
    }
  }
  /// Asks for the rank rows of a piece.
  __device__ __forceinline__ void ask_for_rows(const Piece& of) {
    piece = of;
    int r = piece.first, row = 0;
    for (int s = 0; row < piece.rows; ++s) {
      const int own = slice_rank(p.weights, piece.tile.adapter, piece.rank, s, p.h.width);
      if (r >= own) {
        r -= own;
        continue;
      }
      const SliceWeights w = p.weights.get(piece.tile.adapter, s);
      const int rows = min(own - r, piece.rows - row);
      if (lane() >= row) place = s * static_cast<int>(p.h.slice_stride) + r + lane() - row;
      copy(rows_at + row * kPitch * 2,
           static_cast<const Bits16*>(w.a) + r * w.a_row_stride + std::int64_t{piece.chunk} * kK,
           w.a_row_stride, rows);
      row += rows;
      r = 0;
    }
  }
  /// And for x of its tokens, of which a lane of the first eight has one.
  __device__ __forceinline__ void ask_for_tokens(int token) const {
    const auto* x = static_cast<const Bits16*>(p.x.data) + std::int64_t{piece.chunk} * kK;
#pragma unroll 1
    for (int i = 0; i < piece.tile.count; ++i) {
      copy(x_at + i * kPitch * 2, x + __shfl_sync(0xffffffffu, token, i) * p.x.row_stride, 0, 1);
    }
    device::cp_async_commit();
  }

  /// Sums of leaves of K that lie there, `pairs` pairs of MMA steps, or all: of rank rows lane / 4
  /// and 8 beyond, two tokens each.
  template <class T, int kLeaves, bool kAll>
  __device__ __forceinline__ void multiply(float (&sum)[kLeaves][4], int pairs) const {
    constexpr int kLeafPairs = kPairs / kLeaves, kUnroll = kAll ? kLeafPairs : 1;
    const std::uint32_t a_at =
        rows_at + min(lane() % 16, piece.rows - 1) * kPitch * 2 + lane() / 16 * 16;
    const std::uint32_t b_at =
        x_at + min(lane() % 8, piece.tile.count - 1) * kPitch * 2 + lane() / 8 * 16;
#pragma unroll kUnroll
    for (int i = 0; i < kLeafPairs; ++i) {
#pragma unroll
      for (int l = 0; l < kLeaves; ++l) {
        const int pair = l * kLeafPairs + i;
        if (!kAll && pair >= pairs) break;
        std::uint32_t a[2][4], b[4];
        device::ldmatrix_x4(a[0], a_at + pair * 64);
        device::ldmatrix_x4(a[1], a_at + pair * 64 + 32);
        device::ldmatrix_x4(b, b_at + pair * 64);
        device::mma_16816<T>(sum[l], a[0], b[0], b[1]);
        device::mma_16816<T>(sum[l], a[1], b[2], b[3]);
      }
    }
  }
  /// Stores the sums of a leaf.
  __device__ __forceinline__ void store(const float (&sum)[4], int slab) const {
    float* const to =
        static_cast<float*>(p.h.data) + slab * p.h.slab_stride + piece.tile.start * p.h.row_stride;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = lane() / 4 + 8 * upper;
      const int at = __shfl_sync(0xffffffffu, place, row);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = lane() % 4 * 2 + c;
        if (row < piece.rows && i < piece.tile.count) {
          to[i * p.h.row_stride + at] = sum[upper * 2 + c];
        }
      }
    }
  }
  template <int kLeaves>
  __device__ __forceinline__ void make_sums() const {
    float sum[kLeaves][4] = {};
    const int pairs = ceil_div(bytes(), 64);
    device::visit_checked_dtype(Float16DTypes(), p.x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      pairs == kPairs ? multiply<T, kLeaves, true>(sum, pairs)
                      : multiply<T, kLeaves, false>(sum, pairs);
    });
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) {
      const int slab = piece.chunk * kLeaves + l;
      if (slab < p.h.num_slabs) store(sum[l], slab);
    }
  }
  /// Waits for the piece, multiplies and stores.
  __device__ __forceinline__ void take() const {
    device::cp_async_wait<0>();
    __syncwarp();
    leaf_size(p.weights.hidden) == kK ? make_sums<1>() : make_sums<2>();
    __syncwarp();  // all lanes have read what is overwritten next
  }
};

__global__ void __launch_bounds__(kStreamThreads)
    shrink_stream_kernel(const __grid_constant__ ShrinkParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  device::pdl_begin(p.early);

  // Coordinates
  const TileList<kStreamThreads> list(p.groups, p.tiles, p.weights, reinterpret_cast<int4*>(smem),
                                      [&](int adapter, int rank, int count) {
                                        return chunks_of(p) * ceil_div(count, kTokens) *
                                               ceil_div(rows_of(p, adapter, rank), kStreamRows);
                                      });
  const auto token_of = [&](const Piece& of) {
    const int place = static_cast<int>(threadIdx.x) % kTokens;
    return of.rows > 0 ? __ldcg(p.groups.plan + p.tiles.tokens + of.token + place) : -1;
  };

  // Load: A does not depend on the predecessor.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Worker worker(p, device::smem_address(smem) + p.tiles.num * static_cast<int>(sizeof(int4)) +
                       warp * (p.rows_per_cta + kTokens) * kPitch * 2);
  Piece piece = next_piece(p, list);
  int token = token_of(piece);
  worker.ask_for_rows(piece);
  device::pdl_wait();
#pragma unroll 1
  while (piece.rows > 0) {
    worker.ask_for_tokens(token);
    piece = next_piece(p, list);
    token = token_of(piece);
    worker.take();
    worker.ask_for_rows(piece);
  }
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void shrink_stream(const ShrinkParams& params, const ShrinkPlan& c, Stream stream) {
  ShrinkParams p = params;
  check(c.per_sm > 0 && p.vector && p.h.raw && p.groups.plan != nullptr && p.tiles.first == 0 &&
            p.tiles.num <= kStreamTiles && !p.pad,
        "lora_shrink: persistent warps leave partial sums of aligned x and A, by a plan of up to ",
        kStreamTiles, " tiles");
  device::check_dtype<Float16DTypes>(p.x.dtype, "lora_shrink");
  const int rows = rank_rows(p);
  p.rows_per_cta = std::min(rows, kStreamRows);
  const device::DeviceInfo& device = device::current_device();
  const int warps = stream_warps(rows, p.tiles.num, device.max_smem) / c.per_sm;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(c.per_sm * device.num_sms));
  l.threads = static_cast<unsigned>(32 * warps);
  l.smem = static_cast<std::size_t>(stream_list_smem(p.tiles.num) + warps * stream_warp_smem(rows));
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_stream_kernel>("lora_shrink", l, p);
}

}  // namespace mortar::lora::cuda
