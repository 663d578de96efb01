// SPDX-License-Identifier: Apache-2.0
// Sums over rows by the copy engine and warpgroup MMAs of sm_90a, in one pass with another product
// of the same rows: dB with ds (panel_boxes.cu), and dA with dx (input_boxes.cu).
#pragma once

#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {

/// The sums of panel.cu where it makes ds too, of one adapter's rows; false for any other.
bool panel_boxes(const PanelParams& p, Policy policy, Stream stream);
/// The sums of x in panels of kInputPanels, of one adapter and slice, and dx, all of rows that the
/// copy engine takes.
void input_boxes(const PanelParams& p, const Matrix& dx, Policy policy, Stream stream);

}  // namespace mortar::lora::train::cuda
