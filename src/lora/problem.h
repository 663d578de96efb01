// SPDX-License-Identifier: Apache-2.0
// What a backend gets: plain pointers and sizes, already checked. All strides are in elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/int_math.h"
#include "lora/plan_layout.h"
#include "mortar/lora.h"

namespace mortar::lora {

/// The CUDA backend's summation tree, the same for every batch and every split, so that a token's
/// bits do not depend on its neighbours: K is cut into leaves of this many elements, leaves are
/// added in order in the first half and in the second half of K (the first has the odd one), and
/// the two halves are added. A leaf is one chain of MMA steps of 16 elements from zero, with
/// mma.sync and wgmma alike: both give the same bits. With parts it is the sum of four quarters.
MORTAR_HOST_DEVICE constexpr std::int64_t leaf_size(std::int64_t hidden) {
  return hidden <= 4096 ? 256 : 512;
}
/// Leaves of the first half, of `num_leaves`.
MORTAR_HOST_DEVICE constexpr std::int64_t first_leaves(std::int64_t num_leaves) {
  return (num_leaves + 1) / 2;
}
MORTAR_HOST_DEVICE constexpr std::int64_t num_leaves(std::int64_t hidden) {
  return hidden <= 0 ? 1 : ceil_div<std::int64_t>(hidden, leaf_size(hidden));
}

/// Weights of one slice in stacked form.
struct StackedSlice {
  const void* a = nullptr;
  const void* b = nullptr;
  std::int64_t a_adapter_stride = 0, a_row_stride = 0;
  std::int64_t b_adapter_stride = 0, b_row_stride = 0;
  int rank = 0;  ///< R_s of the tensors; the true rank is min(R_s, ranks[adapter])
};

/// One adapter's weights of one slice, in either form.
struct SliceWeights {
  const void* a = nullptr;
  const void* b = nullptr;
  std::int64_t a_row_stride = 0, b_row_stride = 0;
  int rank = 0;  ///< 0: leave the slice alone
  float scale = 1;
};

struct WeightsView {
  const LoraTableEntry* table = nullptr;  ///< null: stacked
  const std::int32_t* ranks = nullptr;
  const float* scales = nullptr;
  std::int64_t num_adapters = 0;
  std::int64_t hidden = 0;
  int num_slices = 0;
  int max_rank = 0;
  DType dtype = DType::kFloat32;
  std::int64_t widths[kLoraMaxSlices] = {};
  StackedSlice slices[kLoraMaxSlices];

  /// The rank of (adapter, slice), 0 if it has no usable weights.
  MORTAR_HOST_DEVICE int rank(std::int64_t adapter, int slice) const {
    if (table != nullptr) return get(adapter, slice).rank;
    const int most = slices[slice].rank;
    if (ranks == nullptr) return most;
    const int own = ranks[adapter];
    return own < 0 ? 0 : (own < most ? own : most);
  }

  /// The weights of (adapter, slice); adapter must lie in [0, num_adapters).
  MORTAR_HOST_DEVICE SliceWeights get(std::int64_t adapter, int slice) const {
    SliceWeights w;
    if (table != nullptr) {
      const LoraTableEntry e = table[adapter * num_slices + slice];
      w.a = reinterpret_cast<const void*>(e.a);
      w.b = reinterpret_cast<const void*>(e.b);
      const bool usable =
          e.a != 0 && e.b != 0 && (e.a | e.b) % 16 == 0 && e.rank > 0 && e.rank <= max_rank;
      w.rank = usable ? e.rank : 0;
      w.scale = e.scale;
      w.a_row_stride = hidden;
      w.b_row_stride = e.rank;
      return w;
    }
    const StackedSlice& s = slices[slice];
    const std::int64_t size = dtype == DType::kFloat32 ? 4 : 2;
    w.a = static_cast<const char*>(s.a) + adapter * s.a_adapter_stride * size;
    w.b = static_cast<const char*>(s.b) + adapter * s.b_adapter_stride * size;
    w.rank = rank(adapter, slice);
    w.scale = scales != nullptr ? scales[adapter] : 1.0f;
    w.a_row_stride = s.a_row_stride;
    w.b_row_stride = s.b_row_stride;
    return w;
  }
};

/// Ids of adapters, one per token: int32, or int64 where `wide`.
struct IdsView {
  const void* data = nullptr;
  bool wide = false;

  /// The id of a token; -2, which no adapter has, for what does not fit 32 bits.
  template <class Id>
  MORTAR_HOST_DEVICE int get(std::int64_t token) const {
    const Id id = static_cast<const Id*>(data)[token];
    return static_cast<int>(id) == id ? static_cast<int>(id) : -2;
  }
  MORTAR_HOST_DEVICE int get(std::int64_t token) const {
    return wide ? get<std::int64_t>(token) : get<std::int32_t>(token);
  }
};

struct GroupsView {
  const std::int32_t* plan = nullptr;  ///< null: segments
  const std::int32_t* sorted = nullptr;
  const std::int32_t* ids = nullptr;
  const std::int32_t* counts = nullptr;
  const std::int32_t* starts = nullptr;
  std::int64_t num_sorted = 0;    ///< entries of `sorted`
  std::int64_t num_segments = 0;  ///< entries of `ids`
};

/// Rows of a matrix, or of S matrices: element (s, t, c) lies at s * slice_stride + t * row_stride
/// + c.
struct RowsView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t row_stride = 0;
  std::int64_t slice_stride = 0;
  std::int64_t width = 0;
};

struct ShrinkProblem {
  std::int64_t num_tokens = 0;
  RowsView x;  ///< [M, K]
  RowsView h;  ///< [S, M, R]
  WeightsView weights;
  GroupsView groups;
  float scale = 1;
  IdsView zero_rows;  ///< without data: rows of base tokens stay as they are
  void* workspace = nullptr;
};

struct ExpandProblem {
  std::int64_t num_tokens = 0;
  RowsView h;  ///< [S, M, R]
  RowsView y;  ///< [M, N]
  WeightsView weights;
  GroupsView groups;
  std::int64_t offset = 0;
  bool add_inputs = true;
};

struct ApplyProblem {
  std::int64_t num_tokens = 0;
  RowsView x;
  RowsView y;
  WeightsView weights;
  GroupsView groups;
  std::int64_t offset = 0;
  float scale = 1;
  bool add_inputs = true;
  void* workspace = nullptr;
};

/// What a workspace query may depend on.
struct WorkspaceQuery {
  std::int64_t num_tokens = 0, hidden = 0, num_adapters = 0;
  int num_slices = 0, max_rank = 0;
  DType activation = DType::kFloat32, weight = DType::kFloat32;
};

/// What every backend does. Arguments are checked; M and K may be 0.
struct Backend {
  void (*plan)(const IdsView& token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
               std::int32_t* plan, Stream stream);
  /// Copies kPlanHeaderWords words to the host and waits for them.
  void (*read_plan_header)(const std::int32_t* plan, std::int32_t* header, Stream stream);
  void (*shrink)(const ShrinkProblem& p, Stream stream);
  void (*expand)(const ExpandProblem& p, Stream stream);
  void (*apply)(const ApplyProblem& p, Stream stream);
  std::int64_t (*shrink_workspace)(const WorkspaceQuery& q);
  std::int64_t (*apply_workspace)(const WorkspaceQuery& q);
  /// The kernels that apply() would run, as text.
  std::string (*describe_apply)(const ApplyProblem& p);
};

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kBackend;  ///< only in builds with MORTAR_HAS_CUDA
}

}  // namespace mortar::lora
