// SPDX-License-Identifier: Apache-2.0
// Regular files: copied into memory, mapped, or read whole when they are small.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "adapter_store/diagnostics.h"
#include "mortar/adapter_store.h"

namespace mortar::adapter_store {

/// A regular file that is open for reading, and its size then.
class OpenFile {
 public:
  /// Throws if the file is missing, is no regular file or cannot be opened.
  explicit OpenFile(const FileCheck& file);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::size_t size() const { return size_; }
  /// Reads bytes [begin, end), fewer only if the file has become shorter. Returns their number.
  std::size_t read(char* out, std::size_t begin, std::size_t end, const FileCheck& file) const;

 private:
  int descriptor_ = -1;
  std::size_t size_ = 0;
};

/// The bytes of a file, of which a copy is read step by step, so that a header is checked before
/// anything else is read. What is written to them changes neither the file nor other processes.
class FileBytes {
 public:
  /// Throws as OpenFile does, and if the machine has no memory for it.
  FileBytes(const FileCheck& file, AdapterMemory memory);
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  /// Page-aligned; as many as the file had when it was opened.
  std::span<std::byte> bytes() const { return bytes_; }
  /// Makes the first `end` bytes readable. Throws if the file has become shorter.
  void load(std::size_t end, const FileCheck& file);

 private:
  std::optional<OpenFile> source_;  ///< until all is loaded
  std::span<std::byte> bytes_;
  std::size_t loaded_ = 0;
};

/// The whole content of a small file. Throws as OpenFile does, and if it has more than `max_bytes`.
std::string read_file(const FileCheck& file, std::size_t max_bytes);

}  // namespace mortar::adapter_store
