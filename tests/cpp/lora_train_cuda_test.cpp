// SPDX-License-Identifier: Apache-2.0
// The backward of LoRA training by every launch plan, on a GPU: against float64, and the same bits
// however the matrices lie.
#include <memory>

#include "lora_train_case.h"

#if MORTAR_HAS_CUDA
#include "lora_train_backward.h"

namespace mortar::testing {
namespace {

using lora::train::cuda::kChainPanels;
using lora::train::cuda::kPanelShapes;
using lora::train::cuda::PanelShape;

constexpr DType kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;

/// Every kernel where it can serve, with chunks of one step and of all rows.
std::vector<BackwardPlan> plans(int width, std::int64_t rows, DType weight, int adapters = 1) {
  std::vector<BackwardPlan> all;
  for (int shape = 0; shape < static_cast<int>(kPanelShapes.size()); ++shape) {
    const PanelShape& s = kPanelShapes[shape];
    const bool copies = weight == DType::kFloat32;  // three columns of a rank, in one thread block
    if ((s.makes_ds && (s.ranks < width || copies)) || (copies && s.ranks < 24)) continue;
    for (const int steps : {1, static_cast<int>(rows / (s.rows * s.groups)) + 1}) {
      BackwardPlan plan;
      plan.one_pass = s.makes_ds;
      plan.products = true;
      plan.dy = {shape, steps * s.rows * s.groups};
      plan.x = {s.makes_ds ? 0 : shape, steps * 64};
      all.push_back(plan);
    }
    if (adapters == 1) continue;
    // Sizes that the kernels choose, as if a device had few SMs.
    BackwardPlan plan = all.back();
    for (auto* part : {&plan.dy, &plan.x}) {
      const PanelShape& own = kPanelShapes[part->shape];
      const int unit = part->shape == kChainPanels ? 64 : own.rows * own.groups;
      part->chunk = lora::train::cuda::even_cut(rows, adapters, unit, 3, 10, 7);
    }
    all.push_back(plan);
  }
  return all;
}

TrainCase base_case() {
  TrainCase c;
  c.rows = 150;
  c.hidden = 270;
  c.widths = {530};
  c.ranks = {12};
  c.x = c.w = c.y = c.grad = c.dx = kBF16;
  return c;
}

std::vector<TrainCase> cases() {
  std::vector<TrainCase> all;
  const auto add = [&](const std::string& name, auto change) {
    TrainCase c = base_case();
    c.name = name;
    change(c);
    all.push_back(c);
  };
  add("plain", [](TrainCase&) {});
  add("rank_32", [](TrainCase& c) { c.ranks = {32}; });
  add("rank_50", [](TrainCase& c) { c.ranks = {50}; });
  add("rank_150", [](TrainCase& c) { c.ranks = {150}; });
  for (const bool half : {false, true}) {
    add(half ? "products_float16" : "products", [&](TrainCase& c) {
      c.x = c.w = c.y = c.grad = c.dx = half ? kF16 : kBF16;
      c.rows = 403;
      c.hidden = 1096;
      c.widths = {520, 272};
      c.ranks = {half ? 200 : 104, 72};
      c.add = half;
    });
  }
  // Products of which either x, or y and dy, are dropped: in tiles of each width.
  for (const LoraDropoutOn on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
    for (const int rank : {40, 104, 260}) {
      const bool input = on == LoraDropoutOn::kInput;
      add(concat(input ? "products_drop_input_rank_" : "products_drop_delta_rank_", rank),
          [&](TrainCase& c) {
            c.x = c.w = c.y = c.grad = c.dx = rank == 104 ? kF16 : kBF16;
            c.rows = 403;
            c.hidden = 1104;
            c.widths = {528, 272};
            c.ranks = {rank, 24};
            c.add = rank == 104;
            c.p = {0.3f};
            c.on = on;
          });
    }
  }
  add("float16_added", [](TrainCase& c) {
    c.x = c.w = c.y = c.grad = c.dx = kF16;
    c.add = true;
  });
  add("float32_gradients_added", [](TrainCase& c) {
    c.grad = DType::kFloat32;
    c.add = true;
  });
  add("transposed", [](TrainCase& c) { c.transposed = true; });
  add("misaligned", [](TrainCase& c) { c.layout = {3, 1}; });
  add("narrow", [](TrainCase& c) {
    c.hidden = 3;
    c.widths = {1};
    c.ranks = {1};
  });
  add("slices", [](TrainCase& c) {
    c.widths = {270, 40, 513};
    c.ranks = {16, 0, 7};
  });
  // Columns of parts: of few ranks, and of so many that they are products.
  for (const int rank : {3, 12, 50}) {
    add(concat("float32_weights_rank_", rank), [&](TrainCase& c) {
      c.w = c.grad = DType::kFloat32;
      c.hidden = 272;
      c.widths = {528, 40};
      c.ranks = {rank, 9};
      c.add = rank == 12;
    });
  }
  add("float32_weights_misaligned", [](TrainCase& c) {
    c.w = c.grad = DType::kFloat32;
    c.layout = {3, 1};
    c.base = BaseIs::kInPlace;
  });
  add("float32_weights_recomputed", [](TrainCase& c) {
    c.w = DType::kFloat32;
    c.keep_h = false;
    c.transposed = true;
  });
  add("float32_weights_float32_dx", [](TrainCase& c) { c.w = c.dx = DType::kFloat32; });
  add("float32_weights_float32_y", [](TrainCase& c) { c.w = c.y = DType::kFloat32; });
  add("float32_x", [](TrainCase& c) {
    c.x = DType::kFloat32;
    c.hidden = 70;
  });
  for (const LoraDropoutOn on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
    add(on == LoraDropoutOn::kInput ? "drops_input" : "drops_delta", [&](TrainCase& c) {
      c.widths = {523, 40};
      c.p = {0.3f};
      c.on = on;
    });
  }
  // Whole panels: dx leaves no room for a base, and draws come before what they drop.
  add("drops_input_of_whole_panels", [](TrainCase& c) {
    c.hidden = 1024;
    c.widths = {512};
    c.p = {0.3f};
  });
  for (const RowsBy by : {RowsBy::kSegments, RowsBy::kPlan}) {
    for (const DType weight : {kBF16, DType::kFloat32}) {
      const std::string name = by == RowsBy::kSegments ? "segments" : "plan";
      add(weight == kBF16 ? name : name + "_float32_weights", [&](TrainCase& c) {
        c.w = weight;
        c.by = by;
        c.adapters = 5;
        c.widths = {40, 514};
        c.ranks = {4, 8, 16, 0, 3, 5, 16, 1, 0, 9};
        c.p = {0.1f, 0.0f, 1.0f, 0.5f, 0.2f};
        c.on = weight == kBF16 ? LoraDropoutOn::kDelta : LoraDropoutOn::kInput;
        c.empty_segment = true;
      });
    }
  }
  // So few pairs that they come with every launch, and ranks that differ much.
  add("segments_of_few_pairs", [](TrainCase& c) {
    c.by = RowsBy::kSegments;
    c.rows = 405;
    c.adapters = 4;
    c.ranks = {32, 4, 8, 17};
  });
  // A thread that adds partials has several places.
  add("segments_of_many_sums", [](TrainCase& c) {
    c.by = RowsBy::kSegments;
    c.hidden = 2072;
    c.widths = {2100};
    c.adapters = 9;
    c.ranks = {32, 4, 8, 17, 1, 0, 32, 9, 31};
  });
  add("a_frozen", [](TrainCase& c) { c.wants_da = false; });
  add("x_frozen", [](TrainCase& c) { c.wants_dx = false; });
  add("no_h", [](TrainCase& c) { c.keep_h = false; });
  return all;
}

class LoraTrainCuda : public ::testing::TestWithParam<TrainCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainCuda);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Cases, LoraTrainCuda,
                         ::testing::ValuesIn(has_gpu() ? cases() : std::vector<TrainCase>{}),
                         [](const auto& one) { return one.param.name; });

/// dA and dB by thread blocks that have all rows, of every shape.
std::vector<BackwardPlan> whole_plans(const TrainCase& c) {
  std::vector<BackwardPlan> all;
  if (c.by != RowsBy::kOne || c.w == DType::kFloat32) return all;
  for (const int ranks : {8, 16, 32}) {
    for (const bool beside_ds : {false, true}) {
      all.push_back(lora::train::cuda::whole_plan(c.rows, ranks, beside_ds));
    }
  }
  return all;
}

void expect_within_bound(const TrainCase& c, const std::vector<BackwardPlan>& all) {
  TrainStep first(c, Device{DeviceType::kCUDA, 0});
  first.run_forward();
  const lora::train::Reference want = lora::train::reference_backward(
      first.problem(true), first.backward_arguments(true), first.map);
  for (const BackwardPlan& plan : all) {
    TrainStep step(c, first.device);
    step.run_forward();
    run_backward(step, plan);
    const std::string name = concat("shape ", plan.dy.shape, ", chunks of ", plan.dy.chunk.rows);
    if (c.wants_dx) expect_near(step.dx.host(), want.dx, name + ": dx");
    for (std::size_t i = 0; i < step.da.size(); ++i) {
      if (!step.problem(true).pairs[i].a.defined()) continue;
      if (c.wants_da) expect_near(step.da[i].host(), want.da[i], concat(name, ": da", i));
      if (c.wants_db) expect_near(step.db[i].host(), want.db[i], concat(name, ": db", i));
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(LoraTrainCuda, EveryPlanIsWithinTheBound) {
  const TrainCase& c = GetParam();
  int width = 0;
  for (const int rank : c.ranks) width = std::max(width, rank);
  expect_within_bound(c, plans(width, c.rows, c.w, c.adapters));
}

TEST_P(LoraTrainCuda, WholeSumsAreWithinTheBound) {
  expect_within_bound(GetParam(), whole_plans(GetParam()));
}

TEST_P(LoraTrainCuda, NoShapeOfWholeSumsChangesABit) {
  const TrainCase& c = GetParam();
  std::unique_ptr<TrainStep> first;
  for (const BackwardPlan& plan : whole_plans(c)) {
    auto step = std::make_unique<TrainStep>(c, Device{DeviceType::kCUDA, 0});
    step->run_forward();
    run_backward(*step, plan);
    for (std::size_t i = 0; first != nullptr && i < step->da.size(); ++i) {
      EXPECT_TRUE(same_bytes(first->da[i].host(), step->da[i].host())) << i;
      EXPECT_TRUE(same_bytes(first->db[i].host(), step->db[i].host())) << i;
    }
    if (first == nullptr) first = std::move(step);
  }
}

class LoraTrainGpu : public ::testing::TestWithParam<Device> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainGpu);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainGpu, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });

// Dense rows come by asynchronous copies, all others through registers.
TEST_P(LoraTrainGpu, StridesChangeNoBitOfAnyPlan) {
  for (const DType weight : {kBF16, DType::kFloat32}) {
    TrainCase plain = base_case();
    plain.w = weight;
    plain.hidden = 272;
    TrainCase turned = plain, misaligned = plain;
    turned.transposed = true;
    misaligned.layout = {3, 1};
    std::vector<BackwardPlan> all = plans(12, plain.rows, weight);
    for (const BackwardPlan& plan : whole_plans(plain)) all.push_back(plan);
    for (const BackwardPlan& plan : all) {
      TrainStep first(plain, GetParam());
      first.run_forward();
      run_backward(first, plan);
      for (const TrainCase& c : {turned, misaligned}) {
        TrainStep other(c, first.device);
        copy_inputs(first, &other);
        other.run_forward();
        run_backward(other, plan);
        expect_same_results(first, other, concat(plan.dy.shape));
      }
    }
  }
}

// Those of wide ranks take the copies of whole tiles where rows are dense and aligned; sums over
// rows do from 24 ranks on. Of 512 ranks and few rows products store dA and dB, or add to them.
TEST_P(LoraTrainGpu, StridesChangeNoBitOfWideRanks) {
  struct Case {
    int rank;
    DType weight;
    int adapters = 1, rows = 1200;
    bool add = false;
  };
  for (const auto& [rank, weight, adapters, rows, add] : {Case{512, kBF16, 1, 200, true},
                                                          {512, kBF16, 1, 200},
                                                          {24, kBF16},
                                                          {40, kBF16},
                                                          {64, kBF16},
                                                          {136, kBF16},
                                                          {16, DType::kFloat32},
                                                          {40, DType::kFloat32},
                                                          {72, DType::kFloat32},
                                                          {40, kBF16, 3},
                                                          {16, DType::kFloat32, 3},
                                                          {136, kBF16, 3}}) {
    TrainCase c = base_case();
    c.w = weight;
    c.rows = rows;
    c.add = add;
    c.hidden = 272;
    c.widths = {528};
    c.ranks = {rank, 24, rank};
    if (adapters > 1) {
      c.adapters = adapters;
      c.by = RowsBy::kSegments;
    }
    expect_strides_change_no_bit(c, GetParam(), concat(rank));
  }
}

// Of so many partials a thread has more in flight.
TEST_P(LoraTrainGpu, ManyChunksOfRowsAreAdded) {
  TrainCase c = base_case();
  c.rows = 1160;
  c.hidden = 136;
  c.widths = {72};
  BackwardPlan plan;
  plan.one_pass = plan.products = true;
  plan.dy = {3, 32};  // 37 chunks
  plan.x = {0, 64};   // 19
  expect_within_bound(c, {plan});
}

// ds comes with dB in one pass over dy, or would if dB were wanted.
TEST_P(LoraTrainGpu, FrozenBChangesNoBitOfDx) {
  for (const int rank : {12, 24}) {
    TrainCase c = base_case();
    c.widths = {530, 272};
    c.ranks = {rank, 5};
    c.by = rank == 24 ? RowsBy::kSegments : RowsBy::kOne;
    TrainCase frozen = c;
    frozen.wants_db = false;
    TrainStep first(c, GetParam()), other(frozen, GetParam());
    BackwardPlan plan;
    plan.one_pass = true;
    for (const int shape : {3, 4}) {
      if (kPanelShapes[shape].ranks < rank) continue;
      plan.dy = {shape, 64};
      plan.x = {0, 64};
      for (TrainStep* step : {&first, &other}) {
        step->run_forward();
        run_backward(*step, plan);
      }
      EXPECT_TRUE(same_bytes(first.dx.host(), other.dx.host())) << rank;
      EXPECT_TRUE(same_bytes(first.da[0].host(), other.da[0].host())) << rank;
    }
    first.run_backward();
    other.run_backward();
    EXPECT_TRUE(same_bytes(first.dx.host(), other.dx.host())) << rank;
    EXPECT_TRUE(same_bytes(first.da[0].host(), other.da[0].host())) << rank;
  }
}

// A base that takes all but the last bits of the delta away: what is left shows whether float32
// weights are multiplied as float32, in an output that has eight bits.
TEST_P(LoraTrainGpu, Float32WeightsKeepTheirBits) {
  for (const int rank : {1, 24}) {
    TrainCase c = base_case();
    c.w = DType::kFloat32;
    c.hidden = 8;
    c.ranks = {rank};
    c.base = BaseIs::kApart;
    c.keep_h = false;
    TrainStep step(c, GetParam());
    const auto delta =
        lora::train::reference_forward(step.problem(true), step.forward_arguments(true), step.map);
    const Tensor base = step.base[0].host();
    const auto base_at = [&](std::int64_t i) {
      return i / 530 * base.strides[0] + i % 530 * base.strides[1];
    };
    for (std::int64_t i = 0; i < c.rows * 530; ++i) {
      const double own = load_float(base.data, base.dtype, base_at(i));
      const double rest = delta.y[0][i].value - own;
      store_float(base.data, base.dtype, base_at(i), static_cast<float>(-rest));
    }
    step.base[0].memory().upload();
    const auto want =
        lora::train::reference_forward(step.problem(true), step.forward_arguments(true), step.map);
    step.run_forward();
    expect_near(step.y[0].host(), want.y[0], concat("rank ", rank));
  }
}

}  // namespace
}  // namespace mortar::testing
#endif
