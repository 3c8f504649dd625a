/* dev/cpu/include/cuda_cpu/wait.h - every call site of cudaStreamWaitEvent has a number; cpu-only queries

   CUDA_CPU_DROP_WAIT=n drops the n-th call site (file and line, from 1, in order of first use) each time
   it is executed. For that the call passes its place on; it remains an expression with an optional third
   argument.
*/
#ifndef CUDA_CPU_WAIT_H
#define CUDA_CPU_WAIT_H

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t cudaCpuStreamWaitEvent(const char* file, int line, cudaStream_t stream, cudaEvent_t event,
#ifdef __cplusplus
                                   unsigned int flags = 0);
#else
                                   unsigned int flags);
#endif

int cudaCpuWaitSites(void); /* call sites of cudaStreamWaitEvent seen since the last cudaDeviceReset */
const char* cudaCpuWaitSite(int n); /* "file:line" of site n, from 1; NULL if there is none */
size_t cudaCpuLiveBytes(void);      /* bytes of device memory that are allocated and not freed */
void* cudaCpuDynamicShared(void);   /* in a kernel: its dynamic shared memory, aligned to 128 bytes */

#ifdef __cplusplus
}
#endif

#define cudaStreamWaitEvent(...) cudaCpuStreamWaitEvent(__FILE__, __LINE__, __VA_ARGS__)

#endif
