// SPDX-License-Identifier: Apache-2.0
// dz = rstd * (dy * w - z * rstd^2 * mean(dy * w * z)), dw = sum over rows of dy * z * rstd: one
// pass over x and dy, a block of 16 rows at a time, which the second-level cache holds between the
// row sums and their use.
// bytes  = M N (e_x + 2 e_dy) + M N / G e_s, and 8 N for each of the at most 64 chunks of rows
#include <omp.h>

#include "fp8_rmsnorm/cpu/passes.h"

namespace mortar::fp8_rmsnorm::cpu {
namespace {

/// float32 [padded N] of weight + offset, then [chunks, padded N] of partial sums of dw.
struct Workspace {
  float* weight;
  float* partials;

  Workspace(std::byte* p, std::int64_t columns)
      : weight(scratch_of(p)), partials(weight + padded(columns)) {}
};

class Backward {
 public:
  explicit Backward(const BackwardProblem& p)
      : p_(p),
        columns_(p.input.hidden),
        chunks_(p.input.rows),
        memory_(p.workspace, p.input.hidden),
        k_(row_kernels({.x = p.input.x.dtype,
                        .x_scale = p.input.x_scale.dtype,
                        .weight = p.weight.dtype,
                        .z = z_dtype(p.input, {}),
                        .side = p.dy.dtype,
                        .dw = p.dw.dtype})) {}

  void run() const {
    widen_weight(k_, p_.weight, p_.weight_offset, columns_, memory_.weight);
#pragma omp parallel for schedule(static) if (wants_threads(p_.input, chunks_.count))
    for (std::int64_t chunk = 0; chunk < chunks_.count; ++chunk) run_chunk(chunk);
    if (p_.dw.given()) add_partials();
  }

 private:
  struct Scratch {
    alignas(64) float z[kRun + kPadding], dw[kRun + kPadding];
  };

  float* partial(std::int64_t chunk) const { return memory_.partials + chunk * padded(columns_); }

  /// z of a run, of z_dtype(): where it lies, or widened into scratch.
  const void* z(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s) const {
    const void* x = element(p_.input.x, row, c);
    if (dtype_size(p_.input.x.dtype) > 1) return x;
    k_.widen_x(x, scale_at(p_.input, row, c), p_.input.x_group, n, s.z);
    return s.z;
  }

  /// Has a run of a row come into the second-level cache while others are computed on: the sums of
  /// a block's rows would wait for memory, and their use leaves it idle.
  template <bool kToWrite>
  void ask_for(const Rows& r, std::int64_t row, std::int64_t c, std::int64_t n) const {
    if (row >= p_.input.rows) return;
    const auto* p = static_cast<const char*>(element(r, row, c));
    const std::int64_t bytes = n * dtype_size(r.dtype);
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, kToWrite, 2);
  }

  void run_chunk(std::int64_t chunk) const {
    Scratch s;
    if (p_.dw.given()) std::fill_n(partial(chunk), padded(columns_), 0.0f);
    for (std::int64_t first = chunks_.begin(chunk); first < chunks_.end(chunk);
         first += RowChunks::kBlock) {
      run_block(chunk, first, std::min(first + RowChunks::kBlock, chunks_.end(chunk)), s);
    }
  }

  void run_block(std::int64_t chunk, std::int64_t first, std::int64_t last, Scratch& s) const {
    float c_of_row[RowChunks::kBlock] = {};  // rstd^2 * mean(dy * w * z)
    for (std::int64_t row = first; row < last && p_.dx.given(); ++row) {
      Sums sums;
      for_runs(columns_, [&](std::int64_t c, std::int64_t n) {
        k_.dot(element(p_.dy, row, c), memory_.weight + c, z(row, c, n, s), n, &sums);
      });
      const float rstd = p_.rstd[row];
      c_of_row[row - first] = sums.total() / static_cast<float>(columns_) * (rstd * rstd);
    }
    const bool adds = p_.dx.given() && p_.residual_grad.given();
    for_runs(columns_, [&](std::int64_t c, std::int64_t n) {
      std::fill_n(s.dw, padded(n), 0.0f);
      for (std::int64_t row = first; row < last; ++row) {
        ask_for<false>(p_.input.x, row + RowChunks::kBlock, c, n);
        ask_for<false>(p_.dy, row + RowChunks::kBlock, c, n);
        if (p_.dx.given()) ask_for<true>(p_.dx, row + 1, c, n);
        k_.gradients({.dy = element(p_.dy, row, c),
                      .z = z(row, c, n, s),
                      .added = adds ? element(p_.residual_grad, row, c) : nullptr,
                      .w = memory_.weight + c,
                      .rstd = p_.rstd[row],
                      .c = c_of_row[row - first],
                      .n = n,
                      .dw = p_.dw.given() ? s.dw : nullptr,
                      .dx = p_.dx.given() ? element(p_.dx, row, c) : nullptr});
      }
      if (p_.dw.given()) k_.add(s.dw, n, partial(chunk) + c);
    });
  }

  void add_partials() const {
    const std::int64_t runs = ceil_div(columns_, kRun);
#pragma omp parallel for schedule(static) if (wants_threads(p_.input, runs))
    for (std::int64_t run = 0; run < runs; ++run) {
      const std::int64_t c = run * kRun, n = std::min(kRun, columns_ - c);
      Scratch s;
      std::fill_n(s.dw, padded(n), 0.0f);
      for (std::int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        k_.add(partial(chunk) + c, n, s.dw);
      }
      if (p_.accumulate_dw) {
        k_.widen_dw(element(p_.dw, 0, c), n, s.z);
        k_.add(s.z, n, s.dw);
      }
      k_.narrow_dw(s.dw, n, element(p_.dw, 0, c));
    }
  }

  const BackwardProblem& p_;
  std::int64_t columns_;
  RowChunks chunks_;
  Workspace memory_;
  RowKernels k_;
};

}  // namespace

void backward(const BackwardProblem& p, Stream) { Backward(p).run(); }

std::int64_t backward_workspace(const BackwardProblem& p, Device) {
  const std::int64_t rows = 1 + RowChunks(p.input.rows).count;
  return workspace_with_room(rows * padded(p.input.hidden) *
                             static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace mortar::fp8_rmsnorm::cpu
