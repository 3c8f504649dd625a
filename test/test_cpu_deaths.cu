/* test/test_cpu_deaths.cu - CUDA_CPU_NCCL_DEATH=silent: what a rank of the CPU build sees when a peer dies or stops, as
   with NCCL inside a node. (That deaths are reported otherwise: test_cpu_nccl.cu.)

   Every rank is a forked child. That a call blocks is seen by a thread which makes it and has not come back after
   LONG_MS; a busy machine can only make that easier to pass. alarm() ends what hangs.
*/
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <atomic>
#include <functional>
#include <memory>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

const int LONG_MS = 500; // beyond the 50 ms after which a reported death is seen, and the 0.25 s of README.md

/* What the ranks of a test tell each other beside NCCL. */
struct Shared {
    ncclUniqueId id;
    std::atomic<int> made, begun, pid_of_1;
};

void sleep_ms(int ms) { usleep(ms * 1000); }
void until(const std::atomic<int>& value, int least) {
    while (value < least) usleep(1000);
}

/* Runs f(rank) on n forked ranks; rank 0 makes the id. What rank 1 stops or dies of is its own affair: it is killed
   after the others have ended, which must be with code 0. */
void ranks(int n, const char* streams, const std::function<void(int, Shared&)>& f) {
    void* p = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    Shared& shared = *new (p) Shared();
    std::vector<pid_t> pids;
    fflush(stdout);
    for (int rank = 0; rank < n; rank++) {
        pid_t pid = fork();
        if (pid == 0) {
            alarm(600);
            setenv("CUDA_CPU_NCCL_DEATH", "silent", 1);
            setenv("CUDA_CPU_STREAMS", streams, 1);
            setenv("CUDA_CPU_TIMEOUT", "1", 1); // does not count
            if (rank == 0) {
                EXPECT_EQ(ncclGetUniqueId(&shared.id), ncclSuccess);
                shared.made++;
            }
            if (rank == 1) shared.pid_of_1 = getpid();
            until(shared.made, 1);
            until(shared.pid_of_1, n > 1);
            f(rank, shared);
            exit(testing::Test::HasFailure() ? 1
                                             : 0); // not _exit: the end of a process does not block either
        }
        pids.push_back(pid);
    }
    for (int rank = n - 1; rank >= 0; rank--) {
        int status = 0;
        if (rank == 1) continue;
        waitpid(pids[rank], &status, 0);
        EXPECT_EQ(status, 0) << "rank " << rank << ", streams " << streams;
    }
    if (n > 1) kill(pids[1], SIGKILL), waitpid(pids[1], nullptr, 0);
    munmap(p, sizeof(Shared));
}

ncclComm_t join(int n, int rank, const Shared& shared) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, n, shared.id, rank), ncclSuccess) << ncclGetLastError(nullptr);
    return comm;
}

cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t s = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&s, flags), cudaSuccess);
    return s;
}

/* A call made by a thread of its own. Left behind, should it never come back. */
class Caller {
  public:
    Caller(const char* name, const std::function<int()>& call) : name(name), state(new State) {
        std::shared_ptr<State> s = state;
        std::thread([s, call] {
            s->result = call();
            s->back = 1;
        }).detach();
    }
    void expect_blocked() const { EXPECT_EQ(state->back, 0) << name << " came back: " << state->result; }
    void expect_success() const { // once whatever it waited for is over
        until(state->back, 1);
        EXPECT_EQ(state->result, 0) << name;
    }

  private:
    struct State {
        std::atomic<int> back{0}, result{-1};
    };
    const char* name;
    std::shared_ptr<State> state;
};

void expect_nothing_told(ncclComm_t comm, cudaStream_t s, cudaEvent_t e) {
    ncclResult_t result = ncclInternalError;
    for (int i = 0; i < 8; i++, sleep_ms(LONG_MS / 8)) {
        EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
        EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
        EXPECT_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
        EXPECT_EQ(result, ncclSuccess);
    }
    (void)cudaGetLastError(); // "not ready"
}

/* A rank with a collective on `s` that has no peer, an event after it, and a stream that waits for the event. */
struct Stuck {
    ncclComm_t comm;
    cudaStream_t s = stream(), later = stream(cudaStreamDefault);
    cudaEvent_t event, event_later;
    float *a = nullptr, *b = nullptr, *host = nullptr;

    Stuck(int rank, Shared& shared, int signal) : comm(join(2, rank, shared)) {
        EXPECT_EQ(cudaMalloc(&a, 4096), cudaSuccess);
        EXPECT_EQ(cudaMalloc(&b, 4096), cudaSuccess);
        EXPECT_EQ(cudaMallocHost(&host, 4096), cudaSuccess);
        for (cudaEvent_t* e : {&event, &event_later}) EXPECT_EQ(cudaEventCreate(e), cudaSuccess);
        EXPECT_EQ(cudaMemsetAsync(a, 0, 4096, s), cudaSuccess);
        EXPECT_EQ(reduce(), ncclSuccess); // one that works
        EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
        if (rank == 1) raise(signal);
        if (rank == 1) return; // continued
        EXPECT_EQ(reduce(), ncclSuccess);
        EXPECT_EQ(cudaEventRecord(event, s), cudaSuccess);
        EXPECT_EQ(cudaStreamWaitEvent(later, event, 0), cudaSuccess);
        EXPECT_EQ(cudaMemsetAsync(b, 0, 4096, later), cudaSuccess);
        EXPECT_EQ(cudaEventRecord(event_later, later), cudaSuccess);
        EXPECT_EQ(ncclAllReduce(b, b, 1, ncclFloat, ncclSum, comm, later), ncclSuccess); // queued, too
    }
    ncclResult_t reduce() { return ncclAllReduce(a, a, 1024, ncclFloat, ncclSum, comm, s); }
};

void expect_the_rest_gets_on() {
    cudaStream_t other = stream(), gone = stream();
    cudaEvent_t event = nullptr;
    float *p = nullptr, *host = nullptr;
    EXPECT_EQ(cudaMalloc(&p, 4096), cudaSuccess);
    EXPECT_EQ(cudaMallocHost(&host, 4096), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(p, 0, 4096, other), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(host, p, 4096, cudaMemcpyDeviceToHost, other), cudaSuccess);
    EXPECT_EQ(cudaEventCreate(&event), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(host[1023], 0.0f);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(gone), cudaSuccess);
}

void survivor_of(int signal, const char* streams) {
    ranks(2, streams, [signal](int rank, Shared& shared) {
        Stuck x(rank, shared, signal);
        expect_nothing_told(x.comm, x.s, x.event);
        EXPECT_EQ(cudaEventQuery(x.event_later), cudaErrorNotReady); // lazy: asked once
        EXPECT_EQ(cudaEventQuery(x.event_later), cudaErrorNotReady);
        expect_the_rest_gets_on();
        cudaEvent_t used = nullptr;
        EXPECT_EQ(cudaEventCreate(&used), cudaSuccess);
        EXPECT_EQ(cudaEventRecord(used, x.s), cudaSuccess);
        EXPECT_EQ(cudaEventDestroy(used), cudaSuccess);
        std::vector<float> pageable(1024);
        float *unused = nullptr, *unused_host = nullptr; // what the others use is not freed under them
        EXPECT_EQ(cudaMalloc(&unused, 4096), cudaSuccess);
        EXPECT_EQ(cudaMallocHost(&unused_host, 4096), cudaSuccess);
        Caller calls[] = {
            {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(x.s); }},
            {"cudaEventSynchronize", [&] { return cudaEventSynchronize(x.event_later); }},
            {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }},
            {"cudaMemcpy",
             [&] { return cudaMemcpy(x.host, x.b, 4096, cudaMemcpyDeviceToHost); }}, // of `later`
            {"cudaMemcpyAsync",
             [&] { return cudaMemcpyAsync(pageable.data(), x.a, 4096, cudaMemcpyDeviceToHost, x.s); }},
            {"cudaFree", [&] { return cudaFree(unused); }},
            {"cudaFreeHost", [&] { return cudaFreeHost(unused_host); }}};
        sleep_ms(LONG_MS);
        for (const Caller& call : calls) call.expect_blocked();
        EXPECT_EQ(cudaStreamDestroy(x.later), cudaSuccess);
        EXPECT_EQ(ncclCommAbort(x.comm), ncclSuccess);
        for (const Caller& call : calls) call.expect_success();
        EXPECT_EQ(cudaStreamQuery(x.s), cudaSuccess);
        EXPECT_EQ(cudaEventQuery(x.event_later), cudaSuccess);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    });
}

} // namespace

TEST(CpuDeaths, ASurvivorHearsNothing) {
    survivor_of(SIGKILL, "eager");
    survivor_of(SIGSTOP, "eager");
    survivor_of(SIGSTOP, "threads");
    survivor_of(SIGKILL, "lazy");
    survivor_of(SIGKILL, "rush:1");
}

/* A stopped rank that goes on is none that died: all is done, in order, as if nothing had been. */
TEST(CpuDeaths, AStoppedPeerGoesOn) {
    for (const char* streams : {"eager", "threads"})
        ranks(2, streams, [](int rank, Shared& shared) {
            Stuck x(rank, shared, SIGSTOP);
            if (rank == 1) {
                EXPECT_EQ(x.reduce(), ncclSuccess);
                EXPECT_EQ(ncclAllReduce(x.b, x.b, 1, ncclFloat, ncclSum, x.comm, x.s), ncclSuccess);
                EXPECT_EQ(cudaStreamSynchronize(x.s), cudaSuccess);
                return;
            }
            expect_nothing_told(x.comm, x.s, x.event);
            kill(shared.pid_of_1, SIGCONT);
            EXPECT_EQ(cudaEventSynchronize(x.event_later), cudaSuccess);
            EXPECT_EQ(cudaEventQuery(x.event), cudaSuccess);
            EXPECT_EQ(cudaMemcpy(x.host, x.a, 4096, cudaMemcpyDeviceToHost), cudaSuccess);
            EXPECT_EQ(x.host[1023], 0.0f);
            EXPECT_EQ(cudaFree(x.a), cudaSuccess);
            EXPECT_EQ(ncclCommDestroy(x.comm), ncclSuccess);
        });
}

TEST(CpuDeaths, LaunchesBlockOnceTheQueueIsFull) {
    ranks(2, "eager", [](int rank, Shared& shared) {
        Stuck x(rank, shared, SIGKILL);
        std::atomic<int> launched{0};
        Caller launches("cudaMemsetAsync", [&] {
            for (cudaError_t error; launched < 3000; launched++)
                if ((error = cudaMemsetAsync(x.b, 0, 4, x.s)) != cudaSuccess) return (int)error;
            return 0;
        });
        until(launched, 1000);
        sleep_ms(LONG_MS);
        launches.expect_blocked();
        EXPECT_LE(launched, 1024);
        EXPECT_EQ(ncclCommAbort(x.comm), ncclSuccess);
        launches.expect_success();
    });
}

TEST(CpuDeaths, DestroyBlocksAndTheProcessEnds) {
    for (const char* streams : {"eager", "threads"})
        ranks(2, streams, [](int rank, Shared& shared) {
            Stuck x(rank, shared, SIGSTOP);
            Caller destroy("ncclCommDestroy", [&] { return ncclCommDestroy(x.comm); });
            sleep_ms(LONG_MS);
            destroy.expect_blocked();
        });
}

/* Rank 1 aborts, or destroys its communicator, and lives: rank 0 does not hear of it. */
TEST(CpuDeaths, OnesAbortIsNotTheOthers) {
    for (bool abort : {true, false})
        ranks(2, "eager", [abort](int rank, Shared& shared) {
            float* a = nullptr;
            cudaEvent_t event = nullptr;
            cudaStream_t s = stream();
            ncclComm_t comm = join(2, rank, shared);
            EXPECT_EQ(cudaMalloc(&a, 4096), cudaSuccess);
            EXPECT_EQ(cudaEventCreate(&event), cudaSuccess);
            if (rank == 1) {
                EXPECT_EQ(abort ? ncclCommAbort(comm) : ncclCommDestroy(comm), ncclSuccess);
                shared.begun++;
                for (;;) pause();
            }
            until(shared.begun, 1);
            EXPECT_EQ(ncclAllReduce(a, a, 1024, ncclFloat, ncclSum, comm, s), ncclSuccess);
            EXPECT_EQ(cudaEventRecord(event, s), cudaSuccess);
            expect_nothing_told(comm, s, event);
        });
}

/* A rank that never comes, one that dies before, one that dies in it: ncclCommInitRank waits without a word. */
TEST(CpuDeaths, InitWaitsForEver) {
    enum { NEVER, BEFORE, WITHIN };
    for (int when : {NEVER, BEFORE, WITHIN})
        ranks(3, "eager", [when](int rank, Shared& shared) {
            if (rank == 1 && when == BEFORE) raise(SIGKILL);
            if (rank == 1 && when == NEVER) pause();
            if (rank == 2) return; // its exit comes before 0 has all, and it made nothing
            ncclComm_t comm;
            Caller init("ncclCommInitRank", [&] { return ncclCommInitRank(&comm, 3, shared.id, rank); });
            sleep_ms(LONG_MS);
            if (rank == 1) raise(SIGKILL);
            sleep_ms(3 * LONG_MS); // more than CUDA_CPU_TIMEOUT
            init.expect_blocked();
        });
}

TEST(CpuDeaths, InitWaitsForEverForADeadMaker) {
    ranks(1, "eager", [](int, Shared& shared) {
        pid_t maker = fork();
        if (maker == 0) _exit(ncclGetUniqueId(&shared.id) != ncclSuccess);
        waitpid(maker, nullptr, 0);
        ncclComm_t comm;
        Caller init("ncclCommInitRank", [&] { return ncclCommInitRank(&comm, 2, shared.id, 1); });
        sleep_ms(2 * LONG_MS);
        init.expect_blocked();
    });
}
