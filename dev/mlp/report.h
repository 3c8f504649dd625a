/* dev/mlp/report.h - what train_mlp says: step lines, main.log, the parameters' sum and hash, summary.json.

   main.log has llm.c's form with nine significant digits, so that an fp32 number survives unchanged. Everything of a run goes
   to the directory that it found under its name at the start (report_place): when another one stands there, or none, the run
   ends, at the next save at the latest.

   defines: Report, report_open, report_place, report_in_place, report_begin, report_step, report_sync, report_close,
            report_free, ParamsDigest, params_sums
*/
#pragma once
#include <sys/file.h>

#include "../../llmc_zero/llmc_zero.cuh"
#include "log.h"
#include "options.h"

typedef struct Report { /* rank 0 writes, the others keep quiet, but for checkpoints */
    int writes;
    int lock;        /* the directory, opened; rank 0 holds a lock on it: no other run writes there */
    dev_t device;    /* of the directory, */
    ino_t inode;     /* whatever its name is now */
    char opened[32]; /* its path as long as it is open, or "" */
    FILE* log;
    const Options* options;
    double *step_ms, *exposed_ms; /* of the steps so far */
    size_t count, capacity;
    double loss, norm;
} Report;

/* A run that does not resume must not mix its checkpoints with those of an older one. */
static inline ZeroResult report_check_unused(const Options* o) {
    std::vector<uint64_t> steps;
    std::vector<std::string> temporary;
    if (o->resume) return zero_ok();
    ZERO_TRY(zero_checkpoint_steps(o->directory, &steps, &temporary));
    if (steps.empty()) return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT,
                      "-o %.120s: holds checkpoints of a run, up to step %llu: resume it with -y 1, or give "
                      "another directory",
                      o->directory, (unsigned long long)steps.back());
}

/* A directory that cannot be opened, or a machine without /proc: its name has to do. */
static inline void report_hold(Report* report, const Options* o) {
    report->lock = open(o->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    snprintf(report->opened, sizeof(report->opened), "/proc/self/fd/%d", report->lock);
    if (report->lock < 0 || access(report->opened, F_OK) != 0) report->opened[0] = '\0';
}

/* Where a running run writes to. A directory's name may come to mean another one between a look and a save; this does not. */
static inline const char* report_place(const Report* report) {
    return report->opened[0] ? report->opened : report->options->directory;
}

/* Two runs in one directory would cut each other's log and delete each other's checkpoints. The lock ends with the process;
   a file system that has none is no error. */
static inline ZeroResult report_lock(Report* report, const Options* o) {
    report_hold(report, o);
    if (report->lock < 0 || flock(report->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
        return zero_ok();
    return zero_error(ZERO_ERROR_ARGUMENT,
                      "-o %.120s: another run is writing there: wait for its end, or give another directory",
                      o->directory);
}

/* Whether -o still leads to the directory that this run began in. */
static inline ZeroResult report_in_place(const Report* report) {
    struct stat there;
    const char* directory = report->options->directory;
    if (!report->writes || !directory) return zero_ok();
    if (stat(directory, &there) == 0 && there.st_dev == report->device && there.st_ino == report->inode)
        return zero_ok();
    return zero_error(
        ZERO_ERROR_SYSTEM,
        "-o %.120s: no longer the directory that this run began in: it was renamed, replaced or "
        "deleted meanwhile",
        directory);
}

/* Makes the directory with its parents. A rank that does not write only returns. */
static inline ZeroResult report_open(Report* report, const Options* o, int writes) {
    char path[4096];
    struct stat status;
    size_t i, length;
    memset(report, 0, sizeof(*report));
    report->writes = writes;
    report->lock = -1;
    report->options = o;
    report->loss = report->norm = NAN; /* no step yet */
    if (!writes || !o->directory) return zero_ok();
    length = strlen(o->directory);
    for (i = 1; i <= length; i++) {
        if (i < length && o->directory[i] != '/') continue;
        snprintf(path, sizeof(path), "%.*s", (int)i, o->directory);
        const int made = mkdir(path, 0777) == 0;
        if ((made && folder_sync_above(path) != 0) || (!made && errno != EEXIST))
            return zero_error(ZERO_ERROR_SYSTEM, "-o %.120s: cannot make the directory %.60s: %s",
                              o->directory, path, strerror(errno));
    }
    ZERO_TRY(report_lock(report, o));
    if ((report->lock >= 0 ? fstat(report->lock, &status) : stat(o->directory, &status)) != 0)
        return zero_error(ZERO_ERROR_SYSTEM, "-o %.120s: %s", o->directory, strerror(errno));
    report->device = status.st_dev;
    report->inode = status.st_ino;
    return report_check_unused(o);
}

/* Opens DIR/main.log: anew, or after the line of the step after which the run goes on. All ranks call it. */
static inline ZeroResult report_begin(Report* report, long long step) {
    const Options* o = report->options;
    char path[4096];
    int failed;
    if (!report->writes && o->directory) report_hold(report, o);
    if (!report->writes || !o->directory) return zero_ok();
    ZERO_TRY(report_in_place(report));
    snprintf(path, sizeof(path), "%s/summary.json", o->directory);
    unlink(path); /* of an older run: it must not stand beside this run's log if this run fails */
    snprintf(path, sizeof(path), "%s/main.log", o->directory);
    failed = step > 0 && log_cut(path, step, &report->loss, &report->norm) != 0;
    snprintf(path, sizeof(path), "%s/main.log", report_place(report));
    report->log = failed ? NULL : fopen(path, step > 0 ? "a" : "w");
    if (!report->log)
        return zero_error(ZERO_ERROR_SYSTEM, "-o %.120s: cannot write main.log there: %s", o->directory,
                          strerror(errno));
    return zero_ok();
}

/* main.log is on the disk before a checkpoint that lets a run go on behind its last line. */
static inline ZeroResult report_sync(Report* report) {
    ZERO_TRY(report_in_place(report));
    if (!report->log || fsync(fileno(report->log)) == 0 || errno == EINVAL) return zero_ok();
    return zero_error(ZERO_ERROR_SYSTEM, "writing %.120s/main.log: %s", report->options->directory,
                      strerror(errno));
}

static inline ZeroResult report_keep(Report* report, double step_ms, double exposed_ms) {
    if (report->count == report->capacity) {
        size_t capacity = report->capacity ? 2 * report->capacity : 256;
        double* a = (double*)realloc(report->step_ms, capacity * sizeof(double));
        if (a) report->step_ms = a;
        double* b = (double*)realloc(report->exposed_ms, capacity * sizeof(double));
        if (b) report->exposed_ms = b;
        if (!a || !b) return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu step times", capacity);
        report->capacity = capacity;
    }
    report->step_ms[report->count] = step_ms;
    report->exposed_ms[report->count++] = exposed_ms;
    return zero_ok();
}

/* One finished step, counted from 1. */
static inline ZeroResult report_step(Report* report, long long step, double loss, const ZeroReport* z,
                                     double step_ms) {
    const Options* o = report->options;
    report->loss = loss;
    report->norm = z->norm;
    ZERO_TRY(report_keep(report, step_ms, z->exposed_ms));
    if (!report->writes) return zero_ok();
    printf("step %lld/%lld | loss %.9g | norm %.9g | lr %g | %.2f ms | exposed %.2f ms%s%s\n", step, o->steps,
           loss, (double)z->norm, o->lr, step_ms, z->exposed_ms, z->skip ? " | skipped: " : "",
           z->skip ? zero_skip_text(z->skip) : "");
    fflush(stdout);
    if (report->log) {
        fprintf(report->log, "s:%lld trl:%s lr:%s norm:%s\n", step, zero_number_text(loss, 9).text,
                zero_number_text(o->lr, 9).text, zero_number_text((double)z->norm, 9).text);
        if (fflush(report->log) != 0)
            return zero_error(ZERO_ERROR_SYSTEM, "writing %.120s/main.log: %s", o->directory,
                              strerror(errno));
    }
    return zero_ok();
}

/* ------------------------------------------------------------------ the parameters in numbers */

typedef struct ParamsDigest {
    double sum; /* as the recipe sums: sum of each weight + width * sum of each bias */
    double plain_sum;
    uint64_t hash, run; /* zero_run_hash: of the parameters, and with the state */
} ParamsDigest;

static inline void sum_segment(ParamsDigest* digest, const ZeroSegment* segment, const void* host,
                               ZeroDtype dtype, double sum_factor) {
    double sum = 0.0;
    for (size_t i = 0; i < segment->count; i++) {
        uint32_t bits =
            dtype == ZERO_BF16 ? (uint32_t)((const uint16_t*)host)[i] << 16 : ((const uint32_t*)host)[i];
        float x;
        memcpy(&x, &bits, sizeof(x));
        sum += x;
    }
    digest->sum += sum_factor * sum;
    digest->plain_sum += sum;
}

static inline ZeroResult read_segment(void* host, const void* params, size_t bytes, ZeroComm* comm) {
    ZERO_TRY(zero_comm_drain(comm));
    ZERO_TRY_CUDA(cudaMemcpy(host, params, bytes, cudaMemcpyDeviceToHost));
    return zero_ok();
}

/* The sums: reads all params back, segment by segment. Biases are the odd segments. All ranks call it, for in stage 3 each
   unit has to be gathered. */
static inline ZeroResult params_sums(ParamsDigest* digest, ZeroOptimizer* z, size_t width) {
    const ZeroLayout* layout = z->layout;
    size_t bytes = zero_dtype_bytes(layout->dtype), largest = 1;
    int open = ZERO_NO_UNIT;
    ZeroResult result = zero_ok();
    void *host, *params;
    memset(digest, 0, sizeof(*digest));
    for (int s = 0; s < layout->segments_count; s++)
        if (layout->segments[s].count > largest) largest = layout->segments[s].count;
    host = malloc(largest * bytes);
    if (!host) return zero_error(ZERO_ERROR_MEMORY, "no host memory for a tensor of %zu elements", largest);
    for (int s = 0; s < layout->segments_count && result.code == ZERO_OK; s++) {
        const ZeroSegment* segment = &layout->segments[s];
        result = zero_params_visit(z, s, &open, &params);
        if (result.code == ZERO_OK) result = read_segment(host, params, segment->count * bytes, &z->comm);
        if (result.code == ZERO_OK)
            sum_segment(digest, segment, host, layout->dtype, s % 2 ? (double)width : 1.0);
    }
    free(host);
    return result.code == ZERO_OK ? zero_params_leave(z, &open) : result;
}

/* ------------------------------------------------------------------ summary.json */

static inline int report_compare(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return x < y ? -1 : x > y;
}

static inline double report_median(const double* values, size_t count) {
    double median = 0.0, *sorted = (double*)malloc((count ? count : 1) * sizeof(double));
    if (!sorted || count == 0) {
        free(sorted);
        return 0.0;
    }
    memcpy(sorted, values, count * sizeof(double));
    qsort(sorted, count, sizeof(double), report_compare);
    median = count % 2 ? sorted[count / 2] : 0.5 * (sorted[count / 2 - 1] + sorted[count / 2]);
    free(sorted);
    return median;
}

/* JSON has no NaN: null then. */
static inline void report_number(FILE* file, const char* key, double value, int digits) {
    const int finite = value - value == 0.0;
    fprintf(file, "  \"%s\": %s,\n", key, finite ? zero_number_text(value, digits).text : "null");
}

/* Whatever became of the run: closes what is open and lets the directory go. */
static inline void report_free(Report* report) {
    if (report->log) fclose(report->log);
    if (report->lock >= 0) close(report->lock);
    free(report->step_ms);
    free(report->exposed_ms);
    report->log = NULL;
    report->lock = -1;
    report->step_ms = report->exposed_ms = NULL;
}

typedef struct Summary {
    int ranks;
    long long steps;
    uint64_t skipped;
    const ParamsDigest* digest;
    const size_t* peak_bytes; /* the four memory points */
    size_t state_bytes;
} Summary;

static inline void report_write_summary(const Report* report, FILE* file, const Summary* s) {
    fprintf(file, "{\n  \"ranks\": %d,\n  \"stage\": %lld,\n  \"steps\": %lld,\n  \"skipped\": %llu,\n",
            s->ranks, report->options->stage, s->steps, (unsigned long long)s->skipped);
    report_number(file, "loss", report->loss, 9);
    report_number(file, "norm", report->norm, 9);
    report_number(file, "params_sum", s->digest->sum, 17);
    fprintf(file, "  \"params_hash\": \"%016llx\",\n", (unsigned long long)s->digest->hash);
    fprintf(file, "  \"run_hash\": \"%016llx\",\n", (unsigned long long)s->digest->run);
    fprintf(file, "  \"peak_mb\": [");
    for (int i = 0; i < 4; i++)
        fprintf(file, "%s%s", i ? ", " : "", zero_number_fixed(1e-6 * (double)s->peak_bytes[i], 6).text);
    fprintf(file, "],\n  \"optimizer_state_mb\": %s,\n",
            zero_number_fixed(1e-6 * (double)s->state_bytes, 6).text);
    fprintf(file, "  \"step_ms\": %s,\n",
            zero_number_fixed(report_median(report->step_ms, report->count), 3).text);
    fprintf(file, "  \"exposed_ms\": %s\n}\n",
            zero_number_fixed(report_median(report->exposed_ms, report->count), 3).text);
}

/* Writes DIR/summary.json (whole or not at all, and still there after a crash) and closes main.log. */
static inline ZeroResult report_close(Report* report, const Summary* summary) {
    const char* place = report_place(report);
    char path[4096], temporary[4096];
    if (!report->log) return zero_ok();
    ZeroResult result = report_sync(report);
    int failed = ferror(report->log) | fclose(report->log);
    report->log = NULL;
    ZERO_TRY(result);
    snprintf(path, sizeof(path), "%s/summary.json", place);
    snprintf(temporary, sizeof(temporary), "%s/summary.json.tmp", place);
    FILE* file = failed ? NULL : fopen(temporary, "w");
    failed = !file;
    if (file) {
        report_write_summary(report, file, summary);
        failed = fflush(file) != 0 || (fsync(fileno(file)) != 0 && errno != EINVAL);
        failed |= ferror(file) | fclose(file);
        failed = failed || rename(temporary, path) != 0 || folder_sync(place) != 0;
    }
    if (!failed) return zero_ok();
    const int error = errno;
    unlink(temporary);
    return zero_error(ZERO_ERROR_SYSTEM, "writing main.log or summary.json in %.120s: %s",
                      report->options->directory, strerror(error));
}
