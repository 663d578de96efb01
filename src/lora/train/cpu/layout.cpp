// SPDX-License-Identifier: Apache-2.0
#include "lora/train/cpu/layout.h"

#include <omp.h>

#include <algorithm>

namespace mortar::lora::train::cpu {

int most_threads() {
  static const int processors = std::clamp(omp_get_num_procs(), 1, 256);  // a system call
  return processors;
}

PreparedWeights WorkLayout::take_weights(Arena* arena) const {
  PreparedWeights w;
  const std::int64_t size = dtype_size(p_.weight);
  for (int s = 0; s < p_.num_slices; ++s) {
    const SliceView& slice = p_.slices[s];
    w.a[s] = static_cast<char*>(arena->take(slice.rank * hidden_ * size));
    if (backward_) {
      w.bt[s] = static_cast<char*>(arena->take(slice.rank * slice.width * size));
    } else {
      w.b[s] = static_cast<std::uint32_t*>(
          arena->take(Packed::bytes(slice.width, slice.rank, p_.weight)));
    }
  }
  if (backward_ && p_.dx.data != nullptr) {
    w.at = static_cast<std::uint32_t*>(
        arena->take(Packed::bytes(hidden_, p_.hidden_width, p_.weight)));
  }
  return w;
}

WorkLayout::WorkLayout(const Problem& p, bool backward)
    : p_(p), backward_(backward), hidden_(p.hidden) {
  width_ = p.hidden;
  for (int s = 0; s < p.num_slices; ++s) width_ = std::max(width_, p.slices[s].width);
  // Kernels load whole lines; the workspace is aligned to 16 bytes.
  const auto address = reinterpret_cast<std::uintptr_t>(p.workspace);
  void* memory = reinterpret_cast<void*>(round_up<std::uintptr_t>(address, kLineBytes));
  Arena weights(nullptr), scratch(nullptr), all(memory);
  take_weights(&weights);
  weight_bytes_ = weights.used();
  Scratch counted(&scratch, width_, p.hidden_width);
  scratch_bytes_ = scratch.used();
  weights_ = static_cast<char*>(all.take(weight_bytes_ * p.num_adapters));
  scratch_ = static_cast<char*>(all.take(scratch_bytes_ * most_threads()));
  const std::int64_t row_bytes =
      p.hidden * dtype_size(p.x.dtype) + p.total_width * dtype_size(p.slices[0].dy.dtype);
  const std::int64_t fit = kGroupBytes / std::max<std::int64_t>(kStepRows * row_bytes, 1);
  group_chunks_ = std::clamp<std::int64_t>(std::max<std::int64_t>(2 * most_threads(), fit), 1,
                                           std::max<std::int64_t>(most_chunks(p), 1));
  entry_bytes_ = p.hidden_width * kStepRows * sizeof(float);
  if (p.wants_da) ds_entries_ = static_cast<char*>(all.take(group_chunks_ * entry_bytes_));
  if (p.wants_db) h_entries_ = static_cast<char*>(all.take(group_chunks_ * entry_bytes_));
  const std::int64_t columns = (p.wants_da ? p.hidden : 0) + (p.wants_db ? p.total_width : 0);
  sums_ = static_cast<float*>(all.take(p.num_adapters * p.hidden_width * columns * 4));
  bytes_ = all.used() + kLineBytes;
}

PreparedWeights WorkLayout::weights(std::int64_t adapter) const {
  Arena arena(weights_ + adapter * weight_bytes_);
  return take_weights(&arena);
}

Scratch WorkLayout::scratch(int thread) const {
  Arena arena(scratch_ + thread * scratch_bytes_);
  return Scratch(&arena, width_, p_.hidden_width);
}

}  // namespace mortar::lora::train::cpu
