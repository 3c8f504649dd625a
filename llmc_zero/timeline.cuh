/* llmc_zero/timeline.cuh - what ran when on which stream: exposed communication time, Chrome traces, NVTX ranges.

       ZeroTimeline* t = zero_timeline(&z);                            // belongs to z; ZeroConfig.timing says what it records
       int span;
       zero_span_begin(t, ZERO_ROW_COMPUTE, "forward", layer, &span);
       ... launch kernels on the compute stream ...
       zero_span_end(t, span);
       ...
       zero_timeline_write(t, file, rank, start_us);                    // JSON events, for chrome://tracing or Perfetto

   A span is a pair of CUDA events on a stream, so its times are the device's. The library makes spans of its own for every
   reduce, gather, norm, update, and for every place where the compute stream may stand still for a collective; the sum of
   those last ones is ZeroReport.exposed_ms. Spans may nest. Whatever is recorded, each span is an NVTX range too, of the
   host's calls (Nsight Systems projects it on the device), unless the toolkit's nvtx3 headers are missing or ZERO_NO_NVTX is
   defined.

   Times are microseconds of the wall clock (CLOCK_REALTIME) of the machine: ranks of one machine line up exactly, of several
   as well as their clocks do.

   defines: ZeroTimeline, zero_span_begin, zero_span_end, zero_timeline_start, zero_timeline_free, zero_timeline_drain,
            zero_timeline_first_us, zero_timeline_write
*/
#ifndef LLMC_ZERO_TIMELINE_CUH_INCLUDED
#define LLMC_ZERO_TIMELINE_CUH_INCLUDED

#include <cuda_runtime.h>
#include <math.h>
#include <time.h>
#if defined(__has_include) && !defined(ZERO_NO_NVTX)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define ZERO_HAS_NVTX 1
#endif
#endif

#include "memory.cuh"

typedef enum ZeroTiming {
    ZERO_TIMING_OFF = 0,
    ZERO_TIMING_WAITS, /* where the compute stream may stand still for a collective: ZeroReport.exposed_ms */
    ZERO_TIMING_ALL    /* every span, kept for zero_timeline_write */
} ZeroTiming;

typedef enum ZeroRow { ZERO_ROW_COMPUTE = 0, ZERO_ROW_COMMUNICATION, ZERO_ROWS } ZeroRow;

#define ZERO_SPAN_WAIT "wait" /* the compute stream waits for the other */
#define ZERO_SPAN_ISSUE \
    "issue" /* round a collective that is issued: takes time where streams run at once (dev/cpu) */
#define ZERO_NO_INDEX (-1)

typedef struct ZeroTimeSpan { /* recorded, not read yet */
    const char* name;         /* a string that lives as long as the program */
    int index, row;
    int is_wait; /* counts as exposed */
    int ended;
    cudaEvent_t begin, end;
} ZeroTimeSpan;

typedef struct ZeroEntry { /* read */
    const char* name;
    int index, row;
    double begin_us, us; /* from ZeroTimeline.start_us on */
} ZeroEntry;

typedef struct ZeroTimeline {
    ZeroTiming timing;
    cudaStream_t streams[ZERO_ROWS];
    cudaEvent_t origin; /* a moment whose time is known */
    cudaEvent_t tried;  /* perhaps a better one, at the start */
    double origin_us;
    double start_us; /* from 1970 on, whole: added to the others it would cost them a quarter */
    ZeroTimeSpan* spans;
    int spans_count, spans_capacity;
    ZeroEntry* entries;
    size_t entries_count, entries_capacity;
    double exposed_ms; /* of the spans read since the last zero_timeline_take_exposed */
} ZeroTimeline;

static inline void zero_timeline_free(ZeroTimeline* t) {
    int i;
    for (i = 0; i < t->spans_capacity; i++) {
        if (t->spans[i].begin) cudaEventDestroy(t->spans[i].begin);
        if (t->spans[i].end) cudaEventDestroy(t->spans[i].end);
    }
    free(t->spans);
    free(t->entries);
    if (t->origin) cudaEventDestroy(t->origin);
    if (t->tried) cudaEventDestroy(t->tried);
    memset(t, 0, sizeof(*t));
}

static inline double zero_clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* The streams stay the caller's; t is all zero. With timing the host waits for the compute stream. */
static inline ZeroResult zero_timeline_start(ZeroTimeline* t, ZeroTiming timing, cudaStream_t compute,
                                             cudaStream_t communication) {
    double shortest_us = 0.0;
    int i;
    t->timing = timing;
    t->streams[ZERO_ROW_COMPUTE] = compute;
    t->streams[ZERO_ROW_COMMUNICATION] = communication;
    if (timing == ZERO_TIMING_OFF) return zero_ok();
    ZERO_TRY_CUDA(cudaEventCreate(&t->origin));
    ZERO_TRY_CUDA(cudaEventCreate(&t->tried));
    t->start_us = floor(zero_clock_us());
    for (i = 0; i < 8; i++) { /* the shortest: a process may be held up between event and clock */
        const double before_us = zero_clock_us();
        const cudaEvent_t tried = t->tried;
        double took_us;
        ZERO_TRY_CUDA(cudaEventRecord(tried, compute));
        ZERO_TRY_CUDA(cudaEventSynchronize(tried));
        took_us = zero_clock_us() - before_us;
        if (i > 0 && took_us >= shortest_us) continue;
        shortest_us = took_us;
        t->origin_us = before_us - t->start_us + 0.5 * took_us;
        t->tried = t->origin;
        t->origin = tried;
    }
    return zero_ok();
}

/* When the earliest span of those drained began, in whole microseconds; the present if there is none. */
static inline double zero_timeline_first_us(const ZeroTimeline* t) {
    double first_us = t->entries_count ? t->entries[0].begin_us : zero_clock_us() - t->start_us;
    size_t i;
    for (i = 1; i < t->entries_count; i++)
        if (t->entries[i].begin_us < first_us) first_us = t->entries[i].begin_us;
    return t->start_us + floor(first_us);
}

/* ------------------------------------------------------------------ spans */

static inline void zero_nvtx_push(const char* name, int index) {
#ifdef ZERO_HAS_NVTX
    char text[64];
    if (index == ZERO_NO_INDEX)
        snprintf(text, sizeof(text), "zero %s", name);
    else
        snprintf(text, sizeof(text), "zero %s %d", name, index);
    nvtxRangePushA(text);
#else
    (void)name, (void)index;
#endif
}

static inline void zero_nvtx_pop(void) {
#ifdef ZERO_HAS_NVTX
    nvtxRangePop();
#endif
}

static inline ZeroResult zero_timeline_grow(ZeroTimeline* t) {
    const int capacity = t->spans_capacity ? 2 * t->spans_capacity : 32;
    ZeroTimeSpan* spans = (ZeroTimeSpan*)realloc(t->spans, (size_t)capacity * sizeof(ZeroTimeSpan));
    if (!spans) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %d spans of time", capacity);
    memset(spans + t->spans_capacity, 0, (size_t)(capacity - t->spans_capacity) * sizeof(ZeroTimeSpan));
    t->spans = spans;
    t->spans_capacity = capacity;
    return zero_ok();
}

/* *span: for zero_span_end, which must follow on every path that goes on. name: a string literal; index: shown behind it,
   or ZERO_NO_INDEX. */
static inline ZeroResult zero_span_begin(ZeroTimeline* t, ZeroRow row, const char* name, int index,
                                         int* span) {
    const int is_wait = strcmp(name, ZERO_SPAN_WAIT) == 0 || strcmp(name, ZERO_SPAN_ISSUE) == 0;
    ZeroTimeSpan* s;
    *span = -1;
    zero_nvtx_push(name, index);
    if (t->timing == ZERO_TIMING_OFF || (t->timing == ZERO_TIMING_WAITS && !is_wait)) return zero_ok();
    if (t->spans_count == t->spans_capacity) ZERO_TRY(zero_timeline_grow(t));
    s = &t->spans[t->spans_count];
    if (!s->begin) ZERO_TRY_CUDA(cudaEventCreate(&s->begin));
    if (!s->end) ZERO_TRY_CUDA(cudaEventCreate(&s->end));
    s->name = name;
    s->index = index;
    s->row = row;
    s->is_wait = is_wait;
    s->ended = 0;
    ZERO_TRY_CUDA(cudaEventRecord(s->begin, t->streams[row]));
    *span = t->spans_count++;
    return zero_ok();
}

static inline ZeroResult zero_span_end(ZeroTimeline* t, int span) {
    zero_nvtx_pop();
    if (span < 0) return zero_ok();
    ZERO_TRY_CUDA(cudaEventRecord(t->spans[span].end, t->streams[t->spans[span].row]));
    t->spans[span].ended = 1;
    return zero_ok();
}

/* ------------------------------------------------------------------ reading */

/* Whether an event has happened; "not yet" does not stay behind as the caller's last error. */
static inline ZeroResult zero_query_event(cudaEvent_t event, int* happened) {
    cudaError_t state = cudaEventQuery(event);
    *happened = state == cudaSuccess;
    if (state == cudaErrorNotReady)
        (void)cudaGetLastError();
    else if (state != cudaSuccess)
        return zero_error(ZERO_ERROR_CUDA, "cudaEventQuery: %s: earlier work on the device failed",
                          cudaGetErrorString(state));
    return zero_ok();
}

static inline ZeroResult zero_timeline_keep(ZeroTimeline* t, const ZeroTimeSpan* s, double begin_us,
                                            double us) {
    ZeroEntry* entry;
    if (t->entries_count == t->entries_capacity) {
        const size_t capacity = t->entries_capacity ? 2 * t->entries_capacity : 256;
        ZeroEntry* entries = (ZeroEntry*)realloc(t->entries, capacity * sizeof(ZeroEntry));
        if (!entries) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu spans of time", capacity);
        t->entries = entries;
        t->entries_capacity = capacity;
    }
    entry = &t->entries[t->entries_count++];
    entry->name = s->name;
    entry->index = s->index;
    entry->row = s->row;
    entry->begin_us = begin_us;
    entry->us = us;
    return zero_ok();
}

static inline ZeroResult zero_timeline_read(ZeroTimeline* t, ZeroTimeSpan* s) {
    float begin_ms = 0.0f, end_ms = 0.0f, ms = 0.0f;
    ZERO_TRY_CUDA(cudaEventElapsedTime(&ms, s->begin, s->end));
    if (s->is_wait) t->exposed_ms += (double)ms;
    if (t->timing != ZERO_TIMING_ALL || strcmp(s->name, ZERO_SPAN_ISSUE) == 0) return zero_ok();
    /* both ends from one moment: what follows one another does so rounded, too */
    ZERO_TRY_CUDA(cudaEventElapsedTime(&begin_ms, t->origin, s->begin));
    ZERO_TRY_CUDA(cudaEventElapsedTime(&end_ms, t->origin, s->end));
    ZERO_TRY(zero_timeline_keep(t, s, t->origin_us + 1e3 * (double)begin_ms,
                                1e3 * ((double)end_ms - (double)begin_ms)));
    if (begin_ms > 1e3f) { /* fp32 milliseconds: begin to count anew before they lose microseconds */
        const cudaEvent_t origin = t->origin;
        t->origin = s->begin;
        t->origin_us += 1e3 * (double)begin_ms;
        s->begin = origin;
    }
    return zero_ok();
}

/* Reads the spans that have passed, without waiting; the others stay. Between steps: no span is open then. */
static inline ZeroResult zero_timeline_drain(ZeroTimeline* t) {
    int i, kept = 0;
    for (i = 0; i < t->spans_count; i++) {
        int passed = 1;
        if (t->spans[i].ended) ZERO_TRY(zero_query_event(t->spans[i].end, &passed));
        if (passed && t->spans[i].ended) ZERO_TRY(zero_timeline_read(t, &t->spans[i]));
        if (passed) continue; /* one without an end was left by an error */
        if (kept != i) {
            const ZeroTimeSpan moved = t->spans[kept]; /* its events are used again */
            t->spans[kept] = t->spans[i];
            t->spans[i] = moved;
        }
        kept++;
    }
    t->spans_count = kept;
    return zero_ok();
}

/* Milliseconds that the compute stream stood still for collectives, of the spans drained since the last call. */
static inline double zero_timeline_take_exposed(ZeroTimeline* t) {
    const double exposed_ms = t->exposed_ms;
    t->exposed_ms = 0.0;
    return exposed_ms;
}

/* Perfetto drops a span that overlaps another one of its row and does not lie inside. What rounding has moved is moved
   back. ends: of the spans that are open, `depth` of at most 16. */
static inline void zero_timeline_nest(long long* ends, int* depth, long long* begin, long long* end) {
    while (*depth > 0) {
        const long long open_end = ends[*depth - 1];
        if (open_end <= *begin)
            (*depth)--;
        else if (*end <= open_end)
            break;
        else if (open_end - *begin < *end - open_end)
            *begin = open_end; /* it follows */
        else
            *end = open_end; /* it is inside */
    }
    if (*depth < 16) ends[(*depth)++] = *end;
}

/* Eighths of a microsecond in microseconds, by whole numbers: a double would get the point of the host program's locale. */
static inline void zero_timeline_eighths(long long eighths, char* text, size_t bytes) {
    const long long positive = eighths < 0 ? -eighths : eighths;
    snprintf(text, bytes, "%s%lld.%03d", eighths < 0 ? "-" : "", positive / 8, (int)(positive % 8) * 125);
}

/* Writes what was drained, to a file of the caller's, as events of process `rank`, each but the file's very first behind a
   comma: the caller puts {"traceEvents":[ before all ranks' events and ]} behind them. start_us: the time that counts as
   zero. 0: writing failed. */
static inline int zero_timeline_write(const ZeroTimeline* t, FILE* file, int rank, double start_us) {
    static const char* const rows[ZERO_ROWS] = {"compute stream", "communication stream"};
    char text[256];
    long long ends[ZERO_ROWS][16];
    int row, depth[ZERO_ROWS] = {0, 0};
    size_t i, written = 1;
    snprintf(text, sizeof(text),
             "%s{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}",
             rank > 0 ? ",\n" : "", rank, rank);
    written &= fwrite(text, strlen(text), 1, file);
    for (row = 0; row < ZERO_ROWS; row++) {
        snprintf(
            text, sizeof(text),
            ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
            rank, row, rows[row]);
        written &= fwrite(text, strlen(text), 1, file);
    }
    for (i = 0; i < t->entries_count; i++) {
        const ZeroEntry* e = &t->entries[i];
        /* eighths of a microsecond: three digits, and exact as binary fractions, too */
        const double since_us = t->start_us - start_us + e->begin_us;
        long long begin = llround(8.0 * since_us), end = llround(8.0 * (since_us + e->us));
        char index[16] = "", times[2][32];
        zero_timeline_nest(ends[e->row], &depth[e->row], &begin, &end);
        if (e->index != ZERO_NO_INDEX) snprintf(index, sizeof(index), " %d", e->index);
        zero_timeline_eighths(begin, times[0], sizeof(times[0]));
        zero_timeline_eighths(end - begin, times[1], sizeof(times[1]));
        snprintf(text, sizeof(text),
                 ",\n{\"ph\":\"X\",\"name\":\"%.80s%s\",\"pid\":%d,\"tid\":%d,\"ts\":%s,\"dur\":%s}", e->name,
                 index, rank, e->row, times[0], times[1]);
        written &= fwrite(text, strlen(text), 1, file);
    }
    return (int)written;
}

#endif /* LLMC_ZERO_TIMELINE_CUH_INCLUDED */
