// SPDX-License-Identifier: Apache-2.0
// What only a GPU has: captured graphs that are replayed with another map, two streams at once,
// plans of another batch, and tensors of more than 2^31 elements. No test is generated elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lora_expect.h"

#if MORTAR_HAS_CUDA
#include "device/launch_chain.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

std::vector<Device> gpus() {
  return has_gpu() ? std::vector<Device>{{DeviceType::kCUDA, 0}} : std::vector<Device>{};
}

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

/// Batches of several sizes, dtypes and ranks, so of more combinations of kernels than are kept, go
/// through one chain without waiting in between; every output is that of single launches.
TEST_P(LoraGpu, SmallChainedLaunches) {
  struct Lane {
    LoraCase c;
    std::unique_ptr<LoraOperands> op;
    GuardedTensor workspace;
    std::vector<std::uint8_t> expected;
  };
  std::vector<Lane> lanes;
  for (DType dtype : {kBF16, kF16, kF32}) {
    for (std::int64_t tokens : {3, 40, 300}) {
      for (int rank : {16, 200}) {
        Lane lane{case_of(dtype, tokens), nullptr, {}, {}};
        lane.c.add = false;
        lane.c.ranks = {rank, 8, 0, 64, 24, 5};
        const auto seed = static_cast<unsigned>(lanes.size());
        lane.op = std::make_unique<LoraOperands>(lane.c, GetParam(), seed);
        lane.workspace = lane.op->apply_workspace();
        lane.expected = plain_bytes(lane.c, GetParam(), lane.op->map, seed);
        lanes.push_back(std::move(lane));
      }
    }
  }
  CudaStream stream;
  cuda_ok(cudaDeviceSynchronize());
  device::LaunchChain chain;
  for (int run = 0; run < 5; ++run) {
    for (Lane& lane : lanes) {
      const LoraWeights weights = lane.op->weights();
      lora_plan(lane.op->token_adapter.view(), lane.c.adapters, lane.op->plan.view(),
                stream.mortar());
      device::ChainedLaunches launches(chain);
      lora_apply(lane.op->x.view(), weights, lane.op->groups(), lane.op->y.view(), 0, lane.c.scale,
                 false, lane.workspace.view(), stream.mortar());
      launches.submit("lora_apply");
    }
  }
  stream.wait();
  for (Lane& lane : lanes) {
    EXPECT_TRUE(bytes_of(lane.op->y) == lane.expected)
        << dtype_name(lane.c.x) << ", " << lane.c.tokens << " tokens, rank " << lane.c.ranks[0];
  }
}

/// Launches that are not submitted, as after an error, never happen.
TEST_P(LoraGpu, SmallForgottenLaunches) {
  LoraOperands op(case_of(kBF16, 30), GetParam());
  GuardedTensor workspace = op.apply_workspace();
  device::LaunchChain chain;
  {
    const device::ChainedLaunches launches(chain);
    lora_apply(op.x.view(), op.weights(), op.groups(), op.y.view(), 0, 1, true, workspace.view(),
               Stream{});
  }
  cuda_ok(cudaDeviceSynchronize());
  op.y.download();
  EXPECT_TRUE(op.y.all_unchanged());
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

/// y has more than 2^31 elements, and the tokens with an adapter lie at both ends of it.
TEST_P(LoraGpu, MoreThanTwoToThe31Elements) {
  const std::int64_t tokens = 140001, width = 16384, hidden = 64, rank = 16;
  ASSERT_GT(tokens * width, std::int64_t{1} << 31);
  for (DType dtype : {kBF16, kF32}) {
    const Device device = GetParam();
    const auto big = device_memory(tokens * width * dtype_size(dtype), device);
    const auto x_memory = device_memory(tokens * hidden * dtype_size(dtype), device);
    cuda_ok(cudaMemset(big.get(), 0, tokens * width * dtype_size(dtype)));
    cuda_ok(cudaMemset(x_memory.get(), 0, tokens * hidden * dtype_size(dtype)));
    Tensor x(x_memory.get(), dtype, {tokens, hidden}, device);
    Tensor y(big.get(), dtype, {tokens, width}, device);

    std::vector<std::int32_t> map(tokens, -1);
    const std::int64_t rows[] = {0, 70000, tokens - 2, tokens - 1};
    for (std::int64_t t : rows) map[t] = static_cast<std::int32_t>(t % 2);

    LoraCase c;  // the same rows as a batch of their own
    c.tokens = 4;
    c.hidden = hidden;
    c.widths = {width};
    c.adapters = 2;
    c.ranks = {static_cast<int>(rank)};
    c.x = c.w = c.y = dtype;
    c.add = false;
    LoraOperands small(c, device);
    small.set_map({map[rows[0]], map[rows[1]], map[rows[2]], map[rows[3]]});
    run_apply(small);
    small.y.download();

    const std::int64_t x_bytes = hidden * dtype_size(dtype), y_bytes = width * dtype_size(dtype);
    for (int i = 0; i < 4; ++i) {
      copy_to_device(x.ptr<char>() + rows[i] * x_bytes, small.x.data<char>() + i * x_bytes, x_bytes,
                     device);
    }
    GuardedTensor ids = int_tensor(map, device);
    GuardedTensor plan(DType::kInt32, {lora_plan_size(tokens, 2)}, {}, device);
    lora_plan(ids.view(), 2, plan.view(), Stream{});
    GuardedTensor workspace = byte_tensor(lora_apply_workspace(x, small.weights()), device);
    lora_apply(x, small.weights(), LoraGroups::from_plan(plan.view()), y, 0, c.scale, true,
               workspace.view(), Stream{});
    std::vector<char> row(y_bytes);
    for (int i = 0; i < 4; ++i) {
      copy_to_host(row.data(), y.ptr<char>() + rows[i] * y_bytes, y_bytes, device);
      EXPECT_EQ(std::memcmp(row.data(), small.y.data<char>() + i * y_bytes, y_bytes), 0)
          << dtype_name(dtype) << ", token " << rows[i];
    }
    const std::vector<char> zeros(y_bytes);
    for (std::int64_t t : {std::int64_t{1}, std::int64_t{69999}, tokens - 3}) {
      copy_to_host(row.data(), y.ptr<char>() + t * y_bytes, y_bytes, device);
      EXPECT_EQ(row, zeros) << "base token " << t;
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraGpu);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraGpu, ::testing::ValuesIn(gpus()),
                         [](const auto&) { return std::string("cuda"); });

}  // namespace
}  // namespace mortar::testing

#endif  // MORTAR_HAS_CUDA
