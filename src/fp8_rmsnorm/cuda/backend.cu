// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's table of functions: from a problem to the kernels of its plan.
#include "device/launch.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

GpuShape gpu_shape(const device::DeviceInfo& info) {
  return {info.num_sms, info.max_smem, info.arch >= 90, info.l2_bytes};
}

GpuShape gpu_of(Device device) { return gpu_shape(device::device_info(device.index)); }

void set_format(ForwardShape& s, const Quantize& out) {
  s.scaling = out.scaling;
  s.group = out.group;
  s.given_scale = out.given_scale;
  s.stochastic = out.rng != nullptr;
  s.q = out.q.given();
  s.q_t = out.q_t.given();
}

void set_input(ForwardShape& s, const Input& input) {
  s.rows = input.rows;
  s.hidden = input.hidden;
  s.x_bytes = static_cast<int>(dtype_size(input.x.dtype));
  s.x_group = input.x_group;
  s.x_scale_bytes = input.x_group > 0 ? static_cast<int>(dtype_size(input.x_scale.dtype)) : 0;
}

/// Launches the kernels of p.plan.
void run(ForwardParams p, Stream stream) {
  if (p.input.rows == 0 && p.out.scaling == Fp8Scaling::kRow) return empty_columns(p, stream);
  const ForwardPlan& plan = p.plan;
  const std::int64_t hidden = p.input.hidden;
  const std::int64_t element = dtype_size(p.input.x.dtype), piece = 16 / element;
  p.x_aligned = hidden % piece == 0 && rows_aligned(p.input.x, 16) &&
                rows_aligned(p.residual, 16) && rows_aligned(p.normed, 16);
  p.q_aligned = hidden % piece == 0 && rows_aligned(p.out.q, piece);
  if (plan.small_plan.possible) return small(p, stream);
  p.q_t_aligned = rows_aligned(p.out.q_t, 16);
  const bool nearest = p.out.rng == nullptr, fast = p.out.numerics == Fp8Numerics::kFast;
  // What the kernels for aligned rows do: see there.
  const bool held = plan.held_plan.possible && p.x_aligned && p.q_aligned &&
                    reinterpret_cast<std::uintptr_t>(p.weight.data) % 16 == 0 &&
                    (!p.residual.given() || plan.held_plan.added_bytes > 0) && !p.normed.given() &&
                    (plan.tiles_make_q || !p.out.q.given() || (nearest && fast));
  p.scales_in_rows = plan.held_plan.scale_bytes > 0 && rows_aligned(p.input.x_scale, 16);
  const FusedPlan& fused_plan = plan.fused_plan;
  if (held && fused_plan.possible && plan.rows && nearest && !p.residual.given() &&
      (fast || (p.norm && !p.out.given_scale)) && p.q_t_aligned) {
    p.scales_in_rows = fused_plan.held.scale_bytes > 0 && rows_aligned(p.input.x_scale, 16);
    p.maxima_count = fused_plan.grid;
    return fused(p, stream);
  }
  const bool in_bands = plan.band_plan.possible && p.x_aligned && p.q_aligned && nearest && fast &&
                        !p.residual.given() && !p.normed.given();
  const RowBlockPlan& blocks = plan.block_plan;
  const bool in_blocks = blocks.possible && p.x_aligned && p.q_aligned && nearest && fast &&
                         !p.residual.given() && !p.normed.given() &&
                         reinterpret_cast<std::uintptr_t>(p.weight.data) % 16 == 0;
  p.maxima_count = !plan.rows  ? plan.tile_plan.grid
                   : in_bands  ? plan.band_plan.grid
                   : in_blocks ? blocks.finish_grid
                   : held      ? plan.held_plan.grid
                               : plan.row_plan.grid;
  if (in_bands) {
    bands(p, stream);
    if (p.makes_maxima()) reduce_amax(p, stream);
    return;
  }
  if (in_blocks) {
    row_blocks(p, stream);
  } else if (plan.rows && held) {
    rows(p, stream);
  } else if (plan.rows) {
    if (p.norm && !plan.row_plan.shared_weights) convert_weights(p, stream);
    any_rows(p, stream);
  }
  if (p.residual.given()) {  // from now on it is what is normalised
    p.input.x = p.residual;
    p.input.x_scale = {};
    p.input.x_group = 0;
    const std::int64_t of_residual = 16 / dtype_size(p.residual.dtype);
    p.x_aligned = hidden % of_residual == 0 && rows_aligned(p.residual, 16);
    p.q_aligned = hidden % of_residual == 0 && rows_aligned(p.out.q, of_residual);
  }
  p.x_is_there = plan.rows && !p.residual.given();
  const bool draws = TilesPlan::draws(static_cast<int>(dtype_size(p.input.x.dtype)),
                                      p.out.scaling != Fp8Scaling::kTensor);
  const bool whole = !plan.tile_plan.any && p.x_aligned && p.q_aligned && !p.tiles_make_maxima() &&
                     (nearest ? fast || (p.norm && !p.out.given_scale) : fast && draws);
  TilesPlan& tile_plan = p.plan.tile_plan;
  if (!whole) {  // the kernels for any rows have tiles side by side
    tile_plan.step = TilesPlan::kRows;
  } else if (tile_plan.step < TilesPlan::kRows && !p.q_t_aligned) {
    tile_plan.step = TilesPlan::kRows - TilesPlan::shared(false);
  }
  tile_plan.tiles = count_tiles(p.input.rows, hidden, tile_plan.step);
  p.walk = TileWalk(p.plan.tile_plan,
                    static_cast<int>(ceil_div<std::int64_t>(hidden, TilesPlan::kColumns)));
  if (plan.columns && !in_blocks) (whole ? column_maxima : any_column_maxima)(p, stream);
  const bool inside = whole && tile_plan.whole && p.q_t_aligned &&
                      dtype_size(p.input.x.dtype) <= 2 &&  // a residual may be wider than x
                      reinterpret_cast<std::uintptr_t>(p.rstd) % 16 == 0;
  if (plan.tiles) (inside ? whole_tiles : whole ? tiles : any_tiles)(p, stream);
  if (plan.amax && p.out.amax != nullptr) reduce_amax(p, stream);
}

/// Pointers into the workspace.
void set_workspace(ForwardParams& p, std::byte* workspace) {
  const ForwardPlan& plan = p.plan;
  p.maxima = reinterpret_cast<std::uint32_t*>(workspace + plan.maxima_at);
  if (plan.columns) {
    p.column_maxima = reinterpret_cast<std::uint32_t*>(workspace + plan.column_maxima_at);
  }
  if (plan.tiles && p.norm && p.rstd == nullptr) {
    p.rstd = reinterpret_cast<float*>(workspace + plan.rstd_at);
  }
  p.partials = reinterpret_cast<float*>(workspace + plan.partials_at);
  if (!plan.row_plan.shared_weights) {
    p.weights = reinterpret_cast<float*>(workspace + plan.weights_at);
  }
}

}  // namespace

GpuShape this_gpu() { return gpu_shape(device::current_device()); }

ForwardShape shape_of(const ForwardProblem& p) {
  ForwardShape s;
  set_input(s, p.input);
  set_format(s, p.out);
  s.adds = s.x_bytes == 2 && p.residual.given() && p.residual.dtype == p.input.x.dtype;
  return s;
}

ForwardShape shape_of(const QuantizeProblem& p) {
  ForwardShape s;
  set_input(s, p.input);
  s.norm = false;
  set_format(s, p.out);
  return s;
}

BackwardShape shape_of(const BackwardProblem& p) {
  return {p.input.rows, p.input.hidden, static_cast<int>(dtype_size(p.input.x.dtype)),
          static_cast<int>(dtype_size(p.dy.dtype)), p.residual_grad.given()};
}

void forward(const ForwardProblem& problem, const ForwardPlan* plan, Stream stream) {
  ForwardParams p;
  p.input = problem.input;
  p.weight = problem.weight;
  p.residual = problem.residual;
  p.normed = problem.normed;
  p.eps = problem.eps;
  p.weight_offset = problem.weight_offset;
  p.norm = true;
  p.rstd = problem.rstd;
  p.out = problem.out;
  p.plan = plan != nullptr ? *plan : choose(shape_of(problem), this_gpu());
  set_workspace(p, problem.workspace);
  run(p, stream);
}

void quantize(const QuantizeProblem& problem, const ForwardPlan* plan, Stream stream) {
  ForwardParams p;
  p.op = "fp8_quantize";
  p.input = problem.input;
  p.out = problem.out;
  p.plan = plan != nullptr ? *plan : choose(shape_of(problem), this_gpu());
  set_workspace(p, problem.workspace);
  run(p, stream);
}

namespace {

void forward_default(const ForwardProblem& p, Stream stream) { forward(p, nullptr, stream); }
void backward_default(const BackwardProblem& p, Stream stream) { backward(p, nullptr, stream); }
void quantize_default(const QuantizeProblem& p, Stream stream) { quantize(p, nullptr, stream); }

std::int64_t forward_workspace(const ForwardProblem& p, Device device) {
  return choose(shape_of(p), gpu_of(device)).workspace_bytes;
}
std::int64_t backward_workspace(const BackwardProblem& p, Device device) {
  return choose(shape_of(p), gpu_of(device)).workspace_bytes;
}
std::int64_t quantize_workspace(const QuantizeProblem& p, Device device) {
  return choose(shape_of(p), gpu_of(device)).workspace_bytes;
}

}  // namespace

const Backend kBackend = {forward_default,   backward_default,   quantize_default,
                          forward_workspace, backward_workspace, quantize_workspace};

}  // namespace mortar::fp8_rmsnorm::cuda
