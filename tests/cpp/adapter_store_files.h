// SPDX-License-Identifier: Apache-2.0
// Makes adapter files in memory and on disk: valid ones, and wrong ones by replacing a part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace mortar::testing {

/// A tensor of a safetensors file, its bytes taken from `payload`.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string payload;
};

/// Random bytes that are finite numbers in every float type: no byte pair has all exponent bits.
inline std::string random_payload(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string payload(bytes, '\0');
  for (char& c : payload) c = static_cast<char>(random() % 0x3C);
  return payload;
}

inline FileTensor make_tensor(const std::string& name, const std::string& dtype,
                              std::vector<std::int64_t> shape, unsigned seed = 1) {
  std::size_t bytes = dtype == "F32" ? 4 : dtype.ends_with("8") ? 1 : 2;
  for (std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  return {name, dtype, std::move(shape), random_payload(bytes, seed)};
}

/// "base_model.model.<module>.lora_A.weight" and its partner.
inline std::vector<FileTensor> make_module(const std::string& module, const std::string& dtype,
                                           std::int64_t rank, std::int64_t hidden,
                                           std::int64_t width) {
  const std::string prefix = "base_model.model." + module;
  return {make_tensor(prefix + ".lora_A.weight", dtype, {rank, hidden}, 1),
          make_tensor(prefix + ".lora_B.weight", dtype, {width, rank}, 2)};
}

/// A file of this header and data, whatever they are; the header is padded to 8 bytes.
inline std::string raw_safetensors(std::string header, const std::string& data) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return file + header + data;
}

inline std::string header_entry(const FileTensor& t, std::size_t begin, std::size_t end) {
  std::ostringstream entry;
  entry << '"' << t.name << R"(":{"dtype":")" << t.dtype << R"(","shape":[)";
  for (std::size_t d = 0; d < t.shape.size(); ++d) entry << (d ? "," : "") << t.shape[d];
  entry << R"(],"data_offsets":[)" << begin << ',' << end << "]}";
  return entry.str();
}

/// A valid file.
inline std::string safetensors(const std::vector<FileTensor>& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}", data;
  for (const FileTensor& t : tensors) {
    header += ',';
    header += header_entry(t, data.size(), data.size() + t.payload.size());
    data += t.payload;
  }
  return raw_safetensors(header + "}", data);
}

/// A config of rank 4, with further fields ("\"use_rslora\": true") at its end.
inline std::string peft_config(const std::string& more = "") {
  return R"({"peft_type": "LORA", "base_model_name_or_path": "base", "bias": "none", "r": 4, )"
         R"("lora_alpha": 8)" +
         std::string(more.empty() ? "" : ", ") + more + "}";
}

/// A new folder below the system's temporary one, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "mortar-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string string() const { return path_.string(); }

  void write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
  }
  void write_adapter(const std::string& config, const std::string& model) const {
    write("adapter_config.json", config);
    write("adapter_model.safetensors", model);
  }

 private:
  std::filesystem::path path_;
};

}  // namespace mortar::testing
