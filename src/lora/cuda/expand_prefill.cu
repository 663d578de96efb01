// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for many tokens per adapter, on tensor cores, B and y of one 16-bit type.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h
// FLOP   = 2 M N r: never the limit below r of about 256
// 8192 tokens, 16 adapters, qkv: 204 MB -> 48 us (r16), 214 MB -> 50 us (r64)
// limit  : DRAM; y is 95 % of the bytes
//
// The grid is as large as fits at once. A CTA walks over steps of one tile of 64 tokens and one
// block of 128 columns; y, h and (where the adapter or the block changes) B of the next steps are
// in flight in a ring of cp.async stages meanwhile, and the tokens of the tiles beyond those, so
// that nothing waits for a chain of loads. Neighbouring CTAs have neighbouring blocks of the same
// tokens: whole rows of y are open at a time. Columns: inside groups of 32, MMA fragment j takes
// columns 8a + 2j + b, so that a lane's results are 8 consecutive columns: 16 bytes, which it
// stores itself (through shared memory, in runs of 256 bytes as y comes, r64 took 97 us instead of
// 94).
#include <algorithm>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_prefill_tile.cuh"
#include "lora/cuda/expand_scout.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace prefill_expand;

/// Where a step's tile and its data lie.
template <class Tr>
struct Cursor {
  int slot = 0, stage = 0;
  __device__ __forceinline__ void next() {
    slot = slot + 1 == Tr::kSlots ? 0 : slot + 1;
    stage = stage + 1 == Tr::kStages ? 0 : stage + 1;
  }
};

/// A thread's pieces of a caller's h of float32, on their way.
template <class Ranks>
struct HeldPieces {
  static constexpr int kStep = kWorkers >> Ranks::kLogPieces, kRows = ceil_div(kTokens, kStep);
  uint4 quad[kRows][2];
};

template <class Tr>
struct Worker {
  using T = typename Tr::T;
  using Ranks = typename Tr::Ranks;
  /// Places from those of a warp to the next one's, and between a thread's two. The warps of few
  /// tokens are neighbours, of which the SM's schedulers have as many each.
  static constexpr int kWarpPlaces = Ranks::kInBlocks ? 8 : 16;
  static constexpr int kHalfPlaces = Ranks::kInBlocks ? kTokens / 2 : 8;
  const ExpandParams& p;
  unsigned char* ring;
  int first_row;
  char* y;                         ///< at this thread's 8 columns of a block
  int piece, row0;                 ///< its part of copying y: those columns of every 16th row
  int y_at;                        ///< and their place in a stage
  std::uint32_t ring_at;           ///< shared-memory address of the ring
  int warp_m, warp_n;              ///< its warp's part of the tokens and of the columns
  int out_row, out_piece, out_at;  ///< its first token there, its first 8 columns, and their place

  __device__ __forceinline__ Worker(const ExpandParams& params, unsigned char* smem, int first)
      : p(params),
        ring(smem),
        first_row(first),
        y(static_cast<char*>(params.y.data) + threadIdx.x % 16 * 16),
        piece(threadIdx.x % 16),
        row0(threadIdx.x / 16),
        y_at(y_place(threadIdx.x / 16, threadIdx.x % 16)),
        ring_at(device::smem_address(smem)),
        warp_m(Ranks::kInBlocks ? warp_index() % kWarpsM : warp_index() / kWarpsN),
        warp_n(Ranks::kInBlocks ? warp_index() / kWarpsM : warp_index() % kWarpsN),
        out_row(warp_m * kWarpPlaces + static_cast<int>(threadIdx.x) % 32 / 4),
        out_piece(warp_n * 8 + static_cast<int>(threadIdx.x) % 4),
        out_at(y_place(out_row, out_piece)) {}

  __device__ __forceinline__ unsigned char* y_stage(int stage) const {
    return ring + stage * Tr::kStageBytes;
  }
  __device__ __forceinline__ T* h_stage(int stage) const {
    return reinterpret_cast<T*>(y_stage(stage) + kYBytes);
  }
  __device__ __forceinline__ T* b_tile(int slot) const {
    return reinterpret_cast<T*>(ring + Tr::kStages * Tr::kStageBytes + slot * Tr::kBBytes);
  }

  __device__ __forceinline__ void issue_b(const StepSlot& t) const {
    if (t.live && t.fresh) copy_b(t);
  }
  /// The same of a next step whose slot the last step has used.
  __device__ __forceinline__ void issue_late_b(const StepSlot& t) const {
    if (t.live && t.late) copy_b(t);
  }
  __device__ __forceinline__ void copy_b(const StepSlot& t) const {
    const BCopy<T, Ranks, kWorkers, Tr::kBy8> copy(static_cast<const T*>(t.b), t.b_stride, t.rank);
    copy.block(b_tile(t.b_slot), 0, t.cols);
  }

  /// Asks for y of a step in L2, two lines a row. By the warp that has prepared it.
  __device__ __forceinline__ void ask_for_rows(const StepSlot& t) const {
    static_assert(kCols * 2 == 2 * 128, "two lines a row");
    if (!t.live) return;
#pragma unroll
    for (int i = 0; i < 2 * kTokens / 32; ++i) {
      const int row = static_cast<int>(threadIdx.x) % 32 + i / 2 * 32, line = i % 2;
      if (line * 64 >= t.cols || t.tokens[row] < 0) continue;
      device::prefetch_l2(static_cast<const char*>(p.y.data) + t.y[row] + line * 128);
    }
  }

  /// y and h of a step.
  __device__ __forceinline__ void issue_rows(const StepSlot& t, int stage) const {
    if (!t.live) return;
    const std::uint32_t at = ring_at + stage * Tr::kStageBytes;
    if (p.add_inputs && piece * 8 < t.cols) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (16 * i >= t.entry.z) break;  // no place of these 16 has a token
        const int row = row0 + 16 * i;
        const bool there = (t.there[i / 2] >> row % 32 & 1) != 0;
        const char* from = y + t.y[row];
        const int place = y_at + i * 16 * kCols * 2;
        if constexpr (Tr::kVectorY) {
          // A row without a token is filled with zeros: no branch.
          device::cp_async_16(at + place, from, there ? 16 : 0);
        } else if (there) {
          *reinterpret_cast<uint4*>(y_stage(stage) + place) =
              device::load_some<T, 8>(reinterpret_cast<const T*>(from), t.cols - piece * 8)
                  .piece(0);
        }
      }
    }
    const Tile tile{t.entry.x, t.entry.y, t.entry.z};
    if constexpr (Tr::kOwnH) {
      constexpr int kStep = kWorkers >> Ranks::kLogPieces;
      static_assert(kStep % 8 == 0, "rows of one thread have one swizzle");
      const int column = Ranks::own_piece() * 8, row = Ranks::own_row();
      const int bytes = piece_bytes(t.rank - column);
      const T* src = static_cast<const T*>(p.h.data) + t.h_at + (bytes > 0 ? column : 0) +
                     (tile.start - first_row + row) * p.h.row_stride;
      const int count = column < round_up(t.rank, 16) ? tile.count : 0;
      const std::uint32_t dst =
          at + kYBytes + 2 * Ranks::place(Ranks::row_of(row), Ranks::own_piece());
#pragma unroll
      for (int i = 0; i < kTokens; i += kStep) {
        if (row + i < count) {
          device::cp_async_16(dst + Ranks::row_of(i) * Ranks::kPitch * 2, src + i * p.h.row_stride,
                              bytes);
        }
      }
    } else if (!holds_h()) {
      copy_h<T, Ranks, kWorkers>(p.h, tile, t.tokens, first_row, t.h_at, t.rank, h_stage(stage));
    }
  }

  /// Whether h is such that a thread can have all of its pieces on their way while it computes.
  __device__ __forceinline__ bool holds_h() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if (Ranks::kLogPieces == 4) return false;  // without wgmma it would spill
#endif
    return !Tr::kOwnH && p.h.rows_by_16 && p.h.dtype == DType::kFloat32;
  }
  /// Asks for h of a step.
  __device__ __forceinline__ void load_h(const StepSlot& t, HeldPieces<Ranks>& held) const {
    if (!t.live) return;
    const int column = Ranks::own_piece() * 8, left = t.rank - column;
    const auto* from = static_cast<const float*>(p.h.data) + t.h_at + (left > 0 ? column : 0);
#pragma unroll
    for (int i = 0; i < HeldPieces<Ranks>::kRows; ++i) {
      const int row = Ranks::own_row() + i * HeldPieces<Ranks>::kStep;
      const int token = row < t.entry.z ? t.tokens[row] : -1;
      const float* at = from + (token < 0 ? 0 : token) * p.h.row_stride;
      device::load_if(token >= 0 && left > 0, held.quad[i][0], at);
      device::load_if(token >= 0 && left > 4, held.quad[i][1], at + 4);
    }
  }
  /// Puts it in place, rounded, zeros past the rank.
  __device__ __forceinline__ void store_h(const StepSlot& t, int stage,
                                          const HeldPieces<Ranks>& held) const {
    if (!t.live || Ranks::own_piece() * 8 >= round_up(t.rank, 16)) return;
    const int left = t.rank - Ranks::own_piece() * 8;
#pragma unroll
    for (int i = 0; i < HeldPieces<Ranks>::kRows; ++i) {
      const int row = Ranks::own_row() + i * HeldPieces<Ranks>::kStep;
      if (row >= t.entry.z) continue;
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4& quad = held.quad[i][j / 2];
        const float low = __uint_as_float(j % 2 == 0 ? quad.x : quad.z);
        const float high = __uint_as_float(j % 2 == 0 ? quad.y : quad.w);
        words[j] = device::pack2<T>(2 * j < left ? low : 0.0f, 2 * j + 1 < left ? high : 0.0f);
      }
      *reinterpret_cast<uint4*>(h_stage(stage) +
                                Ranks::place(Ranks::row_of(row), Ranks::own_piece())) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  /// Where nothing is added to: y of all stages is -0 from here on, as x + -0 is x.
  __device__ __forceinline__ void fill_rows() const {
    const uint4 none = make_uint4(kMinusZeros, kMinusZeros, kMinusZeros, kMinusZeros);
    for (int i = threadIdx.x; i < Tr::kStages * kYBytes / 16; i += kWorkers) {
      const int stage = i / (kYBytes / 16), place = i % (kYBytes / 16);
      reinterpret_cast<uint4*>(y_stage(stage))[place] = none;
    }
  }

  __device__ __forceinline__ void compute(const StepSlot& t, int stage) const {
    if (uniform(t.live) == 0 || warp_n * 64 >= uniform(t.cols)) return;
    const int places = uniform(t.entry.z) - warp_m * kWarpPlaces;  // from its first one on
    if (!Ranks::kInBlocks && places <= 0) return;  // on wgmma four warps multiply together
    float acc[kGroups][4][4] = {};
    multiply_tile<T, Ranks>(acc, h_stage(stage), b_tile(t.b_slot), warp_m, warp_n,
                            uniform(ceil_div(t.rank, 16)));
    const unsigned char* from = y_stage(stage);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (places <= half * kHalfPlaces) return;
      const int place = out_row + half * kHalfPlaces;
      char* to = static_cast<char*>(p.y.data) + t.y[place] + out_piece * 16;
      const bool there = (t.there[place / 32] >> place % 32 & 1) != 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const auto& old = *reinterpret_cast<const uint4*>(from + (out_at ^ g * 64) +
                                                          half * kHalfPlaces * kCols * 2);
        const uint4 out = add_products<T>(old, acc[g], half, t.scale);
        const int left = t.cols - (out_piece + g * 4) * 8;
        if (!there || left <= 0) continue;
        if constexpr (Tr::kVectorY) {
          *reinterpret_cast<uint4*>(to + g * 64) = out;
        } else {
          device::Vector<T, 8> some;
          some.set_piece(0, out);
          device::store_some(reinterpret_cast<T*>(to + g * 64), some, left);
        }
      }
    }
  }
};

template <class Tr>
__global__ void __launch_bounds__(kThreads, 2)
    expand_prefill_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ StepSlot slots[Tr::kSlots];
  __shared__ int segments[Tr::kOwnH ? 1 : 3 * kSharedSegments];
  device::pdl_begin(p.early);

  GroupsView groups = p.groups;
  const bool planned = Tr::kOwnH || groups.plan != nullptr;
  int4 head = make_int4(0, 0, 0, 0);
  int num_tiles = p.tiles.num;  // with a plan as many as there may be, until its head is here
  if (planned) {
    head = __ldcg(reinterpret_cast<const int4*>(groups.plan));
  } else {
    if (groups.num_segments <= kSharedSegments) keep_segments(groups, segments);
    num_tiles = min(count_segment_tiles(groups, p.weights.num_adapters), p.tiles.num);
  }

  // The first steps are looked up by a warp each: one after the other, by the scout, took 4 us.
  const int warp = warp_index();
  const bool is_scout = warp == kWorkers / 32;
  static_assert(Tr::kScout <= kWorkers / 32 && Tr::kAhead < Tr::kScout);
  Scout<Tr> scout(p, groups, slots, max(num_tiles, 0));
  // With a plan they come in one trip to memory with its head.
  if (warp < Tr::kScout) {
    scout.look_up(warp);
    device::cp_async_commit();
  }
  const Worker<Tr> worker(p, smem, p.h.by_position ? first_position(groups, p.tiles) : 0);
  if (planned) {
    const bool ours = is_plan_of(head, p.tiles, p.weights.num_adapters);
    scout.num_tiles = ours ? max(0, min(head.w - p.tiles.first, p.tiles.num)) : 0;
  }
  if (warp < Tr::kScout) {
    scout.confirm(warp);
    device::cp_async_wait<0>();
    __syncwarp();
    if (warp <= Tr::kAhead) scout.prepare(warp);
    if (warp == 0 && p.early && p.add_inputs) {
      __syncwarp();  // here, or the compiler would have other warps look at the slot, too
      worker.ask_for_rows(slots[0]);
    }
  }
  const int num_steps = scout.num_steps();
  __syncthreads();
  if (is_scout) {
    for (int s = 0; s <= Tr::kAhead; ++s) scout.assign(s);
  }
  __syncthreads();
  Cursor<Tr> ahead, now;
  if (!is_scout && !p.add_inputs) worker.fill_rows();
  if (!is_scout) {
    // B of the first steps does not depend on the predecessor.
#pragma unroll 1
    for (int s = 0; s < Tr::kAhead; ++s) worker.issue_b(slots[s]);
  }
  if (p.early) device::pdl_wait();
  const bool holds_h = !is_scout && worker.holds_h();
  HeldPieces<typename Tr::Ranks> held = {};
#pragma unroll 1
  for (int s = 0; s < Tr::kAhead; ++s, ahead.next()) {
    if (!is_scout) worker.issue_rows(slots[ahead.slot], ahead.stage);
    device::cp_async_commit();
    if (!holds_h) continue;
    worker.load_h(slots[ahead.slot], held);
    worker.store_h(slots[ahead.slot], ahead.stage, held);
  }
#pragma unroll 1
  for (int s = 0; s < num_steps; ++s, ahead.next(), now.next()) {
    wait_for_copies<Tr::kAhead - 1, typename Tr::Ranks>();
    __syncthreads();
    const StepSlot& t = slots[now.slot];
    if (is_scout) {
      scout.look_up(s + Tr::kScout);
      device::cp_async_commit();
      scout.prepare(s + Tr::kAhead + 1);
      __syncwarp();
      scout.assign(s + Tr::kAhead + 1);
    } else {
      if constexpr (Tr::kBSlots < Tr::kStages) {
        // In a group of its own: the next step does not wait for y of the one beyond.
        worker.issue_late_b(slots[now.slot + 1 == Tr::kSlots ? 0 : now.slot + 1]);
        device::cp_async_commit();
      }
      worker.issue_b(slots[ahead.slot]);
      worker.issue_rows(slots[ahead.slot], ahead.stage);
      device::cp_async_commit();
      if (holds_h) worker.load_h(slots[ahead.slot], held);
    }
    if (!is_scout) worker.compute(t, now.stage);
    if (holds_h) worker.store_h(slots[ahead.slot], ahead.stage, held);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, bool kVectorY, bool kOwnH, int kLogPieces, bool kBy8 = false>
void launch_ranks(const ExpandParams& p, Stream stream) {
  using Tr = Traits<T, kVectorY, kOwnH, kLogPieces, kBy8>;
  device::Launch l;
  l.threads = kThreads;
  l.smem = Tr::kSmem;
  check(p.cols == kCols && p.tiles.tile_tokens == kTokens, "lora_expand: no prefill kernel for ",
        p.cols, " columns and tiles of ", p.tiles.tile_tokens);
  const int num_ctas = device::current_device().num_sms * p.per_sm;
  const std::int64_t steps = std::int64_t{p.tiles.num} * p.block_start[p.weights.num_slices];
  l.grid = dim3(static_cast<unsigned>(std::min<std::int64_t>(steps, num_ctas)));
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_prefill_kernel<Tr>>("lora_expand", l, p);
}

template <class T, bool kVectorY, bool kOwnH>
void launch_h(const ExpandParams& p, Stream stream) {
  // Unaligned y has one kernel for all ranks: it saves more megabytes than anyone's microseconds.
  if constexpr (kVectorY) {
    if constexpr (kOwnH) {
      if (p.h.width <= 16 && p.b_by_8) {
        return launch_ranks<T, kVectorY, kOwnH, 1, true>(p, stream);
      }
    }
    if (p.h.width <= 16) return launch_ranks<T, kVectorY, kOwnH, 1>(p, stream);
    if (p.h.width <= 32) return launch_ranks<T, kVectorY, kOwnH, 2>(p, stream);
    if (p.h.width <= 64) return launch_ranks<T, kVectorY, kOwnH, 3>(p, stream);
  }
  launch_ranks<T, kVectorY, kOwnH, 4>(p, stream);
}

template <class T>
void launch_typed(const ExpandParams& p, Stream stream) {
  if (!p.vector_y) return launch_h<T, false, false>(p, stream);
  p.h.by_position ? launch_h<T, true, true>(p, stream) : launch_h<T, true, false>(p, stream);
}

}  // namespace

void expand_prefill(const ExpandParams& p, Stream stream) {
  check(p.h.width <= kExpandPrefillMaxRank && !p.h.raw,
        "lora_expand: no kernel for tiles of 64 tokens and rank ", p.h.width);
  check(!p.h.by_position || (p.h.vector && p.groups.plan != nullptr),
        "lora_apply: groups must be a plan, and h must have aligned rows of 16-bit elements");
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    launch_typed<typename decltype(tag)::type>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
