/* llmc_zero/layout.cuh - where every parameter lies, and who owns it. Host only, C99 and C++.

   A model is a list of segments (a tensor, or one layer's part of a tensor). Segments that are used together
   form a unit (a layer). All of them lie in ONE flat buffer, unit after unit; the buffer is cut into buckets;
   rank r owns slice r of every bucket. All ranks compute the same layout from the same arguments.

       ZeroSegment segments[2] = {zero_segment("w", 6000, 0), zero_segment("b", 20, 0)};
       ZeroLayoutConfig config = zero_layout_config(ranks, ZERO_FP32);
       ZeroLayout layout;
       ZeroResult r = zero_layout(&layout, segments, 2, &config);     // check r.code
       size_t elements = zero_padded_count(&layout);                  // allocate this many, for params and grads
       ... params + layout.segments[1].flat_offset is where "b" starts ...
       zero_layout_free(&layout);

   Two index spaces, never mixed:
     model index  segments one after another in the order of the caller's list, no gaps: keys rounding noise,
                  hashes and files. It does not depend on ranks, buckets or alignment.
     flat offset  where an element lies in a buffer of zero_padded_count elements. May depend on all of these.

   Invariants, for any counts (0 too) and any number of ranks (more ranks than elements too):
     L1  every segment lies in the flat buffer, contiguous; segments do not overlap.
     L2  buckets follow one another without gaps and cover [0, padded_count).
     L3  a bucket's offset and count are multiples of ranks * align, so a slice starts at a multiple of align
         (256 bytes) in the flat buffer and in the shard, and all slices of a bucket have the same length.
     L4  slice r of bucket b is [offset + r * count / ranks, + count / ranks); in rank r's shard (its slices one
         after another) it starts at offset / ranks. So flat offset and shard offset agree modulo align.
     L5  the chunk table of a rank covers each real element that the rank owns once, and no padding; over all
         ranks it covers each element of the model once. A chunk stays inside one segment and one bucket, and cuts no
         cell of 64 places of the flat buffer.
     L6  gaps and padding belong to no segment; they are zero in gradients before every reduction.

   defines: ZeroDtype, ZeroSegment, ZeroLayoutConfig, ZeroBucket, ZeroLayout, ZeroChunk, zero_segment,
            zero_layout_config, zero_layout, zero_layout_free, zero_padded_count, zero_shard_count,
            zero_model_count, zero_slice_count, zero_slice_offset, zero_unit_offset, zero_chunk_table
*/
#ifndef LLMC_ZERO_LAYOUT_CUH_INCLUDED
#define LLMC_ZERO_LAYOUT_CUH_INCLUDED

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.cuh"

#define ZERO_ALIGN_BYTES 256      /* what cudaMalloc gives; whole sectors for NCCL and for vector accesses */
#define ZERO_CHUNK_MAX_COUNT 2048 /* elements of a chunk = of one block of 256 threads */
#define ZERO_CELL_COUNT 64 /* squares are added up by so many places of the flat buffer; see grad_norm.cuh */
#define ZERO_BUCKETS_MAX 65536         /* each costs an event, a launch and two collectives a step */
#define ZERO_COUNT_MAX (SIZE_MAX / 64) /* elements of a model, so that no number of bytes overflows */
#define ZERO_ALL_RANKS (-1)

typedef enum ZeroDtype ZERO_ANY_INT { ZERO_FP32 = 0, ZERO_BF16 = 1 } ZeroDtype;

static inline size_t zero_dtype_bytes(ZeroDtype dtype) { return dtype == ZERO_BF16 ? 2 : 4; }
static inline const char* zero_dtype_name(ZeroDtype dtype) { return dtype == ZERO_BF16 ? "bf16" : "fp32"; }

typedef struct ZeroSegment {
    const char* name;    /* for messages and files, or NULL; not copied, must outlive the layout */
    size_t count;        /* elements; may be 0 */
    int unit;            /* 0 .. segments - 1; units are used one after another in forward */
    float lr_factor;     /* multiplies the learning rate of this segment; 0 freezes it: see optimizer.cuh */
    float decay_factor;  /* multiplies the weight decay of this segment; 0 for biases and norms */
    size_t flat_offset;  /* elements; set by zero_layout, or by the caller with offsets_given */
    size_t model_offset; /* elements; set by zero_layout */
} ZeroSegment;

typedef struct ZeroLayoutConfig {
    int ranks;
    ZeroDtype dtype; /* of params and gradients */
    size_t
        bucket_bytes; /* a bucket holds at most this many bytes of params (at least 256 a rank); 0: no limit */
    int units_apart; /* 1: a bucket never holds parts of two units (with offsets_given: as far as L3 allows) */
    int offsets_given; /* 1: the caller's flat_offset stays as it is (any order, any gaps, no overlap) */
} ZeroLayoutConfig;

typedef struct ZeroBucket {
    size_t flat_offset; /* elements */
    size_t count;       /* elements, padding included; a multiple of ranks * align */
    int units_first;    /* layout.bucket_units[units_first .. + units): the units with elements in it */
    int units;
} ZeroBucket;

typedef struct ZeroLayout {
    int ranks;
    ZeroDtype dtype;
    size_t align;        /* elements in ZERO_ALIGN_BYTES */
    size_t model_count;  /* elements of the model */
    size_t padded_count; /* elements of the flat buffer */
    int segments_count, units_count, buckets_count;
    ZeroSegment* segments; /* in the caller's order = model order */
    int* by_offset;        /* segment numbers in order of flat offset, without those of length 0 */
    int by_offset_count;
    size_t* unit_offset; /* flat offset where each unit begins */
    ZeroBucket* buckets; /* in order of flat offset */
    int* bucket_units;   /* see ZeroBucket */
    int* unit_buckets;   /* unit_buckets[unit_buckets_first[u] .. unit_buckets_first[u + 1]): its buckets */
    int* unit_buckets_first; /* units_count + 1 numbers */
} ZeroLayout;

/* One block's work in the norm and the update: a piece of one segment in one bucket. */
typedef struct ZeroChunk {
    uint64_t flat_offset;  /* first element in the flat buffer */
    uint64_t state_offset; /* first element in m, v and masters */
    uint64_t model_offset; /* first element's model index */
    uint32_t count;        /* elements, at least 1 */
    float lr_factor, decay_factor;
    uint32_t segment;
} ZeroChunk;

static inline ZeroSegment zero_segment(const char* name, size_t count, int unit) {
    ZeroSegment segment;
    memset(&segment, 0, sizeof(segment));
    segment.name = name;
    segment.count = count;
    segment.unit = unit;
    segment.lr_factor = segment.decay_factor = 1.0f;
    return segment;
}

static inline ZeroLayoutConfig zero_layout_config(int ranks, ZeroDtype dtype) {
    ZeroLayoutConfig config;
    memset(&config, 0, sizeof(config));
    config.ranks = ranks;
    config.dtype = dtype;
    return config;
}

static inline size_t zero_padded_count(const ZeroLayout* layout) { return layout->padded_count; }
static inline size_t zero_model_count(const ZeroLayout* layout) { return layout->model_count; }
static inline size_t zero_shard_count(const ZeroLayout* layout) {
    return layout->padded_count / (size_t)layout->ranks;
}
static inline size_t zero_slice_count(const ZeroLayout* layout, int bucket) {
    return layout->buckets[bucket].count / (size_t)layout->ranks;
}
/* Flat offset of rank's slice of a bucket (L4). */
static inline size_t zero_slice_offset(const ZeroLayout* layout, int bucket, int rank) {
    return layout->buckets[bucket].flat_offset + (size_t)rank * zero_slice_count(layout, bucket);
}
/* Where that slice begins in the rank's shard (L4). */
static inline size_t zero_shard_offset(const ZeroLayout* layout, int bucket) {
    return layout->buckets[bucket].flat_offset / (size_t)layout->ranks;
}
/* A segment's place behind the pointer that zero_params_acquire and zero_grads_acquire give for its unit. */
static inline size_t zero_unit_offset(const ZeroLayout* layout, int segment) {
    return layout->segments[segment].flat_offset - layout->unit_offset[layout->segments[segment].unit];
}
static inline const char* zero_segment_name(const ZeroLayout* layout, int segment) {
    return layout->segments[segment].name ? layout->segments[segment].name : "no name";
}

static inline void zero_layout_free(ZeroLayout* layout) {
    free(layout->segments);
    free(layout->by_offset);
    free(layout->unit_offset);
    free(layout->buckets);
    free(layout->bucket_units);
    free(layout->unit_buckets);
    free(layout->unit_buckets_first);
    memset(layout, 0, sizeof(*layout));
}

/* value rounded up to a multiple; 0 if that does not fit into size_t (and value is not 0) */
static inline size_t zero_round_up(size_t value, size_t multiple) {
    size_t rest = value % multiple;
    if (rest == 0) return value;
    return value > SIZE_MAX - (multiple - rest) ? 0 : value + (multiple - rest);
}

typedef struct ZeroSortKey {
    size_t key;
    int segment;
} ZeroSortKey;

static inline int zero_compare_keys(const void* a, const void* b) {
    const ZeroSortKey* x = (const ZeroSortKey*)a;
    const ZeroSortKey* y = (const ZeroSortKey*)b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->segment < y->segment ? -1 : x->segment > y->segment; /* makes qsort stable */
}

/* Sorts the segments' numbers by unit (by_unit) or by flat offset, into keys[segments_count]. */
static inline void zero_sort_segments(const ZeroLayout* layout, ZeroSortKey* keys, int by_unit) {
    int s;
    for (s = 0; s < layout->segments_count; s++) {
        keys[s].segment = s;
        keys[s].key = by_unit ? (size_t)layout->segments[s].unit : layout->segments[s].flat_offset;
    }
    qsort(keys, (size_t)layout->segments_count, sizeof(*keys), zero_compare_keys);
}

static inline ZeroResult zero_check_segments(ZeroLayout* layout) {
    size_t model_count = 0;
    int s;
    for (s = 0; s < layout->segments_count; s++) {
        ZeroSegment* segment = &layout->segments[s];
        if (segment->unit < 0 || segment->unit >= layout->segments_count)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "segment %d (%s) names unit %d; units are 0 .. %d (segments - 1)", s,
                              zero_segment_name(layout, s), segment->unit, layout->segments_count - 1);
        if (!(segment->lr_factor >= 0.0f && segment->lr_factor <= 3.4e38f) ||
            !(segment->decay_factor >= 0.0f && segment->decay_factor <= 3.4e38f))
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "segment %d (%s) has lr_factor %g and decay_factor %g; 0 .. 3.4e38 "
                              "are allowed",
                              s, zero_segment_name(layout, s), (double)segment->lr_factor,
                              (double)segment->decay_factor);
        if (segment->unit >= layout->units_count) layout->units_count = segment->unit + 1;
        segment->model_offset = model_count;
        if (segment->count > ZERO_COUNT_MAX - model_count)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "segment %d (%s) of %zu elements makes the model too large to "
                              "address",
                              s, zero_segment_name(layout, s), segment->count);
        model_count += segment->count;
    }
    layout->model_count = model_count;
    return zero_ok();
}

/* Gives every segment its flat offset, unit after unit (L1). */
static inline ZeroResult zero_place_segments(ZeroLayout* layout, ZeroSortKey* keys, size_t quantum,
                                             int units_apart) {
    size_t end = 0;
    int i;
    zero_sort_segments(layout, keys, 1);
    for (i = 0; i < layout->segments_count; i++) {
        ZeroSegment* segment = &layout->segments[keys[i].segment];
        int new_unit = i > 0 && keys[i].key != keys[i - 1].key;
        size_t start = zero_round_up(end, new_unit && units_apart ? quantum : layout->align);
        if (start < end || start > ZERO_COUNT_MAX || segment->count > ZERO_COUNT_MAX - start)
            return zero_error(ZERO_ERROR_ARGUMENT, "%zu elements on %d ranks are too many to address",
                              layout->model_count, layout->ranks);
        segment->flat_offset = start;
        end = start + segment->count;
    }
    return zero_ok();
}

/* Sorts by offset, refuses overlaps, finds the end of the buffer and where units begin (L1). */
static inline ZeroResult zero_check_placement(ZeroLayout* layout, ZeroSortKey* keys, size_t quantum) {
    size_t end = 0;
    int i, u;
    zero_sort_segments(layout, keys, 0);
    for (u = 0; u < layout->units_count; u++) layout->unit_offset[u] = SIZE_MAX;
    for (i = 0; i < layout->segments_count; i++) {
        const ZeroSegment* segment = &layout->segments[keys[i].segment];
        size_t* unit_offset = &layout->unit_offset[segment->unit];
        if (segment->flat_offset < *unit_offset) *unit_offset = segment->flat_offset;
        if (segment->count == 0) continue;
        if (segment->flat_offset < end)
            return zero_error(ZERO_ERROR_ARGUMENT,
                              "segment %d (%s) starts at %zu, inside segment %d that ends at %zu",
                              keys[i].segment, zero_segment_name(layout, keys[i].segment),
                              segment->flat_offset, layout->by_offset[layout->by_offset_count - 1], end);
        if (segment->count > ZERO_COUNT_MAX || segment->flat_offset > ZERO_COUNT_MAX - segment->count)
            return zero_error(ZERO_ERROR_ARGUMENT, "segment %d (%s) at offset %zu is out of reach",
                              keys[i].segment, zero_segment_name(layout, keys[i].segment),
                              segment->flat_offset);
        end = segment->flat_offset + segment->count;
        layout->by_offset[layout->by_offset_count++] = keys[i].segment;
    }
    for (u = 0; u < layout->units_count; u++)
        if (layout->unit_offset[u] == SIZE_MAX) layout->unit_offset[u] = 0; /* a unit without segments */
    layout->padded_count = zero_round_up(end, quantum);
    return zero_ok();
}

/* Cuts the flat buffer into buckets (L2, L3). With buckets = NULL it only counts them, and stops when there are more
   than ZERO_BUCKETS_MAX. With offsets given, a unit may begin anywhere; its bucket then begins at the last possible
   place before it. */
static inline size_t zero_cut_buckets(const ZeroLayout* layout, size_t quantum,
                                      const ZeroLayoutConfig* config, ZeroBucket* buckets) {
    size_t limit = SIZE_MAX, offset = 0, buckets_count = 0;
    int next = 0; /* into by_offset: the first segment that may begin a unit after `offset` */
    if (config->bucket_bytes > 0) {
        limit = config->bucket_bytes / zero_dtype_bytes(layout->dtype) / quantum * quantum;
        if (limit < quantum) limit = quantum;
    }
    while (offset < layout->padded_count && buckets_count <= ZERO_BUCKETS_MAX) {
        size_t end = layout->padded_count;
        if (config->units_apart) {
            for (; next < layout->by_offset_count; next++) {
                const ZeroSegment* segment = &layout->segments[layout->by_offset[next]];
                int begins = next > 0 && layout->segments[layout->by_offset[next - 1]].unit != segment->unit;
                if (begins && segment->flat_offset / quantum * quantum > offset) {
                    end = segment->flat_offset / quantum * quantum;
                    break;
                }
            }
        }
        if (end - offset > limit) end = offset + limit;
        if (buckets) {
            buckets[buckets_count].flat_offset = offset;
            buckets[buckets_count].count = end - offset;
        }
        buckets_count++;
        offset = end;
    }
    return buckets_count;
}

/* Calls for every (unit, bucket) that share an element, once, bucket by bucket: fills bucket_units and counts the
   unit's buckets in unit_buckets_first[unit + 1] (pairs == NULL: only counts the pairs). `seen` has units_count
   ints. */
static inline size_t zero_pair_units(ZeroLayout* layout, int* pairs, int* seen) {
    size_t pairs_count = 0;
    int b, i = 0, u;
    for (u = 0; u < layout->units_count; u++) seen[u] = -1;
    for (b = 0; b < layout->buckets_count; b++) {
        ZeroBucket* bucket = &layout->buckets[b];
        size_t end = bucket->flat_offset + bucket->count;
        size_t before = pairs_count;
        while (i < layout->by_offset_count) {
            const ZeroSegment* segment = &layout->segments[layout->by_offset[i]];
            if (segment->flat_offset >= end) break;
            if (seen[segment->unit] != b) {
                seen[segment->unit] = b;
                if (pairs) {
                    pairs[pairs_count] = segment->unit;
                    layout->unit_buckets_first[segment->unit + 1]++;
                }
                pairs_count++;
            }
            if (segment->flat_offset + segment->count > end) break; /* goes on in the next bucket */
            i++;
        }
        bucket->units_first = (int)before;
        bucket->units = (int)(pairs_count - before);
    }
    return pairs_count;
}

static inline void* zero_alloc_array(size_t count, size_t bytes) { return calloc(count ? count : 1, bytes); }

static inline ZeroResult zero_relate_units(ZeroLayout* layout) {
    int* seen = (int*)zero_alloc_array((size_t)layout->units_count, sizeof(int));
    int b, k, u;
    size_t pairs_count;
    if (!seen) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d units", layout->units_count);
    pairs_count = zero_pair_units(layout, NULL, seen);
    layout->bucket_units = (int*)zero_alloc_array(pairs_count, sizeof(int));
    layout->unit_buckets = (int*)zero_alloc_array(pairs_count, sizeof(int));
    layout->unit_buckets_first = (int*)zero_alloc_array((size_t)layout->units_count + 1, sizeof(int));
    if (layout->bucket_units && layout->unit_buckets && layout->unit_buckets_first) {
        zero_pair_units(layout, layout->bucket_units, seen);
        for (u = 0; u < layout->units_count; u++) {
            layout->unit_buckets_first[u + 1] += layout->unit_buckets_first[u];
            seen[u] = layout->unit_buckets_first[u];
        }
        for (b = 0; b < layout->buckets_count; b++)
            for (k = 0; k < layout->buckets[b].units; k++)
                layout->unit_buckets[seen[layout->bucket_units[layout->buckets[b].units_first + k]]++] = b;
    }
    free(seen);
    if (!layout->bucket_units || !layout->unit_buckets || !layout->unit_buckets_first)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu (unit, bucket) pairs", pairs_count);
    return zero_ok();
}

static inline ZeroResult zero_fill_layout(ZeroLayout* layout, const ZeroLayoutConfig* config,
                                          ZeroSortKey* keys) {
    size_t quantum = (size_t)config->ranks * layout->align, buckets_count;
    ZERO_TRY(zero_check_segments(layout));
    layout->by_offset = (int*)zero_alloc_array((size_t)layout->segments_count, sizeof(int));
    layout->unit_offset = (size_t*)zero_alloc_array((size_t)layout->units_count, sizeof(size_t));
    if (!layout->by_offset || !layout->unit_offset)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d segments", layout->segments_count);
    if (!config->offsets_given) ZERO_TRY(zero_place_segments(layout, keys, quantum, config->units_apart));
    ZERO_TRY(zero_check_placement(layout, keys, quantum));
    buckets_count = zero_cut_buckets(layout, quantum, config, NULL);
    if (buckets_count > ZERO_BUCKETS_MAX && config->bucket_bytes == 0)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "%d units apart are more than %d buckets: put several layers into a unit",
                          layout->units_count, ZERO_BUCKETS_MAX);
    if (buckets_count > ZERO_BUCKETS_MAX)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "buckets of %zu bytes cut %zu elements into more than %d buckets: ask "
                          "for larger ones",
                          config->bucket_bytes, layout->padded_count, ZERO_BUCKETS_MAX);
    layout->buckets = (ZeroBucket*)zero_alloc_array(buckets_count, sizeof(ZeroBucket));
    if (!layout->buckets)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu buckets", buckets_count);
    layout->buckets_count = (int)zero_cut_buckets(layout, quantum, config, layout->buckets);
    return zero_relate_units(layout);
}

/* Builds the layout of a model. `segments` is copied (names are not). On an error nothing is left allocated. */
static inline ZeroResult zero_layout(ZeroLayout* layout, const ZeroSegment* segments, int segments_count,
                                     const ZeroLayoutConfig* config) {
    ZeroSortKey* keys;
    ZeroResult result;
    memset(layout, 0, sizeof(*layout));
    if (config->ranks < 1)
        return zero_error(ZERO_ERROR_ARGUMENT, "%d ranks; at least 1 is needed", config->ranks);
    if (segments_count < 0 || (segments_count > 0 && segments == NULL))
        return zero_error(ZERO_ERROR_ARGUMENT, "%d segments at %p", segments_count, (const void*)segments);
    if (config->dtype != ZERO_FP32 && config->dtype != ZERO_BF16)
        return zero_error(ZERO_ERROR_ARGUMENT, "dtype %d; ZERO_FP32 (0) and ZERO_BF16 (1) are known",
                          (int)config->dtype);
    layout->ranks = config->ranks;
    layout->dtype = config->dtype;
    layout->align = ZERO_ALIGN_BYTES / zero_dtype_bytes(config->dtype);
    layout->segments_count = segments_count;
    layout->segments = (ZeroSegment*)zero_alloc_array((size_t)segments_count, sizeof(ZeroSegment));
    keys = (ZeroSortKey*)zero_alloc_array((size_t)segments_count, sizeof(ZeroSortKey));
    if (layout->segments && keys) {
        if (segments_count > 0)
            memcpy(layout->segments, segments, (size_t)segments_count * sizeof(ZeroSegment));
        result = zero_fill_layout(layout, config, keys);
    } else {
        result = zero_error(ZERO_ERROR_MEMORY, "no host memory for %d segments", segments_count);
    }
    free(keys);
    if (result.code != ZERO_OK) zero_layout_free(layout);
    return result;
}

/* Appends the chunks of flat range [start, end), not empty, of one segment; with chunks == NULL it only counts. A chunk ends
   where a cell does, or the range. */
static inline size_t zero_cut_chunks(const ZeroLayout* layout, int s, size_t start, size_t end,
                                     size_t state_shift, size_t max_count, ZeroChunk* chunks) {
    const ZeroSegment* segment = &layout->segments[s];
    size_t chunks_count = 0;
    const size_t before = max_count % ZERO_CELL_COUNT == 0 ? start % ZERO_CELL_COUNT : 0;
    if (!chunks) return (end - start + before + max_count - 1) / max_count;
    for (; start < end; chunks_count++) {
        const size_t room = max_count - (chunks_count == 0 ? before : 0);
        const size_t count = end - start < room ? end - start : room;
        ZeroChunk* chunk = &chunks[chunks_count];
        chunk->flat_offset = start;
        chunk->state_offset = start - state_shift;
        chunk->model_offset = segment->model_offset + (start - segment->flat_offset);
        chunk->count = (uint32_t)count;
        chunk->lr_factor = segment->lr_factor;
        chunk->decay_factor = segment->decay_factor;
        chunk->segment = (uint32_t)s;
        start += count;
    }
    return chunks_count;
}

/* Appends the chunks of flat range [start, end) to chunks[chunks_count ..] (NULL: only counts) and returns how many there
   are then. *next: where in by_offset to look first; ranges come in ascending order, begin with 0. */
static inline size_t zero_walk_range(const ZeroLayout* layout, size_t start, size_t end, size_t state_shift,
                                     size_t max_count, int* next, ZeroChunk* chunks, size_t chunks_count) {
    for (; *next < layout->by_offset_count; (*next)++) {
        const int s = layout->by_offset[*next];
        const ZeroSegment* segment = &layout->segments[s];
        const size_t segment_end = segment->flat_offset + segment->count;
        const size_t from = segment->flat_offset > start ? segment->flat_offset : start;
        const size_t to = segment_end < end ? segment_end : end;
        if (from < to)
            chunks_count += zero_cut_chunks(layout, s, from, to, state_shift, max_count,
                                            chunks ? chunks + chunks_count : NULL);
        if (segment_end > end) break; /* the next range may hold more of it */
    }
    return chunks_count;
}

static inline size_t zero_walk_chunks(const ZeroLayout* layout, int rank, size_t max_count, ZeroChunk* chunks,
                                      size_t* bucket_first) {
    size_t chunks_count = 0;
    int b, next = 0;
    for (b = 0; b < layout->buckets_count; b++) {
        const ZeroBucket* bucket = &layout->buckets[b];
        const size_t start =
            rank == ZERO_ALL_RANKS ? bucket->flat_offset : zero_slice_offset(layout, b, rank);
        const size_t end = start + (rank == ZERO_ALL_RANKS ? bucket->count : zero_slice_count(layout, b));
        const size_t state_shift = rank == ZERO_ALL_RANKS ? 0 : start - zero_shard_offset(layout, b);
        if (bucket_first) bucket_first[b] = chunks_count;
        chunks_count =
            zero_walk_range(layout, start, end, state_shift, max_count, &next, chunks, chunks_count);
    }
    if (bucket_first) bucket_first[layout->buckets_count] = chunks_count;
    return chunks_count;
}

/* The work of a rank (its slices; state_offset counts in its shard), or with ZERO_ALL_RANKS of the whole model
   (state_offset = flat_offset), bucket by bucket (L5).
     max_count     elements of a chunk at most; ZERO_CHUNK_MAX_COUNT for the kernels, which want whole cells
     chunks        out: malloc'ed, the caller frees; never NULL on success
     bucket_first  out, buckets_count + 1 numbers: chunks [bucket_first[b], bucket_first[b + 1]) belong to bucket b */
static inline ZeroResult zero_chunk_table(const ZeroLayout* layout, int rank, size_t max_count,
                                          ZeroChunk** chunks, size_t* bucket_first) {
    size_t chunks_count;
    *chunks = NULL;
    if (rank != ZERO_ALL_RANKS && (rank < 0 || rank >= layout->ranks))
        return zero_error(ZERO_ERROR_ARGUMENT, "rank %d; the layout has %d ranks", rank, layout->ranks);
    if (max_count < 1 || max_count > UINT32_MAX)
        return zero_error(ZERO_ERROR_ARGUMENT, "chunks of %zu elements; 1 .. 4294967295 are possible",
                          max_count);
    chunks_count = zero_walk_chunks(layout, rank, max_count, NULL, bucket_first);
    *chunks = (ZeroChunk*)zero_alloc_array(chunks_count, sizeof(ZeroChunk));
    if (!*chunks) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu chunks", chunks_count);
    zero_walk_chunks(layout, rank, max_count, *chunks, bucket_first);
    return zero_ok();
}

#endif /* LLMC_ZERO_LAYOUT_CUH_INCLUDED */
