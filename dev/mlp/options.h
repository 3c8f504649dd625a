/* dev/mlp/options.h - the command line of train_mlp: one table gives parsing, checking and --help.

   Letters that llm.c has keep llm.c's meaning; what is new is a capital. A bad value ends in one line that names the
   flag, the value and the range; the last of a repeated flag wins.

   defines: Options, options_default, options_parse, options_help
*/
#pragma once
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../llmc_zero/memory.cuh"

typedef enum OptionsData { DATA_RECIPE = 0, DATA_OWN, DATA_SPLIT } OptionsData;

typedef struct Options {
    /* as in llm.c */
    long long batch, total_batch, steps, stage, masters;
    double lr, weight_decay;
    const char* directory;
    const char *start_method, *server, *start_path;
    long long start_ranks, start_rank, gpus_per_node;
    long long checkpoint_every, checkpoint_keep, resume;
    /* new */
    long long layers, width, dtype, algorithm, seed, reduction, accumulation, overlap, data;
    double beta1, beta2, eps, momentum, max_norm, bucket_mb;
    long long bucket_unit; /* -K unit */
    long long plan, help, hash_every, read_back;
    const char* trace;
    double device_mb, limit_s;
    long long has_directory, has_trace; /* -o, -T given: of these only that must be the same on all ranks */
} Options;

typedef enum OptionKind {
    OPTION_INT,
    OPTION_REAL,
    OPTION_TEXT,
    OPTION_CHOICE,
    OPTION_BUCKET,
    OPTION_SWITCH
} OptionKind;

typedef struct Option {
    const char* flag;
    OptionKind kind;
    size_t field;     /* offset in Options */
    double low, high; /* inclusive */
    const char*
        choices; /* "a|b|c": the field becomes low, low + 1, low + 2; for texts the help's name of the value */
    const char* later; /* values refused with "not in this version": choices, "*" for all but 0 */
    const char* help;
} Option;

#define OPTION_AT(field) offsetof(Options, field)

static const Option OPTIONS[] = {
    {"-b", OPTION_INT, OPTION_AT(batch), 1, 1e9, NULL, NULL,
     "batch per rank and micro-step, in samples (20)"},
    {"-d", OPTION_INT, OPTION_AT(total_batch), 1, 1e15, NULL, NULL,
     "total batch in samples, a multiple of -b (b * ranks); micro-steps follow"},
    {"-x", OPTION_INT, OPTION_AT(steps), 1, 1e12, NULL, NULL, "steps (1)"},
    {"-l", OPTION_REAL, OPTION_AT(lr), 0, 1e30, NULL, NULL, "learning rate (0.01)"},
    {"-c", OPTION_REAL, OPTION_AT(weight_decay), 0, 1e30, NULL, NULL, "weight decay, on biases too (0)"},
    {"-w", OPTION_INT, OPTION_AT(masters), 0, 1, NULL, NULL,
     "bf16: 1 fp32 masters, 0 stochastic rounding (1)"},
    {"-z", OPTION_INT, OPTION_AT(stage), 0, 3, NULL, NULL,
     "ZeRO stage: 0 off, 1 optimizer state, 2 and gradients, 3 and parameters (1)"},
    {"-o", OPTION_TEXT, OPTION_AT(directory), 0, 0, "DIR", NULL,
     "write main.log, summary.json and checkpoints there (nothing)"},
    {"-n", OPTION_INT, OPTION_AT(checkpoint_every), 0, 1e12, NULL, NULL,
     "checkpoint in -o DIR every n steps and at the end, 0 = never (0)"},
    {"-nk", OPTION_INT, OPTION_AT(checkpoint_keep), 0, 1e12, NULL, NULL,
     "keep the last k checkpoints, 0 = all (0)"},
    {"-y", OPTION_INT, OPTION_AT(resume), 0, 1, NULL, NULL,
     "1: resume from the newest whole checkpoint in -o DIR, if there is one (0)"},
    {"-pi", OPTION_TEXT, OPTION_AT(start_method), 0, 0, "mpi|fs", "tcp",
     "start-up: mpi, or a shared folder (mpi where built with it)"},
    {"-ps", OPTION_TEXT, OPTION_AT(server), 0, 0, "ADDR", "*", "server address, for tcp"},
    {"-pf", OPTION_TEXT, OPTION_AT(start_path), 0, 0, "DIR", NULL, "shared folder, for fs"},
    {"-pn", OPTION_INT, OPTION_AT(start_ranks), 1, 1e6, NULL, NULL, "ranks, for fs (1)"},
    {"-pr", OPTION_INT, OPTION_AT(start_rank), 0, 1e6, NULL, NULL, "this rank, for fs (0)"},
    {"-pg", OPTION_INT, OPTION_AT(gpus_per_node), 0, 1e6, NULL, NULL,
     "GPUs per node to use, 0 = all visible (0)"},
    {"-L", OPTION_INT, OPTION_AT(layers), 1, 1e6, NULL, NULL, "layers, each a Linear(C, C) (20)"},
    {"-C", OPTION_INT, OPTION_AT(width), 1, 1e6, NULL, NULL, "width C (2000)"},
    {"-P", OPTION_CHOICE, OPTION_AT(dtype), 0, 0, "fp32|bf16", NULL, "type of params and gradients (fp32)"},
    {"-U", OPTION_CHOICE, OPTION_AT(algorithm), 0, 0, "adamw|adam|sgd", NULL, "optimizer (adam)"},
    {"-B1", OPTION_REAL, OPTION_AT(beta1), 0, 0.99999999, NULL, NULL, "beta1 (0.9)"},
    {"-B2", OPTION_REAL, OPTION_AT(beta2), 0, 0.99999999, NULL, NULL, "beta2 (0.999)"},
    {"-E", OPTION_REAL, OPTION_AT(eps), 1e-30, 1e30, NULL, NULL, "eps, outside the root (1e-8)"},
    {"-M", OPTION_REAL, OPTION_AT(momentum), 0, 1, NULL, NULL, "SGD momentum; 0 keeps no state (0.9)"},
    {"-G", OPTION_REAL, OPTION_AT(max_norm), 0, 1e30, NULL, NULL,
     "clip the gradient norm to this, 0 = off (0)"},
    {"-S", OPTION_INT, OPTION_AT(seed), 0, 4294967295.0, NULL, NULL, "seed (0)"},
    {"-K", OPTION_BUCKET, OPTION_AT(bucket_mb), 0, 1e9, "MB|unit", NULL,
     "bucket size in MB, or unit, or 0 = one bucket; with -z 2 and 3 units apart (0, unit)"},
    {"-R", OPTION_CHOICE, OPTION_AT(reduction), 0, 0, "nccl|ordered|allreduce", NULL,
     "reduction: nccl; ordered, in fp32, any number of ranks the same; allreduce, with -z 0 only (nccl)"},
    {"-A", OPTION_CHOICE, OPTION_AT(accumulation), ZERO_ACCUMULATE_STEP, 0, "step|micro", NULL,
     "reduce once a step, or each micro-step into fp32; -z 2 and 3 do that always (step; -R ordered: micro)"},
    {"-O", OPTION_INT, OPTION_AT(overlap), 0, 1, NULL, NULL,
     "overlap communication with forward and backward (1)"},
    {"-I", OPTION_CHOICE, OPTION_AT(data), 0, 0, "recipe|own|split", NULL,
     "data: same batch on all ranks, own batch each, new samples (recipe)"},
    {"-T", OPTION_TEXT, OPTION_AT(trace), 0, 0, "FILE", NULL,
     "write a timeline of all ranks there (JSON for chrome://tracing or Perfetto)"},
    {"-H", OPTION_INT, OPTION_AT(hash_every), 0, 1e12, NULL, NULL,
     "compare the ranks' hashes of the params every k steps, 0 = at the end only (0)"},
    {"-V", OPTION_INT, OPTION_AT(read_back), 0, 1, NULL, NULL,
     "verify: other ranks read back what a checkpoint's writers wrote, before it gets its name (1)"},
    {"-W", OPTION_REAL, OPTION_AT(limit_s), 0.1, 1e9, NULL, NULL,
     "end the run after so many seconds without progress: a rank is gone or stuck (600)"},
    {"--memory", OPTION_REAL, OPTION_AT(device_mb), 1, 1e12, NULL, NULL,
     "with --plan: device memory in MB, for the largest -L that fits (80000)"},
    {"--plan", OPTION_SWITCH, OPTION_AT(plan), 0, 0, NULL, NULL, "print the memory plan and stop"},
    {"--help", OPTION_SWITCH, OPTION_AT(help), 0, 0, NULL, NULL, "print this and stop"},
};
#define OPTIONS_COUNT (sizeof(OPTIONS) / sizeof(OPTIONS[0]))

static inline Options options_default(void) {
    Options o;
    memset(&o, 0, sizeof(o));
    o.batch = 20, o.steps = 1, o.stage = 1, o.masters = 1, o.lr = 0.01;
    o.start_ranks = 1, o.read_back = 1;
    o.device_mb = 80000, o.limit_s = 600;
    o.layers = 20, o.width = 2000, o.algorithm = ZERO_ADAM, o.overlap = 1;
    o.beta1 = 0.9, o.beta2 = 0.999, o.eps = 1e-8, o.momentum = 0.9;
    return o;
}

static inline void options_help(FILE* file) {
    size_t i;
    fprintf(file, "usage: mpirun -np N ./train_mlp [flags]; the defaults train PyTorch's "
                  "ZeroRedundancyOptimizer recipe\n");
    for (i = 0; i < OPTIONS_COUNT; i++) {
        const char* value = OPTIONS[i].choices;
        if (!value) value = OPTIONS[i].kind == OPTION_SWITCH ? "" : OPTIONS[i].kind == OPTION_INT ? "N" : "X";
        fprintf(file, "  %-6s %-22s %s%s%s%s\n", OPTIONS[i].flag, value, OPTIONS[i].help,
                OPTIONS[i].later ? "; not in this version: " : "",
                OPTIONS[i].later && *OPTIONS[i].later != '*' ? OPTIONS[i].later : "",
                OPTIONS[i].later && *OPTIONS[i].later == '*' ? "this flag" : "");
    }
}

/* The place of `word` in "a|b|c", or -1. */
static inline int option_find(const char* list, const char* word) {
    size_t length = strlen(word);
    int place = 0;
    for (; list && length > 0; place++) {
        const char* bar = strchr(list, '|');
        size_t item = bar ? (size_t)(bar - list) : strlen(list);
        if (item == length && strncmp(list, word, item) == 0) return place;
        list = bar ? bar + 1 : NULL;
    }
    return -1;
}

static inline ZeroResult option_range_error(const Option* option, const char* value) {
    if (option->kind == OPTION_CHOICE)
        return zero_error(ZERO_ERROR_ARGUMENT, "%s %.60s: one of %s is needed", option->flag, value,
                          option->choices);
    return zero_error(ZERO_ERROR_ARGUMENT, "%s %.60s: %s from %.9g to %.9g%s is needed", option->flag, value,
                      option->kind == OPTION_INT ? "a whole number" : "a number", option->low, option->high,
                      option->kind == OPTION_BUCKET ? ", or unit," : "");
}

static inline ZeroResult option_set_number(Options* o, const Option* option, const char* value) {
    char* end;
    double number;
    errno = 0;
    if (option->kind == OPTION_INT) {
        long long whole = strtoll(value, &end, 10);
        number = (double)whole;
        *(long long*)((char*)o + option->field) = whole;
    } else {
        number = strtod(value, &end);
        *(double*)((char*)o + option->field) = number;
    }
    if (end == value || *end != '\0' || (errno == ERANGE && (fabs(number) > 1.0 || number == 0.0)) ||
        !(number >= option->low && number <= option->high))
        return option_range_error(option, value);
    return zero_ok();
}

static inline ZeroResult option_set(Options* o, const Option* option, const char* value) {
    if (option->later) {
        int off = option->kind == OPTION_INT && strcmp(value, "0") == 0;
        if ((*option->later == '*' && !off) || option_find(option->later, value) >= 0)
            return zero_error(ZERO_ERROR_ARGUMENT, "%s %.60s: not in this version", option->flag, value);
    }
    if (option->kind == OPTION_TEXT) {
        if (strcmp(option->flag, "-pi") == 0 && option_find(option->choices, value) < 0)
            return zero_error(ZERO_ERROR_ARGUMENT, "-pi %.60s: one of %s is needed", value, option->choices);
        *(const char**)((char*)o + option->field) = value;
        return zero_ok();
    }
    if (option->kind == OPTION_CHOICE) {
        int place = option_find(option->choices, value);
        if (place < 0) return option_range_error(option, value);
        *(long long*)((char*)o + option->field) = (long long)option->low + place;
        return zero_ok();
    }
    if (option->kind == OPTION_BUCKET) {
        o->bucket_unit = strcmp(value, "unit") == 0;
        o->bucket_mb = 0.0;
        if (o->bucket_unit) return zero_ok();
    }
    return option_set_number(o, option, value);
}

/* What one flag cannot see: flags that do not go together. ranks: of the world. */
static inline ZeroResult options_check(const Options* o, int ranks) {
    long long per_micro = o->batch * ranks;
    if (o->reduction == ZERO_REDUCE_ALLREDUCE && o->stage != 0)
        return zero_error(ZERO_ERROR_ARGUMENT, "-R allreduce: works with -z 0 only, not with -z %lld",
                          o->stage);
    if (o->reduction == ZERO_REDUCE_ALLREDUCE && o->accumulation == ZERO_ACCUMULATE_MICRO)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "-A micro: works with -R nccl and ordered, not with -R allreduce");
    if (o->trace && (o->trace[0] == '\0' || strlen(o->trace) > 3000))
        return zero_error(ZERO_ERROR_ARGUMENT, "-T %.60s: a path of 1 to 3000 characters is needed",
                          o->trace);
    if (o->total_batch && (o->total_batch % o->batch != 0))
        return zero_error(ZERO_ERROR_ARGUMENT, "-d %lld: a multiple of -b %lld is needed", o->total_batch,
                          o->batch);
    if (o->total_batch / per_micro > 1000000)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "-d %lld: %lld micro-steps of -b * ranks = %lld; 1 to 1000000 are possible",
                          o->total_batch, o->total_batch / per_micro, per_micro);
    if (o->directory && (o->directory[0] == '\0' || strlen(o->directory) > 3000))
        return zero_error(ZERO_ERROR_ARGUMENT, "-o %.60s: a path of 1 to 3000 characters is needed",
                          o->directory);
    if (!o->directory && (o->checkpoint_every || o->resume))
        return zero_error(ZERO_ERROR_ARGUMENT, "%s %lld: -o DIR is needed, for the checkpoints",
                          o->checkpoint_every ? "-n" : "-y",
                          o->checkpoint_every ? o->checkpoint_every : o->resume);
    if (o->checkpoint_keep && !o->checkpoint_every)
        return zero_error(ZERO_ERROR_ARGUMENT, "-nk %lld: works with -n only", o->checkpoint_keep);
    return zero_ok();
}

/* Flags of start-up that do not go together; before the ranks can talk. */
static inline ZeroResult options_check_start(const Options* o) {
    int fs = o->start_method && strcmp(o->start_method, "fs") == 0;
    if (fs && (!o->start_path || !o->start_path[0]))
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "-pi fs: a folder that all ranks can write is needed: -pf DIR");
    if (!fs && (o->start_path || o->start_ranks != 1 || o->start_rank != 0))
        return zero_error(ZERO_ERROR_ARGUMENT, "%s: works with -pi fs only",
                          o->start_path         ? "-pf"
                          : o->start_ranks != 1 ? "-pn"
                                                : "-pr");
    if (o->start_rank >= o->start_ranks)
        return zero_error(ZERO_ERROR_ARGUMENT,
                          "-pr %lld: a whole number from 0 to %lld (-pn less 1) is needed", o->start_rank,
                          o->start_ranks - 1);
    return zero_ok();
}

/* The flags as they must be the same on all ranks: without those that are each rank's own, and without texts, whose
   addresses say nothing. */
static inline Options options_comparable(const Options* o) {
    Options c;
    memcpy(&c, o, sizeof(c)); /* padding too */
    c.has_directory = o->directory != NULL, c.has_trace = o->trace != NULL;
    c.directory = c.start_method = c.server = c.start_path = c.trace = NULL;
    c.start_rank = 0;
    return c;
}

/* The first flag in which two sets of comparable options differ, or NULL. */
static inline const char* options_difference(const Options* a, const Options* b) {
    size_t k;
    for (k = 0; k < OPTIONS_COUNT; k++)
        if (memcmp((const char*)a + OPTIONS[k].field, (const char*)b + OPTIONS[k].field, sizeof(long long)) !=
            0)
            return OPTIONS[k].flag;
    if (a->has_directory != b->has_directory) return "-o";
    if (a->has_trace != b->has_trace) return "-T";
    return a->bucket_unit != b->bucket_unit ? "-K" : NULL;
}

/* argv[0] is skipped. On an error o is half filled. */
static inline ZeroResult options_parse(Options* o, int argc, char** argv) {
    int i;
    *o = options_default();
    for (i = 1; i < argc; i++) {
        const Option* option = NULL;
        size_t k;
        for (k = 0; k < OPTIONS_COUNT; k++)
            if (strcmp(argv[i], OPTIONS[k].flag) == 0) option = &OPTIONS[k];
        if (!option && strcmp(argv[i], "-h") == 0) option = &OPTIONS[OPTIONS_COUNT - 1];
        if (!option)
            return zero_error(ZERO_ERROR_ARGUMENT, "%.60s: unknown flag; --help lists them", argv[i]);
        if (option->kind == OPTION_SWITCH) {
            *(long long*)((char*)o + option->field) = 1;
            continue;
        }
        if (i + 1 == argc) return zero_error(ZERO_ERROR_ARGUMENT, "%s: a value is missing", option->flag);
        ZERO_TRY(option_set(o, option, argv[++i]));
    }
    return options_check_start(o);
}
