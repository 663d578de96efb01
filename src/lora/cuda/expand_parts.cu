// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for every pair of dtypes, on tensor cores that multiply parts of values: float32
// adapters under 16-bit models, and float32 models.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]     N hidden out, r rank
// bytes  = 2 e_y M sum_s N_s (y read and written) + e_B sum_a sum_s r N_s + h
// FLOP   = 2 M N r per product of parts: 6 for float32 B, 3 for bfloat16 B, and for float32 B in
//          lora_apply under bfloat16 x and y, of which two parts count
// 32 tokens of 32 adapters, qkv, r16, float32 B: 13.4 MB -> 3.1 us
// limit  : DRAM (B in decode, y in prefill), and for few tokens the chain of dependent loads
//
// A CTA takes a run of columns of one slice and 16 or 32 tokens of one adapter. h lies in shared
// memory in planes of parts, made once, from the split-K partials of shrink or from finished rows;
// B streams through a ring of cp.async stages, as it is, filled before the predecessor has ended. A
// warp has 32 columns of a block of 128, in an order in which a lane's sums make whole 16-byte
// packs of y beside those of its neighbours; y of the next block is asked for as soon as this one's
// is used up. Sums run over ranks in order, in MMA steps of 16.
#include <algorithm>
#include <type_traits>

#include "device/any_float.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/part_planes.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = kPartsThreads;
constexpr int kCols = 128;  ///< of a block: 32 per warp
constexpr int kStages = 4;  ///< blocks of B in flight
constexpr int kRanks = 32;  ///< of a stage
/// From this rank on two MMA tiles of h take more shared memory than they are worth.
constexpr int kPairMaxRank = 128;

/// CTAs of 16 tokens that an SM must hold. What fewer registers cost older architectures was not
/// measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostCtas = 3;
#else
constexpr int kMostCtas = 4;
#endif

template <class TW_, class TY_, int kFrags_>
struct Traits {
  using TW = TW_;
  using TY = TY_;
  static constexpr int kFrags = kFrags_;  ///< MMA tiles of 16 tokens
  static constexpr int kTokens = 16 * kFrags;
  /// h, float32, has as many as float32 weights.
  static constexpr int kPartsH = std::is_same_v<TW, device::TwoParts> ? 2 : device::kParts<float>;
  /// Columns of y that a lane moves at a time, 16 bytes, beside those of its three neighbours.
  static constexpr int kPack = 16 / int{sizeof(TY)};
  static constexpr int kPacks = 8 / kPack;
  static constexpr int kPackStep = 4 * kPack;  ///< columns between a lane's packs
};

/// Ranks of a stage, which has rows of one MMA step or two. (Two beside h of the largest ranks
/// would take more shared memory than some devices have.)
MORTAR_HOST_DEVICE constexpr int stage_ranks(int width) {
  return width <= 16 || width > kPairMaxRank ? 16 : kRanks;
}
/// Where the two steps of a row of B change places, so that rows read together lie in different
/// banks: neighbours of float32, those a pack apart of 16 bits. Never in rows of one step.
template <class Tr>
__device__ __forceinline__ int swizzle_bytes(int row, int ranks, int size) {
  const int bit = size == 4 ? row & 1 : row / Tr::kPack & 1;
  return ranks == kRanks ? bit * 16 * size : 0;
}

/// A thread's copies of B into the ring: always the same piece of every step-th column.
template <class Tr>
struct BCopy {
  const char* src;      ///< this thread's first piece of its first column
  std::int64_t stride;  ///< bytes
  std::uint32_t dst;
  unsigned char* ring;
  int size, rank, ranks, first_rank, col0, step, cols;  ///< size: bytes of an element
  bool vector;
  int block = 0, chunk = 0, num_chunks, stage = 0;

  __device__ __forceinline__ BCopy(const SliceWeights& w, const Block& b, int width, DType dtype,
                                   unsigned char* at)
      : ring(at),
        size(device::float_bytes<typename Tr::TW>(dtype)),
        rank(w.rank),
        ranks(stage_ranks(width)),
        cols(b.cols),
        num_chunks(ceil_div(w.rank, stage_ranks(width))) {
    stride = w.b_row_stride * size;
    const int log_pieces = (size == 4 ? 2 : 1) + (ranks == kRanks ? 1 : 0);
    const int piece = static_cast<int>(threadIdx.x) & ((1 << log_pieces) - 1);
    col0 = static_cast<int>(threadIdx.x) >> log_pieces;
    step = kThreads >> log_pieces;
    first_rank = piece * (16 / size);
    src = static_cast<const char*>(w.b) + (b.first + col0) * stride;
    vector = device::is_aligned<char, 16>(static_cast<const char*>(w.b)) && stride % 16 == 0;
    // A step of columns is a multiple of 16: swizzle_bytes() is the same for all of them.
    dst = col0 * row_bytes() + ((piece * 16) ^ swizzle_bytes<Tr>(col0, ranks, size));
  }
  __device__ __forceinline__ int row_bytes() const { return ranks * size; }

  /// The next stage, if there is one.
  __device__ __forceinline__ void next() {
    const int first = block * kCols;
    const int r = chunk * ranks + first_rank;
    if (first < cols && r < round_up(rank, 16)) {
      const int left = max(0, min(rank - r, 16 / size));
      const char* from = src + first * stride + (left > 0 ? r * size : 0);
      unsigned char* to = ring + stage * kCols * row_bytes() + dst;
      const std::int64_t src_step = step * stride;
      const int dst_step = step * row_bytes(), count = min(kCols, cols - first);
      if (vector) {
        std::uint32_t at = device::smem_address(to);
        const int bytes = left * size;
#pragma unroll 4
        for (int c = col0; c < count; c += step, from += src_step, at += dst_step) {
          device::cp_async_16(at, from, bytes);
        }
      } else {
#pragma unroll 1
        for (int c = col0; c < count; c += step, from += src_step, to += dst_step) {
          *reinterpret_cast<uint4*>(to) = device::load_piece(from, size, left);
        }
      }
    }
    device::cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (++chunk == num_chunks) {
      chunk = 0;
      ++block;
    }
  }
};

/// A lane's 8 columns of y in one row: packs, kPackStep apart. Aligned ones are loaded long before
/// they are used.
template <class Tr>
struct YPack {
  using TY = typename Tr::TY;
  uint4 v[Tr::kPacks];

  /// left: columns from the first on.
  __device__ __forceinline__ void load(const TY* at, int left) {
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      device::load_if(left > i * Tr::kPackStep, v[i], at + i * Tr::kPackStep);
    }
  }
  /// Adds the products times `scale` in float32, rounds once and stores.
  __device__ __forceinline__ void add(TY* at, int left, float scale, bool add_inputs,
                                      const device::SumsBy<typename Tr::TW> (&sums)[4], int half) {
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      const auto sum = [&](float old, int c) {
        const float product = sums[(i * Tr::kPack + c) / 2].total(2 * half + c % 2);
        return fmaf(product, scale, add_inputs ? old : -0.0f);
      };
      std::uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (std::is_same_v<TY, float>) {
          words[k] = __float_as_uint(sum(__uint_as_float(words[k]), k));
        } else {
          const float2 old = device::unpack2<TY>(words[k]);
          words[k] = device::pack2<TY>(sum(old.x, 2 * k), sum(old.y, 2 * k + 1));
        }
      }
      if (left > i * Tr::kPackStep) {
        *reinterpret_cast<uint4*>(at + i * Tr::kPackStep) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

/// The same for columns anywhere in memory.
template <class Tr>
__device__ __forceinline__ void add_elements(typename Tr::TY* at, int left, float scale,
                                             bool add_inputs,
                                             const device::SumsBy<typename Tr::TW> (&sums)[4],
                                             int half) {
  using TY = typename Tr::TY;
  float old[8];
  const auto column = [](int c) { return c / Tr::kPack * Tr::kPackStep + c % Tr::kPack; };
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    old[c] = add_inputs && column(c) < left ? device::to_float(at[column(c)]) : -0.0f;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float product = sums[c / 2].total(2 * half + c % 2);
    if (column(c) < left) {
      at[column(c)] = device::from_float<TY>(fmaf(product, scale, old[c]));
    }
  }
}

/// One MMA step of 16 ranks: a warp's tokens by 32 columns. h_lane: the lane's row of ldmatrix;
/// b_lane: its ranks of its first column.
template <class TW, class Tr>
__device__ __forceinline__ void multiply(device::SumsBy<TW> (&sums)[Tr::kFrags][4],
                                         std::uint32_t h_lane, int plane_bytes, int pitch,
                                         const unsigned char* b_lane, int row_bytes) {
  std::uint32_t h[Tr::kFrags][Tr::kPartsH][4];
#pragma unroll
  for (int m = 0; m < Tr::kFrags; ++m) {
#pragma unroll
    for (int i = 0; i < Tr::kPartsH; ++i) {
      device::ldmatrix_x4(h[m][i], h_lane + i * plane_bytes + m * 16 * pitch * 2);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    std::uint32_t b[device::kParts<TW>][2];
    // Its pair of columns begins at 2 j of the lane's 8.
    const int row = j * 2 / Tr::kPack * Tr::kPackStep + j * 2 % Tr::kPack;
    device::split4<TW>(device::load_shared<TW, 4>(b_lane + row * row_bytes).word, b);
#pragma unroll
    for (int m = 0; m < Tr::kFrags; ++m) sums[m][j].add(h[m], b);
  }
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kFrags == 1                ? kMostCtas
                                            : sizeof(typename Tr::TY) == 4 ? 2
                                                                           : 3)
    expand_parts_kernel(const __grid_constant__ ExpandParams p) {
  using TW = typename Tr::TW;
  using TY = typename Tr::TY;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int tokens[Tr::kTokens];

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int shares = p.tiles.tile_tokens / Tr::kTokens;  // of a tile
  device::pdl_begin(p.early);

  // Guard
  const Block block = find_block(p, static_cast<int>(blockIdx.y));
  const int local = static_cast<int>(blockIdx.x) / shares;
  const int first_place = static_cast<int>(blockIdx.x) % shares * Tr::kTokens;
  Tile tile;
  bool live = find_tile(p.groups, p.tiles, p.weights.num_adapters, p.tiles.first + local, &tile);
  tile.start += first_place;
  tile.count = min(tile.count - first_place, Tr::kTokens);
  live = live && tile.count > 0;
  const SliceWeights w = weights_of(p, tile, block, live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  const DType w_dtype = p.weights.dtype;
  const HPlanes<Tr> h(smem, p.h.width, w.rank, w_dtype, p.y.dtype);
  unsigned char* const ring = smem + Tr::kPartsH * h.bytes();
  BCopy<Tr> copy(w, block, p.h.width, w_dtype, ring);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy.next();
  if (threadIdx.x < Tr::kTokens) {
    tokens[threadIdx.x] = sorted_token(p.groups, p.tiles, tile, threadIdx.x);
  }
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  __syncthreads();

  // Pointers
  const int lane_col = warp * 32 + quad * Tr::kPack;
  const int own_cols = block.cols - lane_col;  // the CTA's columns from there on
  TY* const y_lane = static_cast<TY*>(p.y.data) + block.y_col + lane_col;
  // Rows of y are found again for every block: their addresses would take eight registers.
  const auto row_token = [&](int m, int half) { return tokens[m * 16 + half * 8 + group]; };
  const int row_bytes = copy.row_bytes(), stage_bytes = kCols * row_bytes;
  const std::uint32_t h_lane =
      device::smem_address(smem) + lane % 16 * h.pitch * 2 + lane / 16 * 16;
  // Row 2a + b of an MMA column is a column of lane a: the pair's second one for b = 1.
  const int b_row = group / 2 * Tr::kPack + group % 2;
  const int b_lane = (warp * 32 + b_row) * row_bytes +
                     ((quad * 4 * copy.size) ^ swizzle_bytes<Tr>(b_row, copy.ranks, copy.size));
  const int num_chunks = copy.num_chunks, num_blocks = ceil_div(block.cols, kCols);
  const int num_steps = ceil_div(w.rank, 16);
  if (p.early && p.add_inputs) {
    // The first columns of y to L2, a line each, whatever the predecessor may still write there.
    constexpr int kLine = 128 / int{sizeof(TY)};
    const int t = tokens[threadIdx.x % Tr::kTokens];
    const int col = static_cast<int>(threadIdx.x) / Tr::kTokens * kLine;
    if (t >= 0 && col < block.cols) {
      device::prefetch_l2(static_cast<TY*>(p.y.data) + t * p.y.row_stride + block.y_col + col);
    }
  }
  HSum<Tr> sum(h, p.h, tile, tokens, first_row, block.slice);
  if (p.h.raw) sum.seek(static_cast<int>(threadIdx.x) / 2);
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
  YPack<Tr> y[Tr::kFrags][2] = {};
  const bool load_y = p.add_inputs && p.vector_y;
#pragma unroll
  for (int i = 0; i < 2 * Tr::kFrags; ++i) {
    const int t = row_token(i / 2, i % 2);
    y[i / 2][i % 2].load(y_lane + t * p.y.row_stride, load_y && t >= 0 ? own_cols : 0);
  }
  if (p.h.raw) {
    sum.make();
  } else {
    make_h<Tr>(h, p.h, tile, tokens, first_row, block.slice);
  }

  int stage = 0;
  bool refill = false;
#pragma unroll 1
  for (int i = 0; i < num_blocks; ++i) {
    // Compute
    device::SumsBy<TW> sums[Tr::kFrags][4];
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      device::wait_for_stage<kStages>(refill);
      __syncthreads();  // the stage is there, and h; the one before is free
      if (refill) copy.next();
      refill = true;
      const int steps = min(num_steps - chunk * copy.ranks / 16, copy.ranks / 16);
      const std::uint32_t h_chunk = h_lane + chunk * copy.ranks * 2;
      device::visit_float<TW>(w_dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          multiply<T, Tr>(sums, h_chunk + step * 32, h.bytes(), h.pitch,
                          ring + stage * stage_bytes + (b_lane ^ (step * 16 * int{sizeof(T)})),
                          row_bytes);
        }
      });
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Store
    const int left = own_cols - i * kCols;
#pragma unroll
    for (int m = 0; m < Tr::kFrags; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = row_token(m, half);
        if (t < 0 || left <= 0) continue;
        TY* const at = y_lane + t * p.y.row_stride + i * kCols;
        if (p.vector_y) {
          y[m][half].add(at, left, w.scale, p.add_inputs, sums[m], half);
          y[m][half].load(at + kCols, load_y ? left - kCols : 0);
        } else {
          add_elements<Tr>(at, left, w.scale, p.add_inputs, sums[m], half);
        }
      }
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(const ExpandParams& p, Stream stream) {
  check(p.cols % kCols == 0,
        "lora_expand: the kernel of parts takes multiples of 128 columns, got ", p.cols);
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.tiles.num * (p.tiles.tile_tokens / Tr::kTokens)),
                static_cast<unsigned>(p.block_start[p.weights.num_slices]));
  l.threads = kThreads;
  const int ranks = stage_ranks(p.h.width);
  const int items = p.cols / kCols * ceil_div(p.h.width, ranks);
  l.smem = static_cast<std::size_t>(Tr::kPartsH * Tr::kTokens * h_pitch(p.h.width)) * 2 +
           static_cast<std::size_t>(std::min(kStages, items) * kCols * ranks *
                                    device::float_bytes<typename Tr::TW>(p.weights.dtype));
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_parts_kernel<Tr>>("lora_expand", l, p);
}

template <class TW, class TY>
void launch_typed(const ExpandParams& p, Stream stream) {
  if (p.tiles.tile_tokens > 16 && p.h.width <= kPairMaxRank) {
    return launch_traits<Traits<TW, TY, 2>>(p, stream);
  }
  launch_traits<Traits<TW, TY, 1>>(p, stream);
}

}  // namespace

void expand_parts(const ExpandParams& p, Stream stream) {
  if (p.two_parts) return launch_typed<device::TwoParts, __nv_bfloat16>(p, stream);
  device::check_dtype<FloatDTypes>(p.weights.dtype, "lora_expand");
  device::visit_dtype<FloatDTypes>(p.y.dtype, "lora_expand", [&](auto y) {
    launch_typed<device::AnyFloat, typename decltype(y)::type>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
