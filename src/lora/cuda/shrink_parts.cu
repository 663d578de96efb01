// SPDX-License-Identifier: Apache-2.0
// h = x A^T for every pair of dtypes, on tensor cores that multiply parts of values: float32
// adapters under 16-bit models, and float32 models.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]     K hidden, R = sum over slices of ranks
// bytes  = e_x M K + e_A K sum_a R_a + h           e: bytes of an element
// FLOP   = 2 M K R per product of parts: 3 for 16-bit x and float32 A, 6 for float32 both
// 32 tokens of 32 adapters, qkv, r16, float32 A: 25 MB -> 5.9 us
// limit  : DRAM (A) in decode; in prefill DRAM (x) beside splitting A and the tensor cores
//
// A CTA takes 16, 32 or 64 tokens of one adapter, a run of its rank rows, and all leaves of K or
// (split) one. Parts of a leaf of x wait in registers (16 tokens) or in planes in shared memory;
// rank rows stream past them, as they are, through a ring of cp.async stages that is filled before
// the predecessor has ended. Each of the four warps multiplies a quarter of the leaf, all tokens
// and all 16 rank rows of a stage, so that every element is split once and no warp idles at low
// ranks; the quarters meet in shared memory and are added in one order. Leaves are added as
// leaf_size in problem.h says.
#include <algorithm>
#include <cstring>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/part_planes.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = kPartsThreads, kWarps = kThreads / 32;
constexpr int kStages = 2;               ///< three would fit one CTA less per SM
constexpr int kStageRows = 16;           ///< rank rows of a stage: two MMA columns of 8
constexpr int kMaxRows = kPartsMaxRows;  ///< rank rows of a CTA
constexpr int kPairK = 32;               ///< elements of two MMA steps
static_assert(leaf_size(1) % (kWarps * kPairK) == 0 && leaf_size(1 << 20) % (kWarps * kPairK) == 0);

template <class TX_, class TW_, int kFrags_, int kKeptSteps_>
struct Traits {
  using TX = TX_;
  using TW = TW_;
  static constexpr int kPartsX = device::kParts<TX>, kPartsW = device::kParts<TW>;
  static constexpr int kFrags = kFrags_;  ///< MMA tiles of 16 tokens
  /// MMA steps of a warp's quarter of a leaf whose x stays in registers; 0: x lies in planes.
  static constexpr int kKeptSteps = kKeptSteps_;
  static constexpr bool kKeepX = kKeptSteps > 0;
  static_assert(kKeepX == (kFrags == 1),
                "x of 16 tokens stays in registers, that of more in planes");
  /// CTAs that an SM must hold, which caps the registers.
  static constexpr int kMinCtas = kFrags == 4 || kKeptSteps * kPartsX > 16  ? 2
                                  : kFrags == 2 || kKeptSteps* kPartsX > 12 ? 3
                                                                            : 4;
  static constexpr int kTokens = 16 * kFrags;
  static constexpr int kSumPairs = kFrags * kThreads;  ///< pairs of sums of a stage
  static constexpr int kPieceElts = 16 / sizeof(TW);   ///< of a cp.async of A

  /// Bytes of a row of one plane of x: eight of them start in different banks, for ldmatrix.
  MORTAR_HOST_DEVICE static constexpr int x_pitch(int leaf) { return leaf * 2 + 16; }
  /// Of a row of A: the steps of two rows (float32) or four lie in different banks.
  MORTAR_HOST_DEVICE static constexpr int a_pitch(int leaf) {
    return (leaf + 16) * int{sizeof(TW)};
  }
  MORTAR_HOST_DEVICE static constexpr int x_bytes(int leaf) {
    return kKeepX ? 0 : kPartsX * kTokens * x_pitch(leaf);
  }
  static constexpr int kSumBytes = kWarps * kSumPairs * 8;
  /// Both halves' totals of all rank rows, where a CTA walks over leaves.
  MORTAR_HOST_DEVICE static constexpr int total_bytes(int row_stages) {
    return 2 * row_stages * kSumPairs * 8;
  }
};

/// A leaf of x from element `k` on, into planes. Rows without a token stay as they are: each row of
/// the product depends on its own row of x alone.
template <class Tr>
__device__ __forceinline__ void load_x(const ShrinkParams& p, const int* tokens, std::int64_t k,
                                       int leaf, unsigned char* planes) {
  using TX = typename Tr::TX;
  constexpr int kBatch = Tr::kFrags == 4 ? 16 : 8;  // pieces whose loads are in flight together
  const int pieces = leaf / 8, pitch = Tr::x_pitch(leaf), plane_bytes = Tr::kTokens * pitch;
  const int piece = static_cast<int>(threadIdx.x) % pieces;
  const int row0 = static_cast<int>(threadIdx.x) / pieces, row_step = kThreads / pieces;
  const std::int64_t at = k + piece * 8;
  const int left =
      static_cast<int>(max(std::int64_t{0}, min(p.weights.hidden - at, std::int64_t{8})));
  const TX* x = static_cast<const TX*>(p.x.data) + (left > 0 ? at : 0);
  if (!p.vector) {
#pragma unroll 1
    for (int i = row0; i < Tr::kTokens; i += row_step) {
      if (tokens[i] < 0) continue;
      XPiece<TX> v;
      v.load_elements(x + tokens[i] * p.x.row_stride, left);
      v.store(planes + i * pitch, piece, plane_bytes);
    }
    return;
  }
#pragma unroll 1
  for (int base = row0; base < Tr::kTokens; base += kBatch * row_step) {
    XPiece<TX> v[kBatch];
    int token[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * row_step;
      token[j] = i < Tr::kTokens ? tokens[i] : -1;
      v[j].load(token[j] >= 0 && left > 0, x + token[j] * p.x.row_stride);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (token[j] >= 0) v[j].store(planes + (base + j * row_step) * pitch, piece, plane_bytes);
    }
  }
}

/// A lane's x of a warp's quarter of a leaf, as the products take it: elements 4q to 4q + 3 of
/// every step of 16 (parts.cuh), of two tokens.
template <class Tr>
struct KeptX {
  using TX = typename Tr::TX;
  static constexpr int kSteps = Tr::kKeepX ? Tr::kKeptSteps : 1;
  std::uint32_t x[kSteps][Tr::kPartsX][4];

  /// tokens: those of the lane's rows; k: its first element.
  __device__ __forceinline__ void load(const ShrinkParams& p, const int (&tokens)[2],
                                       std::int64_t k) {
    using Raw = device::Word<4 * sizeof(TX)>;
    Raw raw[kSteps][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TX* row = static_cast<const TX*>(p.x.data) + tokens[half] * p.x.row_stride + k;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const std::int64_t left = tokens[half] < 0 ? 0 : p.weights.hidden - k - i * 16;
        raw[i][half] = {};
        if (p.vector) {
          device::load_if(left > 0, raw[i][half], row + i * 16);
        } else {
          TX element[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            element[j] = j < left ? row[i * 16 + j] : device::from_float<TX>(0.0f);
          }
          memcpy(&raw[i][half], element, sizeof(element));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t words[sizeof(Raw) / 4], part[Tr::kPartsX][2];
        memcpy(words, &raw[i][half], sizeof(Raw));
        device::split4<TX>(words, part);
#pragma unroll
        for (int j = 0; j < Tr::kPartsX; ++j) {
          x[i][j][half] = part[j][0];
          x[i][j][half + 2] = part[j][1];
        }
      }
    }
  }
};

/// A thread's copies of rank rows into the ring, stage by stage and leaf by leaf.
template <class Tr>
struct RowCopy {
  using TW = typename Tr::TW;
  const ShrinkParams& p;
  const RankRows<kMaxRows>& rows;
  unsigned char* ring;
  int leaf, piece, row0, row_step, pitch;
  std::int64_t k;  ///< this thread's first element of the leaf to be copied next
  int left, row_stages, row_stage = 0, stage = 0;

  __device__ __forceinline__ RowCopy(const ShrinkParams& params, const RankRows<kMaxRows>& own_rows,
                                     unsigned char* at, int leaf_elts, std::int64_t k_begin,
                                     int num_items, int stages)
      : p(params), rows(own_rows), ring(at), leaf(leaf_elts), left(num_items), row_stages(stages) {
    const int pieces = leaf / Tr::kPieceElts;
    piece = static_cast<int>(threadIdx.x) % pieces;
    row0 = static_cast<int>(threadIdx.x) / pieces;
    row_step = kThreads / pieces;
    pitch = Tr::a_pitch(leaf);
    k = k_begin + piece * Tr::kPieceElts;
  }
  /// The next stage, if there is one.
  __device__ __forceinline__ void next() {
    if (left > 0) {
      --left;
      unsigned char* at = ring + stage * kStageRows * pitch + piece * 16;
      const int first = row_stage * kStageRows;
      const int last = min(kStageRows, rows.count - first);
      const int elts = static_cast<int>(
          max(std::int64_t{0}, min(p.weights.hidden - k, std::int64_t{Tr::kPieceElts})));
      const std::int64_t from = elts > 0 ? k : 0;
      if (p.vector) {
        const std::uint32_t dst = device::smem_address(at);
#pragma unroll 8
        for (int i = row0; i < last; i += row_step) {
          const TW* a = static_cast<const TW*>(rows.weights[first + i]);
          if (a != nullptr) device::cp_async_16(dst + i * pitch, a + from, elts > 0 ? 16 : 0);
        }
      } else {
#pragma unroll 1
        for (int i = row0; i < last; i += row_step) {
          const TW* a = static_cast<const TW*>(rows.weights[first + i]);
          if (a == nullptr) continue;
          *reinterpret_cast<device::Pack<TW, Tr::kPieceElts>*>(at + i * pitch) =
              device::load_pack<TW, Tr::kPieceElts>(a + from, elts);
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (++row_stage == row_stages) {
        row_stage = 0;
        k += leaf;
      }
    }
    device::cp_async_commit();
  }
};

/// A lane's elements of a step of 16 of rank rows n * 8 + lane / 4, in parts.
template <class Tr>
__device__ __forceinline__ void load_rows(std::uint32_t (&w)[2][Tr::kPartsW][2],
                                          const unsigned char* a_lane, int a_pitch) {
  using TW = typename Tr::TW;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    device::split4<TW>(device::load_shared<TW, 4>(a_lane + n * 8 * a_pitch).word, w[n]);
  }
}

/// One warp's quarter of a leaf: its tokens by 16 rank rows. a_lane: the lane's first elements of
/// its first row.
template <class Tr>
__device__ __forceinline__ void multiply(device::PartSums (&sums)[1][2], const KeptX<Tr>& kept,
                                         const unsigned char* a_lane, int a_pitch) {
#pragma unroll
  for (int i = 0; i < KeptX<Tr>::kSteps; ++i) {
    std::uint32_t w[2][Tr::kPartsW][2];
    load_rows<Tr>(w, a_lane + i * 16 * sizeof(typename Tr::TW), a_pitch);
#pragma unroll
    for (int n = 0; n < 2; ++n) sums[0][n].add(kept.x[i], w[n]);
  }
}

/// The same with x in planes. x_lane: the lane's row of ldmatrix.
template <class Tr>
__device__ __forceinline__ void multiply(device::PartSums (&sums)[Tr::kFrags][2],
                                         std::uint32_t x_lane, const unsigned char* a_lane,
                                         int leaf) {
  const int x_pitch = Tr::x_pitch(leaf), plane_bytes = Tr::kTokens * x_pitch;
#pragma unroll 1
  for (int pair = 0; pair < leaf / (kWarps * kPairK); ++pair) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t w[2][Tr::kPartsW][2];
      load_rows<Tr>(w, a_lane, Tr::a_pitch(leaf));
#pragma unroll
      for (int m = 0; m < Tr::kFrags; ++m) {
        std::uint32_t x[Tr::kPartsX][4];
#pragma unroll
        for (int i = 0; i < Tr::kPartsX; ++i) {
          device::ldmatrix_x4(x[i], x_lane + i * plane_bytes + m * 16 * x_pitch);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) sums[m][n].add(x, w[n]);
      }
      x_lane += 32;
      a_lane += 16 * sizeof(typename Tr::TW);
    }
  }
}

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
                    find_any_tile(p.groups, p.tiles, p.weights.num_adapters,
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
  const int num_own = whole ? leaves : 1;
  const std::int64_t k_begin = whole ? 0 : static_cast<std::int64_t>(split) * leaf;
  unsigned char* const planes = smem;
  unsigned char* const sums = planes + Tr::x_bytes(leaf);
  unsigned char* const totals = sums + Tr::kSumBytes;
  unsigned char* const ring = totals + (whole ? Tr::total_bytes(p.rows_per_cta / kStageRows) : 0);
  RowCopy<Tr> copy(p, rows, ring, leaf, k_begin, num_own * row_stages, row_stages);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy.next();
  if (threadIdx.x < Tr::kTokens) {
    tokens[threadIdx.x] = any_token(p.groups, p.tiles, tile, threadIdx.x);
  }
  __syncthreads();

  // Pointers
  const int middle = static_cast<int>(first_leaves(leaves));
  const int quarter = warp * (leaf / kWarps);
  const std::uint32_t x_lane =
      device::smem_address(planes) + lane % 16 * Tr::x_pitch(leaf) + (quarter + lane / 16 * 8) * 2;
  const unsigned char* const a_lane =
      ring + lane / 4 * Tr::a_pitch(leaf) +
      (quarter + lane % 4 * 4) * static_cast<int>(sizeof(typename Tr::TW));
  float2* const sum_lane = reinterpret_cast<float2*>(sums) + warp * Tr::kSumPairs + lane;
  // A thread adds the quarters of one token of every MMA tile and two rank rows of a stage.
  const int own_row = static_cast<int>(threadIdx.x) / 64 * 8 + lane % 4 * 2;
  const int own_place = lane / 4 + static_cast<int>(threadIdx.x) / 32 % 2 * 8;
  const int first_row = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  if (p.early) {
    // x to L2, a line of a token each, whatever the predecessor may still write there.
    constexpr int kLine = 128 / int{sizeof(typename Tr::TX)},
                  kStep = kThreads / Tr::kTokens * kLine;
    const int own = tokens[threadIdx.x % Tr::kTokens];
    const auto* x = static_cast<const typename Tr::TX*>(p.x.data) + own * p.x.row_stride + k_begin;
    const std::int64_t end = own < 0 ? 0 : min(std::int64_t{leaf}, p.weights.hidden - k_begin);
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
      load_x<Tr>(p, tokens, k, leaf, planes);
    }
#pragma unroll 1
    for (int row_stage = 0; row_stage < row_stages; ++row_stage) {
      refill ? device::cp_async_wait<kStages - 2>() : device::cp_async_wait<kStages - 1>();
      __syncthreads();  // the stage and x are there; the one before is free, and so are the sums
      if (refill) copy.next();
      refill = true;

      // Compute
      device::PartSums acc[Tr::kFrags][2];
      const unsigned char* a = a_lane + stage * kStageRows * Tr::a_pitch(leaf);
      if constexpr (Tr::kKeepX) {
        multiply<Tr>(acc, kept, a, Tr::a_pitch(leaf));
      } else {
        multiply<Tr>(acc, x_lane, a, leaf);
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
        float2 v = make_float2((q0.x + q1.x) + (q2.x + q3.x), (q0.y + q1.y) + (q2.y + q3.y));
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
        const std::int64_t base =
            split * p.h.slab_stride + static_cast<std::int64_t>(h_rows[m]) * p.h.row_stride;
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
std::size_t smem_bytes(const ShrinkParams& p, const ShrinkConfig& c) {
  const int leaf = static_cast<int>(leaf_size(p.weights.hidden));
  const int row_stages = c.tile_rows / kStageRows;
  const bool whole = p.h.num_slabs == 1;
  const int items = row_stages * static_cast<int>(whole ? num_leaves(p.weights.hidden) : 1);
  return static_cast<std::size_t>(Tr::x_bytes(leaf) + Tr::kSumBytes +
                                  (whole ? Tr::total_bytes(row_stages) : 0) +
                                  std::min(kStages, items) * kStageRows * Tr::a_pitch(leaf));
}
template <class Tr>
bool fits(const ShrinkParams& p, const ShrinkConfig& c) {
  return device::fits<shrink_parts_kernel<Tr>>("lora_shrink", smem_bytes<Tr>(p, c));
}

template <class Tr>
void launch_traits(ShrinkParams p, const ShrinkConfig& c, Stream stream) {
  check(p.tiles.tile_tokens == c.tile_tokens && c.tile_rows <= kMaxRows &&
            c.tile_rows % kStageRows == 0,
        "lora_shrink: no kernel of parts for a tile of ", c.tile_tokens, " tokens and ",
        c.tile_rows, " rank rows");
  p.rows_per_cta = c.tile_rows;
  device::Launch l;
  l.grid = shrink_grid(p, c);
  l.grid.x *= static_cast<unsigned>(c.tile_tokens / Tr::kTokens);
  l.threads = kThreads;
  l.smem = smem_bytes<Tr>(p, c);
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_parts_kernel<Tr>>("lora_shrink", l, p);
}

template <class TX, class TW>
void launch_typed(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
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

}  // namespace

void shrink_parts(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  device::visit_dtype<FloatDTypes>(p.x.dtype, "lora_shrink", [&](auto x) {
    device::visit_dtype<FloatDTypes>(p.weights.dtype, "lora_shrink", [&](auto w) {
      launch_typed<typename decltype(x)::type, typename decltype(w)::type>(p, c, stream);
    });
  });
}

}  // namespace mortar::lora::cuda
