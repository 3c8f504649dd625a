/* Included before everything by a test: a build whose reductions do nothing if the variable WITHOUT says so; the tests must
   notice. */
#include <cuda_runtime.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
static inline int without(const char* what) {
    const char* words = getenv("WITHOUT");
    return words && strstr(words, what) != NULL;
}
#define ncclReduceScatter(...) (without("reduce-scatter") ? ncclSuccess : (ncclReduceScatter)(__VA_ARGS__))
#define ncclAllReduce(...) (without("all-reduce") ? ncclSuccess : (ncclAllReduce)(__VA_ARGS__))
