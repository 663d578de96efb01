// SPDX-License-Identifier: Apache-2.0
// adapter_config.json, as PEFT writes it.
#pragma once

#include <string>
#include <string_view>

#include "adapter_store/name_pattern.h"

namespace mortar::adapter_store {

inline constexpr std::size_t kMaxConfigBytes = 16 << 20;

/// The fields that decide what a plain LoRA adapter computes.
struct PeftConfig {
  std::string base_model;  ///< empty if not given
  bool use_rslora = false;
  bool fan_in_fan_out = false;
  int rank = 0;
  double alpha = 0;
  PatternMap<int> rank_pattern;
  PatternMap<double> alpha_pattern;
  PatternBudget budget;  ///< what reading the patterns has left for matching them

  int rank_of(std::string_view module, PatternBudget& left, const FileCheck& check) const;
  /// alpha / own_rank, or alpha / sqrt(own_rank) with rslora: in float64 and rounded once, as
  /// PEFT's Python number is when it meets a float32 tensor.
  float scale_of(std::string_view module, int own_rank, PatternBudget& left,
                 const FileCheck& check) const;
};

/// Reads a config and refuses, with the reason, every adapter that is not served by
/// scale * (x A^T) B^T on the unchanged base model. What matters only while training (dropout,
/// VeLoRA, MonteCLoRA, EVA, orthogonal and MiCA initialisation) is ignored, and so are fields
/// that Mortar does not know, as in PEFT.
///
/// Ranks are whole numbers from 1 to kLoraMaxRank; alphas are finite and above 0. PEFT would take
/// any alpha, but none of its training makes another one: such a file is broken.
PeftConfig parse_peft_config(std::string_view text, const FileCheck& check);

}  // namespace mortar::adapter_store
