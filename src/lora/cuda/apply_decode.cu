// SPDX-License-Identifier: Apache-2.0
// y (+)= (x A^T) B^T for few tokens per adapter and ranks up to 16 in one launch, on sm_90.
//
// h[t, r] = sum_l sum_{k in leaf l} x[t, k] A_{a(t), s}[r, k]     K hidden, r rank
// y[t, n] (+)= scale * sum_r h[t, r] B_{a(t), s}[n, r]            N hidden out
// bytes  = 2 r sum_a (S K + sum_s N_s) (A, B) + 2 M K (x) + 4 M sum_s N_s (y read and written); of
//          L2, each cluster reads A and x of its tile and slice anew
// FLOP   = 2 M r (S K + sum_s N_s): never the limit
// one token, o, r16: 0.26 MB -> 0.06 us
// limit  : the chain of dependent loads
//
// The CTAs of a cluster share all of K of one tile of 16 tokens and one slice, 512 elements each at
// a time, and send the sums of their leaves to each other through distributed shared memory. Every
// CTA adds them as leaf_size in problem.h says, and expands its own columns: the bits of
// shrink_decode.cu and expand_decode.cu, without a second kernel that waits for the first to end. B
// and y are on their way by then.
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = 16;  ///< of a tile
constexpr int kRanks = kOneMaxRank;
constexpr int kCtas = kOneCluster;
constexpr int kK = kDecodeK;          ///< elements of K per CTA and turn
constexpr int kPitch = kDecodeK + 8;  ///< elements; free of bank conflicts
constexpr int kPieces = kK / 8;       ///< 16-byte pieces of a row
constexpr int kRowStep = kThreads / kPieces;
constexpr int kPasses =
    kOneMaxCols / kThreads;  ///< times that the CTA's warps take 32 columns each
using Ranks = RankTile<1>;
static_assert(Ranks::kPitch == kRanks);

/// The sums of a leaf of 16 tokens and 8 rank rows, to all CTAs of the cluster: two neighbouring
/// lanes make 16 bytes of each half of the tokens.
__device__ __forceinline__ void send_leaf(const float (&sum)[4], float* leaf, int count,
                                          device::Mbarrier* barrier) {
  const int lane = threadIdx.x % 32;
  const bool upper = lane % 2 == 1;  // this lane sends tokens 8 to 15
  const float own0 = upper ? sum[2] : sum[0], own1 = upper ? sum[3] : sum[1];
  const float other0 = __shfl_xor_sync(0xffffffffu, upper ? sum[0] : sum[2], 1);
  const float other1 = __shfl_xor_sync(0xffffffffu, upper ? sum[1] : sum[3], 1);
  const float4 v =
      upper ? make_float4(other0, other1, own0, own1) : make_float4(own0, own1, other0, other1);
  const int place = lane / 4 + (upper ? 8 : 0);
  if (place >= count) return;
  float* to = leaf + place * kRanks + lane % 4 / 2 * 4;
#pragma unroll
  for (int cta = 0; cta < kCtas; ++cta) device::send_to_cluster(to, v, barrier, cta);
}

/// kLeaves: of a CTA's turn at K.
template <class T, int kLeaves>
__global__ void __launch_bounds__(kThreads, 3)
    apply_decode_kernel(const __grid_constant__ ApplyParams params) {
  constexpr int kSteps = kK / 16 / kLeaves;  // MMA steps of a leaf
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ device::Mbarrier all_sent;
  const ExpandParams& p = params.expand;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cta = static_cast<int>(blockIdx.y);
  device::pdl_begin(p.early);

  // Coordinates
  const int index = p.tiles.first + static_cast<int>(blockIdx.z);
  const int early = early_token(p.groups, p.tiles, index, lane % kTokens);
  Tile tile;
  const bool live = find_cta_tile(p.groups, p.tiles, p.weights.num_adapters, index, &tile);
  const int token = tile_token(p.groups, p.tiles, tile, lane % kTokens, early);
  Block block = find_block(p, static_cast<int>(blockIdx.x));
  const int own_cols = p.cols / kCtas;
  block.first += cta * own_cols;
  block.y_col += cta * own_cols;
  block.cols = min(block.cols - cta * own_cols, own_cols);
  const std::int64_t hidden = p.weights.hidden;
  const int leaves = static_cast<int>(num_leaves(hidden));
  const int turns = one_turns(hidden);

  const SliceWeights w = weights_of(p, tile, block, live);
  if (w.rank == 0) return device::pdl_wait();  // all CTAs of the cluster do

  // Load: A and B do not depend on the predecessor.
  float* const sums = reinterpret_cast<float*>(smem);
  T* const x_tile = reinterpret_cast<T*>(sums + leaves * kTokens * kRanks);
  T* const a_tile = x_tile + turns * kTokens * kPitch;
  T* const b_tile = a_tile + turns * kRanks * kPitch;
  T* const h_tile = b_tile + own_cols * Ranks::kPitch;
  const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  const std::int64_t k = cta * kK + piece * 8;
  const auto copy = [&](T* to, const T* row, int turn) {
    const std::int64_t at = k + turn * (kCtas * kK);
    const bool there = at < hidden;  // K is a multiple of 8
    device::cp_async_16(device::smem_address(to + piece * 8), row + (there ? at : 0),
                        there ? 16 : 0);
  };
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = row0; i < kRanks; i += kRowStep) {
      if (i >= w.rank) break;
      copy(a_tile + (turn * kRanks + i) * kPitch, static_cast<const T*>(w.a) + i * w.a_row_stride,
           turn);
    }
  }
  const BCopy<T, Ranks, kThreads> b_copy(static_cast<const T*>(w.b) + block.first * w.b_row_stride,
                                         w.b_row_stride, w.rank);
  b_copy.block(b_tile, 0, block.cols);

  const int row_groups = ceil_div(w.rank, 8);
  if (threadIdx.x == 0) {
    all_sent.init(1);
    device::Mbarrier::fence_init();
    all_sent.arrive_and_expect(leaves * tile.count * row_groups * 32);
  }
  device::cluster_arrive();

  // All addresses before the wait.
  const T* x_rows[kTokens / kRowStep];
#pragma unroll
  for (int i = 0; i < kTokens / kRowStep; ++i) {
    const int t = __shfl_sync(0xffffffffu, token, i * kRowStep + row0);
    x_rows[i] = t < 0 ? nullptr : static_cast<const T*>(params.x.data) + t * params.x.row_stride;
    if (p.early && t >= 0 && k < hidden && piece % 8 == 0) device::prefetch_l2(x_rows[i] + k);
  }
  const int lane_col = warp * 32 + lane % 4 * 8;
  T* y_at[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, token, lane / 4 + 8 * half);
    there[half] = t >= 0;
    y_at[half] = static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + lane_col;
  }
  device::pdl_wait();
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < kTokens / kRowStep; ++i) {
      if (x_rows[i] == nullptr) continue;
      copy(x_tile + (turn * kTokens + i * kRowStep + row0) * kPitch, x_rows[i], turn);
    }
  }
  device::cp_async_commit();
  uint4 y[kPasses][2] = {};
  if (p.add_inputs) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        device::load_if(there[half] && lane_col + i * kThreads < block.cols, y[i][half],
                        y_at[half] + i * kThreads);
      }
    }
  }
  device::cp_async_wait<0>();
  __syncthreads();
  device::cluster_wait();  // all CTAs run, and their barriers are there

  // Shrink: a warp takes a leaf and 8 rank rows at a time.
#pragma unroll 1
  for (int task = warp; task < turns * kLeaves * row_groups; task += kWarps) {
    const int group = task % row_groups, part = task / row_groups;
    const int turn = part / kLeaves, leaf = part % kLeaves;
    const int which = (turn * kCtas + cta) * kLeaves + leaf;
    if (which >= leaves) break;
    const std::uint32_t x_from = device::smem_address(
        x_tile + (turn * kTokens + lane % 16) * kPitch + lane / 16 * 8 + leaf * kSteps * 16);
    const std::uint32_t a_from =
        device::smem_address(a_tile + (turn * kRanks + group * 8 + lane % 8) * kPitch +
                             lane / 8 * 8 + leaf * kSteps * 16);
    float sum[4] = {};
#pragma unroll 8
    for (int i = 0; i < kSteps; i += 2) {
      std::uint32_t a[4], x[2][4];
      device::ldmatrix_x4(a, a_from + i * 32);
      device::ldmatrix_x4(x[0], x_from + i * 32);
      device::ldmatrix_x4(x[1], x_from + (i + 1) * 32);
      device::mma_16816<T>(sum, x[0], a[0], a[1]);
      device::mma_16816<T>(sum, x[1], a[2], a[3]);
    }
    send_leaf(sum, sums + which * kTokens * kRanks + group * 8, tile.count, &all_sent);
  }
  all_sent.wait(0);

  // h: a thread makes two ranks of a token.
  if (const int place = threadIdx.x / 8, r = threadIdx.x % 8 * 2; place < tile.count) {
    const float* from = sums + place * kRanks + r;
    const int middle = static_cast<int>(first_leaves(leaves));
    float2 first = {}, second = {};
#pragma unroll 8
    for (int l = 0; l < middle; ++l) {
      const float2 v = *reinterpret_cast<const float2*>(from + l * kTokens * kRanks);
      first = make_float2(first.x + v.x, first.y + v.y);
    }
#pragma unroll 8
    for (int l = middle; l < leaves; ++l) {
      const float2 v = *reinterpret_cast<const float2*>(from + l * kTokens * kRanks);
      second = make_float2(second.x + v.x, second.y + v.y);
    }
    *reinterpret_cast<std::uint32_t*>(h_tile + Ranks::place(place, r / 8) + r % 8) =
        device::pack2<T>(r < w.rank ? first.x + second.x : 0.0f,
                         r + 1 < w.rank ? first.y + second.y : 0.0f);
  }
  __syncthreads();

  // Expand and store
  const std::uint32_t h_at = a_fragment_row<Ranks>(h_tile, 0);
  const std::uint32_t b_at = b_fragment_row<Ranks>(b_tile, warp * 32);
  const bool both = tile.count > 8;  // rows of the MMA's second half
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    if (i * kThreads + warp * 32 >= block.cols) break;
    float acc[1][4][4] = {};
    multiply<T, Ranks, 1>(acc, h_at, b_at + i * kThreads * Ranks::kPitch * 2, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both) break;
      if (!there[half] || lane_col + i * kThreads >= block.cols) continue;
      *reinterpret_cast<uint4*>(y_at[half] + i * kThreads) =
          add_products<T>(y[i][half], acc[0], half, w.scale, p.add_inputs);
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, int kLeaves>
void launch_leaves(const ApplyParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.expand.block_start[p.expand.weights.num_slices]), kCtas,
                static_cast<unsigned>(p.expand.tiles.num));
  l.cluster_y = kCtas;
  l.threads = kThreads;
  l.smem = static_cast<std::size_t>(one_smem(p.expand.weights.hidden, p.expand.cols / kCtas));
  l.per_sm = p.expand.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::launch<apply_decode_kernel<T, kLeaves>>("lora_apply", l, p);
}

}  // namespace

void apply_decode(const ApplyParams& p, Stream stream) {
  const ExpandParams& e = p.expand;
  check(e.groups.plan != nullptr && e.tiles.tile_tokens == kTokens && e.vector_y &&
            e.h.width <= kRanks && e.cols % (32 * kCtas) == 0 && e.cols <= kCtas * kOneMaxCols,
        "lora_apply: the one kernel takes a plan, tiles of 16 tokens, ranks up to ", kRanks,
        " and aligned rows");
  device::visit_dtype<Float16DTypes>(e.y.dtype, "lora_apply", [&](auto tag) {
    using T = typename decltype(tag)::type;
    leaf_size(e.weights.hidden) == kK ? launch_leaves<T, 1>(p, stream)
                                      : launch_leaves<T, 2>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
