// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace mortar::adapter_store {
namespace {

/// A regular file open for reading, and its size.
class OpenFile {
 public:
  explicit OpenFile(const FileCheck& file) {
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
  ~OpenFile() { ::close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }
  std::size_t size() const { return size_; }

 private:
  int descriptor_ = -1;
  std::size_t size_ = 0;
};

}  // namespace

MappedFile::MappedFile(const FileCheck& file) {
  const OpenFile opened(file);
  if (opened.size() == 0) return;  // nothing can be mapped; the reader reports the size
  void* data = ::mmap(nullptr, opened.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                      opened.descriptor(), 0);
  if (data == MAP_FAILED) file.fail_io("map it into memory", errno);
  bytes_ = {static_cast<std::byte*>(data), opened.size()};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

std::string read_file(const FileCheck& file, std::size_t max_bytes) {
  const OpenFile opened(file);
  file.require(opened.size() <= max_bytes, "must have at most ", max_bytes, " bytes, got ",
               opened.size());
  std::string content(opened.size(), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t n = ::read(opened.descriptor(), content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) file.fail_io("read it", errno);
    if (n == 0) break;  // truncated since its size was read
    done += static_cast<std::size_t>(n);
  }
  content.resize(done);
  return content;
}

}  // namespace mortar::adapter_store
