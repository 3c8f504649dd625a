/* test/world_program.cu - a small program for several ranks; test_world.py starts it in every way.

   world_program METHOD FOLDER RANKS RANK TIMEOUT_S GPUS_PER_NODE ACTION [ARGUMENT]
       METHOD mpi or fs; the next three mean nothing to mpi. Prints one line a rank; errors go to stderr.
   ids       start, gather in several sizes, agree, finish
   fail R    ranks of the string R (like "13") hand an error of their own to agree; "=" all, the same text
   abort R   rank R leaves with zero_world_abort(3) while the others gather
   gather S  gathers until it is killed, with a time limit of S seconds, if given, from the first gather on
   device    rank, device, an all-reduce and zero_world_wait
   loop      all-reduces until it is killed
   stuck     rank 0 waits for a stream that is never done; the others sleep until they are killed
   caller    the program itself starts and ends MPI, before and after
*/
#include <stdlib.h>
/* WORLD_NO_LOCKS=1: as in a folder without file locks; WORLD_PATIENCE: seconds */
#define ZERO_WORLD_LOCK_COMMAND (getenv("WORLD_NO_LOCKS") != NULL ? -1 : F_OFD_SETLK)
#define ZERO_WORLD_PATIENCE (getenv("WORLD_PATIENCE") != NULL ? atof(getenv("WORLD_PATIENCE")) : 2.0)
#include <cuda_runtime.h>
/* a stream that is never done, on every device */
static int never_done;
#define cudaStreamQuery(stream) (never_done ? cudaErrorNotReady : cudaStreamQuery(stream))
#include "../llmc_zero/world.cuh"

static ZeroResult wrong(int line) { return zero_error(ZERO_ERROR_ORDER, "wrong result, line %d", line); }

/* Values of several sizes, several rounds: rank order and every byte. */
static ZeroResult gather_rounds(ZeroWorld* world, int rounds) {
    static const int sizes[] = {1, 4, 253, 4096};
    unsigned char mine[4096];
    unsigned char* all = (unsigned char*)malloc(4096 * (size_t)world->ranks);
    for (int i = 0; i < rounds; i++) {
        int bytes = sizes[i % 4];
        for (int k = 0; k < bytes; k++) mine[k] = (unsigned char)(world->rank * 31 + i * 7 + k);
        ZERO_TRY(zero_world_gather(world, mine, (size_t)bytes, all));
        for (int r = 0; r < world->ranks; r++)
            for (int k = 0; k < bytes; k++)
                if (all[r * bytes + k] != (unsigned char)(r * 31 + i * 7 + k)) return wrong(__LINE__);
    }
    free(all);
    return zero_ok();
}

static ZeroResult fail_some(ZeroWorld* world, const char* who) {
    char mine[16];
    snprintf(mine, sizeof(mine), "%d", world->rank);
    ZeroResult result = zero_ok();
    if (*who == '=')
        result = zero_error(ZERO_ERROR_MEMORY, "all alike");
    else if (strstr(who, mine) != NULL)
        result = zero_error(ZERO_ERROR_MEMORY, "trouble of rank %d", world->rank);
    result = zero_world_agree(world, result);
    if (result.code != ZERO_OK && result.code != ZERO_ERROR_MEMORY) return wrong(__LINE__);
    ZERO_TRY(zero_world_agree(world, zero_ok())); /* and the world still works */
    return result;
}

#ifndef ZERO_NO_NCCL
static ZeroResult all_reduce(ZeroWorld* world, int times) {
    float value = (float)(world->rank + 1);
    float *data, *sum; // pinned: a copy to other memory waits inside CUDA, where nobody looks at the peers
    cudaStream_t stream;
    ZERO_TRY_CUDA(cudaStreamCreate(&stream));
    ZERO_TRY_CUDA(cudaMalloc((void**)&data, 2 * sizeof(float)));
    ZERO_TRY_CUDA(cudaMallocHost((void**)&sum, sizeof(*sum)));
    for (int i = 0; i < times; i++) {
        ZERO_TRY_CUDA(cudaMemcpyAsync(data, &value, sizeof(value), cudaMemcpyHostToDevice, stream));
        ZERO_TRY_NCCL(ncclAllReduce(data, data + 1, 1, ncclFloat32, ncclSum, world->comm, stream));
        ZERO_TRY_CUDA(cudaMemcpyAsync(sum, data + 1, sizeof(*sum), cudaMemcpyDeviceToHost, stream));
        ZERO_TRY(zero_world_wait(world, stream));
        if (*sum != (float)(world->ranks * (world->ranks + 1) / 2)) return wrong(__LINE__);
        if (i == 20) fprintf(stderr, "running %d\n", (int)getpid());
        if (i > 20) usleep(1000);
    }
    ZERO_TRY_CUDA(cudaFree(data));
    ZERO_TRY_CUDA(cudaFreeHost(sum));
    ZERO_TRY_CUDA(cudaStreamDestroy(stream));
    return zero_ok();
}
#endif

/* NCCL sees nothing here, so only the look at the peers, or the time limit, can end the wait. */
static ZeroResult stuck(ZeroWorld* world) {
    fprintf(stderr, "running %d\n", (int)getpid());
    while (world->rank > 0) pause();
    never_done = 1;
    return zero_world_wait(world, 0);
}

static ZeroResult act(ZeroWorld* world, const char* action, const char* argument) {
    if (strcmp(action, "fail") == 0) return fail_some(world, argument);
    if (strcmp(action, "gather") == 0) {
        if (*argument) world->timeout_s = atof(argument);
        fprintf(stderr, "running %d\n", (int)getpid());
        return gather_rounds(world, 1 << 30);
    }
    if (strcmp(action, "abort") == 0) {
        if (world->rank == atoi(argument)) return zero_error(ZERO_ERROR_ORDER, "leaving on purpose");
        return gather_rounds(world, 8);
    }
#ifndef ZERO_NO_NCCL
    if (strcmp(action, "device") == 0 || strcmp(action, "loop") == 0 || strcmp(action, "stuck") == 0) {
        ZERO_TRY(zero_world_device(world));
        int device = -1;
        ZERO_TRY_CUDA(cudaGetDevice(&device));
        if (device != world->device) return wrong(__LINE__);
        if (strcmp(action, "stuck") == 0) return stuck(world);
        return all_reduce(world, strcmp(action, "loop") == 0 ? 1 << 30 : 3);
    }
#endif
    ZERO_TRY(gather_rounds(world, 13));
    ZERO_TRY(zero_world_agree(world, zero_ok()));
    if (zero_world_gather(world, "", 0, NULL).code != ZERO_ERROR_ARGUMENT) return wrong(__LINE__);
    return zero_ok();
}

int main(int argc, char** argv) {
    ZeroWorld world;
    ZeroWorldConfig config = {};
    if (argc < 8) return 2;
    const char* action = argv[7];
    const char* argument = argc > 8 ? argv[8] : "";
    config.method = argv[1], config.fs_path = argv[2];
    config.ranks = atoi(argv[3]), config.rank = atoi(argv[4]);
    config.timeout_s = atof(argv[5]), config.gpus_per_node = atoi(argv[6]);
#ifdef ZERO_USE_MPI
    if (strcmp(action, "caller") == 0) MPI_Init(&argc, &argv);
#endif
    ZeroResult result = zero_world_start(&world, &config, &argc, &argv);
    if (result.code != ZERO_OK) {
        fprintf(stderr, "%s\n", result.text);
        zero_world_abort(&world, 1);
        return 1;
    }
    result = act(&world, action, argument);
    if (result.code != ZERO_OK) fprintf(stderr, "%s\n", result.text);
    /* of the actions only these end in an error that all ranks agreed on */
    if (result.code != ZERO_OK && strcmp(action, "fail") != 0 && strcmp(action, "device") != 0) {
        zero_world_abort(&world, 3);
        _exit(3);
    }
    if (result.code == ZERO_OK)
        printf("rank %d of %d local %d of %d device %d\n", world.rank, world.ranks, world.local_rank,
               world.local_ranks, world.device);
    zero_world_finish(&world);
#ifdef ZERO_USE_MPI
    if (strcmp(action, "caller") == 0) {
        int ended = 1;
        if (MPI_Finalized(&ended) != MPI_SUCCESS || ended) return 4;
        if (MPI_Barrier(MPI_COMM_WORLD) != MPI_SUCCESS) return 5;
        MPI_Finalize();
    }
#endif
    return result.code != ZERO_OK;
}
