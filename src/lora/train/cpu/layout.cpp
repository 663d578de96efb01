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
    : p_(p), backward_(backward), hidden_(p.hidden), hidden_rows_(p.hidden_width) {
  width_ = p.hidden;
  for (int s = 0; s < p.num_slices; ++s) {
    width_ = std::max(width_, p.slices[s].width);
    db_rows_columns_ += p.slices[s].rank * p.slices[s].width;
  }
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
  const std::int64_t chunks = most_chunks(p);
  if (p.wants_da) {
    da_sums_ = static_cast<float*>(all.take(chunks * hidden_rows_ * hidden_ * 4));
  }
  if (p.wants_db) db_sums_ = static_cast<float*>(all.take(chunks * db_rows_columns_ * 4));
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

float* WorkLayout::db_sums(std::int64_t chunk, int slice) const {
  std::int64_t at = chunk * db_rows_columns_;
  for (int s = 0; s < slice; ++s) at += p_.slices[s].rank * p_.slices[s].width;
  return db_sums_ + at;
}

}  // namespace mortar::lora::train::cpu
