// CUDA's driver without a GPU: it stands before Triton's own source, loads anything and runs
// nothing. `noted` has the last launch; `num_params` is set before it.
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define dlopen(name, flags) ((void *)1)
#define dlsym(library, name) ((void *)cuLaunchKernelEx)
#define dlerror() NULL
#define dlclose(library)
#define DONE return CUDA_SUCCESS

struct {
  uint32_t count, num_params;
  uint64_t params[64];
} noted;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                          void **extra) {
  const unsigned most = 65535;
  if (config->gridDimY > most || config->gridDimZ > most || config->sharedMemBytes > 227 << 10)
    return CUDA_ERROR_INVALID_VALUE;
  ++noted.count;
  for (uint32_t i = 0; i < noted.num_params; ++i)
    memcpy(noted.params + i, params[i], sizeof *noted.params);
  DONE;
}

CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)found = pointer;
  DONE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "no GPU launches this grid or has this shared memory";
  DONE;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; DONE; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = 227 << 10;
  DONE;
}
CUresult cuCtxGetDevice(CUdevice *device) { DONE; }
CUresult cuCtxGetLimit(size_t *size, CUlimit limit) { DONE; }
CUresult cuCtxSetCurrent(CUcontext context) { DONE; }
CUresult cuCtxSetLimit(CUlimit limit, size_t size) { DONE; }
CUresult cuDeviceGet(CUdevice *device, int number) { DONE; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { DONE; }
CUresult cuDriverGetVersion(int *version) { DONE; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) { DONE; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { DONE; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { DONE; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { DONE; }
CUresult cuModuleLoadData(CUmodule *module, const void *data) { DONE; }
CUresult cuModuleUnload(CUmodule module) { DONE; }
CUresult cuPointerGetAttributes(unsigned num, CUpointer_attribute *which, void **found,
                                CUdeviceptr pointer) {
  DONE;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { DONE; }
