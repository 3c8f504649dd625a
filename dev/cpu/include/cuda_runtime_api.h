/* dev/cpu/include/cuda_runtime_api.h - the toolkit's, and waits that know where they are called from */
#ifndef CUDA_CPU_CUDA_RUNTIME_API_H
#define CUDA_CPU_CUDA_RUNTIME_API_H
#include_next <cuda_runtime_api.h>
#include "cuda_cpu/wait.h"
#endif
