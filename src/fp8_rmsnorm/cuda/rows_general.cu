// SPDX-License-Identifier: Apache-2.0
// Pass over rows of any kind: what rows.cu does, for those that it does not take: not aligned, very
// long, with a residual of another type, with y in bfloat16, stochastic.
//
// z[m,n] = x s (+ residual, rounded and written back)   rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     q = y / scale, with a scale per row, per group, or given
// bytes  : M N e_x + scales, and M N for q, 2 M N for y in bfloat16, 2 M N e_r for the residual
// M=8192 N=4096 e4m3, groups of 16: statistics 37.7 MB -> 8.8 us, with q 71.3 MB -> 16.7 us at
//          4.28 TB/s (copy roof of an H200)
// limit  : should be DRAM, is instructions: 26 an element where statistics leave room for 9 (M=2048
//          N=4096, 7 of them the weights' way into shared memory). A thread holds up to 128 bytes
//          of a row, or of several, in shared memory between their two uses, while the next are on
//          their way: 64 KB in flight an SM
// wrong  : rows over 64 KB are read twice, the second time from L2
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_reduction.cuh"
#include "fp8_rmsnorm/cuda/row_weights.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kMostThreads = RowsPlan::kMostThreads;

/// Shared memory of a CTA. Every thread reads back what it has copied itself, so that copies need
/// no barrier. Arrays by held piece and thread.
template <class T>
struct SharedRows {
  uint4* pieces;   ///< [stage][held][threads]
  float* scales;   ///< [held][threads], of 8-bit x
  float* squares;  ///< [held][threads], and behind them [waiting sums][threads]
  float4* weights;

  __device__ SharedRows(void* base, int threads) {
    constexpr int kHeld = kHeldPieces, kStages = RowsPlan::kStages;
    pieces = static_cast<uint4*>(base);
    scales = reinterpret_cast<float*>(pieces + kStages * kHeld * threads);
    squares = scales + (kIsFloat8<T> ? kHeld * threads : 0);
    weights = reinterpret_cast<float4*>(squares + (kHeld + RowsPlan::kWaitingSums) * threads);
  }
};

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    any_rows_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kRun = kElements < 8 ? 4 : 8;
  extern __shared__ uint4 dynamic_smem[];
  __shared__ float sums[2 * kMostThreads];
  __shared__ std::uint32_t maxima[2 * kMostThreads / 32];
  __shared__ std::uint32_t scratch[32];

  // Coordinates.
  const RowsPlan& plan = p.plan.row_plan;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden), pieces = ceil_div(hidden, kElements);
  const int row_threads = plan.row_threads, threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % row_threads, group = thread / row_threads;
  const bool compat = p.out.numerics == Fp8Numerics::kCompat;
  const bool with_residual = p.residual.given();
  const bool makes_q = p.out.q.given() && !p.plan.tiles_make_q;
  const bool row_scale = p.out.scaling == Fp8Scaling::kRow && !p.out.given_scale;
  const bool first_max = row_scale || (p.makes_maxima() && !compat && !makes_q);
  const bool second = makes_q || p.normed.given() || (p.makes_maxima() && !first_max);
  const int group_threads = min(max(1, p.out.group / kElements), row_threads);
  const int group_shift = log2_of(p.out.group);
  const SharedRows<T> shared(dynamic_smem, threads);

  device::pdl_wait();
  device::pdl_trigger();
  const Draws draws(p.out.rng);
  if (p.column_maxima != nullptr) {
    for (int n = static_cast<int>(blockIdx.x) * threads + thread; n < hidden;
         n += static_cast<int>(gridDim.x) * threads) {
      p.column_maxima[n] = 0;
    }
  }

  // A row that cannot be held is read in spans, once for each sweep. A span has every spans-th of a
  // thread's pieces, so that its sum is a branch of the tree over pieces.
  const bool in_spans = plan.spans > 1;

  // Load: row r and slot v of a thread's share are its held piece r * slots + v. Pieces go to
  // shared memory; their scales wait in registers until the step is worked on.
  const std::int64_t step = plan.rows_per_step();
  const ScaleReader scale_reader(p.input);
  std::uint32_t next_scale[kHeldPieces];
  const auto load = [&](std::int64_t base, int from, int stage) {
    int r = 0, v = 0;
#pragma unroll
    for (int held = 0; held < kHeldPieces; ++held) {
      const std::int64_t row = base + group * plan.held_rows + r;
      const int piece = from + v * plan.pitch + lane, column = piece * kElements;
      next_scale[held] = scale_reader.unit();
      if (r < plan.held_rows && row < rows && piece < pieces) {
        uint4* to = &shared.pieces[(stage * kHeldPieces + held) * threads + thread];
        const T* x = static_cast<const T*>(p.input.x.data) + row * p.input.x.row_stride + column;
        if (p.x_aligned) device::cp_async_16(to, x);
        if (kIsFloat8<T>) next_scale[held] = scale_reader.load(row, column);
      }
      if (++v == plan.slots) {
        v = 0;
        ++r;
      }
    }
    device::cp_async_commit();
    if (p.x_aligned) return;
#pragma unroll 1
    for (int held = 0; held < plan.held_rows * plan.slots; ++held) {
      const std::int64_t row = base + group * plan.held_rows + held / plan.slots;
      const int piece = from + held % plan.slots * plan.pitch + lane, column = piece * kElements;
      if (row >= rows || piece >= pieces) continue;
      const T* x = static_cast<const T*>(p.input.x.data) + row * p.input.x.row_stride + column;
      shared.pieces[(stage * kHeldPieces + held) * threads + thread] =
          load_unaligned(x, sizeof(T), min(kElements, hidden - column));
    }
  };
  const auto keep_scales = [&] {
    if constexpr (kIsFloat8<T>) {
#pragma unroll
      for (int held = 0; held < kHeldPieces; ++held) {
        shared.scales[held * threads + thread] = scale_reader.to_float(next_scale[held]);
      }
    }
  };
  const auto weights_of = [&](int piece, int run, float(&w)[kRun]) {
    float4 quads[kRun / 4];
    const int first = run * (kRun / 4) * pieces + piece;
    if (!p.norm) {
#pragma unroll
      for (int q = 0; q < kRun / 4; ++q) quads[q] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    } else if (plan.shared_weights) {
#pragma unroll
      for (int q = 0; q < kRun / 4; ++q) quads[q] = shared.weights[first + q * pieces];
    } else {
      const float4* weights = reinterpret_cast<const float4*>(p.weights) + first;
#pragma unroll
      for (int q = 0; q < kRun / 4; ++q) quads[q] = __ldcg(weights + q * pieces);
    }
#pragma unroll
    for (int q = 0; q < kRun / 4; ++q) {
      w[4 * q] = quads[q].x;
      w[4 * q + 1] = quads[q].y;
      w[4 * q + 2] = quads[q].z;
      w[4 * q + 3] = quads[q].w;
    }
  };
  const auto unpack_run = [&](const uint4& raw, int run, float(&z)[kRun]) {
#pragma unroll
    for (int q = 0; q < kRun / 4; ++q) {
      float quad[4];
      unpack4<T>(raw, run * (kRun / 4) + q, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[4 * q + i] = quad[i];
    }
  };

  int stage_at = 0;  // of the step that is worked on, in shared.pieces

  // Reduce: the sum of squares of a piece, and its largest |z w| where that is what is wanted.
  const auto first_sweep = [&](std::int64_t row, int from, int held, std::uint32_t& largest) {
#pragma unroll 1
    for (int v = 0; v < plan.slots; ++v, held += threads) {
      const int piece = from + v * plan.pitch + lane, column = piece * kElements;
      float squares[4] = {}, most[2] = {}, scale = 1.0f;
      if (row < rows && piece < pieces) {
        const uint4 raw = shared.pieces[held];
        if (kIsFloat8<T>) scale = shared.scales[held - stage_at];
#pragma unroll
        for (int run = 0; run < kElements / kRun; ++run) {
          float z[kRun];
          unpack_run(raw, run, z);
          if (with_residual) {
            const int count = hidden - column - run * kRun;
            const std::int64_t at = row * p.residual.row_stride + column + run * kRun;
            float added[kRun];
            load_run(p.residual.data, p.residual.dtype, at, count, p.x_aligned, added);
#pragma unroll
            for (int i = 0; i < kRun; ++i) z[i] = __fmaf_rn(z[i], scale, added[i]);
            store_run(p.residual.data, p.residual.dtype, at, count, p.x_aligned, z);
          }
#pragma unroll
          for (int i = 0; i < kRun; ++i) squares[i % 4] = __fmaf_rn(z[i], z[i], squares[i % 4]);
          if (first_max) {
            float w[kRun];
            weights_of(piece, run, w);
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
              most[i % 2] = device::max_magnitude(most[i % 2], z[i] * w[i]);
            }
          }
        }
        if (with_residual) scale = 1.0f;
      }
      const float sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
      shared.squares[v * threads + thread] = sum * (scale * scale);
      largest = max(largest, max(device::magnitude_bits(most[0] * scale),
                                 device::magnitude_bits(most[1] * scale)));
    }
    float part[kHeldPieces];
#pragma unroll
    for (int v = 0; v < kHeldPieces; ++v) {
      part[v] = v < plan.slots ? shared.squares[v * threads + thread] : 0.0f;
    }
#pragma unroll
    for (int half = kHeldPieces / 2; half > 0; half /= 2) {
#pragma unroll
      for (int v = 0; v < half; ++v) part[v] += part[v + half];
    }
    return part[0];
  };

  // Compute and store.
  std::uint32_t largest_seen = 0;
  const auto second_sweep = [&](std::int64_t row, int from, int held, float rstd,
                                float row_divisor) {
    const float row_inverse = inverse_of(row_divisor);
#pragma unroll 1
    for (int v = 0; v < plan.slots; ++v, held += threads) {
      const int piece = from + v * plan.pitch + lane, column = piece * kElements;
      const bool there = row < rows && piece < pieces;
      float all[kElements] = {}, most[2] = {}, scale = 1.0f;  // z
      if (there) {
        const uint4 raw = shared.pieces[held];
        if (kIsFloat8<T> && !with_residual) scale = shared.scales[held - stage_at];
#pragma unroll
        for (int run = 0; run < kElements / kRun; ++run) {
          const int count = hidden - column - run * kRun;
          float z[kRun];
          if (with_residual) {
            load_run(p.residual.data, p.residual.dtype,
                     row * p.residual.row_stride + column + run * kRun, count, p.x_aligned, z);
          } else {
            unpack_run(raw, run, z);
          }
          float w[kRun];
          weights_of(piece, run, w);
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            all[run * kRun + i] = z[i];
            z[i] = compat ? normalise(z[i], scale, rstd, w[i]) : z[i] * w[i] * scale * rstd;
            most[i % 2] = device::max_magnitude(most[i % 2], z[i]);
          }
          if (p.normed.given()) {
            store_run(p.normed.data, DType::kBFloat16,
                      row * p.normed.row_stride + column + run * kRun, count, p.x_aligned, z);
          }
        }
      }
      std::uint32_t largest = max(device::magnitude_bits(most[0]), device::magnitude_bits(most[1]));
      if (p.makes_maxima() && !first_max) largest_seen = max(largest_seen, largest);
      if (!makes_q) continue;
      float divisor = row_divisor, inverse = row_inverse;
      if (p.out.scaling == Fp8Scaling::kGroup) {
        const std::int64_t at =
            row * p.out.scale.row_stride + (column >> group_shift) * p.out.scale.group_stride;
        if (p.out.given_scale) {
          divisor = there ? __ldcg(p.out.scale.data + at) : 1.0f;
        } else {
          largest = device::max_lanes(largest, group_threads);
          divisor = scale_for(p.out, __uint_as_float(largest));
          if (there && (lane & (group_threads - 1)) == 0) p.out.scale.data[at] = divisor;
        }
        inverse = approximate_inverse_of(divisor);
      }
      if (!there) continue;
      const std::uint64_t index = draw_index(row, column, hidden);
      const float factor = finite_or_nan(finite_or_nan(rstd * inverse) * scale);
      std::uint32_t codes[kQuads];
#pragma unroll
      for (int run = 0; run < kElements / kRun; ++run) {
        float w[kRun];
        weights_of(piece, run, w);
#pragma unroll
        for (int k = 0; k < kRun / 4; ++k) {
          float quad[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float z = all[run * kRun + 4 * k + i], by = w[4 * k + i];
            quad[i] = compat
                          ? divide_compat(normalise(z, scale, rstd, by), p.norm, divisor, inverse)
                          : z * factor * by;
          }
          const int at = run * (kRun / 4) + k;
          codes[at] = encode4(p.out, draws, index + 4 * at, quad);
        }
      }
      void* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + column;
      store_codes<kElements>(q, codes, hidden - column, p.q_aligned);
    }
  };

  // The steps: while one is worked on, the next is on its way.
  RowReduction<kMostThreads> reduction(row_threads, sums, maxima);
  const std::int64_t stride = gridDim.x * step;
  int stage = 0;
  if (!in_spans) load(blockIdx.x * step, 0, stage);
  if (p.norm && plan.shared_weights) {
    store_weights<kElements>(p, reinterpret_cast<float*>(shared.weights), pieces, thread, threads);
    __syncthreads();
  }
  for (std::int64_t base = blockIdx.x * step; base < rows; base += stride) {
    stage_at = stage * kHeldPieces * threads;
    const auto load_span = [&](int from) {
      load(base, from, stage);
      keep_scales();
      device::cp_async_wait<0>();
    };
    if (!in_spans) {
      keep_scales();
      load(base + stride, 0, stage ^ 1);
      device::cp_async_wait<1>();
    }
#pragma unroll 1
    for (int r = 0; r < plan.held_rows; ++r) {
      const std::int64_t row = base + group * plan.held_rows + r;
      const int held = stage_at + r * plan.slots * threads + thread;
      std::uint32_t largest = 0;
      // Spans whose sums the tree adds first come one after the other. Sums of one span, of two and
      // of four wait for the tree's other half, as many as the count of spans has ones at its end.
      float sum = 0.0f;
      float* const waiting = shared.squares + kHeldPieces * threads + thread;
#pragma unroll 1
      for (int i = 0; i < plan.spans; ++i) {
        const int first = static_cast<int>(__brev(i) >> 1 >> __clz(plan.spans)) * row_threads;
        if (in_spans) load_span(first);
        sum = first_sweep(row, first, held, largest);
        int k = 0;
#pragma unroll 1
        for (; (i >> k) % 2 != 0; ++k) sum += waiting[k * threads];
        if (k < RowsPlan::kWaitingSums) waiting[k * threads] = sum;
      }
      reduction.reduce(sum, largest);
      const float rstd = rstd_of(p, sum, hidden);
      const float row_amax = __uint_as_float(largest) * rstd;
      float divisor = 1.0f;
      if (row < rows) {
        if (lane == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
        if (p.makes_maxima() && first_max) {
          largest_seen = max(largest_seen, device::magnitude_bits(row_amax));
        }
        if (row_scale) {
          divisor = scale_for(p.out, row_amax);
          if (lane == 0 && p.out.scale.given()) {
            p.out.scale.data[row * p.out.scale.row_stride] = divisor;
          }
        } else if (makes_q && p.out.given_scale && p.out.scaling != Fp8Scaling::kGroup) {
          divisor = __ldcg(p.out.scale.data + row * p.out.scale.row_stride);
        }
      }
      if (!second) continue;
#pragma unroll 1
      for (int k = 0; k < plan.spans; ++k) {
        if (in_spans) load_span(k * row_threads);
        second_sweep(row, k * row_threads, held, rstd, divisor);
      }
    }
    if (!in_spans) stage ^= 1;
  }
  device::cp_async_wait<0>();

  if (p.makes_maxima() && p.maxima != nullptr) {
    largest_seen = device::max_block(largest_seen, scratch);
    if (threadIdx.x == 0) p.maxima[blockIdx.x] = largest_seen;
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------- host

void any_rows(const ForwardParams& p, Stream stream) {
  const RowsPlan& plan = p.plan.row_plan;
  device::Launch launch;
  launch.threads = static_cast<unsigned>(plan.threads);
  launch.grid = dim3(static_cast<unsigned>(plan.grid));
  launch.smem = static_cast<std::size_t>(plan.smem);
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    device::launch<any_rows_kernel<T>>(p.op, launch, p);
  });
}

}  // namespace mortar::fp8_rmsnorm::cuda
