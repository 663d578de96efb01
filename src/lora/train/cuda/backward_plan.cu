// SPDX-License-Identifier: Apache-2.0
// What a backward sums over rows, and how: what panel.h, part_plan.h and input_parts.h choose for a
// problem on this device.
#include <algorithm>

#include "device/launch.cuh"
#include "lora/train/cuda/backend.cuh"
#include "lora/train/cuda/input_parts.h"
#include "lora/train/cuda/panel_boxes.cuh"
#include "lora/train/cuda/row_sums.cuh"

namespace mortar::lora::train::cuda {

BackwardPlan plan_backward(const Problem& p) {
  PanelProblem dy, x;
  const int copies = panel_copies(p);
  dy.rows = x.rows = p.num_rows;
  dy.copies = x.copies = copies;
  dy.beside_ds = true;
  const bool wide = copies > 1 || p.hidden_width > kPanelShapes[kInputPanels32].ranks;
  x.with_dx = copies == 1 && p.dx.data != nullptr && !p.add_dx && !(wide && p.drops_input());
  dy.adapters = x.adapters = grouped(p) ? p.num_adapters : 0;
  dy.few_segments = x.few_segments =
      p.rows.offsets != nullptr && p.num_adapters * p.num_slices <= kOwnPairs;
  for (int s = 0; s < p.num_slices; ++s) {
    if (!takes_panels(p, s)) continue;
    dy.columns[dy.matrices++] = p.slices[s].width;
    dy.width = std::max(dy.width, copies * width_of(p, s));
  }
  x.columns[x.matrices++] = p.hidden;
  x.width = copies * p.hidden_width;
  // Panels make no ds for float32 weights: its columns of parts would be three times the partials.
  // Whether dB is wanted too must not change a bit of ds: it comes from the same kernel either way.
  const device::DeviceInfo& device = device::current_device();
  const bool sm90 = device.arch == 90;
  // Up to 32 ranks dropout has panels of its own, with ds or dx.
  dy.products = sm90 && (wide || !p.drops_delta());
  x.products = sm90 && (wide || !p.drops_input());
  const bool needs_ds = (p.wants_da || p.dx.data != nullptr) && p.weight != DType::kFloat32;
  BackwardPlan plan = choose_backward(dy, x, needs_ds, device.max_smem);
  plan.products = sm90;
  if (sm90 && copies == 1) plan.with_dx = dx_panels(x, plan.x, device.num_sms, device.l2_bytes);
  if (sm90 && dy.copies > 1 && dy.matrices == 1 && p.num_slices == 1 && dy.adapters == 0 &&
      dy.by_products() && !p.drops_delta() &&
      shares_dy(p.num_rows, dy.columns[0], dy.width, kLeaves, copies)) {
    plan.shares_dy = true;
    plan.dy.chunk = cut_evenly(
        p.num_rows, cut_rows_beside(p.num_rows, dy.columns[0], dy.width).parts, kBlockRows);
  }
  if (sm90 && in_part_columns(p.x.dtype, p.weight) && p.dx.data != nullptr && !p.add_dx &&
      !p.drops_input()) {
    const std::int64_t chunks = chunks_with_dx_in_parts(x);
    if (chunks > 0) {
      plan.x.chunk = cut_evenly(p.num_rows, chunks, kBlockRows);
      plan.with_dx = DxPanels::k128;
    }
  }
  if (p.weight != DType::kFloat32 && sums_whole(dy, x)) {
    return whole_plan(p.num_rows, whole_ranks(p.hidden_width), starts_beside_ds(dy, x));
  }
  return plan;
}

}  // namespace mortar::lora::train::cuda
