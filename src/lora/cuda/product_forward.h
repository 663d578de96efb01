// SPDX-License-Identifier: Apache-2.0
// h = factor * x A^T and y = h B^T in one launch of sm_90a, for up to 128 ranks of one 16-bit type.
#pragma once

#include "lora/cuda/product.h"

namespace mortar::lora::cuda {

inline constexpr int kForwardRows = kProductRows / 2;  ///< of an MMA, and a cluster's tile, at most
inline constexpr int kTallForwardRows = kProductRows;  ///< of a tile of two halves, at most
inline constexpr int kForwardRowUnit = 8;              ///< tiles have a multiple of it
inline constexpr int kForwardRanks = 64;               ///< at most
inline constexpr int kWideForwardRows = kProductRows;  ///< the same of product_forward_wide.cu
inline constexpr int kWideForwardRowUnit = 16, kWideForwardRanks = 128, kMostWideForwardLeaves = 2;
inline constexpr int kPartsForwardRanks = 16;  ///< of float32 weights
inline constexpr int kForwardColumns = 128;    ///< of y, that a thread block makes at a time

inline constexpr int kMostForwardLeaves = 4;  ///< of a thread block

struct ForwardPlan {
  int parts = 0;            ///< thread blocks of a cluster, 2, 4 or 8; 0: not by one launch
  std::int64_t leaf = 0;    ///< columns of a leaf
  int leaves = 1;           ///< of a thread block
  int rows = kForwardRows;  ///< of a tile
  int clusters = 0;         ///< of a SegmentForward, at most; 0: one for each tile
};

struct ForwardProduct {
  Product h;            ///< of kStore: one pair, no segments, both operands dense along the depth
  ProductOperand b;     ///< [columns of y, rank], dense along the ranks
  ProductOperand base;  ///< that is added to y, [rows, columns of y]; without data: none
  void* y = nullptr;
  std::int64_t y_stride = 0;
};

/// The same of float32 weights, dense along A's columns and B's ranks, beside bfloat16 x and y.
struct PartsForward {
  std::int64_t rows = 0, columns = 0, out_columns = 0;  ///< of x; of y
  int rank = 0;                                         ///< 0: of other strides
  const void *x = nullptr, *a = nullptr, *b = nullptr;
  std::int64_t x_stride = 0, a_stride = 0, b_stride = 0;
  float factor = 1;
  float* h = nullptr;  ///< or null
  std::int64_t h_stride = 0;
  void* y = nullptr;
  std::int64_t y_stride = 0;
};
bool takes_forward(const PartsForward& product);
void launch_forward(const char* op, const PartsForward& product, const ForwardPlan& plan,
                    Stream stream);

/// h and y of several adapters' rows, up to eight of up to 32 ranks, or of one's, both with dropout
/// on x (Product::rng).
struct SegmentForward {
  Product h;  ///< of kStore: one pair, operands dense along the depth; segments or none
  ProductOperand b[kMostProductPairs];  ///< of each segment, dense along the ranks
  ProductOperand base;
  void* y = nullptr;
  std::int64_t y_stride = 0;
};
bool takes_forward(const SegmentForward& product);
void launch_forward(const char* op, const SegmentForward& product, const ForwardPlan& plan,
                    Stream stream);

/// Whether y's rows can be stored in boxes.
bool takes_forward(const ForwardProduct& product);
void launch_forward(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                    Stream stream);
/// The same of more ranks.
void launch_wide_forward(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                         Stream stream);

}  // namespace mortar::lora::cuda
