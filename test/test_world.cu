/* test/test_world.cu - llmc_zero/world.cuh without other processes: what can be asked of one process, or of
   threads that play ranks in a folder. test_world.py starts real ranks. */
#include <gtest/gtest.h>
#include <atomic>
#include <string>
#include <thread>
#include <vector>
#include "../llmc_zero/world.cuh"

static std::string make_folder() {
    char name[] = "/tmp/test_world.XXXXXX";
    return mkdtemp(name);
}

/* Files of a folder; removes it if it is empty. */
static std::vector<std::string> files_in(const std::string& folder) {
    std::vector<std::string> names;
    DIR* list = opendir(folder.c_str());
    while (struct dirent* entry = readdir(list))
        if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    closedir(list);
    return names;
}

static ZeroWorldConfig fs(const char* folder, int ranks, int rank, double timeout_s = 600) {
    ZeroWorldConfig config = {};
    config.method = "fs", config.fs_path = folder;
    config.ranks = ranks, config.rank = rank, config.timeout_s = timeout_s;
    return config;
}

static ZeroResult start(const ZeroWorldConfig& config) {
    ZeroWorld world;
    ZeroResult result = zero_world_start(&world, &config, NULL, NULL);
    if (result.code == ZERO_OK) zero_world_finish(&world);
    return result;
}

#define EXPECT_TEXT(result, part)                                                   \
    do {                                                                            \
        ZeroResult expect_result = (result);                                        \
        EXPECT_NE(expect_result.code, ZERO_OK);                                     \
        EXPECT_NE(strstr(expect_result.text, part), nullptr) << expect_result.text; \
        EXPECT_EQ(strchr(expect_result.text, '\n'), nullptr) << expect_result.text; \
    } while (0)

static std::vector<int> local_ranks(const std::vector<std::pair<const char*, const char*>>& names,
                                    int* last_count) {
    std::vector<ZeroWorldHost> hosts(names.size());
    std::vector<int> result;
    memset(hosts.data(), 0, sizeof(ZeroWorldHost) * hosts.size());
    for (size_t i = 0; i < names.size(); i++) {
        snprintf(hosts[i].name, sizeof(hosts[i].name), "%s", names[i].first);
        snprintf(hosts[i].boot, sizeof(hosts[i].boot), "%s", names[i].second);
    }
    for (size_t r = 0; r < names.size(); r++) {
        int local;
        zero_world_local_rank(hosts.data(), (int)hosts.size(), (int)r, &local, last_count);
        result.push_back(local);
    }
    return result;
}

TEST(LocalRank, WholeNameCounts) { /* H1, LC19 */
    int count;
    EXPECT_EQ(local_ranks({{"a.x", ""}, {"a.x", ""}, {"a.y", ""}, {"a.y", ""}}, &count),
              std::vector<int>({0, 1, 0, 1}));
    EXPECT_EQ(count, 2);
    EXPECT_EQ(local_ranks({{"a", ""}, {"b", ""}, {"a", ""}, {"a", ""}}, &count),
              std::vector<int>({0, 0, 1, 2}));
    EXPECT_EQ(count, 3);
}

TEST(LocalRank, BootIdCounts) {
    int count;
    EXPECT_EQ(local_ranks({{"a", "1"}, {"a", "2"}, {"a", "1"}}, &count), std::vector<int>({0, 0, 1}));
    EXPECT_EQ(count, 2);
}

TEST(Device, TooManyRanks) { /* H2 */
    int device = -1;
    EXPECT_TEXT(zero_world_choose_device("n1.rackA", 0, 4, 1, 0, 0, &device),
                "4 ranks on host n1.rackA, 1 visible GPU:");
    EXPECT_TEXT(zero_world_choose_device("n", 0, 2, 0, 0, 0, &device), "2 ranks on host n, 0 visible GPUs");
    EXPECT_TEXT(zero_world_choose_device("n", 0, 1, 0, 0, 1, &device), "1 rank on host n, 0 visible GPUs");
    EXPECT_TEXT(zero_world_choose_device("n", 0, 4, 8, 2, 0, &device), "4 ranks on host n, 2 usable GPUs");
    EXPECT_TEXT(zero_world_choose_device("n", 5, 8, 4, 8, 0, &device),
                "8 GPUs per node were asked for, host n has 4");
    EXPECT_EQ(device, -1);
}

TEST(Device, Chosen) {
    int device = -1;
    EXPECT_EQ(zero_world_choose_device("n", 3, 4, 4, 0, 0, &device).code, ZERO_OK);
    EXPECT_EQ(device, 3);
    EXPECT_EQ(zero_world_choose_device("n", 3, 4, 2, 0, 1, &device).code, ZERO_OK);
    EXPECT_EQ(device, 1);
    EXPECT_EQ(zero_world_choose_device("n", 3, 4, 4, 1, 1, &device).code, ZERO_OK);
    EXPECT_EQ(device, 0);
}

TEST(Job, Names) {
    char job[64];
    unsetenv("SLURM_JOB_ID");
    unsetenv("LLMC_ZERO_JOB");
    EXPECT_EQ(zero_world_job(job, sizeof(job)).code, ZERO_OK);
    EXPECT_STREQ(job, "0");
    setenv("LLMC_ZERO_JOB", "mine_2", 1);
    EXPECT_EQ(zero_world_job(job, sizeof(job)).code, ZERO_OK);
    EXPECT_STREQ(job, "mine_2");
    setenv("SLURM_JOB_ID", "4711", 1);
    EXPECT_EQ(zero_world_job(job, sizeof(job)).code, ZERO_OK);
    EXPECT_STREQ(job, "4711-mine_2");
    unsetenv("LLMC_ZERO_JOB");
    EXPECT_EQ(zero_world_job(job, sizeof(job)).code, ZERO_OK);
    EXPECT_STREQ(job, "4711");
    unsetenv("SLURM_JOB_ID");
    for (const char* bad : {"../up", "a b", "a.b", "a\nb"}) {
        setenv("LLMC_ZERO_JOB", bad, 1);
        EXPECT_EQ(zero_world_job(job, sizeof(job)).code, ZERO_ERROR_ARGUMENT) << bad;
    }
    setenv("LLMC_ZERO_JOB", std::string(64, 'x').c_str(), 1);
    EXPECT_TEXT(zero_world_job(job, sizeof(job)), "64 characters");
    unsetenv("LLMC_ZERO_JOB");
}

TEST(Start, BadArguments) {
    std::string folder = make_folder();
    ZeroWorldConfig config = fs(folder.c_str(), 0, 0);
    EXPECT_TEXT(start(config), "0 ranks: there must be at least one");
    EXPECT_TEXT(start(fs(folder.c_str(), 2, 2)), "rank 2 of 2 ranks: it must be 0 to 1");
    EXPECT_TEXT(start(fs(folder.c_str(), 2, -1)), "rank -1 of 2 ranks");
    EXPECT_TEXT(start(fs(NULL, 1, 0)), "needs a shared folder");
    EXPECT_TEXT(start(fs("", 1, 0)), "needs a shared folder");
    EXPECT_TEXT(start(fs((folder + "/none").c_str(), 1, 0)), "No such file or directory");
    EXPECT_TEXT(start(fs("/proc/version", 1, 0)), "Not a directory");
    EXPECT_TEXT(start(fs("/proc/sys/kernel", 1, 0)),
                "shared folder: cannot write /proc/sys/kernel/llmc_zero.0.");
    config.method = "tcp";
    EXPECT_TEXT(start(config), "not in this version");
    config.method = "pigeon";
    EXPECT_TEXT(start(config), "start-up by pigeon: use mpi or fs");
    EXPECT_TRUE(files_in(folder).empty());
    rmdir(folder.c_str());
}

TEST(Start, LongPaths) { /* LC32 */
    std::string folder = make_folder(), deep = folder;
    EXPECT_TEXT(start(fs(std::string(300, 'x').c_str(), 1, 0)), "File name too long");
    EXPECT_TEXT(start(fs(("/" + std::string(5000, 'x')).c_str(), 1, 0)), "5001 characters");
    std::string slashes = folder + std::string(PATH_MAX - 256 - folder.size(), '/');
    EXPECT_EQ(start(fs(slashes.c_str(), 1, 0)).code, ZERO_OK); /* the longest that is allowed */
    EXPECT_TEXT(start(fs((slashes + "/").c_str(), 1, 0)), "at most");
    while (deep.size() < 300) {
        deep += "/" + std::string(60, 'd');
        ASSERT_EQ(mkdir(deep.c_str(), 0700), 0);
    }
    EXPECT_EQ(start(fs(deep.c_str(), 1, 0)).code, ZERO_OK);
    EXPECT_TRUE(files_in(deep).empty());
    for (; deep.size() >= folder.size(); deep.resize(deep.rfind('/'))) EXPECT_EQ(rmdir(deep.c_str()), 0);
}

TEST(Start, OneRankNeedsNobody) {
    ZeroWorld world;
    std::string folder = make_folder();
    ZeroWorldConfig config = fs(folder.c_str(), 1, 0);
    ASSERT_EQ(zero_world_start(&world, &config, NULL, NULL).code, ZERO_OK);
    EXPECT_EQ(world.rank, 0);
    EXPECT_EQ(world.ranks, 1);
    EXPECT_EQ(world.local_ranks, 1);
    int mine = 7, all = 0;
    EXPECT_EQ(zero_world_gather(&world, &mine, sizeof(mine), &all).code, ZERO_OK);
    EXPECT_EQ(all, 7);
    EXPECT_TEXT(zero_world_agree(&world, zero_error(ZERO_ERROR_MEMORY, "mine")), "mine");
    EXPECT_TEXT(zero_world_gather(&world, &mine, 4097, &all), "4097 bytes");
    zero_world_finish(&world);
    EXPECT_TRUE(files_in(folder).empty());
    rmdir(folder.c_str());
}

TEST(Start, MissingRanksAreNamed) {
    std::string folder = make_folder();
    EXPECT_TEXT(start(fs(folder.c_str(), 4, 0, 0.3)), "missing: rank 1, 2, 3");
    EXPECT_TEXT(start(fs(folder.c_str(), 3, 2, 0.3)), "missing: rank 0, 1");
    EXPECT_TRUE(files_in(folder).empty());
    rmdir(folder.c_str());
}

/* Runs `ranks` threads, started `delay_ms` apart, the last rank first, through start, gathers and finish. */
static std::vector<ZeroResult> together(const std::string& folder, int ranks, const std::vector<int>& as,
                                        int delay_ms) {
    std::vector<ZeroResult> results(as.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < as.size(); i++) {
        threads.emplace_back([&, i] {
            ZeroWorld world;
            ZeroWorldConfig config = fs(folder.c_str(), ranks, as[i]);
            results[i] = zero_world_start(&world, &config, NULL, NULL);
            if (results[i].code != ZERO_OK) return;
            std::vector<int> all((size_t)ranks);
            for (int round = 0; round < 5 && results[i].code == ZERO_OK; round++) {
                results[i] = zero_world_gather(&world, &world.rank, sizeof(int), all.data());
                for (int r = 0; r < ranks; r++)
                    if (all[(size_t)r] != r) results[i] = zero_error(ZERO_ERROR_ORDER, "wrong gather");
            }
            if (results[i].code == ZERO_OK)
                zero_world_finish(&world);
            else
                zero_world_abort(&world, 1);
        });
        usleep((useconds_t)delay_ms * 1000);
    }
    for (auto& thread : threads) thread.join();
    return results;
}

TEST(Folder, EveryNumberOfRanksAndOrder) {
    std::string folder = make_folder();
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int delay_ms : {0, 30}) {
            std::vector<int> as;
            for (int r = ranks - 1; r >= 0; r--) as.push_back(r);
            for (ZeroResult& result : together(folder, ranks, as, delay_ms)) EXPECT_STREQ(result.text, "");
            EXPECT_TRUE(files_in(folder).empty());
        }
    rmdir(folder.c_str());
}

static void write_file(const std::string& path, const void* data, size_t bytes) {
    FILE* file = fopen(path.c_str(), "w");
    ASSERT_NE(file, nullptr);
    ASSERT_EQ(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
}

/* H3, W2: what crashed runs left: hellos, an answer and a final list with the nonces of the dead, junk. */
TEST(Folder, StaleFiles) {
    std::string folder = make_folder(), prefix = folder + "/llmc_zero.0." + std::to_string(getuid()) + ".";
    for (int last_first = 0; last_first < 2; last_first++) {
        ZeroWorldHello hello = {};
        char list[2][ZERO_WORLD_NONCE] = {"00000000000000aa", "00000000000000bb"};
        memcpy(hello.magic, "ZEROFS1", 8);
        hello.ranks = 2;
        for (int r = 0; r < 2; r++) {
            memcpy(hello.nonce, list[r], ZERO_WORLD_NONCE);
            write_file(prefix + "hello." + std::to_string(r), &hello, sizeof(hello));
            write_file(prefix + "run.00000000000000aa.1." + std::to_string(r), &r, sizeof(r));
        }
        write_file(prefix + "run.answer", list, sizeof(list));
        write_file(prefix + "run.00000000000000aa.0.0", list, sizeof(list));
        write_file(prefix + "run.00000000000000aa.0.1", list[1], sizeof(list[1]));
        std::vector<int> as = {last_first, 1 - last_first};
        for (ZeroResult& result : together(folder, 2, as, 100)) EXPECT_STREQ(result.text, "");
        EXPECT_TRUE(files_in(folder).empty());
        write_file(prefix + "hello.1", "junk", 4);
        write_file(prefix + "run.answer", "junk", 4);
        for (ZeroResult& result : together(folder, 2, as, 100)) EXPECT_STREQ(result.text, "");
        EXPECT_TRUE(files_in(folder).empty());
    }
    EXPECT_EQ(rmdir(folder.c_str()), 0);
}

/* One of the two leaves, whichever looks too late; the other one waits, and meets the rank that was missing. */
TEST(Folder, SameRankTwice) {
    std::string folder = make_folder();
    for (int rank : {1, 0})
        for (int delay_ms : {0, 50}) {
            std::atomic<int> ended{0};
            std::vector<ZeroResult> results(2);
            std::vector<std::thread> threads;
            for (ZeroResult& result : results) {
                threads.emplace_back([&] {
                    result = start(fs(folder.c_str(), 2, rank));
                    ended++;
                });
                usleep((useconds_t)delay_ms * 1000);
            }
            while (ended == 0) usleep(1000);
            EXPECT_STREQ(start(fs(folder.c_str(), 2, 1 - rank)).text, "");
            for (auto& thread : threads) thread.join();
            const int stayed = results[1].code == ZERO_OK;
            EXPECT_STREQ(results[stayed].text, "");
            EXPECT_TEXT(results[1 - stayed], "same rank twice");
            EXPECT_TRUE(files_in(folder).empty());
        }
    EXPECT_EQ(rmdir(folder.c_str()), 0);
}

/* Beside a rank that waits in the folder, for another number of ranks. */
TEST(Folder, DifferentCounts) {
    std::string folder = make_folder();
    for (int rank : {0, 1}) {
        ZeroWorld waiting = {};
        ZeroWorldConfig config = fs(folder.c_str(), 2 + rank, rank);
        waiting.hello_fd = -1, waiting.timeout_s = config.timeout_s;
        ASSERT_EQ(zero_world_fs_open(&waiting, &config).code, ZERO_OK);
        ASSERT_EQ(zero_world_hello(&waiting, zero_world_now()).code, ZERO_OK);
        EXPECT_TEXT(start(fs(folder.c_str(), 3 - rank, 1 - rank)),
                    rank ? "rank 1 was started for 3 ranks, rank 0 for 2"
                         : "rank 0 was started for 2 ranks, rank 1 for 3");
        zero_world_fs_close(&waiting, 0);
        EXPECT_TRUE(files_in(folder).empty());
    }
    EXPECT_EQ(rmdir(folder.c_str()), 0);
}
