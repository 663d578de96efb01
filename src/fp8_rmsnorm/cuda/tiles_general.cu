// SPDX-License-Identifier: Apache-2.0
// Pass over tiles of any rows: what tiles.cu does, for those that it does not take: not aligned,
// rounded stochastically, or with COAT's roundings under a scale that is given.
//
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale, q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales read, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200)
// limit  : instructions: 21 an element and more, as every switch is looked at per piece; stochastic
//          rounding four times that
// wrong  : where tiles.cu does it
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"
#include "fp8_rmsnorm/cuda/tile_store.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

enum class TilePass { kGeneral, kColumnMaxima };

template <class T, TilePass kPass>
__global__ void __launch_bounds__(kTileThreads, 2)
    any_tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  __shared__ __align__(16) SharedTile tile;

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int c = thread % 8, r = thread / 8;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden);
  const unsigned across = static_cast<unsigned>(ceil_div(hidden, kTileColumns));
  const unsigned tiles = static_cast<unsigned>(p.plan.tile_plan.tiles);
  const bool compat = p.out.numerics == Fp8Numerics::kCompat;
  const bool per_tensor = p.out.scaling == Fp8Scaling::kTensor;
  const bool per_group = p.out.scaling == Fp8Scaling::kGroup;
  const bool makes_maxima = p.tiles_make_maxima();

  device::pdl_wait();
  device::pdl_trigger();
  const Draws draws(p.out.rng);
  const ScaleReader scale_reader(p.input);
  float divisor = 1.0f;
  if (per_tensor && kPass != TilePass::kColumnMaxima) {
    divisor = tensor_scale(p, tile.scratch);
  }
  const float inverse = inverse_of(divisor);
  std::uint32_t largest_seen = 0;

  for (unsigned i = blockIdx.x; i < tiles; i += gridDim.x) {
    const unsigned index = tiles - 1 - i;  // the newest first
    const std::int64_t row0 = std::int64_t{index / across} * kTileRows;
    const int column0 = static_cast<int>(index % across) * kTileColumns;
    const std::int64_t my_row = row0 + kThreadRows * r;

    // Load.
    uint4 raw[kThreadRows][kPieces];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int column = column0 + column_of<kElements>(c, k * kQuads);
        const bool there = my_row + m < rows && column < hidden;
        const T* x =
            static_cast<const T*>(p.input.x.data) + (my_row + m) * p.input.x.row_stride + column;
        raw[m][k] = make_uint4(0, 0, 0, 0);
        if (p.x_aligned) {
          device::load_if(there, raw[m][k], x);
        } else if (there) {
          raw[m][k] = load_unaligned(x, sizeof(T), min(kElements, hidden - column));
        }
      }
    }
    std::uint32_t word[kThreadRows];
    float scale[kThreadRows], rstd[kThreadRows], factor[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int column = column0 + column_of<kElements>(c, 0);
      const bool there = my_row + m < rows && column < hidden;
      word[m] = kIsFloat8<T> && there ? scale_reader.load(my_row + m, column) : scale_reader.unit();
      rstd[m] = p.norm && there ? __ldcg(p.rstd + my_row + m) : 1.0f;
    }
    if (thread < kTileColumns) {
      const int at = column_of<kElements>(thread / 4 % 8, thread / 32) + thread % 4;
      float w = 1.0f;
      if (p.norm && column0 + at < hidden) {
        w = device::load_as_float(p.weight.data, p.weight.dtype, column0 + at) + p.weight_offset;
      }
      tile.weights[thread] = w;
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      scale[m] = scale_reader.to_float(word[m]);
      factor[m] = per_tensor ? finite_or_nan(finite_or_nan(rstd[m] * inverse) * scale[m])
                             : finite_or_nan(scale[m] * rstd[m]);
    }
    __syncthreads();  // weights are there; the last tile's columns have been read
    // By one factor for the row and one for each column.
    const auto multiply = [&](int m, int k, const float* columns, float(&y)[4]) {
      unpack4<T>(raw[m][k / kQuads], k % kQuads, y);
      const float4 by = *reinterpret_cast<const float4*>(&columns[4 * (8 * k + c)]);
      y[0] = y[0] * factor[m] * by.x;
      y[1] = y[1] * factor[m] * by.y;
      y[2] = y[2] * factor[m] * by.z;
      y[3] = y[3] * factor[m] * by.w;
    };

    // Reduce: maxima of the columns over a warp's 16 rows, then over a group's.
    if (!per_tensor && (kPass == TilePass::kColumnMaxima || !p.out.given_scale)) {
      if (kPass == TilePass::kColumnMaxima || per_group) {
#pragma unroll
        for (int k = 0; k < kThreadQuads; ++k) {
          float most[4] = {};
#pragma unroll
          for (int m = 0; m < kThreadRows; ++m) {
            float y[4];
            multiply(m, k, tile.weights, y);
            if (my_row + m >= rows) continue;  // 0 times an infinite weight is a NaN
#pragma unroll
            for (int j = 0; j < 4; ++j) most[j] = device::max_magnitude(most[j], y[j]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            std::uint32_t bits = device::magnitude_bits(most[j]);
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 8));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 16));
            if (r % 4 == 0) tile.inverse[warp][4 * (8 * k + c) + j] = __uint_as_float(bits);
          }
        }
        __syncthreads();
      }
    }
    if constexpr (kPass == TilePass::kColumnMaxima) {
      if (thread < kTileColumns) {
        std::uint32_t bits = 0;
#pragma unroll
        for (int w = 0; w < kTileWarps; ++w)
          bits = max(bits, __float_as_uint(tile.inverse[w][thread]));
        const int column = column0 + column_of<kElements>(thread / 4 % 8, thread / 32) + thread % 4;
        if (column < hidden) atomicMax(p.column_maxima + column, bits);
      }
      continue;
    }
    if (!per_tensor) {
      // The scales of q_t's rows, and their inverses where the maxima were.
      const int group_rows = per_group ? p.out.group : kTileRows, group_warps = group_rows / 16;
      for (int j = thread; j < kTileColumns * (kTileRows / group_rows); j += kTileThreads) {
        const int at = j % kTileColumns, first_warp = j / kTileColumns * group_warps;
        const int column = column0 + column_of<kElements>(at / 4 % 8, at / 32) + at % 4;
        const std::int64_t row = row0 + first_warp * 16;
        if (column >= hidden || row >= rows) continue;
        float* scale_t = p.out.scale_t.data + column * p.out.scale_t.row_stride +
                         (per_group ? row / group_rows * p.out.scale_t.group_stride : 0);
        float s;
        if (p.out.given_scale) {
          s = __ldcg(scale_t);
        } else if (per_group) {
          std::uint32_t bits = 0;
          for (int w = first_warp; w < first_warp + group_warps; ++w) {
            bits = max(bits, __float_as_uint(tile.inverse[w][at]));
          }
          s = scale_for(p.out, __uint_as_float(bits));
          *scale_t = s;
        } else {
          s = scale_for(p.out, __uint_as_float(__ldcg(p.column_maxima + column)));
          if (row0 == 0) *scale_t = s;
        }
        for (int w = first_warp; w < first_warp + group_warps; ++w) {
          tile.inverse[w][at] = finite_or_nan(tile.weights[at] * inverse_of(s));
        }
      }
      __syncthreads();
    }

    // Compute and store.
    std::uint32_t codes[kThreadRows][kThreadQuads];
#pragma unroll
    for (int k = 0; k < kThreadQuads; ++k) {
      const int at = column_of<kElements>(c, k);
      std::uint32_t of_rows[4], of_columns[4];
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        float y[4];
        if (compat || makes_maxima) {
          const float4 w = *reinterpret_cast<const float4*>(&tile.weights[4 * (8 * k + c)]);
          unpack4<T>(raw[m][k / kQuads], k % kQuads, y);
          y[0] = normalise(y[0], scale[m], rstd[m], w.x);
          y[1] = normalise(y[1], scale[m], rstd[m], w.y);
          y[2] = normalise(y[2], scale[m], rstd[m], w.z);
          y[3] = normalise(y[3], scale[m], rstd[m], w.w);
        }
        if (makes_maxima) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            largest_seen = max(largest_seen, device::magnitude_bits(y[j]));
        }
        if (compat) {
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = divide_compat(y[j], p.norm, divisor, inverse);
        } else {
          multiply(m, k, per_tensor ? tile.weights : tile.inverse[warp], y);
        }
        const std::uint64_t element =
            static_cast<std::uint64_t>(my_row + m) * static_cast<std::uint64_t>(hidden) +
            static_cast<std::uint64_t>(column0 + at);
        of_rows[m] = encode4(p.out, draws, element, y);
        codes[m][k] = of_rows[m];
      }
      if (p.out.q_t.given()) {
        device::transpose_bytes_4x4(of_rows, of_columns);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<std::uint32_t*>(
              tile.transposed + device::transposed_offset<kElements>(at + j, r / 4) + r % 4 * 4) =
              of_columns[j];
        }
      }
    }
    if (p.out.q.given() && per_tensor) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          const int column = column0 + column_of<kElements>(c, k * kQuads);
          if (my_row + m >= rows || column >= hidden) continue;
          std::uint32_t words[kQuads];
#pragma unroll
          for (int i = 0; i < kQuads; ++i) words[i] = codes[m][k * kQuads + i];
          void* q = static_cast<char*>(p.out.q.data) + (my_row + m) * p.out.q.row_stride + column;
          store_codes<kElements>(q, words, hidden - column, p.q_aligned);
        }
      }
    }
    __syncthreads();  // the columns are there; the weights have been read
    if (p.out.q_t.given()) {
      const std::int64_t stride = p.out.q_t.row_stride;
      char* q_t = static_cast<char*>(p.out.q_t.data) + column0 * stride + row0;
      const int tile_rows = static_cast<int>(min(rows - row0, std::int64_t{kTileRows}));
      const int tile_columns = min(hidden - column0, kTileColumns);
      if (p.q_t_aligned) {
        store_aligned_columns<kElements>(tile.transposed, q_t, stride, tile_rows, tile_columns);
      } else {
        store_shifted_columns<kElements>(tile.transposed, q_t, stride, tile_rows, tile_columns);
      }
    }
  }

  if (makes_maxima) {
    largest_seen = device::max_block(largest_seen, tile.scratch);
    if (thread == 0) p.maxima[blockIdx.x] = largest_seen;
  }
}

constexpr int kAmaxThreads = 128;

/// amax alone, where the scale was given. Small enough to lie beside a CTA of the kernel before it
/// and wait there, and the kernel after it need not wait for that to start.
__global__ void __launch_bounds__(kAmaxThreads)
    amax_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ std::uint32_t scratch[32];
  device::pdl_begin(/*early=*/true);
  device::pdl_wait();
  const float amax = reduce_maxima(p.maxima, p.maxima_count, scratch);
  if (threadIdx.x == 0) *p.out.amax = amax;
}

// ------------------------------------------------------------------------------------------- host

template <TilePass kPass>
void launch_tiles(const ForwardParams& p, Stream stream) {
  const device::Launch launch = launch_of_tiles(p, stream);
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<any_tiles_kernel<typename decltype(tag)::type, kPass>>(p.op, launch, p);
  });
}

}  // namespace

void any_tiles(const ForwardParams& p, Stream stream) {
  launch_tiles<TilePass::kGeneral>(p, stream);
}

void any_column_maxima(const ForwardParams& p, Stream stream) {
  launch_tiles<TilePass::kColumnMaxima>(p, stream);
}

void reduce_amax(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = kAmaxThreads;
  launch.grid = dim3(1);
  launch.stream = stream;
  launch.pdl = true;
  launch.carve_out = true;
  device::launch<amax_kernel>(p.op, launch, p);
}

}  // namespace mortar::fp8_rmsnorm::cuda
