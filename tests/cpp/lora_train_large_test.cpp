// SPDX-License-Identifier: Apache-2.0
// LoRA training of more than 2^31 elements, on a GPU.
#include "lora_train_case.h"

#if MORTAR_HAS_CUDA

namespace mortar::testing {
namespace {

constexpr DType kBF16 = DType::kBFloat16;

class LoraTrainLarge : public ::testing::TestWithParam<Device> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainLarge);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainLarge, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });

/// Device memory of zeros.
std::shared_ptr<void> zeros(std::int64_t bytes, Device device) {
  std::shared_ptr<void> p = device_memory(static_cast<std::size_t>(bytes), device);
  cuda_ok(cudaMemset(p.get(), 0, static_cast<std::size_t>(bytes)));
  return p;
}

// Zeros but for two rows, one of them past 2^31 elements: an index that wraps reads or writes
// another row. The oracle sees the two rows alone.
TEST_P(LoraTrainLarge, IndicesPast31Bits) {
  const Device device = GetParam();
  TrainCase c;
  c.rows = 2;
  c.hidden = 4096;
  c.widths = {4096};
  c.ranks = {12};
  c.x = c.w = c.y = c.grad = c.dx = kBF16;
  TrainStep step(c, device);
  const std::int64_t rows = (std::int64_t{1} << 31) / 4096 + 3, columns = 4096;
  const std::int64_t at[2] = {5, rows - 2}, width = lora_train_hidden_width(step.problem(true));
  const auto whole = [&](std::int64_t width_of) { return zeros(rows * width_of * 2, device); };
  const auto x = whole(columns), dy = whole(columns), y = whole(columns), dx = whole(columns);
  const auto h = whole(width);
  const auto row_of = [&](const std::shared_ptr<void>& of, std::int64_t row, std::int64_t n) {
    return static_cast<char*>(of.get()) + row * n * 2;
  };
  for (int i = 0; i < 2; ++i) {
    const auto copy = [&](const std::shared_ptr<void>& to, const Tensor& from) {
      copy_to_device(row_of(to, at[i], columns),
                     static_cast<char*>(from.data) + i * from.strides[0] * 2, columns * 2, device);
    };
    copy(x, step.x.host());
    copy(dy, step.dy[0].host());
  }
  const auto tensor = [&](const std::shared_ptr<void>& of, std::int64_t n) {
    return Tensor(of.get(), kBF16, {rows, n}, device);
  };
  const lora::train::Reference forward =
      lora::train::reference_forward(step.problem(true), step.forward_arguments(true), step.map);
  const LoraTrainProblem p = step.problem(false);
  LoraTrainForward f = step.forward_arguments(false);
  const Tensor ys[] = {tensor(y, columns)}, dys[] = {tensor(dy, columns)};
  f.x = tensor(x, columns);
  f.y = ys;
  f.h = tensor(h, width);
  GuardedTensor workspace = byte_tensor(lora_train_forward_workspace(p, f), device);
  lora_train_forward(p, f, workspace.view(), Stream{});
  LoraTrainBackward b = step.backward_arguments(false);
  b.dy = dys;
  b.x = f.x;
  b.h = f.h;
  b.dx = tensor(dx, columns);
  workspace = byte_tensor(lora_train_backward_workspace(p, b), device);
  lora_train_backward(p, b, workspace.view(), Stream{});

  GuardedTensor got(kBF16, {2, columns}, {}, device), got_h(kBF16, {2, width}, {}, device);
  const auto expect_rows = [&](const std::shared_ptr<void>& of, GuardedTensor* to,
                               const std::vector<lora::train::Estimate>& want, const char* what) {
    const Tensor host = to->host();
    const std::int64_t n = host.shape[1];
    std::vector<char> beside(static_cast<std::size_t>(n * 2));
    for (int i = 0; i < 2; ++i) {
      copy_to_host(static_cast<char*>(host.data) + i * n * 2, row_of(of, at[i], n), n * 2, device);
      for (const int step_of : {-1, 1}) {
        copy_to_host(beside.data(), row_of(of, at[i] + step_of, n), n * 2, device);
        EXPECT_TRUE(std::all_of(beside.begin(), beside.end(), [](char v) { return v == 0; }))
            << what << " beside row " << at[i];
      }
    }
    expect_near(host, want, what);
  };
  expect_rows(h, &got_h, forward.h, "h");
  expect_rows(y, &got, forward.y[0], "y");
  // h as it was saved is what the backward sees.
  std::memcpy(step.h.host().data, got_h.host().data, static_cast<std::size_t>(2 * width * 2));
  const lora::train::Reference backward =
      lora::train::reference_backward(step.problem(true), step.backward_arguments(true), step.map);
  expect_rows(dx, &got, backward.dx, "dx");
  step.da[0].memory().download();
  step.db[0].memory().download();
  expect_near(step.da[0].host(), backward.da[0], "da");
  expect_near(step.db[0].host(), backward.db[0], "db");
}

}  // namespace
}  // namespace mortar::testing
#endif
