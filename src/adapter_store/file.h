// SPDX-License-Identifier: Apache-2.0
// Regular files: mapped into memory, or read whole when they are small.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "adapter_store/diagnostics.h"

namespace mortar::adapter_store {

/// A file mapped into memory. Pages are read when they are touched. The mapping is private and
/// copy-on-write: whoever writes through a view changes this mapping and never the file. A file
/// that is truncated while it is mapped faults on access: replace files by renaming.
class MappedFile {
 public:
  /// Throws if the file is missing, is no regular file or cannot be mapped.
  explicit MappedFile(const FileCheck& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

/// The whole content. Throws as MappedFile does, and if the file has more than `max_bytes`.
std::string read_file(const FileCheck& file, std::size_t max_bytes);

}  // namespace mortar::adapter_store
