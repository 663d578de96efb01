// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace mortar::adapter_store {

OpenFile::OpenFile(const FileCheck& file) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  descriptor_ = ::open(file.path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    file.require(errno != ENOENT && errno != ENOTDIR, "must exist, got no such file");
    file.fail_io("open it", errno);
  }
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) {
    const int error = errno;
    ::close(descriptor_);
    file.fail_io("read its size", error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(descriptor_);
    file.refuse("must be a regular file, got ",
                S_ISDIR(info.st_mode) ? "a directory" : "a special file");
  }
  size_ = static_cast<std::size_t>(info.st_size);
}

OpenFile::~OpenFile() { ::close(descriptor_); }

std::size_t OpenFile::read(char* out, std::size_t begin, std::size_t end,
                           const FileCheck& file) const {
  std::size_t at = begin;
  while (at < end) {
    const ssize_t n = ::pread(descriptor_, out + (at - begin), end - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) file.fail_io("read it", errno);
    if (n == 0) break;
    at += static_cast<std::size_t>(n);
  }
  return at - begin;
}

FileBytes::FileBytes(const FileCheck& file, AdapterMemory memory) : source_(std::in_place, file) {
  const std::size_t size = source_->size();
  if (size == 0) return;  // nothing can be mapped; the reader reports the size
  const bool mapped = memory == AdapterMemory::kMapped;
  // Both are private, copied on write. A copy takes memory as its pages are loaded.
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_NORESERVE | (mapped ? 0 : MAP_ANONYMOUS),
                      mapped ? source_->descriptor() : -1, 0);
  if (data == MAP_FAILED) file.fail_io("get memory for it", errno);
  bytes_ = {static_cast<std::byte*>(data), size};
  if (mapped) loaded_ = size;
  if (mapped) source_.reset();
}

FileBytes::~FileBytes() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void FileBytes::load(std::size_t end, const FileCheck& file) {
  if (end <= loaded_) return;
  char* out = reinterpret_cast<char*>(bytes_.data()) + loaded_;
  loaded_ += source_->read(out, loaded_, end, file);
  file.require(loaded_ >= end, "must not be changed while it is read, got ", loaded_, " of its ",
               bytes_.size(), " bytes");
  if (loaded_ == bytes_.size()) source_.reset();
}

std::string read_file(const FileCheck& file, std::size_t max_bytes) {
  const OpenFile opened(file);
  file.require(opened.size() <= max_bytes, "must have at most ", max_bytes, " bytes, got ",
               opened.size());
  std::string content(opened.size(), '\0');
  content.resize(opened.read(content.data(), 0, content.size(), file));
  return content;
}

}  // namespace mortar::adapter_store
