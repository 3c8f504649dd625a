/* test/test_timeline.cu - llmc_zero/timeline.cuh: spans nest, waits add up, the JSON has every event. */
#include <string>
#include <unistd.h>

#include <cuda_runtime.h>

/* How long a wait for an event takes at least, and how often one was recorded. */
static useconds_t held_up_us = 0;
static int records = 0;
#define cudaEventSynchronize(event) (usleep(held_up_us), (cudaEventSynchronize)(event))
#define cudaEventRecord(...) (records++, (cudaEventRecord)(__VA_ARGS__))
#include "llmc_zero/timeline.cuh"
#include "comma_locale.h"
#include "device.h"

namespace {

// Tests let the n-th call fail on every rank: it has to be the same one on a rank that is slow.
TEST(Timeline, ASlowStartMakesTheSameCalls) {
    int counts[2];
    for (int slow = 0; slow < 2; slow++) {
        ZeroTimeline t = {};
        held_up_us = slow ? 2000 : 0;
        records = 0;
        ok(zero_timeline_start(&t, ZERO_TIMING_ALL, NULL, NULL));
        counts[slow] = records;
        zero_timeline_free(&t);
    }
    held_up_us = 0;
    EXPECT_GT(counts[0], 0);
    EXPECT_EQ(counts[0], counts[1]);
}

TEST(Timeline, SpansNestAndAreWritten) {
    ZeroTimeline t = {};
    int outer, inner, wait;
    char text[4096] = "";
    ok(zero_timeline_start(&t, ZERO_TIMING_ALL, NULL, NULL));
    ok(zero_span_begin(&t, ZERO_ROW_COMPUTE, "forward", ZERO_NO_INDEX, &outer));
    ok(zero_span_begin(&t, ZERO_ROW_COMPUTE, "layer", 3, &inner));
    ok(zero_span_begin(&t, ZERO_ROW_COMPUTE, ZERO_SPAN_WAIT, 7, &wait));
    ok(zero_span_end(&t, wait));
    ok(zero_span_end(&t, inner));
    ok(zero_span_end(&t, outer));
    ok(cudaDeviceSynchronize());
    ok(zero_timeline_drain(&t));
    EXPECT_EQ(t.spans_count, 0);
    ASSERT_EQ(t.entries_count, 3u);
    for (int i = 1; i < 3; i++) { // fp32 milliseconds
        EXPECT_GE(t.entries[i].begin_us, t.entries[i - 1].begin_us - 1.0);
        EXPECT_LE(t.entries[i].begin_us + t.entries[i].us,
                  t.entries[i - 1].begin_us + t.entries[i - 1].us + 1.0);
    }
    EXPECT_NEAR(zero_timeline_take_exposed(&t), 1e-3 * t.entries[2].us, 1e-4);
    EXPECT_EQ(zero_timeline_take_exposed(&t), 0.0);
    FILE* file = fmemopen(text, sizeof(text), "w");
    ASSERT_TRUE(zero_timeline_write(&t, file, 0, zero_timeline_first_us(&t)));
    fclose(file);
    for (const char* name : {"\"forward\"", "\"layer 3\"", "\"wait 7\"", "\"rank 0\""})
        EXPECT_NE(std::string(text).find(name), std::string::npos) << text;
    zero_timeline_free(&t);
}

// Perfetto drops spans that overlap in part, be it by a nanosecond.
TEST(Timeline, SpansAreNestedOrApart) {
    long long ends[16];
    int depth = 0;
    const long long given[][2] = {{0, 100}, {10, 101}, {12, 50}, {49, 60}, {60, 60}, {99, 130}, {129, 140}};
    const long long expected[][2] = {{0, 100}, {10, 100},  {12, 50},  {50, 60},
                                     {60, 60}, {100, 130}, {130, 140}};
    for (int i = 0; i < 7; i++) {
        long long begin = given[i][0], end = given[i][1];
        zero_timeline_nest(ends, &depth, &begin, &end);
        EXPECT_EQ(begin, expected[i][0]) << i;
        EXPECT_EQ(end, expected[i][1]) << i;
    }
    for (int i = 0; i < 40; i++) { // deeper than is remembered
        long long begin = 200 + i, end = 400 - i;
        zero_timeline_nest(ends, &depth, &begin, &end);
        EXPECT_EQ(begin, 200 + i);
        EXPECT_EQ(end, 400 - i);
    }
}

// A span after an hour: no quarter of a microsecond is lost to the years since 1970.
TEST(Timeline, TimesAreFine) {
    ZeroTimeline t = {};
    char text[4096] = "";
    ok(zero_timeline_start(&t, ZERO_TIMING_ALL, NULL, NULL));
    const ZeroTimeSpan span = {"norm", ZERO_NO_INDEX, ZERO_ROW_COMPUTE, 0, 1, NULL, NULL};
    ok(zero_timeline_keep(&t, &span, 10.0, 1.0));
    ok(zero_timeline_keep(&t, &span, 3.6e9 + 0.125, 0.375));
    ok(zero_timeline_keep(&t, &span, 3.6e9 + 0.5, 0.125));
    FILE* file = fmemopen(text, sizeof(text), "w");
    ASSERT_TRUE(zero_timeline_write(&t, file, 0, zero_timeline_first_us(&t)));
    fclose(file);
    for (const char* times : {"\"ts\":0.000,\"dur\":1.000", "\"ts\":3599999990.125,\"dur\":0.375",
                              "\"ts\":3599999990.500,\"dur\":0.125"})
        EXPECT_NE(std::string(text).find(times), std::string::npos) << text;
    zero_timeline_free(&t);
}

// Case N1: a comma in a number is no JSON.
TEST(Timeline, NoLocaleIsInTheTrace) {
    ZeroTimeline t = {};
    char name[] = "/tmp/test_timeline.XXXXXX", text[4096] = "";
    ASSERT_NE(mkdtemp(name), nullptr);
    CommaLocale comma(name);
    EXPECT_EQ(system((std::string("rm -rf ") + name).c_str()), 0);
    if (!comma.set) GTEST_SKIP() << comma.reason;
    ok(zero_timeline_start(&t, ZERO_TIMING_ALL, NULL, NULL));
    const ZeroTimeSpan span = {"norm", ZERO_NO_INDEX, ZERO_ROW_COMPUTE, 0, 1, NULL, NULL};
    ok(zero_timeline_keep(&t, &span, 10.0, 1.125));
    ok(zero_timeline_keep(&t, &span, 20.0, 0.875));
    FILE* file = fmemopen(text, sizeof(text), "w");
    ASSERT_TRUE(zero_timeline_write(&t, file, 0, t.start_us + 10.5));
    fclose(file);
    for (const char* times : {"\"ts\":-0.500,\"dur\":1.125", "\"ts\":9.500,\"dur\":0.875"})
        EXPECT_NE(std::string(text).find(times), std::string::npos) << text;
    zero_timeline_free(&t);
}

} // namespace
