// SPDX-License-Identifier: Apache-2.0
// y (+)= (x A^T) B^T for few tokens per adapter and ranks up to 64 in one launch, on sm_90.
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
// a time, and send the sums of their leaves to each other through distributed shared memory: few to
// all, more to the one CTA that makes this value of h and sends it to all. They are added as
// leaf_size in problem.h says, and every CTA expands its own columns: the bits of shrink_decode.cu
// and expand_decode.cu, without a second kernel that waits for the first to end. B and y are on
// their way by then.
#include <type_traits>

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
constexpr int kCtas = kOneCluster;
constexpr int kK = kDecodeK;          ///< elements of K per CTA and turn
constexpr int kPitch = kDecodeK + 8;  ///< elements; free of bank conflicts
constexpr int kPieces = kK / 8;       ///< 16-byte pieces of a row
constexpr int kRowStep = kThreads / kPieces;
constexpr int kPasses =
    kOneMaxCols / kThreads;       ///< times that the CTA's warps take 32 columns each
constexpr int kStepsAtOnce = 16;  ///< MMA steps of the shortest leaf

/// Most sums of a leaf that go to all CTAs of the cluster, each of which makes all of h of them.
/// More would take longer to send than to send on: then each goes to the one CTA that makes this
/// value of h for all others.
constexpr int kMostToAll = 64;

/// What a CTA makes of h where sums of a leaf go to one CTA alone: 8 ranks of `kOwned` tokens.
template <class Ranks>
struct Share {
  static constexpr int kOctets = Ranks::kPitch / 8;  ///< of ranks
  static constexpr int kOwned = kTokens * kOctets / kCtas;
  static constexpr int kLeafElts =  ///< room for sums of a leaf
      8 * kOwned > kMostToAll ? 8 * kOwned : kMostToAll;
  static_assert(kCtas % kOctets == 0);
};

/// Sends the sums of a leaf of 16 tokens and 8 ranks to the CTAs that make h of them; `octets`:
/// those of the adapter's ranks, of which this is `octet`. Two neighbouring lanes make 16 bytes of
/// each half of the tokens.
template <class Ranks>
__device__ __forceinline__ void send_leaf(const float (&sum)[4], float* leaf, int octet, int octets,
                                          int count, bool to_all, device::Mbarrier* barrier) {
  using S = Share<Ranks>;
  const int lane = threadIdx.x % 32;
  const bool upper = lane % 2 == 1;  // this lane sends tokens 8 to 15
  const float own0 = upper ? sum[2] : sum[0], own1 = upper ? sum[3] : sum[1];
  const float other0 = __shfl_xor_sync(0xffffffffu, upper ? sum[0] : sum[2], 1);
  const float other1 = __shfl_xor_sync(0xffffffffu, upper ? sum[1] : sum[3], 1);
  const float4 v =
      upper ? make_float4(other0, other1, own0, own1) : make_float4(own0, own1, other0, other1);
  const int place = lane / 4 + (upper ? 8 : 0), first = lane % 4 / 2 * 4;
  if (place >= count) return;
  if (to_all) {
    float* to = leaf + (place * octets + octet) * 8 + first;
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) device::send_to_cluster(to, v, barrier, cta);
  } else {
    float* to = leaf + place % S::kOwned * 8 + first;
    device::send_to_cluster(to, v, barrier, octet + place / S::kOwned * S::kOctets);
  }
}

/// The sum over all leaves of two values, in the order of leaf_size (problem.h): the two halves
/// side by side. Of an odd number x lies behind the last one, and is read without a branch.
template <class Ranks>
__device__ __forceinline__ float2 sum_leaves(const float* from, int leaves) {
  constexpr int kPitchOfLeaves = Share<Ranks>::kLeafElts;
  const int middle = static_cast<int>(first_leaves(leaves));
  const float* behind = from + middle * kPitchOfLeaves;
  float2 first = {}, second = {};
#pragma unroll 4
  for (int l = 0; l < middle; ++l, from += kPitchOfLeaves, behind += kPitchOfLeaves) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    const float2 u = *reinterpret_cast<const float2*>(behind);
    first = make_float2(first.x + v.x, first.y + v.y);
    if (middle + l < leaves) second = make_float2(second.x + u.x, second.y + u.y);
  }
  return make_float2(first.x + second.x, first.y + second.y);
}

/// With leaves of K, and how often a cluster takes its share of it: divisions.
struct OneParams {
  ApplyParams apply;
  int leaves = 0, turns = 0;
};

/// The tile as find_cta_tile() finds it; with a plan the CTA does what it can `meanwhile`.
template <class Meanwhile>
__device__ __forceinline__ bool find_meanwhile(const ExpandParams& p, int index, Tile* tile,
                                               Meanwhile&& meanwhile) {
  const std::int32_t* plan = p.groups.plan;
  int4 head = {}, entry = {};
  if (plan != nullptr) head = __ldcg(reinterpret_cast<const int4*>(plan));
  if (plan != nullptr) entry = __ldcg(reinterpret_cast<const int4*>(plan + p.tiles.list) + index);
  meanwhile();
  const std::int64_t adapters = p.weights.num_adapters;
  if (plan == nullptr) return find_cta_tile(p.groups, p.tiles, adapters, index, tile);
  *tile = {entry.x, entry.y, entry.z};
  return is_plan_of(head, p.tiles, adapters) && index < head.z;
}

/// As weights_of(), of a slice that is known already, of stacked weights without ranks or scales.
template <class T>
__device__ __forceinline__ SliceWeights known_weights(const ExpandParams& p, int adapter, int slice,
                                                      const StackedSlice& known) {
  const WeightsView& all = p.weights;
  const bool plain = all.table == nullptr && all.ranks == nullptr && all.scales == nullptr;
  SliceWeights w{static_cast<const T*>(known.a) + adapter * known.a_adapter_stride,
                 static_cast<const T*>(known.b) + adapter * known.b_adapter_stride,
                 known.a_row_stride, known.b_row_stride, known.rank};
  if (!plain) w = all.get(adapter, slice);
  w.rank = min(w.rank, p.h.width);
  w.scale *= p.scale;
  return w;
}

template <class T, class Ranks>
__global__ void __launch_bounds__(kThreads, kOnePerSm)
    apply_decode_kernel(const __grid_constant__ OneParams params) {
  using S = Share<Ranks>;
  constexpr int kRanks = Ranks::kPitch;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ device::Mbarrier all_sent, h_sent;
  const ExpandParams& p = params.apply.expand;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cta = static_cast<int>(blockIdx.y);
  device::pdl_begin(p.early);

  // Coordinates
  const int index = p.tiles.first + static_cast<int>(blockIdx.z);
  const int early = early_token(p.groups, p.tiles, index, lane % kTokens);
  Tile tile;
  const std::int64_t hidden = p.weights.hidden;
  Block block;
  StackedSlice slice;
  int own_cols = 0;  // of the last columns fewer
  const int leaves = params.leaves, turns = params.turns;
  const bool live = find_meanwhile(p, index, &tile, [&] {
    block = find_block(p, static_cast<int>(blockIdx.x));
    own_cols = (block.cols + kCtas * 32 - 1) / (kCtas * 32) * 32;
    block.first += cta * own_cols;
    block.y_col += cta * own_cols;
    block.cols = min(block.cols - cta * own_cols, own_cols);
    slice = p.weights.slices[block.slice];
    if (threadIdx.x == 0) {
      all_sent.init(1);
      h_sent.init(1);
      device::Mbarrier::fence_init();
    }
  });
  const int token = tile_token(p.groups, p.tiles, tile, lane % kTokens, early);
  const int leaf_steps = static_cast<int>(leaf_size(hidden)) / 16;
  const int log_turn_leaves = leaf_steps == kK / 16 ? 0 : 1, log_turns = 32 - __clz(turns - 1);

  SliceWeights w;
  if (live) w = known_weights<T>(p, tile.adapter, block.slice, slice);
  if (w.rank == 0) return device::pdl_wait();  // all CTAs of the cluster do

  // Load: A and B do not depend on the predecessor.
  float* const sums = reinterpret_cast<float*>(smem);
  T* const x_tile = reinterpret_cast<T*>(sums + leaves * S::kLeafElts);
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

  const int octets = ceil_div(w.rank, 8), steps = ceil_div(w.rank, 16);
  // What this CTA makes of h: all of it, or tokens from `own_token` on, ranks from 8 own_octet on.
  const bool to_all = tile.count * octets * 8 <= kMostToAll;
  const int own_octet = cta % S::kOctets, own_token = cta / S::kOctets * S::kOwned;
  const int own_count = max(min(tile.count - own_token, S::kOwned), 0);
  if (threadIdx.x == 0) {
    const int sent = to_all ? tile.count * octets : own_octet < octets ? own_count : 0;
    all_sent.arrive_and_expect(leaves * sent * 32);
    if (!to_all) h_sent.arrive_and_expect(tile.count * steps * 32);
  }
  device::cluster_arrive_relaxed();  // fence_init has shown the barriers to the cluster

  // Addresses of x before the wait. A thread asks for 128 bytes of the token that it knows.
  const T* own_x = static_cast<const T*>(params.apply.x.data);
  own_x += token * params.apply.x.row_stride;
  const unsigned own_tokens = __ballot_sync(0xffffffffu, token >= 0) >> row0;
  const T* x_rows[kTokens / kRowStep];
#pragma unroll
  for (int i = 0; i < kTokens / kRowStep; ++i) {
    x_rows[i] = reinterpret_cast<const T*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own_x), i * kRowStep + row0));
  }
  const int line = static_cast<int>(threadIdx.x) / kTokens * 64, at = cta * kK + line;
  if (p.early && token >= 0 && line < kK && at < hidden) device::prefetch_l2(own_x + at);
  device::pdl_wait();
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < kTokens / kRowStep; ++i) {
      if ((own_tokens >> (i * kRowStep) & 1) == 0) continue;
      copy(x_tile + (turn * kTokens + i * kRowStep + row0) * kPitch, x_rows[i], turn);
    }
  }
  device::cp_async_commit();
  const int lane_col = warp * 32 + lane % 4 * 8;
  T* y_at[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, token, lane / 4 + 8 * half);
    there[half] = t >= 0;
    y_at[half] = static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + lane_col;
  }
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

  // Shrink: a warp takes a leaf and 8 rank rows at a time, or twice 8 rows of the same leaf side by
  // side, as each step of a chain waits for the one before it.
  const int log_leaves = log_turns + log_turn_leaves;
  const int next_octet = kWarps >> log_leaves, tasks = octets << log_leaves;
#pragma unroll 1
  for (int task = warp; task < tasks; task += (kRanks == 64 ? 2 : 1) * kWarps) {
    const int leaf = task & ((1 << log_turn_leaves) - 1);
    const int turn = (task >> log_turn_leaves) & ((1 << log_turns) - 1);
    const int octet = task >> log_leaves;
    const int which = ((turn * kCtas + cta) << log_turn_leaves) + leaf;
    if (turn >= turns || which >= leaves) continue;
    const std::uint32_t x_from = device::smem_address(
        x_tile + (turn * kTokens + lane % 16) * kPitch + lane / 16 * 8 + leaf * leaf_steps * 16);
    const std::uint32_t a_from =
        device::smem_address(a_tile + (turn * kRanks + octet * 8 + lane % 8) * kPitch +
                             lane / 8 * 8 + leaf * leaf_steps * 16);
    const auto multiply = [&](auto at_once) {
      constexpr int kAtOnce = decltype(at_once)::value;
      float sum[kAtOnce][4] = {};
      std::uint32_t x_next = x_from, a_next = a_from;
      const std::uint32_t a_step = next_octet * (8 * kPitch * 2);
#pragma unroll 1
      for (int step = 0; step < leaf_steps; step += kStepsAtOnce) {
#pragma unroll
        for (int i = 0; i < kStepsAtOnce; i += 2, x_next += 64, a_next += 64) {
          std::uint32_t x[2][4];
          device::ldmatrix_x4(x[0], x_next);
          device::ldmatrix_x4(x[1], x_next + 32);
#pragma unroll
          for (int g = 0; g < kAtOnce; ++g) {
            std::uint32_t a[4];
            device::ldmatrix_x4(a, a_next + g * a_step);
            device::mma_16816<T>(sum[g], x[0], a[0], a[1]);
            device::mma_16816<T>(sum[g], x[1], a[2], a[3]);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        send_leaf<Ranks>(sum[g], sums + which * S::kLeafElts, octet + g * next_octet, octets,
                         tile.count, to_all, &all_sent);
      }
    };
    if (kRanks == 64 && task + kWarps < tasks) {
      multiply(std::integral_constant<int, 2>{});
    } else {
      multiply(std::integral_constant<int, 1>{});
    }
  }
  all_sent.wait(0);

  // h: a thread makes two ranks of a token, zeros past the adapter's up to a whole MMA step.
  const int place = to_all ? warp : static_cast<int>(threadIdx.x) / 4, pair = lane % 4;
  const int r = to_all ? lane * 2 : own_octet * 8 + pair * 2;
  const bool mine = place < (to_all ? tile.count : own_count) && r < 16 * steps;
  float2 value = {};
  if (mine && r < w.rank) {
    value =
        sum_leaves<Ranks>(sums + (to_all ? place * octets * 8 + r : place * 8 + pair * 2), leaves);
  }
  const std::uint32_t own = device::pack2<T>(value.x, r + 1 < w.rank ? value.y : 0.0f);
  if (to_all) {
    if (mine) {
      *reinterpret_cast<std::uint32_t*>(h_tile + Ranks::place(place, r / 8) + r % 8) = own;
    }
    __syncthreads();
  } else {
    float4 piece_of_h;  // a quad has 8 ranks of a token, and each of its lanes sends to two CTAs
    piece_of_h.x = __uint_as_float(__shfl_sync(0xffffffffu, own, 0, 4));
    piece_of_h.y = __uint_as_float(__shfl_sync(0xffffffffu, own, 1, 4));
    piece_of_h.z = __uint_as_float(__shfl_sync(0xffffffffu, own, 2, 4));
    piece_of_h.w = __uint_as_float(__shfl_sync(0xffffffffu, own, 3, 4));
    if (mine) {
      auto* to = reinterpret_cast<float*>(h_tile + Ranks::place(own_token + place, own_octet));
      device::send_to_cluster(to, piece_of_h, &h_sent, pair);
      device::send_to_cluster(to, piece_of_h, &h_sent, pair + 4);
    }
    h_sent.wait(0);
  }

  // Expand and store
  const std::uint32_t h_at = a_fragment_row<Ranks>(h_tile, 0);
  const std::uint32_t b_at = b_fragment_row<Ranks>(b_tile, warp * 32);
  const bool both = tile.count > 8;  // rows of the MMA's second half
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    if (i * kThreads + warp * 32 >= block.cols) break;
    float acc[1][4][4] = {};
    multiply<T, Ranks, 1>(acc, h_at, b_at + i * kThreads * kRanks * 2, kRanks == 16 ? 1 : steps);
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

template <class T, class Ranks>
void launch_ranks(const ApplyParams& p, Stream stream) {
  const std::int64_t hidden = p.expand.weights.hidden;
  const OneParams one{p, static_cast<int>(num_leaves(hidden)), one_turns(hidden)};
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.expand.block_start[p.expand.weights.num_slices]), kCtas,
                static_cast<unsigned>(p.expand.tiles.num));
  l.cluster_y = kCtas;
  l.threads = kThreads;
  l.smem = static_cast<std::size_t>(one_smem(hidden, p.expand.cols / kCtas, Ranks::kPitch));
  l.per_sm = p.expand.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::launch<apply_decode_kernel<T, Ranks>>("lora_apply", l, one);
}

}  // namespace

void apply_decode(const ApplyParams& p, Stream stream) {
  const ExpandParams& e = p.expand;
  check(e.tiles.tile_tokens == kTokens && e.vector_y && e.h.width <= kOneMaxRank &&
            e.cols % (32 * kCtas) == 0 && e.cols <= kCtas * kOneMaxCols,
        "lora_apply: the one kernel takes tiles of 16 tokens, ranks up to ", kOneMaxRank,
        " and aligned rows");
  device::visit_dtype<Float16DTypes>(e.y.dtype, "lora_apply", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (e.h.width <= 16) return launch_ranks<T, RankTile<1>>(p, stream);
    if (e.h.width <= 32) return launch_ranks<T, RankTile<2>>(p, stream);
    launch_ranks<T, RankTile<3>>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
