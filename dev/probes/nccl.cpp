/* NCCL: what llmc_zero calls (2.14 or later), and what the CPU build and its tests take from the header (2.19). */
#include <nccl.h>

int main() {
    void* const called[] = {(void*)ncclAllGather,    (void*)ncclAllReduce,      (void*)ncclBroadcast,
                            (void*)ncclCommAbort,    (void*)ncclCommDestroy,    (void*)ncclCommGetAsyncError,
                            (void*)ncclCommInitRank, (void*)ncclGetErrorString, (void*)ncclGetLastError,
                            (void*)ncclGetUniqueId,  (void*)ncclGroupEnd,       (void*)ncclGroupStart,
                            (void*)ncclRecv,         (void*)ncclReduceScatter,  (void*)ncclSend};
    const ncclDataType_t types[] = {ncclFloat, ncclDouble, ncclBfloat16};
    const ncclResult_t results[] = {ncclSuccess, ncclSystemError, ncclInProgress, ncclRemoteError};
#ifdef CUDA_CPU
    void* const more[] = {(void*)ncclCommSplit, (void*)ncclCommRegister, (void*)ncclMemAlloc,
                          (void*)ncclCommInitRankConfig, (void*)ncclRedOpCreatePreMulSum};
    const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (!more[0] || config.size == 0 || NCCL_SPLIT_NOCOLOR == 0) return 1;
#endif
    return called[0] && types[0] != types[1] && results[0] == 0 && ncclSum == 0 ? 0 : 1;
}
