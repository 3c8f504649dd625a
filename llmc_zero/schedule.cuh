/* llmc_zero/schedule.cuh - which buffers a run holds and how gradients travel, from the layout and the choices. Host only,
   C99 and C++. zero_init builds what this says and zero_plan counts it, so the two agree.

   Where the gradients' sums over the ranks (and micro-steps) lie:
     in the gradients themselves   stages 0 and 1 with -A step: the own slice, in the gradients' type (with ordered in fp32
                                   only)
     in an fp32 shard              stages 2 and 3; -A micro; bf16 with ordered. Our kernel makes the sums there
   In stages 2 and 3 gradients, and in stage 3 parameters, exist a unit at a time, in slots: two common ones as large as the
   largest unit (gradients: one without overlap), and one for each held unit, which stays open across others (a tied
   embedding). So a bucket must not hold parts of two units there (ZeroLayoutConfig.units_apart).

   Sums are made a piece at a time: elements [first, first + count) of this rank's slice of a bucket, so that the scratch for
   what arrives from the others stays small. A piece is cut into the chunks of the chunk table.

   defines: ZeroAlgorithm, ZeroReduction, ZeroAccumulation, ZeroPlanChoice, ZeroSchedule, ZeroPiece, ZeroWindow,
            zero_schedule, zero_walk_pieces, zero_walk_windows, zero_unit_span, zero_is_held
*/
#ifndef LLMC_ZERO_SCHEDULE_CUH_INCLUDED
#define LLMC_ZERO_SCHEDULE_CUH_INCLUDED

#include "layout.cuh"

typedef enum ZeroAlgorithm ZERO_ANY_INT { ZERO_ADAMW = 0, ZERO_ADAM = 1, ZERO_SGD = 2 } ZeroAlgorithm;

typedef enum ZeroReduction ZERO_ANY_INT {
    ZERO_REDUCE_NCCL = 0, /* ncclReduceScatter in the gradients' type; stage 0 then gathers the sums */
    ZERO_REDUCE_ORDERED, /* all-to-all, sums in fp32, a left fold: the same bits for any ranks, stage and plan */
    ZERO_REDUCE_ALLREDUCE /* ncclAllReduce, stage 0 only: the usual way, to compare with */
} ZeroReduction;

typedef enum ZeroAccumulation ZERO_ANY_INT {
    ZERO_ACCUMULATE_DEFAULT = 0, /* micro with ZERO_REDUCE_ORDERED, else step */
    ZERO_ACCUMULATE_STEP,        /* micro-steps add up in the caller's gradients, one reduction at the last */
    ZERO_ACCUMULATE_MICRO /* each micro-step is reduced and added in fp32; always so in stages 2 and 3 */
} ZeroAccumulation;

/* What buffers and bytes depend on, besides the layout. */
typedef struct ZeroPlanChoice {
    int rank;
    int stage; /* 0 .. 3 */
    ZeroAlgorithm algorithm;
    double momentum; /* SGD without momentum keeps no state */
    int masters;     /* fp32 masters beside bf16 params */
    ZeroReduction reduction;
    ZeroAccumulation accumulation;
    int overlap;
    const int* held_units; /* stages 2 and 3: units with a slot of their own */
    int held_units_count;
} ZeroPlanChoice;

/* Scratch for what arrives of gradients: an eighth of a bucket, in these bounds, and at most half of it; but at least 256
   bytes from each of the others. */
#define ZERO_SCRATCH_BYTES_MIN ((size_t)1 << 20)
#define ZERO_SCRATCH_BYTES_MAX ((size_t)32 << 20)

typedef struct ZeroSchedule {
    int micro;        /* reduce in every micro-step, not only in the last */
    int sum_kernel;   /* our kernel makes the sums, and with them the norm's partial sums */
    int sums_sharded; /* the sums lie in an fp32 shard */
    int sums_gather;  /* stage 0 gets the other ranks' sums out of their shards, through the scratch */
    int params_sharded;
    int grads_slots, params_slots;              /* common slots; 0: a flat buffer */
    size_t grads_slot_count, params_slot_count; /* elements of one of them */
    size_t held_count;                          /* elements of all held units' slots together */
    size_t piece_count;                         /* elements of a piece at most, a multiple of layout->align */
    size_t scratch_bytes;                       /* for what arrives from the others */
    size_t window_count; /* sums_gather: elements of a window, half of the scratch in fp32 */
} ZeroSchedule;

/* Stage 0 with sharded sums updates the model a window at a time: a part of one rank's slice, whose sums that rank has. */
typedef struct ZeroWindow {
    int bucket, owner;
    size_t flat_first, count; /* elements */
    size_t chunk_first;       /* its chunks end where those of the next window begin */
} ZeroWindow;

/* A part of this rank's slice of a bucket. */
typedef struct ZeroPiece {
    size_t flat_first, count;        /* elements */
    size_t chunk_first, chunk_count; /* of this rank's chunk table: those that have elements in it */
} ZeroPiece;

static inline int zero_is_held(const ZeroPlanChoice* choice, int unit) {
    int i;
    for (i = 0; i < choice->held_units_count; i++)
        if (choice->held_units[i] == unit) return 1;
    return 0;
}

/* Elements of a unit's buckets, padding included, and where the first one begins. Needs buckets of one unit each. */
static inline size_t zero_unit_span(const ZeroLayout* layout, int unit, size_t* flat_first) {
    const int first = layout->unit_buckets_first[unit], end = layout->unit_buckets_first[unit + 1];
    const ZeroBucket* last;
    *flat_first = 0;
    if (first == end) return 0;
    *flat_first = layout->buckets[layout->unit_buckets[first]].flat_offset;
    last = &layout->buckets[layout->unit_buckets[end - 1]];
    return last->flat_offset + last->count - *flat_first;
}

/* Stages 2 and 3 hold a unit at a time: its buckets must be its own, and follow one another. */
static inline ZeroResult zero_check_units_apart(const ZeroLayout* layout, const ZeroPlanChoice* choice) {
    int b, i, u;
    for (b = 0; b < layout->buckets_count; b++)
        if (layout->buckets[b].units > 1)
            return zero_error(
                ZERO_ERROR_ARGUMENT,
                "stage %d holds a unit at a time, but bucket %d has parts of %d units: lay the model out "
                "with units_apart = 1",
                choice->stage, b, layout->buckets[b].units);
    for (u = 0; u < layout->units_count; u++)
        for (i = layout->unit_buckets_first[u] + 1; i < layout->unit_buckets_first[u + 1]; i++)
            if (layout->unit_buckets[i] != layout->unit_buckets[i - 1] + 1)
                return zero_error(
                    ZERO_ERROR_ARGUMENT,
                    "stage %d holds a unit at a time, but unit %d lies in buckets %d and %d with others "
                    "between: place units one after another",
                    choice->stage, u, layout->unit_buckets[i - 1], layout->unit_buckets[i]);
    if (choice->held_units_count < 0 || (choice->held_units_count > 0 && !choice->held_units))
        return zero_error(ZERO_ERROR_ARGUMENT, "%d held units at %p", choice->held_units_count,
                          (const void*)choice->held_units);
    for (i = 0; i < choice->held_units_count; i++)
        if (choice->held_units[i] < 0 || choice->held_units[i] >= layout->units_count)
            return zero_error(ZERO_ERROR_ARGUMENT, "held unit %d; the layout has units 0 .. %d",
                              choice->held_units[i], layout->units_count - 1);
    return zero_ok();
}

static inline ZeroResult zero_check_choice(const ZeroLayout* layout, const ZeroPlanChoice* choice) {
    if (choice->stage < 0 || choice->stage > 3)
        return zero_error(ZERO_ERROR_ARGUMENT, "stage %d; there are 0, 1, 2 and 3", choice->stage);
    if (choice->rank < 0 || choice->rank >= layout->ranks)
        return zero_error(ZERO_ERROR_ARGUMENT, "rank %d; the layout has %d ranks", choice->rank,
                          layout->ranks);
    if (choice->algorithm != ZERO_ADAMW && choice->algorithm != ZERO_ADAM && choice->algorithm != ZERO_SGD)
        return zero_error(ZERO_ERROR_ARGUMENT, "algorithm %d is not known", (int)choice->algorithm);
    if (choice->reduction != ZERO_REDUCE_NCCL && choice->reduction != ZERO_REDUCE_ORDERED &&
        choice->reduction != ZERO_REDUCE_ALLREDUCE)
        return zero_error(ZERO_ERROR_ARGUMENT, "reduction %d is not known", (int)choice->reduction);
    if (choice->accumulation != ZERO_ACCUMULATE_DEFAULT && choice->accumulation != ZERO_ACCUMULATE_STEP &&
        choice->accumulation != ZERO_ACCUMULATE_MICRO)
        return zero_error(ZERO_ERROR_ARGUMENT, "accumulation %d is not known", (int)choice->accumulation);
    if (choice->reduction == ZERO_REDUCE_ALLREDUCE &&
        (choice->stage != 0 || choice->accumulation == ZERO_ACCUMULATE_MICRO))
        return zero_error(
            ZERO_ERROR_ARGUMENT, "reduction allreduce works in stage 0, once a step; not in stage %d%s",
            choice->stage, choice->accumulation == ZERO_ACCUMULATE_MICRO ? " with every micro-step" : "");
    return choice->stage >= 2 ? zero_check_units_apart(layout, choice) : zero_ok();
}

/* The slots of stages 2 and 3. */
static inline void zero_schedule_slots(ZeroSchedule* s, const ZeroLayout* layout,
                                       const ZeroPlanChoice* choice) {
    size_t largest = 0, flat_first;
    int u, common = 0;
    for (u = 0; u < layout->units_count; u++) {
        const size_t count = zero_unit_span(layout, u, &flat_first);
        if (count == 0) continue;
        if (zero_is_held(choice, u)) {
            s->held_count += count;
        } else {
            common++;
            if (count > largest) largest = count;
        }
    }
    s->grads_slots = choice->overlap ? 2 : 1;
    if (common < s->grads_slots) s->grads_slots = common;
    s->grads_slot_count = largest;
    if (!s->params_sharded) return;
    s->params_slots = common < 2 ? common : 2;
    s->params_slot_count = largest;
}

static inline ZeroResult zero_schedule(ZeroSchedule* s, const ZeroLayout* layout,
                                       const ZeroPlanChoice* choice) {
    const size_t bytes = zero_dtype_bytes(layout->dtype), others = (size_t)layout->ranks - 1;
    const int ordered = choice->reduction == ZERO_REDUCE_ORDERED && layout->ranks > 1;
    size_t largest = 0, limit;
    int b;
    memset(s, 0, sizeof(*s));
    ZERO_TRY(zero_check_choice(layout, choice));
    s->micro = choice->stage >= 2 || choice->accumulation == ZERO_ACCUMULATE_MICRO ||
               (choice->accumulation == ZERO_ACCUMULATE_DEFAULT && choice->reduction == ZERO_REDUCE_ORDERED);
    s->sums_sharded = s->micro || (ordered && layout->dtype == ZERO_BF16);
    s->sum_kernel = s->sums_sharded || ordered;
    s->sums_gather = s->sums_sharded && choice->stage == 0 && layout->ranks > 1;
    s->params_sharded = choice->stage == 3 && layout->ranks > 1;
    if (choice->stage >= 2) zero_schedule_slots(s, layout, choice);
    for (b = 0; b < layout->buckets_count; b++)
        if (layout->buckets[b].count > largest) largest = layout->buckets[b].count;
    s->piece_count = largest;
    if (!ordered && !s->sums_gather) return zero_ok();
    limit = largest * bytes / 8;
    if (limit < ZERO_SCRATCH_BYTES_MIN) limit = ZERO_SCRATCH_BYTES_MIN;
    if (limit > ZERO_SCRATCH_BYTES_MAX) limit = ZERO_SCRATCH_BYTES_MAX;
    if (limit > largest * bytes / 2) limit = largest * bytes / 2;
    s->piece_count = limit / (others * bytes) / layout->align * layout->align;
    if (s->piece_count < layout->align) s->piece_count = layout->align;
    s->scratch_bytes = s->piece_count * others * bytes;
    if (!s->sums_gather) return zero_ok();
    if (s->scratch_bytes < 2 * layout->align * sizeof(float))
        s->scratch_bytes = 2 * layout->align * sizeof(float);
    s->window_count = s->scratch_bytes / 2 / sizeof(float) / layout->align * layout->align;
    return zero_ok();
}

/* Cuts this rank's slices into pieces of at most piece_count elements, bucket by bucket. chunks, bucket_chunks: its chunk
   table. pieces: room for all, or NULL to count. bucket_pieces: NULL, or buckets_count + 1 numbers: pieces
   [bucket_pieces[b], bucket_pieces[b + 1]) belong to bucket b. Returns how many there are. */
static inline size_t zero_walk_pieces(const ZeroLayout* layout, int rank, size_t piece_count,
                                      const ZeroChunk* chunks, const size_t* bucket_chunks, ZeroPiece* pieces,
                                      size_t* bucket_pieces) {
    size_t count = 0;
    int b;
    for (b = 0; b < layout->buckets_count; b++) {
        const size_t start = zero_slice_offset(layout, b, rank), end = start + zero_slice_count(layout, b);
        size_t first = start, chunk = bucket_chunks[b];
        if (bucket_pieces) bucket_pieces[b] = count;
        for (; first < end; count++) {
            const size_t last = end - first < piece_count ? end : first + piece_count;
            size_t chunk_end;
            while (chunk < bucket_chunks[b + 1] && chunks[chunk].flat_offset + chunks[chunk].count <= first)
                chunk++;
            for (chunk_end = chunk; chunk_end < bucket_chunks[b + 1] && chunks[chunk_end].flat_offset < last;)
                chunk_end++;
            if (pieces) {
                pieces[count].flat_first = first;
                pieces[count].count = last - first;
                pieces[count].chunk_first = chunk;
                pieces[count].chunk_count = chunk_end - chunk;
            }
            first = last;
        }
    }
    if (bucket_pieces) bucket_pieces[layout->buckets_count] = count;
    return count;
}

/* Cuts every rank's slices into windows, in ascending order. windows: room for all and one more, which only ends the last;
   chunks: the whole model's chunk table, cut at windows; both or either may be NULL to count. Returns the windows. */
static inline size_t zero_walk_windows(const ZeroLayout* layout, size_t window_count, ZeroWindow* windows,
                                       ZeroChunk* chunks, size_t* chunks_count) {
    size_t count = 0;
    int b, r, next = 0;
    *chunks_count = 0;
    for (b = 0; b < layout->buckets_count; b++)
        for (r = 0; r < layout->ranks; r++) {
            const size_t end = zero_slice_offset(layout, b, r) + zero_slice_count(layout, b);
            size_t first = zero_slice_offset(layout, b, r);
            for (; first < end; count++) {
                const size_t last = end - first < window_count ? end : first + window_count;
                if (windows) {
                    windows[count].bucket = b;
                    windows[count].owner = r;
                    windows[count].flat_first = first;
                    windows[count].count = last - first;
                    windows[count].chunk_first = *chunks_count;
                }
                *chunks_count = zero_walk_range(layout, first, last, 0, ZERO_CHUNK_MAX_COUNT, &next, chunks,
                                                *chunks_count);
                first = last;
            }
        }
    if (windows) {
        memset(&windows[count], 0, sizeof(*windows));
        windows[count].chunk_first = *chunks_count;
    }
    return count;
}

#endif /* LLMC_ZERO_SCHEDULE_CUH_INCLUDED */
