// SPDX-License-Identifier: Apache-2.0
// A good call of every LoRA op, whose arguments tests spoil one at a time, and what is expected
// then: one sentence with op, argument, expected and got, and nothing written.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lora_case.h"
#include "mortar/error.h"

namespace mortar::testing {

inline constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kI32 = DType::kInt32;

/// A good call of every op; a test spoils one argument. Views only: rows and addresses of a spoilt
/// view are never followed.
struct Call {
  explicit Call(Device device) : operands(make_case(), device) {
    x = operands.x.view();
    y = operands.y.view();
    h_memory = GuardedTensor(kF32, {2, 4, 8}, {}, device);
    h = h_memory.view();
    plan_memory = operands.plan;
    plan = plan_memory.view();
    token_adapter = operands.token_adapter.view();
    workspace_memory = byte_tensor(lora_apply_workspace(x, operands.weights()) + 64, device);
    workspace = workspace_memory.view();
    weights = operands.weights();
    groups = operands.groups();
    plan_memory.download();
    plan_memory.upload();
  }

  static LoraCase make_case() {
    LoraCase c;
    c.tokens = 4;
    c.hidden = 16;
    c.widths = {12, 20};
    c.adapters = 3;
    return c;
  }

  void apply() { lora_apply(x, weights, groups, y, offset, 1.0f, true, workspace, Stream{}); }
  void shrink() { lora_shrink(x, weights, groups, h, 1.0f, zero_rows, workspace, Stream{}); }
  void expand() { lora_expand(h, weights, groups, y, offset, true, Stream{}); }
  void make_plan() { lora_plan(token_adapter, num_adapters, plan, Stream{}); }
  void stacked() {
    weights =
        LoraWeights::stacked(std::vector<Tensor>(weights.a.begin(), weights.a.begin() + num_a),
                             std::vector<Tensor>(weights.b.begin(), weights.b.begin() + num_b),
                             weights.ranks, weights.scales);
  }
  void from_table() { weights = LoraWeights::from_table(table, table_dtype, max_rank, 16, widths); }
  void use_segments() {
    for (Tensor* t : {&sorted_tokens, &ids, &counts, &starts}) {
      *t = Tensor(token_adapter.data, kI32, {t == &starts ? 4 : 3}, token_adapter.device);
    }
    sorted_tokens.shape[0] = 4;
  }
  void shrink_segments() {
    groups = LoraGroups::from_segments(sorted_tokens, ids, counts, starts);
    shrink();
  }

  bool outputs_untouched() {
    for (GuardedTensor* t : {&operands.y, &h_memory, &plan_memory, &workspace_memory}) {
      t->download();
      if (!t->all_unchanged()) return false;
    }
    return true;
  }

  LoraOperands operands;
  GuardedTensor h_memory, plan_memory, workspace_memory;
  Tensor x, y, h, plan, token_adapter, workspace, zero_rows;
  Tensor sorted_tokens, ids, counts, starts, table;
  LoraWeights weights;
  LoraGroups groups;
  std::int64_t offset = 0, num_adapters = 3;
  int num_a = 2, num_b = 2, max_rank = 8;
  DType table_dtype = kF32;
  std::vector<std::int64_t> widths{12, 20};
};

struct BadCall {
  const char* name;
  std::function<void(Call&)> run;
  ErrorKind kind;
  std::vector<std::string> parts;  ///< of the message: op and argument, expected, got
};
inline void PrintTo(const BadCall& b, std::ostream* out) { *out << b.name; }

inline constexpr ErrorKind kValue = ErrorKind::kValue, kType = ErrorKind::kType;

inline Tensor reshaped(Tensor t, std::initializer_list<std::int64_t> shape) {
  return Tensor(t.data, t.dtype, shape, t.device);
}
inline Tensor with_dtype(Tensor t, DType dtype) {
  t.dtype = dtype;
  return t;
}
inline Tensor with_stride(Tensor t, int dim, std::int64_t stride) {
  t.strides[dim] = stride;
  return t;
}
inline Tensor shifted(Tensor t, std::int64_t bytes) {
  t.data = t.ptr<char>() + bytes;
  return t;
}
/// The other kind of device, at the same address.
inline Tensor elsewhere(Tensor t) {
  t.device = t.device.type == DeviceType::kCPU ? Device{DeviceType::kCUDA, 0} : Device{};
  return t;
}

inline void expect_error(Device device, const BadCall& bad) {
  Call call(device);
  call.table = Tensor(call.y.data, DType::kInt64, {3, 2, 4}, device);
  std::string message;
  try {
    bad.run(call);
    FAIL() << "no error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), bad.kind) << e.what();
    message = e.what();
  }
  EXPECT_EQ(message.find(bad.parts[0]), 0u) << message;
  for (const std::string& part : bad.parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
  }
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_TRUE(call.outputs_untouched());
}

inline std::string bad_call_name(
    const ::testing::TestParamInfo<std::tuple<Device, BadCall>>& info) {
  return device_label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

}  // namespace mortar::testing
