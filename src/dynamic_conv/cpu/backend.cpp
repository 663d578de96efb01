// SPDX-License-Identifier: Apache-2.0
// The CPU backend: pieces of (batch row, chunk of time, block of channels) shared out over threads;
// inside a piece, time goes forward and every step is a few row kernels.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "dynamic_conv/cpu/history.h"
#include "hwy/cache_control.h"

namespace mortar::dynamic_conv::cpu {
namespace {

/// One piece of work: steps [begin, end) of batch row b.
struct Piece {
  std::int64_t b = 0;
  int begin = 0, end = 0;
  ChannelBlock block;

  /// A boundary between sequences belongs to one chunk: the one that it ends, or the first.
  bool owns(int boundary) const { return boundary <= end && (boundary > begin || begin == 0); }
};

template <class Body>
void for_each_piece(const Shape& shape, const Body& body) {
  const auto config =
      CpuConfig::make(shape.batch, shape.time, shape.channels, omp_get_max_threads());
  const std::int64_t blocks = ceil_div(shape.channels, config.block_channels);
  const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(shape.time, config.steps));
  const std::int64_t pieces = shape.batch * chunks * blocks;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t i = 0; i < pieces; ++i) {
    Piece piece;
    piece.block.first = i % blocks * config.block_channels;
    piece.block.count = std::min(config.block_channels, shape.channels - piece.block.first);
    const std::int64_t chunk = i / blocks % chunks;
    piece.begin = static_cast<int>(chunk * config.steps);
    piece.end = std::min(piece.begin + config.steps, shape.time);
    piece.b = i / blocks / chunks;
    body(piece);
  }
}

Walk walk_at(const Shape& shape, const Piece& piece) {
  const int index = !shape.sequences.packed() ? static_cast<int>(piece.b)
                    : piece.begin == 0        ? 0
                                              : last_start_not_after(shape.sequences, piece.begin);
  return Walk::at(shape.sequences, index, piece.begin);
}

/// The forward of one piece. Rows of inputs are read where they lie: in x, or before the sequence
/// in copies of its initial state.
class ForwardPiece {
 public:
  ForwardPiece(const ForwardProblem& p, const RowKernels& kernels, const Piece& piece)
      : p_(p),
        shape_(p.shape),
        kernels_(kernels),
        piece_(piece),
        finish_{.silu = p.shape.silu, .stream = bytes(p.shape) >= CpuConfig::kStreamBytes},
        walk_(walk_at(p.shape, piece)) {}

  void run() {
    begin_sequence();
    if (piece_.begin == 0) cross_boundaries(0);
    const std::int64_t first = piece_.block.first;
    for (int t = piece_.begin; t < piece_.end; ++t) {
      const void* x[kMaxWidth];
      for (int j = 0; j < shape_.width; ++j) x[j] = input(t - j);
      kernels_.convolve(x,
                        element(p_.k, shape_.k_dtype, p_.k.row(piece_.b, t) + first * shape_.width),
                        piece_.block.count, finish_,
                        element(p_.y, shape_.x_dtype, p_.y.row(piece_.b, t) + first));
      cross_boundaries(t + 1);
    }
    if (finish_.stream) hwy::FlushStream();
  }

 private:
  static std::int64_t bytes(const Shape& s) {
    const std::int64_t channel = 2 * dtype_size(s.x_dtype) + s.width * dtype_size(s.k_dtype);
    return s.batch * s.time * s.channels * channel;
  }

  /// The row of step t >= start - W + 1 of the walk's sequence.
  void* input(int t) const {
    if (t < walk_.start) return before_[walk_.start - 1 - t];
    return element(p_.x, shape_.x_dtype, p_.x.row(piece_.b, t) + piece_.block.first);
  }

  void begin_sequence() {
    for (int j = 0; j + 1 < shape_.width; ++j) {
      const int position = shape_.state_length - 1 - j;
      before_[j] = kZeros;
      if (position < 0 || !p_.initial.given()) continue;
      copy(elements(p_.initial, shape_.x_dtype, walk_.index, position, piece_.block),
           {state_rows_[j], 1}, piece_.block.count, dtype_size(shape_.x_dtype));
      before_[j] = state_rows_[j];
    }
  }

  /// Sequences that end at t leave their final states, and the next one begins.
  void cross_boundaries(int t) {
    while (walk_.end == t) {
      if (p_.final.given()) write_final_state();
      walk_.advance(shape_.sequences);
      if (!walk_.done()) begin_sequence();
    }
  }

  /// final[n] = the last L entries of (initial state, inputs) of the walk's sequence.
  void write_final_state() {
    const int length = shape_.state_length;
    for (int j = 0; j < length; ++j) {
      const int t = walk_.end - length + j, position = length + t - walk_.start;
      Elements from{kZeros, 1};
      if (t >= walk_.start) {
        from.data = input(t);
      } else if (position >= 0 && p_.initial.given()) {
        from = elements(p_.initial, shape_.x_dtype, walk_.index, position, piece_.block);
      }
      copy(from, elements(p_.final, shape_.x_dtype, walk_.index, j, piece_.block),
           piece_.block.count, dtype_size(shape_.x_dtype));
    }
  }

  using Row = char[CpuConfig::kBlockChannels * sizeof(float)];
  alignas(64) static inline Row kZeros = {};  ///< only ever read

  const ForwardProblem& p_;
  const Shape& shape_;
  const RowKernels& kernels_;
  const Piece& piece_;
  Finish finish_;
  Walk walk_;
  void* before_[kMaxWidth - 1];  ///< the input j + 1 steps before the sequence
  alignas(64) Row state_rows_[kMaxWidth - 1];
};

/// Step t adds to the gradients of steps t - W + 1 .. t, so those of step t - W + 1 are complete
/// then: rows of pending gradients, from step t backwards, follow the walk.
class BackwardPiece {
 public:
  BackwardPiece(const BackwardProblem& p, const RowKernels& kernels, const Piece& piece)
      : p_(p),
        shape_(p.shape),
        kernels_(kernels),
        piece_(piece),
        x_(p.shape.width),
        pending_(p.shape.width),
        g_(1),
        sum_(1),
        walk_(walk_at(p.shape, piece)) {}

  void run() {
    const int width = shape_.width;
    const std::int64_t n = piece_.block.count;
    begin_sequence(piece_.begin);
    if (piece_.begin == 0) cross_boundaries(0);
    const int stop =
        static_cast<int>(std::min<std::int64_t>(std::int64_t{piece_.end} + width - 1, shape_.time));
    for (int t = piece_.begin; t < stop && !walk_.done() && walk_.start <= piece_.end; ++t) {
      const std::int64_t first = piece_.block.first;
      void* k = element(p_.k, shape_.k_dtype, p_.k.row(piece_.b, t) + first * width);
      void* dk = t < piece_.end
                     ? element(p_.dk, shape_.k_dtype, p_.dk.row(piece_.b, t) + first * width)
                     : nullptr;  // the next chunk's
      x_.rotate();
      kernels_.widen(element(p_.x, shape_.x_dtype, p_.x.row(piece_.b, t) + first), n, x_[0]);
      kernels_.widen(element(p_.dy, shape_.x_dtype, p_.dy.row(piece_.b, t) + first), n, g_[0]);
      if (shape_.silu) {
        const void* inputs[kMaxWidth];
        for (int j = 0; j < width; ++j) inputs[j] = x_[j];
        kernels_.convolve_scratch(inputs, k, n, {}, sum_[0]);
        kernels_.silu_gradient(sum_[0], n, g_[0]);
      }
      pending_.rotate();
      kernels_.scatter(x_.rows(), k, g_[0], n, dk, pending_.rows());
      emit(t - width + 1, pending_[width - 1]);
      cross_boundaries(t + 1);
    }
  }

 private:
  /// A complete gradient of step t: to dx, or to dinitial_state if t lies before the sequence.
  void emit(int t, float* gradient) {
    const bool real = t >= walk_.start;
    const int position = shape_.state_length + t - walk_.start;
    if (real ? t < piece_.begin || t >= piece_.end
             : !p_.dinitial.given() || position < 0 || !piece_.owns(walk_.start)) {
      return;
    }
    const int final_position = shape_.state_length + t - walk_.end;
    if (p_.dfinal.given() && final_position >= 0) {
      read_state(p_.dfinal, shape_.x_dtype, walk_.index, final_position, piece_.block, sum_[0]);
      for (std::int64_t c = 0; c < piece_.block.count; ++c) gradient[c] += sum_[0][c];
    }
    if (real) {
      kernels_.narrow(gradient, piece_.block.count,
                      element(p_.dx, shape_.x_dtype, p_.dx.row(piece_.b, t) + piece_.block.first));
    } else {
      write_state(p_.dinitial, shape_.x_dtype, walk_.index, position, piece_.block, gradient);
    }
  }

  void begin_sequence(int t) {
    for (int j = 0; j + 1 < shape_.width; ++j) {
      read_input(shape_, p_.x, p_.initial, piece_.b, walk_, t - 1 - j, piece_.block, kernels_,
                 x_[j]);
      std::fill_n(pending_[j], piece_.block.count, 0.0f);
    }
    if (walk_.start == t && shape_.state_length == shape_.width) {  // no tap reaches this one
      std::fill_n(g_[0], piece_.block.count, 0.0f);
      emit(t - shape_.width, g_[0]);
    }
  }

  /// Sequences that end at t: what is pending is complete, and the next one starts afresh.
  void cross_boundaries(int t) {
    while (walk_.end == t) {
      for (int j = shape_.width - 2; j >= 0; --j) emit(t - 1 - j, pending_[j]);
      walk_.advance(shape_.sequences);
      if (!walk_.done()) begin_sequence(t);
    }
  }

  const BackwardProblem& p_;
  const Shape& shape_;
  const RowKernels& kernels_;
  const Piece& piece_;
  RowRing<kMaxWidth> x_;        ///< the input j steps ago
  RowRing<kMaxWidth> pending_;  ///< the gradient of the input j steps ago
  RowRing<1> g_, sum_;
  Walk walk_;
};

void forward(const ForwardProblem& p, Stream) {
  const RowKernels kernels =
      row_kernels(p.shape.x_dtype, p.shape.k_dtype, p.shape.width, p.shape.state_length);
  for_each_piece(p.shape, [&](const Piece& piece) { ForwardPiece(p, kernels, piece).run(); });
}

void backward(const BackwardProblem& p, Stream) {
  const RowKernels kernels =
      row_kernels(p.shape.x_dtype, p.shape.k_dtype, p.shape.width, p.shape.state_length);
  for_each_piece(p.shape, [&](const Piece& piece) { BackwardPiece(p, kernels, piece).run(); });
}

/// The L positions of one slot as rows, newest first, or back. Dense [D, L] and dense channels take
/// the SIMD kernels.
void read_slot(const StepProblem& p, const RowKernels& kernels, std::int64_t slot,
               ChannelBlock block, float* const* rows) {
  const int length = p.state_length;
  const auto at = [&](int j) {
    return element(p.state, p.x_dtype, p.state.at(slot, block.first, j));
  };
  if (p.state.position_stride == 1 && p.state.channel_stride == length) {
    kernels.widen_state(at(0), block.count, rows);
  } else {
    for (int j = 0; j < length; ++j) {
      if (p.state.channel_stride == 1) {
        kernels.widen(at(j), block.count, rows[j]);
      } else {
        read_state(p.state, p.x_dtype, slot, j, block, rows[j]);
      }
    }
  }
}

void write_slot(const StepProblem& p, const RowKernels& kernels, std::int64_t slot,
                ChannelBlock block, const float* const* rows) {
  const int length = p.state_length;
  const auto at = [&](int j) {
    return element(p.state, p.x_dtype, p.state.at(slot, block.first, j));
  };
  if (p.state.position_stride == 1 && p.state.channel_stride == length) {
    kernels.narrow_state(rows, block.count, at(0));
  } else {
    for (int j = 0; j < length; ++j) {
      if (p.state.channel_stride == 1) {
        kernels.narrow(rows[j], block.count, at(j));
      } else {
        write_state(p.state, p.x_dtype, slot, j, block, rows[j]);
      }
    }
  }
}

void step_row(const StepProblem& p, const RowKernels& kernels, std::int64_t row,
              ChannelBlock block) {
  const std::int64_t n = block.count;
  const std::int64_t slot = p.slot(row);
  RowRing<kMaxWidth + 1> rows(1);  // the state, oldest first, then x
  RowRing<1> sum(1);
  const int length = p.state_length;
  if (slot < 0) {
    std::fill_n(sum[0], n, 0.0f);
  } else {
    if (length > 0) read_slot(p, kernels, slot, block, rows.rows());
    kernels.widen(element(p.x, p.x_dtype, p.x.row(row, 0) + block.first), n, rows[length]);
    const void* inputs[kMaxWidth];
    for (int j = 0; j < p.width; ++j) inputs[j] = rows[length - j];
    kernels.convolve_scratch(inputs,
                             element(p.k, p.k_dtype, p.k.row(row, 0) + block.first * p.width), n,
                             {.silu = p.silu}, sum[0]);
    if (length > 0) write_slot(p, kernels, slot, block, rows.rows() + 1);
  }
  kernels.narrow(sum[0], n, element(p.y, p.x_dtype, p.y.row(row, 0) + block.first));
}

void step(const StepProblem& p, Stream) {
  const RowKernels kernels = row_kernels(p.x_dtype, p.k_dtype, p.width, p.state_length);
  constexpr std::int64_t kBlock = CpuConfig::kLeastBlockChannels;
  const std::int64_t blocks = ceil_div(p.channels, kBlock);
  const std::int64_t pieces = p.rows * blocks;
#pragma omp parallel for schedule(static) if (pieces > 1)
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t first = i % blocks * kBlock;
    step_row(p, kernels, i / blocks, {first, std::min(kBlock, p.channels - first)});
  }
}

void read(const void* from, void* to, std::size_t bytes, Stream) { std::memcpy(to, from, bytes); }

}  // namespace

const Backend kBackend = {forward, backward, step, read};

}  // namespace mortar::dynamic_conv::cpu
