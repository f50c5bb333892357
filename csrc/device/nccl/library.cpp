#include "device/nccl/library.h"

#include <dlfcn.h>

namespace rtp {

void* find_nccl_function(const char* name) {
  // If torch links NCCL statically, no library of this name is loaded except the one that this extension links.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* function = dlsym(library, name);
  dlclose(library);
  return function;
}

}  // namespace rtp
