// SPDX-License-Identifier: Apache-2.0
#include "lora/reference.h"

#include <cmath>

#include "core/float_element.h"
#include "lora/checks.h"

namespace mortar::lora {
namespace {

bool has_adapter(std::int32_t id, const WeightsView& w) { return id >= 0 && id < w.num_adapters; }

}  // namespace

ReferenceHidden reference_shrink(const Tensor& x, const LoraWeights& weights,
                                 std::span<const std::int32_t> token_adapter, double scale) {
  const WeightsView view =
      check_weights(ArgCheck("reference_shrink"), weights, Needs::kA, Device{});
  ReferenceHidden h;
  h.num_tokens = x.shape[0];
  h.width = weights.max_rank;
  h.data.resize(h.num_tokens * h.width * weights.num_slices);
  for (std::int64_t t = 0; t < h.num_tokens; ++t) {
    if (!has_adapter(token_adapter[t], view)) continue;
    for (int s = 0; s < weights.num_slices; ++s) {
      const SliceWeights w = view.get(token_adapter[t], s);
      for (int r = 0; r < w.rank; ++r) {
        Bounded& sum = h.at(s, t, r);
        for (std::int64_t k = 0; k < weights.hidden; ++k) {
          const double product = double{load_float(x.data, x.dtype, t * x.strides[0] + k)} *
                                 load_float(w.a, weights.dtype, r * w.a_row_stride + k);
          sum.value += product;
          sum.magnitude += std::abs(product);
        }
        sum.value *= scale * w.scale;
        sum.magnitude *= std::abs(scale * w.scale);
      }
    }
  }
  return h;
}

std::vector<ReferenceOutput> reference_expand(const ReferenceHidden& h, const LoraWeights& weights,
                                              std::span<const std::int32_t> token_adapter,
                                              const Tensor& y, std::int64_t offset, bool add_inputs,
                                              std::optional<DType> round_h) {
  const WeightsView view =
      check_weights(ArgCheck("reference_expand"), weights, Needs::kB, Device{});
  const std::int64_t columns = y.shape[1];
  std::vector<ReferenceOutput> out(y.shape[0] * columns);
  for (std::int64_t t = 0; t < y.shape[0]; ++t) {
    for (std::int64_t n = 0; n < columns; ++n) {
      out[t * columns + n].value = load_float(y.data, y.dtype, t * y.strides[0] + n);
    }
    if (!has_adapter(token_adapter[t], view)) continue;
    ReferenceOutput* row = out.data() + t * columns + offset;
    for (int s = 0; s < weights.num_slices; row += weights.widths[s++]) {
      const SliceWeights w = view.get(token_adapter[t], s);
      if (w.rank == 0) continue;
      for (std::int64_t n = 0; n < weights.widths[s]; ++n) {
        ReferenceOutput sum;
        sum.written = true;
        for (int r = 0; r < w.rank; ++r) {
          const Bounded& from = h.at(s, t, r);
          const double factor =
              round_h ? round_to(static_cast<float>(from.value), *round_h) : from.value;
          const double b = load_float(w.b, weights.dtype, n * w.b_row_stride + r);
          sum.value += factor * b;
          sum.magnitude += std::abs(factor * b);
          sum.hidden_error += from.magnitude * std::abs(b);
        }
        if (add_inputs) sum.value += row[n].value;
        row[n] = sum;
      }
    }
  }
  return out;
}

}  // namespace mortar::lora
