// SPDX-License-Identifier: Apache-2.0
// lora_train_forward and lora_train_backward against float64: every switch and mixture of dtypes,
// odd sizes, strides, empties, on every device and every SIMD level of the CPU.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "lora_expect.h"
#include "lora_train_case.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

std::vector<TrainCase> cases() {
  std::vector<TrainCase> all;
  const auto add = [&](const std::string& name, auto change) {
    TrainCase c;
    c.name = name;
    change(c);
    all.push_back(c);
  };
  const auto types = [](TrainCase& c, DType x, DType w, DType y, DType grad, DType dx) {
    c.x = x;
    c.w = w;
    c.y = y;
    c.grad = grad;
    c.dx = dx;
  };
  add("plain", [](TrainCase&) {});
  for (const DType x : {kF32, kF16, kBF16}) {
    for (const DType w : {kF32, kF16, kBF16}) {
      for (const DType y : {kF32, kF16, kBF16}) {
        const std::string name =
            concat("types_", dtype_name(x), "_", dtype_name(w), "_", dtype_name(y));
        add(name, [&](TrainCase& c) { types(c, x, w, y, w, x); });
      }
    }
  }
  add("types_gradients", [&](TrainCase& c) { types(c, kBF16, kF32, kBF16, kBF16, kF32); });
  add("types_float16_sums", [&](TrainCase& c) { types(c, kF16, kF16, kF16, kF32, kF16); });
  for (const int rank : {1, 2, 7, 9, 16, 24, 33, 64, 65, 128, 200, 512}) {
    add(concat("rank_", rank), [&](TrainCase& c) { c.ranks = {rank}; });
    add(concat("rank_bf16_", rank), [&](TrainCase& c) {
      c.ranks = {rank};
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
  }
  for (const std::int64_t rows : {1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 400}) {
    add(concat("rows_", rows), [&](TrainCase& c) { c.rows = rows; });
    add(concat("rows_bf16_", rows), [&](TrainCase& c) {
      c.rows = rows;
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
  }
  for (const std::int64_t size : {1, 3, 8, 63, 64, 65, 129, 513}) {
    add(concat("hidden_", size), [&](TrainCase& c) { c.hidden = size; });
    add(concat("width_", size), [&](TrainCase& c) { c.widths = {size}; });
    add(concat("sizes_bf16_", size), [&](TrainCase& c) {
      c.hidden = c.widths[0] = size;
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
  }
  add("long_sums", [](TrainCase& c) {
    c.rows = 1100;
    c.hidden = 1031;
    c.widths = {40};
  });
  add("long_sums_bf16", [&](TrainCase& c) {
    c.rows = 1100;
    c.hidden = 1032;
    c.widths = {1040};
    types(c, kBF16, kBF16, kBF16, kF32, kBF16);
  });
  add("misaligned", [](TrainCase& c) { c.layout = {1, 3}; });
  add("misaligned_bf16", [&](TrainCase& c) {
    c.layout = {3, 1};
    types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
  });
  add("row_gaps_bf16", [&](TrainCase& c) {
    c.layout = {8, 8};
    types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
  });
  add("transposed", [](TrainCase& c) { c.transposed = true; });
  add("transposed_bf16_dropped", [&](TrainCase& c) {
    c.transposed = true;
    c.p = {0.3f};
    types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
  });
  for (const BaseIs base : {BaseIs::kApart, BaseIs::kInPlace}) {
    const std::string name = base == BaseIs::kApart ? "base_apart" : "base_in_place";
    add(name, [&](TrainCase& c) { c.base = base; });
    add(concat(name, "_bf16_transposed"), [&](TrainCase& c) {
      c.base = base;
      c.transposed = true;
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
    add(concat(name, "_delta_dropped"), [&](TrainCase& c) {
      c.base = base;
      c.p = {0.25f};
      c.on = LoraDropoutOn::kDelta;
    });
  }
  add("added", [](TrainCase& c) { c.add = true; });
  add("added_bf16", [&](TrainCase& c) {
    c.add = true;
    types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
  });
  add("recomputed", [](TrainCase& c) { c.keep_h = false; });
  add("recomputed_dropped", [](TrainCase& c) {
    c.keep_h = false;
    c.p = {0.5f};
  });
  for (const LoraDropoutOn on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
    const std::string side = on == LoraDropoutOn::kInput ? "input" : "delta";
    for (const float p : {0.0f, 0.1f, 0.9f, 1.0f}) {
      add(concat("drop_", side, "_", static_cast<int>(10 * p)), [&](TrainCase& c) {
        c.p = {p};
        c.on = on;
        c.hidden = 75;
        c.widths = {51};
      });
      add(concat("drop_bf16_", side, "_", static_cast<int>(10 * p)), [&](TrainCase& c) {
        c.p = {p};
        c.on = on;
        c.widths = {56, 24};
        c.base = BaseIs::kInPlace;
        types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
      });
    }
    // Rows of whole groups of draws, which neighbouring threads of a GPU share.
    for (const int rank : {8, 24, 64}) {
      add(concat("drop_groups_", side, "_rank_", rank), [&](TrainCase& c) {
        c.p = {0.3f};
        c.on = on;
        c.rows = 150;
        c.hidden = 144;
        c.widths = {64, 80};
        c.ranks = {rank};
        types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
      });
    }
  }
  add("slices", [](TrainCase& c) {
    c.widths = {40, 16, 8};
    c.ranks = {8, 4, 17};
  });
  add("slices_8", [](TrainCase& c) {
    c.widths = {8, 9, 10, 11, 12, 13, 14, 15};
    c.ranks = {1, 2, 3, 4, 5, 6, 7, 8};
  });
  add("slice_left_alone", [](TrainCase& c) {
    c.widths = {40, 16, 8};
    c.ranks = {8, 0, 4};
    c.base = BaseIs::kApart;
  });
  for (const RowsBy by : {RowsBy::kSegments, RowsBy::kPlan}) {
    const std::string name = by == RowsBy::kSegments ? "segments" : "plan";
    const auto several = [&](TrainCase& c) {
      c.by = by;
      c.adapters = 5;
      c.rows = 211;
      c.ranks = {4, 8, 16, 1, 64};
    };
    add(name, several);
    add(concat(name, "_bf16"), [&](TrainCase& c) {
      several(c);
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
    add(concat(name, "_fp32_adapters"), [&](TrainCase& c) {
      several(c);
      types(c, kBF16, kF32, kBF16, kF32, kBF16);
    });
    add(concat(name, "_everything"), [&](TrainCase& c) {
      several(c);
      c.widths = {40, 24};
      c.ranks = {4, 8, 16, 0, 3, 5, 64, 1, 0, 9};
      c.p = {0.1f, 0.0f, 1.0f, 0.5f, 0.2f};
      c.base = BaseIs::kApart;
      c.add = true;
      c.empty_segment = true;
    });
    add(concat(name, "_empty_adapter"), [&](TrainCase& c) {
      several(c);
      c.empty_segment = true;
    });
    add(concat(name, "_one_row_each"), [&](TrainCase& c) {
      several(c);
      c.rows = 5;
    });
    add(concat(name, "_adapter_left_out"), [&](TrainCase& c) {
      several(c);
      c.adapters = 3;
      c.hidden = 64;  // a whole panel of A, behind weights of fewer bytes
      c.widths = {8};
      c.ranks = {0, 1, 0};
      types(c, kBF16, kBF16, kBF16, kBF16, kBF16);
    });
  }
  for (const bool dx : {false, true}) {
    for (const bool da : {false, true}) {
      for (const bool db : {false, true}) {
        add(concat("wants", dx ? "_dx" : "", da ? "_da" : "", db ? "_db" : ""), [&](TrainCase& c) {
          c.wants_dx = dx;
          c.wants_da = da;
          c.wants_db = db;
          c.widths = {40, 24};
        });
      }
    }
  }
  add("no_rows", [](TrainCase& c) { c.rows = 0; });
  add("no_rows_added", [](TrainCase& c) {
    c.rows = 0;
    c.add = true;
  });
  for (const auto& [name, x, w] : {std::tuple{"", DType::kFloat32, DType::kFloat32},
                                   std::tuple{"_bf16", DType::kBFloat16, DType::kBFloat16},
                                   std::tuple{"_mixed", DType::kBFloat16, DType::kFloat32}}) {
    for (const int adapters : {1, 3, 40}) {
      const auto none = [&](TrainCase& c) {
        c.x = c.y = c.dx = x;
        c.w = w;
        c.rows = 130;
        c.adapters = adapters;
        if (adapters > 1) c.by = RowsBy::kSegments;
      };
      add(concat("no_columns", name, "_", adapters), [&](TrainCase& c) {
        none(c);
        c.widths = {0, 8};
      });
      add(concat("no_hidden", name, "_", adapters), [&](TrainCase& c) {
        none(c);
        c.hidden = 0;
      });
    }
    for (const int rank : {13, 40, 72}) {
      for (const auto on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
        const char* what = on == LoraDropoutOn::kInput ? "_input_" : "_delta_";
        add(concat("all_dropped", name, what, rank), [&](TrainCase& c) {
          c.x = c.y = c.dx = x;
          c.w = w;
          c.rows = 300;
          c.hidden = 272;
          c.widths = {144};
          c.ranks = {rank};
          c.p = {1.0f};
          c.on = on;
          c.without_rng = true;
        });
      }
    }
  }
  return all;
}

class LoraTrain : public ::testing::TestWithParam<std::tuple<LoraTarget, TrainCase>> {};

TEST_P(LoraTrain, MatchesFloat64) {
  const auto& [target, c] = GetParam();
  const UseTarget use(target);
  TrainStep step(c, target.device);
  expect_matches(step);
}

INSTANTIATE_TEST_SUITE_P(All, LoraTrain,
                         ::testing::Combine(::testing::ValuesIn(lora_targets()),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& one) {
                           return concat(std::get<0>(one.param).name, "_",
                                         std::get<1>(one.param).name);
                         });

}  // namespace
}  // namespace mortar::testing
