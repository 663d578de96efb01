// SPDX-License-Identifier: Apache-2.0
// What a backend gets: plain pointers and sizes, already checked. All strides are in elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dynamic_conv/sequences.h"
#include "mortar/dynamic_conv.h"

namespace mortar::dynamic_conv {

inline constexpr int kMaxWidth = kDynamicConvMaxWidth;

/// Longest T. Kernels count time in int32 and look up to one chunk and W steps past it.
inline constexpr std::int64_t kMaxTime = (std::int64_t{1} << 31) - (1 << 20);

/// x, y, k or a gradient: (b, t) lies at b * batch_stride + t * time_stride; channels, and the W
/// taps of each, are dense.
struct Signal {
  void* data = nullptr;
  std::int64_t batch_stride = 0, time_stride = 0;

  MORTAR_HOST_DEVICE std::int64_t row(std::int64_t b, std::int64_t t) const {
    return b * batch_stride + t * time_stride;
  }
};

/// [N, D, L] by strides; position L - 1 is the newest. Null data: absent.
struct State {
  void* data = nullptr;
  std::int64_t sequence_stride = 0, channel_stride = 0, position_stride = 0;

  MORTAR_HOST_DEVICE bool given() const { return data != nullptr; }
  MORTAR_HOST_DEVICE std::int64_t at(std::int64_t n, std::int64_t d, std::int64_t position) const {
    return n * sequence_stride + d * channel_stride + position * position_stride;
  }
};

/// What forward and backward share.
struct Shape {
  std::int64_t batch = 0, channels = 0;
  int time = 0;
  int width = 1;
  int state_length = 0;  ///< L; 0 without states
  DType x_dtype = DType::kFloat32, k_dtype = DType::kFloat32;
  bool silu = false;
  Sequences sequences;
};

struct ForwardProblem {
  Shape shape;
  Signal x, k, y;
  State initial, final;

  /// Whether T = 0 still leaves final states to write.
  bool has_work() const {
    return shape.channels > 0 && shape.batch > 0 && (shape.time > 0 || final.given());
  }
};

struct BackwardProblem {
  Shape shape;
  Signal x, k, dy, dx, dk;
  State initial, dfinal, dinitial;

  bool has_work() const {
    return shape.channels > 0 && shape.batch > 0 && (shape.time > 0 || dinitial.given());
  }
};

struct StepProblem {
  std::int64_t rows = 0, channels = 0, num_slots = 0;
  int width = 1, state_length = 0;
  DType x_dtype = DType::kFloat32, k_dtype = DType::kFloat32;
  bool silu = false;
  Signal x, k, y;  ///< batch stride alone
  State state;
  const std::int32_t* slots = nullptr;  ///< null: row i uses state i

  /// The state of a row, or -1 for padding.
  MORTAR_HOST_DEVICE std::int64_t slot(std::int64_t row) const {
    if (slots == nullptr) return row;
    const std::int64_t s = slots[row];
    return s >= 0 && s < num_slots ? s : -1;
  }
};

/// What every backend does. Arguments are checked and there is work to do.
struct Backend {
  void (*forward)(const ForwardProblem& p, Stream stream);
  void (*backward)(const BackwardProblem& p, Stream stream);
  void (*step)(const StepProblem& p, Stream stream);
  /// Copies bytes to the host and waits for them.
  void (*read)(const void* from, void* to, std::size_t bytes, Stream stream);
};

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kBackend;  ///< only in builds with MORTAR_HAS_CUDA
}

}  // namespace mortar::dynamic_conv
