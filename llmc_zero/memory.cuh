/* llmc_zero/memory.cuh - how many bytes a rank needs (plan) and holds (report). Host only, C99 and C++.

       ZeroMemory memory = zero_memory();
       zero_memory_add(&memory, ZERO_MEMORY_ACTIVATIONS, bytes);      // after each allocation
       ... zero_memory_total(&memory), memory.peak_bytes ...

       ZeroPlan plan;
       ZeroResult r = zero_plan(&plan, &layout, &choice);             // before anything is allocated

   An optimizer given a ZeroMemory counts what it allocates there; the plan counts the same things, so that the two
   agree. Bytes are what was asked of cudaMalloc; NCCL's own buffers and the CUDA context are not in it.

   defines: ZeroAlgorithm, ZeroReduction, ZeroAccumulation, ZeroMemoryKind, ZeroMemory, zero_memory, zero_memory_add,
            zero_memory_total, ZeroPlanChoice, ZeroPlan, zero_plan, zero_plan_total, zero_norm_blocks
*/
#ifndef LLMC_ZERO_MEMORY_CUH_INCLUDED
#define LLMC_ZERO_MEMORY_CUH_INCLUDED

#include "layout.cuh"

typedef enum ZeroAlgorithm { ZERO_ADAMW = 0, ZERO_ADAM = 1, ZERO_SGD = 2 } ZeroAlgorithm;

typedef enum ZeroReduction {
    ZERO_REDUCE_NCCL = 0, /* ncclReduceScatter in the gradients' type; stage 0 then gathers the sums */
    ZERO_REDUCE_ORDERED,  /* not in this version */
    ZERO_REDUCE_ALLREDUCE /* ncclAllReduce, stage 0 only: the usual way, to compare with */
} ZeroReduction;

typedef enum ZeroAccumulation {
    ZERO_ACCUMULATE_STEP = 0, /* micro-steps add up in the caller's gradients, one reduction at the last */
    ZERO_ACCUMULATE_MICRO     /* not in this version */
} ZeroAccumulation;

typedef enum ZeroMemoryKind {
    ZERO_MEMORY_PARAMS = 0,
    ZERO_MEMORY_GRADS,
    ZERO_MEMORY_STATE,       /* m, v, masters */
    ZERO_MEMORY_SCRATCH,     /* chunk tables, partial sums, scalars */
    ZERO_MEMORY_ACTIVATIONS, /* the caller's: activations and workspace */
    ZERO_MEMORY_KINDS
} ZeroMemoryKind;

typedef struct ZeroMemory {
    size_t held_bytes[ZERO_MEMORY_KINDS];
    size_t peak_bytes; /* of the sum */
} ZeroMemory;

static inline ZeroMemory zero_memory(void) {
    ZeroMemory memory;
    memset(&memory, 0, sizeof(memory));
    return memory;
}

static inline size_t zero_memory_total(const ZeroMemory* memory) {
    size_t total = 0;
    int kind;
    for (kind = 0; kind < ZERO_MEMORY_KINDS; kind++) total += memory->held_bytes[kind];
    return total;
}

/* Counts an allocation. memory may be NULL (nobody asked). */
static inline void zero_memory_add(ZeroMemory* memory, ZeroMemoryKind kind, size_t bytes) {
    size_t total;
    if (!memory) return;
    memory->held_bytes[kind] += bytes;
    total = zero_memory_total(memory);
    if (total > memory->peak_bytes) memory->peak_bytes = total;
}

/* Counts a release. */
static inline void zero_memory_remove(ZeroMemory* memory, ZeroMemoryKind kind, size_t bytes) {
    if (memory) memory->held_bytes[kind] -= bytes;
}

/* What the bytes depend on, besides the layout. */
typedef struct ZeroPlanChoice {
    int rank;
    int stage; /* 0 or 1 */
    ZeroAlgorithm algorithm;
    double momentum; /* SGD without momentum keeps no state */
    int masters;     /* fp32 masters beside bf16 params */
} ZeroPlanChoice;

typedef struct ZeroPlan {
    size_t params_bytes, grads_bytes, state_bytes, scratch_bytes;
} ZeroPlan;

static inline size_t zero_plan_total(const ZeroPlan* plan) {
    return plan->params_bytes + plan->grads_bytes + plan->state_bytes + plan->scratch_bytes;
}

/* How many fp32 numbers an optimizer keeps for each parameter: m and v (2), SGD's m (1), plus masters. */
static inline int zero_state_arrays(ZeroAlgorithm algorithm, double momentum, ZeroDtype dtype, int masters) {
    int arrays = algorithm == ZERO_SGD ? (momentum != 0.0) : 2;
    return arrays + (dtype == ZERO_BF16 && masters);
}

/* Elements of each state array: the shard, or everything in stage 0. */
static inline size_t zero_state_count(const ZeroLayout* layout, int stage) {
    return stage == 0 ? zero_padded_count(layout) : zero_shard_count(layout);
}

#define ZERO_SCALARS_BYTES 256 /* one block of device scalars */

#define ZERO_NORM_BLOCKS_MAX 1024 /* partial sums of squares, one a block: one wave on a large GPU */
static inline size_t zero_norm_blocks(size_t chunks_count) {
    return chunks_count < ZERO_NORM_BLOCKS_MAX ? chunks_count : ZERO_NORM_BLOCKS_MAX;
}

/* Scratch of a rank: its chunk table, in stage 0 that of the whole model too, the fp64 partial sums of the norm, the
   scalars, and two fp64 numbers to send and two from each rank (one rank sends none). */
static inline size_t zero_scratch_bytes(const ZeroLayout* layout, int rank, int stage) {
    size_t own = zero_walk_chunks(layout, rank, ZERO_CHUNK_MAX_COUNT, NULL, NULL);
    size_t all = stage == 0 && layout->ranks > 1
                     ? zero_walk_chunks(layout, ZERO_ALL_RANKS, ZERO_CHUNK_MAX_COUNT, NULL, NULL)
                     : 0;
    return (own + all) * sizeof(ZeroChunk) + zero_norm_blocks(own) * sizeof(double) + ZERO_SCALARS_BYTES +
           2 * sizeof(double) * (layout->ranks > 1 ? (size_t)layout->ranks + 1 : 1);
}

/* The bytes that a rank will hold. The README has the table. */
static inline ZeroResult zero_plan(ZeroPlan* plan, const ZeroLayout* layout, const ZeroPlanChoice* choice) {
    size_t flat_bytes = zero_padded_count(layout) * zero_dtype_bytes(layout->dtype);
    memset(plan, 0, sizeof(*plan));
    if (choice->stage != 0 && choice->stage != 1)
        return zero_error(ZERO_ERROR_ARGUMENT, "stage %d is not in this version; 0 and 1 are", choice->stage);
    if (choice->rank < 0 || choice->rank >= layout->ranks)
        return zero_error(ZERO_ERROR_ARGUMENT, "rank %d; the layout has %d ranks", choice->rank,
                          layout->ranks);
    plan->params_bytes = flat_bytes;
    plan->grads_bytes = flat_bytes;
    plan->state_bytes =
        zero_state_count(layout, choice->stage) * sizeof(float) *
        (size_t)zero_state_arrays(choice->algorithm, choice->momentum, layout->dtype, choice->masters);
    plan->scratch_bytes = zero_scratch_bytes(layout, choice->rank, choice->stage);
    return zero_ok();
}

#endif /* LLMC_ZERO_MEMORY_CUH_INCLUDED */
