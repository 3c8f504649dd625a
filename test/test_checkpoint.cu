/* test/test_checkpoint.cu - save and load on real ranks: mpirun -np N build/test/test_checkpoint. Every number of the state
   is a function of its array and its model index, so a shift by one element or a missing rank shows. Groups of the first n
   ranks, each with a communicator of its own, load what others have saved. */
#include <gtest/gtest.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <functional>
#include <memory>

#include <cuda_runtime.h>
#include <nccl.h>

/* Host memory that the runtime asks for inside its calls is its own affair: faults spare it. */
static int in_runtime = 0;
template <typename Call> static auto runtime(Call call) {
    in_runtime++;
    auto result = call();
    in_runtime--;
    return result;
}
#define ncclAllGather(...) runtime([&]() { return (ncclAllGather)(__VA_ARGS__); })
#define ncclAllReduce(...) runtime([&]() { return (ncclAllReduce)(__VA_ARGS__); })
#define ncclGroupStart(...) runtime([&]() { return (ncclGroupStart)(__VA_ARGS__); })
#define ncclGroupEnd(...) runtime([&]() { return (ncclGroupEnd)(__VA_ARGS__); })
#define ncclSend(...) runtime([&]() { return (ncclSend)(__VA_ARGS__); })
#define ncclRecv(...) runtime([&]() { return (ncclRecv)(__VA_ARGS__); })
#define cudaMalloc(...) runtime([&]() { return (cudaMalloc)(__VA_ARGS__); })
#define cudaFree(...) runtime([&]() { return (cudaFree)(__VA_ARGS__); })
#define cudaMemcpy(...) runtime([&]() { return (cudaMemcpy)(__VA_ARGS__); })
#define cudaMemcpyAsync(...) runtime([&]() { return (cudaMemcpyAsync)(__VA_ARGS__); })
#define cudaEventRecord(...) runtime([&]() { return (cudaEventRecord)(__VA_ARGS__); })
#define cudaEventQuery(...) runtime([&]() { return (cudaEventQuery)(__VA_ARGS__); })
#define cudaFreeHost(...) runtime([&]() { return (cudaFreeHost)(__VA_ARGS__); })
#define cudaEventDestroy(...) runtime([&]() { return (cudaEventDestroy)(__VA_ARGS__); })
#define cudaMallocHost(...) runtime([&]() { return (cudaMallocHost)(__VA_ARGS__); })
#define cudaEventCreateWithFlags(...) runtime([&]() { return (cudaEventCreateWithFlags)(__VA_ARGS__); })
#define cudaLaunchKernelEx(...) runtime([&]() { return (cudaLaunchKernelEx)(__VA_ARGS__); })
#undef cudaStreamWaitEvent
#define cudaStreamWaitEvent(...) runtime([&]() { return (cudaStreamWaitEvent)(__VA_ARGS__); })
#define cudaStreamSynchronize(...) runtime([&]() { return (cudaStreamSynchronize)(__VA_ARGS__); })

#define ZERO_FILE_PIECE_BYTES ((size_t)4096) /* so that small models have many pieces, written by all ranks */
#include "../llmc_zero/checkpoint_folder.cuh"
#include "../llmc_zero/llmc_zero.cuh"
#include "comma_locale.h"
#include "ranks.h"

static std::string folder; /* the same on all ranks, empty at the begin */

/* ------------------------------------------------------------------ calls of the system that fail when they are told to */

/* The process opens files before main and after the last destructor, too: then `call` must be readable, and names none. */
static struct {
    const char* call;
    int at, seen, error;           /* the at-th call fails with error; 0: it does half of its work */
    std::function<void()> instead; /* or this happens before it, and it works */
} fault;

static int fault_waits(const char* call) {
    return in_runtime == 0 && fault.call && strcmp(fault.call, call) == 0;
}
static int fault_strikes(const char* call) {
    if (!fault_waits(call) || ++fault.seen != fault.at) return 0;
    if (!fault.instead) return 1;
    const std::function<void()> instead = fault.instead;
    fault.call = "", instead(), fault.call = call;
    return 0;
}

/* Files of a checkpoint only: the runtime and gtest open and close others. */
static int is_regular(int fd) {
    struct stat status;
    return syscall(SYS_fstat, fd, &status) == 0 && S_ISREG(status.st_mode);
}
extern "C" int open(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = flags & O_CREAT ? va_arg(arguments, int) : 0;
    va_end(arguments);
    return fault_waits("open") && strncmp(path, folder.c_str(), folder.size()) == 0 && fault_strikes("open")
               ? (errno = fault.error, -1)
               : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
extern "C" int close(int fd) {
    const int strikes = is_regular(fd) && fault_strikes("close");
    const int result = (int)syscall(SYS_close, fd);
    return strikes ? (errno = fault.error, -1) : result;
}
extern "C" int ftruncate(int fd, off_t length) noexcept {
    return fault_strikes("ftruncate") ? (errno = fault.error, -1) : (int)syscall(SYS_ftruncate, fd, length);
}
#ifdef CUDA_CPU /* nvcc takes operator new for device code, too */
/* The at-th piece of host memory is not there. std::stable_sort takes its memory from the nothrow one. */
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    return fault_strikes("new") ? NULL : malloc(bytes ? bytes : 1);
}
__attribute__((noinline)) void* operator new(size_t bytes) {
    void* memory = operator new(bytes, std::nothrow);
    if (!memory) throw std::bad_alloc();
    return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { free(memory); }
#endif
extern "C" ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
    if (fault_strikes("pwrite")) {
        if (fault.error) return errno = fault.error, -1;
        bytes = (bytes + 1) / 2;
    }
    return syscall(SYS_pwrite64, fd, from, bytes, offset);
}
extern "C" ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
    if (fault_strikes("pread")) {
        if (fault.error) return errno = fault.error, -1;
        bytes = (bytes + 1) / 2;
    }
    return syscall(SYS_pread64, fd, to, bytes, offset);
}
extern "C" int fsync(int fd) {
    return fault_strikes("fsync") ? (errno = fault.error, -1) : (int)syscall(SYS_fsync, fd);
}
extern "C" int rename(const char* from, const char* to) noexcept {
    return fault_strikes("rename") ? (errno = fault.error, -1)
                                   : (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    return fault_strikes("fallocate") ? (errno = fault.error, -1)
                                      : (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

/* ------------------------------------------------------------------ ranks and models */

/* The first n ranks, with a communicator; made once for each n. Every rank of the world asks for it. */
static std::map<int, ncclComm_t> comms;
static ncclComm_t group(int n) {
    if (comms.count(n)) return comms[n];
    std::vector<ncclUniqueId> ids((size_t)world.ranks);
    ncclUniqueId id;
    memset(&id, 0, sizeof(id));
    if (world.rank == 0) {
        EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    EXPECT_EQ(zero_world_gather(&world, &id, sizeof(id), ids.data()).code, ZERO_OK);
    comms[n] = NULL;
    if (world.rank < n) {
        EXPECT_EQ(ncclCommInitRank(&comms[n], n, ids[0], world.rank), ncclSuccess);
    }
    return comms[n];
}

struct Shape {
    ZeroDtype dtype = ZERO_FP32;
    std::vector<size_t> counts;
    size_t bucket_bytes = 0;
    int units_apart = 0;
    std::vector<size_t> offsets = {}; /* given, or none */
};

static float pattern(int array, size_t i) {
    return (float)(i + 1000 * (size_t)array) + (array == 2 ? 0.5f : 0.0f);
}

/* On n ranks; others hold an empty object and skip. */
struct Model {
    ZeroLayout layout = {};
    ZeroOptimizer z = {};
    cudaStream_t stream = NULL;
    ZeroResult result = zero_ok();
    std::vector<std::string> names;
    bool here;

    Model(int n, const ZeroConfig& config, const Shape& shape) : here(world.rank < n) {
        ncclComm_t comm = group(n);
        if (here) result = create(n, config, shape, comm);
    }
    ZeroResult create(int n, const ZeroConfig& config, const Shape& shape, ncclComm_t comm) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig layout_config = zero_layout_config(n, shape.dtype);
        for (size_t s = 0; s < shape.counts.size(); s++) names.push_back("t" + std::to_string(s));
        for (size_t s = 0; s < shape.counts.size(); s++) {
            segments.push_back(zero_segment(names[s].c_str(), shape.counts[s], (int)(s / 2)));
            if (!shape.offsets.empty()) segments[s].flat_offset = shape.offsets[s];
        }
        layout_config.bucket_bytes = shape.bucket_bytes;
        layout_config.units_apart = shape.units_apart || config.stage >= 2;
        layout_config.offsets_given = !shape.offsets.empty();
        ZERO_TRY(zero_layout(&layout, segments.data(), (int)segments.size(), &layout_config));
        ZERO_TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        ZERO_TRY(zero_init(&z, &config, &layout, world.rank, comm, stream, NULL));
        ZERO_TRY(zero_alloc_params(&z, NULL));
        ZERO_TRY(zero_alloc_grads(&z, NULL));
        return zero_alloc_state(&z);
    }
    ~Model() {
        zero_free(&z);
        zero_layout_free(&layout);
        if (stream) cudaStreamDestroy(stream);
    }
    /* Writes value(array, model index) to weights (0), exp_avg (1), exp_avg_sq (2), as far as this rank holds them, or
       compares with what is there; params of all ranks too. */
    void each(bool write, std::function<float(int, size_t)> value) {
        ZeroArray arrays[4];
        if (!here) return;
        int count = zero_checkpoint_arrays(&z, arrays);
        if (!write && z.masters)
            arrays[count++] = {"params", "BF16", 2, (char*)z.params, !z.schedule.params_sharded, 0};
        ASSERT_EQ(zero_comm_drain(&z.comm).code, ZERO_OK);
        for (int a = 0; a < count; a++) {
            const bool whole = arrays[a].is_flat || z.config.stage == 0;
            std::vector<ZeroChunk> chunks;
            ASSERT_EQ(zero_checkpoint_chunks(&z, whole ? ZERO_ALL_RANKS : z.rank, &chunks).code, ZERO_OK);
            const int kind = strstr(arrays[a].suffix, "sq") ? 2 : strstr(arrays[a].suffix, "avg") ? 1 : 0;
            for (const ZeroChunk& chunk : chunks) {
                char* device =
                    arrays[a].device +
                    (arrays[a].is_flat ? chunk.flat_offset : chunk.state_offset) * arrays[a].element_bytes;
                std::vector<float> host(chunk.count);
                for (size_t i = 0; i < chunk.count; i++) host[i] = value(kind, chunk.model_offset + i);
                std::vector<uint16_t> half(chunk.count);
                for (size_t i = 0; i < chunk.count; i++) half[i] = bits(host[i]);
                const bool narrow = arrays[a].element_bytes == 2;
                std::vector<char> wanted((const char*)(narrow ? (void*)half.data() : (void*)host.data()),
                                         (const char*)(narrow ? (void*)half.data() : (void*)host.data()) +
                                             chunk.count * arrays[a].element_bytes);
                std::vector<char> there(wanted.size());
                ASSERT_EQ(write ? cudaMemcpy(device, wanted.data(), wanted.size(), cudaMemcpyHostToDevice)
                                : cudaMemcpy(there.data(), device, there.size(), cudaMemcpyDeviceToHost),
                          cudaSuccess);
                if (!write) {
                    ASSERT_EQ(there, wanted) << names[chunk.segment] << arrays[a].suffix << " from element "
                                             << chunk.model_offset << " on";
                }
            }
        }
        if (write) {
            ASSERT_EQ(zero_state_changed(&z).code, ZERO_OK);
        }
    }
    static uint16_t bits(float x) { /* to nearest, ties to even */
        uint32_t b;
        memcpy(&b, &x, 4);
        return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
    }
    void fill() { each(true, pattern); }
    void fill_with(float x) {
        each(true, [x](int, size_t) { return x; });
    }
    void expect_pattern() { each(false, pattern); }
    void expect(float x) {
        each(false, [x](int, size_t) { return x; });
    }
    ZeroResult save(const std::string& path, ZeroCheckpoint what = zero_checkpoint()) {
        return here ? zero_checkpoint_save(&z, path.c_str(), &what) : zero_ok();
    }
    ZeroResult load(const std::string& path, ZeroCheckpoint what = zero_checkpoint()) {
        return here ? zero_checkpoint_load(&z, path.c_str(), &what, NULL) : zero_ok();
    }
};

static void together() { ASSERT_EQ(zero_world_agree(&world, zero_ok()).code, ZERO_OK); }

static std::string contents(const std::string& path) {
    std::string text;
    FILE* file = fopen(path.c_str(), "rb");
    char buffer[65536];
    for (size_t n; file && (n = fread(buffer, 1, sizeof(buffer), file)) > 0;) text.append(buffer, n);
    if (file) fclose(file);
    return text;
}

static ZeroResult read_header(const std::string& path, ZeroFileHeader* header) {
    int fd = open(path.c_str(), O_RDONLY);
    ZeroResult result =
        fd < 0 ? zero_error(ZERO_ERROR_SYSTEM, "no such file") : zero_file_read_header(fd, header);
    if (fd >= 0) close(fd);
    return result;
}

static void put(const std::string& path, const std::string& text) {
    if (world.rank == 0) {
        FILE* file = fopen(path.c_str(), "wb");
        ASSERT_EQ(fwrite(text.data(), 1, text.size(), file), text.size());
        fclose(file);
    }
    together();
}

/* The same file with other words of the same length in its header, its checksum right. */
static std::string resealed(std::string text, const std::string& from, const std::string& to) {
    uint64_t length;
    memcpy(&length, text.data(), 8);
    EXPECT_EQ(from.size(), to.size());
    EXPECT_LT(text.find(from), length) << from;
    if (text.find(from) < length) text.replace(text.find(from), from.size(), to);
    std::string header = text.substr(0, length + 8);
    const size_t digits = zero_file_find_checksum(header);
    return text.replace(digits, 16, zero_file_hex(zero_file_checksum(header, digits)));
}

static std::string data_of(const std::string& path) {
    ZeroFileHeader header;
    EXPECT_EQ(read_header(path, &header).code, ZERO_OK);
    return contents(path).substr(header.data_offset);
}

static ZeroConfig config_of(int stage, int masters = 1) {
    ZeroConfig config = zero_config();
    config.stage = stage;
    config.masters = masters;
    return config;
}

static const std::vector<Shape> SHAPES = {{ZERO_FP32, {10}},
                                          {ZERO_FP32, {57}},
                                          {ZERO_FP32, {3}, 256},
                                          {ZERO_FP32, {3, 70, 129, 0, 5, 1000}, 1024, 1},
                                          {ZERO_BF16, {3, 70, 129, 0, 5, 1000}, 2048}};

/* ------------------------------------------------------------------ other numbers of ranks (A3, A4, A6, G1, G2, G5) */

TEST(Checkpoint, AnyNumberOfRanksLoadsTheFile) {
    std::vector<int> chain = {4, 3, 1, 8, 4};
    const std::vector<int> stages[] = {{1, 0, 3, 2, 0}, {3, 2, 1, 3, 3}};
    for (int& n : chain) n = std::min(n, world.ranks);
    for (size_t k = 0; k < SHAPES.size(); k++)
        for (int masters = 0; masters < 2 * (SHAPES[k].dtype == ZERO_BF16 ? 2 : 1); masters++) {
            std::string first;
            for (size_t hop = 0; hop < chain.size(); hop++) {
                Shape shape = SHAPES[k];
                if (hop % 2) shape.bucket_bytes = 0;
                if (hop == 2) shape.units_apart = 1;
                Model m(chain[hop], config_of(stages[masters % 2][hop], masters / 2), shape);
                OK(m.result);
                if (hop == 0) m.fill();
                if (hop > 0) m.fill_with(-7.0f);
                if (hop > 0) OK(m.load(folder + "/hop" + std::to_string(hop - 1)));
                together();
                m.expect_pattern();
                const std::string path = folder + "/hop" + std::to_string(hop);
                OK(m.save(path));
                together();
                if (hop == 0) first = data_of(path);
                ASSERT_EQ(data_of(path), first) << "shape " << k << " hop " << hop;
                together();
            }
        }
}

/* A file of 4 ranks, stage 1, loaded on n ranks in every stage with one bucket or many, and saved again: the same bytes. */
TEST(Checkpoint, AnyLayoutSavesTheSameBytes) {
    const Shape shape = {ZERO_FP32, {20000, 100, 3, 30000, 0, 7}};
    const std::string path = folder + "/from4";
    {
        Model m(std::min(4, world.ranks), config_of(1), shape);
        OK(m.result);
        m.fill();
        OK(m.save(path));
    }
    together();
    const std::string data = data_of(path);
    for (int ranks : {1, 2, 3, 8})
        for (int stage = 0; stage <= 3; stage++)
            for (size_t bucket_bytes : {(size_t)0, (size_t)50000}) {
                Shape other = shape;
                other.bucket_bytes = bucket_bytes;
                Model m(std::min(ranks, world.ranks), config_of(stage), other);
                OK(m.result);
                OK(m.load(path));
                m.expect_pattern();
                OK(m.save(folder + "/again"));
                together();
                ASSERT_EQ(data_of(folder + "/again"), data) << ranks << " ranks, stage " << stage;
                together();
            }
}

/* The file holds the model's elements, one after another, and nothing else. */
TEST(Checkpoint, TheFileHasNoPadding) {
    Model m(world.ranks, config_of(1), {ZERO_FP32, {57, 0, 1}});
    OK(m.result);
    m.fill();
    OK(m.save(folder + "/plain"));
    const std::string data = data_of(folder + "/plain");
    ASSERT_EQ(data.size(), 3 * 58 * sizeof(float));
    for (int array = 0; array < 3; array++)
        for (size_t i = 0; i < 58; i++) {
            float x;
            memcpy(&x, &data[(58 * (size_t)array + i) * 4], 4);
            ASSERT_EQ(x, pattern(array, i));
        }
    ZeroFileHeader header;
    OK(read_header(folder + "/plain", &header));
    ASSERT_EQ(header.tensors.size(), 9u);
    EXPECT_EQ(header.tensors[0].name, "t0");
    EXPECT_EQ(header.tensors[3].name, "t0.exp_avg");
    EXPECT_EQ(header.tensors[8].name, "t2.exp_avg_sq");
    EXPECT_EQ(header.strings.count("ranks"), 0u) << "the same bytes, whoever wrote them";
    EXPECT_EQ(header.strings.count("stage"), 0u);
    EXPECT_EQ(header.data_offset % 65536, 0u);
    together();
}

/* A tensor of several segments (the layers of llm.c's tensors), which lie elsewhere in the flat buffer. */
TEST(Checkpoint, LayersAreStackedInModelOrder) {
    ZeroTensor tensors[3] = {
        {"wte", 0, 1, 2, {5, 7}}, {"h.w", 1, 3, 3, {3, 4, 25}}, {"h.b", 4, 3, 2, {3, 25}}};
    ZeroCheckpoint what = zero_checkpoint();
    what.tensors = tensors, what.tensors_count = 3;
    for (int layer_major = 0; layer_major <= 1; layer_major++) {
        Shape shape = {ZERO_FP32, {35, 100, 100, 100, 25, 25, 25}};
        if (layer_major) shape.offsets = {0, 64, 256, 448, 192, 384, 576};
        Model m(world.ranks, config_of(1), shape);
        OK(m.result);
        if (layer_major) OK(m.load(folder + "/stacked", what));
        if (!layer_major) m.fill();
        m.expect_pattern();
        OK(m.save(folder + "/stacked", what));
        together();
    }
    ZeroFileHeader header;
    OK(read_header(folder + "/stacked", &header));
    EXPECT_EQ(header.tensors[1].name, "h.w");
    EXPECT_EQ(header.tensors[1].shape, (std::vector<uint64_t>{3, 4, 25}));
    together();
    Model m(world.ranks, config_of(1), {ZERO_FP32, {35, 100, 100, 100, 25, 25, 25}});
    OK(m.result);
    const ZeroTensor good = tensors[1];
    const std::vector<std::pair<ZeroTensor, std::string>> bad = {
        {{"h.w", 1, 3, 3, {3, 4, 26}}, "312 elements, its segments 300"},
        {{"h.w", 2, 3, 3, {3, 4, 25}}, "begins at segment 1"},
        {{"h.w", 1, 9, 3, {3, 4, 25}}, "segments 1 to 9 of 7"},
        {{NULL, 1, 3, 3, {3, 4, 25}}, "no name"},
        {{"wte", 1, 3, 3, {3, 4, 25}}, "twice"},
        {{"__metadata__", 1, 3, 3, {3, 4, 25}}, "twice"}};
    for (const auto& b : bad) {
        tensors[1] = b.first;
        ZeroResult result = m.save(folder + "/never", what);
        EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(std::string(result.text).find(b.second), std::string::npos) << result.text;
    }
    tensors[1] = good;
    what.tensors_count = 2;
    EXPECT_NE(std::string(m.save(folder + "/never", what).text).find("4 of 7 segments"), std::string::npos);
    EXPECT_EQ(access((folder + "/never").c_str(), F_OK), -1);
    together();
}

/* ------------------------------------------------------------------ what must agree, what may change */

TEST(Checkpoint, StepSamplesAndTComeBack) {
    ZeroString strings[2] = {{"data", "split"}, {"quote", "a \"b\" \\ \xc3\xa9 \n"}};
    ZeroCheckpoint what = zero_checkpoint();
    ZeroFileHeader header;
    ZeroReport report;
    what.step = 12, what.samples = 1ull << 40, what.strings = strings, what.strings_count = 2;
    {
        Model m(world.ranks, config_of(1), {ZERO_FP32, {100}});
        OK(m.result);
        OK(zero_set_t(&m.z, 11));
        m.fill();
        OK(m.save(folder + "/counts", what));
    }
    together();
    Model m(world.ranks, config_of(0), {ZERO_FP32, {100}});
    OK(m.result);
    what.step = what.samples = 0;
    OK(zero_checkpoint_load(&m.z, (folder + "/counts").c_str(), &what, &header));
    EXPECT_EQ(what.step, 12u);
    EXPECT_EQ(what.samples, 1ull << 40);
    EXPECT_STREQ(what.note, "");
    EXPECT_EQ(header.strings["quote"], strings[1].value);
    OK(zero_report(&m.z, &report));
    EXPECT_EQ(report.t, 11u);
    strings[1].value = "c";
    ZeroResult result = m.load(folder + "/counts", what);
    EXPECT_NE(std::string(result.text).find("this run c"), std::string::npos) << result.text;
    strings[1].key = "pieces";
    EXPECT_EQ(m.save(folder + "/counts", what).code, ZERO_ERROR_ARGUMENT);
    together();
}

/* Case N1: a host program with a decimal comma. The same bytes, read in both; and what a version before 300 wrote there. */
TEST(Checkpoint, NoLocaleIsInTheFile) {
    const std::string c = folder + "/c", comma = folder + "/comma", old = folder + "/old";
    ZeroConfig config = config_of(1);
    config.weight_decay = 0.1, config.max_norm = 0.5;
    Model m(world.ranks, config, {ZERO_FP32, {100}});
    OK(m.result);
    m.fill();
    OK(m.save(c));
    std::string text = contents(c);
    for (const char* number : {"\"0.9\"", "\"0.999\"", "\"0.1\""}) {
        std::string with_comma = number;
        with_comma[2] = ',';
        text = resealed(text, number, with_comma);
    }
    put(old, text);
    {
        CommaLocale here(folder + "/locale" + std::to_string(world.rank));
        if (!here.set) GTEST_SKIP() << here.reason;
        ASSERT_STREQ(zero_number_text(0.5, 9).text, "0.5");
        OK(m.save(comma));
        together();
        EXPECT_EQ(contents(c), contents(comma));
        for (const std::string& path : {c, old}) {
            m.fill_with(1.0f);
            OK(m.load(path));
            m.expect_pattern();
        }
    }
    for (const std::string& path : {comma, old}) {
        m.fill_with(1.0f);
        OK(m.load(path));
        m.expect_pattern();
    }
    m.z.config.beta1 = 0.8;
    const ZeroResult result = m.load(old);
    EXPECT_NE(std::string(result.text).find("beta1: the file has 0.9, this run 0.8"), std::string::npos)
        << result.text;
    together();
}

/* Case R5: 2^63 - 1 comes back, one more is refused, when it is saved and in a file whose checksum is right. */
TEST(Checkpoint, NumbersAbove63BitsAreRefused) {
    const std::string path = folder + "/most", most = "9223372036854775807", more = "9223372036854775808";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {100}});
    ZeroCheckpoint what = zero_checkpoint();
    OK(m.result);
    what.step = what.samples = INT64_MAX;
    OK(zero_set_t(&m.z, INT64_MAX));
    m.fill();
    OK(m.save(path, what));
    what.step = what.samples = 0;
    OK(zero_checkpoint_load(&m.z, path.c_str(), &what, NULL));
    EXPECT_EQ(what.step, (uint64_t)INT64_MAX);
    EXPECT_EQ(what.samples, (uint64_t)INT64_MAX);
    const std::string good = contents(path);
    together();
    for (const char* key : {"step", "samples", "t"}) {
        const std::string begin = std::string("\"") + key + "\":\"";
        put(path, resealed(good, begin + most, begin + more));
        m.fill_with(3.0f);
        const ZeroResult result = m.load(path);
        EXPECT_EQ(result.code, ZERO_ERROR_FILE) << key;
        const std::string words = std::string(key) + " is \"" + more + "\"";
        EXPECT_NE(std::string(result.text).find(words), std::string::npos) << result.text;
        m.expect(3.0f);
        together();
    }
    for (uint64_t* number : {&what.step, &what.samples}) {
        what.step = what.samples = 1;
        *number = (uint64_t)INT64_MAX + 1;
        const ZeroResult result = m.save(folder + "/never", what);
        EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(
            std::string(result.text).find(number == &what.step ? "step is " + more : "samples is " + more),
            std::string::npos)
            << result.text;
    }
    EXPECT_EQ(access((folder + "/never").c_str(), F_OK), -1);
    together();
}

/* Cases G4, E2: whatever shaped the state must be the same; the error names both, and nothing has changed. */
TEST(Checkpoint, AnotherRunsFileIsRefusedWithBothValues) {
    const Shape shape = {ZERO_FP32, {40, 7}};
    const ZeroConfig plain = config_of(1);
    {
        Model m(world.ranks, plain, shape);
        OK(m.result);
        m.fill();
        OK(m.save(folder + "/adamw"));
    }
    together();
    struct {
        std::function<void(ZeroConfig*, Shape*)> change;
        std::string words;
    } cases[] = {
        {[](ZeroConfig* c, Shape*) { c->algorithm = ZERO_ADAM; },
         "optimizer: the file has adamw, this run adam"},
        {[](ZeroConfig* c, Shape*) { c->algorithm = ZERO_SGD; },
         "optimizer: the file has adamw, this run sgd"},
        {[](ZeroConfig* c, Shape*) { c->beta1 = 0.8; }, "beta1: the file has 0.9, this run 0.8"},
        {[](ZeroConfig* c, Shape*) { c->beta2 = 0.95; }, "beta2: the file has 0.999, this run 0.95"},
        {[](ZeroConfig* c, Shape*) { c->eps = 1e-6; }, "eps: the file has 1e-08, this run 1e-06"},
        {[](ZeroConfig* c, Shape*) { c->weight_decay = 0.1; }, "weight_decay: the file has 0, this run 0.1"},
        {[](ZeroConfig* c, Shape*) { c->seed = 5; }, "seed: the file has 0, this run 5"},
        {[](ZeroConfig*, Shape* s) {
             s->counts = {40, 8};
         },
         "t1 F32 [7], this run t1 F32 [8]"},
        {[](ZeroConfig*, Shape* s) { s->counts = {40}; }, "t1 F32 [7]"},
        {[](ZeroConfig*, Shape* s) {
             s->counts = {40, 7, 1};
         },
         "t0.exp_avg F32 [40], this run t2 F32 [1]"},
        {[](ZeroConfig* c, Shape* s) { c->masters = 0, s->dtype = ZERO_BF16; },
         "type: the file has fp32, this run bf16 with stochastic rounding"}};
    for (auto& one : cases) {
        ZeroConfig config = plain;
        Shape other = shape;
        one.change(&config, &other);
        Model m(world.ranks, config, other);
        OK(m.result);
        m.fill_with(3.0f);
        ZeroResult result = m.load(folder + "/adamw");
        EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(std::string(result.text).find(one.words), std::string::npos) << result.text;
        m.expect(3.0f);
    }
    together();
}

/* fp32 and bf16 with masters hold the same numbers. */
TEST(Checkpoint, TypesMayChangeWhereNothingIsLost) {
    for (int from_half = 0; from_half <= 1; from_half++) {
        ZeroDtype dtypes[2] = {from_half ? ZERO_BF16 : ZERO_FP32, from_half ? ZERO_FP32 : ZERO_BF16};
        {
            Model m(world.ranks, config_of(1), {dtypes[0], {40, 700}});
            OK(m.result);
            m.fill();
            OK(m.save(folder + "/type"));
        }
        together();
        Model m(world.ranks, config_of(1), {dtypes[1], {40, 700}});
        ZeroCheckpoint what = zero_checkpoint();
        OK(m.result);
        OK(zero_checkpoint_load(&m.z, (folder + "/type").c_str(), &what, NULL));
        EXPECT_STREQ(what.note, from_half ? "saved in bf16 with fp32 masters, loaded into fp32"
                                          : "saved in fp32, loaded into bf16 with fp32 masters");
        m.expect_pattern();
        together();
    }
}

TEST(Checkpoint, SgdKeepsWhatItHas) {
    for (double momentum : {0.0, 0.9}) {
        ZeroConfig config = config_of(1);
        config.algorithm = ZERO_SGD;
        config.momentum = momentum;
        Model m(world.ranks, config, {ZERO_FP32, {33}});
        OK(m.result);
        m.fill();
        OK(m.save(folder + "/sgd"));
        m.fill_with(1.0f);
        OK(m.load(folder + "/sgd"));
        m.expect_pattern();
        ZeroFileHeader header;
        OK(read_header(folder + "/sgd", &header));
        EXPECT_EQ(header.tensors.size(), momentum == 0.0 ? 1u : 2u);
        m.z.config.momentum = 0.5;
        EXPECT_NE(std::string(m.load(folder + "/sgd").text).find("this run 0.5"), std::string::npos);
        together();
    }
}

/* Pieces end at 4 MB, and several of them go through the two buffers. */
TEST(Checkpoint, LargeArraysGoInPieces) {
    Model m(world.ranks, config_of(1), {ZERO_FP32, {3000001, 5}});
    OK(m.result);
    m.fill();
    OK(m.save(folder + "/large"));
    m.fill_with(0.0f);
    OK(m.load(folder + "/large"));
    m.expect_pattern();
    ZeroFileHeader header;
    OK(read_header(folder + "/large", &header));
    EXPECT_GE(header.pieces.size(), 9u);
    for (const ZeroFilePiece& piece : header.pieces) ASSERT_LE(piece.bytes, 4u << 20);
    together();
    if (world.rank == 0) unlink((folder + "/large").c_str());
}

TEST(Checkpoint, CallsInTheWrongPlaceAreRefused) {
    Model m(world.ranks, config_of(1), {ZERO_FP32, {33}});
    OK(m.result);
    EXPECT_EQ(m.load(folder + "/nowhere").code, ZERO_ERROR_SYSTEM);
    EXPECT_NE(std::string(m.load(folder + "/nowhere").text).find("No such file"), std::string::npos);
    EXPECT_NE(std::string(m.save(folder + "/nowhere/x").text).find("No such file"), std::string::npos);
    EXPECT_EQ(m.load(folder).code, ZERO_ERROR_FILE);
    OK(zero_begin(&m.z, 0, 1, 1.0));
    EXPECT_EQ(m.save(folder + "/x").code, ZERO_ERROR_ORDER);
    EXPECT_EQ(m.load(folder + "/x").code, ZERO_ERROR_ORDER);
    together();
}

/* Between norm and update, too; and the sums from which zero_set_step decides again are still there. */
TEST(Checkpoint, ARefusedCallLeavesTheStepAsItIs) {
    for (int refused = 0; refused < 4; refused++) {
        ZeroConfig config = zero_config();
        void* grads;
        int add;
        float norm;
        std::vector<std::string> passed_over;
        ZeroCheckpoint what = zero_checkpoint();
        int found;
        config.max_norm = 1.0;
        Model m(world.ranks, config, {ZERO_FP32, {33}});
        const std::vector<float> ones(33, 1.0f);
        std::vector<uint64_t> sums(ZERO_SUM_WORDS), sums_after(sums);
        OK(m.result);
        OK(zero_begin(&m.z, 0, 1, 1.0));
        OK(zero_grads_acquire(&m.z, 0, &grads, &add));
        ASSERT_EQ(cudaMemcpy(grads, ones.data(), 33 * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        OK(zero_grads_ready(&m.z, 0));
        OK(zero_grad_norm(&m.z, &norm));
        ASSERT_EQ(cudaMemcpy(sums.data(), m.z.step_sums, sums.size() * 8, cudaMemcpyDeviceToHost),
                  cudaSuccess);
        const ZeroResult result =
            refused == 0   ? m.save(folder + "/x")
            : refused == 1 ? m.load(folder + "/x")
            : refused == 2 ? zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found)
                           : zero_check_replicas(&m.z, NULL);
        EXPECT_EQ(result.code, ZERO_ERROR_ORDER) << result.text;
        OK(zero_comm_drain(&m.z.comm));
        ASSERT_EQ(cudaMemcpy(sums_after.data(), m.z.step_sums, sums.size() * 8, cudaMemcpyDeviceToHost),
                  cudaSuccess);
        EXPECT_EQ(sums, sums_after) << refused;
        OK(zero_update(&m.z, 1.0));
    }
    together();
}

/* ------------------------------------------------------------------ damage and faults */

/* Case G7: a byte flipped in whatever rank's part, one byte less or more: all ranks refuse, nothing is loaded. */
TEST(Checkpoint, ADamagedFileIsRefusedByAllRanks) {
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    const std::string path = folder + "/damaged";
    OK(m.result);
    m.fill();
    OK(m.save(path));
    const std::string good = contents(path);
    together();
    m.fill_with(3.0f);
    for (size_t k = 0; k < 40; k++) {
        std::string bad = good;
        const size_t at = k < 30 ? good.size() - 1 - k * (good.size() - 4097) / 30 : k * 13;
        bad[at] = (char)(bad[at] ^ (1 << k % 8));
        if (k == 38) bad = good.substr(0, good.size() - 1);
        if (k == 39) bad = good + "x";
        put(path, bad);
        ZeroResult result = m.load(path);
        EXPECT_EQ(result.code, ZERO_ERROR_FILE) << "byte " << at << ": " << result.text;
        together();
    }
    m.expect(3.0f);
    put(path, good);
    OK(m.load(path));
    m.expect_pattern();
    together();
}

static size_t open_files() {
    size_t count = 0;
    DIR* directory = opendir("/proc/self/fd");
    while (readdir(directory)) count++;
    closedir(directory);
    return count;
}
static std::string name_of(uint64_t step) {
    char path[4096];
    zero_checkpoint_path(path, sizeof(path), folder.c_str(), step);
    return path;
}
static std::vector<uint64_t> steps_there() {
    std::vector<uint64_t> steps;
    std::vector<std::string> temporary;
    EXPECT_EQ(zero_checkpoint_steps(folder.c_str(), &steps, &temporary).code, ZERO_OK);
    return steps;
}
static void clear_folder() {
    together();
    if (world.rank == 0)
        for (uint64_t step : steps_there()) unlink(name_of(step).c_str());
    together();
}

/* Case F6 and its like: each call of the system fails once, on one rank only. All ranks have the same error, the older
   file of that name is whole, and nothing temporary is left. */
TEST(Checkpoint, EveryCallOfTheSystemMayFail) {
    const std::string path = folder + "/faults";
    const struct {
        const char* call;
        int error;
        bool loads, harmless;
    } faults[] = {{"pwrite", ENOSPC, 0, 0},   {"pwrite", EIO, 0, 0},
                  {"pwrite", EINTR, 0, 1},    {"pwrite", 0, 0, 1},
                  {"fsync", EIO, 0, 0},       {"fsync", EINTR, 0, 1},
                  {"rename", EACCES, 0, 0},   {"open", EMFILE, 0, 0},
                  {"open", EINTR, 0, 1},      {"close", EIO, 0, 0},
                  {"close", EINTR, 0, 1},     {"fallocate", ENOSPC, 0, 0},
                  {"fallocate", EINTR, 0, 1}, {"fallocate", EOPNOTSUPP, 0, 1},
                  {"new", ENOMEM, 0, 0},      {"new", ENOMEM, 1, 0},
                  {"open", EMFILE, 1, 0},     {"open", EINTR, 1, 1},
                  {"pread", EIO, 0, 0},       {"pread", EIO, 1, 0},
                  {"pread", 0, 1, 1}};
    ZeroConfig config = config_of(1);
    config.timeout_s = 300.0;                             /* whoever is left alone in an exchange says so */
    Model m(world.ranks, config, {ZERO_FP32, {3000, 7}}); /* every rank writes some pieces */
    OK(m.result);
    m.fill();
    OK(m.save(path));
    const std::string good = data_of(path);
    for (int victim : {0, world.ranks - 1})
        for (const auto& one : faults)
            for (int n = 1; n < 500; n++) {
                const std::string text = std::string(one.call) + " " + std::to_string(n) + " " +
                                         std::to_string(one.error) + (one.loads ? " load: " : " save: ");
                const size_t files = open_files();
                std::vector<std::string> passed_over;
                ZeroCheckpoint what = zero_checkpoint();
                together();
                if (!one.loads) m.fill_with(2.0f);
                fault = {world.rank == victim ? one.call : "", n, 0, one.error, {}};
                ZeroResult result =
                    one.loads ? m.load(path) : zero_checkpoint_save(&m.z, path.c_str(), &what);
                fault.call = "";
                int struck[64] = {0}, mine = fault.seen >= n;
                ASSERT_EQ(zero_world_gather(&world, &mine, sizeof(mine), struck).code, ZERO_OK);
                /* rank 0's first open looks for what a broken run left; of the closes only that of the descriptor
                   that wrote the pieces matters: rank 0's first, the others' second, after the mark was read */
                const bool rank_0_opens = !strcmp(one.call, "open") && victim == 0 && n == 1;
                const bool closes = !strcmp(one.call, "close") && n != (victim == 0 ? 1 : 2);
                const bool harmless = one.harmless || (!one.loads && (rank_0_opens || closes));
                if (strcmp(one.call, "new") != 0 || result.code != ZERO_OK) { /* some sort without a buffer */
                    ASSERT_EQ(result.code != ZERO_OK, struck[victim] && !harmless) << text << result.text;
                }
                ASSERT_EQ(zero_world_agree(&world, result).code, result.code) << text << result.text;
                ASSERT_EQ(access((path + ".tmp").c_str(), F_OK), -1) << text;
                ASSERT_EQ(open_files(), files) << text;
                if (!one.loads && result.code != ZERO_OK) {
                    ASSERT_EQ(data_of(path) == good, !strstr(result.text, "has its name")) << result.text;
                }
                together();
                if (!one.loads && data_of(path) != good) {
                    together();
                    m.fill();
                    OK(m.save(path));
                }
                if (!struck[victim]) break;
                ASSERT_LT(n, 499);
            }
}

/* What was written is read by another rank before it gets its name: a byte that the disk, or a client of a network's file
   system, has lost since leaves the older file as it is. */
TEST(Checkpoint, WhatWasWrittenIsReadBack) {
    const std::string path = folder + "/back", temporary = path + ".tmp";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {3000, 7}});
    ZeroCheckpoint what = zero_checkpoint();
    OK(m.result);
    m.fill();
    OK(m.save(path));
    const std::string good = contents(path);
    m.fill_with(2.0f);
    for (size_t at : {(size_t)100, good.size() - 1, good.size() - 30000})
        for (int read_back = 1; read_back >= 0; read_back--) {
            /* rank 0 syncs its mark, its pieces, the header, then the folder */
            fault = {world.rank == 0 ? "fsync" : "", 4 - read_back, 0, 0, [&]() {
                         const int fd = (int)syscall(SYS_openat, AT_FDCWD,
                                                     (read_back ? temporary : path).c_str(), O_WRONLY);
                         EXPECT_EQ(syscall(SYS_pwrite64, fd, "#", 1, at), 1);
                         syscall(SYS_close, fd);
                     }};
            what.read_back = read_back;
            ZeroResult result = zero_checkpoint_save(&m.z, path.c_str(), &what);
            fault.call = "";
            together();
            if (read_back) {
                EXPECT_EQ(result.code, ZERO_ERROR_FILE) << at;
                EXPECT_NE(std::string(result.text).find("read back: "), std::string::npos) << result.text;
                EXPECT_EQ(contents(path), good);
            } else {
                OK(result);
                EXPECT_EQ(m.load(path).code, ZERO_ERROR_FILE) << "found when it is loaded";
            }
            together();
            put(path, good);
        }
}

/* Known before step 1: whatever a save needs. Nothing is left behind. */
TEST(Checkpoint, ACheckFindsWhatASaveWouldLack) {
    ZeroConfig config = config_of(1);
    Model m(world.ranks, config, {ZERO_FP32, {3000, 7}});
    ZeroCheckpoint what = zero_checkpoint();
    const ZeroTensor twice[2] = {{"w", 0, 1, 1, {3000}}, {"w", 1, 1, 1, {7}}};
    const std::string path = folder + "/check";
    OK(m.result);
    m.fill();
    auto refused = [&](const std::string& where, const char* words) {
        together();
        ZeroResult result = zero_checkpoint_check(&m.z, where.c_str(), &what);
        EXPECT_NE(result.code, ZERO_OK) << words;
        EXPECT_NE(std::string(result.text).find(words), std::string::npos) << result.text;
        fault.call = "";
        together();
        EXPECT_EQ(access((path + ".tmp").c_str(), F_OK), -1);
    };
    OK(zero_checkpoint_check(&m.z, path.c_str(), &what));
    together();
    EXPECT_EQ(access((path + ".tmp").c_str(), F_OK), -1);
    EXPECT_EQ(access(path.c_str(), F_OK), -1);
    m.expect_pattern();
    refused(folder + "/none/check", "No such file or directory");
    const int last = world.rank == world.ranks - 1;
    fault = {world.rank == 0 ? "fallocate" : "", 1, 0, ENOSPC, {}};
    refused(path, "no room");
    fault = {last ? "pwrite" : "", world.ranks == 1 ? 2 : 1, 0, EIO, {}};
    refused(path, "writing 8 bytes");
    fault = {last ? "fsync" : "", world.ranks == 1 ? 2 : 1, 0, EDQUOT, {}};
    refused(path, "fsync");
    what.tensors = twice, what.tensors_count = 2;
    refused(path, "the name w twice");
    what = zero_checkpoint();
    if (world.ranks == 1) return;
    refused(last ? folder + "/else/check" : path, "all ranks must see one folder");
    what.step = (uint64_t)last;
    refused(path, "would write another header");
}

/* Nothing that a resume does on one rank alone may leave the others waiting. */
TEST(Folder, AResumeThatGetsNoMemoryFailsOnAllRanks) {
    ZeroConfig config = config_of(1);
    config.timeout_s = 300.0;
    Model m(world.ranks, config, {ZERO_FP32, {300, 7}});
    ZeroCheckpoint what = zero_checkpoint();
    OK(m.result);
    clear_folder();
    for (what.step = 5; what.step <= 10; what.step += 5) OK(m.save(name_of(what.step), what));
    put(name_of(15), "short");
    for (int victim : {0, world.ranks - 1})
        for (int n = 1; n < 500; n++) {
            std::vector<std::string> passed_over;
            int found, struck[64] = {0};
            put(name_of(15), "short");
            fault = {world.rank == victim ? "new" : "", n, 0, ENOMEM, {}};
            ZeroResult result =
                zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found);
            fault.call = "";
            int mine = fault.seen >= n;
            ASSERT_EQ(zero_world_gather(&world, &mine, sizeof(mine), struck).code, ZERO_OK);
            ASSERT_EQ(zero_world_agree(&world, result).code, result.code) << n << ": " << result.text;
            if (!struck[victim]) break;
            ASSERT_LT(n, 499);
        }
    together();
    if (world.rank == 0) unlink((name_of(15) + ".damaged").c_str());
    clear_folder();
}

/* ------------------------------------------------------------------ other runs, other folders, other writers */

/* Ranks that were given another step would write into each other's checksums. */
TEST(Checkpoint, RanksThatWouldWriteAnotherHeaderAreFound) {
    if (world.ranks == 1) return;
    ZeroCheckpoint what = zero_checkpoint();
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    what.step = world.rank == world.ranks - 1 ? 2 : 1;
    ZeroResult result = m.save(folder + "/differ", what);
    EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
    EXPECT_NE(std::string(result.text).find("would write another header"), std::string::npos) << result.text;
    EXPECT_EQ(access((folder + "/differ").c_str(), F_OK), -1);
    together();
}

/* A rank that sees another folder, where a file of that name was left: it must not write its part there. */
TEST(Checkpoint, ARankThatSeesAnotherFolderIsFound) {
    if (world.ranks == 1) return;
    const std::string here = folder + "/here", there = folder + "/there";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    m.fill();
    for (const char* left : {"", "x"}) {
        put(there + ".tmp", *left ? std::string(100000, *left) : "");
        ZeroResult result = m.save(world.rank == world.ranks - 1 ? there : here);
        EXPECT_EQ(result.code, ZERO_ERROR_SYSTEM);
        EXPECT_NE(std::string(result.text).find("all ranks must see one folder"), std::string::npos)
            << result.text;
        EXPECT_EQ(access(here.c_str(), F_OK), -1);
        EXPECT_EQ(access(there.c_str(), F_OK), -1);
        together();
    }
    if (world.rank == 0) unlink((there + ".tmp").c_str());
    together();
}

/* Another run that saves to the same name: it is refused while the first works, and never gets its half-written file the
   good name. */
TEST(Checkpoint, TwoRunsDoNotSaveToOneName) {
    const std::string path = folder + "/both", temporary = path + ".tmp";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    m.fill();
    OK(m.save(path));
    const std::string good = data_of(path);
    put(temporary, "half");
    int fd = world.rank == 0 ? open(temporary.c_str(), O_RDWR) : -1;
    if (fd >= 0) {
        EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
        EXPECT_EQ(zero_checkpoint_rotate(folder.c_str(), 1, 100).code, ZERO_OK);
    }
    m.fill_with(2.0f);
    together();
    ZeroResult result = m.save(path);
    EXPECT_NE(std::string(result.text).find("another run is writing both.tmp"), std::string::npos)
        << result.text;
    EXPECT_EQ(contents(temporary), "half");
    EXPECT_EQ(data_of(path), good);
    together();
    if (fd >= 0) close(fd);
    for (int n = 1; n < 100;
         n++) { /* before the n-th write of rank 0 the other run takes the name, without asking */
        int struck[64] = {0};
        fault = {world.rank == 0 ? "pwrite" : "", n, 0, 0, [&]() {
                     unlink(temporary.c_str());
                     fclose(fopen(temporary.c_str(), "w"));
                 }};
        result = m.save(path);
        fault.call = "";
        int mine = fault.seen >= n;
        ASSERT_EQ(zero_world_gather(&world, &mine, sizeof(mine), struck).code, ZERO_OK);
        if (!struck[0]) break;
        ASSERT_NE(result.code, ZERO_OK) << n;
        ASSERT_EQ(contents(temporary), "");
        ASSERT_EQ(data_of(path), good);
        together();
    }
    OK(result);
    together();
}

/* The file is written to while it is loaded: never half of each, called good. */
TEST(Checkpoint, AFileThatChangesWhileItIsReadIsRefused) {
    const std::string path = folder + "/changing";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    m.fill();
    OK(m.save(path));
    const std::string good = contents(path);
    for (int n = 1; n < 100; n++) {
        int struck[64] = {0};
        put(path, good);
        usleep(20000);
        together();
        fault = {world.rank == 0 ? "pread" : "", n, 0, 0, [&]() {
                     FILE* file = fopen(path.c_str(), "r+b");
                     fseek(file, -2, SEEK_END);
                     fputc('x', file);
                     fclose(file);
                 }};
        ZeroResult result = m.load(path);
        fault.call = "";
        int mine = fault.seen >= n;
        ASSERT_EQ(zero_world_gather(&world, &mine, sizeof(mine), struck).code, ZERO_OK);
        ASSERT_EQ(result.code, struck[0] ? ZERO_ERROR_FILE : ZERO_OK) << n << ": " << result.text;
        together();
        if (!struck[0]) break;
    }
}

/* A pipe of that name would let open() wait for ever. */
TEST(Checkpoint, APipeIsRefused) {
    const std::string path = folder + "/pipe";
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    if (world.rank == 0) {
        EXPECT_EQ(mkfifo(path.c_str(), 0666) | mkfifo((path + "2.tmp").c_str(), 0666), 0);
    }
    together();
    EXPECT_NE(std::string(m.load(path).text).find("no regular file"), std::string::npos);
    OK(m.save(path + "2"));
    OK(m.load(path + "2"));
    together();
}

/* ------------------------------------------------------------------ what goes into a file */

/* Numbers that are no numbers keep their bits. */
TEST(Checkpoint, NanAndInfinityComeBackToTheBit) {
    const auto odd = [](int array, size_t i) {
        const uint32_t bits[] = {0x7fc00000, 0x7f800001, 0xffffffff, 0x7f800000, 0xff800000, 0x80000000, 1};
        float x;
        memcpy(&x, &bits[(i + (size_t)array) % 7], 4);
        return x;
    };
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    m.each(true, odd);
    OK(m.save(folder + "/nan"));
    m.fill_with(1.0f);
    OK(m.load(folder + "/nan"));
    m.each(false, odd);
    together();
}

/* Skipped and dropped steps are counted on: a resumed run reports, and gives up, as one that was not stopped. */
TEST(Checkpoint, CountsOfSkippedStepsComeBack) {
    ZeroScalars scalars;
    ZeroReport report;
    ZeroConfig config = config_of(1);
    config.skip_limit = 3;
    const float nan = NAN;
    for (int stage = 0; stage <= 1; stage++) {
        Model m(world.ranks, config, {ZERO_FP32, {300, 7}});
        Model other(world.ranks, config, {ZERO_FP32, {300, 7}});
        OK(m.result);
        OK(cudaMemcpy(&scalars, m.z.scalars, sizeof(scalars), cudaMemcpyDeviceToHost) == cudaSuccess
               ? zero_set_t(&m.z, 7)
               : zero_error(ZERO_ERROR_CUDA, "no copy"));
        OK(zero_comm_drain(&m.z.comm));
        scalars.t = 7, scalars.skipped = 5, scalars.skipped_in_row = 1, scalars.dropped = 4;
        ASSERT_EQ(cudaMemcpy(m.z.scalars, &scalars, sizeof(scalars), cudaMemcpyHostToDevice), cudaSuccess);
        OK(m.save(folder + "/skips"));
        OK(other.load(folder + "/skips"));
        for (int step = 0; step <= 2; step++) { /* a step whose gradient is not finite, and another */
            ZeroResult result = zero_report(&other.z, &report);
            EXPECT_EQ(result.code, step < 2 ? ZERO_OK : ZERO_ERROR_SKIPS) << result.text;
            EXPECT_EQ(report.t, 7u);
            EXPECT_EQ(report.skipped, 5u + (unsigned)step);
            EXPECT_EQ(report.skipped_in_row, 1u + (unsigned)step);
            EXPECT_EQ(report.dropped, 4u);
            if (step == 2) break;
            OK(zero_begin(&other.z, 0, 1, 1.0));
            void* grads;
            int add;
            OK(zero_grads_acquire(&other.z, 0, &grads, &add));
            ASSERT_EQ(cudaMemcpy(grads, &nan, sizeof(nan), cudaMemcpyHostToDevice), cudaSuccess);
            OK(zero_grads_ready(&other.z, 0));
            OK(zero_update(&other.z, 0.1));
        }
        together();
    }
}

/* Names of the library's own strings cannot be taken: the caller's value would be lost. */
TEST(Checkpoint, StringsOfTheCaller) {
    ZeroCheckpoint what = zero_checkpoint();
    ZeroFileHeader header;
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    ZeroString strings[2] = {{"run", "1"}, {NULL, NULL}};
    what.strings = strings, what.strings_count = 2;
    for (const char* key : {"step",        "samples",        "t",        "seed",
                            "optimizer",   "beta1",          "momentum", "type",
                            "ranks",       "stage",          "max_norm", "skipped",
                            "dropped",     "skipped_in_row", "format",   "pieces",
                            "header_xxh3", "weight_decay",   "beta2",    "eps",
                            "run",         (const char*)NULL}) {
        strings[1] = {key, "x"};
        ZeroResult result = m.save(folder + "/strings", what);
        EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT) << key;
        EXPECT_NE(std::string(result.text).find("string 1"), std::string::npos) << result.text;
    }
    strings[1] = {"x", NULL};
    EXPECT_NE(std::string(m.save(folder + "/strings", what).text).find("has no value"), std::string::npos);
    strings[1] = {"x", "\xff\xfe"}; /* no UTF-8: a file that nobody could read again */
    EXPECT_NE(std::string(m.save(folder + "/strings", what).text).find("no JSON"), std::string::npos);
    EXPECT_EQ(access((folder + "/strings").c_str(), F_OK), -1);
    strings[0] = {"a\"pieces", "0 1 2"};
    strings[1] = {"a\"header_xxh3", ",\"header_xxh3\":\"\x01\t\n\\"};
    OK(m.save(folder + "/strings", what));
    together();
    OK(zero_checkpoint_load(&m.z, (folder + "/strings").c_str(), &what, &header));
    EXPECT_EQ(header.strings[strings[1].key], strings[1].value);
    together();
}

/* 10,000 tensors, a bucket each, with names that JSON has to escape, of no dimension, of no element. ZERO_TEST_KEEP=FILE
   saves them there, for Python to read. */
TEST(Checkpoint, ManySmallTensorsWithOddNames) {
    const char* keep = getenv("ZERO_TEST_KEEP");
    const std::string path = keep ? keep : folder + "/many";
    const int count = 10000;
    Shape shape = {ZERO_FP32, {}, 256};
    std::vector<std::string> names;
    std::vector<ZeroTensor> tensors;
    for (int i = 0; i < count; i++) {
        shape.counts.push_back(i % 5 == 0 ? 1 : (size_t)(i % 5 - 1) * 3);
        names.push_back("\"layer\" " + std::to_string(i) + " \\ \xc3\xa9\n\x01 header_xxh3\":\"");
    }
    for (int i = 0; i < count; i++) {
        ZeroTensor tensor = {
            names[(size_t)i].c_str(), i, 1, i % 5 == 0 ? 0 : 2, {3, shape.counts[(size_t)i] / 3}};
        tensors.push_back(tensor);
    }
    ZeroCheckpoint what = zero_checkpoint();
    what.tensors = tensors.data(), what.tensors_count = count;
    for (int stage = 1; stage >= 0; stage--) {
        Model m(world.ranks, config_of(stage), shape);
        OK(m.result);
        if (stage == 1) m.fill();
        if (stage == 1) OK(m.save(path, what));
        if (stage == 0) OK(m.load(path, what));
        m.expect_pattern();
        together();
    }
}

#ifdef CUDA_CPU
static size_t temporary_files() {
    std::vector<uint64_t> steps;
    std::vector<std::string> temporary;
    EXPECT_EQ(zero_checkpoint_steps(folder.c_str(), &steps, &temporary).code, ZERO_OK);
    return temporary.size();
}

/* Every call of CUDA and NCCL fails once: an error, no leak, no temporary file, and no state that was half loaded and
   called good. All ranks fail alike. */
TEST(Checkpoint, EveryCallOfCudaMayFail) {
    const char* calls[] = {
        "cudaMallocHost",        "cudaMemcpy",     "cudaMemcpyAsync",     "cudaEventCreateWithFlags",
        "cudaEventRecord",       "cudaEventQuery", "cudaStreamWaitEvent", "cudaLaunchKernelEx",
        "cudaStreamSynchronize", "ncclAllGather",  "cudaMalloc",          "ncclAllReduce",
        "ncclGroupEnd"};
    const std::string path = folder + "/step_00000001.safetensors";
    /* as many copies and launches on each of 1 to 4 ranks: a piece is a slice */
    const Shape shape = {ZERO_BF16, {12288, 12288}, 2048 * (size_t)world.ranks};
    {
        Model m(world.ranks, config_of(1), shape);
        OK(m.result);
        OK(m.save(path));
    }
    for (const char* call : calls)
        for (int loading = 0; loading <= 1; loading++)
            for (int n = 1; n < 400; n++) {
                char setting[64];
                const size_t live = cudaCpuLiveBytes();
                ZeroResult result;
                together();
                snprintf(setting, sizeof(setting), "%s:%d", call, n);
                setenv("CUDA_CPU_FAIL", setting, 1);
                cudaDeviceReset();
                {
                    Model m(world.ranks, config_of(1), shape);
                    result = m.result;
                    if (result.code == ZERO_OK) result = loading ? m.load(path) : m.save(path);
                }
                unsetenv("CUDA_CPU_FAIL");
                cudaDeviceReset();
                together(); /* rank 0 has deleted what it made */
                ASSERT_EQ(cudaCpuLiveBytes(), live) << setting;
                ASSERT_EQ(temporary_files(), 0u) << setting;
                if (result.code == ZERO_OK) break;
                ASSERT_GT(strlen(result.text), 10u) << setting;
                ASSERT_LT(n, 399);
            }
}
#endif

/* ------------------------------------------------------------------ a folder */

TEST(Folder, NamesAreReadAsTheyAreWritten) {
    uint64_t step = 0;
    char path[128];
    OK(zero_checkpoint_path(path, sizeof(path), "d", 123456789012ull));
    EXPECT_STREQ(path, "d/step_123456789012.safetensors");
    EXPECT_EQ(zero_checkpoint_name("step_00000010.safetensors", &step), 1);
    EXPECT_EQ(step, 10u);
    EXPECT_EQ(zero_checkpoint_name("step_00000010.safetensors.tmp", &step), 2);
    for (const char* name :
         {"step_10.safetensors", "step_00000010.safetensor", "step_00000010.safetensors.bak", "step_",
          "xstep_00000010.safetensors", "step_-0000010.safetensors", "step_0000001a.safetensors",
          "step_99999999999999999999.safetensors", "main.log"})
        EXPECT_EQ(zero_checkpoint_name(name, &step), 0) << name;
    EXPECT_EQ(zero_checkpoint_path(path, sizeof(path), std::string(200, 'x').c_str(), 1).code,
              ZERO_ERROR_ARGUMENT);
}

TEST(Folder, RotationKeepsTheNewest) {
    clear_folder();
    if (world.rank == 0) {
        const auto touch = [](const std::string& path) { fclose(fopen(path.c_str(), "w")); };
        for (uint64_t step : {5, 10, 15, 20, 40}) touch(name_of(step));
        touch(name_of(30) + ".tmp");
        OK(zero_checkpoint_rotate(folder.c_str(), 0, 20));
        EXPECT_EQ(steps_there(), (std::vector<uint64_t>{5, 10, 15, 20, 40}));
        EXPECT_EQ(access((name_of(30) + ".tmp").c_str(), F_OK), -1);
        OK(zero_checkpoint_rotate(folder.c_str(), 2, 20));
        EXPECT_EQ(steps_there(), (std::vector<uint64_t>{15, 20, 40}));
        OK(zero_checkpoint_rotate(folder.c_str(), 1, 20));
        EXPECT_EQ(steps_there(), (std::vector<uint64_t>{20, 40}));
        EXPECT_TRUE(zero_checkpoint_rotate((folder + "/none").c_str(), 1, 20).code == ZERO_OK);
    }
    clear_folder();
}

/* The same file of a later version, its checksum right. */
static std::string other_format(const std::string& text) {
    return resealed(text, "llmc_zero.checkpoint 1", "llmc_zero.checkpoint 2");
}

/* Cases F1, F2: the newest whole file; what is passed over is said; a directory of that name is no file. */
TEST(Folder, ResumeTakesTheNewestThatIsWhole) {
    std::vector<std::string> passed_over;
    ZeroCheckpoint what = zero_checkpoint();
    int found = 1;
    clear_folder();
    Model m(world.ranks, config_of(1), {ZERO_FP32, {300, 7}});
    OK(m.result);
    OK(zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found));
    EXPECT_EQ(found, 0);
    m.fill();
    for (what.step = 5; what.step <= 15; what.step += 5) OK(m.save(name_of(what.step), what));
    put(name_of(15), contents(name_of(15)).substr(0, 5000));
    put(name_of(99) + ".tmp", "left over");
    if (world.rank == 0) mkdir(name_of(20).c_str(), 0777);
    together();
    m.fill_with(1.0f);
    OK(zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found));
    EXPECT_EQ(found, 1);
    EXPECT_EQ(what.step, 10u);
    m.expect_pattern();
    ASSERT_EQ(passed_over.size(), 2u);
    EXPECT_NE(passed_over[0].find("step_00000020.safetensors: it is no regular file"), std::string::npos)
        << passed_over[0];
    EXPECT_NE(passed_over[1].find("step_00000015.safetensors: "), std::string::npos) << passed_over[1];
    together();
    EXPECT_EQ(steps_there(),
              (std::vector<uint64_t>{5, 10, 20})); /* the damaged one is out of the way, not lost */
    EXPECT_EQ(contents(name_of(15) + ".damaged").size(), 5000u);
    together();
    what.step = 20;
    EXPECT_NE(std::string(m.save(name_of(20), what).text).find("directory"), std::string::npos);
    together();
    if (world.rank == 0) rmdir(name_of(20).c_str());
    if (world.rank == 0) unlink((name_of(15) + ".damaged").c_str());
    put(name_of(15), "");
    put(name_of(30), contents(name_of(10))); /* whole, but another step's */
    passed_over.clear();
    m.fill_with(1.0f);
    ZeroResult result = zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found);
    EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
    EXPECT_STREQ(result.text, "step_00000030.safetensors holds step 10: give it its own name, or delete it");
    m.expect(1.0f);
    put(name_of(30), other_format(contents(name_of(10)))); /* whole, but another version's */
    result = zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found);
    EXPECT_EQ(result.code, ZERO_ERROR_ARGUMENT);
    EXPECT_NE(std::string(result.text).find("\"llmc_zero.checkpoint 2\""), std::string::npos) << result.text;
    m.expect(1.0f);
    together();
    if (world.rank == 0) unlink(name_of(30).c_str());
    for (int step : {5, 10}) put(name_of((uint64_t)step), "");
    passed_over.clear();
    result = zero_checkpoint_resume(&m.z, folder.c_str(), &what, NULL, &passed_over, &found);
    EXPECT_EQ(result.code, ZERO_ERROR_FILE);
    EXPECT_NE(std::string(result.text).find("none of 3 checkpoints"), std::string::npos) << result.text;
    together();
    if (world.rank == 0) unlink((name_of(99) + ".tmp").c_str());
    clear_folder();
}

int main(int argc, char** argv) {
    if (start_ranks(argc, argv) != 0) return 1;
    /* memory where there is some: hundreds of files are synced here */
    const char* parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    char name[64], names[64 * 64];
    snprintf(name, sizeof(name), "%s/zero_checkpoint.XXXXXX", parent);
    if (world.rank == 0 && !mkdtemp(name)) return 1;
    if (zero_world_gather(&world, name, sizeof(name), names).code != ZERO_OK) return 1;
    folder = names;
    int failed = RUN_ALL_TESTS();
    zero_world_agree(&world, zero_ok());
    for (auto& comm : comms)
        if (comm.second) failed |= ncclCommDestroy(comm.second) != ncclSuccess;
    if (world.rank == 0) {
        const std::string command = "rm -rf '" + folder + "'";
        failed |= system(command.c_str());
    }
    zero_world_finish(&world);
    return failed;
}
