/* llmc_zero/check.cuh - what a library call returns, and how an error travels up.

   Host only, C99 and C++. Nothing here prints, exits or keeps state. Every function of the library that can
   fail returns a ZeroResult by value: a code and one line of text that says what was wrong, with the numbers,
   and what to do about it. Callers inside the library relay it with ZERO_TRY; only the program's main prints
   the text and ends, on every rank.

       ZeroResult r = zero_update(&z, lr);
       if (r.code != ZERO_OK) { fprintf(stderr, "%s\n", r.text); ... end on all ranks ... }

   defines: ZeroCode, ZeroResult, zero_ok, zero_error, ZERO_ANY_INT, ZERO_TRY, ZERO_TRY_CUDA, ZERO_TRY_NCCL
*/
#ifndef LLMC_ZERO_CHECK_CUH_INCLUDED
#define LLMC_ZERO_CHECK_CUH_INCLUDED

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LLMC_ZERO_VERSION 300 /* major * 10000 + minor * 100 + patch */

/* Stands behind the name of an enum that callers set. In C++ every int is then one of its values, as in C, so that a wrong
   one can be read, and refused in words. */
#ifdef __cplusplus
#define ZERO_ANY_INT : int
#else
#define ZERO_ANY_INT
#endif

typedef enum ZeroCode {
    ZERO_OK = 0,
    ZERO_ERROR_ARGUMENT, /* a value that the contract does not allow */
    ZERO_ERROR_MEMORY,   /* host or device memory is used up */
    ZERO_ERROR_CUDA,     /* the CUDA runtime or cuBLASLt refused a call */
    ZERO_ERROR_NCCL,     /* NCCL refused a call, or a peer is gone */
    ZERO_ERROR_ORDER,    /* calls of one step came in an order that cannot work */
    ZERO_ERROR_SKIPS,    /* too many steps in a row had gradients that were not finite */
    ZERO_ERROR_REPLICAS, /* parameters differ between ranks */
    ZERO_ERROR_SYSTEM,   /* a file, a socket, MPI */
    ZERO_ERROR_FILE      /* a checkpoint that is damaged, or no checkpoint */
} ZeroCode;

typedef struct ZeroResult {
    ZeroCode code;
    char text[252]; /* "" when code is ZERO_OK; one line, no newline at its end */
} ZeroResult;

static inline ZeroResult zero_ok(void) {
    ZeroResult result;
    result.code = ZERO_OK;
    result.text[0] = '\0';
    return result;
}

/* An error whose text is a printf format. A text that is too long is cut. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline ZeroResult
zero_error(ZeroCode code, const char* format, ...) {
    ZeroResult result;
    va_list arguments;
    result.code = code;
    va_start(arguments, format);
    vsnprintf(result.text, sizeof(result.text), format, arguments);
    va_end(arguments);
    return result;
}

/* Returns from the calling function with the result of `call` unless it is ZERO_OK. Where something has to be
   freed first, call, look at .code and free; there is no hidden goto. */
#define ZERO_TRY(call)                                               \
    do {                                                             \
        ZeroResult zero_try_result = (call);                         \
        if (zero_try_result.code != ZERO_OK) return zero_try_result; \
    } while (0)

/* The same for calls of the CUDA runtime (cudaError_t) and of NCCL (ncclResult_t); they need its header only
   where they are used. The text names the function and the line, not the arguments: those would push the reason
   out of a text of this length. */
#define ZERO_TRY_CUDA(call)                                                                  \
    do {                                                                                     \
        cudaError_t zero_try_cuda = (call);                                                  \
        if (zero_try_cuda != cudaSuccess)                                                    \
            return zero_error(zero_try_cuda == cudaErrorMemoryAllocation ? ZERO_ERROR_MEMORY \
                                                                         : ZERO_ERROR_CUDA,  \
                              "%.*s: %s (%s:%d)", (int)strcspn(#call, "("), #call,           \
                              cudaGetErrorString(zero_try_cuda), __FILE__, __LINE__);        \
    } while (0)

#define ZERO_TRY_NCCL(call)                                                                             \
    do {                                                                                                \
        ncclResult_t zero_try_nccl = (call);                                                            \
        if (zero_try_nccl != ncclSuccess) /* ncclInProgress too: see collectives.cuh */                 \
            return zero_error(ZERO_ERROR_NCCL, "%.*s: %s: %s (%s:%d)", (int)strcspn(#call, "("), #call, \
                              ncclGetErrorString(zero_try_nccl), ncclGetLastError(NULL), __FILE__,      \
                              __LINE__);                                                                \
    } while (0)

#endif /* LLMC_ZERO_CHECK_CUH_INCLUDED */
