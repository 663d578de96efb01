// SPDX-License-Identifier: Apache-2.0
// What only a GPU shows: graph replay, streams of the caller, and tensors over 2^31 elements.
#if MORTAR_HAS_CUDA
#include <cuda_runtime_api.h>

#include <random>

#include "dynamic_conv/checks.h"
#include "dynamic_conv/cuda/backend.cuh"
#include "dynamic_conv_case.h"

namespace mortar::testing {
namespace {

class DynamicConvCuda : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override { ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  void TearDown() override { ASSERT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  Stream stream() const { return {stream_}; }

  cudaStream_t stream_ = nullptr;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DynamicConvCuda);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Devices, DynamicConvCuda, ::testing::ValuesIn(gpus()), device_name);

// One captured step, replayed after the slots and the inputs have changed, does what a fresh call
// with the new content does.
TEST_P(DynamicConvCuda, SmallGraphReplayWithOtherSlots) {
  const Device device = GetParam();
  const std::int64_t rows = 4, slots_held = 6, channels = 64;
  std::mt19937 rng(41);
  Operand x(device, DType::kBFloat16, {rows, channels});
  Operand k(device, DType::kBFloat16, {rows, channels, 4});
  Operand state(device, DType::kBFloat16, {slots_held, channels, 4});
  Operand fresh(device, DType::kBFloat16, {slots_held, channels, 4});
  Operand slots(device, DType::kInt32, {rows});
  Operand y(device, DType::kBFloat16, {rows, channels});
  Operand y_fresh(device, DType::kBFloat16, {rows, channels});
  const Array content =
      random_values(rng, static_cast<std::size_t>(slots_held * channels * 4), DType::kBFloat16);
  state.fill(content);
  fresh.fill(content);
  slots.fill({0, 1, 2, 3});

  cudaGraph_t graph;
  cudaGraphExec_t executable;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  dynamic_conv_step(x, k, state, slots, y, true, stream());
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (const Array& next : {Array{5, -1, 0, 2}, Array{-1, -1, 3, 1}, Array{2, 9, 4, 0}}) {
    slots.fill(next);
    x.fill(random_values(rng, static_cast<std::size_t>(rows * channels), DType::kBFloat16));
    k.fill(random_values(rng, static_cast<std::size_t>(rows * channels * 4), DType::kBFloat16));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    dynamic_conv_step(x, k, fresh, slots, y_fresh, true, stream());
    EXPECT_EQ(y.bits(), y_fresh.bits());
    EXPECT_EQ(state.bits(), fresh.bits());
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// However time is cut, every output has the bits of the library's own choice, which the tests
// against the reference see: chunks of all lengths, so that boundaries fall on all their places.
TEST_P(DynamicConvCuda, SmallLaunchChoicesChangeNoBit) {
  const Device device = GetParam();
  const std::int64_t time = 300, channels = 32;
  const auto pack = random_starts(11, time, 47);
  const std::int64_t sequences = static_cast<std::int64_t>(pack.size()) - 1;
  for (int width : {1, 2, 3, 4, 5, 8}) {
    for (int length : {width - 1, width}) {
      if (length == 0) continue;
      SCOPED_TRACE(concat("W", width, " L", length));
      std::mt19937 rng(53);
      const auto input = [&](std::vector<std::int64_t> shape) {
        auto o = std::make_unique<Operand>(device, DType::kBFloat16, shape);
        o->fill(random_values(rng, static_cast<std::size_t>(o->view().numel()), DType::kBFloat16));
        return o;
      };
      const auto x = input({1, time, channels}), dy = input({1, time, channels});
      const auto k = input({1, time, channels, width});
      const auto initial = input({sequences, channels, length});
      const auto dfinal = input({sequences, channels, length});
      Operand starts(device, DType::kInt32, {sequences + 1});
      starts.fill(Array(pack.begin(), pack.end()));
      std::vector<std::vector<std::uint64_t>> expected;
      for (int steps : {0, 1, 2, 3, 5, 8, 12, 24, 64, 128, 304}) {
        const auto config =
            dynamic_conv::CudaConfig{.threads = steps == 24 ? 32 : 128, .steps = steps};
        Operand y(device, DType::kBFloat16, {1, time, channels});
        Operand dx(device, DType::kBFloat16, {1, time, channels});
        Operand dk(device, DType::kBFloat16, {1, time, channels, width});
        Operand final_state(device, DType::kBFloat16, {sequences, channels, length});
        Operand dinitial(device, DType::kBFloat16, {sequences, channels, length});
        const ArgCheck arg("test");
        auto shape = dynamic_conv::check_shape(arg, *x, *k, starts, true);
        const auto state = [&](const Tensor& t) {
          return dynamic_conv::check_state(arg, t, "state", *x, &shape);
        };
        const auto initial_view = state(*initial), dfinal_view = state(*dfinal);
        const auto final_view = state(final_state), dinitial_view = state(dinitial);
        const dynamic_conv::ForwardProblem forward{shape,
                                                   dynamic_conv::signal(*x),
                                                   dynamic_conv::signal(*k),
                                                   dynamic_conv::signal(y),
                                                   initial_view,
                                                   final_view};
        const dynamic_conv::BackwardProblem backward{shape,
                                                     dynamic_conv::signal(*x),
                                                     dynamic_conv::signal(*k),
                                                     dynamic_conv::signal(*dy),
                                                     dynamic_conv::signal(dx),
                                                     dynamic_conv::signal(dk),
                                                     initial_view,
                                                     dfinal_view,
                                                     dinitial_view};
        dynamic_conv::cuda::forward(forward, steps == 0 ? nullptr : &config, stream());
        dynamic_conv::cuda::backward(backward, steps == 0 ? nullptr : &config, stream());
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        const std::vector<std::vector<std::uint64_t>> bits = {
            y.bits(), final_state.bits(), dx.bits(), dk.bits(), dinitial.bits()};
        if (steps == 0) expected = bits;
        EXPECT_EQ(bits, expected) << "chunks of " << steps << " steps";
        for (const Operand* o : {&y, &final_state, &dx, &dk, &dinitial}) {
          o->expect_guards_intact("output");
        }
      }
    }
  }
}

// The same without sequences and states, where short backwards read a chunk at once: all widths,
// also with the odd number of channels that has a thread for each, and sequences that end in the
// middle of what is read.
TEST_P(DynamicConvCuda, SmallDenseLaunchChoicesChangeNoBit) {
  const Device device = GetParam();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t width : {1, 2, 3, 4, 5, 6, 7, 8}) {
      for (const std::int64_t time : {1, 5, 9, 12, 33}) {
        const std::int64_t channels = time == 33 ? 71 : 72;
        SCOPED_TRACE(concat(dtype_name(dtype), " W", width, " T", time));
        std::mt19937 rng(67);
        const auto input = [&](std::vector<std::int64_t> shape) {
          auto o = std::make_unique<Operand>(device, dtype, shape);
          o->fill(random_values(rng, static_cast<std::size_t>(o->view().numel()), dtype));
          return o;
        };
        const auto x = input({3, time, channels}), dy = input({3, time, channels});
        const auto k = input({3, time, channels, width});
        const auto shape = dynamic_conv::check_shape(ArgCheck("test"), *x, *k, {}, time % 2 == 1);
        std::vector<std::vector<std::uint64_t>> expected;
        for (const int steps : {64, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16}) {
          const dynamic_conv::CudaConfig config{.threads = steps % 2 == 0 ? 96 : 128,
                                                .steps = steps};
          Operand y(device, dtype, {3, time, channels}), dx(device, dtype, {3, time, channels});
          Operand dk(device, dtype, {3, time, channels, width});
          dynamic_conv::ForwardProblem forward;
          forward.shape = shape;
          forward.x = dynamic_conv::signal(*x);
          forward.k = dynamic_conv::signal(*k);
          forward.y = dynamic_conv::signal(y);
          dynamic_conv::BackwardProblem backward;
          backward.shape = shape;
          backward.x = forward.x;
          backward.k = forward.k;
          backward.dy = dynamic_conv::signal(*dy);
          backward.dx = dynamic_conv::signal(dx);
          backward.dk = dynamic_conv::signal(dk);
          dynamic_conv::cuda::forward(forward, &config, stream());
          dynamic_conv::cuda::backward(backward, &config, stream());
          ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
          const std::vector<std::vector<std::uint64_t>> bits = {y.bits(), dx.bits(), dk.bits()};
          if (expected.empty()) expected = bits;
          EXPECT_EQ(bits, expected) << "chunks of " << steps << " steps";
          for (const Operand* o : {&y, &dx, &dk}) o->expect_guards_intact("output");
        }
      }
    }
  }
}

// Short backwards let their successors start early: each must still see all of what the one before
// it wrote, which is its dy, and forwards between them as well.
TEST_P(DynamicConvCuda, SmallChainsGiveTheBitsOfSeparateCalls) {
  const Device device = GetParam();
  const std::int64_t time = 33, channels = 512, width = 4, links = 24;
  std::mt19937 rng(61);
  const auto make = [&](std::vector<std::int64_t> shape) {
    return std::make_unique<Operand>(device, DType::kBFloat16, shape);
  };
  const auto x = make({1, time, channels}), k = make({1, time, channels, width});
  const auto size = static_cast<std::size_t>(time * channels);
  x->fill(random_values(rng, size, DType::kBFloat16));
  k->fill(random_values(rng, size * width, DType::kBFloat16));
  const Array first = random_values(rng, size, DType::kBFloat16);
  const auto run = [&](bool waits) {
    std::vector<std::unique_ptr<Operand>> at;
    for (int i = 0; i <= 2 * links; ++i) at.push_back(make({1, time, channels}));
    const auto dk = make({1, time, channels, width});
    at[0]->fill(first);
    const auto wait = [&] {
      if (waits) {
        EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      }
    };
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<std::vector<std::uint64_t>> bits;
    for (std::size_t i = 0; i < 2 * links; i += 2) {
      dynamic_conv_backward(*x, *k, {}, {}, *at[i], {}, *at[i + 1], *dk, {}, false, stream());
      wait();
      dynamic_conv_forward(*at[i + 1], *k, {}, {}, *at[i + 2], {}, true, stream());
      wait();
    }
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (const auto& o : at) bits.push_back(o->bits());
    bits.push_back(dk->bits());
    return bits;
  };
  const auto expected = run(true);
  for (int round = 0; round < 4; ++round) EXPECT_EQ(run(false), expected);
}

/// Device bytes, each set to `value`.
class Filled {
 public:
  Filled(std::int64_t bytes, int value) {
    EXPECT_EQ(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, value, static_cast<std::size_t>(bytes)), cudaSuccess);
  }
  ~Filled() { cudaFree(data_); }
  Filled(const Filled&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

// k has 2.2e9 elements. x is zero but for the last rows, so that a reference of these alone knows
// what must stand at the far end; the batch of two puts half of them behind a large batch stride.
TEST_P(DynamicConvCuda, MoreThanTwoToThe31Elements) {
  const Device device = GetParam();
  const std::int64_t channels = 3072, width = 4, tail = 24;
  for (std::int64_t batch : {1, 2}) {
    const std::int64_t time = 180000 / batch, tokens = batch * time * channels;
    Filled x(2 * tokens, 0), y(2 * tokens, 0xff), dy(2 * tokens, 0x3f), dx(2 * tokens, 0xff);
    Filled k(2 * tokens * width, 0x3f), dk(2 * tokens * width, 0xff);
    const std::int64_t first = tokens - tail * channels;
    std::mt19937 rng(43);
    const auto count = static_cast<std::size_t>(tail * channels);
    const Array values = random_values(rng, count, DType::kBFloat16);
    std::vector<BFloat16> bits(count);
    for (std::size_t i = 0; i < count; ++i)
      bits[i] = from_float<BFloat16>(static_cast<float>(values[i]));
    ASSERT_EQ(cudaMemcpy(x.data() + 2 * first, bits.data(), 2 * count, cudaMemcpyDefault),
              cudaSuccess);
    const auto signal = [&](const Filled& f) {
      return Tensor(f.data(), DType::kBFloat16, {batch, time, channels}, device);
    };
    const auto taps = [&](const Filled& f) {
      return Tensor(f.data(), DType::kBFloat16, {batch, time, channels, width}, device);
    };
    dynamic_conv_forward(signal(x), taps(k), {}, {}, signal(y), {}, false, stream());
    dynamic_conv_backward(signal(x), taps(k), {}, {}, signal(dy), {}, signal(dx), taps(dk), {},
                          false, stream());
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);

    const double constant = static_cast<double>(to_float(BFloat16{0x3f3f}));
    const dynamic_conv::reference::Sizes sizes{1, tail, channels, width, 0, false, {}};
    const Array k_values(count * width, constant), dy_values(count, constant);
    const auto read = [](const Filled& f, std::int64_t offset, std::size_t n) {
      std::vector<BFloat16> raw(n);
      EXPECT_EQ(cudaMemcpy(raw.data(), f.data() + 2 * offset, 2 * n, cudaMemcpyDefault),
                cudaSuccess);
      Array out;
      for (BFloat16 v : raw) out.push_back(static_cast<double>(to_float(v)));
      return out;
    };
    const auto forward = dynamic_conv::reference::forward(sizes, values, k_values, {});
    const auto backward =
        dynamic_conv::reference::backward(sizes, values, k_values, {}, dy_values, {});
    const Array bound(count * width, 16.0);  // four terms of at most 5 * 0.75
    expect_close(read(y, first, count), forward.y, bound, DType::kBFloat16, 16, "y");
    expect_close(read(dx, first, count), backward.dx, bound, DType::kBFloat16, 16, "dx");
    expect_close(read(dk, first * width, count * width), backward.dk, bound, DType::kBFloat16, 16,
                 "dk");
    // In front of the tail x is zero: so is y, while dx is the sum of four equal products.
    const double sum = static_cast<double>(
        to_float(from_float<BFloat16>(static_cast<float>(width * constant * constant))));
    for (double v : read(y, first - 100 * channels, 64)) EXPECT_EQ(v, 0.0);
    for (double v : read(dx, first - 100 * channels, 64)) EXPECT_EQ(v, sum);
    for (double v : read(dk, (first - 100 * channels) * width, 64)) EXPECT_EQ(v, 0.0);
  }
}

}  // namespace
}  // namespace mortar::testing
#endif
