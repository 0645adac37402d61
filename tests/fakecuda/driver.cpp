// The driver's and NVML's entry points of the stand-in, as far as torch calls them.
//
// Answers: the version, the device's attributes, the primary context (one for each device, from the first call of CUDA
// on), whose memory a pointer is in, and NVML's count and names of devices, which torch asks before a fork.
// Cannot: modules, linking, virtual memory, multicast, green contexts. torch looks those up by name
// (c10/cuda/driver_api.h); build.py generates an entry point for each that is not here, which says so.
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "device.h"

using namespace fakecuda;

namespace {

constexpr uintptr_t CONTEXTS = 0x1000;  // no address: contexts are told apart, and never looked into

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(CONTEXTS + device); }

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return refused(true) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (!is_initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

// The numbers of the attributes and of the errors are the runtime's.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = is_initialised();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = is_initialised() ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current_device() = static_cast<int>(reinterpret_cast<uintptr_t>(context) - CONTEXTS);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// There is no driver whose log could be of interest.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  if (handle) *handle = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }

CUresult cuMemGetAddressRange(CUdeviceptr* from, size_t* size, CUdeviceptr pointer) {
  auto block = block_of(reinterpret_cast<void*>(pointer));
  if (block.kind == Block::pageable) return CUDA_ERROR_INVALID_VALUE;
  *from = block.from;
  *size = block.size;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  auto block = block_of(reinterpret_cast<void*>(pointer));
  if (block.kind == Block::pageable) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out) = block.device; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(out) = context_of(block.device); break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (!found) fprintf(stderr, "[fakecuda] not there: %s\n", name);
  *function = found ? found : reinterpret_cast<void*>(&not_supported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// NVML: none of these initialises CUDA

// Like the NVML of driver 580: the first call starts a thread, named as CUDA's are.
int nvmlInit() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread thread([] {
      for (;;) pause();
    });
    pthread_setname_np(thread.native_handle(), "cuda00000000000");  // before anybody looks
    thread.detach();
  });
  return 0;
}

int nvmlInit_v2() { return nvmlInit(); }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "an error of the stand-in for NVML"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  const char* said = getenv("FAKECUDA_DEVICES");
  *count = said && *said ? atoi(said) : static_cast<unsigned>(orders().devices);
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index + 1));
  return 0;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  snprintf(text, size, "GPU-stand-in-%d", static_cast<int>(reinterpret_cast<uintptr_t>(device)));
  return 0;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "stand-in");
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return 0;
}

}  // extern "C"
