// SPDX-License-Identifier: Apache-2.0
// Backward: dx and the partial sums of dw, in one pass over dy and x.
//
// g = dy (w + offset)   dx[m,n] = rstd g - z rstd^3 mean_n(g z) (+ residual_grad)
// dw[n] = sum_m dy z rstd     z = x s
// bytes  : M N (e_x + 2 e_dy) + scales, and 4 N for each of up to 132 chunks of rows, written and
//          read
// M=8192 N=4096 e4m3, bf16 gradients, groups of 16: 172 MB -> 40.2 us at 4.28 TB/s (copy roof of an
//          H200)
// limit  : DRAM, and 6 us of latencies for the first rows, the last, and the sum of dw: 46.9 us. At
//          any time all CTAs work on rows next to each other, up to 4 of a thread in flight into
//          shared memory. A thread keeps 16 columns of a row in registers while the row's sum is
//          made, beside their weights and sums of dw. 20 instructions an element, of 33 that the
//          floor allows. Rows over 8,192 columns are strips of CTAs in a cluster, which send each
//          other their sums, and work on another row until these are there
// wrong  : rows over 8,192 columns before sm_90, without clusters: the strips' sums are made by a
//          pass of their own, so that dy and x are read twice
#include <bit>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/backward_row.cuh"
#include "fp8_rmsnorm/cuda/row_ring.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

/// Neighbouring elements of a thread: those of 16 bytes of the wider operand.
template <class X, class D>
inline constexpr int kRun = 16 / (sizeof(X) > sizeof(D) ? int{sizeof(X)} : int{sizeof(D)});

/// Rows of a row group between the request of a row's scales in L2 and their load.
constexpr int kScaleAhead = 4;

/// What is known of the rows: kFast, operands are aligned, whole warps share a row and no other CTA
/// has a part of it; kStrips, the same, but several CTAs have; kAligned, operands are aligned.
enum class Access { kFast, kStrips, kAligned, kAny };

/// Registers of a thread: with 120 a CTA of dw.cu has room beside this one's, where it may start
/// early. Others would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class X, class D, Access kAccess>
inline constexpr int kRegisters = 128;
#else
template <class X, class D, Access kAccess>
inline constexpr int kRegisters =
    kAccess == Access::kFast && !(kIsFloat8<X> && sizeof(D) == 4) ? 120 : 128;
#endif

template <class X, class D, Access kAccess>
__global__ void __maxnreg__((kRegisters<X, D, kAccess>))
    backward_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kElements = BackwardPlan::kElements;
  constexpr int kCount = kRun<X, D>, kRuns = kElements / kCount;
  constexpr bool kAligned = kAccess != Access::kAny;
  constexpr bool kWarps = kAccess == Access::kFast || kAccess == Access::kStrips;
  constexpr bool kStrips = kAccess == Access::kStrips || kAccess == Access::kAny;
  constexpr bool kMayBeAll = !kWarps;  // others would spill
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ __align__(16) float warp_sums[DotReduction::kScratch];
  __shared__ StripDots<kStrips ? 2 : 1> strip_dots[kStrips ? BackwardPlan::kMostGroups : 1];
  const BackwardProblem& p = params.problem;
  const BackwardPlan& plan = params.plan;

  // Coordinates.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int row_threads = plan.row_threads, group = thread / row_threads;
  const int lanes = kWarps ? 32 : min(row_threads, 32);  // that share a row
  const int lane = thread % lanes;
  const int lanes_first = thread % 32 - lane;
  const int hidden = static_cast<int>(p.input.hidden);
  const int strip_column = kStrips ? static_cast<int>(blockIdx.y) * plan.strip() : 0;
  const int lanes_column = strip_column + (thread - group * row_threads - lane) * kElements;
  const auto of_run = [&](int run) { return (run * lanes + lane) * kCount; };
  const auto has_run = [&](int run) { return lanes_column + of_run(run) < hidden; };
  const std::int64_t first_row = std::int64_t{blockIdx.x} * plan.row_groups;
  const std::int64_t own_first = first_row + group;
  const auto rows_from = [&](std::int64_t row) {
    return row >= p.input.rows ? 0
                               : static_cast<int>((p.input.rows - row - 1) / params.row_step) + 1;
  };
  const int own_rows = kWarps || group < plan.row_groups ? rows_from(own_first) : 0;
  // Lanes of a warp go together: the first row group has the most rows.
  const int steps = kWarps ? own_rows : rows_from(first_row);
  const bool dots_given = kStrips && params.work == Work::kGivenDots;
  const bool dots_only = kStrips && params.work == Work::kDots;
  const bool makes_dx = params.makes_dx && !dots_only, adds = params.adds && !dots_only;

  // The ring: a stage holds x, dy and residual_grad of one row of every group.
  constexpr int kXBytes = kElements * int{sizeof(X)}, kDyBytes = kElements * int{sizeof(D)};
  constexpr int kAddedAt = 32 * kDyBytes;
  const std::uint32_t first_stage = device::smem_address(ring) + warp * plan.warp_bytes;
  const int stage_bytes = plan.threads / 32 * plan.warp_bytes;
  const int x_at = lanes_first * kXBytes + lane * 16;
  const int dy_at = 32 * kXBytes + lanes_first * kDyBytes + lane * 16;
  const int x_read = x_at + lane * (kCount * int{sizeof(X)} - 16);
  const int dy_read = dy_at + lane * (kCount * int{sizeof(D)} - 16);
  RowCopies<X, kElements, kAligned> x_copies(p.input.x, own_first, lanes_column, lane, hidden);
  RowCopies<D, kElements, kAligned> dy_copies(p.dy, own_first, lanes_column, lane, hidden);
  RowCopies<D, kElements, kAligned> added_copies(p.residual_grad, own_first, lanes_column, lane,
                                                 hidden);
  // Of the row that is next: where its scale and rstd are, and what they are.
  const int scale_shift = params.narrow_scale ? 1 : 2;
  const auto scale_at = [&](int run) {  // past the end of the row: that of its beginning
    return has_run(run) ? ((lanes_column + of_run(run)) >> params.group_shift) << scale_shift : 0;
  };
  const char* next_scale = static_cast<const char*>(p.input.x_scale.data) +
                           ((own_first * p.input.x_scale.row_stride) << scale_shift);
  const float* next_rstd = p.rstd + own_first;
  std::uint32_t scale_ahead[kRuns] = {};
  float rstd_ahead = 0.0f;
  char* dx = static_cast<char*>(p.dx.data) +
             (own_first * p.dx.row_stride + lanes_column + of_run(0)) * int{sizeof(D)};

  device::pdl_trigger();
  // What comes first may come into L2 while predecessors still run: before the rows, whose bytes
  // take microseconds, what the first of them needs. Every fourth CTA asks for the weights: they
  // are the same few lines, which answer one after the other (4096 x 1536: 14.5 us for 12.8).
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    if (has_run(run) && blockIdx.x % 4 == 0) {
      device::prefetch_lines(static_cast<const char*>(p.weight.data) +
                                 (lanes_column + of_run(run)) * params.weight_bytes,
                             kCount * params.weight_bytes);
    }
  }
  if (own_rows > 0) device::prefetch_l2(next_rstd);
#pragma unroll 1
  for (int s = 0; kAligned && s < min(plan.early_rows, own_rows); ++s) {
    if (kIsFloat8<X>) device::prefetch_l2(next_scale + s * params.scale_step + scale_at(0));
    x_copies.prefetch(lanes, s * params.x_step);
    dy_copies.prefetch(lanes, s * params.dy_step);
    if (adds) added_copies.prefetch(lanes, s * params.added_step);
  }
  for (int i = thread; i < DotReduction::kScratch; i += static_cast<int>(blockDim.x)) {
    warp_sums[i] = 0.0f;
  }
  const bool sends = kStrips && plan.cluster && (kWarps || group < plan.row_groups);
  if (sends) strip_dots[group].init(thread - group * row_threads);
  __syncthreads();
  if (kStrips && plan.cluster) {  // all its CTAs have come so far
    device::cluster_arrive();
    device::cluster_wait();
  }
  device::pdl_wait();

  const auto load = [&](int step, std::uint32_t stage) {
    if (step < own_rows) {
      x_copies.copy(stage + x_at, lanes, params.x_step);
      dy_copies.copy(stage + dy_at, lanes, params.dy_step);
      if (adds) added_copies.copy(stage + dy_at + kAddedAt, lanes, params.added_step);
    }
    device::cp_async_commit();
  };
  const auto look_ahead = [&](int step) {
    if (step >= own_rows) return;
    if constexpr (kIsFloat8<X>) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const char* at = next_scale + scale_at(run);
        if (params.narrow_scale) {
          scale_ahead[run] = __ldcg(reinterpret_cast<const std::uint16_t*>(at));
        } else {
          scale_ahead[run] = __ldcg(reinterpret_cast<const std::uint32_t*>(at));
        }
      }
      if (step + kScaleAhead < own_rows) {
        device::prefetch_l2(next_scale + kScaleAhead * params.scale_step + scale_at(0));
      }
      next_scale += params.scale_step;
    }
    rstd_ahead = __ldcg(next_rstd);
    next_rstd += params.row_step;
  };
  load(0, first_stage);
  look_ahead(0);
  float weight[kRuns][kCount], dw[kRuns][kCount] = {};
  {
    const RunWeights<kCount, kRuns> weights(params, lanes_column + of_run(0), lanes * kCount);
#pragma unroll 1
    for (int s = 1; s < plan.stages; ++s) load(s, first_stage + s * stage_bytes);
    weights.get(weight);
  }
  DotReduction reduction(warp_sums, group, row_threads);

  const std::uint32_t end = first_stage + plan.stages * stage_bytes;
  std::uint32_t stage = first_stage;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
  const auto read = [&](std::uint32_t from, int run) {
    struct Raw {
      uint4 x, dy;
    };
    return Raw{
        read_shared<kCount* int{sizeof(X)}>(from + x_read + run * lanes * kCount * int{sizeof(X)}),
        read_shared<kCount* int{sizeof(D)}>(from + dy_read +
                                            run * lanes * kCount * int{sizeof(D)})};
  };
  // z = x s and u = rstd g; on the way dw, and the thread's part of the row's sum of u z.
  const auto unpack_row = [&](std::uint32_t from, const auto& scale, float rstd, auto& z, auto& u,
                              auto& sum) {
    auto next = read(from, 0);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const auto raw = next;
      if (run + 1 < kRuns) next = read(from, run + 1);
      unpack_run<X>(raw.x, z[run]);
      unpack_run<D>(raw.dy, u[run]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (kIsFloat8<X>) z[run][i] *= scale[run];
        u[run][i] *= rstd;
        dw[run][i] = __fmaf_rn(u[run][i], z[run][i], dw[run][i]);
        u[run][i] *= weight[run][i];
        sum[i % 4] = __fmaf_rn(u[run][i], z[run][i], sum[i % 4]);
      }
    }
  };
  const auto add_row = [&](std::uint32_t from, auto& u) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float added[kCount];
      unpack_run<D>(read_shared<kCount* int{sizeof(D)}>(from + dy_read + kAddedAt +
                                                        run * lanes * kCount * int{sizeof(D)}),
                    added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) u[run][i] = __fadd_rn(u[run][i], added[i]);  // no fma
    }
  };
  const auto store_dx = [&](float dot, float rstd, auto& z, auto& u) {
    const float slope = rstd * rstd * (dot * inverse_hidden);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) u[run][i] = __fmaf_rn(-slope, z[run][i], u[run][i]);
      store_run<D, kAligned>(dx + run * lanes * kCount * int{sizeof(D)}, u[run],
                             hidden - lanes_column - of_run(run));
    }
    dx += params.dx_step;
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool there = kWarps || step < own_rows;
    const float rstd = rstd_ahead;
    float scale[kRuns];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      scale[run] = __uint_as_float(scale_ahead[run] << (params.narrow_scale ? 16 : 0));
    }
    look_ahead(step + 1);
    wait_for_copies(plan.stages - 1);
    __syncwarp();

    float z[kRuns][kCount] = {}, u[kRuns][kCount] = {}, sum[4] = {};
    if (there) {
      unpack_row(stage, scale, rstd, z, u, sum);
      // The sums end before u may change: else both forms of u are kept, and 16 moves made.
      asm volatile("" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]));
      if (adds) add_row(stage, u);
    }
    __syncwarp();
    load(step + plan.stages, stage);
    stage = stage + stage_bytes == end ? first_stage : stage + stage_bytes;

    // Reduce: the row's sum of u z.
    if (!params.makes_dx) continue;
    float dot = 0.0f;
    if (!dots_given) dot = reduction.sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if constexpr (kStrips) {
      const std::int64_t row = own_first + std::int64_t{step} * params.row_step;
      if (dots_given && there) {
#pragma unroll 1
        for (int s = 0; s < plan.strips; ++s) dot += __ldcg(params.dots + s * p.input.rows + row);
      }
      if (sends) {
        strip_dots[group].send(step, dot, thread - group * row_threads, plan.strips);
        dot = strip_dots[group].receive(step, plan.strips);
      }
      if (dots_only && there && thread == group * row_threads) {
        params.dots[blockIdx.y * p.input.rows + row] = dot;
      }
    }

    if (makes_dx && there) store_dx(dot, rstd, z, u);
  }
  device::cp_async_wait<0>();
  if (!params.makes_dw || dots_only) return;

  if (plan.sums_at == 0) __syncthreads();  // the ring is free
  float4* sums = reinterpret_cast<float4*>(reinterpret_cast<char*>(ring) + plan.sums_at);
  store_partials<kMayBeAll, kCount, kRuns>(params, sums, thread, group, hidden, strip_column,
                                           lanes_column, of_run, dw);
}

// ------------------------------------------------------------------------------------------- host

template <class X, class D, Access kAccess>
void launch_passes(BackwardParams& params, const device::Launch& launch) {
  constexpr auto kKernel = backward_kernel<X, D, kAccess>;
  if (params.plan.strips > 1 && !params.plan.cluster && params.makes_dx) {
    params.work = Work::kDots;
    device::launch<kKernel>(kBackwardOp, launch, params);
    params.work = Work::kGivenDots;
  }
  device::launch<kKernel>(kBackwardOp, launch, params);
}

}  // namespace

void backward(const BackwardProblem& problem, const BackwardPlan* plan, Stream stream) {
  BackwardParams params;
  params.problem = problem;
  params.plan = plan != nullptr ? *plan : choose(shape_of(problem), this_gpu());
  const BackwardPlan& chosen = params.plan;
  const auto whole = [&](const Rows& r) {
    return problem.input.hidden * dtype_size(r.dtype) % 16 == 0 && rows_aligned(r, 16);
  };
  const bool aligned = whole(problem.input.x) && whole(problem.dy) &&
                       rows_aligned(problem.dx, 16) && rows_aligned(problem.residual_grad, 16);
  params.weight_aligned = whole(problem.weight);
  params.weight_bytes = static_cast<int>(dtype_size(problem.weight.dtype));
  params.row_step = static_cast<int>(chosen.row_step());
  const auto step = [&](const Rows& r) {
    return r.row_stride * dtype_size(r.dtype) * params.row_step;
  };
  params.makes_dx = problem.dx.given();
  params.makes_dw = problem.dw.given();
  params.adds = params.makes_dx && problem.residual_grad.given();
  params.x_step = step(problem.input.x);
  params.dy_step = step(problem.dy);
  params.added_step = step(problem.residual_grad);
  params.dx_step = step(problem.dx);
  params.scale_step = step(problem.input.x_scale);
  params.group_shift = problem.input.x_group > 0
                           ? std::countr_zero(static_cast<unsigned>(problem.input.x_group))
                           : 0;
  params.narrow_scale = problem.input.x_scale.dtype != DType::kFloat32;
  params.partials = reinterpret_cast<float*>(problem.workspace + chosen.partials_at);
  params.dots = reinterpret_cast<float*>(problem.workspace + chosen.dots_at);
  device::Launch launch;
  launch.threads = static_cast<unsigned>(chosen.threads);
  launch.grid = dim3(static_cast<unsigned>(chosen.chunks), static_cast<unsigned>(chosen.strips));
  launch.smem = static_cast<std::size_t>(chosen.smem);
  if (chosen.cluster) launch.cluster_y = static_cast<unsigned>(chosen.strips);
  launch.stream = stream;
  launch.pdl = true;
  launch.carve_out = true;  // for dw.cu, beside it
  const bool strips = chosen.strips > 1, warps = chosen.row_threads >= 32;
  device::visit_dtype<InputDTypes>(problem.input.x.dtype, kBackwardOp, [&](auto x_tag) {
    device::visit_dtype<FloatDTypes>(problem.dy.dtype, kBackwardOp, [&](auto dy_tag) {
      using X = typename decltype(x_tag)::type;
      using D = typename decltype(dy_tag)::type;
      if (aligned && chosen.one_cta()) {
        launch_passes<X, D, Access::kAligned>(params, launch);
      } else if (!aligned || (strips && !warps)) {
        launch_passes<X, D, Access::kAny>(params, launch);
      } else if (strips) {
        launch_passes<X, D, Access::kStrips>(params, launch);
      } else if (warps) {
        launch_passes<X, D, Access::kFast>(params, launch);
      } else {
        launch_passes<X, D, Access::kAligned>(params, launch);
      }
    });
  });
  if (problem.dw.given() && !chosen.one_cta()) reduce_dw(params, stream);
}

}  // namespace mortar::fp8_rmsnorm::cuda
