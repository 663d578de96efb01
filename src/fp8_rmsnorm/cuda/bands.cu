// SPDX-License-Identifier: Apache-2.0
// Bands of 128 aligned rows, each in the shared memory of a cluster of CTAs, so that x is read
// once: q and q_t with scales of groups or a given one.
//
// z[m,n] = x s     rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale     q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16; q and q_t in groups of 128: 107 MB -> 25.0 us at 4.28 TB/s
//          (copy roof of an H200)
// limit  : instructions, some 25 an element, and memory, by turns: a CTA waits for its x, then for
//          the sums of the others, and then writes. Three CTAs of an SM are at different phases.
//          Scales of groups take a second look at x in shared memory, which makes q and seeks the
//          maxima of columns, and a third for q_t
// wrong  : rows that are not aligned, wider x, a residual, stochastic rounding, scales of rows, and
//          a scale of the whole tensor that is not known yet
#include "device/cluster_launch.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/band.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/tile_codes.cuh"
#include "fp8_rmsnorm/cuda/tile_maxima.cuh"
#include "fp8_rmsnorm/cuda/tile_store.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = BandPlan::kThreads;

/// CTAs whose registers an SM holds. Conversions by integers take more: no GPU that needs them runs
/// this kernel.
constexpr int kBandsPerSm = MORTAR_FP8_INSTRUCTIONS ? 3 : 1;

/// Scales of q's groups, from the maxima in shared memory, in whose place come the factors.
template <class T, BandPass kPass>
__device__ __forceinline__ void make_group_factors(const Band<T, kPass>& band) {
  const ForwardParams& p = band.p;
  const int log2_groups = band.plan.log2_groups, log2_group = log2_of(kTileColumns) - log2_groups;
  const int hidden = static_cast<int>(p.input.hidden);
  for (int i = threadIdx.x; i < band.tiles * kTileRows << log2_groups; i += kThreads) {
    const int in_tile = i & ((1 << log2_groups) - 1), of = i >> log2_groups;
    const int row = of % kTileRows, j = of / kTileRows;
    float& place = band.groups()[((j << log2_groups) + in_tile) * BandPlan::kGroupPitch + row];
    const float rstd = band.all_rstd()[row], scale = fast_scale(p.out, place * rstd);
    const int column = band.column0(j) + (in_tile << log2_group);
    if (band.row0 + row < p.input.rows && column < hidden) {
      p.out.scale.data[(band.row0 + row) * p.out.scale.row_stride +
                       (column >> log2_group) * p.out.scale.group_stride] = scale;
    }
    place = finite_or_nan(rstd * approximate_inverse_of(scale));
  }
}

/// What the thread's rows in tile j are multiplied with for q_t.
template <class T, BandPass kPass>
__device__ __forceinline__ void turned_factors(const Band<T, kPass>& band, int j,
                                               float (&factor)[kThreadRows]) {
  const float4 rstd = *reinterpret_cast<const float4*>(band.all_rstd() + kThreadRows * band.r);
  band.read_scales(j, factor);
  factor[0] = finite_or_nan(factor[0] * rstd.x);
  factor[1] = finite_or_nan(factor[1] * rstd.y);
  factor[2] = finite_or_nan(factor[2] * rstd.z);
  factor[3] = finite_or_nan(factor[3] * rstd.w);
}

/// What piece k of the thread's rows in tile j is multiplied with for q, but for the weights.
template <class T, BandPass kPass>
__device__ __forceinline__ void row_factors(const Band<T, kPass>& band, int j, int k, float inverse,
                                            float (&factor)[kThreadRows]) {
  const float* from = band.all_rstd();
  if constexpr (kPass == BandPass::kGroup) {
    const int of_tile =
        (8 * k + band.c) * (band.kPieces == 2 ? 1 : 2) << band.plan.log2_groups >> 4;
    const int group = (j << band.plan.log2_groups) + of_tile;
    from = band.groups() + group * BandPlan::kGroupPitch;
  }
  const float4 of_rows = *reinterpret_cast<const float4*>(from + kThreadRows * band.r);
  const float by[kThreadRows] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
  float scale[kThreadRows];
  band.read_scales(j, scale);
#pragma unroll
  for (int m = 0; m < kThreadRows; ++m) {
    const float f = kPass == BandPass::kGiven ? finite_or_nan(by[m] * inverse) : by[m];
    factor[m] = finite_or_nan(f * scale[m]);
  }
}

/// The codes of quad k of a piece, times `factor` and the weights.
template <class Out, class T>
__device__ __forceinline__ std::uint32_t encode_quad(const uint4& raw, int k, float factor,
                                                     const float4& w) {
  float z[4];
  unpack4<T>(raw, k, z);
  const float y[4] = {z[0] * factor * w.x, z[1] * factor * w.y, z[2] * factor * w.z,
                      z[3] * factor * w.w};
  return device::pack_fp8x4<Out>(y);
}

/// Makes q of tile j, if it is wanted, and takes the largest |y| of the tile's columns over the
/// rows of each group. kInfinite: there is an infinite weight.
template <class Out, bool kInfinite, class T>
__device__ __forceinline__ void encode_rows(const Band<T, BandPass::kGroup>& band, int j) {
  using Tile = Band<T, BandPass::kGroup>;
  constexpr int kQuads = Tile::kQuads;
  float turned[kThreadRows];
  turned_factors(band, j, turned);
  const auto is_row = [&](int m) { return m < band.there; };
  std::uint32_t most[kThreadQuads][4];
#pragma unroll
  for (int k = 0; k < Tile::kPieces; ++k) {
    uint4 raw[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) raw[m] = band.piece(j, m, k);
    float factor[kThreadRows];
    row_factors(band, j, k, 1.0f, factor);
    std::uint32_t codes[kThreadRows][kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 w = band.weights(j, k * kQuads + i);
      largest_of_rows<T>(raw, i, turned, w, kInfinite, is_row, most[k * kQuads + i]);
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m)
        codes[m][i] = encode_quad<Out, T>(raw[m], i, factor[m], w);
    }
    band.store_q(j, k, codes);
  }
  const int quad = scatter_quads(most, band.r);
  auto* columns = reinterpret_cast<std::uint32_t*>(band.columns(j)) + 4 * (8 * quad + band.c);
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicMax(columns + i, most[0][i]);
}

/// The scales of q_t's groups from the maxima of columns, in whose place come their inverses times
/// the weights.
template <class T, BandPass kPass>
__device__ __forceinline__ void make_column_factors(const Band<T, kPass>& band) {
  const ForwardParams& p = band.p;
  const int log2_groups = band.plan.log2_groups, log2_group = log2_of(kTileRows) - log2_groups;
  for (int i = threadIdx.x; i < band.tiles * kTileColumns << log2_groups; i += kThreads) {
    const int place = i % kTileColumns, of = i / kTileColumns;
    const int j = of >> log2_groups, in_band = of & ((1 << log2_groups) - 1);
    const int n = band.column0(j) + Band<T, kPass>::Operands::column_of_weight(place);
    const std::int64_t row = band.row0 + (in_band << log2_group);
    float scale = 1.0f;
    if (n < p.input.hidden && row < p.input.rows) {
      scale = fast_scale(p.out, band.all_columns()[i]);
      p.out.scale_t
          .data[n * p.out.scale_t.row_stride + (row >> log2_group) * p.out.scale_t.group_stride] =
          scale;
    }
    band.all_columns()[i] =
        finite_or_nan(band.all_weights()[j * kTileColumns + place] * inverse_of(scale));
  }
}

/// The codes of tile j by columns, in the place of its x; and q, where its codes are the same. All
/// threads of the CTA call this, as x is overwritten when all have read what lies there: the first
/// rows of each.
template <class Out, class T, BandPass kPass>
__device__ __forceinline__ void encode_columns(const Band<T, kPass>& band, int j, float inverse) {
  using Tile = Band<T, kPass>;
  constexpr int kElements = Tile::kElements, kQuads = Tile::kQuads, kPieces = Tile::kPieces;
  constexpr int kEarly = kThreadRows / kPieces;  // of a thread's rows
  static_assert(kEarly * kPieces * Tile::Operands::kStep == BandPlan::kCodes);
  uint4 early[kPieces][kEarly];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
#pragma unroll
    for (int m = 0; m < kEarly; ++m) early[k][m] = band.piece(j, m, k);
  }
  __syncthreads();
  unsigned char* columns = band.tile(j) +
                           device::transposed_offset<kElements>(band.c * kElements, band.r / 4) +
                           band.r % 4 * 4;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    float factor[kThreadRows];
    if constexpr (kPass == BandPass::kGroup) {
      turned_factors(band, j, factor);
    } else {
      row_factors(band, j, k, inverse, factor);
    }
    uint4 raw[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) raw[m] = m < kEarly ? early[k][m] : band.piece(j, m, k);
    std::uint32_t codes[kThreadRows][kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int quad = k * kQuads + i;
      float4 w;
      if constexpr (kPass == BandPass::kGroup) {
        w = *reinterpret_cast<const float4*>(band.columns(j) + 4 * (8 * quad + band.c));
      } else {
        w = band.weights(j, quad);
      }
      std::uint32_t of_rows[kThreadRows];
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        of_rows[m] = encode_quad<Out, T>(raw[m], i, factor[m], w);
        codes[m][i] = of_rows[m];
      }
      store_columns(of_rows, columns + column_of<kElements>(0, quad) * kTileRows, kTileRows);
    }
    if constexpr (kPass == BandPass::kGiven) band.store_q(j, k, codes);
  }
}

/// Both outputs, once rstd is there.
template <class Out, class T, BandPass kPass>
__device__ __forceinline__ void encode_tiles(const Band<T, kPass>& band, bool infinite) {
  const ForwardParams& p = band.p;
  float inverse = 1.0f;
  if constexpr (kPass == BandPass::kGroup) {
    const int maxima = band.tiles * kTileColumns << band.plan.log2_groups;
    for (int i = static_cast<int>(threadIdx.x); i < maxima; i += kThreads) {
      band.all_columns()[i] = 0.0f;
    }
    if (p.out.q.given()) make_group_factors(band);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < band.tiles; ++j) {
      infinite ? encode_rows<Out, true>(band, j) : encode_rows<Out, false>(band, j);
    }
    __syncthreads();
    make_column_factors(band);
    __syncthreads();
  } else {
    inverse = inverse_of(__ldcg(p.out.scale.data));
  }
#pragma unroll 1
  for (int j = 0; j < band.tiles; ++j) {
    encode_columns<Out>(band, j, inverse);
    __syncthreads();
    store_columns_of<Band<T, kPass>::kElements>(p, band.tile(j), band.row0, band.column0(j),
                                                band.whole(j));
  }
}

template <class T, BandPass kPass>
__global__ void __launch_bounds__(kThreads, kBandsPerSm)
    bands_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ std::uint32_t scratch[32];
  __shared__ device::Mbarrier sums_here, rstd_here;
  const Band<T, kPass> band(p, memory);
  const int thread = static_cast<int>(threadIdx.x);

  // Load.
  band.init(&sums_here, &rstd_here);
  device::pdl_wait();
  device::pdl_trigger();
  const bool infinite = __syncthreads_or(band.store_weights([&] { band.copy_x(); }));

  // Reduce: rows over the cluster.
  band.measure(&sums_here);
  const float of_rows = band.finish_rows(&sums_here, &rstd_here);
  if (kPass == BandPass::kGiven && p.makes_maxima()) {
    const std::uint32_t amax = device::max_block(device::magnitude_bits(of_rows), scratch);
    if (thread == 0) p.maxima[blockIdx.x] = amax;
  }

  // Compute and store.
  if (p.out.dtype == DType::kFloat8E4M3) {
    encode_tiles<Float8E4M3>(band, infinite);
  } else {
    encode_tiles<Float8E5M2>(band, infinite);
  }
}

// ------------------------------------------------------------------------------------------- host

template <BandPass kPass>
void launch_bands(const ForwardParams& p, Stream stream) {
  const BandPlan& plan = p.plan.band_plan;
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(plan.grid));
  launch.cluster_x = static_cast<unsigned>(plan.cluster);
  launch.smem = static_cast<std::size_t>(plan.smem);
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<NarrowDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    constexpr auto kKernel = bands_kernel<typename decltype(tag)::type, kPass>;
    device::allow_large_clusters<kKernel>(p.op, device::current_device());
    device::launch<kKernel>(p.op, launch, p);
  });
}

}  // namespace

void bands(const ForwardParams& p, Stream stream) {
  if (p.out.scaling == Fp8Scaling::kGroup) return launch_bands<BandPass::kGroup>(p, stream);
  launch_bands<BandPass::kGiven>(p, stream);
}

}  // namespace mortar::fp8_rmsnorm::cuda
