/* test/test_memory.cu - llmc_zero/memory.cuh: the plan against numbers worked out by hand, and the accounts.

   No CUDA in it: g++ -x c++ compiles it too. That an optimizer really holds what the plan says is tested
   where there is an optimizer.
*/
#include <gtest/gtest.h>
#include <vector>

#include "llmc_zero/memory.cuh"

namespace {

ZeroPlanChoice choose(int rank, int stage, ZeroAlgorithm algorithm, double momentum, int masters) {
    ZeroPlanChoice choice;
    memset(&choice, 0, sizeof(choice));
    choice.rank = rank;
    choice.stage = stage;
    choice.algorithm = algorithm;
    choice.momentum = momentum;
    choice.masters = masters;
    choice.overlap = 1;
    return choice;
}

size_t scratch(const ZeroLayout* layout, int rank, int stage) {
    const ZeroPlanChoice choice = choose(rank, stage, ZERO_ADAM, 0.0, 0);
    ZeroPlan plan;
    ZeroResult r = zero_plan(&plan, layout, &choice);
    EXPECT_EQ(r.code, ZERO_OK) << r.text;
    return plan.scratch_bytes;
}

/* The recipe: 20 times Linear(2000, 2000), a unit each. Segments begin at multiples of 64 elements, so 2000
   biases take 2048 places, a layer 4,002,048, and all of them 80,040,960, padding included. */
struct Recipe {
    std::vector<ZeroSegment> segments;
    ZeroLayout layout;
    Recipe(int ranks, ZeroDtype dtype) {
        ZeroLayoutConfig config = zero_layout_config(ranks, dtype);
        for (int i = 0; i < 20; i++) {
            segments.push_back(zero_segment("weight", 4000000, i));
            segments.push_back(zero_segment("bias", 2000, i));
        }
        EXPECT_EQ(zero_layout(&layout, segments.data(), 40, &config).code, ZERO_OK);
        EXPECT_EQ(zero_model_count(&layout), 80040000u);
    }
    ~Recipe() { zero_layout_free(&layout); }
    ZeroPlan plan(int rank, int stage, ZeroAlgorithm algorithm, double momentum, int masters) {
        const ZeroPlanChoice choice = choose(rank, stage, algorithm, momentum, masters);
        ZeroPlan plan;
        ZeroResult r = zero_plan(&plan, &layout, &choice);
        EXPECT_EQ(r.code, ZERO_OK) << r.text;
        return plan;
    }
};

TEST(Memory, RecipeInFp32On2Ranks) {
    Recipe recipe(2, ZERO_FP32);
    const size_t flat = (size_t)4 * 80040960; /* 320.16384 MB, padding included */
    for (int rank = 0; rank < 2; rank++) {
        ZeroPlan off = recipe.plan(rank, 0, ZERO_ADAM, 0, 0), on = recipe.plan(rank, 1, ZERO_ADAM, 0, 0);
        EXPECT_EQ(off.params_bytes, flat);
        EXPECT_EQ(off.grads_bytes, flat);
        EXPECT_EQ(off.state_bytes, 2 * flat); /* 640.32 MB */
        EXPECT_EQ(on.params_bytes, flat);
        EXPECT_EQ(on.grads_bytes, flat);
        EXPECT_EQ(on.state_bytes, flat); /* 320.16 MB: exactly half */
        /* A layer is 1954 chunks and one; 10 layers a rank, and the cut is between two layers but for the
         * padding. */
        EXPECT_GE(on.scratch_bytes, 40u * 19550 + 256 + 2 * 512 + 32);
        EXPECT_LE(on.scratch_bytes, 40u * 19551 + 256 + 2 * 512 + 32);
        EXPECT_EQ(off.scratch_bytes, on.scratch_bytes + 40u * 39100);
        EXPECT_EQ(zero_plan_total(&on), on.params_bytes + on.grads_bytes + on.state_bytes + on.scratch_bytes);
        EXPECT_LE(zero_plan_total(&on), 963000000u); /* 960.5 MB and scratch */
        EXPECT_LE(zero_plan_total(&off), 1284000000u);
    }
}

TEST(Memory, StateByAlgorithmTypeAndStage) {
    struct {
        ZeroDtype dtype;
        ZeroAlgorithm algorithm;
        double momentum;
        int masters;
        size_t floats;
    } rows[] = {{ZERO_FP32, ZERO_ADAMW, 0.9, 1, 2}, {ZERO_FP32, ZERO_ADAMW, 0, 0, 2},
                {ZERO_BF16, ZERO_ADAMW, 0, 1, 3},   {ZERO_BF16, ZERO_ADAM, 0, 0, 2},
                {ZERO_FP32, ZERO_SGD, 0.9, 1, 1},   {ZERO_FP32, ZERO_SGD, 0, 1, 0},
                {ZERO_BF16, ZERO_SGD, 0.9, 1, 2},   {ZERO_BF16, ZERO_SGD, 0, 1, 1},
                {ZERO_BF16, ZERO_SGD, 0, 0, 0}};
    for (int ranks : {1, 2, 3, 8})
        for (auto& row : rows) {
            Recipe recipe(ranks, row.dtype);
            ZeroPlan off = recipe.plan(ranks - 1, 0, row.algorithm, row.momentum, row.masters);
            ZeroPlan on = recipe.plan(ranks - 1, 1, row.algorithm, row.momentum, row.masters);
            size_t padded = zero_padded_count(&recipe.layout);
            EXPECT_EQ(off.state_bytes, 4 * row.floats * padded);
            EXPECT_EQ(on.state_bytes * (size_t)ranks, off.state_bytes); /* 1 / ranks to the byte */
            EXPECT_EQ(on.params_bytes, padded * (row.dtype == ZERO_BF16 ? 2 : 4));
            EXPECT_LT(padded, 80040000u * 1.001);
        }
}

TEST(Memory, ScratchCountsChunksScalarsAndSums) {
    ZeroSegment segment = zero_segment("w", 3 * 2048 + 1, 0);
    ZeroLayoutConfig config = zero_layout_config(1, ZERO_FP32);
    ZeroLayout layout;
    ASSERT_EQ(zero_layout(&layout, &segment, 1, &config).code, ZERO_OK);
    ASSERT_EQ(sizeof(ZeroChunk), 40u);
    EXPECT_EQ(scratch(&layout, 0, 1), 4 * 40 + 256 + 2 * 512 + 16u);
    EXPECT_EQ(scratch(&layout, 0, 0), scratch(&layout, 0, 1)); /* one rank: one table */
    zero_layout_free(&layout);
    config.ranks = 4; /* slices of 1600: a chunk each; the last has 1345 real elements */
    ASSERT_EQ(zero_layout(&layout, &segment, 1, &config).code, ZERO_OK);
    EXPECT_EQ(scratch(&layout, 3, 1), 1 * 40 + 256 + 2 * 512 + 16 * 4u);
    EXPECT_EQ(scratch(&layout, 3, 0), 1 * 40 + 4 * 40 + 256 + 2 * 512 + 16 * 4u);
    zero_layout_free(&layout);
}

/* By hand: the recipe at N = 2, a bucket a layer of 4,002,048 elements (a multiple of 2 * 64). */
TEST(Memory, Stages2And3HoldAUnitAtATime) {
    const size_t layer = 4002048, all = 20 * layer;
    std::vector<ZeroSegment> segments;
    for (int i = 0; i < 20; i++) {
        segments.push_back(zero_segment("weight", 4000000, i));
        segments.push_back(zero_segment("bias", 2000, i));
    }
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (int held = 0; held <= 1; held++)
            for (int overlap = 0; overlap <= 1; overlap++) {
                const size_t bytes = zero_dtype_bytes(dtype), extra = held ? 1 : 0;
                const int unit = 7;
                ZeroLayoutConfig config = zero_layout_config(2, dtype);
                ZeroLayout layout;
                ZeroPlan plan;
                config.units_apart = 1;
                ASSERT_EQ(zero_layout(&layout, segments.data(), 40, &config).code, ZERO_OK);
                ASSERT_EQ(zero_padded_count(&layout), all);
                for (int stage = 2; stage <= 3; stage++) {
                    ZeroPlanChoice choice = choose(0, stage, ZERO_ADAM, 0.0, 1);
                    choice.overlap = overlap;
                    choice.held_units = &unit;
                    choice.held_units_count = held;
                    ASSERT_EQ(zero_plan(&plan, &layout, &choice).code, ZERO_OK);
                    EXPECT_EQ(plan.grads_bytes, 4 * all / 2 + (1 + (size_t)overlap + extra) * layer * bytes);
                    EXPECT_EQ(plan.params_bytes,
                              stage == 2 ? all * bytes : all / 2 * bytes + (2 + extra) * layer * bytes);
                    EXPECT_EQ(plan.state_bytes, (dtype == ZERO_BF16 ? 3 : 2) * 4 * all / 2);
                    const size_t chunks = plan.scratch_bytes;
                    choice.reduction = ZERO_REDUCE_ORDERED; /* scratch: an eighth of a bucket */
                    ASSERT_EQ(zero_plan(&plan, &layout, &choice).code, ZERO_OK);
                    EXPECT_NEAR((double)plan.scratch_bytes, (double)(chunks + layer * bytes / 8), 6e4);
                }
                zero_layout_free(&layout);
            }
}

/* bf16 sums and sums of micro-steps lie in an fp32 shard in stages 0 and 1, too. */
TEST(Memory, SumsOfStages0And1) {
    Recipe recipe(4, ZERO_BF16);
    const size_t padded = zero_padded_count(&recipe.layout);
    for (int stage = 0; stage <= 1; stage++)
        for (ZeroReduction reduction : {ZERO_REDUCE_NCCL, ZERO_REDUCE_ORDERED})
            for (ZeroAccumulation accumulation : {ZERO_ACCUMULATE_STEP, ZERO_ACCUMULATE_MICRO}) {
                ZeroPlanChoice choice = choose(1, stage, ZERO_ADAM, 0.0, 1);
                ZeroPlan plan;
                choice.reduction = reduction;
                choice.accumulation = accumulation;
                const int sharded = reduction == ZERO_REDUCE_ORDERED || accumulation == ZERO_ACCUMULATE_MICRO;
                ASSERT_EQ(zero_plan(&plan, &recipe.layout, &choice).code, ZERO_OK);
                EXPECT_EQ(plan.grads_bytes, 2 * padded + (sharded ? 4 * padded / 4 : 0));
                EXPECT_LE(plan.scratch_bytes, ((size_t)32 << 20) + 40 * 80000);
            }
}

TEST(Memory, RefusedInWords) {
    Recipe recipe(2, ZERO_FP32);
    struct {
        int rank, stage;
        const char* word;
    } rows[] = {{0, 2, "units_apart = 1"}, {0, 3, "units_apart = 1"}, {0, 4, "stage 4"},
                {0, -1, "stage -1"},       {2, 1, "rank 2"},          {-1, 1, "rank -1"}};
    for (auto& row : rows) {
        const ZeroPlanChoice choice = choose(row.rank, row.stage, ZERO_ADAM, 0.0, 0);
        ZeroPlan plan;
        ZeroResult r = zero_plan(&plan, &recipe.layout, &choice);
        EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(strstr(r.text, row.word), nullptr) << r.text;
        EXPECT_EQ(zero_plan_total(&plan), 0u);
    }
}

/* The largest model that a layout takes: no number of bytes overflows, and the plan is there at once. */
TEST(Memory, HugeModels) {
    ZeroSegment segment = zero_segment("w", SIZE_MAX / 64 - 4096, 0);
    ZeroLayoutConfig config = zero_layout_config(1, ZERO_BF16);
    const ZeroPlanChoice choice = choose(0, 0, ZERO_ADAM, 0.0, 1);
    ZeroLayout layout;
    ZeroPlan plan;
    ASSERT_EQ(zero_layout(&layout, &segment, 1, &config).code, ZERO_OK);
    ASSERT_EQ(zero_plan(&plan, &layout, &choice).code, ZERO_OK);
    EXPECT_EQ((double)plan.state_bytes, 12.0 * (double)zero_padded_count(&layout));
    EXPECT_GE((double)zero_plan_total(&plan), 16.0 * (double)zero_padded_count(&layout));
    zero_layout_free(&layout);
    segment.count = 0; /* and the smallest */
    ASSERT_EQ(zero_layout(&layout, &segment, 1, &config).code, ZERO_OK);
    ASSERT_EQ(zero_plan(&plan, &layout, &choice).code, ZERO_OK);
    EXPECT_EQ(plan.params_bytes + plan.grads_bytes + plan.state_bytes, 0u);
    zero_layout_free(&layout);
}

TEST(Memory, AccountsAndPeak) {
    ZeroMemory memory = zero_memory();
    EXPECT_EQ(zero_memory_total(&memory), 0u);
    EXPECT_EQ(memory.peak_bytes, 0u);
    zero_memory_add(&memory, ZERO_MEMORY_PARAMS, 100);
    zero_memory_add(&memory, ZERO_MEMORY_ACTIVATIONS, 1000);
    EXPECT_EQ(memory.peak_bytes, 1100u);
    zero_memory_remove(&memory, ZERO_MEMORY_ACTIVATIONS, 1000);
    EXPECT_EQ(zero_memory_total(&memory), 100u);
    zero_memory_add(&memory, ZERO_MEMORY_STATE, 500); /* below the peak of the sum, which stays */
    EXPECT_EQ(zero_memory_total(&memory), 600u);
    EXPECT_EQ(memory.peak_bytes, 1100u);
    zero_memory_add(&memory, ZERO_MEMORY_GRADS, (size_t)1 << 33);
    EXPECT_EQ(memory.peak_bytes, 600u + ((size_t)1 << 33));
    EXPECT_EQ(memory.held_bytes[ZERO_MEMORY_STATE], 500u);
    zero_memory_add(NULL, ZERO_MEMORY_STATE, 1); /* nobody asked */
    zero_memory_remove(NULL, ZERO_MEMORY_STATE, 1);
}

} // namespace
