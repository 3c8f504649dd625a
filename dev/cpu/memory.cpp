/* dev/cpu/memory.cpp - device memory: one memfd, mapped once, in which each allocation lies between guard
   pages

   The heap is a sparse range (1 TiB where the system allows it) without access; an allocation opens its
   pages:

     | no access | canary | user bytes, from a multiple of 256 | canary | no access |
                 ^ page                                                 ^ page

   so that the end, rounded up to 256, lies against the guard. Fresh memory is 0xFF (NaN); the canary is
   0xCB and is checked when the allocation is freed, at cudaDeviceReset and at process end. Freed pages go
   back to the system and fault when touched; addresses are used again only after the whole range has been.
*/
#include "memory.h"
#include <errno.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14
#endif
#if defined(CUDA_CPU_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)0)
#endif

namespace cuda_cpu {

static const size_t PAGE = 4096, HUGE_PAGE = (size_t)2 << 20, ALIGNMENT = 256;
static const size_t LOCKED_FROM = (size_t)64 << 20; // from here on the machine is asked under the lock
static const unsigned char CANARY = 0xCB, FRESH = 0xFF;

struct Allocation {
    char* user;
    size_t bytes;
    char* begin; // pages: [begin, end)
    char* end;
    bool managed;
    unsigned long number; // in order of allocation
};

static std::mutex lock;
static std::map<uintptr_t, Allocation> live;  // by user address
static std::map<uintptr_t, Allocation> freed; // the last FREED_KEPT, for messages
static const size_t FREED_KEPT = 4096;
static Heap the_heap = {-1, NULL, 0};
static char* next_place;
static size_t live_bytes, unchecked_bytes;
static unsigned long allocation_count;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// ----------------------------------------------------------------------------
// the heap

struct CheckAtExit {
    ~CheckAtExit() { check_canaries(); }
};

static void open_heap() {
    if (the_heap.base) return;
    int fd = memfd_create("cuda_cpu", MFD_CLOEXEC);
    if (fd < 0) fatal("memfd_create: %s", strerror(errno));
    void* base = MAP_FAILED;
    size_t bytes = (size_t)1 << 40;
    for (; bytes >= (size_t)1 << 30; bytes /= 2) {
        if (ftruncate(fd, (off_t)bytes)) continue;
        base = mmap(NULL, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base != MAP_FAILED) break;
    }
    if (base == MAP_FAILED) fatal("no address range for device memory: %s", strerror(errno));
    madvise(base, bytes, MADV_HUGEPAGE);
    madvise(base, bytes, MADV_DONTDUMP);
    the_heap = Heap{fd, (char*)base, bytes};
    next_place = the_heap.base + HUGE_PAGE;
    install_fault_handler();
    static CheckAtExit check_at_exit;
}

Heap heap() {
    std::lock_guard<std::mutex> hold(lock);
    open_heap();
    return the_heap;
}

bool in_heap(const void* pointer) {
    return the_heap.base && (const char*)pointer >= the_heap.base &&
           (const char*)pointer < the_heap.base + the_heap.bytes;
}

/* The live allocation with the highest address not above `pointer`. */
static const Allocation* allocation_below(const void* pointer) {
    auto after = live.upper_bound((uintptr_t)pointer);
    return after == live.begin() ? NULL : &std::prev(after)->second;
}

/* Free addresses for `bytes` of pages and a guard page on each side: the first gap from next_place on. */
static char* find_place(size_t bytes) {
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE;
    for (int round = 0; round < 2; round++) {
        uintptr_t place = round_up((uintptr_t)next_place + PAGE, align);
        auto next = live.lower_bound(place);
        if (next != live.begin() && (uintptr_t)std::prev(next)->second.end + PAGE > place)
            place = round_up((uintptr_t)std::prev(next)->second.end + PAGE, align);
        for (;; ++next) {
            uintptr_t limit = next == live.end() ? (uintptr_t)the_heap.base + the_heap.bytes
                                                 : (uintptr_t)next->second.begin;
            if (place + bytes + PAGE <= limit) return (char*)place;
            if (next == live.end()) break;
            place = round_up((uintptr_t)next->second.end + PAGE, align);
        }
        next_place = the_heap.base + HUGE_PAGE; // once round
    }
    return NULL;
}

// ----------------------------------------------------------------------------
// allocate and free

static bool fits(size_t bytes) {
    size_t wanted = options().memory_bytes;
    if (wanted && (bytes > wanted || live_bytes > wanted - bytes)) return false;
    unchecked_bytes += bytes; // asking the system for every small block would cost more than the block
    if (bytes < LOCKED_FROM && unchecked_bytes < LOCKED_FROM && allocation_count) return true;
    unchecked_bytes = 0;
    return bytes <= machine_available();
}

static void fill_canary(const Allocation& a) {
    memset(a.begin, CANARY, (size_t)(a.user - a.begin));
    memset(a.user + a.bytes, CANARY, (size_t)(a.end - a.user) - a.bytes);
    ASAN_POISON_MEMORY_REGION(a.begin, (size_t)(a.user - a.begin));
    ASAN_POISON_MEMORY_REGION(a.user + a.bytes, (size_t)(a.end - a.user) - a.bytes);
}

static void check_canary(const Allocation& a) {
    ASAN_UNPOISON_MEMORY_REGION(a.begin, (size_t)(a.end - a.begin));
    for (char* at = a.begin; at < a.user; at++)
        if ((unsigned char)*at != CANARY)
            fatal("allocation %lu (%zu bytes at %p) was written %zu bytes before its start", a.number,
                  a.bytes, (void*)a.user, (size_t)(a.user - at));
    for (char* at = a.user + a.bytes; at < a.end; at++)
        if ((unsigned char)*at != CANARY)
            fatal("allocation %lu (%zu bytes at %p) was written past its end, at byte %zu", a.number, a.bytes,
                  (void*)a.user, (size_t)(at - a.user));
}

void check_canaries() {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& entry : live) {
        check_canary(entry.second);
        fill_canary(entry.second);
    }
}

/* Writing to the file and mapping what is there by the chunk is twice as fast as touching page after page. */
static void fill_fresh(const Allocation& a) {
    const size_t CHUNK = (size_t)1 << 20;
    static char* fresh;
    if (!fresh) {
        fresh = (char*)malloc(CHUNK);
        if (!fresh) fatal("no host memory left");
        memset(fresh, FRESH, CHUNK);
    }
    for (char* at = a.begin; at < a.end;) {
        size_t bytes = (size_t)(a.end - at) < CHUNK ? (size_t)(a.end - at) : CHUNK;
        ssize_t written = pwrite(the_heap.fd, fresh, bytes, at - the_heap.base);
        if (written <= 0) {
            memset(at, FRESH, bytes); // also says what is wrong, by a fault
            written = (ssize_t)bytes;
        } else {
            madvise(at, (size_t)written & ~(PAGE - 1),
                    MADV_POPULATE_READ); // may be refused: then faults do it
        }
        at += written;
    }
}

static cudaError_t allocate(void** pointer, size_t bytes, bool managed) {
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    std::lock_guard<std::mutex> hold(lock);
    open_heap();
    if (bytes > the_heap.bytes) return cudaErrorMemoryAllocation;
    size_t unit = options().round_bytes;
    bytes += (unit - bytes % unit) % unit; // a multiple, for programs that rely on a GPU's
    MachineLock machine(bytes >= LOCKED_FROM);
    if (!fits(bytes)) return cudaErrorMemoryAllocation;
    size_t user_bytes = round_up(bytes, ALIGNMENT), span = round_up(user_bytes, PAGE);
    Allocation a;
    a.begin = find_place(span);
    if (!a.begin || mprotect(a.begin, span, PROT_READ | PROT_WRITE)) return cudaErrorMemoryAllocation;
    a.end = a.begin + span;
    a.user = a.end - user_bytes;
    a.bytes = bytes;
    a.managed = managed;
    a.number = ++allocation_count;
    fill_fresh(a);
    fill_canary(a);
    live[(uintptr_t)a.user] = a;
    live_bytes += bytes;
    next_place = a.end;
    *pointer = a.user;
    return cudaSuccess;
}

static cudaError_t release(void* pointer) {
    if (!pointer) return cudaSuccess;
    std::lock_guard<std::mutex> hold(lock);
    auto found = live.find((uintptr_t)pointer);
    if (found == live.end()) return cudaErrorInvalidValue;
    Allocation a = found->second;
    check_canary(a);
    size_t span = (size_t)(a.end - a.begin);
    if (fallocate(the_heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.begin - the_heap.base,
                  (off_t)span))
        madvise(a.begin, span, MADV_REMOVE);
    mprotect(a.begin, span, PROT_NONE);
    live_bytes -= a.bytes;
    live.erase(found);
    if (freed.size() >= FREED_KEPT) freed.erase(freed.begin());
    freed[(uintptr_t)a.begin] = a;
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// questions

static const Allocation* freed_at(const void* pointer) {
    auto after = freed.upper_bound((uintptr_t)pointer);
    if (after == freed.begin()) return NULL;
    const Allocation* a = &std::prev(after)->second;
    return (const char*)pointer < a->end ? a : NULL;
}

bool in_device_memory(const void* pointer, size_t bytes, char* text, size_t text_bytes) {
    std::lock_guard<std::mutex> hold(lock);
    const Allocation* a = allocation_below(pointer);
    size_t offset = a ? (size_t)((const char*)pointer - a->user) : 0;
    if (a && offset <= a->bytes && bytes <= a->bytes - offset && (offset < a->bytes || !bytes)) return true;
    if (!text || !text_bytes) return false;
    const Allocation* old;
    if (!in_heap(pointer))
        snprintf(text, text_bytes, "%p is not device memory", pointer);
    else if (a && (const char*)pointer < a->end)
        snprintf(text, text_bytes, "%zu bytes from offset %zu in an allocation of %zu bytes", bytes, offset,
                 a->bytes);
    else if ((old = freed_at(pointer)))
        snprintf(text, text_bytes, "%p lies in an allocation of %zu bytes that was freed", pointer,
                 old->bytes);
    else
        snprintf(text, text_bytes, "%p lies in no device allocation", pointer);
    return false;
}

/* May be called from the fault handler: takes no lock that could be held. */
void describe_address(const void* address, char* text, size_t text_bytes) {
    bool locked = lock.try_lock();
    const char* at = (const char*)address;
    const Allocation *below = allocation_below(address), *old = freed_at(address);
    auto after = live.upper_bound((uintptr_t)address);
    if (old && old->begin <= at)
        snprintf(text, text_bytes, "offset %td of allocation %lu (%zu bytes), which was freed",
                 at - old->user, old->number, old->bytes);
    else if (below && (after == live.end() || (size_t)(at - below->end) <= after->first - (uintptr_t)at))
        snprintf(text, text_bytes, "offset %td of allocation %lu, which has %zu bytes", at - below->user,
                 below->number, below->bytes);
    else if (after != live.end())
        snprintf(text, text_bytes, "%td bytes before allocation %lu, which has %zu bytes",
                 after->second.user - at, after->second.number, after->second.bytes);
    else
        snprintf(text, text_bytes, "no allocation lives near");
    if (locked) lock.unlock();
}

Place place_of(const void* pointer) {
    if (!in_heap(pointer)) return in_pinned_memory(pointer, 1) ? PLACE_PINNED : PLACE_PAGEABLE;
    std::lock_guard<std::mutex> hold(lock);
    const Allocation* a = allocation_below(pointer);
    return a && a->managed && (const char*)pointer < a->end ? PLACE_MANAGED : PLACE_DEVICE;
}

} // namespace cuda_cpu

using namespace cuda_cpu;

extern "C" {

size_t cudaCpuLiveBytes(void) {
    std::lock_guard<std::mutex> hold(cuda_cpu::lock);
    return live_bytes;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    CUDA_CPU_ENTRY("cudaMalloc", cudaErrorMemoryAllocation);
    if (!pointer) return set_error(cudaErrorInvalidValue);
    return set_error(allocate(pointer, bytes, false));
}
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaMallocManaged", cudaErrorMemoryAllocation);
    if (!pointer || !bytes || (flags != cudaMemAttachGlobal && flags != cudaMemAttachHost))
        return set_error(cudaErrorInvalidValue);
    return set_error(allocate(pointer, bytes, true));
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
    CUDA_CPU_ENTRY("cudaMallocAsync", cudaErrorMemoryAllocation);
    if (!pointer) return set_error(cudaErrorInvalidValue);
    return set_error(allocate(pointer, bytes, false));
}
cudaError_t cudaFree(void* pointer) {
    CUDA_CPU_ENTRY("cudaFree", cudaErrorUnknown);
    if (!pointer) return cudaSuccess;
    cudaError_t error = synchronize_device(); // as on a GPU
    cudaError_t freed_error = release(pointer);
    return set_error(freed_error != cudaSuccess ? freed_error : error);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaFreeAsync", cudaErrorUnknown);
    char text[1];
    if (pointer && !in_device_memory(pointer, 0, text, 0)) return set_error(cudaErrorInvalidValue);
    return enqueue(stream, "cudaFreeAsync", [pointer] { return release(pointer); });
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    CUDA_CPU_ENTRY("cudaMemGetInfo", cudaErrorUnknown);
    if (!free_bytes || !total_bytes) return set_error(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> hold(cuda_cpu::lock);
    size_t wanted = options().memory_bytes, available = machine_available();
    *total_bytes = wanted ? wanted : machine_total();
    *free_bytes = *total_bytes > live_bytes ? *total_bytes - live_bytes : 0;
    if (*free_bytes > available) *free_bytes = available;
    return cudaSuccess;
}

} // extern "C"
