#include "device/nccl/library.h"

#include <dlfcn.h>

namespace rtp {

void* find_nccl_function(const char* name) {
  // A torch that has NCCL built in leaves no library of this name: the one that this extension links is then loaded.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* function = dlsym(library, name);
  dlclose(library);
  return function;
}

}  // namespace rtp
