/* test/train_program.cu - runs many train_mlp command lines in one process per rank, because starting the ranks costs
   far more than a small run.

       mpirun -np N build/test/train_program FILE

   Each line of FILE is "[NAME=VALUE ...] flags": the names are set in the environment for that run alone, and the CPU
   build of CUDA reads its environment anew before each run. Rank 0 prints "line K: ok" or "line K: error: TEXT".
   POISON=SAMPLE,... : the gradients of micro-batches that begin with these samples (-I split) are not finite. */
#include "../dev/mlp/loss.cuh"

static uint64_t poisoned_first; /* sample of the micro-batch at hand */

static int is_poisoned(void) {
    const char* list = getenv("POISON");
    for (char* end; list && *list; list = *end ? end + 1 : end)
        if (strtoull(list, &end, 10) == poisoned_first) return 1;
    return 0;
}
static ZeroResult poisoned_split(ZeroDtype dtype, void* x, void* y, int batch, int width, uint64_t seed,
                                 uint64_t first, cudaStream_t stream) {
    poisoned_first = first;
    return data_split(dtype, x, y, batch, width, seed, first, stream);
}
static ZeroResult poisoned_loss(ZeroDtype dtype, const void* y, const void* target, void* y_grad,
                                size_t count, double* loss, cudaStream_t stream) {
    ZERO_TRY(loss_run(dtype, y, target, y_grad, count, loss, stream));
    if (is_poisoned()) ZERO_TRY_CUDA(cudaMemsetAsync(y_grad, 0xff, 4 * zero_dtype_bytes(dtype), stream));
    return zero_ok();
}
#define data_split poisoned_split
#define loss_run poisoned_loss
#define TRAIN_MLP_NO_MAIN
#include "../train_mlp.cu"

#define LINE_MAX_BYTES 4096
#define WORDS_MAX 128

static int split_words(char* line, char** words) {
    int count = 0;
    for (char* word = strtok(line, " \n"); word && count < WORDS_MAX; word = strtok(NULL, " \n"))
        words[count++] = word;
    return count;
}

#ifdef CUDA_CPU
extern "C" size_t cudaCpuLiveBytes(void);
#endif

/* One line. The words before the first flag are settings. */
static ZeroResult run_line(ZeroWorld* world, int number, char* line, int* fatal) {
    char* words[WORDS_MAX + 1];
    char program[] = "train_mlp";
    int count = split_words(line, words), settings = 0;
    Options options;
    while (settings < count && strchr(words[settings], '=') && words[settings][0] != '-') {
        char* value = strchr(words[settings], '=');
        *value = '\0';
        setenv(words[settings++], value + 1, 1);
    }
#ifdef CUDA_CPU
    cudaDeviceReset();
    const size_t live_before = cudaCpuLiveBytes();
#endif
    ZeroResult result = zero_ok();
    {
        char* arguments[WORDS_MAX + 1] = {program};
        for (int i = settings; i < count; i++) arguments[i - settings + 1] = words[i];
        result = options_parse(&options, count - settings + 1, arguments);
        if (result.code == ZERO_OK) result = options_check(&options, world->ranks);
        if (result.code == ZERO_OK) result = train(world, &options, fatal);
    }
#ifdef CUDA_CPU
    if (result.code == ZERO_OK && cudaCpuLiveBytes() != live_before)
        result = zero_error(ZERO_ERROR_MEMORY, "%zu bytes of device memory were not freed",
                            cudaCpuLiveBytes() - live_before);
#endif
    for (int i = 0; i < settings; i++) unsetenv(words[i]);
    if (world->rank == 0) {
        if (result.code == ZERO_OK)
            printf("line %d: ok\n", number);
        else
            printf("line %d: error: %s\n", number, result.text);
        fflush(stdout);
    }
    return result;
}

int main(int argc, char** argv) {
    ZeroWorld world;
    ZeroWorldConfig config;
    char line[LINE_MAX_BYTES];
    int fatal = 0;
    memset(&config, 0, sizeof(config));
    ZeroResult result = zero_world_start(&world, &config, &argc, &argv);
    if (result.code == ZERO_OK) result = zero_world_device(&world);
    FILE* file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (result.code == ZERO_OK && !file) result = zero_error(ZERO_ERROR_SYSTEM, "usage: train_program FILE");
    if (result.code != ZERO_OK) {
        fprintf(stderr, "%s\n", result.text);
        zero_world_abort(&world, 1);
        return 1;
    }
    for (int number = 1; fgets(line, sizeof(line), file) && !fatal; number++)
        if (line[0] != '\n' && line[0] != '#') run_line(&world, number, line, &fatal);
    fclose(file);
    if (fatal) {
        zero_world_abort(&world, 1);
        _exit(1);
    }
    zero_world_finish(&world);
    return 0;
}
