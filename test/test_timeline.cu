/* test/test_timeline.cu - llmc_zero/timeline.cuh: spans nest, waits add up, the JSON has every event. */
#include <string>

#include "llmc_zero/timeline.cuh"
#include "device.h"

namespace {

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
    EXPECT_NEAR(zero_timeline_take_exposed(&t), 1e-3 * t.entries[2].us, 1e-6);
    EXPECT_EQ(zero_timeline_take_exposed(&t), 0.0);
    FILE* file = fmemopen(text, sizeof(text), "w");
    ASSERT_TRUE(zero_timeline_write(&t, file, 0, t.origin_us));
    fclose(file);
    for (const char* name : {"\"forward\"", "\"layer 3\"", "\"wait 7\"", "\"rank 0\""})
        EXPECT_NE(std::string(text).find(name), std::string::npos) << text;
    zero_timeline_free(&t);
}

} // namespace
