/* llmc_zero/memory.cuh - how many bytes a rank needs (plan) and holds (report). Host only, C99 and C++.

       ZeroMemory memory = zero_memory();
       zero_memory_add(&memory, ZERO_MEMORY_ACTIVATIONS, bytes);      // after each allocation
       ... zero_memory_total(&memory), memory.peak_bytes ...

       ZeroPlan plan;
       ZeroResult r = zero_plan(&plan, &layout, &choice);             // before anything is allocated

   An optimizer given a ZeroMemory counts what it allocates there; the plan counts the same things, so that the two
   agree. Bytes are what was asked of cudaMalloc; NCCL's own buffers and the CUDA context are not in it.

   defines: ZeroMemoryKind, ZeroMemory, zero_memory, zero_memory_add, zero_memory_total, ZeroPlan, zero_plan,
            zero_plan_total, zero_params_bytes, zero_grads_bytes, zero_state_count
*/
#ifndef LLMC_ZERO_MEMORY_CUH_INCLUDED
#define LLMC_ZERO_MEMORY_CUH_INCLUDED

#include "schedule.cuh"

typedef enum ZeroMemoryKind {
    ZERO_MEMORY_PARAMS = 0,
    ZERO_MEMORY_GRADS,
    ZERO_MEMORY_STATE,       /* m, v, masters */
    ZERO_MEMORY_SCRATCH,     /* chunk tables, scalars, sums */
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

static inline size_t zero_flat_bytes(const ZeroLayout* layout) {
    return zero_padded_count(layout) * zero_dtype_bytes(layout->dtype);
}
/* The parameters themselves: flat, or the shard; slots are extra. */
static inline size_t zero_params_bytes(const ZeroSchedule* s, const ZeroLayout* layout) {
    return zero_flat_bytes(layout) / (s->params_sharded ? (size_t)layout->ranks : 1);
}
static inline size_t zero_params_slots_bytes(const ZeroSchedule* s, const ZeroLayout* layout) {
    if (!s->params_sharded) return 0;
    return ((size_t)s->params_slots * s->params_slot_count + s->held_count) * zero_dtype_bytes(layout->dtype);
}
/* Gradients as backward writes them: flat, or slots. The shard of their sums is extra. */
static inline size_t zero_grads_bytes(const ZeroSchedule* s, const ZeroLayout* layout, int stage) {
    if (stage < 2) return zero_flat_bytes(layout);
    return ((size_t)s->grads_slots * s->grads_slot_count + s->held_count) * zero_dtype_bytes(layout->dtype);
}
static inline size_t zero_sums_bytes(const ZeroSchedule* s, const ZeroLayout* layout) {
    return s->sums_sharded ? zero_shard_count(layout) * sizeof(float) : 0;
}

#define ZERO_SUMS_BYTES \
    512 /* the numbers that ranks add up in a step: room for this rank's, and for all ranks' */

/* Two words of each rank, to compare them. */
static inline size_t zero_words_bytes(const ZeroLayout* layout) {
    return 2 * sizeof(uint64_t) * (size_t)layout->ranks;
}

/* Scratch of a rank: its chunk table, in stage 0 that of the whole model too, the scalars, what ranks add up and compare, and
   room for what arrives of gradients or sums. */
static inline size_t zero_scratch_bytes(const ZeroSchedule* s, const ZeroLayout* layout, int rank,
                                        int stage) {
    const size_t own = zero_walk_chunks(layout, rank, ZERO_CHUNK_MAX_COUNT, NULL, NULL);
    size_t all = 0;
    if (s->sums_gather)
        zero_walk_windows(layout, s->window_count, NULL, NULL, &all);
    else if (stage == 0 && layout->ranks > 1)
        all = zero_walk_chunks(layout, ZERO_ALL_RANKS, ZERO_CHUNK_MAX_COUNT, NULL, NULL);
    return (own + all) * sizeof(ZeroChunk) + ZERO_SCALARS_BYTES + 2 * ZERO_SUMS_BYTES +
           zero_words_bytes(layout) + s->scratch_bytes;
}

/* The bytes that a rank will hold. The README has the table. */
static inline ZeroResult zero_plan(ZeroPlan* plan, const ZeroLayout* layout, const ZeroPlanChoice* choice) {
    ZeroSchedule s;
    memset(plan, 0, sizeof(*plan));
    ZERO_TRY(zero_schedule(&s, layout, choice));
    plan->params_bytes = zero_params_bytes(&s, layout) + zero_params_slots_bytes(&s, layout);
    plan->grads_bytes = zero_grads_bytes(&s, layout, choice->stage) + zero_sums_bytes(&s, layout);
    plan->state_bytes =
        zero_state_count(layout, choice->stage) * sizeof(float) *
        (size_t)zero_state_arrays(choice->algorithm, choice->momentum, layout->dtype, choice->masters);
    plan->scratch_bytes = zero_scratch_bytes(&s, layout, choice->rank, choice->stage);
    return zero_ok();
}

#endif /* LLMC_ZERO_MEMORY_CUH_INCLUDED */
