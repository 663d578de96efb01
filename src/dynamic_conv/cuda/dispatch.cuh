// SPDX-License-Identifier: Apache-2.0
// From runtime values to a kernel's traits, and the launch of a grid of tiles.
#pragma once

#include <initializer_list>
#include <limits>

#include "core/check.h"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "dynamic_conv/config.h"
#include "dynamic_conv/cuda/tile.cuh"

namespace mortar::dynamic_conv::cuda {

/// body(VectorTraits<T, W>()) for the W that equals `width`, then, if `kNarrow`, with one channel a
/// thread, which odd numbers of channels need; returns whether it took one.
template <class T, bool kNarrow, int W = kMaxWidth, class Body>
bool with_width(int width, const Body& body) {
  if constexpr (W == 0) {
    return false;
  } else {
    if (width != W) return with_width<T, kNarrow, W - 1>(width, body);
    if (body(VectorTraits<T, W>())) return true;
    if constexpr (kNarrow && vector_channels<T>(W) > 1) return body(VectorTraits<T, W, 1>());
    return false;
  }
}

/// Offers the vector traits, where dtypes agree, then the scalar ones; `body` returns whether it
/// took the offer and always takes the last.
template <bool kNarrow, class Problem, class Body>
void with_traits(const char* op, const Problem& shape, const Body& body) {
  device::visit_dtype<FloatDTypes>(shape.x_dtype, op, [&](auto x) {
    using X = typename decltype(x)::type;
    if (shape.x_dtype == shape.k_dtype && with_width<X, kNarrow>(shape.width, body)) return;
    device::visit_dtype<FloatDTypes>(
        shape.k_dtype, op, [&](auto k) { body(ScalarTraits<X, typename decltype(k)::type>()); });
  });
}

/// Whether every row of a signal starts at a multiple of `bytes`.
inline bool aligned(const Signal& s, DType dtype, std::int64_t bytes) {
  const std::int64_t size = dtype_size(dtype);
  return reinterpret_cast<std::uintptr_t>(s.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         s.batch_stride * size % bytes == 0 && s.time_stride * size % bytes == 0;
}

/// Whether the traits' vectors divide D and every access to these operands is aligned.
template <class Traits, class Problem>
bool fits(const Problem& shape, std::initializer_list<Signal> signals,
          std::initializer_list<Signal> taps) {
  bool fit = shape.channels % Traits::kChannels == 0;
  for (const Signal& s : signals) fit &= aligned(s, shape.x_dtype, Traits::kSignalAlignment);
  for (const Signal& s : taps) fit &= aligned(s, shape.k_dtype, Traits::kTapAlignment);
  return fit;
}

/// Bytes from one step of time to the next.
inline std::int64_t step_bytes(const Signal& s, DType dtype) {
  return s.time_stride * dtype_size(dtype);
}

template <class Traits>
CudaConfig config_for(const Shape& shape, const Loads& loads) {
  return CudaConfig::make(shape.batch, shape.time,
                          ceil_div<std::int64_t>(shape.channels, Traits::kChannels),
                          device::current_device().num_sms, loads);
}

/// One CTA per (batch row, chunk of time, block of channels); T = 0 has one empty chunk, in which
/// states are passed on.
template <auto kKernel, class Traits, class Params, class Problem>
void launch_tiles(const char* op, const Problem& p, const CudaConfig& c, Stream stream) {
  const std::int64_t groups = ceil_div<std::int64_t>(p.shape.channels, Traits::kChannels);
  const std::int64_t chunks = p.shape.time == 0 ? 1 : ceil_div<std::int64_t>(p.shape.time, c.steps);
  const std::int64_t columns = ceil_div<std::int64_t>(groups, c.threads);
  const std::int64_t ctas = p.shape.batch * chunks * columns;
  check(ctas <= std::numeric_limits<std::int32_t>::max(), op, ": x must need at most 2^31 - 1 ",
        "blocks of ", c.steps, " steps and ", c.threads, " threads, got ", ctas);
  Params params(p);
  params.grid = {c.steps, static_cast<unsigned>(chunks), static_cast<unsigned>(columns)};
  device::Launch launch;
  launch.grid = dim3(static_cast<unsigned>(ctas));
  launch.threads = static_cast<unsigned>(c.threads);
  launch.stream = stream;
  launch.pdl = true;
  device::launch<kKernel>(op, launch, params);
}

}  // namespace mortar::dynamic_conv::cuda
