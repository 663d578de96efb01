// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "memory.h"

#ifndef EMULATOR_FOLDER
#error "EMULATOR_FOLDER: where translate.py lies"
#endif

namespace emulator {
namespace {

std::mutex mutex;
std::map<const void*, std::unique_ptr<Kernel>>& kernels() {
  static auto* map = new std::map<const void*, std::unique_ptr<Kernel>>;
  return *map;
}
std::map<std::string, u64>& variables() {
  static auto* map = new std::map<std::string, u64>;
  return *map;
}

std::string cache_folder() {
  const char* given = std::getenv("MORTAR_EMULATOR_CACHE");
  const std::string folder = given ? given : "/work/emu/cache";
  mkdir(folder.c_str(), 0777);
  return folder;
}

/// Writes the fat binary into a new file; its header says how long it is.
std::string fatbin_file(const void* fatbin) {
  struct Header {
    unsigned magic;
    unsigned short version, header_bytes;
    unsigned long long bytes;
  };
  const auto* header = static_cast<const Header*>(fatbin);
  char name[] = "/tmp/emulator_XXXXXX";
  const int file = mkstemp(name);
  const std::size_t total = header->header_bytes + header->bytes;
  if (file < 0 || write(file, fatbin, total) != static_cast<ssize_t>(total)) std::abort();
  close(file);
  return name;
}

u64 variable(const void* fatbin, const std::string& name, std::size_t bytes, const std::string& hex) {
  std::ostringstream key;
  key << fatbin << name;
  u64& at = variables()[key.str()];
  if (at != 0) return at;
  auto* p = static_cast<unsigned char*>(device_malloc(bytes));
  std::memset(p, 0, bytes);
  for (std::size_t i = 0; hex != "-" && 2 * i + 1 < hex.size(); ++i) {
    p[i] = static_cast<unsigned char>(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
  }
  return at = reinterpret_cast<u64>(p);
}

std::string translate(const Kernel& kernel) {
  const std::string fatbin = fatbin_file(kernel.fatbin);
  const std::string command = "python3 " EMULATOR_FOLDER "/translate.py " + fatbin + " " +
                              cache_folder() + " '" + kernel.name + "'";
  FILE* pipe = popen(command.c_str(), "r");
  std::string path;
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) path = line;
  const bool done = pipe != nullptr && pclose(pipe) == 0;
  unlink(fatbin.c_str());
  if (!done || path.empty()) return {};
  path.pop_back();
  return path;
}

bool load(Kernel& kernel) {
  const std::string path = translate(kernel);
  if (path.empty()) return false;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line) && line != "instructions") {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "library") {
      std::string library;
      words >> library;
      void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle == nullptr) {
        std::fprintf(stderr, "emulator: %s\n", dlerror());
        return false;
      }
      kernel.entry = reinterpret_cast<void (*)(Thread*)>(dlsym(handle, "kernel"));
    } else if (what == "static_smem") {
      words >> kernel.static_smem;
    } else if (what == "param_bytes") {
      words >> kernel.param_bytes;
    } else if (what == "max_threads") {
      words >> kernel.max_threads;
    } else if (what == "param") {
      unsigned offset = 0, size = 0;
      words >> offset >> size;
      kernel.params.emplace_back(offset, size);
    } else if (what == "symbol") {
      std::string name, hex;
      std::size_t align = 0, size = 0;
      words >> name >> align >> size >> hex;
      kernel.symbols.push_back(variable(kernel.fatbin, name, size, hex));
    }
  }
  while (std::getline(file, line)) kernel.instructions.push_back(line);
  kernel.loaded = kernel.entry != nullptr;
  return kernel.loaded;
}

}  // namespace

void register_kernel(const void* fatbin, const void* host_function, const char* name) {
  const std::lock_guard lock(mutex);
  auto kernel = std::make_unique<Kernel>();
  kernel->fatbin = fatbin;
  kernel->name = name;
  kernels()[host_function] = std::move(kernel);
}

Kernel* find_kernel(const void* host_function) {
  const std::lock_guard lock(mutex);
  const auto found = kernels().find(host_function);
  if (found == kernels().end()) return nullptr;
  Kernel& kernel = *found->second;
  return kernel.loaded || load(kernel) ? &kernel : nullptr;
}

}  // namespace emulator
