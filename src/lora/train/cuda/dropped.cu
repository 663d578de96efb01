// SPDX-License-Identifier: Apache-2.0
// What is left of adapters whose delta is dropped whole (p = 1): zeros in their gradients, and in
// dx and h where all adapters are such; y is the base. Other kernels know nothing of these
// adapters, as a factor of zero would make NaN of what is not finite.
//
// bytes  : those of the outputs written, and of the base read; a launch for each matrix
#include <algorithm>

#include "core/int_math.h"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/dropout.h"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostCtas = 2048;

/// to = from, zeros where that is null; rounded once where it is of another type.
struct FillParams {
  Matrix to, from;
  std::int64_t columns, elements;
};

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillParams p) {
  device::pdl_wait();
  device::pdl_trigger();
  const auto place = [&](const Matrix& m, std::int64_t i) {
    return i / p.columns * m.row_stride + i % p.columns * m.col_stride;
  };
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.elements;
       i += std::int64_t{gridDim.x} * kThreads) {
    const float v = p.from.data == nullptr
                        ? 0.0f
                        : device::load_as_float(p.from.data, p.from.dtype, place(p.from, i));
    device::store_from_float(p.to.data, p.to.dtype, place(p.to, i), v);
  }
}

void fill(const Matrix& to, const Matrix& from, std::int64_t rows, std::int64_t columns,
          Stream stream) {
  if (to.data == nullptr || to.data == from.data || rows * columns == 0) return;
  device::Launch l;
  const auto ctas = ceil_div<std::int64_t>(rows * columns, kThreads);
  l.grid = dim3(static_cast<unsigned>(std::min(ctas, kMostCtas)));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<fill_kernel>("lora_train", l, FillParams{to, from, columns, rows * columns});
}

template <class F>
void for_each_pair(const Problem& p, F f) {
  for (std::int64_t i = 0; i < p.num_adapters * p.num_slices; ++i) {
    const int slice = static_cast<int>(i % p.num_slices);
    f(p.pair(i / p.num_slices, slice), slice);
  }
}

}  // namespace

Problem without_dropped(const Problem& p) {
  Problem own = p;
  own.without_dropped = true;
  return own;
}

bool drops_all(const Problem& p) {
  bool all = p.drops_whole;
  if (all) for_each_pair(p, [&](const Pair& q, int) { all &= q.rank == 0 || q.drops_whole(); });
  return all;
}

void forward_dropped(const Problem& p, Stream stream) {
  fill({p.h, p.hidden_width, 1, p.weight}, {}, p.num_rows, p.hidden_width, stream);
  for (int s = 0; s < p.num_slices; ++s) {
    const SliceView& slice = p.slices[s];
    fill(slice.y, slice.base, p.num_rows, slice.width, stream);
  }
}

void backward_dropped(const Problem& p, Stream stream) {
  if (!p.add_dx && drops_all(p)) fill(p.dx, {}, p.num_rows, p.hidden, stream);
  for_each_pair(p, [&](const Pair& q, int slice) {
    if (!q.drops_whole()) return;
    if (!q.add_a) fill(q.da, {}, q.rank, p.hidden, stream);
    if (!q.add_b) fill(q.db, {}, p.slices[slice].width, q.rank, stream);
  });
}

}  // namespace mortar::lora::train::cuda
