// SPDX-License-Identifier: Apache-2.0
// What only a GPU has: captured graphs that are replayed with another map, two streams at once,
// plans of another batch, and tensors of more than 2^31 elements. No test is generated elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lora_expect.h"

#if MORTAR_HAS_CUDA
namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

class LoraGpu : public ::testing::TestWithParam<Device> {
 protected:
  LoraCase case_of(DType dtype, std::int64_t tokens) const {
    LoraCase c;
    c.x = c.w = c.y = dtype;
    c.tokens = tokens;
    c.hidden = 520;
    c.widths = {96, 40};
    c.adapters = 6;
    c.ranks = {16, 8, 0, 64, 24, 5};
    c.table = true;
    return c;
  }

  /// y of a run outside any graph.
  static std::vector<std::uint8_t> plain_bytes(const LoraCase& c, Device device,
                                               const std::vector<std::int32_t>& map,
                                               unsigned seed) {
    LoraOperands op(c, device, seed);
    op.set_map(map);
    run_apply(op);
    return bytes_of(op.y);
  }

  static std::vector<std::uint8_t> bytes_of(GuardedTensor& t) {
    t.download();
    const Tensor view = t.host();
    const auto* p = t.data<std::uint8_t>();
    return {p, p + view.numel() * dtype_size(view.dtype)};
  }
};

class CudaStream {
 public:
  CudaStream() { cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  Stream mortar() const { return Stream{stream_}; }
  void wait() const { cuda_ok(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// lora_plan and lora_apply captured once; each replay sees the map of its moment.
TEST_P(LoraGpu, SmallGraphReplaysWithAnotherMap) {
  for (DType dtype : {kF32, kBF16, kF16}) {
    for (std::int64_t tokens : {1, 16, 100}) {
      const LoraCase c = case_of(dtype, tokens);
      LoraOperands op(c, GetParam());
      GuardedTensor workspace = op.apply_workspace();
      const LoraWeights weights = op.weights();
      const GuardedTensor original = op.y;
      CudaStream stream;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
      lora_plan(op.token_adapter.view(), c.adapters, op.plan.view(), stream.mortar());
      lora_apply(op.x.view(), weights, op.groups(), op.y.view(), 0, c.scale, true, workspace.view(),
                 stream.mortar());
      cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
      cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
      std::mt19937 rng(9);
      for (Map kind : {Map::kRandom, Map::kAllBase, Map::kOneAdapter, Map::kOutOfRange,
                       Map::kDistinct, Map::kRandom}) {
        LoraCase shape = c;
        shape.map = kind;
        const std::vector<std::int32_t> map = make_map(shape, rng);
        std::copy(map.begin(), map.end(), op.token_adapter.data<std::int32_t>());
        op.token_adapter.upload();
        op.y = original;
        op.y.upload();
        cuda_ok(cudaGraphLaunch(exec, stream.get()));
        stream.wait();
        EXPECT_TRUE(bytes_of(op.y) == plain_bytes(c, GetParam(), map, 1))
            << dtype_name(dtype) << ", " << tokens << " tokens";
      }
      cuda_ok(cudaGraphExecDestroy(exec));
      cuda_ok(cudaGraphDestroy(graph));
    }
  }
}

TEST_P(LoraGpu, SmallTwoStreamsAtOnce) {
  const LoraCase c = case_of(kBF16, 200);
  struct Lane {
    std::unique_ptr<LoraOperands> op;
    GuardedTensor workspace;
    CudaStream stream;
    std::vector<std::uint8_t> expected;
  };
  Lane lanes[2];
  constexpr int kRuns = 50;
  for (unsigned i = 0; i < 2; ++i) {
    LoraCase overwrite = c;
    overwrite.add = false;
    lanes[i].op = std::make_unique<LoraOperands>(overwrite, GetParam(), 20 + i);
    lanes[i].workspace = lanes[i].op->apply_workspace();
    lanes[i].expected = plain_bytes(overwrite, GetParam(), lanes[i].op->map, 20 + i);
  }
  cuda_ok(cudaDeviceSynchronize());
  for (int run = 0; run < kRuns; ++run) {
    for (Lane& lane : lanes) {
      lora_plan(lane.op->token_adapter.view(), c.adapters, lane.op->plan.view(),
                lane.stream.mortar());
      lora_apply(lane.op->x.view(), lane.op->weights(), lane.op->groups(), lane.op->y.view(), 0,
                 c.scale, false, lane.workspace.view(), lane.stream.mortar());
    }
  }
  for (Lane& lane : lanes) {
    lane.stream.wait();
    EXPECT_TRUE(bytes_of(lane.op->y) == lane.expected);
  }
}

/// The host cannot see what a plan was made for; the kernels must refuse it, not read past it.
TEST_P(LoraGpu, SmallPlanOfAnotherBatchIsRefused) {
  for (DType dtype : {kF32, kBF16}) {
    LoraOperands op(case_of(dtype, 30), GetParam());
    GuardedTensor map = int_tensor(std::vector<std::int32_t>(29, 1), GetParam());
    lora_plan(map.view(), op.c.adapters, op.plan.view(), Stream{});
    run_apply(op);
    op.y.download();
    EXPECT_TRUE(op.y.all_unchanged());
  }
}

/// zero_rows, unlike weights and groups, may be written by the kernel right before the shrink: here
/// by lora_apply, which lets its successor start at once. Its float32 results are no adapter's ids,
/// the zeros that were there before are.
TEST_P(LoraGpu, SmallZeroRowsOfTheKernelBefore) {
  LoraCase writer = case_of(kF32, 64);
  writer.hidden = 4096;
  writer.widths = {64};
  writer.add = false;
  LoraOperands op(writer, GetParam());
  LoraCase c = case_of(kBF16, op.y.view().numel());
  c.map = Map::kAllBase;
  const LoraOperands shrunk(c, GetParam());
  GuardedTensor apply_memory = op.apply_workspace(), shrink_memory = shrunk.shrink_workspace();
  GuardedTensor h(kF32, {shrunk.slices(), c.tokens, shrunk.max_rank()}, {}, GetParam());
  op.set_map(std::vector<std::int32_t>(writer.tokens, 0));
  const Tensor y = op.y.view();
  const Tensor zero_rows(y.data, DType::kInt32, {c.tokens}, GetParam());
  const LoraWeights weights = op.weights(), shrunk_weights = shrunk.weights();
  CudaStream stream;
  cuda_ok(cudaDeviceSynchronize());
  for (int run = 0; run < 100; ++run) {
    cuda_ok(cudaMemsetAsync(y.data, 0, y.numel() * 4, stream.get()));
    cuda_ok(cudaMemsetAsync(h.view().data, 0xff, h.view().numel() * 4, stream.get()));
    lora_apply(op.x.view(), weights, op.groups(), y, 0, 1.0f, false, apply_memory.view(),
               stream.mortar());
    lora_shrink(shrunk.x.view(), shrunk_weights, shrunk.groups(), h.view(), 1.0f, zero_rows,
                shrink_memory.view(), stream.mortar());
    stream.wait();
    h.download();
    std::int64_t wrong = 0;
    h.for_each([&](std::int64_t at) { wrong += h.get(at) == 0.0f ? 0 : 1; });
    ASSERT_EQ(wrong, 0) << "run " << run;
  }
}

/// A batch of many tokens, of which four, at both ends and in the middle, have an x that is not
/// zero: their rows of y are those of the four as a batch of their own, all others stay zero.
void expect_rows_of_large_batch(LoraCase c, std::int64_t tokens, bool others_are_base,
                                Device device) {
  const std::int64_t width = c.widths[0];
  const DType dtype = c.x;
  const auto big = device_memory(tokens * width * dtype_size(dtype), device);
  const auto x_memory = device_memory(tokens * c.hidden * dtype_size(dtype), device);
  cuda_ok(cudaMemset(big.get(), 0, tokens * width * dtype_size(dtype)));
  cuda_ok(cudaMemset(x_memory.get(), 0, tokens * c.hidden * dtype_size(dtype)));
  const Tensor x(x_memory.get(), dtype, {tokens, c.hidden}, device);
  const Tensor y(big.get(), dtype, {tokens, width}, device);

  std::vector<std::int32_t> map(tokens, -1);
  const std::int64_t rows[] = {0, tokens / 2, tokens - 2, tokens - 1};
  for (std::int64_t t = 0; t < tokens && !others_are_base; ++t) {
    map[t] = static_cast<std::int32_t>(t % c.adapters);
  }
  for (std::int64_t t : rows) map[t] = static_cast<std::int32_t>(t % c.adapters);

  c.tokens = 4;
  c.add = false;
  LoraOperands small(c, device);
  small.set_map({map[rows[0]], map[rows[1]], map[rows[2]], map[rows[3]]});
  run_apply(small);
  small.y.download();

  const std::int64_t x_bytes = c.hidden * dtype_size(dtype), y_bytes = width * dtype_size(dtype);
  for (int i = 0; i < 4; ++i) {
    copy_to_device(x.ptr<char>() + rows[i] * x_bytes, small.x.data<char>() + i * x_bytes, x_bytes,
                   device);
  }
  GuardedTensor ids = int_tensor(map, device);
  GuardedTensor plan(DType::kInt32, {lora_plan_size(tokens, c.adapters)}, {}, device);
  lora_plan(ids.view(), c.adapters, plan.view(), Stream{});
  GuardedTensor workspace = byte_tensor(lora_apply_workspace(x, small.weights()), device);
  lora_apply(x, small.weights(), LoraGroups::from_plan(plan.view(), tokens, c.adapters), y, 0,
             c.scale, true, workspace.view(), Stream{});
  std::vector<char> row(y_bytes);
  for (int i = 0; i < 4; ++i) {
    copy_to_host(row.data(), y.ptr<char>() + rows[i] * y_bytes, y_bytes, device);
    EXPECT_EQ(std::memcmp(row.data(), small.y.data<char>() + i * y_bytes, y_bytes), 0)
        << dtype_name(dtype) << ", token " << rows[i];
  }
  const std::vector<char> zeros(y_bytes);
  for (std::int64_t t : {std::int64_t{1}, tokens / 2 - 1, tokens - 3}) {
    copy_to_host(row.data(), y.ptr<char>() + t * y_bytes, y_bytes, device);
    EXPECT_EQ(row, zeros) << "token " << t;
  }
}

/// y has more than 2^31 elements, and the tokens with an adapter lie at both ends of it.
TEST_P(LoraGpu, MoreThanTwoToThe31Elements) {
  LoraCase c;
  c.hidden = 64;
  c.widths = {16384};
  c.adapters = 2;
  c.ranks = {16};
  for (DType dtype : {kBF16, kF32}) {
    c.x = c.w = c.y = dtype;
    expect_rows_of_large_batch(c, 140001, true, GetParam());
  }
}

/// More than 65,535 rows of 16 tokens, which ranks over 128 are expanded in.
TEST_P(LoraGpu, MoreTileRowsThanAGridHasAlongY) {
  LoraCase c;
  c.hidden = 64;
  c.widths = {32};
  c.ranks = {136};
  for (const auto& [tokens, adapters] : {std::pair(790528, 4096), std::pair(1048513, 1)}) {
    c.adapters = adapters;
    for (DType dtype : {kBF16, kF32}) {
      c.x = c.w = c.y = dtype;
      expect_rows_of_large_batch(c, tokens, false, GetParam());
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraGpu);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraGpu, ::testing::ValuesIn(gpus()),
                         [](const auto&) { return std::string("cuda"); });

}  // namespace
}  // namespace mortar::testing

#endif  // MORTAR_HAS_CUDA
