// SPDX-License-Identifier: Apache-2.0
// All of a forward, or of a quantisation, of few elements with one scale: what rows_general.cu and
// tiles_general.cu do, to the same bits, in one CTA and without a workspace.
//
// z = x s (+ residual)   rstd = 1 / sqrt(mean z^2 + eps)   y = z rstd (w + offset)   q = y / scale
// bytes  : M N (e_x + outputs) + scales, 25 KB at most: some 10 ns of an H200's memory
// limit  : the launch, and the latencies of one CTA: loads, two reductions, stores. The host makes
//          one launch of it and takes no workspace, where rows and tiles are two launches and one
// wrong  : for more than one piece of x a thread
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_reduction.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kMostThreads = SmallPlan::kMostThreads;

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    small_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kRun = kElements < 8 ? 4 : 8;
  __shared__ float sums[2 * kMostThreads];
  __shared__ std::uint32_t row_maxima[2 * kMostThreads / 32];
  __shared__ std::uint32_t scratch[32];
  __shared__ std::uint8_t turned[kMostThreads * kElements];  ///< [N][M] of codes

  // Coordinates.
  const int row_threads = p.plan.small_plan.row_threads;
  const int rows = static_cast<int>(p.input.rows), hidden = static_cast<int>(p.input.hidden);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % row_threads, row = thread / row_threads;
  const int column = lane * kElements, left = hidden - column;
  const bool there = row < rows && left > 0;
  const bool compat = p.out.numerics == Fp8Numerics::kCompat;
  const bool weight_aligned =
      p.x_aligned && reinterpret_cast<std::uintptr_t>(p.weight.data) % 16 == 0;

  device::pdl_wait();
  device::pdl_trigger();

  // Load.
  float z[kElements] = {}, w[kElements], scale = 1.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) w[i] = 1.0f;
  if (there) {
    const T* x = static_cast<const T*>(p.input.x.data) + row * p.input.x.row_stride + column;
    const uint4 raw = p.x_aligned ? __ldcg(reinterpret_cast<const uint4*>(x))
                                  : load_unaligned(x, sizeof(T), min(kElements, left));
    const ScaleReader scale_reader(p.input);
    if (kIsFloat8<T>) scale = scale_reader.to_float(scale_reader.load(row, column));
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float quad[4];
      unpack4<T>(raw, q, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[4 * q + i] = quad[i];
    }
  }

  // Reduce: the sum of squares, and the largest |z w|.
  float squares[4] = {}, most[2] = {};
#pragma unroll
  for (int first = 0; first < kElements; first += kRun) {
    if (!there) break;
    float run[kRun];
    if (p.residual.given()) {
      const std::int64_t at = row * p.residual.row_stride + column + first;
      load_run(p.residual.data, p.residual.dtype, at, left - first, p.x_aligned, run);
#pragma unroll
      for (int i = 0; i < kRun; ++i) run[i] = __fmaf_rn(z[first + i], scale, run[i]);
      store_run(p.residual.data, p.residual.dtype, at, left - first, p.x_aligned, run);
#pragma unroll
      for (int i = 0; i < kRun; ++i) z[first + i] = run[i];
    }
    if (p.norm) {
      load_run(p.weight.data, p.weight.dtype, column + first, left - first, weight_aligned, run);
#pragma unroll
      for (int i = 0; i < kRun; ++i) w[first + i] = run[i] + p.weight_offset;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float v = z[first + i];
      squares[i % 4] = __fmaf_rn(v, v, squares[i % 4]);
      most[i % 2] = device::max_magnitude(most[i % 2], v * w[first + i]);
    }
  }
  if (p.residual.given()) scale = 1.0f;
  float sum = ((squares[0] + squares[1]) + (squares[2] + squares[3])) * (scale * scale);
  std::uint32_t largest =
      max(device::magnitude_bits(most[0] * scale), device::magnitude_bits(most[1] * scale));
  RowReduction<kMostThreads> reduction(row_threads, sums, row_maxima);
  reduction.reduce(sum, largest);
  const float rstd = rstd_of(p, sum, hidden);
  if (there && lane == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
  largest = device::magnitude_bits(__uint_as_float(largest) * rstd);

  // y itself, for whom it is written, and where it is rounded on the way.
  if (compat || p.normed.given()) {
    most[0] = most[1] = 0.0f;
#pragma unroll
    for (int first = 0; first < kElements; first += kRun) {
      if (!there) break;
      float run[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const float v = z[first + i], by = w[first + i];
        run[i] = compat ? normalise(v, scale, rstd, by) : v * by * scale * rstd;
        most[i % 2] = device::max_magnitude(most[i % 2], run[i]);
      }
      if (p.normed.given()) {
        store_run(p.normed.data, DType::kBFloat16, row * p.normed.row_stride + column + first,
                  left - first, p.x_aligned, run);
      }
    }
    if (compat) largest = max(device::magnitude_bits(most[0]), device::magnitude_bits(most[1]));
  }
  const float amax = __uint_as_float(device::max_block(there ? largest : 0u, scratch));
  const float divisor = scale_for(p.out, amax), inverse = inverse_of(divisor);
  if (thread == 0) {
    *p.out.scale.data = divisor;
    if (p.out.amax != nullptr) *p.out.amax = amax;
  }

  // Compute and store.
  if (there) {
    const Draws draws(p.out.rng);
    const std::uint64_t index = draw_index(row, column, hidden);
    const float factor = finite_or_nan(finite_or_nan(rstd * inverse) * scale);
    std::uint32_t codes[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float quad[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = z[4 * q + i], by = w[4 * q + i];
        quad[i] = compat ? divide_compat(normalise(v, scale, rstd, by), p.norm, divisor, inverse)
                         : v * factor * by;
      }
      codes[q] = encode4(p.out, draws, index + 4 * q, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * q + i < left) {
          turned[(column + 4 * q + i) * rows + row] =
              static_cast<std::uint8_t>(codes[q] >> (8 * i));
        }
      }
    }
    if (p.out.q.given()) {
      void* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + column;
      store_codes<kElements>(q, codes, left, p.q_aligned);
    }
  }
  if (!p.out.q_t.given()) return;
  __syncthreads();
  std::uint8_t* q_t = static_cast<std::uint8_t*>(p.out.q_t.data);
#pragma unroll 4
  for (int i = thread; i < hidden * rows; i += threads) {
    q_t[i / rows * p.out.q_t.row_stride + i % rows] = turned[i];
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------- host

void small(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = static_cast<unsigned>(p.plan.small_plan.threads);
  launch.grid = dim3(1);
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<small_kernel<typename decltype(tag)::type>>(p.op, launch, p);
  });
}

}  // namespace mortar::fp8_rmsnorm::cuda
