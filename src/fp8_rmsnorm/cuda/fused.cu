// SPDX-License-Identifier: Apache-2.0
// Rows and tiles in one kernel, with one scale for the whole tensor: between the two, thread blocks
// wait for each other.
//
// z[m,n] = x s     rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     scale = max |y| / 448     q[m,n] = y / scale, q_t[n,m] = same
// bytes  : M N e_x + scales, M N for q and for q_t; what of x does not fit the chip's shared memory
//          once more
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200); without
//          arithmetic the same accesses take 30.4
// limit  : neither memory nor instructions alone (0.43 of the issue rate), but what must wait: for
//          the first rows, for the slowest thread block, for the first tiles. A thread block has
//          adjacent rows. It takes each row's sum and maximum as it comes, and keeps its first
//          columns in shared memory. Tiles of these columns are made from there; of the others x is
//          read again, while it is still in L2
// wrong  : few rows, M % 16 != 0, more x than L2 holds beside what is kept, wider x (as fast by two
//          kernels), and what rows.cu does not do
#include <cooperative_groups.h>

#include "device/cache_policy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/row_reduction.cuh"
#include "fp8_rmsnorm/cuda/row_statistics.cuh"
#include "fp8_rmsnorm/cuda/tile_codes.cuh"
#include "fp8_rmsnorm/cuda/tile_operands.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = FusedPlan::kThreads;

/// Shared memory behind the weights.
struct Places {
  unsigned char* kept;  ///< of x, by rows
  float* rstd;          ///< of the rows
  unsigned char* ring;  ///< rows on their way; later codes by columns, and then tiles of x
};

__device__ __forceinline__ Places places(const FusedPlan& plan, float4* weights) {
  Places at;
  at.kept = reinterpret_cast<unsigned char*>(weights) + plan.held.weight_bytes;
  at.rstd = reinterpret_cast<float*>(at.kept + plan.rows * plan.held.kept_bytes);
  at.ring = reinterpret_cast<unsigned char*>(at.rstd + plan.rows);
  return at;
}

/// rstd of the CTA's rows, and its largest |y|.
template <class T, bool kCompat, int kSlots>
__device__ __forceinline__ void reduce_rows(const ForwardParams& p, float4* shared_weights,
                                            const Places& at) {
  __shared__ device::Mbarrier barriers[HeldRows<T, true, false, kSlots>::kBarriers];
  __shared__ float sums[2 * kThreads];
  __shared__ std::uint32_t maxima[2 * kThreads / 32], scratch[32], weight_scratch[32];
  constexpr int kElements = kPiece<T>;
  const FusedPlan& plan = p.plan.fused_plan;
  const int hidden = static_cast<int>(p.input.hidden), pieces = hidden / kElements;
  const int row_threads = plan.held.row_threads, thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (row_threads - 1), in_step = thread >> log2_of(row_threads);
  const int in_warp = row_threads < 32 ? thread % 32 >> log2_of(row_threads) : 0;
  const std::int64_t first = std::int64_t{plan.rows} * blockIdx.x;
  const std::int64_t end = min(first + plan.rows, p.input.rows);
  const int step = plan.held.rows_per_step();
  std::int64_t row = first + in_step;
  HeldRows<T, true, false, kSlots> held(p, plan.held, at.kept, at.ring, barriers, in_step, lane,
                                        pieces, row, step, end);

  held.init();
  SharedWeights<kElements>::prefetch(p, pieces);
  device::pdl_wait();
  __syncthreads();  // the ring is ready
  SharedWeights<kElements>::store(p, shared_weights, pieces, row_threads * plan.held.slots,
                                  [&] { held.start(); });
  __syncthreads();
  held.fill();
  float largest_weight = 0.0f;
  if constexpr (kCompat) {
    largest_weight = largest_of_weights<kElements>(shared_weights, pieces, weight_scratch);
  }

  const HeldWeights<T> weights(plan.held, shared_weights, lane);
  RowReduction<kThreads> reduction(row_threads, sums, maxima);
  float amax = 0.0f;
  for (; row - in_warp < end; row += step) {
    const bool there = row < end;
    held.wait(there);
    float of_pieces[kHeld], most = 0.0f;
    float sum = measure_row<T>(held, weights, of_pieces, most);
    if constexpr (kCompat) {
      std::uint32_t bits = __float_as_uint(most);
      reduction.reduce(sum, bits);
      most = __uint_as_float(bits);
      if (plan.held.stages > 1) held.refill_last();
    } else {
      reduction.reduce(sum);
      held.advance(row + step);
    }
    const float rstd = rstd_of(p, sum, p.input.hidden);
    if (there && lane == 0) {
      at.rstd[row - first] = rstd;
      if (p.rstd != nullptr) p.rstd[row] = rstd;
    }
    float of_row = most * rstd;
    if constexpr (kCompat) {
      of_row = compat_maximum<T>(held, weights, of_pieces, most, rstd, largest_weight);
      if (plan.held.stages > 1) {
        held.next(row + step);
      } else {
        reduction.sync();
        held.advance(row + step);
      }
    }
    if (there) amax = device::max_magnitude(amax, of_row);
  }
  if (p.makes_maxima()) {
    const std::uint32_t largest = device::max_block(device::magnitude_bits(amax), scratch);
    if (thread == 0) p.maxima[blockIdx.x] = largest;
  }
}

/// A team of threads that makes a tile: 8 for each 4 of its rows.
struct Team {
  int threads, index, count, thread;

  __device__ __forceinline__ explicit Team(int tile_rows)
      : threads(2 * tile_rows),
        index(static_cast<int>(threadIdx.x) / threads),
        count(kThreads / threads),
        thread(static_cast<int>(threadIdx.x) % threads) {}
  __device__ __forceinline__ void sync() const {
    if (threads == 32) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "r"(threads) : "memory");
    }
  }
};

/// The tiles of a team, from the last columns, of which x is not kept, to the first.
class FusedTile {
 public:
  int column0, row0;  ///< row0: of the CTA's rows

  __device__ __forceinline__ FusedTile(const FusedPlan& plan, int across, const Team& team)
      : rows_(plan.rows) {
    const int blocks = plan.rows / plan.tile_rows;
    step_columns_ = team.count / blocks * FusedPlan::kColumns;
    step_rows_ = team.count % blocks * plan.tile_rows;
    column0 = (across - 1 - team.index / blocks) * FusedPlan::kColumns;
    row0 = team.index % blocks * plan.tile_rows;
  }
  __device__ __forceinline__ bool valid() const { return column0 >= 0; }
  __device__ __forceinline__ void advance() {
    column0 -= step_columns_;
    row0 += step_rows_;
    if (row0 >= rows_) {
      row0 -= rows_;
      column0 -= FusedPlan::kColumns;
    }
  }

 private:
  int rows_, step_columns_, step_rows_;
};

template <class T, bool kCompat, int kSlots>
__global__ void __launch_bounds__(kThreads, 1)
    fused_kernel(const __grid_constant__ ForwardParams p) {
  static_assert(kIsFloat8<T>, "a thread's 16 columns are one piece of x");
  constexpr int kElements = kPiece<T>, kStep = kThreads * 16;
  constexpr int kWeights = SharedWeights<kElements>::kPitch * 16;  // bytes of a piece's
  extern __shared__ float4 shared_weights[];
  __shared__ std::uint32_t scratch[32];
  const FusedPlan& plan = p.plan.fused_plan;
  const Places at = places(plan, shared_weights);
  reduce_rows<T, kCompat, kSlots>(p, shared_weights, at);
  __syncthreads();  // the ring is free

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3 of a tile.
  const Team team(plan.tile_rows);
  const int c = team.thread % 8, r = team.thread / 8, height = plan.tile_rows;
  const int hidden = static_cast<int>(p.input.hidden);
  const int across = ceil_div(hidden, FusedPlan::kColumns);
  const std::int64_t first = std::int64_t{plan.rows} * blockIdx.x;
  const int rows = static_cast<int>(min(p.input.rows - first, std::int64_t{plan.rows}));
  const std::int64_t x_stride = p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
  const char* x =
      static_cast<const char*>(p.input.x.data) + (first + kThreadRows * r) * x_stride + c * 16;
  const std::uint32_t kept =
      device::smem_address(at.kept) + kThreadRows * r * plan.held.kept_bytes + c * 16;
  const std::uint32_t weights = device::smem_address(shared_weights) + c * kWeights;
  // The codes of a tile by columns, 16 bytes more behind each kElements of them, so that the
  // threads of a row meet in no bank.
  const int group_bytes = kElements * height + 16;
  unsigned char* codes_at = at.ring + team.index * (FusedPlan::kColumns / kElements * group_bytes);
  unsigned char* columns = codes_at + c * group_bytes + 4 * r;
  std::uint32_t here = device::smem_address(at.ring) + FusedPlan::kCodes + threadIdx.x * 16;
  std::uint32_t there = here + FusedPlan::kStage;
  const bool narrow = p.input.x_scale.dtype != DType::kFloat32;

  const auto is_kept = [&](const FusedTile& tile) {
    return tile.column0 + FusedPlan::kColumns <= plan.held.kept_bytes;
  };
  const auto copy = [&](const FusedTile& tile, std::uint32_t to) {
    if (tile.valid() && !is_kept(tile)) {
      const bool there =
          tile.row0 + kThreadRows * r < rows && tile.column0 + c * kElements < hidden;
      const char* from = x + tile.row0 * x_stride + tile.column0;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m, from += x_stride) {
        device::cp_async_16(to + m * kStep, there ? from : p.input.x.data, there ? 16 : 0,
                            device::kEvictFirst);
      }
    }
    device::cp_async_commit();
  };
  std::uint32_t scale[kThreadRows] = {};
  const auto load_tile_scales = [&](const FusedTile& tile) {
    if (!tile.valid()) return;
    const int column = tile.column0 + c * kElements, row = tile.row0 + kThreadRows * r;
    const int there = column < hidden ? rows - row : 0;
    if (narrow) {
      load_scales<true>(p.input, first + row, column, there, scale);
    } else {
      load_scales<false>(p.input, first + row, column, there, scale);
    }
  };

  FusedTile tile(plan, across, team);
  copy(tile, here);
  load_tile_scales(tile);
  // A scale that was given does not wait for the maxima, which then are for amax alone.
  const bool given = p.out.given_scale;
  if (p.makes_maxima() && !given) cooperative_groups::this_grid().sync();
  float inverse = inverse_of(given ? __ldcg(p.out.scale.data) : tensor_scale(p, scratch));
  if (kCompat) inverse = finite_or_nan(inverse * (1.0f + 0x1p-22f));

  while (tile.valid()) {
    FusedTile next = tile;
    next.advance();
    copy(next, there);
    const int my_row = tile.row0 + kThreadRows * r;
    const std::int64_t row = first + my_row;
    const float4 of_rows = *reinterpret_cast<const float4*>(at.rstd + my_row);
    const float rstd[kThreadRows] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
    float factor[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      factor[m] = scale_of_word(narrow, scale[m]);
      if constexpr (!kCompat) {
        factor[m] = finite_or_nan(finite_or_nan(rstd[m] * inverse) * factor[m]);
      }
    }
    load_tile_scales(next);
    device::cp_async_wait<1>();

    const bool stays = is_kept(tile);
    const std::uint32_t from =
        stays ? kept + tile.row0 * plan.held.kept_bytes + tile.column0 : here;
    const int row_step = stays ? plan.held.kept_bytes : kStep;
    const std::uint32_t tile_weights = weights + tile.column0 / kElements * kWeights;
    uint4 raw[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) raw[m] = read_shared<16>(from + m * row_step);
    std::uint32_t codes[kThreadRows][kThreadQuads];
    const auto encode = [&](auto tag) {
      using Out = typename decltype(tag)::type;
#pragma unroll
      for (int k = 0; k < kThreadQuads; ++k) {
        const uint4 w = read_shared<16>(tile_weights + k * 16);
        const float by[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z),
                             __uint_as_float(w.w)};
        std::uint32_t of_rows[kThreadRows];
#pragma unroll
        for (int m = 0; m < kThreadRows; ++m) {
          float y[4];
          unpack4<T>(raw[m], k, y);
          weigh<kCompat>(y, by, factor[m], rstd[m]);
          if constexpr (kCompat) divide_rounded(y, inverse);
          codes[m][k] = of_rows[m] = device::pack_fp8x4<Out>(y);
        }
        store_columns(of_rows, columns + 4 * k * height, height);
      }
    };
    if (p.out.dtype == DType::kFloat8E4M3) {
      encode(TypeTag<Float8E4M3>());
    } else {
      encode(TypeTag<Float8E5M2>());
    }

    // Store.
    if (p.out.q.given()) {
      char* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + tile.column0 +
                c * kElements;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m, q += p.out.q.row_stride) {
        if (my_row < rows && tile.column0 + c * kElements < hidden) {
          store_codes<kElements>(q, codes[m], kElements, true);
        }
      }
    }
    team.sync();  // the columns are there
    if (p.out.q_t.given()) {
      const int pieces = height / 16, shift = log2_of(pieces);
      char* q_t = static_cast<char*>(p.out.q_t.data) + first + tile.row0;
      const int piece = team.thread & (pieces - 1), column = team.thread >> shift;
      const int step =
          team.threads >> shift;  // columns from one of the thread's pieces to the next
      const std::int64_t stride = p.out.q_t.row_stride;
      q_t += (tile.column0 + column) * stride + piece * 16;
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = *reinterpret_cast<const uint4*>(codes_at + (i * team.threads + team.thread) * 16 +
                                               (column + i * step) / kElements * 16);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i, q_t += step * stride) {
        if (tile.row0 + piece * 16 < rows && tile.column0 + column + i * step < hidden) {
          __stcs(reinterpret_cast<uint4*>(q_t), v[i]);
        }
      }
    }
    team.sync();  // they have been read
    const std::uint32_t used = here;
    here = there;
    there = used;
    tile = next;
  }
  if (p.makes_maxima() && given) {
    cooperative_groups::this_grid().sync();
    store_amax(p, scratch);
  }
}

}  // namespace

void fused(const ForwardParams& p, Stream stream) {
  const FusedPlan& plan = p.plan.fused_plan;
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(plan.grid));
  launch.smem = static_cast<std::size_t>(plan.smem);
  launch.stream = stream;
  launch.cooperative = true;
  device::visit_dtype<Float8DTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_slots(plan.held.slots, [&](auto slots) {
      if (p.out.numerics == Fp8Numerics::kCompat) {
        device::launch<fused_kernel<T, true, slots>>(p.op, launch, p);
      } else {
        device::launch<fused_kernel<T, false, slots>>(p.op, launch, p);
      }
    });
  });
}

}  // namespace mortar::fp8_rmsnorm::cuda
