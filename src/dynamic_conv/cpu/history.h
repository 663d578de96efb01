// SPDX-License-Identifier: Apache-2.0
// Float32 scratch rows of one block of channels, and the inputs of a sequence before a given step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/float_element.h"
#include "dynamic_conv/config.h"
#include "dynamic_conv/cpu/rows.h"

namespace mortar::dynamic_conv::cpu {

/// Channels [first, first + count).
struct ChannelBlock {
  std::int64_t first = 0, count = 0;
};

/// `kRows` rows that change places instead of moving their content.
template <int kRows>
class RowRing {
 public:
  explicit RowRing(int used) : used_(used) {
    for (int i = 0; i < kRows; ++i) rows_[i] = storage_[i];
  }
  /// Row i becomes row i + 1, and the last one row 0.
  void rotate() { std::rotate(rows_, rows_ + used_ - 1, rows_ + used_); }
  float* const* rows() const { return rows_; }
  float* operator[](int i) const { return rows_[i]; }

 private:
  static constexpr std::int64_t kRowFloats = CpuConfig::kBlockChannels + kRowPadding;
  alignas(64) float storage_[kRows][kRowFloats];
  float* rows_[kRows];
  int used_;
};

inline void* element(const Signal& s, DType dtype, std::int64_t offset) {
  return static_cast<char*>(s.data) + offset * dtype_size(dtype);
}
inline void* element(const State& s, DType dtype, std::int64_t offset) {
  return static_cast<char*>(s.data) + offset * dtype_size(dtype);
}

/// One element a channel, `stride` elements apart.
struct Elements {
  void* data = nullptr;
  std::int64_t stride = 1;
};

/// Bit for bit; `size` is that of an element, 2 or 4.
inline void copy(Elements from, Elements to, std::int64_t count, std::size_t size) {
  if (from.stride == 1 && to.stride == 1) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(count) * size);
    return;
  }
  const auto each = [&](auto word) {
    const auto* source = static_cast<const decltype(word)*>(from.data);
    auto* target = static_cast<decltype(word)*>(to.data);
    for (std::int64_t c = 0; c < count; ++c) target[c * to.stride] = source[c * from.stride];
  };
  size == 4 ? each(std::uint32_t()) : each(std::uint16_t());
}

/// One position of a state.
inline Elements elements(const State& s, DType dtype, std::int64_t n, int position,
                         ChannelBlock block) {
  return {element(s, dtype, s.at(n, block.first, position)), s.channel_stride};
}

/// One position of a state: to[c] = state[n, block.first + c, position].
inline void read_state(const State& s, DType dtype, std::int64_t n, int position,
                       ChannelBlock block, float* to) {
  for (std::int64_t c = 0; c < block.count; ++c) {
    to[c] = load_float(s.data, dtype, s.at(n, block.first + c, position));
  }
}
inline void write_state(const State& s, DType dtype, std::int64_t n, int position,
                        ChannelBlock block, const float* from) {
  for (std::int64_t c = 0; c < block.count; ++c) {
    store_float(s.data, dtype, s.at(n, block.first + c, position), from[c]);
  }
}

/// to[c] = the input of the walk's sequence at step t, which may lie before the sequence: then it
/// comes from the initial state, or is zero.
inline void read_input(const Shape& shape, const Signal& x, const State& initial, std::int64_t b,
                       const Walk& walk, int t, ChannelBlock block, const RowKernels& kernels,
                       float* to) {
  if (t >= walk.start) {
    kernels.widen(element(x, shape.x_dtype, x.row(b, t) + block.first), block.count, to);
    return;
  }
  const int position = shape.state_length + t - walk.start;
  if (position >= 0 && initial.given()) {
    read_state(initial, shape.x_dtype, walk.index, position, block, to);
  } else {
    std::fill_n(to, block.count, 0.0f);
  }
}

}  // namespace mortar::dynamic_conv::cpu
