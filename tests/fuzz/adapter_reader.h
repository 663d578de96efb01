// SPDX-License-Identifier: Apache-2.0
// The reader of adapters as a fuzzer sees it: one input holds a config and a safetensors file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "adapter_store/peft_adapter.h"
#include "adapter_store/peft_config.h"
#include "adapter_store_files.h"
#include "mortar/error.h"
#include "mortar/lora.h"

namespace mortar::fuzz {
inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: broken promise: %s\n", what);
  std::abort();
}

/// Every byte of a view must lie in the file, where the sanitizer lets it be read.
inline unsigned read_view(const Tensor& t, std::span<const std::byte> file) {
  const auto* first = t.ptr<const std::byte>();
  const auto bytes = static_cast<std::size_t>(t.numel() * dtype_size(t.dtype));
  expect(first >= file.data() && bytes <= file.size() && first + bytes <= file.data() + file.size(),
         "a view lies outside the file");
  expect(t.ndim == 2 && t.is_contiguous() && bytes > 0, "a view is no dense matrix");
  expect(reinterpret_cast<std::uintptr_t>(first) % dtype_size(t.dtype) == 0,
         "a view is not aligned to its elements");
  unsigned sum = 0;
  for (std::size_t i = 0; i < bytes; ++i) sum += std::to_integer<unsigned>(first[i]);
  return sum;
}

inline void check_module(const AdapterModule& m, std::span<const std::byte> file) {
  volatile unsigned sum = read_view(m.a, file) + read_view(m.b, file);
  (void)sum;
  expect(m.rank >= 1 && m.rank <= kLoraMaxRank, "a rank is out of range");
  expect(m.a.size(0) == m.rank && m.b.size(1) == m.rank, "a shape disagrees with the rank");
  expect(std::isfinite(m.scale) && m.scale > 0, "a scale is not a number above 0");
  expect(m.a.dtype == m.b.dtype, "a and b have different dtypes");
  expect(!m.name.empty(), "a module has no name");
}

inline void check_message(const std::string& message) {
  expect(message.rfind("AdapterStore.open: fuzz: ", 0) == 0, "a message has another beginning");
  expect(message.size() < 1000, "a message is long");
  expect(std::none_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x20; }),
         "a message has control characters");
  nlohmann::json(message).dump();  // throws, and so ends the run, if it is no valid UTF-8
}

/// An input is the length of the config (2 bytes, little endian), the config, and the model file.
struct Input {
  std::string config;
  std::string model;
};

inline std::string join(const Input& input) {
  const std::size_t length = std::min<std::size_t>(input.config.size(), 0xFFFF);
  std::string out = {static_cast<char>(length & 0xFF), static_cast<char>(length >> 8)};
  return out.append(input.config, 0, length).append(input.model);
}

inline Input split(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return {};
  const char* text = reinterpret_cast<const char*>(data) + 2;
  const std::size_t length = std::min<std::size_t>(data[0] | data[1] << 8, size - 2);
  return {std::string(text, length), std::string(text + length, size - 2 - length)};
}

/// Reads one input and aborts unless it either gives views that lie inside the file, or throws
/// mortar::Error with a short message in valid UTF-8. True if the adapter was accepted.
inline bool read_adapter(const std::uint8_t* data, std::size_t size) {
  const Input input = split(data, size);
  // An allocation of the exact size: the sanitizer sees a read one byte past the file.
  const auto storage = std::make_unique<std::byte[]>(input.model.size());
  const std::span<std::byte> file(storage.get(), input.model.size());
  std::memcpy(file.data(), input.model.data(), input.model.size());
  try {
    const adapter_store::FileCheck check("fuzz");
    const adapter_store::PeftConfig config = adapter_store::parse_peft_config(input.config, check);
    const std::vector<AdapterModule> modules = adapter_store::peft_modules(file, config, check);
    expect(!modules.empty(), "an adapter without modules was accepted");
    expect(std::is_sorted(modules.begin(), modules.end(),
                          [](const auto& x, const auto& y) { return x.name < y.name; }),
           "modules are not sorted");
    for (const AdapterModule& m : modules) check_module(m, file);
    return true;
  } catch (const Error& e) {
    check_message(e.what());
    return false;
  }
}

/// Valid adapters, and some that are nearly so, to start from.
inline std::vector<std::string> seeds() {
  using testing::make_module;
  using testing::peft_config;
  using testing::safetensors;
  const auto all = [](std::vector<testing::FileTensor> x, std::vector<testing::FileTensor> y) {
    x.insert(x.end(), y.begin(), y.end());
    return x;
  };
  const auto two = all(make_module("model.layers.0.self_attn.q_proj", "F32", 4, 6, 10),
                       make_module("model.layers.1.mlp.up_proj", "BF16", 4, 6, 3));
  const std::string patterns =
      R"("use_rslora": true, "rank_pattern": {"^model\\.layers\\.[0-3]\\..*": 4, "up.proj": 4},)"
      R"( "alpha_pattern": {"(q|k)_proj": 3.5, "x{2,3}\\d+$": 1}, "init_lora_weights": "gaussian")";
  std::vector<std::string> out = {
      join({peft_config(), safetensors(make_module("m", "F16", 4, 1, 1))}),
      join({peft_config(), safetensors(two)}),
      join({peft_config(patterns), safetensors(two)}),
      join({peft_config(R"("modules_to_save": ["head"], "use_dora": null)"), safetensors(two)}),
  };
  std::vector<testing::FileTensor> odd = two;
  odd.push_back(testing::make_tensor("base_model.model.m.lora_velora_embed", "I64", {2, 0, 3}));
  odd.push_back(testing::make_tensor("base_model.model.é.lora_A.default.weight", "F16", {4, 2}));
  out.push_back(join({peft_config(R"("fan_in_fan_out": true)"), safetensors(odd)}));
  return out;
}

/// Makes the header length agree with the end of the header's JSON, so that a changed header is
/// read at all. Does nothing to a model that is too short.
inline void repair_header_length(Input& input) {
  if (input.model.size() < 8) return;
  std::size_t length = 0;
  int depth = 0;
  for (std::size_t i = 8; i < input.model.size() && length == 0; ++i) {
    depth += (input.model[i] == '{') - (input.model[i] == '}');
    if (depth == 0) length = i - 7;
  }
  for (int i = 0; i < 8; ++i) input.model[i] = static_cast<char>(length >> (8 * i) & 0xFF);
}

}  // namespace mortar::fuzz
