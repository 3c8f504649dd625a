// The ranks: NCCL where MULTI_GPU is defined, started by MPI (USE_MPI) or through a shared folder.
#pragma once
#include "cuda_common.h"
#ifdef MULTI_GPU
#include <nccl.h>
#ifdef USE_MPI
#include <mpi.h>
#define mpiCheck(call) must((call) == MPI_SUCCESS, "call", #call)
#endif
inline void check_nccl(ncclResult_t r) { must(r == ncclSuccess, "go on: NCCL says", ncclGetErrorString(r)); }
#define NCCL(call) check_nccl(call)
constexpr ncclDataType_t ncclFloatX = sizeof(floatX) == 4 ? ncclFloat : ncclBfloat16;
#endif

struct MultiGpuConfig {
    int process_rank = 0, num_processes = 1, local_device_idx = 0, zero_stage = 0;
    size_t shard_num_parameters = 0;
#ifdef MULTI_GPU
    ncclComm_t nccl_comm;
    cudaStream_t nccl_stream;
    cudaEvent_t compute_nccl_sync;
    float *unified_buffer; // of one float
#endif
};
MultiGpuConfig multi_gpu_config;
#define printf0(...) (void)(multi_gpu_config.process_rank == 0 ? printf(__VA_ARGS__) : 0)

struct ShardInfo {
    ptrdiff_t offset;
    size_t size;
};

#ifdef MULTI_GPU
// Rank 0 writes the communicator's id to PATH/id, the others wait for it.
inline void id_from_folder(ncclUniqueId* id, const char* path, int rank) {
    char name[400], unfinished[410];
    snprintf(name, sizeof name, "%s/id", path);
    snprintf(unfinished, sizeof unfinished, "%s.new", name);
    if (rank == 0) {
        NCCL(ncclGetUniqueId(id));
        FILE* f = fopenCheck(unfinished, "wb");
        fwriteCheck(id, sizeof *id, 1, f);
        fclose(f);
        must(rename(unfinished, name) == 0, "rename", unfinished);
    }
    for (int i = 0; access(name, R_OK) != 0; i++) {
        must(i < 60000, "find", name);
        usleep(10000);
    }
    FILE* f = fopenCheck(name, "rb");
    freadCheck(id, sizeof *id, 1, f);
    fclose(f);
}
#endif

inline MultiGpuConfig multi_gpu_config_init(int ranks, int rank, const char* path, const char* method) {
    MultiGpuConfig made;
#ifdef MULTI_GPU
    ncclUniqueId id;
    made.process_rank = rank;
    made.num_processes = ranks;
    if (strcmp(method, "fs") == 0) id_from_folder(&id, path, rank);
    else {
#ifdef USE_MPI
        mpiCheck(MPI_Init(0, 0));
        MPI_Comm_rank(MPI_COMM_WORLD, &made.process_rank);
        MPI_Comm_size(MPI_COMM_WORLD, &made.num_processes);
        if (made.process_rank == 0) NCCL(ncclGetUniqueId(&id));
        mpiCheck(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD));
#else
        must(false, "start the ranks with", method);
#endif
    }
    int devices = 1;
    CUDA(cudaGetDeviceCount(&devices));
    made.local_device_idx = made.process_rank % devices;
    CUDA(cudaSetDevice(made.local_device_idx));
    NCCL(ncclCommInitRank(&made.nccl_comm, made.num_processes, id, made.process_rank));
    CUDA(cudaStreamCreate(&made.nccl_stream));
    CUDA(cudaEventCreateWithFlags(&made.compute_nccl_sync, cudaEventDisableTiming));
    CUDA(cudaMallocManaged((void**)&made.unified_buffer, sizeof(float)));
#else
    (void)ranks, (void)rank, (void)path, (void)method;
#endif
    return made;
}

inline void multi_gpu_config_free(MultiGpuConfig* c) {
#ifdef MULTI_GPU
    NCCL(ncclCommDestroy(c->nccl_comm));
    CUDA(cudaFree(c->unified_buffer));
    CUDA(cudaEventDestroy(c->compute_nccl_sync));
    CUDA(cudaStreamDestroy(c->nccl_stream));
#ifdef USE_MPI
    mpiCheck( MPI_Finalize() );
#endif
#else
    (void)c;
#endif
}

inline float multi_gpu_cpu_float_sum(float x, MultiGpuConfig* c) {
#ifdef MULTI_GPU
    *c->unified_buffer = x;
    NCCL(ncclAllReduce(c->unified_buffer, c->unified_buffer, sizeof( float ), ncclFloat, ncclSum,
                            c->nccl_comm, c->nccl_stream));
    CUDA(cudaDeviceSynchronize());
    x = *c->unified_buffer;
#else
    (void)c;
#endif
    return x;
}
inline void multi_gpu_barrier(MultiGpuConfig* c) { multi_gpu_cpu_float_sum(0.0f, c); }

inline ShardInfo multi_gpu_get_shard_offset(size_t count, const MultiGpuConfig* c) {
    const size_t part = count / c->num_processes;
    if (c->zero_stage == 0) return {0, count};
    return {(ptrdiff_t)(part * c->process_rank), part};
}

// Means over the ranks: all of it, or with stage 1 the own part. Behind what is in `stream` by now.
template <int N>
void multi_gpu_async_reduce_gradient(floatX* const (&parts)[N], const size_t (&counts)[N], MultiGpuConfig* c,
                                     cudaStream_t stream) {
#ifdef MULTI_GPU
    if (c->num_processes == 1) return;
    CUDA(cudaEventRecord(c->compute_nccl_sync, stream));
    CUDA(cudaStreamWaitEvent(c->nccl_stream, c->compute_nccl_sync, 0));
    NCCL(ncclGroupStart());
    for (int i = 0; i < N; i++) {
        const ShardInfo own = multi_gpu_get_shard_offset(counts[i], c);
        NCCL(c->zero_stage ? ncclReduceScatter(parts[i], parts[i] + own.offset, own.size, ncclFloatX, ncclAvg,
                                                    c->nccl_comm, c->nccl_stream)
                                : ncclAllReduce(parts[i], parts[i], counts[i], ncclFloatX, ncclAvg,
                                                c->nccl_comm, c->nccl_stream));
    }
    NCCL(ncclGroupEnd());
#else
    (void)parts, (void)counts, (void)c, (void)stream;
#endif
}

// Stage 1 only where every tensor divides by the ranks: with 24 channels and 2, 3, 4, ... ranks.
inline void set_zero_configs(MultiGpuConfig* c, int wanted, size_t total)
{
    c->zero_stage = wanted == 1 && total % 24 == 0 && 24 % c->num_processes == 0;
    c->shard_num_parameters = c->zero_stage ? total / c->num_processes : total;
    printf0("stage %d\n", c->zero_stage);
}
