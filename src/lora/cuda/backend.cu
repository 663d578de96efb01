// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: which passes an op runs and where h lies between them.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "device/launch.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/operand_layout.h"
#include "lora/launch_plan.h"

namespace mortar::lora::cuda {

namespace {

Machine machine() {
  const device::DeviceInfo& d = device::current_device();
  return {d.num_sms, d.arch, d.max_smem, d.sm_smem};
}

LoraShape shape_of(Op op, std::int64_t num_tokens, const WeightsView& w, const GroupsView& groups) {
  LoraShape s;
  s.op = op;
  s.num_tokens = num_tokens;
  s.hidden = w.hidden;
  s.num_adapters = w.num_adapters;
  std::copy_n(w.widths, w.num_slices, s.widths.begin());
  s.num_slices = w.num_slices;
  s.max_rank = s.h_columns = w.max_rank;
  s.one_type = is_half(w.dtype);
  s.segments = groups.ids != nullptr;
  s.ragged = w.table == nullptr && w.ranks != nullptr;
  s.boxes = op == Op::kApply && takes_boxes(w);
  s.b_boxes = s.boxes && takes_boxes_of_b(w);
  return s;
}
LoraShape shape_of(const ShrinkProblem& p) {
  LoraShape s = shape_of(Op::kShrink, p.num_tokens, p.weights, p.groups);
  s.h_columns = static_cast<int>(p.h.width);
  s.one_type = s.one_type && p.x.dtype == p.weights.dtype;
  s.float_weights = p.weights.dtype == DType::kFloat32 && p.x.dtype == DType::kBFloat16;
  s.aligned_x = allows_vectors(p.x, p.weights);
  return s;
}
/// Whether every row of h starts at a multiple of 16 bytes.
bool has_aligned_rows(const RowsView& h) {
  const auto unit = static_cast<std::int64_t>(16 / dtype_size(h.dtype));
  return is_aligned(h.data) && h.row_stride % unit == 0 && h.slice_stride % unit == 0;
}

LoraShape shape_of(const ExpandProblem& p) {
  LoraShape s = shape_of(Op::kExpand, p.num_tokens, p.weights, p.groups);
  s.one_type = s.one_type && p.y.dtype == p.weights.dtype;
  s.float_weights = p.weights.dtype == DType::kFloat32 && p.y.dtype == DType::kBFloat16;
  s.aligned_y = allows_vectors(p.y, p.weights, p.offset);
  s.float_h = p.h.dtype == DType::kFloat32;
  s.aligned_h = (s.float_h || (s.one_type && p.h.dtype == p.y.dtype)) && has_aligned_rows(p.h) &&
                p.h.width >= h_width(s);
  return s;
}
LoraShape shape_of(const ApplyProblem& p) {
  LoraShape s = shape_of(Op::kApply, p.num_tokens, p.weights, p.groups);
  s.one_type = s.one_type && p.x.dtype == p.weights.dtype && p.y.dtype == p.weights.dtype;
  s.float_weights = p.weights.dtype == DType::kFloat32 && p.x.dtype == DType::kBFloat16 &&
                    p.y.dtype == DType::kBFloat16;
  s.aligned_x = allows_vectors(p.x, p.weights);
  s.aligned_y = allows_vectors(p.y, p.weights, p.offset);
  s.b_by_8 = s.one_type && rows_by_8(p.weights);
  s.b_runs = s.one_type && lies_in_runs(p.weights);
  return s;
}

TileRange tiles_of(const LoraShape& s, int tile_tokens) {
  const PlanLayout layout = PlanLayout::make(s.num_tokens, s.num_adapters);
  TileRange t;
  t.num_tokens = s.num_tokens;
  t.list = tile_tokens == 16 ? layout.tiles16 : layout.tiles64;
  t.tokens = tile_tokens == 16 ? layout.tokens16 : layout.tokens64;
  t.tile_tokens = tile_tokens;
  t.num = static_cast<int>(max_tiles(s.num_tokens, s.num_adapters, tile_tokens));
  return t;
}

/// The caller's h: one row per token.
HView caller_h(const RowsView& rows) {
  HView h;
  h.data = rows.data;
  h.dtype = rows.dtype;
  h.slice_stride = rows.slice_stride;
  h.row_stride = rows.row_stride;
  h.width = static_cast<int>(rows.width);
  return h;
}

/// h in the workspace, rows first, then slices, then ranks. A caller's index table may be longer
/// than the batch: only tokens are sure to lie inside it, so of segments rows are by token.
HView internal_h(const LoraShape& s, void* data, DType dtype, std::int64_t rows) {
  HView h;
  h.data = data;
  h.dtype = dtype;
  h.width = static_cast<int>(h_width(s));
  h.slice_stride = h.width;
  h.row_stride = h.slice_stride * s.num_slices;
  h.slab_stride = h.row_stride * rows;
  h.by_position = !s.segments;
  h.own = true;
  h.vector = is_half(dtype);
  h.rows_by_16 = true;
  return h;
}

HView partials(const LaunchPlan& plan, void* workspace) {
  HView h = internal_h(plan.shape, workspace, DType::kFloat32, plan.shape.num_tokens);
  h.num_slabs = static_cast<int>(num_partials(plan.shape, plan.shrink));
  h.raw = true;
  return h;
}

/// `parked`: room for what persistent CTAs keep there.
void run_shrink(ShrinkParams p, const LaunchPlan& plan, Stream stream, void* parked = nullptr) {
  const ShrinkPlan& c = plan.shrink;
  p.tiles = tiles_of(plan.shape, c.tile_tokens);
  p.vector = plan.shape.aligned_x;
  switch (c.kernel) {
    case ShrinkKernel::kDecode:
      return shrink_decode(p, c, stream);
    case ShrinkKernel::kWgmma:
      return shrink_wgmma(p, c, stream);
    case ShrinkKernel::kMma:
      return shrink_mma(p, c, stream);
    case ShrinkKernel::kParts:
      return shrink_parts(p, c, stream);
    case ShrinkKernel::kWalk:
      return shrink_walk(p, c, parked, stream);
    case ShrinkKernel::kStream:
      return shrink_stream(p, c, stream);
  }
}

/// What the plan gives to an expand kernel, blocks of so many columns.
void set_plan(ExpandParams& p, const LaunchPlan& plan, int cols) {
  const ExpandPlan& c = plan.expand;
  p.tiles = tiles_of(plan.shape, c.tile_tokens);
  p.vector_y = plan.shape.aligned_y;
  p.b_by_8 = plan.shape.b_by_8;
  const bool walks = c.kernel == ExpandKernel::kWide && kWideShapes[c.shape].walks;
  p.b_boxes = plan.shape.b_boxes && (walks || c.boxes);
  p.cols = cols;
  p.block_cols = c.block_cols;
  p.stages = c.stages;
  p.per_sm = c.per_sm;
  p.groups_a_step = c.groups;
  p.log_run = c.log_run;
  p.cluster = c.cluster;
  p.round = c.round;
  for (int i = 0; i < plan.shape.num_slices; ++i) {
    // A cluster of the decode kernel has blocks of one slice, and some without columns.
    const auto blocks = static_cast<int>(ceil_div<std::int64_t>(plan.shape.widths[i], cols));
    const int together = c.kernel == ExpandKernel::kDecode ? c.cluster : 1;
    p.block_start[i + 1] = p.block_start[i] + round_up(blocks, together);
  }
}

void run_expand(ExpandParams p, const LaunchPlan& plan, Stream stream) {
  set_plan(p, plan, plan.expand.cols);
  switch (plan.expand.kernel) {
    case ExpandKernel::kDecode:
      return expand_decode(p, stream);
    case ExpandKernel::kDirect:
      return p.two_parts ? expand_direct_parts(p, stream) : expand_direct(p, stream);
    case ExpandKernel::kPrefill:
      return expand_prefill(p, stream);
    case ExpandKernel::kWide:
      return expand_wide(p, plan.expand, stream);
    case ExpandKernel::kParts:
      return expand_parts(p, stream);
    case ExpandKernel::kBulk:
      return expand_bulk(p, stream);
    case ExpandKernel::kOne:
      break;
  }
}

/// Whether weights and groups may be read while the predecessor still runs: by contract (lora.h)
/// with a plan, and with segments inside a graph, whose replay starts when all before it has ended.
bool reads_early(const GroupsView& groups, Stream stream) {
  if (groups.plan != nullptr) return true;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &status) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

thread_local const LaunchPlan* injected = nullptr;

/// What choose() says, kept for this thread's last problems: the layers of a step ask about the
/// same few, and a choice takes 0.1 to 2 us of the host's time.
LaunchPlan chosen(const LoraShape& s) {
  constexpr std::size_t kKept = 16;
  static thread_local std::vector<std::pair<Machine, LaunchPlan>> kept;
  static thread_local std::size_t oldest = 0;
  const Machine m = machine();
  for (const auto& [of, plan] : kept) {
    if (plan.shape == s && of == m) return plan;
  }
  LaunchPlan plan = choose(s, m);
  if (kept.size() < kKept) {
    kept.emplace_back(m, plan);
  } else {
    kept[oldest] = {m, plan};
    oldest = (oldest + 1) % kKept;
  }
  return plan;
}

/// The plan of a call: the injected one, or what choose() says. MORTAR_LOG=launch prints it.
LaunchPlan plan_of(const LoraShape& s) {
  static const bool logs = [] {
    const char* log = std::getenv("MORTAR_LOG");
    return log != nullptr && std::string_view(log) == "launch";
  }();
  if (injected != nullptr) {
    check(injected->shape == s,
          "lora: the injected launch plan is for another problem: ", describe(*injected));
  }
  const LaunchPlan plan = injected != nullptr ? *injected : chosen(s);
  if (logs) std::fprintf(stderr, "mortar: %s\n", describe(plan).c_str());
  return plan;
}

void shrink(const ShrinkProblem& problem, Stream stream) {
  const LaunchPlan plan = plan_of(shape_of(problem));
  ShrinkParams p;
  p.x = problem.x;
  p.weights = problem.weights;
  p.groups = problem.groups;
  p.scale = problem.scale;
  p.pad = true;
  p.zero_rows = problem.zero_rows;
  p.h = caller_h(problem.h);
  p.early = reads_early(problem.groups, stream);
  if (!plan.shrink.split()) return run_shrink(p, plan, stream);

  ShrinkParams partial = p;
  partial.h = partials(plan, problem.workspace);
  partial.pad = false;
  partial.zero_rows = {};
  run_shrink(partial, plan, stream);
  p.early = true;  // a shrink that does not read early waits before it lets this kernel start
  p.tiles = tiles_of(plan.shape, plan.shrink.tile_tokens);
  shrink_finish(p, partial.h, stream);
}

void expand(const ExpandProblem& problem, Stream stream) {
  const LaunchPlan plan = plan_of(shape_of(problem));
  ExpandParams p;
  p.y = problem.y;
  p.h = caller_h(problem.h);
  p.h.width = std::min(p.h.width, static_cast<int>(h_width(plan.shape)));
  p.h.vector = p.h.dtype == p.y.dtype && is_half(p.h.dtype) && has_aligned_rows(problem.h);
  p.h.rows_by_16 = plan.shape.aligned_h;
  p.weights = problem.weights;
  p.groups = problem.groups;
  p.offset = problem.offset;
  p.add_inputs = problem.add_inputs;
  p.early = reads_early(problem.groups, stream);
  run_expand(p, plan, stream);
}

void apply(const ApplyProblem& problem, Stream stream) {
  const LaunchPlan plan = plan_of(shape_of(problem));
  const LoraShape& s = plan.shape;
  const DType h_dtype = s.one_type ? problem.weights.dtype : DType::kFloat32;
  ShrinkParams shrink;
  shrink.x = problem.x;
  shrink.weights = problem.weights;
  shrink.groups = problem.groups;
  shrink.scale = problem.scale;
  ExpandParams expand;
  expand.y = problem.y;
  expand.weights = problem.weights;
  expand.groups = problem.groups;
  expand.offset = problem.offset;
  expand.scale = problem.scale;
  expand.add_inputs = problem.add_inputs;
  shrink.early = expand.early = reads_early(problem.groups, stream);
  shrink.two_parts = expand.two_parts = s.float_weights;

  if (plan.one_kernel()) {
    set_plan(expand, plan, plan.expand.cols * kOneCluster);
    expand.h.width = static_cast<int>(h_width(s));
    expand.h.own = true;
    return apply_decode({expand, problem.x}, stream);
  }

  const std::int64_t before = partial_bytes(s, num_partials(s, plan.shrink));
  expand.h = internal_h(s, static_cast<char*>(problem.workspace) + before, h_dtype, s.num_tokens);
  shrink.h = plan.shrink.split() ? partials(plan, problem.workspace) : expand.h;
  run_shrink(shrink, plan, stream,
             static_cast<char*>(problem.workspace) + before + finished_bytes(s));
  if (plan.shrink.partials == Partials::kExpand) expand.h = shrink.h;
  if (plan.shrink.partials == Partials::kFinish) {
    ShrinkParams whole = shrink;
    whole.tiles = tiles_of(s, plan.shrink.tile_tokens);
    whole.h = expand.h;
    shrink_finish(whole, shrink.h, stream);
  }
  run_expand(expand, plan, stream);
}

/// The query does not know y's dtype, on which the choice of kernels depends: room for either.
std::int64_t workspace(const WorkspaceQuery& q, Op op) {
  LoraShape s;
  s.op = op;
  s.num_tokens = q.num_tokens;
  s.hidden = q.hidden;
  s.num_adapters = q.num_adapters;
  s.num_slices = q.num_slices;
  s.max_rank = q.max_rank;
  s.one_type = false;
  s.float_weights = q.weight == DType::kFloat32 && q.activation == DType::kBFloat16;
  const std::int64_t mixed = most_workspace(s);
  s.float_weights = false;
  s.one_type = q.activation == q.weight && is_half(q.weight);
  return std::max(mixed, most_workspace(s));
}
std::int64_t shrink_workspace(const WorkspaceQuery& q) { return workspace(q, Op::kShrink); }
std::int64_t apply_workspace(const WorkspaceQuery& q) { return workspace(q, Op::kApply); }

std::string describe_apply(const ApplyProblem& p) { return describe(plan_of(shape_of(p))); }

}  // namespace

InjectedPlan::InjectedPlan(const LaunchPlan& plan) { injected = &plan; }
InjectedPlan::~InjectedPlan() { injected = nullptr; }

const Backend kBackend = {plan,  read_plan_header, shrink,          expand,
                          apply, shrink_workspace, apply_workspace, describe_apply};

}  // namespace mortar::lora::cuda
