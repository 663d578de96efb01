// SPDX-License-Identifier: Apache-2.0
// The safetensors format (github.com/huggingface/safetensors): 8 bytes of header length N, little
// endian; N bytes of JSON; the tensors' bytes, row-major and little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_store/diagnostics.h"
#include "mortar/tensor.h"

namespace mortar::adapter_store {

inline constexpr std::size_t kLengthBytes = 8;               ///< before the header
inline constexpr std::size_t kMaxHeaderBytes = 100'000'000;  ///< the format's own limit
inline constexpr std::size_t kMaxTensorDims = 8;

/// One tensor of a file, checked: its bytes lie inside the file and are as many as its shape and
/// dtype need.
struct SafetensorsEntry {
  std::string name;
  std::string_view dtype_name;  ///< the format's own: "F32", "BF16", ...
  std::optional<DType> dtype;   ///< Mortar's, if it has one
  std::vector<std::int64_t> shape;
  std::size_t offset = 0;  ///< from the start of the file; any alignment
  std::size_t bytes = 0;
};

/// Where the header of a file ends by its first 8 bytes, if it is as short as it has to be.
std::size_t safetensors_header_end(std::span<const std::byte> file);

/// Reads and checks the header of a whole file; the tensors' bytes are not touched.
///
/// Throws unless: the header is as long as the file allows; it is one JSON object of valid UTF-8
/// that starts at its first byte, with no name twice; every tensor has exactly a known dtype, a
/// shape of at most kMaxTensorDims sizes and two offsets; and the tensors' byte ranges, sorted,
/// cover the rest of the file with neither gap nor overlap. Returned in the order of the ranges.
std::vector<SafetensorsEntry> parse_safetensors(std::span<const std::byte> file,
                                                const FileCheck& check);

}  // namespace mortar::adapter_store
