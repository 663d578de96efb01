// SPDX-License-Identifier: Apache-2.0
// Pass over aligned rows: statistics of each, and q where it needs nothing from other rows.
//
// z[m,n] = x s     rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     q = y / scale, with a scale per row, per group, or given
// bytes  : M N e_x + scales, and M N for q
// M=8192 N=4096 e4m3, groups of 16: statistics 37.7 MB -> 8.8 us, with q 71.3 MB -> 16.7 us at
//          4.28 TB/s (copy roof of an H200)
// limit  : instructions: 9 an element for the statistics, where DRAM's roof leaves room for 7.8. A
//          thread holds 128 bytes of a row in registers; while it works on them, the next row's are
//          asked for in L2
// wrong  : rows that are not aligned, or longer than 32 KB, go to rows_general.cu
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/held_row.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_reduction.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = HeldRowsPlan::kThreads;

/// What is done with a row: its rstd and maximum; the same with the maximum that COAT's roundings
/// have; q as well.
enum class RowsPass { kStatistics, kCompat, kQuantize };

/// The largest |y| of a piece with COAT's roundings.
template <class T>
__device__ __forceinline__ float compat_maximum(const uint4& raw, float scale, float rstd, int v,
                                                const HeldWeights<T>& weights) {
  float most = 0.0f;
#pragma unroll
  for (int k = 0; k < kPiece<T> / 4; ++k) {
    float z[4];
    unpack4<T>(raw, k, z);
    const float4 w = weights.get(v, k);
    most = device::max_magnitude(most, normalise(z[0], scale, rstd, w.x));
    most = device::max_magnitude(most, normalise(z[1], scale, rstd, w.y));
    most = device::max_magnitude(most, normalise(z[2], scale, rstd, w.z));
    most = device::max_magnitude(most, normalise(z[3], scale, rstd, w.w));
  }
  return most;
}

/// Products of three factors, each rounded, lie within 2^-22 of the exact product, whatever the
/// order, as long as nothing leaves the normal range. So the largest y of COAT's roundings is among
/// those whose |z w| is at least this, where `most` is the largest |z w|. Outside a range in which
/// all is normal, every one is a candidate.
__device__ __forceinline__ float compat_candidates(float most, float rstd, float largest_weight) {
  const float least = most * fminf(rstd, 1.0f), weight = fmaxf(largest_weight, 1.0f);
  const bool normal = least >= 0x1p-60f * weight && weight <= 0x1p30f && most <= 0x1p60f;
  return normal ? most * (1.0f - 0x1p-20f) : 0.0f;
}

template <class T, RowsPass kPass>
__global__ void __launch_bounds__(kThreads, HeldRowsPlan::kPerSm)
    rows_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4;
  extern __shared__ float4 shared_weights[];
  __shared__ float sums[2 * kThreads];
  __shared__ std::uint32_t maxima[2 * kThreads / 32];
  __shared__ std::uint32_t scratch[32], weight_scratch[32];

  // Coordinates. All lanes of a warp go on until its first row is past the end.
  const HeldRowsPlan& plan = p.plan.held_plan;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden), pieces = hidden / kElements;
  const int row_threads = plan.row_threads, thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (row_threads - 1), in_step = thread >> log2_of(row_threads);
  const int in_warp = row_threads < 32 ? thread % 32 >> log2_of(row_threads) : 0;
  const std::int64_t stride = std::int64_t{plan.rows_per_step()} * gridDim.x;
  std::int64_t row = std::int64_t{plan.rows_per_step()} * blockIdx.x + in_step;
  HeldPieces<T> held(p, lane, pieces);

  // Load.
  held.seek(row);
  held.prefetch();
  SharedWeights<kElements>::prefetch(p, pieces);
  device::pdl_wait();
  device::pdl_trigger();
  held.load();
  SharedWeights<kElements>::store(p, shared_weights, pieces, row_threads * plan.slots);
  if (p.column_maxima != nullptr) {
    for (int n = static_cast<int>(blockIdx.x) * kThreads + thread; n < hidden;
         n += static_cast<int>(gridDim.x) * kThreads) {
      p.column_maxima[n] = 0;
    }
  }
  __syncthreads();
  float largest_weight = 0.0f;
  if constexpr (kPass == RowsPass::kCompat) {
    for (int i = thread; i < pieces * kQuads; i += kThreads) {
      const float4 w = shared_weights[i / kQuads * SharedWeights<kElements>::kPitch + i % kQuads];
      largest_weight = device::max_magnitude(device::max_magnitude(largest_weight, w.x), w.y);
      largest_weight = device::max_magnitude(device::max_magnitude(largest_weight, w.z), w.w);
    }
    largest_weight =
        __uint_as_float(device::max_block(device::magnitude_bits(largest_weight), weight_scratch));
  }

  const HeldWeights<T> weights(p, shared_weights, lane);
  RowReduction<kThreads> reduction(row_threads, sums, maxima);
  const bool per_group = p.out.scaling == Fp8Scaling::kGroup;
  const int group_shift = log2_of(p.out.group / kElements);  // log2 of a group's threads
  const std::int64_t group_step = (row_threads >> group_shift) * p.out.scale.group_stride;
  float amax = 0.0f;
  for (; row - in_warp < rows; row += stride) {
    held.seek(row + stride);
    held.prefetch();

    // Reduce: the sum of squares, and the largest |z w| of the row or of its pieces.
    float sum[kHeld], of_pieces[kHeld], most = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int v = slot_at(i);
      sum[v] = of_pieces[v] = 0.0f;
      if (held.used(v)) {
        float squares[4] = {}, of_piece = 0.0f;
#pragma unroll
        for (int k = 0; k < kQuads; ++k) {
          float z[4];
          unpack4<T>(held.raw[v], k, z);
          const float4 w = weights.get(v, k);
#pragma unroll
          for (int j = 0; j < 4; ++j) squares[j] = __fmaf_rn(z[j], z[j], squares[j]);
          of_piece = device::max_magnitude(of_piece, z[0] * w.x);
          of_piece = device::max_magnitude(of_piece, z[1] * w.y);
          of_piece = device::max_magnitude(of_piece, z[2] * w.z);
          of_piece = device::max_magnitude(of_piece, z[3] * w.w);
        }
        sum[v] = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        if constexpr (kIsFloat8<T>) {
          const float scale = held.scale(v);
          sum[v] *= scale * scale;
          of_piece *= scale;
        }
        of_pieces[v] = of_piece;
      }
      most = device::max_magnitude(most, of_pieces[v]);
      if (i % 2 == 1) sum[v - 4] += sum[v];
      if (i % 4 == 3) sum[v - 6] += sum[v - 4];
    }
    // The next row is asked for when all of this one has been used, and not piece by piece: a warp
    // has so few scoreboards that it would wait for the new pieces with the old.
    if constexpr (kPass == RowsPass::kStatistics) held.load();
    sum[0] += sum[1];
    std::uint32_t bits = __float_as_uint(most);
    reduction.reduce(sum[0], bits);
    most = __uint_as_float(bits);
    const float mean = __fdiv_rn(sum[0], static_cast<float>(hidden));
    const float rstd = p.norm ? __frcp_rn(__fsqrt_rn(mean + p.eps)) : 1.0f;
    const float row_amax = most * rstd;
    const bool there = row < rows;
    if (there && lane == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
    if (kPass != RowsPass::kCompat && there) amax = device::max_magnitude(amax, row_amax);

    if constexpr (kPass == RowsPass::kCompat) {
      const float least = compat_candidates(most, rstd, largest_weight);
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (!held.used(v)) continue;
        // Negated, so that a NaN is a candidate.
        if (!(fabsf(of_pieces[v]) < least) && there) {
          amax = device::max_magnitude(
              amax, compat_maximum<T>(held.raw[v], held.scale(v), rstd, v, weights));
        }
      }
      held.load();
    }

    if constexpr (kPass == RowsPass::kQuantize) {
      const Scales& scales = p.out.scale;
      float divisor = 1.0f;
      if (!per_group) {
        if (!p.out.given_scale) {
          divisor = fast_scale(p.out, row_amax);
          if (there && lane == 0 && scales.given()) scales.data[row * scales.row_stride] = divisor;
        } else if (there) {
          divisor = __ldcg(scales.data + row * scales.row_stride);
        }
      }
      const float factor = finite_or_nan(rstd * inverse_of(divisor));
      float* group_scale =
          scales.data + row * scales.row_stride + (lane >> group_shift) * scales.group_stride;

      // Compute and store.
      char* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + lane * kElements;
      const auto quantize = [&](auto tag) {
        using Out = typename decltype(tag)::type;
#pragma unroll
        for (int v = 0; v < kHeld; ++v) {
          if (!held.used(v)) continue;
          const bool ok = there && held.in_columns(v);
          float f = factor;
          if (per_group) {
            float* scale = group_scale + v * group_step;
            if (p.out.given_scale) {
              if (ok) divisor = __ldcg(scale);
            } else {
              const std::uint32_t of_group =
                  device::max_lanes(device::magnitude_bits(of_pieces[v]), 1 << group_shift);
              divisor = fast_scale(p.out, __uint_as_float(of_group) * rstd);
              if (ok && (lane & ((1 << group_shift) - 1)) == 0) *scale = divisor;
            }
            f = finite_or_nan(rstd * approximate_inverse_of(divisor));
          }
          f = finite_or_nan(f * held.scale(v));
          std::uint32_t codes[kQuads];
#pragma unroll
          for (int k = 0; k < kQuads; ++k) {
            float y[4];
            unpack4<T>(held.raw[v], k, y);
            const float4 w = weights.get(v, k);
            y[0] = y[0] * f * w.x;
            y[1] = y[1] * f * w.y;
            y[2] = y[2] * f * w.z;
            y[3] = y[3] * f * w.w;
            codes[k] = device::pack_fp8x4<Out>(y);
          }
          if (ok) {
            store_codes<kElements>(q + held.first_piece(v) * kElements, codes, kElements, true);
          }
        }
      };
      if (p.out.dtype == DType::kFloat8E4M3) {
        quantize(TypeTag<Float8E4M3>());
      } else {
        quantize(TypeTag<Float8E5M2>());
      }
      held.load();
    }
  }

  if (p.makes_maxima()) {
    const std::uint32_t largest = device::max_block(device::magnitude_bits(amax), scratch);
    if (thread == 0) p.maxima[blockIdx.x] = largest;
  }
}

// ------------------------------------------------------------------------------------------- host

template <RowsPass kPass>
void launch_rows(const ForwardParams& p, Stream stream) {
  const HeldRowsPlan& plan = p.plan.held_plan;
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(plan.grid));
  launch.smem = static_cast<std::size_t>(plan.smem);
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<rows_kernel<typename decltype(tag)::type, kPass>>(p.op, launch, p);
  });
}

}  // namespace

void rows(const ForwardParams& p, Stream stream) {
  const bool makes_q = p.out.q.given() && !p.plan.tiles_make_q;
  if (makes_q) {
    launch_rows<RowsPass::kQuantize>(p, stream);
  } else if (p.out.numerics == Fp8Numerics::kCompat && p.norm) {
    launch_rows<RowsPass::kCompat>(p, stream);
  } else {
    launch_rows<RowsPass::kStatistics>(p, stream);
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
