/* dev/cpu/options.cpp - the environment (README.md lists it), calls that fail to order, and the end of a
   process */
#include "internal.h"
#include <atomic>
#include <chrono>
#include <errno.h>
#include <limits.h>
#include <mutex>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <unistd.h>

namespace cuda_cpu {

// ----------------------------------------------------------------------------
// faults

void fatal(const char* format, ...) {
    char text[1024];
    int used = snprintf(text, sizeof(text), "cuda-cpu: ");
    va_list arguments;
    va_start(arguments, format);
    used += vsnprintf(text + used, sizeof(text) - (size_t)used - 1, format, arguments);
    va_end(arguments);
    size_t length = (size_t)used < sizeof(text) - 2 ? (size_t)used : sizeof(text) - 2;
    text[length] = '\n';
    fflush(stdout);
    if (write(STDERR_FILENO, text, length + 1) < 0) {
    } // nothing left to tell
    _exit(99);
}

// ----------------------------------------------------------------------------
// environment

static Options current_options;
static std::once_flag options_read;
static std::mutex fail_lock;
static std::atomic<bool> fail_wanted;
static long fail_calls;

/* The number in an environment variable; fatal if it is none or below `least`. */
static long long number_from(const char* name, long long fallback, long long least) {
    const char* text = getenv(name);
    if (!text || !*text) return fallback;
    char* end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (*end || errno || value < least) fatal("%s=%s: a whole number from %lld is needed", name, text, least);
    return value;
}

static const char* text_from(const char* name, const char* fallback) {
    const char* text = getenv(name);
    return text && *text ? text : fallback;
}

static bool suffix_number(const char* text, const char* prefix, unsigned long long* value) {
    size_t length = strlen(prefix);
    if (strncmp(text, prefix, length) || text[length] < '0' || text[length] > '9') return false;
    char* end;
    *value = strtoull(text + length, &end, 10);
    return !*end;
}

static int visible_devices(int devices) {
    const char* list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return devices;
    int count = 0;
    for (const char* at = list; *at;) { // as CUDA: stops at the first entry that is no device
        char* end;
        long id = strtol(at, &end, 10);
        if (end == at || id < 0 || id >= devices) break;
        count++;
        at = *end == ',' ? end + 1 : "";
    }
    return count;
}

static void read_options() {
#if defined(CUDA_CPU_ASAN)
    const long long default_stack = 256 << 10; // red zones
#else
    const long long default_stack = 64 << 10;
#endif
    Options o;
    unsigned long long n = 0;
    const char* streams = text_from("CUDA_CPU_STREAMS", "eager");
    o.rush_id = -1;
    if (!strcmp(streams, "eager"))
        o.streams = STREAMS_EAGER;
    else if (!strcmp(streams, "lazy"))
        o.streams = STREAMS_LAZY;
    else if (suffix_number(streams, "rush:", &n) && n <= INT_MAX)
        o.streams = STREAMS_RUSH, o.rush_id = (int)n;
    else if (!strcmp(streams, "threads"))
        o.streams = STREAMS_THREADS;
    else
        fatal("CUDA_CPU_STREAMS=%s: eager, lazy, rush:ID or threads is needed", streams);
    const char* order = text_from("CUDA_CPU_SCHED", "fwd");
    o.order_seed = 0;
    if (!strcmp(order, "fwd"))
        o.order = ORDER_FORWARD;
    else if (!strcmp(order, "rev"))
        o.order = ORDER_REVERSE;
    else if (suffix_number(order, "rand:", &n))
        o.order = ORDER_RANDOM, o.order_seed = n;
    else
        fatal("CUDA_CPU_SCHED=%s: fwd, rev or rand:N is needed", order);
    o.drop_wait = (int)number_from("CUDA_CPU_DROP_WAIT", 0, 0);
    o.fail_call = 0;
    const char* fail = text_from("CUDA_CPU_FAIL", "");
    const char* colon = strchr(fail, ':');
    o.fail_action.clear();
    if (*fail) {
        char* end = NULL;
        if (colon)
            o.fail_name.assign(fail, (size_t)(colon - fail)), o.fail_call = strtol(colon + 1, &end, 10);
        if (end && *end == ':') o.fail_action = end + 1;
        const bool known = o.fail_action.empty() || o.fail_action == "kill" || o.fail_action == "stop" ||
                           atof(o.fail_action.c_str()) > 0;
        if (!colon || (*end && *end != ':') || o.fail_call < 1 || !known)
            fatal("CUDA_CPU_FAIL=%s: name:n with n from 1, or name:n:kill, stop or seconds is needed", fail);
    }
    o.memory_bytes = (size_t)number_from("CUDA_CPU_MEMORY", 0, 0);
    o.round_bytes = (size_t)number_from("CUDA_CPU_ROUND", 1, 1);
    o.devices = visible_devices((int)number_from("CUDA_CPU_DEVICES", 64, 0));
    o.stack_bytes = (size_t)number_from("CUDA_CPU_STACK", default_stack, 16384);
    o.timeout_s = (double)number_from("CUDA_CPU_TIMEOUT", 60, 1);
    const char* death = text_from("CUDA_CPU_NCCL_DEATH", "reported");
    o.silent_deaths = !strcmp(death, "silent");
    if (!o.silent_deaths && strcmp(death, "reported"))
        fatal("CUDA_CPU_NCCL_DEATH=%s: reported or silent is needed", death);
    const char* blas = text_from("CUDA_CPU_BLAS", "openblas");
    o.plain_products = !strcmp(blas, "loop");
    if (!o.plain_products && strcmp(blas, "openblas"))
        fatal("CUDA_CPU_BLAS=%s: openblas or loop is needed", blas);
    current_options = o;
    fail_calls = 0;
    fail_wanted = !o.fail_name.empty();
}

const Options& options() {
    std::call_once(options_read, read_options);
    return current_options;
}

void reload_options() {
    options();
    std::lock_guard<std::mutex> hold(fail_lock);
    read_options();
}

double timeout_seconds() { return options().timeout_s; }
bool silent_deaths() { return options().silent_deaths; }

bool fail_now(const char* name) {
    const Options& o = options();
    if (!fail_wanted.load(std::memory_order_relaxed)) return false;
    {
        std::lock_guard<std::mutex> hold(fail_lock);
        if (o.fail_name != name || ++fail_calls != o.fail_call) return false;
    }
    if (o.fail_action.empty()) return true;
    if (o.fail_action == "kill") kill(getpid(), SIGKILL);
    if (o.fail_action == "stop") kill(getpid(), SIGSTOP);
    const double seconds = atof(o.fail_action.c_str());
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return false;
}

} // namespace cuda_cpu
