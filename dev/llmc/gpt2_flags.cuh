/* llmc_zero/gpt2_flags.cuh - what the new flags of llm.c's trainer say: -K, -R, -A, -O, -H, -V and -W; -z stays llm.c's.

   main reads them before there is a model: zero_gpt2_read_flags once with all words, zero_gpt2_flag for each flag that
   llm.c does not know; zero_gpt2_configure (gpt2.cuh) takes the settings. Part of gpt2.cuh, which includes it.
*/
#ifndef LLMC_ZERO_GPT2_FLAGS_CUH_INCLUDED
#define LLMC_ZERO_GPT2_FLAGS_CUH_INCLUDED

/* What -K, -R, -A, -O, -H, -V and -W say. */
typedef struct ZeroGpt2Settings {
    int units_apart;  /* -K unit: a bucket a layer */
    double bucket_mb; /* -K X: buckets of at most X MB; 0: one bucket */
    ZeroReduction reduction;
    ZeroAccumulation accumulation;
    int overlap;
    int hash_every;     /* -H: compare the ranks' parameters every so many steps; 0: at the end only */
    int save_every;     /* -n, with -o; 0: no checkpoints */
    const char* folder; /* -o */
    int read_back;      /* -V: checkpoints are read back before they get their name */
    double limit_s;     /* -W: without progress; then a rank is gone or stuck */
    int batches;        /* micro-batches of a step, of all ranks; 0: as many as micro-steps and ranks say */
    uint64_t flags;     /* of all of main's flags: must be the same on all ranks */
} ZeroGpt2Settings;

static inline ZeroGpt2Settings zero_gpt2_settings(void) {
    ZeroGpt2Settings settings = {1, 0.0, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_DEFAULT, 1, 0, 0, NULL, 1, 600.0,
                                 0, 0};
    return settings;
}

/* What all of main's flags together say. flags: one number of all but those that may differ: files and folders (-i,
   -j, -e, -o) and how ranks meet (-p?). Ranks with other steps, batches, rates or -H would wait for one another, or
   train their slices each in its own way. */
static inline void zero_gpt2_read_flags(ZeroGpt2Settings* settings, int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "-W") == 0) settings->limit_s = atof(argv[i + 1]);
        if (strcmp(argv[i], "-n") == 0) settings->save_every = atoi(argv[i + 1]);
        if (strcmp(argv[i], "-o") == 0) settings->folder = argv[i + 1];
        if (argv[i][0] == '-' && argv[i][1] && strchr("ijeop", argv[i][1])) continue;
        for (int word = i; word <= i + 1; word++)
            for (const char* c = argv[word]; c == argv[word] || c[-1]; c++)
                settings->flags = zero_mix(settings->flags * 257 + (unsigned char)*c + 1);
    }
    if (!settings->folder || settings->save_every < 0) settings->save_every = 0;
    zero_gpt2_start_watchdog(settings->limit_s);
}

static inline void zero_gpt2_usage(void) {
    fprintf(stderr, "  llmc_zero: -z 0 off, 1 optimizer state sharded, 2 and gradients, 3 and parameters\n");
    fprintf(
        stderr,
        "  -K <string> bucket size in MB, or unit = a bucket a layer, or 0 = one bucket (default = unit)\n");
    fprintf(stderr,
            "  -R <string> reduction of gradients: nccl; ordered: one micro-batch after another, the\n"
            "              same run on any number of ranks; allreduce with -z 0 (default = nccl)\n");
    fprintf(stderr, "  -A <string> step: reduce once a step; micro: each micro-step, into fp32 (-z 2 and 3 "
                    "do that always)\n"
                    "              (default = step; with -R ordered micro)\n");
    fprintf(stderr, "  -O <int>    overlap communication with forward and backward? (default = 1)\n");
    fprintf(
        stderr,
        "  -H <int>    compare the ranks' parameters every so many steps (default = 0, at the end only)\n");
    fprintf(stderr,
            "  -W <float>  end the run after so many seconds without progress: a rank is gone or stuck\n"
            "              (default = 600)\n");
    fprintf(stderr, "  -V <int>    read checkpoints back before they get their name? (default = 1)\n");
    fprintf(stderr,
            "  -n: DIR/step_*.safetensors holds the state of all ranks; -y 1 reads it on any number of\n"
            "  ranks; SIGTERM, INT and USR1 save behind the current step, and end the run with 0; a second "
            "one of the\n"
            "  first two ends it at once\n");
}

/* Takes flag -K, -R, -A, -O, -H, -V or -W; 0 if it is none of them. A value that cannot work ends the program. */
static inline int zero_gpt2_flag(ZeroGpt2Settings* settings, const char* flag, const char* value) {
    char* end = NULL;
    if (strlen(flag) != 2 || !strchr("KRAOHVW", flag[1])) return 0;
    if (flag[1] == 'K' && strcmp(value, "unit") == 0) {
        settings->units_apart = 1;
        settings->bucket_mb = 0.0;
    } else if (flag[1] == 'K') {
        settings->units_apart = 0;
        settings->bucket_mb = strtod(value, &end);
        if (end == value || *end || !(settings->bucket_mb >= 0.0 && settings->bucket_mb <= 1e9)) end = NULL;
        if (!end) fprintf(stderr, "-K %s: a bucket size in MB, 0 .. 1e9, or unit\n", value);
        if (!end) exit(EXIT_FAILURE);
    } else if (flag[1] == 'R' && strcmp(value, "nccl") == 0) {
        settings->reduction = ZERO_REDUCE_NCCL;
    } else if (flag[1] == 'R' && strcmp(value, "ordered") == 0) {
        settings->reduction = ZERO_REDUCE_ORDERED;
    } else if (flag[1] == 'A' && (strcmp(value, "step") == 0 || strcmp(value, "micro") == 0)) {
        settings->accumulation = value[0] == 'm' ? ZERO_ACCUMULATE_MICRO : ZERO_ACCUMULATE_STEP;
    } else if (flag[1] == 'R' && strcmp(value, "allreduce") == 0) {
        settings->reduction = ZERO_REDUCE_ALLREDUCE;
    } else if (flag[1] == 'O' && (strcmp(value, "0") == 0 || strcmp(value, "1") == 0)) {
        settings->overlap = value[0] == '1';
    } else if (flag[1] == 'W' && strtod(value, &end) >= 0.1 && *end == '\0') {
        settings->limit_s = strtod(value, NULL);
    } else if (flag[1] == 'V' && (strcmp(value, "0") == 0 || strcmp(value, "1") == 0)) {
        settings->read_back = value[0] == '1';
    } else if (flag[1] == 'H' && *value && strlen(value) < 10 &&
               strspn(value, "0123456789") == strlen(value)) {
        settings->hash_every = atoi(value);
    } else {
        fprintf(stderr, "%s %s: %s\n", flag, value,
                flag[1] == 'R'   ? "nccl, ordered or allreduce"
                : flag[1] == 'A' ? "step or micro"
                : flag[1] == 'W' ? "seconds, at least 0.1"
                : flag[1] == 'H' ? "a number of steps, 0 .. 999999999"
                                 : "0 or 1");
        exit(EXIT_FAILURE);
    }
    return 1;
}

#endif /* LLMC_ZERO_GPT2_FLAGS_CUH_INCLUDED */
