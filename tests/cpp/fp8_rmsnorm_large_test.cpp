// SPDX-License-Identifier: Apache-2.0
// Tensors of more than 2^31 elements, on a GPU alone: a host would take minutes and 9 GB.
#include "fp8_rmsnorm_operands.h"

#if MORTAR_HAS_CUDA

namespace mortar::testing {
namespace {

class Fp8RmsNormLarge : public ::testing::TestWithParam<Device> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Fp8RmsNormLarge);
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormLarge, ::testing::ValuesIn(gpus()), device_name);

/// Device memory that starts out as one byte everywhere.
std::shared_ptr<void> filled(std::size_t bytes, int byte, Device device) {
  std::shared_ptr<void> p = device_memory(bytes, device);
  cuda_ok(cudaMemset(p.get(), byte, bytes));
  return p;
}

// 1.0 everywhere, and one row near the end of 2.0 in its first half: every index past 2^31 that
// wraps reads or writes another row.
TEST_P(Fp8RmsNormLarge, IndicesPast31Bits) {
  const Device device = GetParam();
  const std::int64_t rows = (std::int64_t{1} << 31) / 4096 + 3, columns = 4096;
  const std::int64_t special = rows - 2;
  const auto elements = static_cast<std::size_t>(rows * columns);
  const std::uint8_t one = 0x38, two = 0x40;  // E4M3
  const auto x = filled(elements, one, device), q = filled(elements, 0xff, device);
  const auto q_t = filled(elements, 0xff, device);
  cuda_ok(cudaMemset(static_cast<char*>(x.get()) + special * columns, two, columns / 2));
  const auto x_scale = device_memory(elements / 128 * 4, device);
  const std::vector<float> ones(elements / 128, 1.0f);
  copy_to_device(x_scale.get(), ones.data(), ones.size() * 4, device);
  GuardedTensor weight = make_tensor(kF32, {columns}, Array(4096, 1.0), {}, device);
  GuardedTensor scale(kF32, {}, {}, device), rstd(kF32, {rows}, {}, device);
  const Tensor tx(x.get(), kE4M3, {rows, columns}, device);
  const Tensor ts(x_scale.get(), kF32, {rows, columns / 128}, device);
  Fp8Quantized out;
  out.q = Tensor(q.get(), kE4M3, {rows, columns}, device);
  out.q_t = Tensor(q_t.get(), kE4M3, {columns, rows}, device);
  out.scale = scale.view();
  GuardedTensor workspace = byte_tensor(fp8_rmsnorm_forward_workspace(tx, {}, out), device);
  fp8_rmsnorm_forward(tx, ts, weight.view(), 1e-5f, 0, {}, {}, out, rstd.view(), {},
                      workspace.view(), {});
  scale.download();
  rstd.download();
  // y is 1 but for the special row: 2 and 1 over the root of 2.5. The largest is 1.2649.
  EXPECT_NEAR(get_value(scale, 0), 2 / std::sqrt(2.5 + 1e-5) / 448, 1e-8);
  EXPECT_NEAR(get_value(rstd, special), 1 / std::sqrt(2.5 + 1e-5), 2e-7);  // two float32 steps
  EXPECT_NEAR(get_value(rstd, special - 1), 1, 1e-5);
  EXPECT_NEAR(get_value(rstd, rows - 1), 1, 1e-5);
  const auto byte = [&](double y) {
    return float8_nearest<Float8E4M3>(static_cast<float>(y / get_value(scale, 0))).bits;
  };
  const std::uint8_t plain = byte(1), high = byte(2 / std::sqrt(2.5)),
                     low = byte(1 / std::sqrt(2.5));
  Bytes row(static_cast<std::size_t>(columns));
  for (std::int64_t m : {std::int64_t{0}, special - 1, special, rows - 1}) {
    copy_to_host(row.data(), static_cast<char*>(q.get()) + m * columns, row.size(), device);
    for (std::int64_t n = 0; n < columns; ++n) {
      ASSERT_EQ(row[static_cast<std::size_t>(n)], m != special      ? plain
                                                  : n < columns / 2 ? high
                                                                    : low)
          << m << ", " << n;
    }
  }
  Bytes column(static_cast<std::size_t>(rows));
  for (std::int64_t n : {std::int64_t{0}, columns / 2, columns - 1}) {
    copy_to_host(column.data(), static_cast<char*>(q_t.get()) + n * rows, column.size(), device);
    for (std::int64_t m = 0; m < rows; ++m) {
      ASSERT_EQ(column[static_cast<std::size_t>(m)], m != special      ? plain
                                                     : n < columns / 2 ? high
                                                                       : low)
          << m << ", " << n;
    }
  }
  // The backward: dx lies where dy was. dw is the sum of z * rstd: about 1 a row.
  const auto dy = device_memory(elements * 2, device);
  std::vector<std::uint16_t> line(static_cast<std::size_t>(columns), 0x3f80);  // bfloat16 1.0
  copy_to_device(dy.get(), line.data(), line.size() * 2, device);
  for (std::size_t done = 4096; done < elements; done *= 2) {
    cuda_ok(cudaMemcpy(static_cast<char*>(dy.get()) + done * 2, dy.get(),
                       std::min(done, elements - done) * 2, cudaMemcpyDeviceToDevice));
  }
  const Tensor tdy(dy.get(), kBF16, {rows, columns}, device);
  GuardedTensor dw(kF32, {columns}, {}, device);
  GuardedTensor more = byte_tensor(fp8_rmsnorm_backward_workspace(tx), device);
  fp8_rmsnorm_backward(tdy, tx, ts, weight.view(), 0, rstd.view(), {}, tdy, dw.view(), false,
                       more.view(), {});
  dw.download();
  const double others = static_cast<double>(rows - 1);
  EXPECT_NEAR(get_value(dw, 0), others + 2 / std::sqrt(2.5), 1e-4 * others);
  EXPECT_NEAR(get_value(dw, columns - 1), others + 1 / std::sqrt(2.5), 1e-4 * others);
  // dx of the special row: rstd (1 - z rstd^2 mean(z)), mean(z) = 1.5.
  copy_to_host(line.data(), static_cast<char*>(dy.get()) + special * columns * 2, line.size() * 2,
               device);
  const double r = 1 / std::sqrt(2.5);
  EXPECT_NEAR(static_cast<double>(to_float(BFloat16{line[0]})), r * (1 - 2 * 0.4 * 1.5), 2e-3);
  EXPECT_NEAR(static_cast<double>(to_float(BFloat16{line[4095]})), r * (1 - 0.4 * 1.5), 2e-3);
}

}  // namespace
}  // namespace mortar::testing

#endif
