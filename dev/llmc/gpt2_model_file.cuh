/* llmc_zero/gpt2_model_file.cuh - parameters in llm.c's order, tensor by tensor: to and from model files, host memory.

   In stage 3 each unit is gathered for whoever wants it, so all ranks take part. Part of gpt2.cuh, which includes it.
*/
#ifndef LLMC_ZERO_GPT2_MODEL_FILE_CUH_INCLUDED
#define LLMC_ZERO_GPT2_MODEL_FILE_CUH_INCLUDED

typedef enum ZeroGpt2Direction { ZERO_GPT2_TO_HOST, ZERO_GPT2_FROM_HOST } ZeroGpt2Direction;

/* Copies elements first .. first + count - 1 of the model, in llm.c's order, between host memory and the parameters,
   or with flat a flat device buffer, on main_stream. Pinned host memory: asynchronous. In stage 3 all ranks call it. */
static inline void zero_gpt2_copy(ZeroGpt2* zero, void* flat, size_t first, size_t count, void* host,
                                  ZeroGpt2Direction direction) {
    const ZeroLayout* layout = &zero->layout;
    int open = ZERO_NO_UNIT;
    zero_gpt2_close(zero, ZERO_NO_UNIT);
    for (int s = 0; s < layout->segments_count; s++) {
        const ZeroSegment* segment = &layout->segments[s];
        const size_t begin = segment->model_offset > first ? segment->model_offset : first;
        const size_t segment_end = segment->model_offset + segment->count;
        const size_t end = segment_end < first + count ? segment_end : first + count;
        if (begin >= end) continue;
        const size_t skip = begin - segment->model_offset;
        floatX* place = (floatX*)host + (begin - first);
        void* device = flat ? (floatX*)flat + segment->flat_offset : NULL;
        if (direction == ZERO_GPT2_FROM_HOST) {
            zeroCheck(zero_params_write(&zero->z, s, skip, end - begin, place));
            continue;
        }
        if (!flat) zeroCheck(zero_params_visit(&zero->z, s, &open, &device));
        cudaCheck(cudaMemcpyAsync(place, (floatX*)device + skip, (end - begin) * sizeof(floatX),
                                  cudaMemcpyDeviceToHost, main_stream));
    }
    zeroCheck(zero_params_leave(&zero->z, &open));
}

/* Parameters between the device and a file, in llm.c's order, through two pinned buffers of IO_BUF_SIZE bytes: the
   file works on one while the device works on the other. file NULL: takes part in the gathers only. */
static inline void zero_gpt2_params_and_file(GPT2* model, FILE* file, ZeroGpt2Direction direction) {
    const size_t all = model->zero->layout.model_count, step = IO_BUF_SIZE / sizeof(floatX);
    const size_t bytes = (all < step ? all : step) * sizeof(floatX);
    ZeroComm* comm = &model->zero->z.comm;
    char* buffers[2];
    cudaEvent_t done[2];
    for (int i = 0; i < 2; i++) {
        cudaCheck(cudaMallocHost((void**)&buffers[i], bytes));
        cudaCheck(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    }
    size_t previous = 0; /* elements of the piece before this one */
    int turn = 0;
    for (size_t first = 0; first < all; first += step, turn = !turn) {
        const size_t count = all - first < step ? all - first : step;
        if (direction == ZERO_GPT2_FROM_HOST) {
            /* the copy out of this buffer; at once in the first two turns */
            zeroCheck(zero_wait_event(comm, done[turn]));
            freadCheck(buffers[turn], sizeof(floatX), count, file);
        }
        zero_gpt2_copy(model->zero, NULL, first, count, buffers[turn], direction);
        cudaCheck(cudaEventRecord(done[turn], main_stream));
        if (direction == ZERO_GPT2_TO_HOST && previous > 0) {
            zeroCheck(zero_wait_event(comm, done[!turn]));
            if (file) fwriteCheck(buffers[!turn], sizeof(floatX), previous, file);
        }
        previous = count;
    }
    zeroCheck(zero_comm_drain(comm));
    if (direction == ZERO_GPT2_TO_HOST && previous > 0 && file)
        fwriteCheck(buffers[!turn], sizeof(floatX), previous, file);
    for (int i = 0; i < 2; i++) {
        cudaCheck(cudaFreeHost(buffers[i]));
        cudaCheck(cudaEventDestroy(done[i]));
    }
}

static inline void zero_gpt2_params_to_file(GPT2* model, FILE* file) {
    zero_gpt2_params_and_file(model, file, ZERO_GPT2_TO_HOST);
}
/* On the ranks that do not write the model file: in stage 3 each unit has to be gathered for the one that does. */
static inline void zero_gpt2_join_params_to_file(GPT2* model) {
    if (model->zero->z.schedule.params_sharded) zero_gpt2_params_and_file(model, NULL, ZERO_GPT2_TO_HOST);
}
/* Whether this rank samples: rank 0, in stage 3 all of them, because each forward gathers. */
static inline int zero_gpt2_samples(const GPT2* model) {
    return multi_gpu_config.process_rank == 0 || model->zero->z.schedule.params_sharded;
}
/* Every rank reads the whole file. */
static inline void zero_gpt2_params_from_file(GPT2* model, FILE* file) {
    zero_gpt2_params_and_file(model, file, ZERO_GPT2_FROM_HOST);
}

static inline void zero_gpt2_params_from_host(GPT2* model, void* params) {
    zero_gpt2_copy(model->zero, NULL, 0, model->zero->layout.model_count, params, ZERO_GPT2_FROM_HOST);
    zeroCheck(zero_comm_drain(&model->zero->z.comm));
}

/* The mean gradient over the ranks, before clipping, in llm.c's order; for a test to look at. With -z 1 this rank has
   the mean in its own slices only. */
static inline void zero_gpt2_grads_to_host(GPT2* model, void* grads) {
    const size_t count = model->zero->layout.model_count;
    if (model->zero->stage > 1)
        zeroCheck(zero_error(ZERO_ERROR_ARGUMENT, "-z %d never holds all gradients; -z 0 does",
                             model->zero->stage));
    zeroCheck(zero_grad_norm(&model->zero->z, NULL)); /* all reductions are done behind this */
    zero_gpt2_copy(model->zero, model->grads_memory, 0, count, grads, ZERO_GPT2_TO_HOST);
    zeroCheck(zero_comm_drain(&model->zero->z.comm));
    for (size_t i = 0; multi_gpu_config.num_processes > 1 && i < count; i++)
        ((floatX*)grads)[i] = (floatX)((float)((floatX*)grads)[i] / (float)multi_gpu_config.num_processes);
}

#endif /* LLMC_ZERO_GPT2_MODEL_FILE_CUH_INCLUDED */
