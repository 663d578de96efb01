// SPDX-License-Identifier: Apache-2.0
// Bands of 128 aligned rows, each in the shared memory of a cluster of CTAs, so that x is read
// once: q and q_t with scales of groups or a given one.
//
// z[m,n] = x s     rstd[m] = 1 / sqrt(mean_n z^2 + eps)
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale     q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16; q and q_t in groups of 128: 107 MB -> 25.0 us at 4.28 TB/s
//          (copy roof of an H200)
// limit  : instructions, some 15 an element, and memory, by turns: a CTA waits for its x, then for
//          the sums of the others, and then writes. Several CTAs of an SM are at different phases
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
template <class T>
inline constexpr int kBandsPerSm = !MORTAR_FP8_INSTRUCTIONS ? 1
                                   : kIsFloat8<T>           ? 3
                                                            : 2;

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

/// Takes the largest |y| of the columns of tile j over the rows of each group. kInfinite: there is
/// an infinite weight.
template <bool kInfinite, class T, BandPass kPass>
__device__ __forceinline__ void measure_columns(const Band<T, kPass>& band, int j) {
  constexpr int kQuads = Band<T, kPass>::kQuads;
  float factor[kThreadRows];
  turned_factors(band, j, factor);
  const auto is_row = [&](int m) {
    return band.row0 + kThreadRows * band.r + m < band.p.input.rows;
  };
  std::uint32_t most[kThreadQuads][4];
  uint4 raw[kThreadRows];
#pragma unroll
  for (int k = 0; k < kThreadQuads; ++k) {
    if (k % kQuads == 0) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) raw[m] = band.piece(j, m, k / kQuads);
    }
    largest_of_rows<T>(raw, k % kQuads, factor, band.weights(j, k), kInfinite, is_row, most[k]);
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
      scale = scale_for(p.out, band.all_columns()[i]);
      p.out.scale_t
          .data[n * p.out.scale_t.row_stride + (row >> log2_group) * p.out.scale_t.group_stride] =
          scale;
    }
    band.all_columns()[i] =
        finite_or_nan(band.all_weights()[j * kTileColumns + place] * inverse_of(scale));
  }
}

/// What the thread's pieces in tile j are multiplied with for q, but for the weights.
template <class T, BandPass kPass>
__device__ __forceinline__ void row_factors(const Band<T, kPass>& band, int j, float inverse,
                                            float (&factor)[Band<T, kPass>::kPieces][kThreadRows]) {
  constexpr int kPieces = Band<T, kPass>::kPieces;
  const int row = kThreadRows * band.r;
  float scale[kThreadRows];
  band.read_scales(j, scale);
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const float* from = band.all_rstd();
    if constexpr (kPass == BandPass::kGroup) {
      const int of_tile = (8 * k + band.c) * (kPieces == 2 ? 1 : 2) << band.plan.log2_groups >> 4;
      const int group = (j << band.plan.log2_groups) + of_tile;
      from = band.groups() + group * BandPlan::kGroupPitch;
    }
    const float4 of_rows = *reinterpret_cast<const float4*>(from + row);
    const float by[kThreadRows] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const float f = kPass == BandPass::kGiven ? finite_or_nan(by[m] * inverse) : by[m];
      factor[k][m] = finite_or_nan(f * scale[m]);
    }
  }
}

/// The codes of tile j: by rows in registers, by columns at `columns`.
template <class Out, class T, BandPass kPass>
__device__ __forceinline__ void encode_tile(const Band<T, kPass>& band, int j, float inverse,
                                            unsigned char* columns,
                                            std::uint32_t (&codes)[kThreadRows][kThreadQuads]) {
  constexpr int kElements = Band<T, kPass>::kElements, kQuads = kElements / 4;
  float factor[Band<T, kPass>::kPieces][kThreadRows], factor_t[kThreadRows];
  row_factors(band, j, inverse, factor);
  if constexpr (kPass == BandPass::kGroup) turned_factors(band, j, factor_t);
  const float* columns_by = kPass == BandPass::kGroup ? band.columns(j) : nullptr;
  uint4 raw[kThreadRows];
#pragma unroll
  for (int k = 0; k < kThreadQuads; ++k) {
    if (k % kQuads == 0) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) raw[m] = band.piece(j, m, k / kQuads);
    }
    const float4 w = band.weights(j, k);
    float4 w_t = w;
    if constexpr (kPass == BandPass::kGroup) {
      w_t = *reinterpret_cast<const float4*>(columns_by + 4 * (8 * k + band.c));
    }
    std::uint32_t of_rows[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      float z[4];
      unpack4<T>(raw[m], k % kQuads, z);
      const float f = factor[k / kQuads][m];
      const float y[4] = {z[0] * f * w.x, z[1] * f * w.y, z[2] * f * w.z, z[3] * f * w.w};
      codes[m][k] = device::pack_fp8x4<Out>(y);
      of_rows[m] = codes[m][k];
      if constexpr (kPass == BandPass::kGroup) {
        const float g = factor_t[m];
        const float turned[4] = {z[0] * g * w_t.x, z[1] * g * w_t.y, z[2] * g * w_t.z,
                                 z[3] * g * w_t.w};
        of_rows[m] = device::pack_fp8x4<Out>(turned);
      }
    }
    store_columns(of_rows, columns + column_of<kElements>(0, k) * kTileRows, kTileRows);
  }
}

template <class T, BandPass kPass>
__global__ void __launch_bounds__(kThreads, kBandsPerSm<T>)
    bands_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>;
  constexpr bool kScaled = kPass != BandPass::kGiven;
  extern __shared__ uint4 memory[];
  __shared__ std::uint32_t scratch[32];
  __shared__ device::Mbarrier sums_here, rstd_here;
  const Band<T, kPass> band(p, memory);
  const int thread = static_cast<int>(threadIdx.x), c = band.c, r = band.r;
  const int hidden = static_cast<int>(p.input.hidden);

  // Load.
  band.init(&sums_here, &rstd_here);
  if constexpr (kScaled) {
    const int maxima = band.tiles * kTileColumns << p.plan.band_plan.log2_groups;
    for (int i = thread; i < maxima; i += kThreads) band.all_columns()[i] = 0.0f;
  }
  device::pdl_wait();
  device::pdl_trigger();
  const bool infinite = __syncthreads_or(band.store_weights([&] { band.copy_x(); }));

  // Reduce: rows over the cluster, then columns over the band.
  band.measure(&sums_here);
  const float of_rows = band.finish_rows(&sums_here, &rstd_here);
  if (kPass == BandPass::kGiven && p.makes_maxima()) {
    const std::uint32_t amax = device::max_block(device::magnitude_bits(of_rows), scratch);
    if (thread == 0) p.maxima[blockIdx.x] = amax;
  }
  if constexpr (kScaled) {
#pragma unroll 1
    for (int j = 0; j < band.tiles; ++j) {
      infinite ? measure_columns<true>(band, j) : measure_columns<false>(band, j);
    }
    __syncthreads();
    if (p.out.q.given()) make_group_factors(band);
    make_column_factors(band);
    __syncthreads();
  }

  // Compute and store. The codes of a tile by columns take the place of the tile before it.
  const float inverse = kScaled ? 1.0f : inverse_of(__ldcg(p.out.scale.data));
  unsigned char* transposed = band.memory + p.plan.band_plan.codes_at;
  const int in_columns = device::transposed_offset<kElements>(c * kElements, r / 4) + r % 4 * 4;
#pragma unroll 1
  for (int j = 0; j < band.tiles; ++j) {
    const int column0 = band.column0(j);
    const bool whole = band.row0 + kTileRows <= p.input.rows && column0 + kTileColumns <= hidden;
    std::uint32_t codes[kThreadRows][kThreadQuads];
    if (p.out.dtype == DType::kFloat8E4M3) {
      encode_tile<Float8E4M3>(band, j, inverse, transposed + in_columns, codes);
    } else {
      encode_tile<Float8E5M2>(band, j, inverse, transposed + in_columns, codes);
    }
    if (p.out.q.given()) {
      store_rows<kElements>(p, codes, band.row0 + kThreadRows * r, column0 + c * kElements, whole);
    }
    __syncthreads();  // the columns are there, and x of this tile has been read
    store_columns_of<kElements>(p, transposed, band.row0, column0, whole);
    transposed = band.memory + j * TileOperands<T>::kStage;
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
