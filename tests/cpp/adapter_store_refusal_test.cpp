// SPDX-License-Identifier: Apache-2.0
// What a store refuses, with which sentence: files that are missing, cut or lying, and adapters
// that Mortar cannot serve.
#include <filesystem>

#include "adapter_store_fixture.h"

#include <sys/stat.h>

namespace mortar {
namespace {

using testing::FileTensor;
using testing::header_entry;
using testing::make_module;
using testing::make_tensor;
using testing::one_module;
using testing::operator+;
using testing::peft_config;
using testing::raw_safetensors;
using testing::safetensors;

using AdapterStoreRefusalTest = testing::AdapterStoreTest;

const std::string kA = "base_model.model.m.q_proj.lora_A.weight";
const std::string kB = "base_model.model.m.q_proj.lora_B.weight";

TEST_F(AdapterStoreRefusalTest, RefusesMissingAndSpecialFiles) {
  expect_refused_folder("/does/not/exist", "folder must be an existing directory");
  expect_refused_folder(folder_.string() + std::string("\0x", 2), "folder must be an existing");
  expect_refused_folder(folder_.string() + "/adapter_config.json", "which is a file");

  testing::TemporaryFolder folder;
  expect_refused_folder(folder.string(), "adapter_config.json: must exist");
  folder.write("adapter_config.json", peft_config());
  expect_refused_folder(folder.string(), "adapter_model.safetensors: must exist");
  std::filesystem::create_directory(folder.path() / "adapter_model.safetensors");
  expect_refused_folder(folder.string(), "must be a regular file, got a directory");
  std::filesystem::remove(folder.path() / "adapter_model.safetensors");
  ASSERT_EQ(::mkfifo((folder.path() / "adapter_model.safetensors").c_str(), 0600), 0);
  expect_refused_folder(folder.string(), "must be a regular file, got a special file");
}

TEST_F(AdapterStoreRefusalTest, RefusesEveryTruncation) {
  const std::string model = safetensors(one_module());
  for (std::size_t size = 0; size < model.size(); ++size) {
    expect_refused(peft_config(), model.substr(0, size), "adapter_model.safetensors: ");
  }
  expect_refused(peft_config(), model + '\0', "must cover all");
  const std::string config = peft_config();
  for (std::size_t size = 0; size < config.size(); ++size) {
    expect_refused(config.substr(0, size), model, "must be valid JSON in UTF-8");
  }
}

TEST_F(AdapterStoreRefusalTest, RefusesLyingHeaderLengths) {
  std::string model = safetensors(one_module());
  const auto with_length = [&](std::uint64_t length) {
    for (int i = 0; i < 8; ++i) model[i] = static_cast<char>(length >> (8 * i) & 0xFF);
    return model;
  };
  const std::uint64_t rest = model.size() - 8;
  expect_refused(peft_config(), with_length(0), "must start with '{', got an empty header");
  expect_refused(peft_config(), with_length(1), "must be valid JSON");
  expect_refused(peft_config(), with_length(rest), "must be valid JSON");
  expect_refused(peft_config(), with_length(rest + 1), "(what follows it in the file)");
  expect_refused(peft_config(), with_length(100'000'000), "(what follows it in the file)");
  expect_refused(peft_config(), with_length(100'000'001), "must be at most 100000000");
  expect_refused(peft_config(), with_length(1ull << 63), "must be at most 100000000");
  expect_refused(peft_config(), with_length(~0ull), "must be at most 100000000");
}

TEST_F(AdapterStoreRefusalTest, RefusesMalformedHeaders) {
  const std::string a = header_entry(one_module()[0], 0, 96);
  const std::string data(96 + 160, '\1');
  const auto refused = [&](const std::string& header, const std::string& part,
                           ErrorKind kind = ErrorKind::kValue) {
    expect_refused(peft_config(), raw_safetensors(header, data), part, kind);
  };
  const auto entry = [](const std::string& fields) { return "{\"t\":{" + fields + "}}"; };
  refused(" {" + a + "}", "must start with '{'");
  refused("\xEF\xBB\xBF{" + a + "}", "must start with '{'");
  refused("[" + a + "]", "must start with '{'");
  refused("{" + a + "}}", "must be valid JSON");
  refused("{" + a + "} x", "must be valid JSON");
  refused("{" + a + std::string("}\0", 2), "got a zero byte in it");
  refused("{\"\xFF\":{}}", "must be valid JSON in UTF-8");
  refused("{\"\xC0\xAF\":{}}", "must be valid JSON in UTF-8");
  refused("{\"\xED\xA0\x80\":{}}", "must be valid JSON in UTF-8");
  refused("{\"\\ud800\":{}}", "must be valid JSON in UTF-8");
  refused("{" + a + "," + a + "}", "must name everything once");
  refused("{\"__metadata__\":{},\"__metadata__\":{}}", "must name everything once");
  refused("{\"__metadata__\":{\"x\":\"1\",\"x\":\"1\"}}", "must name everything once");
  refused("{\"__metadata__\":{\"x\":1}}", "__metadata__ must map text to text");
  refused("{\"__metadata__\":{\"x\":{}}}", "__metadata__ must map text to text");
  refused("{\"__metadata__\":{\"x\":[]}}", "__metadata__ must map text to text");
  refused("{\"__metadata__\":[]}", "must be an object in the header");
  refused("{\"t\":null}", "must be an object in the header");
  refused("{\"t\":1.5}", "must be an object in the header");
  refused(std::string("{\"t\":") + std::string(100'000, '['), "must be an object in the header");
  std::string objects;
  for (int i = 0; i < 50'000; ++i) objects += "{\"t\":";
  refused(objects, "must have dtype, shape and data_offsets only");

  const std::string dtype = R"("dtype":"F32",)", shape = R"("shape":[4,6],)";
  const std::string offsets = R"("data_offsets":[0,96])";
  refused(entry(shape + offsets), "must have a dtype, got none");
  refused(entry(dtype + offsets), "must have a shape, got none");
  refused(entry(dtype + R"("shape":[4,6])"), "must have a data_offsets, got none");
  refused(entry(dtype + shape + offsets + R"(,"extra":1)"), "shape and data_offsets only");
  refused(entry(dtype + dtype + shape + offsets), "must name everything once");
  refused(entry(R"("dtype":"F33",)" + shape + offsets), "dtype of the safetensors format",
          ErrorKind::kType);
  refused(entry(R"("dtype":32,)" + shape + offsets), "must have a string as dtype");
  refused(entry(R"("dtype":[],)" + shape + offsets), "must have a string as dtype");
  refused(entry(dtype + R"("shape":24,)" + offsets), "must have a list as shape");
  refused(entry(dtype + R"("shape":"24",)" + offsets), "must have a list as shape");
  refused(entry(dtype + R"("shape":{},)" + offsets), "must have a list as shape");
  refused(entry(dtype + R"("shape":[[24]],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[-4,-6],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[4.0,6],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[null],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[true],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":["4"],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[{}],)" + offsets), "whole numbers from 0 in shape");
  refused(entry(dtype + R"("shape":[1e999],)" + offsets), "must be valid JSON");
  refused(entry(dtype + R"("shape":[9223372036854775808],)" + offsets), "sizes below 2^63");
  refused(entry(dtype + R"("shape":[99999999999999999999],)" + offsets), "whole numbers from 0");
  refused(entry(dtype + R"("shape":[4294967296,4294967296],)" + offsets), "fewer than 2^61 bytes");
  refused(entry(dtype + R"("shape":[1152921504606846976],)" + offsets), "fewer than 2^61 bytes");
  refused(entry(dtype + R"("shape":[1,1,1,1,1,1,1,4,6],)" + offsets), "at most 8 dimensions");
  refused(entry(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])"), "as many bytes as its shape");
}

TEST_F(AdapterStoreRefusalTest, RefusesLyingOffsets) {
  const std::vector<FileTensor> t = one_module();  // 96 and 160 bytes
  const std::string data(256, '\1');
  const auto refused = [&](const std::string& a_offsets, const std::string& b_offsets,
                           const std::string& part) {
    std::string header = "{";
    for (const auto& [tensor, offsets] : {std::pair{t[0], a_offsets}, {t[1], b_offsets}}) {
      std::string entry = header_entry(tensor, 0, 0);
      entry.replace(entry.find("[0,0]"), 5, offsets);
      header += (header.size() > 1 ? "," : "") + entry;
    }
    expect_refused(peft_config(), raw_safetensors(header + "}", data), part);
  };
  refused("[0,96]", "[96,257]", "in order and within the 256 bytes");
  refused("[0,96]", "[98,258]", "in order and within the 256 bytes");
  refused("[0,96]", "[256,96]", "in order and within the 256 bytes");
  refused("[0,96]", "[96,18446744073709551615]", "in order and within the 256 bytes");
  refused("[0,96]", "[18446744073709551615,18446744073709551615]", "in order and within");
  refused("[0,96]", "[96,255]", "as many bytes as its shape and dtype F32 need (160), got 159");
  refused("[0,0]", "[96,256]", "as many bytes as its shape and dtype F32 need (96), got 0");
  refused("[0,96]", "[95,255]", "they overlap");
  refused("[0,96]", "[0,160]", "they overlap");
  refused("[4,100]", "[96,256]", "a gap");
  refused("[-1,95]", "[96,256]", "whole numbers from 0 in data_offsets");
  refused("[0.0,96]", "[96,256]", "whole numbers from 0 in data_offsets");
  refused("[0]", "[96,256]", "must have two data_offsets, got 1");
  refused("[]", "[96,256]", "must have two data_offsets, got 0");
  refused("[0,96,96]", "[96,256]", "must have two data_offsets, got more");
}

TEST_F(AdapterStoreRefusalTest, RefusesWrongTensors) {
  const auto refused = [&](const std::vector<FileTensor>& tensors, const std::string& part,
                           ErrorKind kind = ErrorKind::kValue) {
    expect_refused(peft_config(), safetensors(tensors), part, kind);
  };
  const auto named = [](const std::string& name) {
    return std::vector<FileTensor>{make_tensor("base_model.model." + name, "F32", {4})};
  };
  const auto pair = [](FileTensor a, FileTensor b) { return std::vector<FileTensor>{a, b}; };
  const FileTensor a = one_module()[0], b = one_module()[1];

  refused({}, "must hold lora_A and lora_B weights, got none");
  refused({a}, "module 'm.q_proj' must have both lora_A and lora_B, got no lora_B");
  refused({b}, "module 'm.q_proj' must have both lora_A and lora_B, got no lora_A");
  refused(pair(make_tensor(kA, "F32", {3, 6}), b), "(rank, K) with the rank of the config, 4");
  refused(pair(a, make_tensor(kB, "F32", {10, 5})), "(N, rank) with the rank of the config, 4");
  refused(pair(a, make_tensor(kB, "F32", {4, 10})), "(N, rank) with the rank of the config, 4");
  refused(pair(make_tensor(kA, "F32", {24}), b), "must have 2 dimensions");
  refused(pair(make_tensor(kA, "F32", {4, 6, 1, 1}), b), "must have 2 dimensions");
  refused(pair(make_tensor(kA, "F32", {4, 0}), b), "must not be empty");
  refused(pair(a, make_tensor(kB, "F32", {0, 4})), "must not be empty");
  refused(pair(a, make_tensor(kB, "BF16", {10, 4})), "must have the dtype of its lora_A, F32",
          ErrorKind::kType);
  refused(pair(make_tensor(kA, "I16", {4, 6}), b), "must have dtype F32, F16 or BF16, got I16",
          ErrorKind::kType);
  refused({make_tensor("base_model.model.odd.lora_A.weight", "BF16", {4, 3}),
           make_tensor("base_model.model.odd.lora_velora_embed", "U8", {1}), a, b},
          "multiple of its element size");

  const auto with = [&](const std::string& name) { return one_module() + named(name); };
  refused(with("m.lora_embedding_A"), "it is a LoRA on an embedding layer");
  refused(with("m.lora_magnitude_vector"), "it is the magnitude of a DoRA adapter");
  refused(with("m.lora_diag"), "it is the diagonal of a KaSA adapter");
  refused(with("m.lora_B.bias"), "it is a bias of the adapter");
  refused(with("m.token_adapter.trainable_tokens_delta"), "it replaces rows of the embedding");
  refused(with("m.base_layer.weight"), "it is a weight of the base model");
  refused(with("m.weight"), "it is no lora_A or lora_B weight of PEFT");
  refused(with("lora_A.weight"), "it is no lora_A or lora_B weight of PEFT");
  refused(with("x.lora_A..weight"), "it is no lora_A or lora_B weight of PEFT");
  refused(with("x.lora_A.p.q.weight"), "it is no lora_A or lora_B weight of PEFT");
  refused(with("x.base_layer.lora_A.weight"), "it wraps another adapter's layer");
  refused(with("x\\ny.lora_A.weight"), "without control characters");
  refused({make_tensor("model.m.lora_A.weight", "F32", {4, 6})}, "it is no lora_A or lora_B");
  refused({make_tensor("", "F32", {4, 6})}, "it is no lora_A or lora_B");
  refused({make_tensor(std::string(100'000, 'x'), "F32", {4, 6})}, "xxx...'");
}

TEST_F(AdapterStoreRefusalTest, RefusesWrongConfigs) {
  const std::string model = safetensors(one_module());
  const auto refused = [&](const std::string& config, const std::string& part) {
    expect_refused(config, model, "adapter_config.json: " + part);
  };
  refused("[]", "must be a JSON object, got array");
  refused("3", "must be a JSON object, got number");
  refused(peft_config() + "x", "must be valid JSON in UTF-8");
  refused(peft_config() + std::string("\0", 1), "must be valid JSON in UTF-8, got a zero byte");
  refused(peft_config("\"x\": \"\xFF\""), "must be valid JSON in UTF-8");
  refused(peft_config("\"x\": NaN"), "must be valid JSON in UTF-8");
  refused(peft_config("\"x\": 1e999"), "must be valid JSON in UTF-8, got a number that is too");
  refused(peft_config("\"r\": 4"), "must name every field once, got 'r' twice");
  refused(peft_config("\"rank_pattern\": {\"x\": 1, \"x\": 2}"), "must name every field once");
  refused(peft_config("\"x\": " + std::string(1'000'000, '[')), "must nest its values at most 32");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"t\":";
  refused(objects, "must nest its values at most 32");
  refused(std::string((16 << 20) + 1, ' '), "must have at most 16777216 bytes");

  refused(R"({"r": 4, "lora_alpha": 8})", "must have a field peft_type, got none");
  refused(R"({"peft_type": "LORA", "lora_alpha": 8})", "must have a field r, got none");
  refused(R"({"peft_type": "LORA", "r": 4})", "must have a field lora_alpha, got none");
  for (const char* type : {"\"LOHA\"", "\"lora\"", "null", "1", "[]"}) {
    refused("{\"peft_type\": " + std::string(type) + ", \"r\": 4, \"lora_alpha\": 8}",
            "peft_type must be 'LORA', got ");
  }
  const auto with = [](const char* field, const std::string& value) {
    std::string config = R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8})";
    const std::size_t at = config.find(std::string("\"") + field);
    const std::size_t colon = config.find(": ", at) + 2;
    return config.replace(colon, config.find_first_of(",}", colon) - colon, value);
  };
  for (const char* rank : {"0", "-1", "513", "4.0", "true", "null", "\"4\"", "1e3", "[4]",
                           "18446744073709551616", "4294967300"}) {
    refused(with("r", rank), "r must be a whole number from 1 to 512, got ");
  }
  for (const char* alpha : {"0", "-8", "-0.0", "\"8\"", "null", "true", "[8]", "{}"}) {
    refused(with("lora_alpha", alpha), "lora_alpha must be a number above 0, got ");
  }
  refused(with("lora_alpha", "Infinity"), "must be valid JSON");
  refused(with("lora_alpha", "NaN"), "must be valid JSON");
  for (const char* alpha : {"1e300", "1e-300"}) {
    expect_refused(with("lora_alpha", alpha), model, "must give a scale that float32 holds");
  }

  refused(peft_config("\"use_rslora\": 1"), "use_rslora must be true or false, got 1");
  refused(peft_config("\"fan_in_fan_out\": \"no\""), "fan_in_fan_out must be true or false");
  refused(peft_config("\"rank_pattern\": []"), "rank_pattern must be an object, got a list");
  refused(peft_config("\"rank_pattern\": {\"x\": 0}"), "rank_pattern['x'] must be a whole number");
  refused(peft_config("\"alpha_pattern\": {\"x\": -1}"), "alpha_pattern['x'] must be a number");
  refused(peft_config("\"rank_pattern\": {\"(\": 1}"), "pattern '(' must be a regular expression");
  refused(peft_config("\"rank_pattern\": {\"" + std::string(5000, '*') + "\": 1}"),
          "pattern '****");
}

/// "rank_pattern": {"<key>": 4, ...}
std::string rank_pattern(const std::vector<std::string>& keys) {
  std::string field = "\"rank_pattern\": {";
  for (const std::string& key : keys) field += (&key == &keys[0] ? "\"" : ", \"") + key + "\": 4";
  return peft_config(field + "}");
}

TEST_F(AdapterStoreRefusalTest, PatternsShareOneBudget) {
  const std::string kSteps = "must match all modules within 32000000 steps";
  const auto modules = [](int count, const std::string& name) {
    std::vector<FileTensor> tensors;
    for (int i = 0; i < count; ++i) {
      tensors = std::move(tensors) + make_module(name + std::to_string(i), "BF16", 4, 1, 1);
    }
    return safetensors(tensors);
  };
  // One match that never ends, and many of which each takes a million steps.
  expect_refused(rank_pattern({"(x+x+)+[^x]"}), modules(1, std::string(60, 'x') + "."), kSteps);
  std::vector<std::string> slow;
  for (int i = 0; i < 100; ++i) slow.push_back("(x+x+)+[^x0-9]{" + std::to_string(i + 1) + "}");
  expect_refused(rank_pattern(slow), modules(100, std::string(16, 'x')), kSteps);
  // The same for plain keys: many lengths, and many places of dots.
  std::vector<std::string> plain;
  for (int i = 0; i < 1 << 13; ++i) {
    std::string key = "xxxxxxxxxxxxx";
    for (int bit = 0; bit < 13; ++bit) {
      if (i >> bit & 1) key[bit] = '.';
    }
    plain.push_back("y" + key);
  }
  expect_refused(rank_pattern(plain), modules(5000, "xxxxxxxxxx"), kSteps);
}

TEST_F(AdapterStoreRefusalTest, PatternsHaveLimitedMemory) {
  std::vector<std::string> keys;
  for (int i = 0; i < 200; ++i) keys.push_back("(?:xxxxxxxx|y){" + std::to_string(700 + i) + "}");
  expect_refused(rank_pattern(keys), safetensors(one_module()),
                 "must take at most 4194304 bytes as compiled regular expressions");
  expect_refused(rank_pattern({"x+"}),
                 safetensors(make_module(std::string(1025, 'm'), "F32", 4, 6, 10)),
                 "must have a name of at most 1024 bytes");
}

TEST_F(AdapterStoreRefusalTest, RefusesAdaptersThatMortarCannotServe) {
  const std::string model = safetensors(one_module());
  const auto refused = [&](const std::string& field, const std::string& part) {
    expect_refused(peft_config(field), model, "adapter_config.json: " + part);
  };
  refused("\"use_dora\": true", "use_dora must be empty or off, got true: DoRA rescales");
  refused("\"modules_to_save\": [\"head\"]", "modules_to_save must be empty or off, got a list");
  refused("\"lora_bias\": true", "lora_bias must be empty or off");
  refused("\"target_parameters\": [\"w\"]", "target_parameters must be empty or off");
  refused("\"trainable_token_indices\": [1]", "trainable_token_indices must be empty or off");
  refused("\"layer_replication\": [[0, 4], [2, 5]]", "layer_replication must be empty or off");
  refused("\"alora_invocation_tokens\": [1]", "alora_invocation_tokens must be empty or off");
  refused("\"arrow_config\": {\"top_k\": 3}", "arrow_config must be empty or off");
  refused("\"kasa_config\": {\"beta\": 1}", "kasa_config must be empty or off");
  refused("\"use_qalora\": true", "use_qalora must be empty or off");
  refused("\"use_bdlora\": {\"nblocks\": 2}", "use_bdlora must be empty or off");
  refused("\"megatron_config\": {\"x\": 2}", "megatron_config must be empty or off");
  for (const char* init :
       {"pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "lora_ga", "loftq"}) {
    refused("\"init_lora_weights\": \"" + std::string(init) + "\"",
            "init_lora_weights must leave the base model as it is");
  }
  refused("\"init_lora_weights\": \"new\"", "init_lora_weights must be true, false, 'gaussian'");
  refused("\"init_lora_weights\": 1", "init_lora_weights must be true, false, 'gaussian'");
  for (const char* bias : {"all", "lora_only"}) {
    std::string config = peft_config();
    config.replace(config.find("none"), 4, bias);
    expect_refused(config, model, "bias must be 'none', got '" + std::string(bias));
  }
}

}  // namespace
}  // namespace mortar
