// SPDX-License-Identifier: Apache-2.0
// Backward: dx and the partial sums of dw, in one pass over dy and x.
//
// g = dy (w + offset)   dx[m,n] = rstd g - z rstd^3 mean_n(g z) (+ residual_grad)
// dw[n] = sum_m dy z rstd     z = x s
// bytes  : M N (e_x + 2 e_dy) + scales, and 4 N for each of 128 chunks of rows, written and read
// M=8192 N=4096 e4m3, bf16 gradients, groups of 16: 172 MB -> 40.2 us at 4.28 TB/s (copy roof of an
//          H200)
// limit  : should be DRAM, is instructions: 60 an element of 37 that the floor allows. A CTA takes
//          a chunk of adjacent rows; a thread keeps 16 columns (8 of 16- and 32-bit x) and their
//          sums of dw in registers, and up to 8 rows to come are in flight into shared memory
// wrong  : rows over 16,384 (8,192) columns are cut into strips, whose dots are made by a pass of
//          their own, so that dy and x are read twice
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/row_ring.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kMostThreads = BackwardPlan::kMostThreads, kMostPieces = BackwardPlan::kMostPieces;

/// Elements of a thread's piece of a row.
template <class T>
inline constexpr int kBackwardPiece = sizeof(T) == 1 ? 16 : 8;

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kElements = kBackwardPiece<T>, kQuads = kElements / 4, kRun = 8;
  constexpr int kXVectors = kElements * int{sizeof(T)} / 16;
  extern __shared__ uint4 ring[];
  __shared__ float warp_sums[2][kMostThreads / 32];
  const BackwardProblem& p = params.problem;
  const BackwardPlan& plan = params.plan;

  // Coordinates.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int row_threads = plan.row_threads, group = thread / row_threads;
  const int in_row = thread % row_threads;
  Lanes lanes;
  lanes.count = min(row_threads, 32);
  lanes.first = thread % 32 / lanes.count * lanes.count;
  lanes.lane = thread % 32 - lanes.first;
  const int hidden = static_cast<int>(p.input.hidden);
  const int strip_pieces = row_threads * plan.pieces, strip = strip_pieces * kElements;
  const int strip_column = static_cast<int>(blockIdx.y) * strip;
  const int warp_column = strip_column + (in_row - lanes.lane) * kElements;  // of the first piece
  const int own_column = warp_column + lanes.lane * kElements, piece_step = row_threads * kElements;
  const std::int64_t first_row = blockIdx.x * plan.chunk_rows;
  const int chunk_rows = static_cast<int>(min(plan.chunk_rows, p.input.rows - first_row));
  const bool grouped = kIsFloat8<T> && p.input.x_group != 0;
  const bool dots_given = params.work == Work::kGivenDots, dots_only = params.work == Work::kDots;
  const bool adds = p.residual_grad.given() && !dots_only && p.dx.given();

  // The ring: a stage holds x, dy, residual_grad and the scales of one row of every group.
  const Vectors x_vectors(p.input.x, kElements, warp_column, hidden, params.x_aligned);
  const Vectors dy_vectors(p.dy, kElements, warp_column, hidden, params.dy_aligned);
  const Vectors added_vectors(adds ? p.residual_grad : p.dy, kElements, warp_column, hidden,
                              params.dy_aligned);
  const ScaleVectors scale_vectors(p.input, warp_column + lanes.lane * kElements);
  const int dy_at = kXVectors, added_at = dy_at + dy_vectors.count();
  const int scale_at = added_at + (p.residual_grad.given() ? dy_vectors.count() : 0);
  const int run_vectors = p.dy.dtype == DType::kFloat32 ? 2 : 1;
  const int warp_size = (scale_at + (grouped ? 1 : 0)) * 32;
  const int stage_size = plan.threads / 32 * plan.pieces * warp_size;
  const auto place_of = [&](int stage, int piece) {
    return ring + stage * stage_size + (piece * (plan.threads / 32) + warp) * warp_size;
  };
  float4* weights = reinterpret_cast<float4*>(reinterpret_cast<char*>(ring) + plan.weights_at);

  device::pdl_wait();
  device::pdl_trigger();

  const int iterations = ceil_div(chunk_rows, plan.row_groups);
  const auto row_in_chunk = [&](int iteration) { return iteration * plan.row_groups + group; };
  const auto is_there = [&](int iteration) {
    return group < plan.row_groups && row_in_chunk(iteration) < chunk_rows;
  };
  const auto load = [&](int iteration, int stage) {
    const std::int64_t row = first_row + row_in_chunk(iteration);
    if (is_there(iteration)) {
#pragma unroll 1
      for (int piece = 0; piece < plan.pieces; ++piece) {
        uint4* to = place_of(stage, piece);
        const int ahead = piece * piece_step;
        x_vectors.copy(to, lanes, row, ahead);
        dy_vectors.copy(to + dy_at * 32, lanes, row, ahead);
        if (adds) added_vectors.copy(to + added_at * 32, lanes, row, ahead);
        if (grouped && own_column + ahead < hidden) {
          scale_vectors.copy(to + scale_at * 32 + thread % 32, row, ahead);
        }
      }
    }
    device::cp_async_commit();
  };
  const auto rstd_of = [&](int iteration) {
    return is_there(iteration) ? __ldcg(p.rstd + first_row + row_in_chunk(iteration)) : 0.0f;
  };
  for (int stage = 0; stage + 1 < plan.stages; ++stage) load(stage, stage);
  float next_rstd = rstd_of(0);
  for_weights(p.weight, p.weight_offset, strip_column, hidden - strip_column, strip, thread,
              static_cast<int>(blockDim.x), [&](int n, float w) {
                const int piece = n / kElements, quad = n % kElements / 4;
                reinterpret_cast<float*>(weights)[(quad * strip_pieces + piece) * 4 + n % 4] = w;
              });
  __syncthreads();
  const auto weight_of = [&](int piece, int quad) {
    return weights[quad * strip_pieces + piece * row_threads + in_row];
  };

  float dw[kMostPieces][kElements] = {};
  int stage = 0, free_stage = plan.stages - 1;
  const auto advance = [&] {
    free_stage = stage;
    stage = stage + 1 == plan.stages ? 0 : stage + 1;
  };
  const float inverse_hidden = 1.0f / static_cast<float>(hidden);
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    load(i + plan.stages - 1, free_stage);
    const float rstd = next_rstd;
    next_rstd = rstd_of(i + 1);
    wait_for_copies(plan.stages - 1);
    __syncwarp();
    const bool there = is_there(i);
    const std::int64_t row = first_row + row_in_chunk(i);
    // A run is eight of the thread's columns: a vector of 16-bit dy.
    const auto read_run = [&](const uint4* vectors, int run, float(&x)[kRun], float(&dy)[kRun]) {
#pragma unroll
      for (int q = 0; q < kRun / 4; ++q) {
        constexpr int kVectorQuads = kQuads / kXVectors;
        const int k = run * (kRun / 4) + q;
        float quad[4];
        unpack4<T>(vectors[k / kVectorQuads * 32], k % kVectorQuads, quad);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * q + j] = quad[j];
      }
      read_own(vectors + (dy_at + run * run_vectors) * 32, p.dy.dtype, dy);
    };

    // Reduce: the row's sum of g z.
    float dot = 0.0f, scale[kMostPieces];
#pragma unroll
    for (int piece = 0; piece < kMostPieces; ++piece) {
      scale[piece] = 1.0f;
      if (piece >= plan.pieces) continue;
      const int ahead = piece * piece_step;
      if (!there || own_column + ahead >= hidden) continue;
      const uint4* vectors = place_of(stage, piece) + thread % 32;
      if (grouped) scale[piece] = scale_vectors.read(vectors + scale_at * 32, row, ahead);
      if (dots_given) continue;
      float sum[4] = {};
#pragma unroll
      for (int run = 0; run < kElements / kRun; ++run) {
        float x[kRun], dy[kRun];
        read_run(vectors, run, x, dy);
#pragma unroll
        for (int q = 0; q < kRun / 4; ++q) {
          const float4 w = weight_of(piece, run * (kRun / 4) + q);
          sum[0] = __fmaf_rn(dy[4 * q] * w.x, x[4 * q], sum[0]);
          sum[1] = __fmaf_rn(dy[4 * q + 1] * w.y, x[4 * q + 1], sum[1]);
          sum[2] = __fmaf_rn(dy[4 * q + 2] * w.z, x[4 * q + 2], sum[2]);
          sum[3] = __fmaf_rn(dy[4 * q + 3] * w.w, x[4 * q + 3], sum[3]);
        }
      }
      dot += ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scale[piece];
    }
    if (dots_given) {
      dot = 0.0f;
      if (there) {
        for (int s = 0; s < plan.strips; ++s) dot += __ldcg(params.dots + s * p.input.rows + row);
      }
    } else {
      dot = device::sum_lanes(dot, lanes.count);
      if (row_threads > 32) {
        // Two sets of sums in turn: nobody writes one before all have read it.
        float* sums = warp_sums[i % 2] + group * (row_threads / 32);
        if (thread % 32 == 0) warp_sums[i % 2][warp] = dot;
        row_group_barrier(group, row_threads);
        dot = 0.0f;
        for (int w = 0; w < row_threads / 32; ++w) dot += sums[w];
      }
      if (dots_only) {
        if (there && in_row == 0) params.dots[blockIdx.y * p.input.rows + row] = dot;
        __syncwarp();  // the stage is free
        advance();
        continue;
      }
    }

    // Compute; dx takes the place of dy.
    const float slope = rstd * rstd * rstd * (dot * inverse_hidden);
#pragma unroll
    for (int piece = 0; piece < kMostPieces; ++piece) {
      if (piece >= plan.pieces) break;
      if (!there || own_column + piece * piece_step >= hidden) continue;
      uint4* vectors = place_of(stage, piece) + thread % 32;
      const float of_x = -slope * scale[piece], of_dw = rstd * scale[piece];
#pragma unroll
      for (int run = 0; run < kElements / kRun; ++run) {
        float x[kRun], dy[kRun], dx[kRun] = {};
        read_run(vectors, run, x, dy);
        if (adds) {
          read_own(vectors + (added_at + run * run_vectors) * 32, p.dy.dtype, dx);
        }
#pragma unroll
        for (int q = 0; q < kRun / 4; ++q) {
          const float4 weight = weight_of(piece, run * (kRun / 4) + q);
          const float w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int n = 4 * q + j, of_piece = run * kRun + n;
            dx[n] = __fmaf_rn(dy[n] * w[j], rstd, __fmaf_rn(of_x, x[n], dx[n]));
            dw[piece][of_piece] = __fmaf_rn(dy[n], x[n] * of_dw, dw[piece][of_piece]);
          }
        }
        write_own(vectors + (dy_at + run * run_vectors) * 32, p.dy.dtype, dx);
      }
    }
    __syncwarp();

    // Store.
    if (there && p.dx.given()) {
      char* to = static_cast<char*>(p.dx.data) +
                 ((row * p.dx.row_stride + warp_column) << dy_vectors.size_shift);
#pragma unroll 1
      for (int piece = 0; piece < plan.pieces; ++piece) {
        const uint4* from = place_of(stage, piece) + dy_at * 32;
        const int ahead = piece * piece_step;
        if (params.dy_aligned) {
          dy_vectors.for_each(lanes, ahead, [&](int at, int bytes, int) {
            __stcs(reinterpret_cast<uint4*>(to + bytes), from[at]);
          });
        } else {
          dy_vectors.for_each_slowly(lanes, ahead, [&](int at, int bytes, int elements) {
            store_unaligned(to + bytes, from[at], elements << dy_vectors.size_shift);
          });
        }
      }
    }
    __syncwarp();  // the stage is free
    advance();
  }
  device::cp_async_wait<0>();
  if (dots_only || !p.dw.given()) return;

  // The sums of the row groups, in their order.
  __syncthreads();
  float* sums = reinterpret_cast<float*>(ring);
  if (group < plan.row_groups) {
#pragma unroll
    for (int piece = 0; piece < kMostPieces; ++piece) {
      if (piece >= plan.pieces) continue;
      float4* to =
          reinterpret_cast<float4*>(sums + group * strip + piece * piece_step + in_row * kElements);
#pragma unroll
      for (int k = 0; k < kQuads; ++k) {
        to[k] = make_float4(dw[piece][4 * k], dw[piece][4 * k + 1], dw[piece][4 * k + 2],
                            dw[piece][4 * k + 3]);
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

}  // namespace

void backward(const BackwardProblem& problem, const BackwardPlan* plan, Stream stream) {
  BackwardParams params;
  params.problem = problem;
  params.plan = plan != nullptr ? *plan : choose(shape_of(problem), this_gpu());
  const BackwardPlan& chosen = params.plan;
  const auto whole = [&](const Rows& r) {
    return problem.input.hidden * dtype_size(r.dtype) % 16 == 0 && rows_aligned(r, 16);
  };
  params.x_aligned = whole(problem.input.x);
  params.dy_aligned =
      whole(problem.dy) && rows_aligned(problem.dx, 16) && rows_aligned(problem.residual_grad, 16);
  params.partials = reinterpret_cast<float*>(problem.workspace + chosen.partials_at);
  params.dots = reinterpret_cast<float*>(problem.workspace + chosen.dots_at);
  device::Launch launch;
  launch.threads = static_cast<unsigned>(chosen.threads);
  launch.grid = dim3(static_cast<unsigned>(chosen.chunks), static_cast<unsigned>(chosen.strips));
  launch.smem = static_cast<std::size_t>(chosen.smem);
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(problem.input.x.dtype, kBackwardOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (chosen.strips > 1) {
      params.work = Work::kDots;
      device::launch<backward_kernel<T>>(kBackwardOp, launch, params);
      params.work = Work::kGivenDots;
    }
    device::launch<backward_kernel<T>>(kBackwardOp, launch, params);
  });
  if (problem.dw.given()) reduce_dw(params, stream);
}

}  // namespace mortar::fp8_rmsnorm::cuda
