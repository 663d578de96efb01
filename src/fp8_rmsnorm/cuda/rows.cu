// SPDX-License-Identifier: Apache-2.0
// Pass over aligned rows: statistics of each, and q where it needs nothing from other rows.
//
// z[m,n] = x s (+ residual, rounded and written back)   rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     q = y / scale, with a scale per row, per group, or given
// bytes  : M N e_x + scales, M N for q, 2 M N e_x for the residual, which has x's type
// M=8192 N=4096 e4m3, groups of 16: statistics 37.7 MB -> 8.8 us, with q 71.3 MB -> 16.7 us at
//          4.28 TB/s (copy roof of an H200)
// limit  : instructions, 7.7 an element for the statistics at 0.75 of the issue rate once rows are
//          there, and the start until they are. Rows come to shared memory by the copy engine, some
//          ahead; a thread reads its 16-byte pieces from there, twice where it makes q
// wrong  : rows that are not aligned, or of which not one fits shared memory beside the weights, go
//          to rows_general.cu
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/held_row.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/row_reduction.cuh"
#include "fp8_rmsnorm/cuda/row_statistics.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = HeldRowsPlan::kThreads;

/// What is done with a row: its rstd and maximum; the same with the maximum that COAT's roundings
/// have; q as well.
enum class RowsPass { kStatistics, kCompat, kQuantize };

/// The largest magnitude that eight adjacent lanes have of each of their slots: lane l of the eight
/// gets that of slot slot_at(l). Each step halves the slots of a lane, so that all take 7 shuffles,
/// not 3 each.
__device__ __forceinline__ float scatter_maxima(const float (&of_slots)[kHeld], int lane) {
  float of_half[kHeld / 2];
#pragma unroll
  for (int i = 0; i < kHeld / 2; ++i) of_half[i] = fabsf(of_slots[i]);
  const auto exchange = [&](int i, float upper, int bit) {
    const bool keeps_upper = (lane & bit) != 0;
    const float sent = keeps_upper ? of_half[i] : upper;
    const float kept = keeps_upper ? upper : of_half[i];
    of_half[i] = device::max_magnitude(fabsf(kept), __shfl_xor_sync(0xffffffffu, sent, bit));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) exchange(i, of_slots[i + 4], 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) exchange(i, of_half[i + 2], 2);
  exchange(0, of_half[1], 4);
  return of_half[0];
}

/// The scales of a row's groups, made or given, and what its elements are multiplied with: in place
/// of the largest |z w| of the thread's pieces. `scale`: of the group of the first piece, of which
/// 2^group_shift lanes have pieces; a row has `pieces`.
template <class Rows>
__device__ __forceinline__ void group_factors(const ForwardParams& p, const Rows& held, bool there,
                                              int lane, int pieces, float* scale, std::int64_t step,
                                              int group_shift, float rstd,
                                              float (&of_pieces)[kHeld]) {
  const int lanes = 1 << group_shift;
  // Whether slot v has columns of the lane's group.
  const auto in_columns = [&](int v) {
    return held.used(v) && held.first_piece(v) + (lane & -lanes) < pieces;
  };
  const auto factor_of = [&](float of_group) {
    return finite_or_nan(rstd * approximate_inverse_of(of_group));
  };
  if (!p.out.given_scale && lanes >= kHeld) {  // a lane makes the scale of one slot
    const int v = slot_at(lane % kHeld);
    float most = scatter_maxima(of_pieces, lane);
    for (int distance = kHeld; distance < lanes; distance *= 2) {
      most = device::max_magnitude(most, __shfl_xor_sync(0xffffffffu, most, distance));
    }
    const float of_group = fast_scale(p.out, most * rstd);
    if (there && in_columns(v) && lane % lanes < kHeld) scale[v * step] = of_group;
    const float factor = factor_of(of_group);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      of_pieces[i] = __shfl_sync(0xffffffffu, factor, slot_at(i), kHeld);
    }
    return;
  }
  if (p.out.given_scale) {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      of_pieces[v] = there && held.in_columns(v) ? __ldcg(scale + v * step) : 1.0f;
    }
  } else {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        const float other = __shfl_xor_sync(0xffffffffu, of_pieces[v], distance);
        of_pieces[v] = device::max_magnitude(fabsf(of_pieces[v]), other);
      }
    }
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      of_pieces[v] = fast_scale(p.out, fabsf(of_pieces[v]) * rstd);
      if (there && in_columns(v) && lane % lanes == 0) scale[v * step] = of_pieces[v];
    }
  }
#pragma unroll
  for (int v = 0; v < kHeld; ++v) of_pieces[v] = factor_of(of_pieces[v]);
}

/// Threads that a CTA's registers would be enough for. Where rows are only measured, an SM then has
/// registers left for a CTA of tiles, which comes early and waits there.
template <class T, RowsPass kPass>
inline constexpr int kRegisterThreads =
    kIsFloat8<T>&& kPass == RowsPass::kStatistics ? 640 : kThreads;

template <class T, RowsPass kPass, bool kAdds, int kSlots>
__global__ void __launch_bounds__((kRegisterThreads<T, kPass>), 1)
    rows_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4;
  extern __shared__ float4 shared_weights[];
  __shared__ device::Mbarrier barriers[HeldRows<T>::kBarriers];
  __shared__ float sums[2 * kThreads];
  __shared__ std::uint32_t maxima[2 * kThreads / 32];
  __shared__ std::uint32_t weight_scratch[32];

  // Coordinates. All lanes of a warp go on until its first row is past the end.
  const HeldRowsPlan& plan = p.plan.held_plan;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden), pieces = hidden / kElements;
  const int row_threads = plan.row_threads, thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (row_threads - 1), in_step = thread >> log2_of(row_threads);
  const int in_warp = row_threads < 32 ? thread % 32 >> log2_of(row_threads) : 0;
  const std::int64_t stride = std::int64_t{plan.rows_per_step()} * gridDim.x;
  std::int64_t row = std::int64_t{plan.rows_per_step()} * blockIdx.x + in_step;
  unsigned char* ring = reinterpret_cast<unsigned char*>(shared_weights) + plan.weight_bytes;
  HeldRows<T, false, kAdds, kSlots> held(p, plan, nullptr, ring, barriers, in_step, lane, pieces,
                                         row, stride, rows);

  // Load.
  held.init();
  SharedWeights<kElements>::prefetch(p, pieces);
  if (kRegisterThreads<T, kPass> == kThreads || plan.alone) held.prefetch();
  device::pdl_wait();
  device::pdl_trigger();
  if (p.makes_maxima() && thread == 0) p.maxima[blockIdx.x] = 0;
  __syncthreads();  // the ring is ready, and the CTA's maximum
  SharedWeights<kElements>::store(p, shared_weights, pieces, row_threads * plan.slots,
                                  [&] { held.start(); });
  if (p.column_maxima != nullptr) {
    for (int n = static_cast<int>(blockIdx.x) * kThreads + thread; n < hidden;
         n += static_cast<int>(gridDim.x) * kThreads) {
      p.column_maxima[n] = 0;
    }
  }
  __syncthreads();
  held.fill();
  float largest_weight = 0.0f;
  if constexpr (kPass == RowsPass::kCompat) {
    largest_weight = largest_of_weights<kElements>(shared_weights, pieces, weight_scratch);
  }

  const HeldWeights<T> weights(plan, shared_weights, lane);
  RowReduction<kThreads> reduction(row_threads, sums, maxima);
  const bool per_group = p.out.scaling == Fp8Scaling::kGroup;
  const int group_shift = log2_of(p.out.group / kElements);  // log2 of a group's threads
  const int slots_in_columns = held.slots_in_columns();
  const std::int64_t group_step = (row_threads >> group_shift) * p.out.scale.group_stride;
  float amax = 0.0f, tensor_divisor = 1.0f;
  if (kPass == RowsPass::kQuantize && p.out.given_scale && p.out.scaling == Fp8Scaling::kTensor) {
    tensor_divisor = __ldcg(p.out.scale.data);
  }
  for (; row - in_warp < rows; row += stride) {
    const bool there = row < rows;
    held.wait(there);
    if constexpr (kAdds) {
      if (there) held.add_residual(row);
    }

    // Reduce: the sum of squares, and the largest |z w| of the row or of its pieces.
    float of_pieces[kHeld], most = 0.0f;
    float sum = measure_row<T>(held, weights, of_pieces, most);
    // Rounding keeps order: the largest of a CTA is made of what its threads saw, at the end.
    if constexpr (kPass == RowsPass::kStatistics) {
      reduction.reduce(sum);
      held.advance(row + stride);
    } else {
      std::uint32_t bits = __float_as_uint(most);
      reduction.reduce(sum, bits);
      most = __uint_as_float(bits);
      if (plan.stages > 1) held.refill_last();
    }
    const float rstd = rstd_of(p, sum, p.input.hidden);
    const float row_amax = most * rstd;
    if (there && lane == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
    if (kPass != RowsPass::kCompat && there) amax = device::max_magnitude(amax, row_amax);

    if constexpr (kPass == RowsPass::kCompat) {
      const float largest = compat_maximum<T>(held, weights, of_pieces, most, rstd, largest_weight);
      if (there) amax = device::max_magnitude(amax, largest);
    }

    if constexpr (kPass == RowsPass::kQuantize) {
      const Scales& scales = p.out.scale;
      float divisor = tensor_divisor;
      if (per_group) {
        float* scale =
            scales.data + row * scales.row_stride + (lane >> group_shift) * scales.group_stride;
        group_factors(p, held, there, lane, pieces, scale, group_step, group_shift, rstd,
                      of_pieces);
      } else if (!p.out.given_scale) {
        divisor = fast_scale(p.out, row_amax);
        if (there && lane == 0 && scales.given()) scales.data[row * scales.row_stride] = divisor;
      } else if (there && scales.row_stride != 0) {
        divisor = __ldcg(scales.data + row * scales.row_stride);
      }
      const float factor = finite_or_nan(rstd * inverse_of(divisor));

      // Compute and store.
      const int stored = there ? slots_in_columns : 0;
      char* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + lane * kElements;
      const auto quantize = [&](auto tag) {
        using Out = typename decltype(tag)::type;
        // Half of the slots at a time where x is wider: eight pieces are more code than an SM's
        // caches hold (bfloat16, 2048 x 4096, row scales and q_t: 25.6 us for 24.3).
        constexpr int kUnrolled = kIsFloat8<T> ? 2 : 1;
#pragma unroll kUnrolled
        for (int first = 0; first < 2; ++first) {
#pragma unroll
          for (int c = 0; c < kHeld; c += 2) {
            const int v = first + c;
            if (!held.used(v)) continue;
            const float of_piece = first == 0 ? of_pieces[c] : of_pieces[c + 1];
            const float f = finite_or_nan((per_group ? of_piece : factor) * held.scale(v));
            const uint4 raw = held.piece(v);
            std::uint32_t codes[kQuads];
#pragma unroll
            for (int k = 0; k < kQuads; ++k) {
              float y[4];
              unpack4<T>(raw, k, y);
              const float4 w = weights.get(v, k);
              y[0] = y[0] * f * w.x;
              y[1] = y[1] * f * w.y;
              y[2] = y[2] * f * w.z;
              y[3] = y[3] * f * w.w;
              codes[k] = device::pack_fp8x4<Out>(y);
            }
            if (v < stored) {
              store_codes<kElements>(q + held.first_piece(v) * kElements, codes, kElements, true);
            }
          }
        }
      };
      if (p.out.dtype == DType::kFloat8E4M3) {
        quantize(TypeTag<Float8E4M3>());
      } else {
        quantize(TypeTag<Float8E5M2>());
      }
    }
    if constexpr (kPass != RowsPass::kStatistics) {
      if (plan.stages > 1) {
        held.next(row + stride);
      } else {
        reduction.sync();
        held.advance(row + stride);
      }
    }
  }

  if (p.makes_maxima()) {
    // On the CTA's own word, so that no warp waits for the others.
    const std::uint32_t largest = device::max_lanes(device::magnitude_bits(amax), 32);
    if (thread % 32 == 0) atomicMax(p.maxima + blockIdx.x, largest);
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
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (plan.added_bytes > 0) {
        return device::launch<rows_kernel<T, kPass, true, 0>>(p.op, launch, p);
      }
    }
    if constexpr (sizeof(T) <= 2) {
      visit_slots(plan.slots, [&](auto slots) {
        device::launch<rows_kernel<T, kPass, false, slots>>(p.op, launch, p);
      });
    } else {
      device::launch<rows_kernel<T, kPass, false, 0>>(p.op, launch, p);
    }
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
