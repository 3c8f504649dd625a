/* The toolkit's headers; with the real nvcc its libraries too, for every GPU that dev/cuda_check.sh compiles for. */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#ifdef CUDA_CPU
#include <cublas_v2.h>
#include <nvtx3/nvToolsExt.h> /* of llm.c */
#endif

static_assert(CUDART_VERSION >= 12000, "CUDA 12 or later is needed");

#ifdef __CUDACC__
__global__ void kernel(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16_rn(__fsqrt_rn(2)); }
#endif

int main() {
    const cudaMemPool_t pool = nullptr;
    const cudaDeviceProp properties = {};
    void* const called[] = {(void*)cublasLtMatmul, (void*)cublasLtMatmulAlgoGetHeuristic,
                            (void*)cublasLtMatmulDescCreate, (void*)cudaEventElapsedTime,
                            (void*)cudaLaunchHostFunc};
    return called[0] && !pool && !properties.memoryPoolsSupported ? 0 : 1;
}
