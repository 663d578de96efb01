// SPDX-License-Identifier: Apache-2.0
// Pass over columns of aligned rows: the largest |y| of each, of which scales of q_t's rows are made.
//
// maxima[n] = max_m |z rstd (w + offset)|
// bytes  : M N e_x + scales read; M N e_x / 512 of maxima to L2 for each thread block of a column
// M=8192 N=4096 e4m3, groups of 16: 37.7 MB -> 8.8 us at 4.28 TB/s (copy roof of an H200), less what
//          of x is still in L2
// limit  : memory, and 3.5 instructions an element. A warp takes 512 bytes of a row, a lane 16 of
//          them, four rows in flight; a lane's maxima stay in registers until its last row. Rounding
//          keeps order, so the weight of a column is multiplied with at the end
// wrong  : rows that are not aligned go to tiles_general.cu
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = ColumnsPlan::kThreads, kWarps = kThreads / 32;
constexpr int kAhead = 4;  ///< rows of a warp in flight

/// What a lane has of some rows of its warp.
template <class T>
struct LaneRows {
  uint4 raw[kAhead] = {};
  std::uint32_t scale[kAhead] = {}, rstd[kAhead] = {};

  /// Loads rows row, row + kWarps, ... below `end`; zeros in the place of others.
  template <bool kNarrow>
  __device__ __forceinline__ void load(const ForwardParams& p, std::int64_t row, std::int64_t end,
                                       int column, bool in_columns) {
    const std::int64_t stride = p.input.x.row_stride;
    const T* x = static_cast<const T*>(p.input.x.data) + row * stride + column;
    const char* scales = nullptr;
    constexpr int kBytes = kNarrow ? 2 : 4;
    if constexpr (kIsFloat8<T>) {
      scales = static_cast<const char*>(p.input.x_scale.data) +
               (row * p.input.x_scale.row_stride + (column >> log2_of(p.input.x_group))) * kBytes;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i, row += kWarps, x += kWarps * stride) {
      const bool there = in_columns && row < end;
      raw[i] = there ? __ldcg(reinterpret_cast<const uint4*>(x)) : uint4{};
      if constexpr (kIsFloat8<T>) {
        scale[i] = 0;
        load_word_if<kNarrow>(there, scale[i], scales);
        scales += kWarps * p.input.x_scale.row_stride * kBytes;
      }
      rstd[i] = __float_as_uint(1.0f);
      load_word_if<false>(p.norm && row < end, rstd[i], p.rstd + row);
    }
  }
};

/// Maxima of a lane's columns, as bits. kWeighted: of y itself, as a weight is infinite and 0 times
/// it a NaN; else of y without its weight.
template <class T, bool kNarrow, bool kWeighted>
__device__ __forceinline__ void measure_columns(const ForwardParams& p, std::int64_t row,
                                                std::int64_t end, int column, bool in_columns,
                                                const float* weights,
                                                std::uint32_t (&bits)[kPiece<T>]) {
#pragma unroll 1
  for (; row < end; row += kWarps * kAhead) {
    LaneRows<T> rows;
    rows.template load<kNarrow>(p, row, end, column, in_columns);
#pragma unroll
    for (int i = 0; i < kAhead; i += 2) {
      float factor[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = kIsFloat8<T> ? scale_of_word(kNarrow, rows.scale[i + j]) : 1.0f;
        factor[j] = finite_or_nan(scale * __uint_as_float(rows.rstd[i + j]));
      }
#pragma unroll
      for (int k = 0; k < kPiece<T> / 4; ++k) {
        float a[4], b[4];
        unpack4<T>(rows.raw[i], k, a);
        unpack4<T>(rows.raw[i + 1], k, b);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          std::uint32_t& most = bits[4 * k + j];
          if constexpr (kWeighted) {
            const float w = weights[4 * k + j];
            if (row + i * kWarps < end) {
              most = max(most, device::product_bits(a[j] * factor[0], w));
            }
            if (row + (i + 1) * kWarps < end) {
              most = max(most, device::product_bits(b[j] * factor[1], w));
            }
          } else {
            most = max(max(most, device::product_bits(a[j], factor[0])),
                       device::product_bits(b[j], factor[1]));
          }
        }
      }
    }
  }
}

template <class T, bool kNarrow>
__global__ void __launch_bounds__(kThreads, ColumnsPlan::kPerSm)
    column_maxima_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kColumns = 32 * kElements;
  constexpr int kPitch = 33;  // lanes of one of a piece's elements, so that few banks are shared
  __shared__ float weights[kColumns];
  __shared__ std::uint32_t maxima[kWarps][kElements * kPitch];

  // Coordinates.
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int hidden = static_cast<int>(p.input.hidden);
  const int column0 = static_cast<int>(blockIdx.x) * kColumns, column = column0 + lane * kElements;
  const std::int64_t first = std::int64_t{p.plan.column_plan.rows} * blockIdx.y;
  const std::int64_t end = min(first + p.plan.column_plan.rows, p.input.rows);

  // Load.
  device::pdl_wait();
  device::pdl_trigger();
  bool infinite = false;
  for (int i = thread; i < kColumns; i += kThreads) {
    float w = 1.0f;
    if (p.norm && column0 + i < hidden) {
      std::uint32_t word = 0;
      const char* from = static_cast<const char*>(p.weight.data);
      const std::int64_t n = column0 + i;
      if (p.weight.dtype == DType::kFloat32) {
        load_word_if<false>(true, word, from + n * 4);
      } else {
        load_word_if<true>(true, word, from + n * 2);
      }
      w = float_of_word(p.weight.dtype, word) + p.weight_offset;
    }
    weights[i] = w;
    infinite |= fabsf(w) > kLargestFloat;
  }
  infinite = __syncthreads_or(infinite);

  // Reduce: a lane's rows, then the warps'.
  std::uint32_t bits[kElements] = {};
  const float* const of_lane = weights + lane * kElements;
  if (infinite) {
    measure_columns<T, kNarrow, true>(p, first + warp, end, column, column < hidden, of_lane, bits);
  } else {
    measure_columns<T, kNarrow, false>(p, first + warp, end, column, column < hidden, of_lane,
                                       bits);
  }
#pragma unroll
  for (int j = 0; j < kElements; ++j) maxima[warp][j * kPitch + lane] = bits[j];
  __syncthreads();
  for (int n = thread; n < kColumns; n += kThreads) {  // adjacent lanes, adjacent columns
    std::uint32_t most = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      most = max(most, maxima[w][n % kElements * kPitch + n / kElements]);
    }
    if (!infinite) most = device::product_bits(__uint_as_float(most), weights[n]);
    if (column0 + n < hidden) {
      atomicMax(p.column_maxima + column0 + n, device::magnitude_bits(__uint_as_float(most)));
    }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------- host

void column_maxima(const ForwardParams& p, Stream stream) {
  const ColumnsPlan& plan = p.plan.column_plan;
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(plan.strips), static_cast<unsigned>(plan.chunks));
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (kIsFloat8<T>) {
      if (p.input.x_scale.dtype != DType::kFloat32) {
        return device::launch<column_maxima_kernel<T, true>>(p.op, launch, p);
      }
    }
    device::launch<column_maxima_kernel<T, false>>(p.op, launch, p);
  });
}

}  // namespace mortar::fp8_rmsnorm::cuda
