/* dev/cpu/copies.cpp - copies, memsets, pinned host memory, pointer attributes

   Every range is checked when the call is made and again when it runs (the memory may have been freed
   between). A range that leaves its allocation ends the process in words; a pointer on the wrong side is
   cudaErrorInvalidValue. A copy to pageable memory waits. One from pageable memory, synchronous or not, is
   staged, as CUDA says: its bytes are taken at the call, and reach the device in the order of the stream, so
   that work on a stream that does not wait for this one may come before them.
*/
#include "memory.h"
#include <map>
#include <memory>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

namespace cuda_cpu {

struct Pinned {
    size_t bytes;
    unsigned flags;
    bool registered;
};
static std::mutex pinned_lock;
static std::map<uintptr_t, Pinned> pinned;

bool in_pinned_memory(const void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto after = pinned.upper_bound((uintptr_t)pointer);
    if (after == pinned.begin()) return false;
    auto block = std::prev(after);
    size_t offset = (uintptr_t)pointer - block->first;
    return offset < block->second.bytes && bytes <= block->second.bytes - offset;
}

// ----------------------------------------------------------------------------
// checks

static void check_range(const char* entry, const char* side, const void* pointer, size_t bytes) {
    char text[256];
    if (in_heap(pointer) && !in_device_memory(pointer, bytes, text, sizeof(text)))
        fatal("%s, %s: %s", entry, side, text);
}

/* rows of `width` bytes, `pitch` apart */
struct Region {
    char* start;
    size_t pitch, width, rows;
};

static size_t extent(const Region& r) { return r.rows ? (r.rows - 1) * r.pitch + r.width : 0; }

static void check_region(const char* entry, const char* side, const Region& r) {
    if (r.width && r.rows) check_range(entry, side, r.start, extent(r));
}

static bool side_is_right(Place place, bool device_wanted) {
    return place == PLACE_MANAGED || (place == PLACE_DEVICE) == device_wanted;
}

static cudaError_t check_copy(const char* entry, const Region& dst, const Region& src, cudaMemcpyKind kind) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (!dst.width || !dst.rows) return cudaSuccess;
    if (!dst.start || !src.start) return cudaErrorInvalidValue;
    if (dst.rows > 1 && (dst.pitch < dst.width || src.pitch < src.width)) return cudaErrorInvalidPitchValue;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault &&
        (!side_is_right(place_of(dst.start), to_device) || !side_is_right(place_of(src.start), from_device)))
        return cudaErrorInvalidValue;
    check_region(entry, "destination", dst);
    check_region(entry, "source", src);
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// copies

static void copy_rows(const Region& dst, const Region& src) {
    if (dst.pitch == dst.width && src.pitch == src.width) {
        memmove(dst.start, src.start, dst.width * dst.rows);
        return;
    }
    for (size_t row = 0; row < dst.rows; row++)
        memmove(dst.start + row * dst.pitch, src.start + row * src.pitch, dst.width);
}

static cudaError_t copy(const char* entry, const Region& dst, const Region& src, cudaMemcpyKind kind,
                        cudaStream_t stream, bool wait) {
    const size_t STAGED = 64 << 10;
    cudaError_t error = check_copy(entry, dst, src, kind);
    if (error != cudaSuccess) return set_error(error);
    if (!dst.width || !dst.rows) return wait ? synchronize_stream(stream) : cudaSuccess;
    bool from_pageable = place_of(src.start) == PLACE_PAGEABLE,
         to_pageable = place_of(dst.start) == PLACE_PAGEABLE;
    bool may_stage = dst.width * dst.rows <= STAGED || options().streams != STREAMS_EAGER;
    if (from_pageable && !to_pageable && may_stage) {
        if (wait) error = synchronize_stream(stream); // before the copy, not after it
        if (error != cudaSuccess) return error;
        auto staged = std::make_shared<std::vector<char>>(dst.width * dst.rows);
        Region stage = {staged->data(), dst.width, dst.width, dst.rows};
        copy_rows(stage, src);
        return enqueue(stream, entry, [=] {
            check_region(entry, "destination", dst);
            copy_rows(dst, Region{staged->data(), dst.width, dst.width, dst.rows});
            return cudaSuccess;
        });
    }
    error = enqueue(stream, entry, [=] {
        check_region(entry, "destination", dst);
        check_region(entry, "source", src);
        copy_rows(dst, src);
        return cudaSuccess;
    });
    if (error == cudaSuccess && (wait || from_pageable || to_pageable)) error = synchronize_stream(stream);
    return error;
}

static Region flat(const void* start, size_t bytes) { return Region{(char*)start, bytes, bytes, 1}; }

static cudaError_t fill(const char* entry, const Region& dst, int value, cudaStream_t stream) {
    if (!dst.width || !dst.rows) return cudaSuccess;
    if (!dst.start || !(in_heap(dst.start) || place_of(dst.start) == PLACE_PINNED))
        return set_error(cudaErrorInvalidValue);
    if (dst.rows > 1 && dst.pitch < dst.width) return set_error(cudaErrorInvalidPitchValue);
    check_region(entry, "destination", dst);
    return enqueue(stream, entry, [=] {
        check_region(entry, "destination", dst);
        if (dst.pitch == dst.width)
            memset(dst.start, value, dst.width * dst.rows);
        else
            for (size_t row = 0; row < dst.rows; row++) memset(dst.start + row * dst.pitch, value, dst.width);
        return cudaSuccess;
    });
}

} // namespace cuda_cpu

using namespace cuda_cpu;

extern "C" {

cudaError_t cudaMemcpy(void* dst, const void* src, size_t count, enum cudaMemcpyKind kind) {
    CUDA_CPU_ENTRY("cudaMemcpy", cudaErrorUnknown);
    return copy("cudaMemcpy", flat(dst, count), flat(src, count), kind, 0, kind != cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaMemcpyAsync", cudaErrorUnknown);
    return copy("cudaMemcpyAsync", flat(dst, count), flat(src, count), kind, stream, false);
}
cudaError_t cudaMemcpyPeer(void* dst, int, const void* src, int, size_t count) {
    CUDA_CPU_ENTRY("cudaMemcpyPeer", cudaErrorUnknown);
    return copy("cudaMemcpyPeer", flat(dst, count), flat(src, count), cudaMemcpyDeviceToDevice, 0, false);
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t count, cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaMemcpyPeerAsync", cudaErrorUnknown);
    return copy("cudaMemcpyPeerAsync", flat(dst, count), flat(src, count), cudaMemcpyDeviceToDevice, stream,
                false);
}
cudaError_t cudaMemcpy2D(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind) {
    CUDA_CPU_ENTRY("cudaMemcpy2D", cudaErrorUnknown);
    return copy("cudaMemcpy2D", Region{(char*)dst, dpitch, width, height},
                Region{(char*)src, spitch, width, height}, kind, 0, kind != cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaMemcpy2DAsync", cudaErrorUnknown);
    return copy("cudaMemcpy2DAsync", Region{(char*)dst, dpitch, width, height},
                Region{(char*)src, spitch, width, height}, kind, stream, false);
}

/* A symbol is a plain variable here. */
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t count, size_t offset,
                               enum cudaMemcpyKind) {
    CUDA_CPU_ENTRY("cudaMemcpyToSymbol", cudaErrorUnknown);
    if (!symbol || !src) return set_error(cudaErrorInvalidValue);
    return copy("cudaMemcpyToSymbol", flat((const char*)symbol + offset, count), flat(src, count),
                cudaMemcpyDefault, 0, true);
}
cudaError_t cudaMemcpyFromSymbol(void* dst, const void* symbol, size_t count, size_t offset,
                                 enum cudaMemcpyKind) {
    CUDA_CPU_ENTRY("cudaMemcpyFromSymbol", cudaErrorUnknown);
    if (!symbol || !dst) return set_error(cudaErrorInvalidValue);
    return copy("cudaMemcpyFromSymbol", flat(dst, count), flat((const char*)symbol + offset, count),
                cudaMemcpyDefault, 0, true);
}

/* Device memory is set without waiting for it, as on a GPU. */
cudaError_t cudaMemset(void* dst, int value, size_t count) {
    CUDA_CPU_ENTRY("cudaMemset", cudaErrorUnknown);
    return fill("cudaMemset", flat(dst, count), value, 0);
}
cudaError_t cudaMemsetAsync(void* dst, int value, size_t count, cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaMemsetAsync", cudaErrorUnknown);
    return fill("cudaMemsetAsync", flat(dst, count), value, stream);
}
cudaError_t cudaMemset2D(void* dst, size_t pitch, int value, size_t width, size_t height) {
    CUDA_CPU_ENTRY("cudaMemset2D", cudaErrorUnknown);
    return fill("cudaMemset2D", Region{(char*)dst, pitch, width, height}, value, 0);
}
cudaError_t cudaMemset2DAsync(void* dst, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
    CUDA_CPU_ENTRY("cudaMemset2DAsync", cudaErrorUnknown);
    return fill("cudaMemset2DAsync", Region{(char*)dst, pitch, width, height}, value, stream);
}

// ----------------------------------------------------------------------------
// pinned host memory

static cudaError_t allocate_pinned(void** pointer, size_t bytes, unsigned flags) {
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    MachineLock machine(bytes >= (size_t)64 << 20);
    if (bytes >= (size_t)1 << 20 && bytes > machine_available()) return cudaErrorMemoryAllocation;
    void* made = NULL;
    if (posix_memalign(&made, bytes < 4096 ? 256 : 4096, bytes)) return cudaErrorMemoryAllocation;
    memset(made, 0xff, bytes);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[(uintptr_t)made] = Pinned{bytes, flags, false};
    *pointer = made;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    CUDA_CPU_ENTRY("cudaMallocHost", cudaErrorMemoryAllocation);
    return set_error(allocate_pinned(pointer, bytes, cudaHostAllocDefault));
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaHostAlloc", cudaErrorMemoryAllocation);
    return set_error(allocate_pinned(pointer, bytes, flags));
}
cudaError_t cudaFreeHost(void* pointer) {
    CUDA_CPU_ENTRY("cudaFreeHost", cudaErrorUnknown);
    if (!pointer) return cudaSuccess;
    cudaError_t error = synchronize_device(); // as on a GPU: a copy may still use it
    {
        std::lock_guard<std::mutex> hold(pinned_lock);
        auto found = pinned.find((uintptr_t)pointer);
        if (found == pinned.end() || found->second.registered) return set_error(cudaErrorInvalidValue);
        pinned.erase(found);
    }
    free(pointer);
    return error;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaHostRegister", cudaErrorUnknown);
    if (!pointer || !bytes) return set_error(cudaErrorInvalidValue);
    if (in_pinned_memory(pointer, 1) || in_pinned_memory((char*)pointer + bytes - 1, 1))
        return set_error(cudaErrorHostMemoryAlreadyRegistered);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[(uintptr_t)pointer] = Pinned{bytes, flags, true};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
    CUDA_CPU_ENTRY("cudaHostUnregister", cudaErrorUnknown);
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto found = pinned.find((uintptr_t)pointer);
    if (found == pinned.end() || !found->second.registered)
        return set_error(cudaErrorHostMemoryNotRegistered);
    pinned.erase(found);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int flags) {
    CUDA_CPU_ENTRY("cudaHostGetDevicePointer", cudaErrorUnknown);
    if (!device || flags || !in_pinned_memory(host, 1)) return set_error(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
    CUDA_CPU_ENTRY("cudaPointerGetAttributes", cudaErrorUnknown);
    if (!attributes) return set_error(cudaErrorInvalidValue);
    memset(attributes, 0, sizeof(*attributes));
    Place place = place_of(pointer);
    if (place == PLACE_DEVICE && !in_device_memory(pointer, 1, NULL, 0))
        place = PLACE_PAGEABLE; // freed, or a guard
    attributes->type = place == PLACE_DEVICE    ? cudaMemoryTypeDevice
                       : place == PLACE_MANAGED ? cudaMemoryTypeManaged
                       : place == PLACE_PINNED  ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
    attributes->device = place == PLACE_PAGEABLE ? -2 : 0;
    attributes->devicePointer = place == PLACE_PAGEABLE ? NULL : (void*)pointer;
    attributes->hostPointer = place == PLACE_DEVICE ? NULL : (void*)pointer;
    return cudaSuccess;
}

} // extern "C"
