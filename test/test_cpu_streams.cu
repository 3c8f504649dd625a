// test/test_cpu_streams.cu - the CPU build of CUDA itself: streams, events, device memory, faults to order
//
//   dev/cpu/nvcc -std=c++17 -O2 test/test_cpu_streams.cu -lgtest -lgtest_main -o build/test_cpu_streams
#include "test_cpu.h"
#include <chrono>
#include <cmath>
#include <cstring>

static void append(void* text) { *(std::string*)text += 'x'; }

static const char* const MODES[] = {"eager", "lazy", "rush:0", "rush:1", "rush:2"};

static cudaStream_t make_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}
static cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaSuccess, cudaEventCreateWithFlags(&event, flags));
    return event;
}

__global__ void set(float* x, float value) { *x = value; }
__global__ void add(float* y, const float* x, float value) { *y = *x + value; }

// ----------------------------------------------------------------------------
// when work runs

TEST_F(Cpu, LazyWorkRunsWhenSomethingWaits) {
    use("CUDA_CPU_STREAMS", "lazy");
    cudaStream_t a = make_stream(), b = make_stream();
    std::string on_a, on_b;
    OK(cudaLaunchHostFunc(a, append, &on_a));
    OK(cudaLaunchHostFunc(b, append, &on_b));
    EXPECT_EQ("", on_a + on_b);
    OK(cudaStreamSynchronize(a));
    EXPECT_EQ("x", on_a);
    EXPECT_EQ("", on_b);
    OK(cudaLaunchHostFunc(a, append, &on_a));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ("xx x", on_a + " " + on_b);
    OK(cudaLaunchHostFunc(a, append, &on_a));
    OK(cudaStreamDestroy(a)); // its work still runs
    { Device<int> freed(1); } // cudaFree waits for the device
    EXPECT_EQ("xxx", on_a);
    EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaStreamSynchronize(a));
    OK(cudaStreamDestroy(b));
}

TEST_F(Cpu, PollingMakesProgress) {
    use("CUDA_CPU_STREAMS", "lazy");
    cudaStream_t a = make_stream();
    cudaEvent_t event = make_event();
    std::string ran;
    EXPECT_EQ(cudaSuccess, cudaEventQuery(event)); // never recorded
    EXPECT_EQ(cudaSuccess, cudaStreamQuery(a));
    OK(cudaLaunchHostFunc(a, append, &ran));
    OK(cudaEventRecord(event, a));
    OK(cudaLaunchHostFunc(a, append, &ran));
    EXPECT_EQ(cudaErrorNotReady, cudaEventQuery(event));
    EXPECT_EQ("", ran);
    EXPECT_EQ(cudaSuccess, cudaEventQuery(event)); // the second time, up to the record and no further
    EXPECT_EQ("x", ran);
    EXPECT_EQ(cudaErrorNotReady, cudaStreamQuery(a));
    EXPECT_EQ(cudaSuccess, cudaStreamQuery(a));
    EXPECT_EQ("xx", ran);
    EXPECT_EQ(cudaErrorNotReady, cudaGetLastError()); // as on a GPU: whoever polls has to clear it
    EXPECT_EQ(cudaSuccess, cudaGetLastError());
}

/* Stream 1 writes, stream 2 adds, the default stream is not involved. */
static float producer_consumer(bool wait) {
    cudaStream_t a = make_stream(), b = make_stream();
    cudaEvent_t event = make_event();
    Device<float> x(2);
    EXPECT_EQ(cudaSuccess, run(1, 1, a, set, x.data, 3.0f));
    EXPECT_EQ(cudaSuccess, cudaEventRecord(event, a));
    if (wait) {
        EXPECT_EQ(cudaSuccess, cudaStreamWaitEvent(b, event));
    }
    EXPECT_EQ(cudaSuccess, run(1, 1, b, add, x.data + 1, (const float*)x.data, 4.0f));
    EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(b));
    EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(a));
    return x.at(1);
}

TEST_F(Cpu, RushFindsAForgottenWait) {
    for (const char* mode : MODES) {
        use("CUDA_CPU_STREAMS", mode);
        EXPECT_EQ(7, producer_consumer(true)) << mode;
        use("CUDA_CPU_STREAMS", mode); // ids count from 1 again
        float forgotten = producer_consumer(false);
        bool hidden = !strcmp(mode, "eager") || !strcmp(mode, "rush:1");
        EXPECT_EQ(hidden, forgotten == 7) << mode;
        EXPECT_EQ(!hidden, std::isnan(forgotten)) << mode; // what was never written is NaN
    }
}

TEST_F(Cpu, RushForcesStatedDependenciesAndNothingElse) {
    use("CUDA_CPU_STREAMS", "rush:3");
    cudaStream_t a = make_stream(), b = make_stream(), c = make_stream();
    cudaEvent_t on_a = make_event(), on_b = make_event();
    std::string ran_a, ran_b, ran_c;
    OK(cudaLaunchHostFunc(a, append, &ran_a));
    OK(cudaEventRecord(on_a, a));
    OK(cudaLaunchHostFunc(a, append, &ran_a)); // after the record: not needed
    OK(cudaStreamWaitEvent(b, on_a, 0));
    OK(cudaLaunchHostFunc(b, append, &ran_b));
    OK(cudaEventRecord(on_b, b));
    OK(cudaLaunchHostFunc(b, append, &ran_b));
    OK(cudaLaunchHostFunc(c, append, &ran_c));
    EXPECT_EQ("||x", ran_a + "|" + ran_b + "|" + ran_c);
    OK(cudaStreamWaitEvent(c, on_b, 0)); // forces b up to its record, which forces a up to its own
    OK(cudaLaunchHostFunc(c, append, &ran_c));
    EXPECT_EQ("x|x|xx", ran_a + "|" + ran_b + "|" + ran_c);
}

TEST_F(Cpu, AWaitKeepsTheRecordItSaw) {
    for (const char* mode : {"lazy", "rush:2"}) {
        use("CUDA_CPU_STREAMS", mode);
        cudaStream_t a = make_stream(), b = make_stream();
        cudaEvent_t event = make_event();
        std::string ran_a, ran_b;
        OK(cudaLaunchHostFunc(a, append, &ran_a));
        OK(cudaEventRecord(event, a));
        if (!strcmp(mode, "lazy")) {
            OK(cudaStreamWaitEvent(b, event, 0));
        }
        OK(cudaLaunchHostFunc(a, append, &ran_a));
        OK(cudaEventRecord(event, a));
        if (strcmp(mode, "lazy")) {
            OK(cudaStreamWaitEvent(b, event, 0));
        }
        OK(cudaEventDestroy(event)); // allowed: the wait has what it needs
        OK(cudaLaunchHostFunc(b, append, &ran_b));
        OK(cudaStreamSynchronize(b));
        EXPECT_EQ(!strcmp(mode, "lazy") ? "x" : "xx", ran_a) << mode;
    }
}

TEST_F(Cpu, LegacyDefaultStreamOrder) {
    for (unsigned flags : {(unsigned)cudaStreamDefault, (unsigned)cudaStreamNonBlocking}) {
        use("CUDA_CPU_STREAMS", "lazy");
        cudaStream_t a = make_stream(flags), b = make_stream(flags);
        std::string ran_a, ran_0;
        OK(cudaLaunchHostFunc(a, append, &ran_a));
        OK(cudaLaunchHostFunc(0, append, &ran_0));
        OK(cudaLaunchHostFunc(b, append, &ran_0));
        OK(cudaStreamSynchronize(b)); // waits for the default stream, which waits for a
        EXPECT_EQ(flags == cudaStreamDefault ? "x|xx" : "|x", ran_a + "|" + ran_0);
    }
}

TEST_F(Cpu, PageableCopiesWaitPinnedOnesDoNot) {
    use("CUDA_CPU_STREAMS", "lazy");
    cudaStream_t a = make_stream();
    Device<float> x(100000);
    std::vector<float> pageable(100000, 1.0f);
    float *pinned = nullptr, small = 5;
    OK(cudaMallocHost(&pinned, 4));
    OK(run(1, 1, a, set, x.data, 2.0f));
    *pinned = 0;
    OK(cudaMemcpyAsync(pinned, x.data, 4, cudaMemcpyDeviceToHost, a));
    EXPECT_EQ(0, *pinned);
    OK(cudaMemcpyAsync(pageable.data(), x.data, 4, cudaMemcpyDeviceToHost, a));
    EXPECT_EQ(2, pageable[0]);
    EXPECT_EQ(2, *pinned);
    OK(cudaMemcpyAsync(x.data, &small, 4, cudaMemcpyHostToDevice, a)); // staged: its bytes are taken now
    small = 6;
    OK(cudaMemcpyAsync(pinned, x.data, 4, cudaMemcpyDeviceToHost, a));
    EXPECT_EQ(2, *pinned);
    OK(cudaStreamSynchronize(a));
    EXPECT_EQ(5, *pinned);
    OK(cudaFreeHost(pinned));
    EXPECT_EQ(cudaErrorInvalidValue, cudaFreeHost(pinned));
}

TEST_F(Cpu, AnErrorStaysWithItsStream) {
    for (const char* mode : {"eager", "lazy", "threads"}) {
        use("CUDA_CPU_STREAMS", mode);
        cudaStream_t a = make_stream(), b = make_stream();
        cudaEvent_t event = make_event();
        std::string ran;
        cudaError_t now = cuda_cpu::enqueue(a, "test", [] { return cudaErrorLaunchFailure; });
        if (strcmp(mode, "threads")) { // there it may have run by now
            EXPECT_EQ(!strcmp(mode, "eager") ? cudaErrorLaunchFailure : cudaSuccess, now);
        }
        cudaLaunchHostFunc(a, append, &ran);
        cudaEventRecord(event, a);
        EXPECT_EQ(cudaErrorLaunchFailure, cudaStreamSynchronize(a));
        EXPECT_EQ(cudaErrorLaunchFailure, cudaStreamSynchronize(a));
        EXPECT_EQ(cudaErrorLaunchFailure, cudaEventSynchronize(event));
        EXPECT_EQ(cudaErrorLaunchFailure, cudaDeviceSynchronize());
        EXPECT_EQ(cudaErrorLaunchFailure, cudaGetLastError());
        EXPECT_EQ("", ran);
        EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(b));
    }
}

TEST_F(Cpu, EventTiming) {
    use("CUDA_CPU_STREAMS", "lazy");
    cudaStream_t a = make_stream();
    cudaEvent_t start = make_event(0), end = make_event(0), untimed = make_event();
    float ms = -1;
    EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, end)); // not recorded
    OK(cudaEventRecord(start, a));
    OK(cudaLaunchHostFunc(
        a, [](void*) { usleep(20000); }, nullptr));
    OK(cudaEventRecord(end, a));
    OK(cudaEventRecord(untimed, a));
    EXPECT_EQ(cudaErrorNotReady, cudaEventElapsedTime(&ms, start, end));
    const auto before = std::chrono::steady_clock::now();
    OK(cudaEventSynchronize(end));
    const std::chrono::duration<float, std::milli> around = std::chrono::steady_clock::now() - before;
    OK(cudaEventElapsedTime(&ms, start, end));
    EXPECT_GE(ms, 20);
    EXPECT_LE(ms, around.count());
    EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, untimed));
}

// ----------------------------------------------------------------------------
// a thread for each stream

/* Says that it runs, then waits until the other one does: ends only if both run at the same time. */
__global__ void meet(volatile int* mine, const volatile int* other) {
    *mine = 1;
    __threadfence_system();
    while (!*other) __nanosleep(100);
}
__global__ void hold_until(const volatile int* go, float* x, float value) {
    while (!*go) __nanosleep(100);
    *x = value;
}

TEST_F(Cpu, ThreadsRunStreamsAtTheSameTime) {
    use("CUDA_CPU_STREAMS", "threads");
    cudaStream_t a = make_stream(), b = make_stream();
    int* flags;
    OK(cudaMallocManaged(&flags, 2 * sizeof(int)));
    flags[0] = flags[1] = 0;
    OK(run(1, 1, a, meet, (volatile int*)flags, (const volatile int*)flags + 1));
    OK(run(1, 1, b, meet, (volatile int*)flags + 1, (const volatile int*)flags));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(2, flags[0] + flags[1]);
    OK(cudaFree(flags));
}

TEST_F(Cpu, ThreadsKeepWhatIsStated) {
    use("CUDA_CPU_STREAMS", "threads");
    cudaStream_t a = make_stream(), b = make_stream();
    cudaEvent_t written = make_event(0), end = make_event(0);
    int* go;
    float pageable = 0, ms = -1;
    Device<float> x(2);
    OK(cudaMallocManaged(&go, sizeof(int)));
    for (int round = 0; round < 200; round++) {
        *(volatile int*)go = 0;
        OK(run(1, 1, a, hold_until, (const volatile int*)go, x.data, (float)round)); // the call returns
        OK(cudaEventRecord(written, a));
        OK(cudaStreamWaitEvent(b, written, 0));
        OK(run(1, 1, b, add, x.data + 1, (const float*)x.data, 4.0f));
        OK(cudaEventRecord(end, b));
        EXPECT_EQ(cudaErrorNotReady, cudaEventQuery(written));
        EXPECT_EQ(cudaErrorNotReady, cudaEventQuery(written)); // polling runs nothing here
        EXPECT_EQ(cudaErrorNotReady, cudaStreamQuery(b));
        cudaGetLastError();
        *(volatile int*)go = 1;
        OK(cudaMemcpyAsync(&pageable, x.data + 1, 4, cudaMemcpyDeviceToHost, b)); // waits
        EXPECT_EQ(round + 4, pageable);
        OK(cudaEventElapsedTime(&ms, written, end));
        EXPECT_GE(ms, 0);
    }
    OK(cudaFree(go));
}

TEST_F(Cpu, ThreadsKeepLegacyOrder) {
    use("CUDA_CPU_STREAMS", "threads");
    cudaStream_t a = make_stream(cudaStreamDefault), b = make_stream(cudaStreamDefault);
    int* go;
    Device<float> x(3);
    OK(cudaMallocManaged(&go, sizeof(int)));
    for (int round = 0; round < 50; round++) {
        *(volatile int*)go = 0;
        OK(run(1, 1, a, hold_until, (const volatile int*)go, x.data, (float)round));
        OK(run(1, 1, 0, add, x.data + 1, (const float*)x.data, 1.0f));     // waits for a
        OK(run(1, 1, b, add, x.data + 2, (const float*)x.data + 1, 1.0f)); // waits for the default stream
        *(volatile int*)go = 1;
        OK(cudaStreamSynchronize(b));
        EXPECT_EQ(round + 2, x.at(2));
    }
    OK(cudaFree(go));
}

TEST_F(Cpu, ThreadsFinishWorkOfDestroyedStreams) {
    use("CUDA_CPU_STREAMS", "threads");
    std::string ran;
    for (int i = 0; i < 20; i++) {
        cudaStream_t a = make_stream();
        OK(cudaLaunchHostFunc(
            a, [](void*) { usleep(2000); }, nullptr));
        OK(cudaLaunchHostFunc(a, append, &ran));
        OK(cudaStreamDestroy(a));
        OK(cudaDeviceSynchronize());
        EXPECT_EQ((size_t)i + 1, ran.size());
    }
}

TEST_F(Cpu, ThreadsEndAtResetAndAtExit) {
    use("CUDA_CPU_STREAMS", "threads");
    std::string ran;
    cudaStream_t a = make_stream();
    OK(cudaLaunchHostFunc(
        a, [](void*) { usleep(20000); }, nullptr));
    for (int i = 0; i < 1000; i++)
        OK(cudaLaunchHostFunc(
            a, [](void*) { usleep(1000); }, nullptr));
    cudaDeviceReset(); // after what runs, without what has not begun
    EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaStreamSynchronize(a));
    use("CUDA_CPU_STREAMS", "lazy");
    EXPECT_EXIT(
        {
            use("CUDA_CPU_STREAMS", "threads");
            cudaStream_t b = make_stream();
            cudaLaunchHostFunc(
                b, [](void*) { pause(); }, nullptr); // never ends, as a collective without peers
            cudaLaunchHostFunc(b, append, &ran);
            exit(7);
        },
        ::testing::ExitedWithCode(7), "");
}

// ----------------------------------------------------------------------------
// dropping waits

__global__ void accumulate(float* y, const float* x) { *y += *x; }

/* Stream 1 writes 1, then 10, into one buffer; stream 2 adds both up. */
static float two_waits() {
    cudaStream_t a = make_stream(), b = make_stream();
    cudaEvent_t written = make_event(), read = make_event();
    Device<float> x(2);
    EXPECT_EQ(cudaSuccess, cudaMemset(x.data + 1, 0, sizeof(float)));
    EXPECT_EQ(cudaSuccess, cudaDeviceSynchronize());
    for (float value : {1.0f, 10.0f}) {
        EXPECT_EQ(cudaSuccess, cudaStreamWaitEvent(a, read)); // before the buffer is written again
        EXPECT_EQ(cudaSuccess, run(1, 1, a, set, x.data, value));
        EXPECT_EQ(cudaSuccess, cudaEventRecord(written, a));
        EXPECT_EQ(cudaSuccess, cudaStreamWaitEvent(b, written, 0));
        EXPECT_EQ(cudaSuccess, run(1, 1, b, accumulate, x.data + 1, (const float*)x.data));
        EXPECT_EQ(cudaSuccess, cudaEventRecord(read, b));
    }
    EXPECT_EQ(cudaSuccess, cudaDeviceSynchronize());
    return x.at(1);
}

TEST_F(Cpu, EachDroppedWaitIsFoundBySomeRush) {
    for (int site = 0; site <= 3; site++) {
        setenv("CUDA_CPU_DROP_WAIT", std::to_string(site).c_str(), 1);
        int wrong = 0;
        std::string said;
        for (const char* mode : MODES) {
            use("CUDA_CPU_STREAMS", mode);
            wrong += two_waits() != 11;
            EXPECT_EQ(2, cudaCpuWaitSites());
            EXPECT_TRUE(strstr(cudaCpuWaitSite(1), "test_cpu_streams.cu:"));
            EXPECT_EQ(nullptr, cudaCpuWaitSite(3));
            ::testing::internal::CaptureStderr();
            cudaDeviceReset();
            said += ::testing::internal::GetCapturedStderr();
        }
        EXPECT_EQ(site == 1 || site == 2, wrong > 0) << site;
        EXPECT_EQ(site == 3 ? "no wait 3\nno wait 3\nno wait 3\nno wait 3\nno wait 3\n" : "", said);
        unsetenv("CUDA_CPU_DROP_WAIT");
    }
    EXPECT_EXIT((use("CUDA_CPU_DROP_WAIT", "4"), two_waits(), exit(0)), ::testing::ExitedWithCode(0),
                "no wait 4");
}

// ----------------------------------------------------------------------------
// device memory

__global__ void poke(char* p, long offset) { p[offset] = 1; }

TEST_F(Cpu, FreshMemoryIsNaNAndAligned) {
    for (size_t bytes : {1, 4, 255, 256, 257, 4095, 4096, 4097, 3000000}) {
        Device<char> a(bytes);
        EXPECT_EQ(0u, (uintptr_t)a.data % 256);
        EXPECT_EQ(bytes, cudaCpuLiveBytes());
        EXPECT_EQ('\xff', a.at(0));
        EXPECT_EQ('\xff', a.at(bytes - 1));
        OK(cudaMemset(a.data, 0, bytes));
        EXPECT_EQ('\0', a.at(bytes - 1));
        char text[200];
        EXPECT_TRUE(cuda_cpu::in_device_memory(a.data, bytes, text, sizeof(text)));
        EXPECT_FALSE(cuda_cpu::in_device_memory(a.data + 1, bytes, text, sizeof(text)));
        EXPECT_TRUE(strstr(text, "from offset 1 in an allocation of")) << text;
    }
}

/* Device memory is shared with forked processes: what a death test breaks must be its own. */
template <typename Then> static void poke_own(long offset, Then then) {
    char* p;
    if (cudaMalloc(&p, 1000) == cudaSuccess) run(1, 1, 0, poke, p, offset);
    then(p);
}

TEST_F(Cpu, WritesOutsideAnAllocationAreFound) {
    auto free_it = [](char* p) { cudaFree(p); };
    auto reset = [](char*) { cudaDeviceReset(); };
    auto end = [](char*) { exit(0); };
    auto free_and_use = [](char* p) { cudaFree(p), run(1, 1, 0, poke, p, 0L); };
    Device<char> fresh(1); // opens the heap
    EXPECT_EXIT(poke_own(1000, free_it), FAULT, FAULT_TEXT("past its end, at byte 1000"));
    EXPECT_EXIT(poke_own(-1, reset), FAULT, FAULT_TEXT("written 1 bytes before its start"));
    EXPECT_EXIT(poke_own(1023, end), FAULT, FAULT_TEXT("past its end, at byte 1023"));
    EXPECT_EXIT(
        poke_own(1024, end), FAULT,
        FAULT_TEXT("thread \\(0,0,0\\) of block .* touched device memory .* offset 1024 .* has 1000 bytes"));
    EXPECT_EXIT(poke_own(0, free_and_use), FAULT, FAULT_TEXT("which was freed"));
    EXPECT_EXIT(run(1, 1, 0, poke, nullptr, 64L), FAULT, FAULT_TEXT("which is no memory"));
}

TEST_F(Cpu, CopiesAreChecked) {
    Device<char> a(1000);
    char host[2000] = {0};
    EXPECT_EXIT(cudaMemcpy(a.data + 1, host, 1000, cudaMemcpyHostToDevice), FATAL,
                "cudaMemcpy, destination: 1000 bytes from offset 1 in an allocation of 1000 bytes");
    EXPECT_EXIT(cudaMemcpy(host, a.data, 1001, cudaMemcpyDeviceToHost), FATAL,
                "cudaMemcpy, source: 1001 bytes");
    EXPECT_EXIT(cudaMemsetAsync(a.data, 0, 1001, 0), FATAL, "cudaMemsetAsync, destination");
    EXPECT_EXIT(cudaMemset2DAsync(a.data, 300, 0, 200, 4, 0), FATAL, "1100 bytes from offset 0");
    OK(cudaMemset2DAsync(a.data, 300, 0, 100, 4, 0));
    OK(cudaMemcpy2D(host, 10, a.data, 300, 10, 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(cudaErrorInvalidValue, cudaMemcpy(a.data, nullptr, 4, cudaMemcpyHostToDevice));
    EXPECT_EQ(cudaErrorInvalidValue, cudaMemcpy(host, host + 8, 4, cudaMemcpyHostToDevice));
    EXPECT_EQ(cudaErrorInvalidValue, cudaMemcpy(host, a.data, 4, cudaMemcpyHostToDevice));
    EXPECT_EQ(cudaErrorInvalidValue, cudaMemset(host, 0, 4));
    EXPECT_EQ(cudaErrorInvalidValue, cudaGetLastError());
    OK(cudaMemcpy(host, a.data, 4, cudaMemcpyDefault));
}

TEST_F(Cpu, FreeingTwiceOrInsideIsAnError) {
    char* p;
    OK(cudaMalloc(&p, 100));
    EXPECT_EQ(cudaErrorInvalidValue, cudaFree(p + 1));
    OK(cudaFree(p));
    EXPECT_EQ(cudaErrorInvalidValue, cudaFree(p));
    OK(cudaFree(nullptr));
    OK(cudaMallocAsync(&p, 100, 0));
    OK(cudaFreeAsync(p, 0));
}

TEST_F(Cpu, MemoryLimits) {
    use("CUDA_CPU_MEMORY", "100000");
    size_t free_bytes, total;
    char *p, *q;
    OK(cudaMalloc(&p, 60000));
    EXPECT_EQ(cudaErrorMemoryAllocation, cudaMalloc(&q, 60000));
    EXPECT_EQ(nullptr, q);
    OK(cudaMemGetInfo(&free_bytes, &total));
    EXPECT_EQ(100000u, total);
    EXPECT_EQ(40000u, free_bytes);
    OK(cudaFree(p));
    OK(cudaMalloc(&p, 100000));
    OK(cudaFree(p));
    use("CUDA_CPU_MEMORY", "0");
    EXPECT_EQ(cudaErrorMemoryAllocation, cudaMalloc(&p, (size_t)1 << 39)); // more than this machine has
    EXPECT_EQ(cudaErrorMemoryAllocation, cudaMalloc(&p, ~(size_t)0));
    OK(cudaMemGetInfo(&free_bytes, &total));
    EXPECT_LT(free_bytes, total);
}

TEST_F(Cpu, PointerAttributes) {
    cudaPointerAttributes attributes;
    Device<char> a(10);
    char *managed, *pinned, host[4];
    OK(cudaMallocManaged(&managed, 10));
    OK(cudaHostAlloc(&pinned, 10, 0));
    OK(cudaPointerGetAttributes(&attributes, a.data));
    EXPECT_EQ(cudaMemoryTypeDevice, attributes.type);
    OK(cudaPointerGetAttributes(&attributes, managed));
    EXPECT_EQ(cudaMemoryTypeManaged, attributes.type);
    OK(cudaPointerGetAttributes(&attributes, pinned));
    EXPECT_EQ(cudaMemoryTypeHost, attributes.type);
    OK(cudaPointerGetAttributes(&attributes, host));
    EXPECT_EQ(cudaMemoryTypeUnregistered, attributes.type);
    OK(cudaHostRegister(host, 4, 0));
    OK(cudaPointerGetAttributes(&attributes, host));
    EXPECT_EQ(cudaMemoryTypeHost, attributes.type);
    OK(cudaHostUnregister(host));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(managed));
}

// ----------------------------------------------------------------------------
// devices and faults to order

TEST_F(Cpu, Devices) {
    int count = 0, value = 0;
    OK(cudaGetDeviceCount(&count));
    EXPECT_EQ(64, count);
    use("CUDA_CPU_DEVICES", "3");
    EXPECT_EQ(cudaErrorInvalidDevice, cudaSetDevice(3));
    OK(cudaSetDevice(2));
    OK(cudaGetDevice(&value));
    EXPECT_EQ(2, value);
    use("CUDA_VISIBLE_DEVICES", "1,0");
    OK(cudaGetDeviceCount(&count));
    EXPECT_EQ(2, count);
    cudaDeviceProp properties;
    OK(cudaGetDeviceProperties(&properties, 1));
    EXPECT_STREQ("cuda-cpu", properties.name);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
    EXPECT_EQ(properties.multiProcessorCount, value);
    use("CUDA_VISIBLE_DEVICES", "");
    EXPECT_EQ(cudaErrorNoDevice, cudaGetDeviceCount(&count));
    EXPECT_EQ(0, count);
    EXPECT_EQ(cudaErrorNoDevice, cudaSetDevice(0));
}

TEST_F(Cpu, TheNthCallFails) {
    char *p, *q;
    use("CUDA_CPU_FAIL", "cudaMalloc:2");
    for (int again = 0; again < 2; again++) {
        OK(cudaMalloc(&p, 10));
        EXPECT_EQ(cudaErrorMemoryAllocation, cudaMalloc(&q, 10));
        EXPECT_EQ(cudaErrorMemoryAllocation, cudaGetLastError());
        OK(cudaMalloc(&q, 10));
        OK(cudaFree(p));
        OK(cudaFree(q));
        cudaDeviceReset(); // counts from 1 again
    }
    use("CUDA_CPU_FAIL", "cudaLaunchKernelEx:1");
    Device<float> x(1);
    EXPECT_EQ(cudaErrorUnknown, run(1, 1, 0, set, x.data, 1.0f));
    OK(run(1, 1, 0, set, x.data, 1.0f));
    use("CUDA_CPU_FAIL", "cudaStreamWaitEvent:1");
    cudaEvent_t event = make_event();
    EXPECT_EQ(cudaErrorUnknown, cudaStreamWaitEvent(0, event));
    OK(cudaStreamWaitEvent(0, event));
}

TEST_F(Cpu, BadSettingsAreRefused) {
    EXPECT_EXIT(use("CUDA_CPU_STREAMS", "rush"), FATAL, "eager, lazy, rush:ID or threads");
    EXPECT_EXIT(use("CUDA_CPU_SCHED", "rand"), FATAL, "fwd, rev or rand:N");
    EXPECT_EXIT(use("CUDA_CPU_FAIL", "cudaMalloc"), FATAL, "name:n");
    EXPECT_EXIT(use("CUDA_CPU_MEMORY", "1G"), FATAL, "whole number");
}
