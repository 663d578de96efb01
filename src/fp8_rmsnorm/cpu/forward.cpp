// SPDX-License-Identifier: Apache-2.0
// y = z * rstd * w to q, q_t and their scales, and the same for a y that is given.
//
// bytes  = M N (e_x + outputs) + M N / G e_s; x is read again for the values after the scales are
//          known, from the caches where a scale needs no other row
// A scale of the whole tensor, or of its columns, takes a pass over all rows first; the second pass
// goes backwards, as the last rows may still lie in the caches. All else is done in blocks of rows.
#include <omp.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "fp8_rmsnorm/cpu/passes.h"
#include "fp8_rmsnorm/scale.h"

namespace mortar::fp8_rmsnorm::cpu {
namespace {

constexpr std::int64_t kBlockRows = 64, kMostBlockRows = 128;
constexpr std::int64_t kLeastGroup = 16;

/// float32 [padded N] of weight + offset; [M] of rstd; uint32 [chunks, padded N] of column maxima,
/// where there are scales by columns.
struct Workspace {
  float *weight, *rstd;
  std::uint32_t* columns;

  static bool has_columns(const Quantize& out) {
    const bool wants_q_t = out.q_t.given() || out.scale_t.given();  // an empty q_t has no memory
    return out.scaling == Fp8Scaling::kRow && wants_q_t && !out.given_scale;
  }
  static std::int64_t bytes(std::int64_t rows, std::int64_t columns, const Quantize& out) {
    const std::int64_t matrix = has_columns(out) ? RowChunks(rows).count : 0;
    return workspace_with_room(static_cast<std::int64_t>(sizeof(float)) *
                               ((1 + matrix) * padded(columns) + padded(rows)));
  }
  Workspace(std::byte* p, std::int64_t m, std::int64_t n)
      : weight(scratch_of(p)),
        rstd(weight + padded(n)),
        columns(reinterpret_cast<std::uint32_t*>(rstd + padded(m))) {}
};

struct Scratch {
  alignas(64) float z[kRun + kPadding], y[kRun + kPadding];
  alignas(64) float factors[kRun + kPadding];    ///< by which the columns are multiplied for q_t
  alignas(64) float q_factors[kRun + kPadding];  ///< and for q
  alignas(64) std::uint32_t maxima[kRun + kPadding], draws[kRun + kPadding];
  /// Bytes of q_t before they are turned over. The pitch keeps rows out of each other's cache sets.
  static constexpr std::int64_t kPitch = kRun + 64;
  alignas(64) std::uint8_t tile[kMostBlockRows * kPitch];
};

class Forward {
 public:
  explicit Forward(const ForwardProblem& p)
      : p_(p),
        in_(p.input),
        out_(p.out),
        norm_(p.weight.given()),
        compat_(norm_ && p.out.numerics == Fp8Numerics::kCompat),
        divides_(p.out.numerics == Fp8Numerics::kCompat),
        largest_(largest_value(p.out.dtype)),
        chunks_(p.input.rows),
        memory_(p.workspace, p.input.rows, p.input.hidden),
        rstd_(p.rstd != nullptr ? p.rstd : memory_.rstd),
        k_(row_kernels({.x = p.input.x.dtype,
                        .x_scale = p.input.x_scale.dtype,
                        .weight = p.weight.dtype,
                        .z = z_dtype(p.input, p.residual),
                        .side = p.residual.dtype,
                        .q = p.out.dtype})) {}

  void run() const {
    if (norm_) widen_weight(k_, p_.weight, p_.weight_offset, in_.hidden, memory_.weight);
    if (out_.needs_whole_tensor() || Workspace::has_columns(out_)) {
      finish(measure());
      emit_all<false>();
    } else {
      const std::uint32_t amax = emit_all<true>();
      if (out_.amax != nullptr) *out_.amax = std::bit_cast<float>(amax);
    }
  }

 private:
  using Scaling = Fp8Scaling;

  bool needs_amax() const {
    if (out_.scaling == Scaling::kTensor) return !out_.given_scale || out_.amax != nullptr;
    return out_.scaling == Scaling::kRow && out_.q.given() && !out_.given_scale;
  }

  /// The first pass where the second needs all of it. Returns the largest |y| as bits.
  std::uint32_t measure() const {
    std::uint32_t most = 0;
    const bool team = wants_threads(in_, chunks_.count);
#pragma omp parallel for schedule(static) reduction(max : most) if (team)
    for (std::int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      Scratch s;
      std::uint32_t* columns = nullptr;
      if (Workspace::has_columns(out_)) {
        columns = memory_.columns + chunk * padded(in_.hidden);
        std::fill_n(columns, padded(in_.hidden), 0u);
      }
      for (std::int64_t row = chunks_.begin(chunk); row < chunks_.end(chunk); ++row) {
        most = std::max(most, measure_row(row, columns, s));
      }
    }
    return most;
  }

  /// rstd, the scale of the row and its residual. Returns the largest |y| as bits, if it is needed.
  std::uint32_t measure_row(std::int64_t row, std::uint32_t* columns, Scratch& s) const {
    Maxima maxima;
    if (norm_) {
      Sums sums;
      for_runs(in_.hidden, [&](std::int64_t c, std::int64_t n) {
        if (p_.residual.given()) add_to_residual(row, c, n, s);
        k_.sum_squares(z(row, c, n, s), memory_.weight + c, n, &sums, &maxima);
      });
      const float mean = sums.total() / static_cast<float>(in_.hidden);
      rstd_[row] = 1.0f / std::sqrt(mean + p_.eps);
    }
    std::uint32_t most = maxima.total();
    if (needs_amax() && (!norm_ || compat_)) {
      Maxima of_y;
      for_runs(in_.hidden, [&](std::int64_t c, std::int64_t n) {
        if (!norm_) return k_.max_row(z(row, c, n, s), n, &of_y);
        make_y(row, c, n, s);
        k_.max_row_y(s.y, n, &of_y);
      });
      most = of_y.total();
    } else if (norm_) {
      // Rounding keeps order, so the largest |z w| times rstd is the largest |y|, to the bit.
      most = std::bit_cast<std::uint32_t>(std::bit_cast<float>(most) * rstd_[row]) & 0x7fffffffu;
    }
    if (columns != nullptr) {
      for_runs(in_.hidden,
               [&](std::int64_t c, std::int64_t n) { max_columns(row, c, n, s, columns + c); });
    }
    if (out_.scaling == Scaling::kRow && needs_amax()) {
      out_.scale.data[row * out_.scale.row_stride] =
          scale_of(std::bit_cast<float>(most), largest_, out_.pow2_scale);
    }
    return most;
  }

  /// The scales that all rows share.
  void finish(std::uint32_t most) const {
    const float amax = std::bit_cast<float>(most);
    if (out_.scaling == Scaling::kTensor) {
      *out_.scale.data =
          divides_ ? compat_scale_of(amax, largest_) : scale_of(amax, largest_, out_.pow2_scale);
      if (out_.amax != nullptr) *out_.amax = amax;
    }
    if (!Workspace::has_columns(out_)) return;
    for (std::int64_t c = 0; c < in_.hidden; ++c) {
      std::uint32_t of_column = 0;
      for (std::int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        of_column = std::max(of_column, memory_.columns[chunk * padded(in_.hidden) + c]);
      }
      out_.scale_t.data[c * out_.scale_t.row_stride] =
          scale_of(std::bit_cast<float>(of_column), largest_, out_.pow2_scale);
    }
  }

  /// The pass that writes. kMeasures: rows are measured on the way, and the largest |y| returned.
  template <bool kMeasures>
  std::uint32_t emit_all() const {
    const std::int64_t size = block_rows(), blocks = ceil_div(in_.rows, size);
    const bool team = wants_threads(in_, blocks);
    std::uint32_t most = 0;
#pragma omp parallel reduction(max : most) if (team)
    {
      Scratch s;
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < blocks; ++i) {
        const std::int64_t block = kMeasures ? i : blocks - 1 - i;
        const std::int64_t first = block * size, last = std::min(first + size, in_.rows);
        if (kMeasures && (norm_ || needs_amax())) {
          for (std::int64_t row = first; row < last; ++row) {
            most = std::max(most, measure_row(row, nullptr, s));
          }
        }
        emit_block(first, last, s);
      }
    }
    return most;
  }

  /// Rows of a block: whole groups of q_t, few enough for all threads to have some.
  std::int64_t block_rows() const {
    if (!out_.q_t.given()) return 1;
    const int threads = wants_threads(in_, in_.rows) ? omp_get_max_threads() : 1;
    const std::int64_t share = ceil_div<std::int64_t>(in_.rows, threads);
    const std::int64_t group = out_.scaling == Scaling::kGroup ? out_.group : 16;
    return std::max(group, std::min(kBlockRows, round_up<std::int64_t>(share, 16)) / group * group);
  }

  void emit_block(std::int64_t first, std::int64_t last, Scratch& s) const {
    const bool own = out_.q_t.given() && out_.scaling != Scaling::kTensor;
    for_runs(in_.hidden, [&](std::int64_t c, std::int64_t n) {
      for (std::int64_t row = first; row < last; ++row) {
        const bool new_group = out_.scaling == Scaling::kGroup && row % out_.group == 0;
        if (own && (row == first || new_group)) {
          find_factors(row, std::min(row + out_.group, last), c, n, s);
        }
        if (row + 1 < last) prefetch_run(row + 1, c, n);
        emit_run(row, c, n, s, s.tile + (row - first) * Scratch::kPitch);
      }
      if (out_.q_t.given()) {
        k_.transpose(s.tile, Scratch::kPitch, last - first, n,
                     static_cast<std::uint8_t*>(element(out_.q_t, c, first)), out_.q_t.row_stride);
      }
    });
  }

  /// Asks for a run of a row: the processor's own prefetching begins anew at each.
  void prefetch_run(std::int64_t row, std::int64_t c, std::int64_t n) const {
    const Rows& of = p_.residual.given() ? p_.residual : in_.x;
    const auto* p = static_cast<const char*>(element(of, row, c));
    for (std::int64_t at = 0; at < n * dtype_size(of.dtype); at += 64) __builtin_prefetch(p + at);
  }

  /// 1 / scale_t of columns [c, c + n), for the group of rows [first, last) if there are groups.
  void find_factors(std::int64_t first, std::int64_t last, std::int64_t c, std::int64_t n,
                    Scratch& s) const {
    const std::int64_t group = out_.scaling == Scaling::kGroup ? first / out_.group : 0;
    float* scale = out_.scale_t.data + group * out_.scale_t.group_stride;
    if (out_.scaling == Scaling::kGroup && !out_.given_scale) {
      std::fill_n(s.maxima, padded(n), 0u);
      for (std::int64_t row = first; row < last; ++row) {
        max_columns(row, c, n, s, s.maxima);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        scale[(c + i) * out_.scale_t.row_stride] =
            scale_of(std::bit_cast<float>(s.maxima[i]), largest_, out_.pow2_scale);
      }
    }
    std::fill_n(s.factors, padded(n), 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      s.factors[i] = inverse_of(scale[(c + i) * out_.scale_t.row_stride]);
    }
  }

  /// Elements [c, c + n) of a row of q and normed, and of q_t into `tile`.
  void emit_run(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s,
                std::uint8_t* tile) const {
    const bool whole = out_.scaling == Scaling::kTensor;
    const bool grouped = out_.scaling == Scaling::kGroup;
    const bool own = out_.q_t.given() && !whole;  // q_t has scales of its own
    const bool makes_y =
        divides_ || grouped || p_.normed.given() || (own && out_.scaling == Scaling::kRow);
    if (makes_y) {
      make_y(row, c, n, s);
      if (compat_) k_.round_bf16(n, s.y);
      if (p_.normed.given()) k_.narrow_bf16(s.y, n, element(p_.normed, row, c));
    }
    const std::uint32_t* draws = nullptr;
    if (out_.rng != nullptr) {
      k_.draw(out_.rng, static_cast<std::uint64_t>(row * in_.hidden + c), n, s.draws);
      draws = s.draws;
    }
    if (out_.q.given() || whole) {
      void* q = out_.q.given() ? element(out_.q, row, c) : nullptr;
      void* first = whole && out_.q_t.given() ? tile : q;
      const float* scale = out_.scale.data + row * out_.scale.row_stride;
      if (grouped) {
        find_group_factors(row, c, n, s);
        k_.quantise_each(s.y, s.q_factors, draws, n, first);
      } else if (divides_) {
        k_.quantise_divided(s.y, *scale, draws, n, first);
      } else if (makes_y) {
        k_.quantise_y(s.y, nullptr, inverse_of(*scale), draws, n, first);
      } else if (norm_) {  // rstd / scale as one factor
        const float factor = rstd_[row] * inverse_of(*scale);
        k_.quantise(z(row, c, n, s), memory_.weight + c,
                    std::isinf(factor) ? kLargestFloat : factor, draws, n, first);
      } else {
        k_.quantise(z(row, c, n, s), nullptr, inverse_of(*scale), draws, n, first);
      }
      if (q != nullptr && q != first) std::memcpy(q, first, static_cast<std::size_t>(n));
    }
    if (own) k_.quantise_each(s.y, s.factors, draws, n, tile);
  }

  /// Scales of q's groups, if they are not given, and 1 / scale for each element.
  void find_group_factors(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s) const {
    const Scales& scale = out_.scale;
    float* of_row = scale.data + row * scale.row_stride;
    const std::int64_t group = out_.group;
    float maxima[kRun / kLeastGroup];
    if (!out_.given_scale) k_.max_groups(s.y, out_.group, n, maxima);
    for (std::int64_t i = 0; i * group < n; ++i) {
      float& of_group = of_row[(c / group + i) * scale.group_stride];
      if (!out_.given_scale) of_group = scale_of(maxima[i], largest_, out_.pow2_scale);
      std::fill_n(s.q_factors + i * group, std::min(group, padded(n) - i * group),
                  inverse_of(of_group));
    }
  }

  /// y of a run into scratch, before any rounding of compat.
  void make_y(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s) const {
    if (!norm_) return k_.widen_x(element(in_.x, row, c), nullptr, 0, n, s.y);
    const auto normalise = compat_ ? k_.normalise_compat : k_.normalise;
    normalise(z(row, c, n, s), memory_.weight + c, rstd_[row], n, s.y);
  }

  /// Raises maxima of columns to |y| of a run.
  void max_columns(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s,
                   std::uint32_t* maxima) const {
    const float* weight = norm_ ? memory_.weight + c : nullptr;
    k_.max_columns(z(row, c, n, s), weight, norm_ ? rstd_[row] : 1.0f, n, maxima);
  }

  /// z of a run, of z_dtype(): where it lies, or widened into scratch.
  const void* z(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s) const {
    if (p_.residual.given()) return element(p_.residual, row, c);
    const void* x = element(in_.x, row, c);
    if (dtype_size(in_.x.dtype) > 1) return x;
    k_.widen_x(x, scale_at(in_, row, c), in_.x_group, n, s.z);
    return s.z;
  }

  /// The residual becomes z.
  void add_to_residual(std::int64_t row, std::int64_t c, std::int64_t n, Scratch& s) const {
    void* residual = element(p_.residual, row, c);
    k_.widen_x(element(in_.x, row, c), scale_at(in_, row, c), in_.x_group, n, s.z);
    k_.widen_side(residual, n, s.y);
    k_.add(s.y, n, s.z);
    k_.narrow_side(s.z, n, residual);
  }

  const ForwardProblem& p_;
  const Input& in_;
  const Quantize& out_;
  bool norm_;     ///< else y is x
  bool compat_;   ///< y by COAT's chain
  bool divides_;  ///< q = y / scale, and COAT's rounding of the scale
  float largest_;
  RowChunks chunks_;
  Workspace memory_;
  float* rstd_;
  RowKernels k_;
};

}  // namespace

void forward(const ForwardProblem& p, Stream) { Forward(p).run(); }

void quantize(const QuantizeProblem& p, Stream) {
  ForwardProblem whole;
  whole.input = p.input;
  whole.out = p.out;
  whole.workspace = p.workspace;
  Forward(whole).run();
}

std::int64_t forward_workspace(const ForwardProblem& p, Device) {
  return Workspace::bytes(p.input.rows, p.input.hidden, p.out);
}

std::int64_t quantize_workspace(const QuantizeProblem& p, Device) {
  return Workspace::bytes(p.input.rows, p.input.hidden, p.out);
}

}  // namespace mortar::fp8_rmsnorm::cpu
