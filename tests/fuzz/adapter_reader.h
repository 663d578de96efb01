// SPDX-License-Identifier: Apache-2.0
// The reader of adapters as a fuzzer sees it: one input holds a config and a safetensors file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mortar::fuzz {

/// An input is the length of the config (2 bytes, little endian), the config, and the model file.
struct Input {
  std::string config;
  std::string model;
};
std::string join(const Input& input);
Input split(const std::uint8_t* data, std::size_t size);

/// Reads one input and aborts unless it either gives views that lie inside the file, or throws
/// mortar::Error with a short message in valid UTF-8. True if the adapter was accepted.
bool read_adapter(const std::uint8_t* data, std::size_t size);

/// Valid adapters, and some that are nearly so, to start from.
std::vector<std::string> seeds();

/// Makes the header length agree with the end of the header's JSON, so that a changed header is
/// read at all. Does nothing to a model that is too short.
void repair_header_length(Input& input);

}  // namespace mortar::fuzz
