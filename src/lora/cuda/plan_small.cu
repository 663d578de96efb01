// SPDX-License-Identifier: Apache-2.0
// Groups a batch by adapter: the plan of plan.cu for up to 2,048 tokens by single CTAs, for up to
// 16,384 by clusters of eight.
//
// sorted = argsort(token_adapter, stable), base tokens last     M tokens, L adapters
// bytes  = 4M (ids) + 4M (sorted) + 16 (T16 + T64 + G) (lists) + 64 T16 + 256 T64 (tokens)
// M=8192, L=4096: 1.5 MB, nearly all of it -1 in tiles that hold a token or two: 0.35 us, but an SM
//          stores no more than 20 bytes a cycle, so eight of them would take 5 us
// limit  : latency: one trip to memory; in a cluster one to the other CTAs' memory and a barrier
//
// A warp owns a run of tokens and one byte of every adapter's count, so that four dot products add
// up what the warps before it hold. CTAs of a cluster send each other their totals through
// distributed shared memory and each scans all of them for itself: histograms never go to L2, and
// no grid barrier is needed. (Sent they are there when the barrier is; reading them after it takes
// 0.2 us more.) Where the plan is large, several clusters or single CTAs all count the whole batch
// and write a part of it each.
#include <algorithm>
#include <climits>

#include "core/int_math.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "lora/cuda/plan_parts.cuh"
#include "mortar/lora.h"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostCtas = 8;  ///< of a cluster: the most that every device of sm_90 has room for
constexpr int kRounds = 4;    ///< tokens of a thread, at most: 32 of them fill a byte of a count
constexpr int kOwn = 8;       ///< adapters of a thread in the scan, as many as fit 16 bytes
/// What a CTA writes in about half a microsecond, in words that it clears and in tokens that it
/// puts into their places, and CTAs that run at once, in whole clusters.
constexpr std::int64_t kPartWords = 4 * 1024, kPartTokens = 128, kMaxCtas = 120;
static_assert(kCtaPlanTokens == kThreads * kRounds);
static_assert(kClusterPlanTokens == kMostCtas * kCtaPlanTokens && kClusterPlanTokens <= 65535);
static_assert(kThreads * kOwn >= kLoraMaxAdapters);
static_assert(sizeof(uint4) == kWarps && 32 * kRounds <= 255);

/// Eight values of 16 bits. Sums of them stay below 2^16, as there are fewer tokens.
struct Eight {
  uint4 v = {0, 0, 0, 0};

  __device__ __forceinline__ void add(const Eight& other) {
    v.x += other.v.x;
    v.y += other.v.y;
    v.z += other.v.z;
    v.w += other.v.w;
  }
  __device__ __forceinline__ int get(int i) const {
    const unsigned word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    return static_cast<int>(i % 2 == 0 ? word & 0xffffu : word >> 16);
  }
  /// Once for each i.
  __device__ __forceinline__ void put(int i, int value) {
    unsigned& word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    word |= static_cast<unsigned>(value) << (16 * (i % 2));
  }
};

/// Tokens, tiles of 16 and of 64, and groups: sums of 16 bits as well.
struct Numbers {
  unsigned tokens_and_tiles16 = 0, tiles64_and_groups = 0;

  Numbers() = default;
  __device__ __forceinline__ Numbers(unsigned low, unsigned high)
      : tokens_and_tiles16(low), tiles64_and_groups(high) {}
  /// Those of an adapter that has so many tokens.
  __device__ __forceinline__ explicit Numbers(int count) {
    const auto n = static_cast<unsigned>(count);
    tokens_and_tiles16 = n | ceil_div(n, 16u) << 16;
    tiles64_and_groups = ceil_div(n, 64u) | (n > 0 ? 1u << 16 : 0);
  }
  __device__ __forceinline__ int tokens() const {
    return static_cast<int>(tokens_and_tiles16 & 0xffffu);
  }
  __device__ __forceinline__ int tiles16() const {
    return static_cast<int>(tokens_and_tiles16 >> 16);
  }
  __device__ __forceinline__ int tiles64() const {
    return static_cast<int>(tiles64_and_groups & 0xffffu);
  }
  __device__ __forceinline__ int groups() const {
    return static_cast<int>(tiles64_and_groups >> 16);
  }
};
__device__ __forceinline__ Numbers operator+(Numbers a, Numbers b) {
  return {a.tokens_and_tiles16 + b.tokens_and_tiles16, a.tiles64_and_groups + b.tiles64_and_groups};
}
__device__ __forceinline__ Numbers operator-(Numbers a, Numbers b) {
  return {a.tokens_and_tiles16 - b.tokens_and_tiles16, a.tiles64_and_groups - b.tiles64_and_groups};
}
__device__ __forceinline__ Numbers shuffle_up(Numbers v, int d) {
  return {__shfl_up_sync(0xffffffffu, v.tokens_and_tiles16, d),
          __shfl_up_sync(0xffffffffu, v.tiles64_and_groups, d)};
}

/// The words of the plan that a cluster, or a single CTA, writes.
struct Part {
  int begin, end;

  __device__ __forceinline__ Part(const PlanLayout& layout, int index, int num) {
    const int first = static_cast<int>(layout.sorted), last = static_cast<int>(layout.scratch);
    const int each = round_up(ceil_div(last - first, num), kPlanEntryWords);
    begin = first + index * each;
    end = min(begin + each, last);
  }
  __device__ __forceinline__ bool has(int word) const { return word >= begin && word < end; }
};

/// The layout of so small a plan: 32 bits are enough.
struct Layout {
  int sorted, groups, tiles16, tiles64, tokens16, tokens64, max_tiles16, max_tiles64;

  __device__ __forceinline__ explicit Layout(const PlanLayout& l)
      : sorted(static_cast<int>(l.sorted)),
        groups(static_cast<int>(l.groups)),
        tiles16(static_cast<int>(l.tiles16)),
        tiles64(static_cast<int>(l.tiles64)),
        tokens16(static_cast<int>(l.tokens16)),
        tokens64(static_cast<int>(l.tokens64)),
        max_tiles16(static_cast<int>(l.max_tiles16)),
        max_tiles64(static_cast<int>(l.max_tiles64)) {}
};

/// A warp's byte of a bin. Its neighbours belong to other warps: all accesses are atomic.
struct ByteCell {
  unsigned* word;
  int shift;
  __device__ __forceinline__ ByteCell(uint4* bytes, int warp)
      : word(reinterpret_cast<unsigned*>(bytes) + warp / 4), shift(warp % 4 * 8) {}
  __device__ __forceinline__ int add(int n) const {
    return static_cast<int>(atomicAdd(word, static_cast<unsigned>(n) << shift) >> shift & 0xffu);
  }
  __device__ __forceinline__ int get() const { return add(0); }
};

/// The sum of the first `num` of 16 bytes.
__device__ __forceinline__ int sum_bytes(const uint4& v, int num) {
  const auto ones = [&](int word) {
    const int bytes = min(max(num - 4 * word, 0), 4);
    return bytes == 4 ? 0x01010101u : 0x01010101u & ((1u << 8 * bytes) - 1);
  };
  unsigned sum = __dp4a(v.x, ones(0), 0u);
  sum = __dp4a(v.y, ones(1), sum);
  sum = __dp4a(v.z, ones(2), sum);
  return static_cast<int>(__dp4a(v.w, ones(3), sum));
}

/// Tables in shared memory with one 16-bit number per adapter, eight of them to an `Eight`.
///
/// `totals` is a table per CTA of the cluster: how many tokens of each adapter that CTA holds. The
/// other five tables hold the results of the scan, and begin where `totals` does. That is safe
/// because thread i alone reads and writes the i-th `Eight` of every table: it reads the totals of
/// all CTAs into registers before it stores a result over them.
struct Tables {
  int words;                         ///< `Eight`s in one table
  Eight* totals;                     ///< tokens per adapter in each CTA
  Eight *count, *before;             ///< tokens in all CTAs; tokens in the CTAs before this one
  Eight *start, *first16, *first64;  ///< first place in `sorted`; first tile of 16 and of 64
  __device__ __forceinline__ Tables(void* at, int num_adapters)
      : words(ceil_div(num_adapters, kOwn)), totals(static_cast<Eight*>(at)) {
    count = totals;
    before = count + words;
    start = before + words;
    first16 = start + words;
    first64 = first16 + words;
  }
  static constexpr int num(int ctas) { return std::max(ctas, 5); }
  __device__ __forceinline__ static int at(const Eight* table, int adapter) {
    return reinterpret_cast<const unsigned short*>(table)[adapter];
  }
};

/// What a CTA tells the others beside its totals.
struct Summary {
  int active;          ///< tokens of adapters
  int bad, first_bad;  ///< ids outside [-1, L), and the first token that has one
};

template <int kCtas>
__global__ void __launch_bounds__(kThreads, 1)
    plan_small_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(16) uint4 counts[];  // [bin][warp], bytes; then the tables
  __shared__ Numbers warp_sums[kWarps];
  __shared__ Summary summary, summaries[kCtas];
  __shared__ int base_start;  // place of the CTA's first base token
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x;
  const int cta = blockIdx.y;
  const int thread = cta * kThreads + own, num_threads = kCtas * kThreads;
  const Layout layout(p.layout);
  const Part part(p.layout, blockIdx.x, gridDim.x);
  const int bins = p.num_adapters + 1;  // the last bin holds base tokens
  const Tables tables(counts + bins, p.num_adapters);
  Eight* const own_totals = tables.totals + cta * tables.words;
  if constexpr (kCtas > 1) device::cluster_arrive();

  // Load
  const int num_rounds = p.warp_tokens / 32;
  const int first = cta * p.cta_tokens + warp * p.warp_tokens;
  const int last = min(static_cast<int>(p.num_tokens), (cta + 1) * p.cta_tokens);
  int bin[kRounds];
  load_ids(p.token_adapter, bin, [&](int i) {
    const int token = first + 32 * i + lane;
    return i < num_rounds && token < last ? token : -1;
  });
  if (own == 0) summary = {0, 0, INT_MAX};
  for (int b = own; b < bins; b += kThreads) counts[b] = make_uint4(0, 0, 0, 0);
  if (own < tables.words) own_totals[own] = {};
  clear_tile_tokens(p, part.begin, part.end, thread, num_threads);
  __syncthreads();

  // Count
  int rank[kRounds];
  int num_active = 0;
  const int num_bits = 32 - __clz(bins);  // of a bin, and of `bins` for no token
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (i >= num_rounds) break;
    const int token = first + 32 * i + lane, id = bin[i];
    const bool live = token < last, bad = live && (id < -1 || id >= p.num_adapters);
    bin[i] = !live ? bins : id < 0 || bad ? p.num_adapters : id;
    if (bad) {
      atomicAdd(&summary.bad, 1);
      atomicMin(&summary.first_bad, token);
    }
    num_active += __popc(__ballot_sync(0xffffffffu, live && bin[i] < p.num_adapters));
    unsigned peers;
    rank[i] =
        enter_bin(bin[i], live, ByteCell(counts + min(bin[i], bins - 1), warp), num_bits, &peers);
    if (live && bin[i] < p.num_adapters && lane == __ffs(peers) - 1) {
      const auto b = static_cast<unsigned>(bin[i]);
      atomicAdd(reinterpret_cast<int*>(own_totals) + b / 2, __popc(peers) << 16 * (b % 2));
    }
  }
  if (lane == 0) atomicAdd(&summary.active, num_active);
  if constexpr (kCtas > 1) device::cluster_wait();  // all CTAs run, so their memory is there
  __syncthreads();
  if constexpr (kCtas > 1) {
    if (own < tables.words) {
      const Eight mine = own_totals[own];
#pragma unroll
      for (int c = 1; c < kCtas; ++c) {
        device::in_cluster(own_totals, (cta + c) % kCtas)[own] = mine;
      }
    }
    if (own >= kThreads - kCtas) device::in_cluster(summaries, own % kCtas)[cta] = summary;
    device::cluster_arrive();
    device::cluster_wait();
  }

  // Combine: a thread takes eight adapters, of all CTAs at once.
  Eight count, before;
  if (own < tables.words) {
#pragma unroll
    for (int c = 0; c < kCtas; ++c) {
      const Eight theirs = tables.totals[c * tables.words + own];
      if (c < cta) before.add(theirs);
      count.add(theirs);
    }
  }
  Summary all = {};
  if (warp == kWarps - 1) {
    const Summary other = kCtas > 1 ? summaries[lane % kCtas] : summary;
    const bool there = lane < kCtas;
    all.active = __reduce_add_sync(0xffffffffu, there ? other.active : 0);
    all.bad = __reduce_add_sync(0xffffffffu, there ? other.bad : 0);
    all.first_bad = __reduce_min_sync(0xffffffffu, other.first_bad);
    const int active_before = __reduce_add_sync(0xffffffffu, lane < cta ? other.active : 0);
    if (lane == 0) base_start = all.active + cta * p.cta_tokens - active_before;
  }
  Numbers own_sum;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own_sum = own_sum + Numbers(count.get(i));
  Numbers totals;
  Numbers next = exclusive_scan<kThreads>(own_sum, warp_sums, &totals);
  const auto put = [&](int list, int index, int adapter, int at, int n, int ordinal) {
    if (!part.has(list + kPlanEntryWords * index)) return;
    put_entry(p.plan + list, index, adapter, at, n, ordinal);
  };
  if (own < tables.words) {
    Eight start, first16, first64;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = count.get(i);
      start.put(i, next.tokens());
      first16.put(i, next.tiles16());
      first64.put(i, next.tiles64());
      if (n > 0 && own % kCtas == cta) {
        put(layout.groups, next.groups(), own * kOwn + i, next.tokens(), n, 0);
      }
      next = next + Numbers(n);
    }
    tables.count[own] = count;
    tables.before[own] = before;
    tables.start[own] = start;
    tables.first16[own] = first16;
    tables.first64[own] = first64;
  }
  __syncthreads();

  // Scatter
  const auto put_token = [&](int word, int token) {
    if (part.has(word)) p.plan[word] = token;
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (i >= num_rounds || bin[i] == bins) break;
    const int token = first + 32 * i + lane;
    int within = sum_bytes(counts[bin[i]], warp) + rank[i];
    if (bin[i] == p.num_adapters) {
      put_token(layout.sorted + base_start + within, token);
      continue;
    }
    within += Tables::at(tables.before, bin[i]);
    const int at = Tables::at(tables.start, bin[i]) + within;
    const int left = Tables::at(tables.count, bin[i]) - within;
    put_token(layout.sorted + at, token);
    const auto place = [&](const Eight* table, int size, int tokens, int tiles) {
      const int tile = Tables::at(table, bin[i]) + within / size;
      put_token(tokens + size * tile + within % size, token);
      if (within % size == 0) put(tiles, tile, bin[i], at, min(left, size), within / size);
    };
    place(tables.first16, 16, layout.tokens16, layout.tiles16);
    place(tables.first64, 64, layout.tokens64, layout.tiles64);
  }
  const auto clear_rest = [&](int list, int num, int most) {
    clear_list(p.plan + list, max(num, (part.begin - list) / kPlanEntryWords),
               min(most, (part.end - list) / kPlanEntryWords), thread, num_threads);
  };
  clear_rest(layout.tiles16, totals.tiles16(), layout.max_tiles16);
  clear_rest(layout.tiles64, totals.tiles64(), layout.max_tiles64);
  if (thread == kThreads - 1 && blockIdx.x == 0) {
    const int4 sums =
        make_int4(totals.tokens(), totals.tiles16(), totals.tiles64(), totals.groups());
    write_header(p, sums, all.bad, all.first_bad);
  }
  // The next kernel may start as soon as all CTAs have left and read the plan from L2 at once.
  __threadfence();
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

namespace {

template <int kCtas>
bool plan_by(PlanParams p, Stream stream) {
  const int tokens = static_cast<int>(p.num_tokens);
  p.warp_tokens = 32 * std::max(1, ceil_div(tokens, kCtas * kThreads));
  p.cta_tokens = p.warp_tokens * ceil_div(tokens, kCtas * p.warp_tokens);
  const int words = (p.num_adapters + 1) + Tables::num(kCtas) * ceil_div(p.num_adapters, kOwn);
  const std::int64_t parts = std::max(ceil_div<std::int64_t>(p.layout.scratch, kCtas * kPartWords),
                                      ceil_div<std::int64_t>(tokens, kCtas * kPartTokens));
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(std::min(parts, kMaxCtas / kCtas)), kCtas);
  l.cluster_y = kCtas;
  l.threads = kThreads;
  l.smem = static_cast<std::size_t>(words) * sizeof(uint4);
  l.stream = stream;
  if (!device::fits<plan_small_kernel<kCtas>>("lora_plan", l.smem)) return false;
  device::launch<plan_small_kernel<kCtas>>("lora_plan", l, p);
  return true;
}

}  // namespace

bool plan_small(const PlanParams& p, Stream stream) {
  if (p.num_tokens <= kCtaPlanTokens) return plan_by<1>(p, stream);
  const bool clusters = device::current_device().arch == 90;
  return clusters && p.num_tokens <= kClusterPlanTokens && plan_by<kMostCtas>(p, stream);
}

}  // namespace mortar::lora::cuda
