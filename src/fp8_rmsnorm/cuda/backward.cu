// SPDX-License-Identifier: Apache-2.0
// Backward: dx and the partial sums of dw, in one pass over dy and x.
//
// g = dy (w + offset)   dx[m,n] = rstd g - z rstd^3 mean_n(g z) (+ residual_grad)
// dw[n] = sum_m dy z rstd     z = x s
// bytes  : M N (e_x + 2 e_dy) + scales, and 4 N for each of up to 132 chunks of rows, written and
//          read
// M=8192 N=4096 e4m3, bf16 gradients, groups of 16: 172 MB -> 40.2 us at 4.28 TB/s (copy roof of an
//          H200)
// limit  : DRAM, and 8 us of latencies for the first rows, the last, and the sum of dw. A CTA takes
//          a chunk of adjacent rows, up to 4 of a thread in flight into shared memory; a thread
//          keeps up to 32 columns of a row in registers while the row's sum is made, beside their
//          weights and sums of dw. 19 instructions an element, of 35 that the floor allows. Rows
//          over 8,192 columns are strips of CTAs in a cluster, which send each other their sums
// wrong  : rows over 8,192 columns before sm_90, without clusters: the strips' sums are made by a
//          pass of their own, so that dy and x are read twice
#include <bit>

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

/// Registers of a thread: with 224 a CTA of dw.cu has room beside this one's. FP8 x with float32 dy
/// would spill.
template <class X, class D>
inline constexpr int kRegisters = kIsFloat8<X> && sizeof(D) == 4 ? 255 : 224;

/// Rows of a row group between the request of a row's scales in L2 and their load.
constexpr int kScaleAhead = 4;

/// What is known of the addresses: kFast, operands are aligned and whole warps share a row.
enum class Access { kFast, kAligned, kAny };

template <class X, class D, Access kAccess>
__global__ void __maxnreg__((kRegisters<X, D>))
    backward_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kMost = BackwardPlan::kMostElements;
  constexpr int kCount = kRun<X, D>, kRuns = kMost / kCount;
  constexpr bool kAligned = kAccess != Access::kAny;
  extern __shared__ uint4 ring[];
  __shared__ __align__(16) float warp_sums[DotReduction::kScratch];
  // The dots of a row, from all CTAs of a cluster.
  __shared__ float strip_dots[2][BackwardPlan::kMostStrips];
  __shared__ device::Mbarrier dots_arrived[2];
  const BackwardProblem& p = params.problem;
  const BackwardPlan& plan = params.plan;

  // Coordinates.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int row_threads = plan.row_threads, group = thread / row_threads;
  const int lanes = kAccess == Access::kFast ? 32 : min(row_threads, 32);  // that share a row
  const int lane = thread % lanes;
  const int lanes_first = thread % 32 - lane;
  const int hidden = static_cast<int>(p.input.hidden);
  const int elements = plan.elements, runs = elements / kCount;
  const int strip_column = static_cast<int>(blockIdx.y) * plan.strip();
  const int lanes_column = strip_column + (thread % row_threads - lane) * elements;
  const auto of_run = [&](int run) { return (run * lanes + lane) * kCount; };
  const auto has_run = [&](int run) { return lanes_column + of_run(run) < hidden; };
  const std::int64_t first_row = blockIdx.x * plan.chunk_rows;
  const int chunk_rows = static_cast<int>(min(plan.chunk_rows, p.input.rows - first_row));
  const int steps = ceil_div(chunk_rows, plan.row_groups);
  const int own_rows =
      group < plan.row_groups ? ceil_div(max(0, chunk_rows - group), plan.row_groups) : 0;
  const std::int64_t own_first = first_row + group;
  const bool dots_given = params.work == Work::kGivenDots;
  const bool dots_only = params.work == Work::kDots;
  const bool makes_dx = params.makes_dx && !dots_only, adds = params.adds && !dots_only;

  // The ring: a stage holds x, dy and residual_grad of one row of every group.
  const int x_bytes = elements * int{sizeof(X)}, dy_bytes = elements * int{sizeof(D)};
  const int added_at = 32 * dy_bytes;
  const std::uint32_t first_stage = device::smem_address(ring) + warp * plan.warp_bytes;
  const int stage_bytes = plan.threads / 32 * plan.warp_bytes;
  const int x_at = lanes_first * x_bytes + lane * 16;
  const int dy_at = 32 * x_bytes + lanes_first * dy_bytes + lane * 16;
  const int x_read = x_at + lane * (kCount * int{sizeof(X)} - 16);
  const int dy_read = dy_at + lane * (kCount * int{sizeof(D)} - 16);
  RowCopies<X, kMost, kAligned> x_copies(p.input.x, own_first, lanes_column, lanes * elements, lane,
                                         hidden);
  RowCopies<D, kMost, kAligned> dy_copies(p.dy, own_first, lanes_column, lanes * elements, lane,
                                          hidden);
  RowCopies<D, kMost, kAligned> added_copies(p.residual_grad, own_first, lanes_column,
                                             lanes * elements, lane, hidden);
  // Of the row that is next: where its scale and rstd are, and what they and the strips' dots are.
  const int scale_shift = params.narrow_scale ? 1 : 2;
  const auto scale_at = [&](int run) {  // past the end of the row: that of its beginning
    return has_run(run) ? ((lanes_column + of_run(run)) >> params.group_shift) << scale_shift : 0;
  };
  const char* next_scale = static_cast<const char*>(p.input.x_scale.data) + scale_at(0) +
                           ((own_first * p.input.x_scale.row_stride) << scale_shift);
  int scale_offset[kRuns];
#pragma unroll
  for (int run = 0; run < kRuns; ++run) scale_offset[run] = scale_at(run) - scale_at(0);
  const float* next_rstd = p.rstd + own_first;
  std::uint32_t scale_ahead[kRuns] = {};
  float rstd_ahead = 0.0f, dot_ahead = 0.0f;
  char* dx = static_cast<char*>(p.dx.data) +
             (own_first * p.dx.row_stride + lanes_column + of_run(0)) * int{sizeof(D)};

  device::pdl_trigger();
  // What comes first may come into L2 while predecessors still run.
  for (int s = 0; kAligned && s < min(plan.stages, own_rows); ++s) {
    x_copies.prefetch(lanes, s * params.x_step);
    dy_copies.prefetch(lanes, s * params.dy_step);
    if (adds) added_copies.prefetch(lanes, s * params.added_step);
    if (kIsFloat8<X>) device::prefetch_l2(next_scale + s * params.scale_step);
  }
  if (own_rows > 0) device::prefetch_l2(next_rstd);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    if (has_run(run)) {
      device::prefetch_l2(static_cast<const char*>(p.weight.data) +
                          (lanes_column + of_run(run)) * params.weight_bytes);
    }
  }
  device::pdl_wait();

  const auto load = [&](int step, std::uint32_t stage) {
    if (step < own_rows) {
      x_copies.copy(stage + x_at, lanes, params.x_step);
      dy_copies.copy(stage + dy_at, lanes, params.dy_step);
      if (adds) added_copies.copy(stage + dy_at + added_at, lanes, params.added_step);
    }
    device::cp_async_commit();
  };
#pragma unroll 1
  for (int s = 0; s < plan.stages; ++s) load(s, first_stage + s * stage_bytes);
  const auto look_ahead = [&](int step) {
    if (step >= own_rows) return;
    if constexpr (kIsFloat8<X>) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const char* at = next_scale + scale_offset[run];
        if (params.narrow_scale) {
          scale_ahead[run] = __ldcg(reinterpret_cast<const std::uint16_t*>(at));
        } else {
          scale_ahead[run] = __ldcg(reinterpret_cast<const std::uint32_t*>(at));
        }
      }
      if (step + kScaleAhead < own_rows) {
        device::prefetch_l2(next_scale + kScaleAhead * params.scale_step);
      }
      next_scale += params.scale_step;
    }
    rstd_ahead = __ldcg(next_rstd);
    next_rstd += plan.row_groups;
    if (!dots_given) return;
    const float* dots = params.dots + own_first + std::int64_t{step} * plan.row_groups;
    dot_ahead = 0.0f;
    for (int s = 0; s < plan.strips; ++s) dot_ahead += __ldcg(dots + s * p.input.rows);
  };
  look_ahead(0);

  float weight[kRuns][kCount], dw[kRuns][kCount] = {};
  load_weights<kCount, kRuns>(params, lanes_column + of_run(0), lanes * kCount, weight);
  for (int i = thread; i < DotReduction::kScratch; i += static_cast<int>(blockDim.x)) {
    warp_sums[i] = 0.0f;
  }
  if (plan.cluster && thread < 2) dots_arrived[thread].init(1);
  __syncthreads();
  if (plan.cluster) {  // all its CTAs have come so far
    device::cluster_arrive();
    device::cluster_wait();
  }
  DotReduction reduction(warp_sums, group, row_threads);

  const std::uint32_t end = first_stage + plan.stages * stage_bytes;
  std::uint32_t stage = first_stage;
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool there = step < own_rows;
    const float rstd = rstd_ahead, given_dot = dot_ahead;
    float scale[kRuns];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      scale[run] = __uint_as_float(scale_ahead[run] << (params.narrow_scale ? 16 : 0));
    }
    look_ahead(step + 1);
    wait_for_copies(plan.stages - 1);
    __syncwarp();

    struct Raw {
      uint4 x, dy;
    };
    const auto read = [&](int run) {
      return Raw{read_shared<kCount* int{sizeof(X)}>(stage + x_read +
                                                     run * lanes * kCount * int{sizeof(X)}),
                 read_shared<kCount* int{sizeof(D)}>(stage + dy_read +
                                                     run * lanes * kCount * int{sizeof(D)})};
    };
    // z = x s, and dy rstd.
    const auto unpack = [&](int run, const Raw& raw, float(&z)[kCount], float(&scaled_dy)[kCount]) {
      unpack_run<X>(raw.x, z);
      unpack_run<D>(raw.dy, scaled_dy);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (kIsFloat8<X>) z[i] *= scale[run];
        scaled_dy[i] *= rstd;
      }
    };
    const auto add = [&](int run, float(&u)[kCount]) {
      float added[kCount];
      unpack_run<D>(read_shared<kCount* int{sizeof(D)}>(stage + dy_read + added_at +
                                                        run * lanes * kCount * int{sizeof(D)}),
                    added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) u[i] = __fadd_rn(u[i], added[i]);  // in no kernel an fma
    };
    // u = rstd g.
    float z[kRuns][kCount], u[kRuns][kCount], sum[4] = {};
    if (there) {
      Raw next = read(0);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        if (run >= runs) break;
        const Raw raw = next;
        if (run + 1 < runs) next = read(run + 1);
        unpack(run, raw, z[run], u[run]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          dw[run][i] = __fmaf_rn(u[run][i], z[run][i], dw[run][i]);
          u[run][i] *= weight[run][i];
          sum[i % 4] = __fmaf_rn(u[run][i], z[run][i], sum[i % 4]);
        }
        if (adds) add(run, u[run]);
      }
    }
    __syncwarp();
    load(step + plan.stages, stage);

    // Reduce: the row's sum of u z.
    float dot = given_dot;
    if (!dots_given && params.makes_dx) {
      dot = reduction.sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
      if (plan.cluster) {
        // Two sets in turn: a CTA sends its next dot only when it has read those of the row before.
        float* dots = strip_dots[step % 2];
        device::Mbarrier& arrived = dots_arrived[step % 2];
        if (thread == 0) arrived.arrive_and_expect(plan.strips * int{sizeof(float)});
        if (thread < plan.strips) {
          device::send_to_cluster(dots + blockIdx.y, dot, &arrived, thread);
        }
        arrived.wait(static_cast<std::uint32_t>(step / 2 % 2));
        dot = 0.0f;
        for (int s = 0; s < plan.strips; ++s) dot += dots[s];
      }
      if (dots_only && there && thread % row_threads == 0) {
        params.dots[blockIdx.y * p.input.rows + own_first + std::int64_t{step} * plan.row_groups] =
            dot;
      }
    }

    // Store.
    if (makes_dx && there) {
      const float slope = rstd * rstd * (dot * inverse_hidden);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        if (run >= runs) break;
#pragma unroll
        for (int i = 0; i < kCount; ++i) u[run][i] = __fmaf_rn(-slope, z[run][i], u[run][i]);
        store_run<D, kAligned>(dx + run * lanes * kCount * int{sizeof(D)}, u[run],
                               hidden - lanes_column - of_run(run));
      }
      dx += params.dx_step;
    }
    stage = stage + stage_bytes == end ? first_stage : stage + stage_bytes;
  }
  device::cp_async_wait<0>();
  if (!params.makes_dw || dots_only) return;

  // The sums of the row groups, in their order.
  __syncthreads();
  float* sums = reinterpret_cast<float*>(ring);
  const int strip = plan.strip();
  if (group < plan.row_groups) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if (run >= runs) break;
      float4* to = reinterpret_cast<float4*>(sums + group * strip + lanes_column - strip_column +
                                             of_run(run));
#pragma unroll
      for (int q = 0; q < kCount / 4; ++q) {
        to[q] =
            make_float4(dw[run][4 * q], dw[run][4 * q + 1], dw[run][4 * q + 2], dw[run][4 * q + 3]);
      }
    }
  }
  __syncthreads();
  const std::int64_t stride = round_up<std::int64_t>(hidden, 4);
  for (int n = thread; n < min(strip, hidden - strip_column); n += static_cast<int>(blockDim.x)) {
    float sum = 0.0f;
    for (int g = 0; g < plan.row_groups; ++g) sum += sums[g * strip + n];
    params.partials[blockIdx.x * stride + strip_column + n] = sum;
  }
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
  const auto step = [&](const Rows& r) {
    return r.row_stride * dtype_size(r.dtype) * chosen.row_groups;
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
  device::visit_dtype<InputDTypes>(problem.input.x.dtype, kBackwardOp, [&](auto x_tag) {
    device::visit_dtype<FloatDTypes>(problem.dy.dtype, kBackwardOp, [&](auto dy_tag) {
      using X = typename decltype(x_tag)::type;
      using D = typename decltype(dy_tag)::type;
      if (!aligned) return launch_passes<X, D, Access::kAny>(params, launch);
      if (chosen.row_threads < 32) return launch_passes<X, D, Access::kAligned>(params, launch);
      launch_passes<X, D, Access::kFast>(params, launch);
    });
  });
  if (problem.dw.given()) reduce_dw(params, stream);
}

}  // namespace mortar::fp8_rmsnorm::cuda
