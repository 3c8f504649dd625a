/* test/save_program.cu - how long a checkpoint takes, what it reads and writes, and how much host memory: 80,040,000
   parameters with Adam's state, the recipe's model, saved and loaded.

       mpirun -np N build/test/save_program FILE

   It saves to a new name, loads, saves over that file, and loads. Prints the seconds, the bytes that all ranks wrote and
   read, and how much a process's own memory grew meanwhile at most, the largest of all ranks. Own (RssAnon): in the CPU
   build device memory is shared memory, which a rank maps when it gathers from another for the first time; that is
   counted beside it (RssShmem). */
#include <unistd.h>
#include <atomic>
#include <thread>

static std::atomic<size_t> bytes_written{0}, bytes_read{0};
static ssize_t counted(std::atomic<size_t>& sum, ssize_t n) {
    if (n > 0) sum += (size_t)n;
    return n;
}
#define pwrite(...) counted(bytes_written, (pwrite)(__VA_ARGS__))
#define pread(...) counted(bytes_read, (pread)(__VA_ARGS__))

#include "../llmc_zero/checkpoint.cuh"
#include "../llmc_zero/llmc_zero.cuh"
#include "../llmc_zero/world.cuh"

enum { LAYERS = 20, WIDTH = 2000 };

/* Bytes of a line of /proc/self/status. */
static double memory_of(const char* key) {
    char line[256];
    double kilobytes = 0.0;
    FILE* file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof(line), file))
        if (strncmp(line, key, strlen(key)) == 0) kilobytes = atof(line + strlen(key) + 1);
    if (file) fclose(file);
    return 1024.0 * kilobytes;
}

/* Looks every 2 ms; what is allocated and freed again within less is not seen. */
struct Measure {
    double start = zero_world_now(), own = memory_of("RssAnon"), shared = memory_of("RssShmem"), most = 0.0;
    std::atomic<int> stop{0};
    std::thread watch{[this]() {
        while (!stop) {
            most = std::max(most, memory_of("RssAnon") - own);
            usleep(2000);
        }
    }};
    ZeroResult end(ZeroWorld* world, const char* what) {
        double mine[5] = {zero_world_now() - start}, all[5 * 64], largest[3] = {}, sum[2] = {};
        stop = 1;
        watch.join();
        mine[1] = most, mine[2] = memory_of("RssShmem") - shared;
        mine[3] = (double)bytes_written.exchange(0), mine[4] = (double)bytes_read.exchange(0);
        if (world->ranks > 64) return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks; at most 64", world->ranks);
        ZERO_TRY(zero_world_gather(world, mine, sizeof(mine), all));
        for (int i = 0; i < 5 * world->ranks; i++)
            if (i % 5 < 3)
                largest[i % 5] = std::max(largest[i % 5], all[i]);
            else
                sum[i % 5 - 3] += all[i];
        if (world->rank == 0)
            printf(
                "%s: %.3f s: written %.1f MB, read %.1f MB, host memory + %.1f MB a rank, shared + %.1f MB\n",
                what, largest[0], 1e-6 * sum[0], 1e-6 * sum[1], 1e-6 * largest[1], 1e-6 * largest[2]);
        fflush(stdout);
        return zero_ok();
    }
};

static ZeroResult run(ZeroWorld* world, const char* path) {
    ZeroSegment segments[2 * LAYERS];
    ZeroTensor tensors[2 * LAYERS];
    char names[2 * LAYERS][24];
    ZeroLayout layout;
    ZeroLayoutConfig layout_config = zero_layout_config(world->ranks, ZERO_FP32);
    ZeroConfig config = zero_config();
    ZeroOptimizer z;
    ZeroCheckpoint what = zero_checkpoint();
    for (int s = 0; s < 2 * LAYERS; s++) {
        snprintf(names[s], sizeof(names[s]), "%d.%s", s / 2, s % 2 ? "bias" : "weight");
        segments[s] = zero_segment(names[s], s % 2 ? WIDTH : WIDTH * WIDTH, s / 2);
        tensors[s] = {names[s], s, 1, s % 2 ? 1 : 2, {WIDTH, WIDTH}};
    }
    what.tensors = tensors, what.tensors_count = 2 * LAYERS;
    ZERO_TRY(zero_layout(&layout, segments, 2 * LAYERS, &layout_config));
    ZERO_TRY(zero_init(&z, &config, &layout, world->rank, world->comm, NULL, NULL));
    ZERO_TRY(zero_alloc_params(&z, NULL));
    ZERO_TRY(zero_alloc_state(&z));
    ZERO_TRY(zero_comm_drain(&z.comm));
    for (int turn = 0; turn < 2; turn++) {
        ZERO_TRY(zero_world_agree(world, zero_ok()));
        Measure save;
        ZeroResult result = zero_checkpoint_save(&z, path, &what);
        ZERO_TRY(save.end(world, turn ? "save over it" : "save"));
        ZERO_TRY(result);
        Measure load;
        result = zero_checkpoint_load(&z, path, &what, NULL);
        ZERO_TRY(load.end(world, "load"));
        ZERO_TRY(result);
    }
    zero_free(&z);
    zero_layout_free(&layout);
    return zero_ok();
}

int main(int argc, char** argv) {
    ZeroWorld world;
    ZeroWorldConfig config = {};
    ZeroResult result = zero_world_start(&world, &config, &argc, &argv);
    if (result.code == ZERO_OK) result = zero_world_device(&world);
    if (result.code == ZERO_OK && argc != 2)
        result = zero_error(ZERO_ERROR_ARGUMENT, "usage: save_program FILE");
    if (result.code == ZERO_OK) result = run(&world, argv[1]);
    if (result.code != ZERO_OK) {
        fprintf(stderr, "save_program: %s\n", result.text);
        zero_world_abort(&world, 1);
        return 1;
    }
    zero_world_finish(&world);
    return 0;
}
