/* test/test_cpu_nccl.cu - the NCCL of the CPU build (dev/cpu/nccl*.cpp), ranks forked by the test itself.

     dev/cpu/nvcc -std=c++17 -O2 test/test_cpu_nccl.cu -lgtest -o t && ./t
     ./t --gtest_also_run_disabled_tests --gtest_filter='*Speed*'     prints seconds and GB/s

   Every rank is a forked child, and so is the maker of the ncclUniqueId: the parent calls nothing of CUDA,
   whose settings a process reads from its environment once. EXPECT works in a child: it ends with code 1 if
   anything failed there.
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <atomic>
#include <functional>
#include <math.h>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace cuda_cpu {
void reload_options(); // dev/cpu/internal.h: the environment is read again
}

namespace {

typedef std::function<void(int rank, ncclUniqueId id)> Rank;

struct Ended {
    int code;
    std::string err;
};

double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Of this rank, from now on. */
void time_limit(const char* seconds) {
    setenv("CUDA_CPU_TIMEOUT", seconds, 1);
    cuda_cpu::reload_options();
}
/* How a list of late ranks ends, to which others may belong that come late on a busy machine. */
const char RANK_2_IS_LATE[] = "2 (CUDA_CPU_TIMEOUT)";

/* A process that makes an id and lives until it is killed: ranks come to it for the control block. */
pid_t fork_maker(ncclUniqueId* id) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        unsetenv("CUDA_CPU_FAIL");
        if (ncclGetUniqueId(id) != ncclSuccess || write(ends[1], id, sizeof *id) != sizeof *id) _exit(1);
        alarm(3600); // should nobody kill it
        for (;;) pause();
    }
    EXPECT_EQ(read(ends[0], id, sizeof *id), (ssize_t)sizeof *id);
    close(ends[0]);
    close(ends[1]);
    return pid;
}

/* Runs f on n forked ranks. code: exit code, or 1000 + signal. err: what the rank wrote to stderr. */
std::vector<Ended> fork_ranks(int n, const Rank& f) {
    ncclUniqueId id;
    std::vector<pid_t> pids;
    std::vector<int> files;
    fflush(stdout);
    pid_t maker = fork_maker(&id);
    for (int rank = 0; rank < n; rank++) {
        int file = memfd_create("stderr", 0);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(600); // a rank that hangs ends, and fails the test
            dup2(file, 2);
            f(rank, id);
            fflush(stdout);
            _exit(testing::Test::HasFailure() ? 1 : 0);
        }
        pids.push_back(pid);
        files.push_back(file);
    }
    std::vector<Ended> ended;
    for (int rank = 0; rank < n; rank++) {
        int status = 0;
        char text[4096] = "";
        waitpid(pids[rank], &status, 0);
        ssize_t bytes = pread(files[rank], text, sizeof text - 1, 0);
        text[bytes > 0 ? bytes : 0] = 0;
        close(files[rank]);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
        ended.push_back(Ended{code, text});
    }
    kill(maker, SIGKILL);
    waitpid(maker, nullptr, 0);
    return ended;
}

void all_well(int n, const Rank& f) {
    std::vector<Ended> e = fork_ranks(n, f);
    for (int r = 0; r < n; r++) EXPECT_EQ(e[r].code, 0) << "rank " << r << " of " << n << ": " << e[r].err;
}

/* Every rank must stop with code 99 and these words. */
void all_stop(int n, const std::string& words, const Rank& f) {
    std::vector<Ended> e = fork_ranks(n, f);
    for (int r = 0; r < n; r++) {
        EXPECT_EQ(e[r].code, 99) << "rank " << r << ": " << e[r].err;
        EXPECT_NE(e[r].err.find(words), std::string::npos) << "rank " << r << " says: " << e[r].err;
    }
}

ncclComm_t join(int n, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, n, id, rank), ncclSuccess) << ncclGetLastError(nullptr);
    return comm;
}

size_t size_of(ncclDataType_t t) {
    static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return BYTES[t];
}

void put(ncclDataType_t t, void* p, size_t i, double x) {
    switch (t) {
    case ncclInt8: ((int8_t*)p)[i] = (int8_t)x; break;
    case ncclUint8: ((uint8_t*)p)[i] = (uint8_t)x; break;
    case ncclInt32: ((int32_t*)p)[i] = (int32_t)x; break;
    case ncclUint32: ((uint32_t*)p)[i] = (uint32_t)x; break;
    case ncclInt64: ((int64_t*)p)[i] = (int64_t)x; break;
    case ncclUint64: ((uint64_t*)p)[i] = (uint64_t)x; break;
    case ncclFloat16: ((__half*)p)[i] = __float2half((float)x); break;
    case ncclFloat32: ((float*)p)[i] = (float)x; break;
    case ncclFloat64: ((double*)p)[i] = x; break;
    default: ((__nv_bfloat16*)p)[i] = __float2bfloat16((float)x); break;
    }
}

double get(ncclDataType_t t, const void* p, size_t i) {
    switch (t) {
    case ncclInt8: return ((const int8_t*)p)[i];
    case ncclUint8: return ((const uint8_t*)p)[i];
    case ncclInt32: return ((const int32_t*)p)[i];
    case ncclUint32: return ((const uint32_t*)p)[i];
    case ncclInt64: return (double)((const int64_t*)p)[i];
    case ncclUint64: return (double)((const uint64_t*)p)[i];
    case ncclFloat16: return __half2float(((const __half*)p)[i]);
    case ncclFloat32: return ((const float*)p)[i];
    case ncclFloat64: return ((const double*)p)[i];
    default: return __bfloat162float(((const __nv_bfloat16*)p)[i]);
    }
}

/* A device array of any type, filled and read through host copies. */
struct Array {
    ncclDataType_t type;
    size_t count;
    char* p = nullptr;
    Array(ncclDataType_t t, size_t n, const std::function<double(size_t)>& f) : type(t), count(n) {
        EXPECT_EQ(cudaMalloc((void**)&p, n * size_of(t) + 256), cudaSuccess);
        std::vector<char> host(n * size_of(t) + 8);
        for (size_t i = 0; i < n; i++) put(t, host.data(), i, f(i));
        EXPECT_EQ(cudaMemcpy(p, host.data(), n * size_of(t), cudaMemcpyHostToDevice), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(0), cudaSuccess); // the copy may still be on its way
    }
    ~Array() { cudaFree(p); }
    char* at(size_t i) const { return p + i * size_of(type); }
    std::vector<double> read() const {
        std::vector<char> host(count * size_of(type) + 8);
        EXPECT_EQ(cudaMemcpy(host.data(), p, count * size_of(type), cudaMemcpyDeviceToHost), cudaSuccess);
        std::vector<double> x(count);
        for (size_t i = 0; i < count; i++) x[i] = get(type, host.data(), i);
        return x;
    }
};

const std::function<double(size_t)> MINUS = [](size_t) {
    return 77.0;
}; // what must be overwritten, or must not

/* Small integers: exact in every type and at every step of every operation up to 8 ranks. */
double sample(int rank, size_t i) {
    int x = (int)((i * 7 + rank * 5 + i / 512) % 3);
    return rank < 4 ? x + (rank == (int)(i % 2)) : x > 0; // a product of at most 3 * 2 * 2 * 2
}

double expected(int op, int n, size_t i) {
    double x = sample(0, i);
    for (int r = 1; r < n; r++) {
        double y = sample(r, i);
        x = op == ncclProd ? x * y : op == ncclMax ? fmax(x, y) : op == ncclMin ? fmin(x, y) : x + y;
    }
    return x;
}

void expect_equal(const std::vector<double>& x, const std::function<double(size_t)>& f,
                  const std::string& what) {
    for (size_t i = 0; i < x.size(); i++)
        if (x[i] != f(i)) {
            ADD_FAILURE() << what << ": element " << i << " is " << x[i] << ", not " << f(i);
            return;
        }
}

} // namespace

TEST(CpuNccl, ReductionsAreExactInEveryTypeAndOperation) {
    for (int n : {1, 2, 3, 4, 8})
        all_well(n, [n](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            for (int t = 0; t < 10; t++)
                for (int op = 0; op < (n == 8 ? 1 : 4); op++)
                    for (size_t count : {1, 37, n == 3 ? 4097 : 1100}) { // beyond a block and several pieces
                        ncclDataType_t type = (ncclDataType_t)t;
                        std::string what = "type " + std::to_string(t) + " op " + std::to_string(op) +
                                           " count " + std::to_string(count) + " ranks " + std::to_string(n);
                        auto mine = [rank](size_t i) { return sample(rank, i); };
                        auto sum = [op, n](size_t i) { return expected(op, n, i); };
                        Array all(type, count * n, mine), some(type, count, MINUS), in(type, count, mine);
                        EXPECT_EQ(ncclSuccess,
                                  ncclReduceScatter(all.p, some.p, count, type, (ncclRedOp_t)op, comm, 0));
                        expect_equal(
                            some.read(), [&](size_t i) { return sum(count * rank + i); }, "rs " + what);
                        EXPECT_EQ(ncclSuccess, ncclReduceScatter(all.p, all.at(count * rank), count, type,
                                                                 (ncclRedOp_t)op, comm, 0));
                        expect_equal(
                            all.read(),
                            [&](size_t i) { return i / count == (size_t)rank ? sum(i) : mine(i); },
                            "rs in place " + what);
                        EXPECT_EQ(ncclSuccess,
                                  ncclAllReduce(in.p, some.p, count, type, (ncclRedOp_t)op, comm, 0));
                        expect_equal(some.read(), sum, "ar " + what);
                        int root = n / 2;
                        EXPECT_EQ(ncclSuccess, ncclReduce(in.p, rank == root ? some.p : nullptr, count, type,
                                                          (ncclRedOp_t)op, root, comm, 0));
                        expect_equal(some.read(), sum, "reduce " + what);
                        expect_equal(in.read(), mine, "input " + what);
                        EXPECT_EQ(ncclSuccess,
                                  ncclAllReduce(in.p, in.p, count, type, (ncclRedOp_t)op, comm, 0));
                        expect_equal(in.read(), sum, "ar in place " + what);
                    }
            EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
        });
}

TEST(CpuNccl, MovesAreExact) {
    for (int n : {1, 2, 3, 4, 8})
        all_well(n, [n](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            auto of = [](int r, size_t i) { return (double)((r * 17 + i) % 100); };
            for (ncclDataType_t type : {ncclInt8, ncclBfloat16, ncclFloat, ncclDouble})
                for (size_t count : {1, 5, 1000}) {
                    auto mine = [&](size_t i) { return of(rank, i); };
                    auto gathered = [&](size_t i) { return of((int)(i / count), i % count); };
                    Array in(type, count, mine), out(type, count * n, MINUS), all(type, count * n, mine);
                    EXPECT_EQ(ncclAllGather(in.p, out.p, count, type, comm, 0), ncclSuccess);
                    expect_equal(out.read(), gathered, "all-gather");
                    Array place(type, count * n,
                                [&](size_t i) { return i / count == (size_t)rank ? gathered(i) : 77.0; });
                    EXPECT_EQ(ncclAllGather(place.at(count * rank), place.p, count, type, comm, 0),
                              ncclSuccess);
                    expect_equal(place.read(), gathered, "all-gather in place");
                    for (int root = 0; root < n; root++) {
                        Array b(type, count, MINUS), c(type, count, mine);
                        EXPECT_EQ(
                            ncclBroadcast(rank == root ? in.p : nullptr, b.p, count, type, root, comm, 0),
                            ncclSuccess);
                        expect_equal(
                            b.read(), [&](size_t i) { return of(root, i); }, "broadcast");
                        EXPECT_EQ(ncclBcast(c.p, count, type, root, comm, 0), ncclSuccess);
                        expect_equal(
                            c.read(), [&](size_t i) { return of(root, i); }, "bcast");
                    }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
                    EXPECT_EQ(ncclAlltoAll(all.p, out.p, count, type, comm, 0), ncclSuccess);
                    expect_equal(
                        out.read(), [&](size_t i) { return of((int)(i / count), rank * count + i % count); },
                        "all-to-all");
                    Array one(type, count, MINUS);
                    EXPECT_EQ(ncclScatter(all.p, one.p, count, type, 0, comm, 0), ncclSuccess);
                    expect_equal(
                        one.read(), [&](size_t i) { return of(0, rank * count + i); }, "scatter");
                    EXPECT_EQ(ncclGather(in.p, rank == 0 ? out.p : nullptr, count, type, 0, comm, 0),
                              ncclSuccess);
                    if (rank == 0) expect_equal(out.read(), gathered, "gather");
#endif
                }
            EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
        });
}

/* 1 + 2^-8 is half-way between two bf16 numbers and rounds to 1; 2^-8 + 2^-8 + 1 is a bf16 number. */
const double E8 = 1.0 / 256, SUM = 1 + 2 * E8;

TEST(CpuNccl, SumsAsARingDoes) {
    all_well(3, [](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(3, rank, id);
        const size_t count = 3 * 512 + 100;
        auto mine = [rank](size_t) { return rank == 0 ? 1 : E8; };
        Array in(ncclBfloat16, 3 * count, mine), slice(ncclBfloat16, count, MINUS),
            all(ncclBfloat16, 3 * count, MINUS);
        /* slice 0: ranks 1, 2, 0; slice 1: ranks 2, 0, 1; slice 2: ranks 0, 1, 2 */
        EXPECT_EQ(ncclReduceScatter(in.p, slice.p, count, ncclBfloat16, ncclSum, comm, 0), ncclSuccess);
        expect_equal(
            slice.read(), [&](size_t) { return rank == 0 ? SUM : 1; }, "reduce-scatter");
        EXPECT_EQ(ncclAllReduce(in.p, all.p, 3 * count, ncclBfloat16, ncclSum, comm, 0), ncclSuccess);
        expect_equal(
            all.read(), [&](size_t i) { return i / 512 % 3 == 0 ? SUM : 1; }, "all-reduce");
        for (int root = 0; root < 3; root++) {
            EXPECT_EQ(ncclReduce(in.p, slice.p, count, ncclBfloat16, ncclSum, root, comm, 0), ncclSuccess);
            if (rank == root)
                expect_equal(
                    slice.read(), [&](size_t) { return root == 0 ? SUM : 1; }, "reduce");
        }
    });
}

TEST(CpuNccl, RingOrderAndExactAreSettings) {
    auto run = [](double want) {
        all_well(4, [want](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(4, rank, id);
            const double values[] = {1, E8, E8, 0};
            Array in(ncclBfloat16, 4 * 9, [&](size_t) { return values[rank]; }),
                slice(ncclBfloat16, 9, MINUS);
            EXPECT_EQ(ncclReduceScatter(in.p, slice.p, 9, ncclBfloat16, ncclSum, comm, 0), ncclSuccess);
            if (rank == 3)
                expect_equal(
                    slice.read(), [&](size_t) { return want; }, "slice 3");
        });
    };
    run(1); // 0, 1, 2, 3
    setenv("CUDA_CPU_NCCL_RING", "1,2,0,3", 1);
    run(SUM);
    setenv("CUDA_CPU_NCCL_RING", "2,0,1,3", 1);
    run(1);
    setenv("CUDA_CPU_NCCL", "exact", 1);
    run(SUM);
    unsetenv("CUDA_CPU_NCCL");
    for (const char* bad : {"1,1,0,3", "0,1,2,4", "a,b", "0;1"}) {
        setenv("CUDA_CPU_NCCL_RING", bad, 1);
        all_well(2, [bad](int rank, ncclUniqueId id) {
            ncclComm_t comm;
            EXPECT_EQ(ncclCommInitRank(&comm, 2, id, rank), ncclInvalidUsage) << bad;
            EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("CUDA_CPU_NCCL_RING"), std::string::npos);
        });
    }
    unsetenv("CUDA_CPU_NCCL_RING");
}

TEST(CpuNccl, AverageMultipliesFirst) {
    all_well(3, [](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(3, rank, id);
        /* bf16(1/3) = 0.333984375; 6 * that = 2.00390625, rounded 2; each hop is exact: 0 + 2 + 0. 96 times
           it is 32.0625 -> 32. 5: 1.669921875 -> 1.671875, where the mean 5/3 is 1.6640625 in bf16. */
        Array in(ncclBfloat16, 1, [&](size_t) { return rank == 1 ? 5 : 0; }),
            i32(ncclInt32, 1, [&](size_t) { return 5 + rank; }),
            f(ncclFloat, 1, [&](size_t) { return rank == 1 ? 3 : 0; });
        EXPECT_EQ(ncclAllReduce(in.p, in.p, 1, ncclBfloat16, ncclAvg, comm, 0), ncclSuccess);
        expect_equal(
            in.read(), [](size_t) { return 1.671875; }, "bf16");
        EXPECT_EQ(ncclAllReduce(i32.p, i32.p, 1, ncclInt32, ncclAvg, comm, 0), ncclSuccess);
        expect_equal(
            i32.read(), [](size_t) { return 6; }, "int32");
        EXPECT_EQ(ncclAllReduce(f.p, f.p, 1, ncclFloat, ncclAvg, comm, 0), ncclSuccess);
        expect_equal(
            f.read(), [](size_t) { return (double)(3 * (1.0f / 3)); }, "float");
    });
}

TEST(CpuNccl, RandomSumsAgreeWithDoublesAndRepeat) {
    for (int n : {2, 3, 4})
        all_well(n, [n](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            const size_t count = 20000;
            auto random = [](int r, size_t i) {
                uint64_t h = (i * 64 + r + 1) * 0x9e3779b97f4a7c15ull;
                h ^= h >> 29, h *= 0xbf58476d1ce4e5b9ull, h ^= h >> 32;
                return (double)(int32_t)h / 2147483648.0;
            };
            struct {
                ncclDataType_t type;
                double eps;
            } kinds[] = {
                {ncclDouble, 1.2e-16}, {ncclFloat, 6e-8}, {ncclFloat16, 4.9e-4}, {ncclBfloat16, 3.91e-3}};
            for (auto k : kinds) {
                Array in(k.type, count, [&](size_t i) { return random(rank, i); });
                Array out(k.type, count, MINUS), again(k.type, count, MINUS);
                std::vector<double> sum(count), magnitude(count);
                for (int r = 0; r < n; r++)
                    for (size_t i = 0; i < count; i++) {
                        char stored[8];
                        put(k.type, stored, 0, random(r, i));
                        sum[i] += get(k.type, stored, 0);
                        magnitude[i] += fabs(get(k.type, stored, 0));
                    }
                EXPECT_EQ(ncclAllReduce(in.p, out.p, count, k.type, ncclSum, comm, 0), ncclSuccess);
                EXPECT_EQ(ncclAllReduce(in.p, again.p, count, k.type, ncclSum, comm, 0), ncclSuccess);
                std::vector<double> a = out.read(), b = again.read();
                EXPECT_EQ(a, b);
                for (size_t i = 0; i < count; i++)
                    if (!(fabs(a[i] - sum[i]) <= (n - 1) * k.eps * magnitude[i]))
                        ADD_FAILURE()
                            << "type " << k.type << " element " << i << ": " << a[i] << " " << sum[i],
                            i = count;
            }
        });
}

TEST(CpuNccl, NotANumberAndInfinitySurvive) {
    all_well(3, [](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(3, rank, id);
        for (ncclDataType_t type : {ncclFloat, ncclBfloat16, ncclFloat16}) {
            Array in(type, 3, [&](size_t i) {
                return rank ? 1 : i == 0 ? NAN : i == 1 ? INFINITY : -INFINITY;
            });
            EXPECT_EQ(ncclAllReduce(in.p, in.p, 3, type, ncclSum, comm, 0), ncclSuccess);
            std::vector<double> x = in.read();
            EXPECT_TRUE(isnan(x[0]) && x[1] == INFINITY && x[2] == -INFINITY)
                << x[0] << " " << x[1] << " " << x[2];
        }
    });
}

TEST(CpuNccl, SendAndReceive) {
    for (int n : {1, 2, 3, 4})
        all_well(n, [n](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            const size_t count = 1000;
            Array in(ncclFloat, count * n * 3, [&](size_t i) { return rank * 1e6 + i; });
            Array out(ncclFloat, count * n * 3, MINUS);
            EXPECT_EQ(ncclGroupStart(), ncclSuccess);
            for (int k = 0; k < 3;
                 k++) // three messages to everybody, oneself included; some ranks receive first
                for (int j = 0; j < n; j++) {
                    int peer = (j + rank) % n;
                    size_t at = (size_t)(peer * 3 + k) * count;
                    if (rank % 2) {
                        EXPECT_EQ(ncclRecv(out.at(at), count - k, ncclFloat, peer, comm, 0), ncclSuccess);
                    }
                    EXPECT_EQ(ncclSend(in.at(at), count - k, ncclFloat, peer, comm, 0), ncclSuccess);
                    if (rank % 2 == 0) {
                        EXPECT_EQ(ncclRecv(out.at(at), count - k, ncclFloat, peer, comm, 0), ncclSuccess);
                    }
                }
            EXPECT_EQ(ncclGroupEnd(), ncclSuccess) << ncclGetLastError(comm);
            expect_equal(
                out.read(),
                [&](size_t i) {
                    size_t peer = i / (3 * count), k = i / count % 3;
                    return i % count >= count - k ? 77 : peer * 1e6 + (rank * 3 + k) * count + i % count;
                },
                "messages");
            if (n > 1 && rank < 2) { // no group: rank 0 sends, rank 1 receives
                if (rank == 0)
                    EXPECT_EQ(ncclSend(in.p, 7, ncclFloat, 1, comm, 0), ncclSuccess);
                else
                    EXPECT_EQ(ncclRecv(out.p, 7, ncclFloat, 0, comm, 0), ncclSuccess);
            }
            EXPECT_EQ(ncclSend(in.p, 7, ncclFloat, rank, comm, 0), ncclInvalidUsage);
            ncclGroupStart();
            EXPECT_EQ(ncclSend(in.p, 7, ncclFloat, rank, comm, 0), ncclSuccess);
            EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
        });
}

TEST(CpuNccl, AGroupOfCollectivesOnTwoCommunicators) {
    all_well(4, [](int rank, ncclUniqueId id) {
        ncclComm_t world = join(4, rank, id), half = nullptr;
        ASSERT_EQ(ncclCommSplit(world, rank % 2, -rank, &half, nullptr), ncclSuccess)
            << ncclGetLastError(world);
        int count = 0, place = -1;
        EXPECT_EQ(ncclCommCount(half, &count), ncclSuccess);
        EXPECT_EQ(ncclCommUserRank(half, &place), ncclSuccess);
        EXPECT_EQ(count, 2);
        EXPECT_EQ(place, rank < 2 ? 1 : 0); // the keys turn the order round
        Array a(ncclFloat, 10, [&](size_t) { return rank + 1; }),
            b(ncclFloat, 10, [&](size_t) { return rank + 1; });
        Array c(ncclFloat, 10, [&](size_t) { return rank; });
        ncclGroupStart();
        for (int k = 0; k < 2; k++) // in another order on some ranks
            if (k == (rank > 1))
                EXPECT_EQ(ncclAllReduce(a.p, a.p, 10, ncclFloat, ncclSum, world, 0), ncclSuccess);
            else
                EXPECT_EQ(ncclAllReduce(b.p, b.p, 10, ncclFloat, ncclSum, half, 0), ncclSuccess);
        EXPECT_EQ(ncclBroadcast(c.p, c.p, 10, ncclFloat, 2, world, 0), ncclSuccess);
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
        expect_equal(
            a.read(), [](size_t) { return 10; }, "world");
        expect_equal(
            b.read(), [&](size_t) { return rank % 2 ? 6 : 4; }, "half");
        expect_equal(
            c.read(), [](size_t) { return 2; }, "broadcast");
        ncclComm_t none = (ncclComm_t)1;
        EXPECT_EQ(ncclCommSplit(world, rank == 3 ? NCCL_SPLIT_NOCOLOR : 5, 0, &none, nullptr), ncclSuccess);
        EXPECT_EQ(none == nullptr, rank == 3);
    });
}

TEST(CpuNccl, RanksThatDisagreeStopWithBothSides) {
    typedef std::function<void(int, Array&, Array&, ncclComm_t)> Body;
    auto stop = [](int n, const char* words, const Body& body) {
        all_stop(n, words, [n, body](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            Array a(ncclFloat, 4000, MINUS), b(ncclFloat, 4000, MINUS);
            body(rank, a, b, comm);
        });
    };
    stop(3, "rank 0: ncclAllGather 100 float, rank 2: ncclReduceScatter 50 bfloat16",
         [](int rank, Array& a, Array& b, ncclComm_t comm) {
             if (rank < 2)
                 ncclAllGather(a.p, b.p, 100, ncclFloat, comm, 0);
             else
                 ncclReduceScatter(a.p, b.p, 50, ncclBfloat16, ncclSum, comm, 0);
         });
    stop(2, "rank 0: ncclAllReduce 10 float sum, rank 1: ncclAllReduce 11 float sum",
         [](int rank, Array& a, Array&, ncclComm_t comm) {
             ncclAllReduce(a.p, a.p, 10 + rank, ncclFloat, ncclSum, comm, 0);
         });
    stop(2, "rank 0: ncclAllReduce 10 float sum, rank 1: ncclAllReduce 10 float max",
         [](int rank, Array& a, Array&, ncclComm_t comm) {
             ncclAllReduce(a.p, a.p, 10, ncclFloat, rank ? ncclMax : ncclSum, comm, 0);
         });
    stop(2, "rank 0: ncclBroadcast 10 half root 0, rank 1: ncclBroadcast 10 half root 1",
         [](int rank, Array& a, Array&, ncclComm_t comm) {
             ncclBroadcast(a.p, a.p, 10, ncclHalf, rank, comm, 0);
         });
    stop(2, "rank 0: ncclSend 10 float to rank 1, rank 1: ncclRecv 20 float from rank 0",
         [](int rank, Array& a, Array&, ncclComm_t comm) {
             if (rank == 0)
                 ncclSend(a.p, 10, ncclFloat, 1, comm, 0);
             else
                 ncclRecv(a.p, 20, ncclFloat, 0, comm, 0);
         });
}

TEST(CpuNccl, BadBuffersStop) {
    auto stop = [](const char* words, const std::function<void(Array&, ncclComm_t)>& body) {
        all_stop(1, words, [body](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(1, rank, id);
            Array a(ncclFloat, 1024, MINUS);
            body(a, comm);
        });
    };
    stop("ncclAllReduce 5000 float sum: sendbuff",
         [](Array& a, ncclComm_t comm) { ncclAllReduce(a.p, a.p, 5000, ncclFloat, ncclSum, comm, 0); });
    stop("recvbuff", [](Array& a, ncclComm_t comm) {
        static float host[100];
        ncclAllGather(a.p, host, 100, ncclFloat, comm, 0);
    });
    stop("overlaps",
         [](Array& a, ncclComm_t comm) { ncclAllReduce(a.p, a.at(4), 100, ncclFloat, ncclSum, comm, 0); });
    stop("overlaps", [](Array& a, ncclComm_t comm) { ncclAllGather(a.at(4), a.p, 100, ncclFloat, comm, 0); });
    all_stop(2, "overlaps", [](int rank, ncclUniqueId id) { // the in-place form of another rank
        ncclComm_t comm = join(2, rank, id);
        Array a(ncclFloat, 200, MINUS);
        ncclReduceScatter(a.p, a.at(100 * (1 - rank)), 100, ncclFloat, ncclSum, comm, 0);
    });
}

TEST(CpuNccl, BadArgumentsAreReturned) {
    all_well(1, [](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(1, rank, id), other = nullptr;
        Array a(ncclFloat, 100, MINUS);
        auto bad = [&](ncclResult_t r, const char* words) {
            EXPECT_EQ(r, ncclInvalidArgument);
            EXPECT_NE(std::string(ncclGetLastError(comm)).find(words), std::string::npos)
                << ncclGetLastError(comm);
        };
        bad(ncclAllReduce(a.p, a.p, 1, ncclFloat, ncclSum, nullptr, 0), "ncclAllReduce: comm is NULL");
        bad(ncclAllReduce(a.p, a.p, 1, (ncclDataType_t)99, ncclSum, comm, 0), "data type 99");
        bad(ncclAllReduce(a.p, a.p, 1, (ncclDataType_t)10, ncclSum, comm, 0), "float8e4m3");
        bad(ncclAllReduce(a.p, a.p, 1, ncclFloat, (ncclRedOp_t)7, comm, 0), "reduction 7");
        bad(ncclAllReduce(nullptr, a.p, 1, ncclFloat, ncclSum, comm, 0), "sendbuff is NULL");
        bad(ncclAllReduce(a.p, nullptr, 1, ncclFloat, ncclSum, comm, 0), "recvbuff is NULL");
        bad(ncclAllGather(a.p, a.p, (size_t)1 << 62, ncclFloat, comm, 0), "more than memory");
        bad(ncclBroadcast(a.p, a.p, 1, ncclFloat, 1, comm, 0), "root 1");
        bad(ncclBroadcast(a.p, a.p, 1, ncclFloat, -1, comm, 0), "root -1");
        bad(ncclSend(a.p, 1, ncclFloat, 5, comm, 0), "peer 5");
        bad(ncclCommInitRank(&other, 0, id, 0), "0 ranks");
        bad(ncclCommInitRank(&other, 1000, id, 0), "1000 ranks");
        ncclUniqueId zero = {};
        bad(ncclCommInitRank(&other, 1, zero, 0), "no ncclUniqueId");
        EXPECT_EQ(ncclCommInitRank(&other, 1, id, 0), ncclInvalidUsage); // an id serves once
        EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
        ncclGroupStart();
        EXPECT_EQ(ncclAllReduce(a.p, a.p, 1, ncclFloat, ncclSum, comm, 0), ncclSuccess);
        EXPECT_EQ(ncclAllReduce(a.p, a.p, 1, ncclFloat, (ncclRedOp_t)7, comm, 0), ncclInvalidArgument);
        EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
        EXPECT_EQ(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, comm, 0), ncclSuccess); // count 0
        EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
        bad(ncclAllReduce(a.p, a.p, 1, ncclFloat, ncclSum, comm, 0),
            "is not a communicator, or is destroyed");
        ncclResult_t r;
        EXPECT_EQ(ncclCommGetAsyncError(comm, &r), ncclInvalidArgument);
        int version = 0;
        EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
        EXPECT_EQ(version, NCCL_VERSION_CODE);
        EXPECT_EQ(ncclCommInitAll(&other, 1, nullptr), ncclInvalidUsage);
    });
}

TEST(CpuNccl, InitSaysWhatIsWrongOnAllRanks) {
    auto wrong = [](const char* words, int (*ranks)(int), int (*rank_of)(int)) {
        std::vector<Ended> e = fork_ranks(3, [=](int i, ncclUniqueId id) {
            ncclComm_t comm;
            EXPECT_EQ(ncclCommInitRank(&comm, ranks(i), id, rank_of(i)), ncclInvalidArgument);
            EXPECT_NE(std::string(ncclGetLastError(nullptr)).find(words), std::string::npos)
                << ncclGetLastError(nullptr);
        });
        for (const Ended& x : e) EXPECT_EQ(x.code, 0) << x.err;
    };
    wrong(
        "rank 1 of 3", [](int) { return 3; }, [](int i) { return i ? 1 : 0; });
    wrong(
        "another said", [](int i) { return i == 2 ? 4 : 3; }, [](int i) { return i; });
    wrong(
        "rank 3 of 3", [](int) { return 3; }, [](int i) { return i == 2 ? 3 : i; });
    all_well(2, [](int rank, ncclUniqueId id) { // the third never comes
        ncclComm_t comm;
        time_limit("1");
        EXPECT_EQ(ncclCommInitRank(&comm, 3, id, rank), ncclRemoteError);
        EXPECT_NE(std::string(ncclGetLastError(nullptr)).find(RANK_2_IS_LATE), std::string::npos)
            << ncclGetLastError(nullptr);
    });
}

namespace {

/* What the ranks of a test tell each other beside NCCL. */
struct Counters {
    std::atomic<int> begun{0}, done{0};
    void wait(const std::atomic<int>& counter, int value) const {
        while (counter < value) usleep(1000);
    }
};
Counters* shared_counters() {
    void* p = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(p, MAP_FAILED);
    return new (p) Counters;
}

/* The call, or else the stream's work, fails, and NCCL says why. */
void expect_remote(ncclComm_t comm, const Array& a, const char* words, ncclResult_t called) {
    ncclResult_t r = ncclSuccess;
    EXPECT_TRUE(called == ncclRemoteError || cudaStreamSynchronize(0) != cudaSuccess) << called;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &r), ncclSuccess);
    EXPECT_EQ(r, ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find(words), std::string::npos) << ncclGetLastError(comm);
    EXPECT_EQ(ncclAllReduce(a.p, a.p, 10, ncclFloat, ncclSum, comm, 0), ncclRemoteError);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

} // namespace

/* Within a moment; the words would be others if it were the time limit that ends them. */
TEST(CpuNccl, ADeadPeerIsSeen) {
    Counters* counters = shared_counters();
    std::vector<Ended> e = fork_ranks(3, [counters](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(3, rank, id);
        Array a(ncclFloat, 1000, MINUS);
        EXPECT_EQ(ncclAllReduce(a.p, a.p, 1000, ncclFloat, ncclSum, comm, 0), ncclSuccess);
        cudaStreamSynchronize(0);
        if (rank == 1) {
            counters->wait(counters->begun, 2);
            usleep(300 * 1000);
            raise(SIGKILL);
        }
        counters->begun++;
        expect_remote(comm, a, "rank 1 is dead", ncclAllReduce(a.p, a.p, 1000, ncclFloat, ncclSum, comm, 0));
    });
    EXPECT_EQ(e[0].code, 0) << e[0].err;
    EXPECT_EQ(e[1].code, 1000 + SIGKILL);
    EXPECT_EQ(e[2].code, 0) << e[2].err;
}

TEST(CpuNccl, ADeadReceiverIsSeen) {
    std::vector<Ended> e = fork_ranks(2, [](int rank, ncclUniqueId id) {
        ncclComm_t comm = join(2, rank, id);
        Array a(ncclFloat, 1000, MINUS);
        if (rank == 1) raise(SIGKILL);
        expect_remote(comm, a, "rank 1 is dead", ncclSend(a.p, 1000, ncclFloat, 1, comm, 0));
    });
    EXPECT_EQ(e[0].code, 0) << e[0].err;
}

/* Rank 2 never calls, and lives until the others have ended: that it died is not what woke them. */
TEST(CpuNccl, TimeLimitAbortAndDestroyWakeThePeers) {
    enum { TIME_LIMIT, ABORT, DESTROY };
    const char* words[] = {RANK_2_IS_LATE, "rank 2 called ncclCommAbort", "rank 2 has destroyed"};
    for (int way : {TIME_LIMIT, ABORT, DESTROY}) {
        Counters* counters = shared_counters();
        all_well(3, [=](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(3, rank, id);
            Array a(ncclFloat, 1000, MINUS);
            if (way == TIME_LIMIT) time_limit("1");
            if (rank != 2) {
                counters->begun++;
                expect_remote(comm, a, words[way],
                              ncclAllReduce(a.p, a.p, 1000, ncclFloat, ncclSum, comm, 0));
                counters->done++;
                return;
            }
            counters->wait(counters->begun, 2);
            usleep(200 * 1000);
            if (way == ABORT) EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
            if (way == DESTROY) EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
            counters->wait(counters->done, 2);
        });
    }
}

TEST(CpuNccl, EveryCallFailsOnOrder) {
    const char* names[] = {"ncclCommInitRank", "ncclAllReduce", "ncclReduceScatter",     "ncclAllGather",
                           "ncclGroupStart",   "ncclGroupEnd",  "ncclCommGetAsyncError", "ncclMemAlloc"};
    for (const char* name : names) {
        setenv("CUDA_CPU_FAIL", (std::string(name) + ":1").c_str(), 1);
        all_well(1, [name](int rank, ncclUniqueId id) {
            ncclComm_t comm = nullptr;
            std::string failed;
            auto call = [&](const char* what, ncclResult_t r) {
                if (r != ncclSuccess) {
                    EXPECT_EQ(r, ncclSystemError);
                    EXPECT_NE(std::string(ncclGetLastError(comm)).find("CUDA_CPU_FAIL"), std::string::npos);
                    failed += what;
                }
            };
            call("ncclCommInitRank", ncclCommInitRank(&comm, 1, id, rank));
            if (comm) {
                Array a(ncclFloat, 10, MINUS);
                ncclResult_t r;
                void* p = nullptr;
                call("ncclAllReduce", ncclAllReduce(a.p, a.p, 10, ncclFloat, ncclSum, comm, 0));
                call("ncclReduceScatter", ncclReduceScatter(a.p, a.p, 10, ncclFloat, ncclSum, comm, 0));
                call("ncclAllGather", ncclAllGather(a.p, a.p, 10, ncclFloat, comm, 0));
                call("ncclGroupStart", ncclGroupStart());
                if (failed.empty()) call("ncclGroupEnd", ncclGroupEnd());
                call("ncclCommGetAsyncError", ncclCommGetAsyncError(comm, &r));
                call("ncclMemAlloc", ncclMemAlloc(&p, 100));
            }
            EXPECT_EQ(failed, name);
        });
    }
    unsetenv("CUDA_CPU_FAIL");
}

/* Work that runs only when something waits: ranks that wait for their streams in another order must neither
   hang nor mix up the calls, since one communicator's work keeps the order of its calls. */
TEST(CpuNccl, StreamsOfOneCommunicatorKeepTheOrderOfTheCalls) {
    for (const char* mode : {"eager", "lazy", "rush:1", "rush:2"}) {
        setenv("CUDA_CPU_STREAMS", mode, 1);
        all_well(2, [mode](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(2, rank, id);
            cudaStream_t s, t;
            EXPECT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
            EXPECT_EQ(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking), cudaSuccess);
            Array a(ncclFloat, 100, [&](size_t) { return rank + 1; }),
                b(ncclFloat, 200, [&](size_t) { return rank; });
            for (int k = 0; k < 3; k++) {
                EXPECT_EQ(ncclAllReduce(a.p, a.p, 100, ncclFloat, ncclSum, comm, s), ncclSuccess);
                EXPECT_EQ(ncclAllGather(b.at(100 * rank), b.p, 100, ncclFloat, comm, t), ncclSuccess);
                EXPECT_EQ(cudaMemsetAsync(a.p, 0, rank ? 0 : 4, s),
                          cudaSuccess); // in order with the next sum
            }
            EXPECT_EQ(cudaCpuWaitSites(), 0); // NCCL's own order is no wait of the application
            EXPECT_EQ(cudaStreamSynchronize(rank ? t : s), cudaSuccess) << mode;
            EXPECT_EQ(cudaStreamSynchronize(rank ? s : t), cudaSuccess) << mode;
            expect_equal(
                a.read(), [&](size_t i) { return i      ? 12
                                                 : rank ? 3
                                                        : 0; }, mode);
            expect_equal(
                b.read(), [](size_t i) { return (double)(i / 100); }, mode);
            EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
        });
    }
    unsetenv("CUDA_CPU_STREAMS");
}

TEST(CpuNccl, DISABLED_Speed) {
    for (int n : {1, 2, 3, 4})
        all_well(n, [n](int rank, ncclUniqueId id) {
            ncclComm_t comm = join(n, rank, id);
            const size_t bytes = 320160000 / (n * 4) * (n * 4);
            char* p = nullptr;
            ASSERT_EQ(cudaMalloc((void**)&p, bytes), cudaSuccess);
            cudaMemset(p, 0, bytes);
            struct {
                const char* name;
                ncclDataType_t type;
                int kind;
            } runs[] = {{"reduce-scatter float", ncclFloat, 0},  {"reduce-scatter bfloat16", ncclBfloat16, 0},
                        {"reduce-scatter half", ncclFloat16, 0}, {"all-gather", ncclFloat, 1},
                        {"all-reduce float", ncclFloat, 2},      {"all-reduce 1 float", ncclFloat, 3}};
            for (auto k : runs) {
                size_t count = bytes / size_of(k.type), part = count / n;
                char* own = p + part * size_of(k.type) * rank;
                double best = 1e9, first = 0;
                for (int i = 0; i < 6; i++) {
                    double t = now();
                    if (k.kind == 0)
                        ncclReduceScatter(p, own, part, k.type, ncclSum, comm, 0);
                    else if (k.kind == 1)
                        ncclAllGather(own, p, part, k.type, comm, 0);
                    else
                        ncclAllReduce(p, p, k.kind == 2 ? count : 1, k.type, ncclSum, comm, 0);
                    cudaStreamSynchronize(0);
                    double s = now() - t;
                    first = i ? first : s;
                    best = s < best ? s : best;
                }
                if (rank == 0)
                    printf("%d ranks, 320 MB in all: %-24s first %.4f s, best %.4f s\n", n, k.name, first,
                           best);
            }
        });
}

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
