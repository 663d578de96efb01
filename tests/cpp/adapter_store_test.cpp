// SPDX-License-Identifier: Apache-2.0
// What a store opens, and what it says of it.
#include "adapter_store_fixture.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <thread>

namespace mortar {
namespace {

using testing::AdapterStoreTest;
using testing::FileTensor;
using testing::make_module;
using testing::make_tensor;
using testing::one_module;
using testing::operator+;
using testing::peft_config;
using testing::safetensors;

std::string bytes_of(const Tensor& t) {
  return {t.ptr<const char>(), static_cast<std::size_t>(t.numel() * dtype_size(t.dtype))};
}

TEST_F(AdapterStoreTest, ViewsAreTheBytesOfTheFile) {
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    const std::vector<FileTensor> tensors = one_module(dtype);
    testing::TemporaryFolder folder;
    folder.write_adapter(peft_config(), safetensors(tensors));
    AdapterStore store;
    EXPECT_EQ(store.open("x", folder.string()), 0);
    const auto adapter = store.get("x");
    EXPECT_EQ(adapter->name, "x");
    EXPECT_EQ(adapter->path, folder.string());
    EXPECT_EQ(adapter->base_model, "base");
    EXPECT_FALSE(adapter->fan_in_fan_out);
    ASSERT_EQ(adapter->modules.size(), 1u);
    const AdapterModule& m = adapter->modules[0];
    EXPECT_EQ(m.name, "m.q_proj");
    EXPECT_EQ(m.rank, 4);
    EXPECT_EQ(m.scale, 2.0f);
    EXPECT_EQ(m.a.shape[0], 4);
    EXPECT_EQ(m.a.shape[1], 6);
    EXPECT_EQ(m.b.shape[0], 10);
    EXPECT_EQ(m.b.shape[1], 4);
    EXPECT_TRUE(m.a.is_contiguous() && m.b.is_contiguous());
    EXPECT_EQ(bytes_of(m.a), tensors[0].payload);
    EXPECT_EQ(bytes_of(m.b), tensors[1].payload);
  }
}

TEST_F(AdapterStoreTest, WritingThroughAViewLeavesTheFileAlone) {
  const auto adapter = store_.get("first");
  const std::string before = bytes_of(adapter->modules[0].a);
  std::memset(adapter->modules[0].a.data, 0x7F, before.size());
  AdapterStore other;
  other.open("again", folder_.string());
  EXPECT_EQ(bytes_of(other.get("again")->modules[0].a), before);
}

TEST_F(AdapterStoreTest, WhatIsInMemoryOutlivesTheFile) {
  const auto adapter = store_.get("first");
  std::filesystem::resize_file(folder_.path() / "adapter_model.safetensors", 0);
  EXPECT_EQ(bytes_of(adapter->modules[0].a), one_module()[0].payload);
  EXPECT_EQ(bytes_of(adapter->modules[0].b), one_module()[1].payload);
}

TEST_F(AdapterStoreTest, MapsTheFileIfAsked) {
  store_.open("mapped", folder_.string(), AdapterMemory::kMapped);
  const auto adapter = store_.get("mapped");
  EXPECT_EQ(bytes_of(adapter->modules[0].a), one_module()[0].payload);
  const std::string before = bytes_of(adapter->modules[0].b);
  std::memset(adapter->modules[0].b.data, 0x7F, before.size());
  store_.open("again", folder_.string(), AdapterMemory::kMapped);
  EXPECT_EQ(bytes_of(store_.get("again")->modules[0].b), before);
}

/// Sizes around pages and the header, which is read first.
TEST_F(AdapterStoreTest, FilesOfManySizes) {
  for (const std::int64_t hidden : {1, 2, 500, 511, 512, 513, 1023, 4096, 100'001}) {
    const auto tensors = make_module("m", "F32", 4, hidden, 3);
    testing::TemporaryFolder folder;
    folder.write_adapter(peft_config(), safetensors(tensors));
    AdapterStore store;
    store.open("x", folder.string());
    EXPECT_EQ(bytes_of(store.get("x")->modules[0].a), tensors[0].payload);
    EXPECT_EQ(bytes_of(store.get("x")->modules[0].b), tensors[1].payload);
  }
}

/// As adapters with a rank for each of thousands of modules have them.
TEST_F(AdapterStoreTest, ThousandsOfPlainKeys) {
  std::vector<FileTensor> tensors;
  std::string ranks, alphas;
  const auto add = [](std::string& field, const std::string& key, int value) {
    field += (field.empty() ? "\"" : ", \"") + key + "\": " + std::to_string(value);
  };
  const auto rank_of = [](int i) { return 1 + i % 5; };
  const int count = 6000;
  for (int i = 0; i < count; ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".self_attn.q_proj";
    tensors = std::move(tensors) + make_module(name, "BF16", rank_of(i), 1, 1);
    add(ranks, name.substr(i % 2 ? 0 : 6), rank_of(i));
    add(alphas, name, i + 1);
  }
  testing::TemporaryFolder folder;
  folder.write_adapter(
      peft_config("\"rank_pattern\": {" + ranks + "}, \"alpha_pattern\": {" + alphas + "}"),
      safetensors(tensors));
  store_.open("x", folder.string());
  const auto adapter = store_.get("x");
  for (int i = 0; i < count; ++i) {
    const auto* m = adapter->find("model.layers." + std::to_string(i) + ".self_attn.q_proj");
    ASSERT_NE(m, nullptr);
    EXPECT_EQ(m->rank, rank_of(i));
    EXPECT_EQ(m->scale, static_cast<float>((i + 1.0) / rank_of(i)));
  }
}

TEST_F(AdapterStoreTest, ModulesAreSortedAndFound) {
  testing::TemporaryFolder folder;
  folder.write_adapter(peft_config(), safetensors(make_module("b", "F32", 4, 3, 2) +
                                                  make_module("a.x", "F16", 4, 5, 1) +
                                                  make_module("a", "BF16", 4, 2, 7)));
  store_.open("three", folder.string());
  const auto adapter = store_.get("three");
  ASSERT_EQ(adapter->modules.size(), 3u);
  EXPECT_EQ(adapter->modules[0].name, "a");
  EXPECT_EQ(adapter->modules[1].name, "a.x");
  EXPECT_EQ(adapter->modules[2].name, "b");
  EXPECT_EQ(adapter->find("a.x"), &adapter->modules[1]);
  EXPECT_EQ(adapter->find("a.y"), nullptr);
  EXPECT_EQ(adapter->find(""), nullptr);
}

TEST_F(AdapterStoreTest, RanksAndScalesFollowThePatterns) {
  // Keys match the end of a name at a dot, as regular expressions, the first in the file winning.
  const std::string config = peft_config(
      R"("use_rslora": true, "rank_pattern": {"z.proj": 2, "[ab].proj": 3, "a.proj": 5},
         "alpha_pattern": {"^a\\..*": 6, "proj": 9.5})");
  testing::TemporaryFolder folder;
  folder.write_adapter(
      config,
      safetensors(make_module("a.proj", "F32", 3, 2, 2) + make_module("b.proj", "F32", 3, 2, 2) +
                  make_module("xa.proj", "F32", 4, 2, 2) + make_module("y.z.proj", "F32", 2, 2, 2) +
                  make_module("y.zxproj", "F32", 2, 2, 2) +
                  make_module("yz.proj.o", "F32", 4, 2, 2)));
  store_.open("x", folder.string());
  const auto adapter = store_.get("x");
  const auto expect = [&](const char* name, int rank, double alpha) {
    const AdapterModule* m = adapter->find(name);
    ASSERT_NE(m, nullptr) << name;
    EXPECT_EQ(m->rank, rank) << name;
    EXPECT_EQ(m->scale, static_cast<float>(alpha / std::sqrt(double(rank)))) << name;
  };
  expect("a.proj", 3, 6);
  expect("b.proj", 3, 9.5);
  expect("xa.proj", 4, 9.5);
  expect("y.z.proj", 2, 9.5);
  expect("y.zxproj", 2, 8);  // '.' is any character; "proj" does not start at a dot
  expect("yz.proj.o", 4, 8);
}

TEST_F(AdapterStoreTest, AcceptsAdapterNamesAndTrainingOnlyTensors) {
  std::vector<FileTensor> tensors = {
      make_tensor("base_model.model.m.lora_A.mine.weight", "F32", {4, 6}),
      make_tensor("base_model.model.m.lora_B.mine.weight", "F32", {3, 4}),
      make_tensor("base_model.model.m.lora_velora_embed", "F32", {8}),
      make_tensor("base_model.model.m.lora_monteclora_sampler.x", "F32", {2, 2, 2})};
  testing::TemporaryFolder folder;
  folder.write_adapter(peft_config(), safetensors(tensors));
  store_.open("x", folder.string());
  EXPECT_EQ(store_.get("x")->modules.size(), 1u);
  EXPECT_EQ(store_.get("x")->modules[0].name, "m");

  tensors[1].name = "base_model.model.m.lora_B.yours.weight";
  folder.write_adapter(peft_config(), safetensors(tensors));
  EXPECT_THROW(store_.open("y", folder.string()), Error);
  tensors[1].name = "base_model.model.m.lora_B.weight";
  folder.write_adapter(peft_config(), safetensors(tensors));
  EXPECT_THROW(store_.open("y", folder.string()), Error);
}

TEST_F(AdapterStoreTest, NamesAndIds) {
  EXPECT_EQ(store_.open("b", folder_.string()), 1);
  EXPECT_EQ(store_.open("a", folder_.string()), 2);
  EXPECT_EQ(store_.names(), (std::vector<std::string>{"first", "b", "a"}));
  EXPECT_EQ(store_.size(), 3);
  const auto kept = store_.get("b");
  store_.close("b");
  EXPECT_FALSE(store_.contains("b"));
  EXPECT_EQ(bytes_of(kept->modules[0].a), one_module()[0].payload);
  EXPECT_EQ(store_.open("b", folder_.string()), 3);
  EXPECT_EQ(store_.names(), (std::vector<std::string>{"first", "a", "b"}));
  EXPECT_THROW(store_.open("a", folder_.string()), Error);
  EXPECT_THROW(store_.close("nobody"), Error);
  EXPECT_THROW(store_.id("nobody"), Error);
  EXPECT_THROW(store_.get("nobody"), Error);
  AdapterStore moved = std::move(store_);
  EXPECT_EQ(moved.size(), 3);
}

TEST_F(AdapterStoreTest, ThreadsShareAStore) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        const std::string name = std::to_string(t) + "/" + std::to_string(i);
        store_.open(name, folder_.string());
        EXPECT_EQ(store_.get(name)->modules.size(), 1u);
        if (i % 2) store_.close(name);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(store_.size(), 1 + 4 * 13);
}

TEST_F(AdapterStoreTest, OpensWhatDiffersInTrainingOnly) {
  const std::string fields =
      R"("use_dora": false, "modules_to_save": null, "target_parameters": [], "lora_bias": null,
         "arrow_config": {}, "rank_pattern": {}, "alpha_pattern": null, "lora_dropout": 0.1,
         "fan_in_fan_out": true, "unknown_to_mortar": {"a": [1, 2, {"b": 3}]}, "velora_config":
         {"num_groups": 4}, "eva_config": {"rho": 2.0}, "init_lora_weights": )";
  int number = 0;
  for (const char* init :
       {"true", "false", "null", "\"gaussian\"", "\"eva\"", "\"orthogonal\"", "\"mica\""}) {
    testing::TemporaryFolder folder;
    folder.write_adapter(peft_config(fields + init), safetensors(one_module()));
    const std::string name = std::to_string(number++);
    store_.open(name, folder.string());
    EXPECT_TRUE(store_.get(name)->fan_in_fan_out);
  }
}

}  // namespace
}  // namespace mortar
