/* Stands in for NVIDIA's driver: knows one card, loads nothing, and writes down what it is asked to launch. */
#include <cuda.h>
#include <string.h>

static int sizes[512], count, used;
static unsigned char last[1 << 16];

void recording_expect(int n, const int *of) { /* how many bytes each of a kernel's parameters has */
  count = n;
  memcpy(sizes, of, n * sizeof(int));
}
int recording_last(unsigned char *into) {
  memcpy(into, last, used);
  return used;
}
static void note(const void *from, int bytes) {
  memcpy(last + used, from, bytes);
  used += bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  used = 0;
  note(&config->gridDimX, 7 * sizeof(unsigned)); /* grid, block, shared memory */
  note(&config->hStream, sizeof(CUstream));
  note(&f, sizeof f);
  note(&config->numAttrs, sizeof(unsigned));
  for (unsigned i = 0; i < config->numAttrs; i++) note(&config->attrs[i].id, sizeof(CUlaunchAttributeID));
  for (int i = 0; i < count; i++) note(params[i], sizes[i]);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s,
                        CUstream h, void **params, void **extra) {
  return CUDA_ERROR_UNKNOWN;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l, CUtensorMapFloatOOBfill fill) {
  unsigned char *at = (unsigned char *)map; /* all that it says, in some order */
  memset(map, 0, sizeof *map);
  memcpy(at, &address, 8);
  memcpy(at + 8, dims, 8 * rank);
  for (unsigned n = 0; n < rank; n++) at[64 + n] = (unsigned char)box[n];
  at[80] = (unsigned char)type, at[81] = (unsigned char)swizzle, at[82] = (unsigned char)fill;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13010, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int i) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { return *n = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)2, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) { return *f = (CUfunction)3, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "recorded", CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) { return *n = 1, CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
  return CUDA_ERROR_UNKNOWN;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }
