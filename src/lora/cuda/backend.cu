// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: which passes an op runs and where h lies between them.
#include <algorithm>
#include <cstdint>

#include "device/launch.cuh"
#include "lora/cuda/backend.cuh"

namespace mortar::lora::cuda {

namespace {

bool is_half(DType d) { return d == DType::kFloat16 || d == DType::kBFloat16; }

LoraShape shape_of(std::int64_t num_tokens, const WeightsView& w, bool one_type) {
  LoraShape s{num_tokens, w.hidden, w.num_adapters, 0, 0, w.num_slices, w.max_rank, one_type};
  for (int i = 0; i < w.num_slices; ++i) {
    s.sum_widths += w.widths[i];
    s.max_width = std::max(s.max_width, w.widths[i]);
  }
  return s;
}

LoraShape shape_of(const WorkspaceQuery& q, bool one_type) {
  return {q.num_tokens, q.hidden, q.num_adapters, 0, 0, q.num_slices, q.max_rank, one_type};
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

bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

/// h in the workspace, rows first, then slices, then ranks.
HView internal_h(const LoraShape& s, void* data, DType dtype, std::int64_t rows) {
  HView h;
  h.data = data;
  h.dtype = dtype;
  h.width = static_cast<int>(h_width(s));
  h.slice_stride = h.width;
  h.row_stride = h.slice_stride * s.num_slices;
  h.slab_stride = h.row_stride * rows;
  h.by_position = true;
  h.vector = is_half(dtype);
  return h;
}

HView slabs(const LoraShape& s, void* workspace) {
  HView h = internal_h(s, workspace, DType::kFloat32, s.num_tokens);
  h.num_slabs = static_cast<int>(num_leaves(s.hidden));
  h.raw = true;
  return h;
}

/// Whether every row of x and A starts at a multiple of 16 bytes and has no odd end. (The pointers
/// of a table are 16-byte aligned by contract.)
bool allows_vectors(const RowsView& x, const WeightsView& w) {
  bool ok = w.hidden % 8 == 0 && is_aligned(x.data) && x.row_stride % 8 == 0;
  for (int i = 0; i < w.num_slices && w.table == nullptr; ++i) {
    const StackedSlice& slice = w.slices[i];
    ok =
        ok && is_aligned(slice.a) && slice.a_row_stride % 8 == 0 && slice.a_adapter_stride % 8 == 0;
  }
  return ok;
}

bool allows_vectors(const RowsView& y, const WeightsView& w, std::int64_t offset) {
  bool ok = is_aligned(y.data) && y.row_stride % 8 == 0 && offset % 8 == 0;
  for (int i = 0; i < w.num_slices; ++i) ok = ok && w.widths[i] % 8 == 0;
  return ok;
}

void run_shrink(ShrinkParams p, const LoraShape& s, const ShrinkConfig& c, Stream stream) {
  p.vector = allows_vectors(p.x, p.weights);
  if (!s.one_type) return shrink_parts(p, c, stream);
  if (p.vector && c.tile_tokens == 16 && p.h.raw) return shrink_decode(p, c, stream);
  const bool wgmma = p.vector && c.tile_tokens == 64 && device::current_device().arch == 90;
  (wgmma ? shrink_wgmma : shrink_mma)(p, c, stream);
}

void run_expand(ExpandParams p, const LoraShape& s, ExpandConfig c, Stream stream) {
  p.vector_y = allows_vectors(p.y, p.weights, p.offset);
  if (c.kernel == ExpandKernel::kPrefill && !expand_prefill_fits(p)) c = choose_expand(s, false);
  p.cols = c.cols;
  p.block_cols = c.block_cols;
  p.per_sm = c.per_sm;
  for (int i = 0; i < s.num_slices; ++i) {
    p.block_start[i + 1] =
        p.block_start[i] + static_cast<int>(ceil_div<std::int64_t>(p.weights.widths[i], c.cols));
  }
  switch (c.kernel) {
    case ExpandKernel::kParts:
      return expand_parts(p, stream);
    case ExpandKernel::kDecode:
      return expand_decode(p, stream);
    case ExpandKernel::kPrefill:
      return expand_prefill(p, stream);
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

void shrink(const ShrinkProblem& problem, Stream stream) {
  const bool one_type = problem.x.dtype == problem.weights.dtype && is_half(problem.weights.dtype);
  const LoraShape s = shape_of(problem.num_tokens, problem.weights, one_type);
  const ShrinkConfig c = choose_shrink(s);
  ShrinkParams p;
  p.x = problem.x;
  p.weights = problem.weights;
  p.groups = problem.groups;
  p.tiles = tiles_of(s, c.tile_tokens);
  p.scale = problem.scale;
  p.pad = true;
  p.zero_rows = problem.zero_rows;
  p.h = caller_h(problem.h);
  p.early = reads_early(problem.groups, stream);
  if (!c.split) return run_shrink(p, s, c, stream);

  ShrinkParams partial = p;
  partial.h = slabs(s, problem.workspace);
  // A caller's index table may be longer than the batch: only tokens are sure to lie inside it.
  partial.h.by_position = problem.groups.plan != nullptr;
  partial.pad = false;
  partial.zero_rows = {};
  run_shrink(partial, s, c, stream);
  p.early = true;  // a shrink that does not read early waits before it lets this kernel start
  shrink_finish(p, partial.h, stream);
}

void expand(const ExpandProblem& problem, Stream stream) {
  const bool one_type = problem.y.dtype == problem.weights.dtype && is_half(problem.weights.dtype);
  const LoraShape s = shape_of(problem.num_tokens, problem.weights, one_type);
  const ExpandConfig c = choose_expand(s);
  ExpandParams p;
  p.y = problem.y;
  p.h = caller_h(problem.h);
  p.h.width = std::min(p.h.width, static_cast<int>(h_width(s)));
  p.h.vector = p.h.dtype == p.y.dtype && is_half(p.h.dtype) && is_aligned(p.h.data) &&
               p.h.row_stride % 8 == 0 && p.h.slice_stride % 8 == 0;
  p.weights = problem.weights;
  p.groups = problem.groups;
  p.tiles = tiles_of(s, tile_tokens(s));
  p.offset = problem.offset;
  p.add_inputs = problem.add_inputs;
  p.early = reads_early(problem.groups, stream);
  run_expand(p, s, c, stream);
}

void apply(const ApplyProblem& problem, Stream stream) {
  const bool one_type = problem.x.dtype == problem.weights.dtype &&
                        problem.y.dtype == problem.weights.dtype && is_half(problem.weights.dtype);
  const LoraShape s = shape_of(problem.num_tokens, problem.weights, one_type);
  ShrinkConfig c = choose_shrink(s);
  ExpandConfig e = choose_expand(s);
  give_room(s, c, e);
  const DType h_dtype = one_type ? problem.weights.dtype : DType::kFloat32;
  ShrinkParams shrink;
  shrink.x = problem.x;
  shrink.weights = problem.weights;
  shrink.groups = problem.groups;
  shrink.tiles = tiles_of(s, c.tile_tokens);
  shrink.scale = problem.scale;
  ExpandParams expand;
  expand.y = problem.y;
  expand.weights = problem.weights;
  expand.groups = problem.groups;
  expand.offset = problem.offset;
  expand.scale = problem.scale;
  expand.add_inputs = problem.add_inputs;
  shrink.early = expand.early = reads_early(problem.groups, stream);
  expand.tiles = shrink.tiles;

  if (c.split) {
    shrink.h = slabs(s, problem.workspace);
    run_shrink(shrink, s, c, stream);
    expand.h = shrink.h;
    if (c.finish) {
      auto* finished = static_cast<char*>(problem.workspace) + slab_bytes(s);
      ShrinkParams whole = shrink;
      whole.h = internal_h(s, finished, h_dtype, s.num_tokens);
      shrink_finish(whole, shrink.h, stream);
      expand.h = whole.h;
    }
    return run_expand(expand, s, e, stream);
  }

  shrink.h = internal_h(s, problem.workspace, h_dtype, s.num_tokens);
  run_shrink(shrink, s, c, stream);
  expand.h = shrink.h;
  run_expand(expand, s, e, stream);
}

/// The query does not know y's dtype, on which the choice of kernels depends: room for either.
template <class Bytes>
std::int64_t either_path(const WorkspaceQuery& q, Bytes bytes) {
  const std::int64_t mixed = bytes(shape_of(q, false));
  const bool one_type = q.activation == q.weight && is_half(q.weight);
  return one_type ? std::max(mixed, bytes(shape_of(q, true))) : mixed;
}

std::int64_t shrink_workspace(const WorkspaceQuery& q) { return either_path(q, most_shrink_bytes); }
std::int64_t apply_workspace(const WorkspaceQuery& q) { return either_path(q, most_apply_bytes); }

}  // namespace

const Backend kBackend = {plan,  read_plan_header, shrink,         expand,
                          apply, shrink_workspace, apply_workspace};

}  // namespace mortar::lora::cuda
