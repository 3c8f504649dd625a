/* Included before everything by a test: builds whose reductions do nothing, which the tests must notice. */
#include <nccl.h>
#if defined(NO_REDUCE_SCATTER) || defined(NO_REDUCTION)
#define ncclReduceScatter(...) ncclSuccess
#endif
#ifdef NO_REDUCTION
#define ncclAllReduce(...) ncclSuccess
#endif
