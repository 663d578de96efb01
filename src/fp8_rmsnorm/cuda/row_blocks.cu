// SPDX-License-Identifier: Apache-2.0
// Pass over blocks of aligned rows, each in shared memory while the next is on its way there: q
// with scales of rows, and the maxima of the columns for those of q_t; or the statistics of rows
// too long for one CTA.
//
// z[m,n] = x s     rstd[m] = 1 / sqrt(mean_n z^2 + eps)     y[m,n] = z rstd (w + offset)
// q = y / scale[m]     column maxima[n] = max_m |y|
// bytes  : M N e_x + scales, M N for q
// M=8192 N=4096 e4m3, groups of 16: 71.3 MB -> 16.7 us at 4.28 TB/s (copy roof of an H200)
// limit  : instructions, 16 an element at 0.65 of the issue rate. A thread has the same 16 columns
//          of some rows, whose weights and maxima it keeps in registers, and looks at x twice. What
//          a row takes beside that (its sum over the threads, rstd, its scale) one warp does, for
//          as many rows at a time as there are warps
// wrong  : COAT's roundings, a residual, stochastic rounding; rows of 8-bit x over 8,192 columns in
//          one CTA
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_block_ring.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kMostThreads = RowBlockPlan::kMostThreads, kMostWarps = RowBlockPlan::kMostWarps;
constexpr int kRun = RowBlockPlan::kRun, kStrips = RowBlockPlan::kStrips;

/// q and the maxima of columns; sums and maxima of strips of rows.
enum class BlockPass { kQuantize, kMeasure };

/// What strips leave of rows.
struct Partials {
  float* sums;             ///< [rows, strips, kRun]
  std::uint32_t* largest;  ///< [rows, strips]

  __device__ __forceinline__ explicit Partials(const ForwardParams& p) : sums(p.partials) {
    largest = reinterpret_cast<std::uint32_t*>(sums + p.input.rows * kStrips * kRun);
  }
};

/// rstd of a row whose sum all lanes of the warp have: one of them writes it.
__device__ __forceinline__ float finish_row(const ForwardParams& p, std::int64_t row, float sum) {
  const float rstd = rstd_of(p, sum, p.input.hidden);
  if (threadIdx.x % 32 == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
  return rstd;
}

template <class T, BlockPass kPass>
__global__ void __launch_bounds__(RowBlockPlan::most_threads(MORTAR_FP8_INSTRUCTIONS), 1)
    row_blocks_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kSlots = sizeof(T);
  constexpr int kRows = RowBlockPlan::rows(sizeof(T));
  constexpr bool kQuantizes = kPass == BlockPass::kQuantize;
  __shared__ float sums[kRows][kMostThreads + 4];  // no bank twice, by columns too
  __shared__ std::uint32_t maxima[kRows][kMostWarps];
  __shared__ float2 of_rows[kRows];  // what z is multiplied with for q, and rstd
  extern __shared__ uint4 stages[];

  // Coordinates.
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
  constexpr int kCtas = kQuantizes ? 1 : kStrips;  // of a block of rows
  const int strip = static_cast<int>(blockIdx.x) % kCtas;
  const int hidden = static_cast<int>(p.input.hidden), pieces = hidden / kElements;
  const std::int64_t rows = p.input.rows;
  RowBlockRing<T> block(p, stages, (warp * kCtas + strip) * kRun + lane, warps * kCtas * kRun);
  const std::int64_t step = std::int64_t{kRows} * (gridDim.x / kCtas);
  std::int64_t row0 = std::int64_t{kRows} * (blockIdx.x / kCtas);

  // Load.
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (p.norm && block.has(s)) {
      device::prefetch_l2(static_cast<const char*>(p.weight.data) +
                          block.piece_of(s) * kElements *
                              (p.weight.dtype == DType::kFloat32 ? 4 : 2));
    }
  }
  device::pdl_wait();
  device::pdl_trigger();
  block.load(row0);
  float w[kSlots][kElements];
  bool infinite = false;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      float quad[4] = {};
      if (block.has(s)) {
        if (p.norm) {
          load_run<4>(p.weight.data, p.weight.dtype, block.piece_of(s) * kElements + 4 * k, 4, true,
                      quad);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) quad[j] = p.norm ? quad[j] + p.weight_offset : 1.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[s][4 * k + j] = quad[j];
        infinite = infinite || fabsf(quad[j]) > kLargestFloat;
      }
    }
  }
  if constexpr (kQuantizes) infinite = __syncthreads_or(infinite);
  std::uint32_t of_columns[kSlots][kElements] = {};

  for (; row0 < rows; row0 += step) {
    block.advance(row0 + step);

    // Reduce: each thread its part of a row; then each warp a row.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float scale = block.scale(r);
      float sum[kSlots], most = 0.0f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const uint4 raw = block.piece(r, s);
        float squares[4] = {};
        std::uint32_t largest[2] = {};
#pragma unroll
        for (int k = 0; k < kQuads; ++k) {
          float z[4];
          unpack4<T>(raw, k, z);
#pragma unroll
          for (int j = 0; j < 4; ++j) squares[j] = __fmaf_rn(z[j], z[j], squares[j]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            largest[j] = max(max(largest[j], device::product_bits(z[j], w[s][4 * k + j])),
                             device::product_bits(z[j + 2], w[s][4 * k + j + 2]));
          }
        }
        sum[s] = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        float of_piece = __uint_as_float(max(largest[0], largest[1]));
        if constexpr (kIsFloat8<T>) {
          sum[s] *= scale * scale;
          of_piece *= scale;
        }
        most = device::max_magnitude(most, of_piece);
      }
      sums[r][thread] = device::add_halves<kSlots>(sum);
      const std::uint32_t of_warp = device::max_lanes(device::magnitude_bits(most), 32);
      if (lane == 0) maxima[r][warp] = of_warp;
    }
    __syncthreads();
    for (int r = warp; r < kRows; r += warps) {
      if (row0 + r >= rows) {
        if (kQuantizes && lane == 0) of_rows[r] = make_float2(0.0f, 0.0f);
        continue;
      }
      float part[kMostWarps];
#pragma unroll
      for (int i = 0; i < kMostWarps; ++i) {
        part[i] = i < warps ? sums[r][32 * i + lane] : 0.0f;
      }
      const float sum = device::add_halves<kMostWarps>(part);
      const std::uint32_t largest = device::max_lanes(lane < warps ? maxima[r][lane] : 0u, 32);
      const std::int64_t row = row0 + r;
      if constexpr (kQuantizes) {
        const float rstd = finish_row(p, row, device::sum_lanes(sum, 32));
        const float divisor = fast_scale(p.out, __uint_as_float(largest) * rstd);
        if (lane == 0) {
          const Scales& scales = p.out.scale;
          if (scales.given()) scales.data[row * scales.row_stride] = divisor;
          of_rows[r] = make_float2(finite_or_nan(rstd * inverse_of(divisor)), rstd);
        }
      } else {
        const Partials partials(p);
        const std::int64_t of_strip = row * kStrips + strip;
        partials.sums[of_strip * kRun + lane] = sum;
        if (lane == 0) partials.largest[of_strip] = largest;
      }
    }
    __syncthreads();

    // Compute and store.
    if constexpr (kQuantizes) {
      const auto quantize = [&](auto tag) {
        using Out = typename decltype(tag)::type;
        char* q = static_cast<char*>(p.out.q.data) + row0 * p.out.q.row_stride;
        // Two rows together: the maximum of three is one instruction.
#pragma unroll
        for (int first = 0; first < kRows; first += 2, q += 2 * p.out.q.row_stride) {
          if (row0 + first >= rows) break;
          float factor[2], to_y[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 of_row = of_rows[first + i];
            const float scale = block.scale(first + i);
            factor[i] = finite_or_nan(of_row.x * scale);
            to_y[i] = finite_or_nan(scale * of_row.y);
          }
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            const uint4 raw[2] = {block.piece(first, s), block.piece(first + 1, s)};
            std::uint32_t codes[2][kQuads];
#pragma unroll
            for (int k = 0; k < kQuads; ++k) {
              float z[2][4];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float y[4];
                unpack4<T>(raw[i], k, z[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j) y[j] = z[i][j] * factor[i] * w[s][4 * k + j];
                codes[i][k] = device::pack_fp8x4<Out>(y);
              }
#pragma unroll
              for (int j = 0; j < 4; ++j) {  // without its weight
                std::uint32_t& most = of_columns[s][4 * k + j];
                most = max(max(most, device::product_bits(z[0][j], to_y[0])),
                           device::product_bits(z[1][j], to_y[1]));
              }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (p.out.q.given() && row0 + first + i < rows && block.has(s)) {
                store_codes<kElements>(q + i * p.out.q.row_stride + block.piece_of(s) * kElements,
                                       codes[i], kElements, true);
              }
            }
          }
        }
      };
      if (p.out.dtype == DType::kFloat8E4M3) {
        quantize(TypeTag<Float8E4M3>());
      } else {
        quantize(TypeTag<Float8E5M2>());
      }
      // A weight of a column is multiplied with once, at the end; but 0 times an infinite one is a
      // NaN, which then is the maximum.
      if (infinite) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (row0 + r >= rows) break;
          const float scale = block.scale(r);
          const float to_y = finite_or_nan(scale * of_rows[r].y);
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            const uint4 raw = block.piece(r, s);
#pragma unroll
            for (int k = 0; k < kQuads; ++k) {
              float z[4];
              unpack4<T>(raw, k, z);
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                const bool nan = fabsf(w[s][4 * k + j]) > kLargestFloat && z[j] * to_y == 0.0f;
                if (nan) of_columns[s][4 * k + j] = 0x7fffffffu;
              }
            }
          }
        }
      }
    }
  }

  if constexpr (kQuantizes) {
    // kRows columns of each thread at a time, whose maxima adjacent lanes send.
#pragma unroll
    for (int first = 0; first < RowBlockPlan::kColumns; first += kRows) {
      const int slot = first / kElements, in_piece = first % kElements;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float most = __uint_as_float(of_columns[slot][in_piece + i]);
        sums[i][thread] = __uint_as_float(device::product_bits(most, w[slot][in_piece + i]));
      }
      __syncthreads();
      for (int i = thread; i < kRows * threads; i += threads) {
        const int of_thread = i / kRows, column = i % kRows;
        const int piece = slot * threads + of_thread;
        if (piece < pieces) {
          atomicMax(p.column_maxima + piece * kElements + in_piece + column,
                    __float_as_uint(sums[column][of_thread]));
        }
      }
      __syncthreads();
    }
  }
}

/// rstd of rows from what their strips left, and the largest |y| of the CTA's. A warp for a row.
__global__ void __launch_bounds__(32 * RowBlockPlan::kFinishRows)
    finish_rows_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ std::uint32_t scratch[32];
  device::pdl_begin(/*early=*/true);
  device::pdl_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Partials partials(p);
  std::uint32_t amax = 0;
  for (std::int64_t row = std::int64_t{RowBlockPlan::kFinishRows} * blockIdx.x + warp;
       row < p.input.rows; row += RowBlockPlan::kFinishRows * gridDim.x) {
    float part[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      part[i] = __ldcg(partials.sums + (row * kStrips + i) * kRun + lane);
    }
    const std::uint32_t of_strip =
        lane < kStrips ? __ldcg(partials.largest + row * kStrips + lane) : 0u;
    const float sum = device::sum_lanes(device::add_halves<kStrips>(part), 32);
    const float rstd = finish_row(p, row, sum);
    const std::uint32_t largest = device::max_lanes(of_strip, 32);
    amax = max(amax, device::magnitude_bits(__uint_as_float(largest) * rstd));
  }
  const std::uint32_t of_all = device::max_block(amax, scratch);
  if (p.makes_maxima() && threadIdx.x == 0) p.maxima[blockIdx.x] = of_all;
}

/// Zeros where CTAs take the maxima of columns.
__global__ void clear_maxima_kernel(const __grid_constant__ ForwardParams p) {
  device::pdl_begin(/*early=*/true);
  device::pdl_wait();
  const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n < p.input.hidden) p.column_maxima[n] = 0;
}

// ------------------------------------------------------------------------------------------- host

device::Launch launch_of(int grid, int threads, Stream stream) {
  device::Launch launch;
  launch.threads = static_cast<unsigned>(threads);
  launch.grid = dim3(static_cast<unsigned>(grid));
  launch.stream = stream;
  launch.pdl = true;
  return launch;
}

template <BlockPass kPass>
void launch_blocks(const ForwardParams& p, Stream stream) {
  device::Launch launch = launch_of(p.plan.block_plan.grid, p.plan.block_plan.threads, stream);
  launch.smem = static_cast<std::size_t>(p.plan.block_plan.smem);
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<row_blocks_kernel<typename decltype(tag)::type, kPass>>(p.op, launch, p);
  });
}

}  // namespace

void clear_column_maxima(const ForwardParams& p, Stream stream) {
  const auto grid = static_cast<int>(ceil_div<std::int64_t>(p.input.hidden, 256));
  device::launch<clear_maxima_kernel>(p.op, launch_of(grid, 256, stream), p);
}

void row_blocks(const ForwardParams& p, Stream stream) {
  if (p.plan.columns) {
    clear_column_maxima(p, stream);
    return launch_blocks<BlockPass::kQuantize>(p, stream);
  }
  launch_blocks<BlockPass::kMeasure>(p, stream);
  device::launch<finish_rows_kernel>(
      p.op, launch_of(p.maxima_count, 32 * RowBlockPlan::kFinishRows, stream), p);
}

}  // namespace mortar::fp8_rmsnorm::cuda
