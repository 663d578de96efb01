// SPDX-License-Identifier: Apache-2.0
// Bad input to LoRA training: one sentence each (op, argument, expected, got), nothing written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "lora_train_case.h"
#include "mortar/error.h"

namespace mortar::testing {
namespace {

TrainCase two_slices() {
  TrainCase c;
  c.rows = 6;
  c.hidden = 16;
  c.widths = {12, 8};
  c.adapters = 2;
  c.ranks = {4, 8};
  c.by = RowsBy::kSegments;
  c.p = {0.5f, 0.0f};
  return c;
}

/// The arguments of a good call, for a test to spoil.
struct Arguments {
  LoraTrainProblem problem;
  LoraTrainForward forward;
  LoraTrainBackward backward;
  std::vector<LoraTrainPair> pairs;
  std::vector<LoraTrainGrads> grads;
  std::vector<Tensor> y, base, dy;
  std::vector<float> p;
  Tensor workspace;
};

struct BadCall {
  std::string name;
  std::function<void(Arguments&)> spoil;
  std::string message;  ///< after "lora_train_forward: "
};

class LoraTrainError : public ::testing::TestWithParam<Device> {
 protected:
  /// Runs the forward (or the backward) with one argument spoilt.
  void expect_refused(bool is_forward, const BadCall& bad) {
    TrainStep step(two_slices(), GetParam());
    Arguments args;
    args.problem = step.problem(false);
    args.forward = step.forward_arguments(false);
    args.backward = step.backward_arguments(false);
    args.pairs.assign(args.problem.pairs.begin(), args.problem.pairs.end());
    args.grads.assign(args.backward.grads.begin(), args.backward.grads.end());
    args.y.assign(args.forward.y.begin(), args.forward.y.end());
    args.dy.assign(args.backward.dy.begin(), args.backward.dy.end());
    for (const GuardedMatrix& m : step.base) args.base.push_back(m.view());
    args.p.assign(args.problem.dropout.p.begin(), args.problem.dropout.p.end());
    const std::int64_t bytes = is_forward
                                   ? lora_train_forward_workspace(args.problem, args.forward)
                                   : lora_train_backward_workspace(args.problem, args.backward);
    GuardedTensor memory = byte_tensor(std::max<std::int64_t>(bytes, 256), GetParam());
    args.workspace = memory.view();
    bad.spoil(args);
    args.problem.pairs = args.pairs;
    args.problem.dropout.p = args.p;
    args.forward.y = args.y;
    args.forward.base = args.base;
    args.backward.dy = args.dy;
    args.backward.grads = args.grads;
    const std::string op = is_forward ? "lora_train_forward: " : "lora_train_backward: ";
    try {
      if (is_forward) {
        lora_train_forward(args.problem, args.forward, args.workspace, Stream{});
      } else {
        lora_train_backward(args.problem, args.backward, args.workspace, Stream{});
      }
      ADD_FAILURE() << bad.name << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).substr(0, op.size() + bad.message.size()), op + bad.message)
          << bad.name;
    }
    memory.download();
    EXPECT_TRUE(memory.all_unchanged()) << bad.name << ": the workspace was written";
    for (GuardedTensor* t : step.outputs()) {
      t->download();
      EXPECT_TRUE(t->all_unchanged()) << bad.name << ": an output was written";
    }
  }
};

const std::vector<BadCall>& bad_calls_of_both() {
  static const std::vector<BadCall> calls = {
      {"no slices", [](Arguments& a) { a.problem.num_slices = 9; },
       "num_slices must be 1 to 8, got 9"},
      {"a pair missing", [](Arguments& a) { a.pairs.pop_back(); },
       "pairs must have one entry per adapter and slice, got 3 for 2 slices"},
      {"K of a", [](Arguments& a) { a.pairs[2].a.shape[1] = 15; },
       "a must have shape (4, 16), got (4, 15) (adapter 1, slice 0)"},
      {"rank of b", [](Arguments& a) { a.pairs[1].b.shape[1] = 7; },
       "b must have shape (8, 8), got (8, 7) (adapter 0, slice 1)"},
      {"a without b", [](Arguments& a) { a.pairs[0].b = {}; }, "b is required, got nothing"},
      {"rank 0", [](Arguments& a) { a.pairs[0].a.shape[0] = 0; },
       "a must have 1 to 512 rows, got 0"},
      {"integer weights", [](Arguments& a) { a.pairs[0].a.dtype = DType::kInt32; },
       "a must have dtype float32 or float16 or bfloat16, got int32"},
      {"two dtypes of weights", [](Arguments& a) { a.pairs[1].b.dtype = DType::kFloat16; },
       "b must have dtype float32, that of all weights of the call, got float16"},
      {"another device", [](Arguments& a) { a.pairs[0].a.device.index = 7; }, "a must be on "},
      {"p above 1", [](Arguments& a) { a.p[1] = 1.5f; }, "p must be 0 to 1, got 1.5"},
      {"p below 0", [](Arguments& a) { a.p[0] = -0.1f; }, "p must be 0 to 1, got -0.1"},
      {"p NaN", [](Arguments& a) { a.p[0] = std::numeric_limits<float>::quiet_NaN(); },
       "p must be 0 to 1, got nan"},
      {"p for another number", [](Arguments& a) { a.p.pop_back(); },
       "p must have one entry per adapter = 2, got 1"},
      {"no rng", [](Arguments& a) { a.problem.dropout.rng = {}; },
       "rng is required with dropout, got nothing"},
      {"rng of another dtype", [](Arguments& a) { a.problem.dropout.rng.dtype = DType::kFloat32; },
       "rng must have dtype int64, got float32"},
      {"offsets too short", [](Arguments& a) { a.problem.rows.offsets.shape[0] = 2; },
       "offsets must have shape (3), got (2)"},
      {"neither offsets nor plan", [](Arguments& a) { a.problem.rows = {}; },
       "rows must be given by offsets or by a plan for 2 adapters, got neither"},
      {"both", [](Arguments& a) { a.problem.rows.plan = a.problem.rows.offsets; },
       "rows must be given by offsets or by a plan, got both"},
      {"workspace too small", [](Arguments& a) { a.workspace.shape[0] = 16; },
       "workspace must have at least "},
      {"workspace over a weight",
       [](Arguments& a) {
         const auto weight = reinterpret_cast<std::uintptr_t>(a.pairs[2].a.data);
         a.workspace.data = reinterpret_cast<void*>((weight + 15) / 16 * 16);  // aligned, and in it
       },
       "workspace and "},
  };
  return calls;
}

TEST_P(LoraTrainError, OfBothOps) {
  for (const BadCall& bad : bad_calls_of_both()) {
    expect_refused(true, bad);
    expect_refused(false, bad);
  }
}

TEST_P(LoraTrainError, OfTheForward) {
  const std::vector<BadCall> calls = {
      {"x of three dimensions", [](Arguments& a) { a.forward.x.ndim = 3; },
       "x must have 2 dimensions, got shape "},
      {"integer x", [](Arguments& a) { a.forward.x.dtype = DType::kInt64; },
       "x must have dtype float32 or float16 or bfloat16, got int64"},
      {"rows of y", [](Arguments& a) { a.y[1].shape[0] = 5; },
       "y[1] must have shape (6, 8), got (5, 8)"},
      {"a y too few", [](Arguments& a) { a.y.pop_back(); },
       "y must have one tensor per slice = 2, got 1"},
      {"base of another dtype", [](Arguments& a) { a.base[0].dtype = DType::kBFloat16; },
       "base[0] must have dtype float32, got bfloat16"},
      {"y that overlaps x", [](Arguments& a) { a.y[0].data = a.forward.x.data; },
       "y[0] and x must not overlap in memory, got views that do"},
      {"y that overlaps a weight", [](Arguments& a) { a.y[1].data = a.pairs[3].b.data; },
       "y[1] and b must not overlap in memory, got views that do (adapter 1, slice 1)"},
      {"y that overlaps y", [](Arguments& a) { a.y[1].data = a.y[0].data; },
       "y[1] and y[0] must not overlap in memory, got views that do"},
      {"y that half overlaps base",
       [](Arguments& a) { a.base[0].data = static_cast<char*>(a.y[0].data) + 4; },
       "y[0] and base[0] must not overlap in memory, got views that do"},
      {"an expanded y", [](Arguments& a) { a.y[0].strides[0] = 0; },
       "y[0] must not overlap itself (it is written to), got an expanded or overlapping view"},
      {"h too narrow", [](Arguments& a) { a.forward.h.shape[1] = 12; },
       "h must have shape (6, 16), got (6, 12)"},
      {"h of another dtype", [](Arguments& a) { a.forward.h.dtype = DType::kBFloat16; },
       "h must have dtype float32, got bfloat16"},
      {"h misaligned",
       [](Arguments& a) { a.forward.h.data = static_cast<char*>(a.forward.h.data) + 4; },
       "h must be aligned to 16 bytes, got address "},
  };
  for (const BadCall& bad : calls) expect_refused(true, bad);
}

TEST_P(LoraTrainError, OfTheBackward) {
  const std::vector<BadCall> calls = {
      {"no dy", [](Arguments& a) { a.dy.clear(); }, "dy must have one tensor per slice = 2, got 0"},
      {"columns of dy", [](Arguments& a) { a.dy[0].shape[1] = 11; },
       "dy[0] must have shape (6, 12), got (6, 11)"},
      {"no x", [](Arguments& a) { a.backward.x = {}; },
       "x is required for da, and for db without h, got nothing"},
      {"rows of dx", [](Arguments& a) { a.backward.dx.shape[0] = 5; },
       "dx must have shape (6, 16), got (5, 16)"},
      {"shape of da", [](Arguments& a) { a.grads[1].a.shape[0] = 4; },
       "da must have shape (8, 16), got (4, 16) (adapter 0, slice 1)"},
      {"integer db", [](Arguments& a) { a.grads[0].b.dtype = DType::kInt32; },
       "db must have dtype float32 or float16 or bfloat16, got int32"},
      {"dx that overlaps dy", [](Arguments& a) { a.backward.dx.data = a.dy[0].data; },
       "dx and dy[0] must not overlap in memory, got views that do"},
      {"da that is a", [](Arguments& a) { a.grads[0].a.data = a.pairs[0].a.data; },
       "da and a must not overlap in memory, got views that do"},
      {"one da twice", [](Arguments& a) { a.grads[2].a = a.grads[0].a; },
       "a gradient and another gradient must not overlap in memory, got views that do"},
      {"da that is another adapter's a",
       [](Arguments& a) { a.grads[0].a.data = a.pairs[2].a.data; },
       "a gradient and a must not overlap in memory, got views that do"},
      {"a gradient without its pair", [](Arguments& a) { a.pairs[1] = {}; },
       "grads must be undefined where the pair is, got some (adapter 0, slice 1)"},
      {"grads for another number", [](Arguments& a) { a.grads.pop_back(); },
       "grads must have one entry per pair = 4, got 3"},
  };
  for (const BadCall& bad : calls) expect_refused(false, bad);
}

TEST_P(LoraTrainError, OfTheOffsets) {
  const auto expect = [&](std::vector<std::int32_t> values, const std::string& message) {
    const GuardedTensor offsets = int_tensor(values, GetParam());
    try {
      lora_train_check(offsets.view(), 2, 6, Stream{});
      ADD_FAILURE() << "accepted, expected: " << message;
    } catch (const Error& e) {
      EXPECT_EQ(e.what(), "lora_train_check: " + message);
    }
  };
  expect({1, 3, 6}, "offsets must start at 0, got 1");
  expect({0, 7, 6}, "offsets must not decrease, got 6 after 7 at 2");
  expect({0, 3, 5}, "offsets must cover all rows and end at M = 6, got 5");
  const GuardedTensor good = int_tensor(std::vector<std::int32_t>{0, 0, 6}, GetParam());
  EXPECT_NO_THROW(lora_train_check(good.view(), 2, 6, Stream{}));
}

/// The CPU reads the offsets anyway.
TEST(LoraTrainErrorOnCpu, OffsetsThatDoNotCoverAllRows) {
  TrainStep step(two_slices(), Device{});
  step.offsets.data<std::int32_t>()[2] = 5;
  step.offsets.upload();
  EXPECT_THROW(step.run_forward(), Error);
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainError, ::testing::ValuesIn(devices()),
                         [](const auto& one) { return device_label(one.param); });

}  // namespace
}  // namespace mortar::testing
