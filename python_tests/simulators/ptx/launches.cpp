// Records the launches of kernels that nvcc has compiled: the functions of the CUDA runtime that its host code calls.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct Triple {
  unsigned x, y, z;
};

struct Launch {
  std::string kernel;
  Triple grid, block;
  std::vector<unsigned char> parameters;
};

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> made;
  return made;
}
std::map<std::string, size_t> bytes_of;
std::vector<Launch> launches;

}  // namespace

extern "C" {

// Each kernel has one parameter, of so many bytes.
void set_parameter_bytes(const char* kernel, size_t bytes) { bytes_of[kernel] = bytes; }
int launch_count() { return static_cast<int>(launches.size()); }
const char* launch_kernel(int index) { return launches[index].kernel.c_str(); }
const void* launch_parameters(int index) { return launches[index].parameters.data(); }
size_t launch_parameter_bytes(int index) { return launches[index].parameters.size(); }
void launch_shape(int index, unsigned* out) {
  std::memcpy(out, &launches[index].grid, sizeof(Triple));
  std::memcpy(out + 3, &launches[index].block, sizeof(Triple));
}
void forget_launches() { launches.clear(); }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, void*, void*, void*, void*,
                            int*) {
  kernels()[host] = device;
}
unsigned __cudaPopCallConfiguration(Triple*, Triple*, size_t*, void*) { return 1; }
int __cudaGetKernel(void**, const void*) { return 1; }
int __cudaLaunchKernel(void*, Triple, Triple, void**, size_t, void*) { return 1; }

int cudaLaunchKernel(const void* kernel, Triple grid, Triple block, void** arguments, size_t shared, void*) {
  const auto found = kernels().find(kernel);
  if (found == kernels().end() || shared != 0) return 1;
  const auto bytes = bytes_of.find(found->second);
  if (bytes == bytes_of.end()) return 1;
  const auto* first = static_cast<const unsigned char*>(arguments[0]);
  launches.push_back({found->second, grid, block, {first, first + bytes->second}});
  return 0;
}

}  // extern "C"
