/* dev/cpu/include/cuda_runtime.h - the toolkit's cuda_runtime.h and the device vocabulary, for a CPU compiler

   Found before the toolkit's own header. Types, prototypes and most templates come from there; what only
   nvcc knows (threadIdx, __shared__, shuffles, atomics, intrinsics, launches) is added below. Works with
   the headers of CUDA 12 and 13, from C (prototypes only) and C++14 on. CUDA_CPU is defined; __CUDACC__
   and __CUDA_ARCH__ are not.
*/
#ifndef CUDA_CPU_CUDA_RUNTIME_H
#define CUDA_CPU_CUDA_RUNTIME_H

#define CUDA_CPU 1
#define __DEVICE_LAUNCH_PARAMETERS_H__ /* its threadIdx is a constant; ours changes */

#ifdef __cplusplus
/* Out of the way of ours, which knows the parameters' types (cuda_cpu/launch.h). */
#define cudaLaunchKernelEx cuda_cpu_toolkit_launch_kernel_ex
#endif
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx

#include "cuda_cpu/wait.h"
#ifdef __cplusplus
#include "cuda_cpu/device.h"
#include "cuda_cpu/intrinsics.h"
#include "cuda_cpu/launch.h"
#endif

#endif
