/* test/test_slots.cu - llmc_zero/slots.cuh: who gets which slot, and the guess of what comes next. */
#include <vector>

#include "llmc_zero/slots.cuh"
#include "device.h"

namespace {

struct Slots {
    ZeroLayout layout = {};
    ZeroSlots s = {};
    Slots(int units, int common, const std::vector<int>& held) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig config = zero_layout_config(2, ZERO_FP32);
        ZeroPlanChoice choice = {};
        for (int u = 0; u < units; u++) segments.push_back(zero_segment("tensor", 100, u));
        config.units_apart = 1;
        ok(zero_layout(&layout, segments.data(), units, &config));
        choice.held_units = held.data();
        choice.held_units_count = (int)held.size();
        ok(zero_slots_create(&s, &layout, &choice, common, 128));
    }
    ~Slots() {
        zero_slots_free(&s);
        zero_layout_free(&layout);
    }
};

TEST(Slots, TheOldestClosedSlotGoesFirst) {
    Slots x(5, 2, {0});
    ASSERT_EQ(x.s.count, 3);
    ZeroSlot *embedding = zero_slots_pick(&x.s, 0), *one = zero_slots_pick(&x.s, 1),
             *two = zero_slots_pick(&x.s, 2);
    ASSERT_TRUE(embedding && one && two && one != two && embedding != one && embedding != two);
    EXPECT_EQ(zero_slots_find(&x.s, 1), one);
    EXPECT_EQ(zero_slots_pick(&x.s, 3), one); // 1 came first
    EXPECT_EQ(zero_slots_find(&x.s, 1), nullptr);
    EXPECT_EQ(zero_slots_find(&x.s, 0), embedding);
    two->open = 1;
    EXPECT_EQ(zero_slots_pick(&x.s, 4), one); // an open slot is never given away
    one->open = 1;
    EXPECT_EQ(zero_slots_pick(&x.s, 1), nullptr);
    EXPECT_EQ(zero_slots_pick(&x.s, 0), embedding);
}

TEST(Slots, TheNextUnitIsTheNeighbourThenTheOneThatFollowed) {
    Slots x(4, 2, {});
    EXPECT_EQ(zero_slots_next(&x.s), ZERO_NO_UNIT);
    for (int round = 0; round < 2; round++)
        for (int unit : {0, 1, 2, 3, 3, 2, 1, 0}) {
            if (round == 1) { // learnt: right each time, but where a step ends for the first time
                if (x.s.unit != 0) {
                    EXPECT_EQ(zero_slots_next(&x.s), unit);
                }
            }
            zero_slots_visit(&x.s, unit);
        }
}

} // namespace
