/* test/test_stages.cu - gradients and parameters that exist a unit at a time (stages 2 and 3), ordered sums, micro-steps reduced
   one by one: mpirun -np N build/test/test_stages. */
#include "model.h"

/* What the plan says is what is held, and nothing is left after zero_free. */
TEST(Stages, HoldsWhatThePlanSays) {
    static const int held_unit = 0;
    for (int stage = 0; stage <= 3; stage++)
        for (int kind = 0; kind < 3 * 3 * 2 * 2 * 2; kind++) {
            ZeroConfig config = zero_config();
            const int type = kind / 3 % 3;
            config.stage = stage;
            config.algorithm = (ZeroAlgorithm)(kind % 3);
            config.masters = type == 1;
            config.reduction = kind / 9 % 2 ? ZERO_REDUCE_ORDERED : ZERO_REDUCE_NCCL;
            config.accumulation = kind / 18 % 2 ? ZERO_ACCUMULATE_MICRO : ZERO_ACCUMULATE_STEP;
            config.overlap = kind / 36;
            config.held_units = &held_unit;
            config.held_units_count = kind % 2;
            const Plan& layout_plan = PLANS[(size_t)(kind + stage) % PLANS.size()];
            const ZeroPlanChoice choice = zero_plan_choice(&config, world.rank);
            ZeroPlan plan;
            Model m(config, type ? ZERO_BF16 : ZERO_FP32, layout_plan.counts, layout_plan.bucket_bytes,
                    layout_plan.units_apart);
            OK(m.result);
            OK(zero_plan(&plan, &m.layout, &choice));
            EXPECT_EQ(m.memory.held_bytes[ZERO_MEMORY_PARAMS], plan.params_bytes) << stage << " " << kind;
            EXPECT_EQ(m.memory.held_bytes[ZERO_MEMORY_GRADS], plan.grads_bytes) << stage << " " << kind;
            EXPECT_EQ(m.memory.held_bytes[ZERO_MEMORY_STATE], plan.state_bytes) << stage << " " << kind;
            EXPECT_EQ(m.memory.held_bytes[ZERO_MEMORY_SCRATCH], plan.scratch_bytes) << stage << " " << kind;
            zero_free(&m.z);
            EXPECT_EQ(zero_memory_total(&m.memory), 0u);
        }
}

/* Z5: with ZERO_REDUCE_ORDERED and ZERO_ACCUMULATE_MICRO every stage, bucket size and overlap gives the same bits. */
TEST(Stages, OrderedGivesTheSameBitsInEveryStageAndPlan) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16}) {
        std::vector<float> expected;
        for (int stage = 0; stage <= 3; stage++)
            for (size_t bucket_bytes : {(size_t)0, (size_t)2048})
                for (int overlap = 0; overlap <= 1; overlap++) {
                    ZeroConfig config = zero_config();
                    std::vector<float> p;
                    config.stage = stage;
                    config.overlap = overlap;
                    config.max_norm = 1.0;
                    config.reduction = ZERO_REDUCE_ORDERED;
                    config.accumulation = ZERO_ACCUMULATE_MICRO;
                    Model m(config, dtype, {5000, 33, 4097, 700, 3}, bucket_bytes, 0);
                    OK(m.result);
                    for (int step = 0; step < 2; step++) {
                        for (int micro = 0; micro < 3; micro++) {
                            OK(zero_begin(&m.z, micro, 3, 1.0 / 3));
                            OK(m.give_all([&](size_t i) {
                                const uint64_t key = i * 64 + (uint64_t)(step * 24 + micro * 8 + world.rank);
                                return (float)(zero_mix(key) >> 40) * 0x1p-20f - 8.0f;
                            }));
                        }
                        OK(zero_update(&m.z, 0.01));
                    }
                    OK(m.params(&p));
                    if (expected.empty()) expected = p;
                    ASSERT_EQ(memcmp(p.data(), expected.data(), p.size() * sizeof(float)), 0)
                        << "stage " << stage << " buckets " << bucket_bytes << " overlap " << overlap;
                }
    }
}

/* Case C7: in bf16 300 micro gradients of 1 give 300 where each micro-step is reduced into fp32. */
TEST(Stages, ManySmallMicroGradientsAddUpInBf16) {
    for (int stage = 0; stage <= 3; stage++) {
        ZeroConfig config = sgd(stage);
        float norm;
        config.accumulation = ZERO_ACCUMULATE_MICRO;
        Model m(config, ZERO_BF16, {1}, 0, 0);
        OK(m.result);
        for (int micro = 0; micro < 300; micro++) {
            OK(zero_begin(&m.z, micro, 300, 1.0));
            OK(m.give_all([](size_t) { return 1.0f; }));
        }
        OK(zero_grad_norm(&m.z, &norm));
        EXPECT_EQ(norm, 300.0f) << "stage " << stage;
        OK(zero_update(&m.z, 1.0));
    }
}

/* Stages 2 and 3: what the slots cannot do is said in words. */
TEST(Stages, MisuseOfSlotsIsSaidInWords) {
    for (int stage = 2; stage <= 3; stage++)
        for (int overlap = 0; overlap <= 1; overlap++) {
            ZeroConfig config = sgd(stage);
            void* pointer;
            int add;
            config.overlap = overlap;
            Model m(config, ZERO_FP32, {10, 1, 20, 2, 30}, 0, 0);
            OK(m.result);
            auto says = [](ZeroResult result, ZeroCode code, const char* words) {
                EXPECT_EQ(result.code, code) << result.text;
                EXPECT_NE(std::string(result.text).find(words), std::string::npos) << result.text;
            };
            float wrong[4] = {};
            says(zero_alloc_grads(&m.z, wrong), ZERO_ERROR_ORDER, "there already");
            if (m.z.schedule.params_sharded) {
                says(zero_params_acquire_all(&m.z, &pointer), ZERO_ERROR_ORDER, "never holds all parameters");
                OK(zero_params_acquire(&m.z, 0, &pointer));
                OK(zero_params_acquire(&m.z, 1, &pointer));
                says(zero_params_acquire(&m.z, 2, &pointer), ZERO_ERROR_ORDER,
                     "unit 2 while 2 others are open");
                says(zero_params_write(&m.z, 0, 0, 4, wrong), ZERO_ERROR_ORDER, "still open");
                OK(zero_params_release(&m.z, 0));
                says(zero_params_release(&m.z, 0), ZERO_ERROR_ORDER, "unit 0 is released more often");
                OK(zero_params_release(&m.z, 1));
            }
            OK(zero_begin(&m.z, 0, 1, 1.0));
            says(zero_grads_ready(&m.z, 2), ZERO_ERROR_ORDER, "zero_grads_acquire did not give");
            OK(zero_grads_acquire(&m.z, 2, &pointer, &add));
            if (overlap) OK(zero_grads_acquire(&m.z, 1, &pointer, &add));
            says(zero_grads_acquire(&m.z, 0, &pointer, &add), ZERO_ERROR_ORDER,
                 overlap ? "unit 0 while 2 others" : "unit 0 while 1 others");
            for (int unit = 2; unit >= 0; unit--) OK(m.give(unit, [](size_t) { return 0.0f; }));
            says(zero_grads_ready(&m.z, 2), ZERO_ERROR_ORDER, "unit 2: zero_grads_ready twice");
            OK(zero_grad_norm(&m.z, NULL));
            if (m.z.schedule.params_sharded) {
                OK(zero_params_acquire(&m.z, 1, &pointer));
                says(zero_update(&m.z, 1.0), ZERO_ERROR_ORDER, "unit 1 is still open");
                OK(zero_params_release(&m.z, 1));
            }
            OK(zero_update(&m.z, 1.0));
        }
}

/* Random bf16 gradients: RMS error, against float64, of the sum that the update reads. A ring rounds to bf16 at every hop,
   `ordered` adds in fp32 and keeps that. Each rank looks at its own slice. */
static double rms_of_own_sums(ZeroReduction reduction) {
    const size_t count = 20000;
    // a bf16 number, of any of 16 magnitudes: fp32 rounds such sums, too
    auto gradient = [](int rank, size_t i) {
        const uint64_t random = zero_mix(i * 64 + (uint64_t)rank);
        const double x = std::ldexp((double)(random >> 11) / 9007199254740992.0 - 0.5, -(int)(random % 16));
        return from_upper_half(upper_half((float)x));
    };
    ZeroConfig config = sgd(1);
    config.reduction = reduction;
    Model m(config, ZERO_BF16, {count}, 0, 0);
    EXPECT_EQ(m.result.code, ZERO_OK) << m.result.text;
    EXPECT_EQ(zero_begin(&m.z, 0, 1, 1.0).code, ZERO_OK);
    EXPECT_EQ(m.give_all([&](size_t i) { return gradient(world.rank, i); }).code, ZERO_OK);
    EXPECT_EQ(zero_grad_norm(&m.z, NULL).code, ZERO_OK);
    const size_t first = zero_slice_offset(&m.layout, 0, world.rank);
    const size_t end = std::min(first + zero_slice_count(&m.layout, 0), count);
    std::vector<float> sums(end - first);
    if (m.z.sums) {
        EXPECT_EQ(cudaMemcpyAsync(sums.data(), m.z.sums, sums.size() * sizeof(float), cudaMemcpyDeviceToHost,
                                  m.stream),
                  cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
    } else {
        EXPECT_EQ(m.read((char*)m.z.grads + first * 2, sums).code, ZERO_OK);
    }
    double squares = 0.0;
    for (size_t i = first; i < end; i++) {
        double exact = 0.0;
        for (int r = 0; r < world.ranks; r++) exact += (double)gradient(r, i);
        squares += (sums[i - first] - exact) * (sums[i - first] - exact);
    }
    EXPECT_EQ(zero_update(&m.z, 0.0).code, ZERO_OK);
    return std::sqrt(squares / (double)(end - first));
}

TEST(Stages, OrderedKeepsWhatARingRoundsAway) {
    if (world.ranks == 1) return;
    const double ring = rms_of_own_sums(ZERO_REDUCE_NCCL), ordered = rms_of_own_sums(ZERO_REDUCE_ORDERED);
    EXPECT_GT(ring, 1e-4);
    if (world.ranks > 2) {
        EXPECT_GT(ordered, 0.0);
    }
    EXPECT_LT(1000.0 * ordered, ring);
    if (world.rank == 0)
        printf("rms error of sums over %d ranks: ring %.3e, ordered %.3e\n", world.ranks, ring, ordered);
}

/* A caller whose gradients depend on the parameters that it has read, so that a stale one shows in the bits. */
struct Walker {
    Model& m;
    std::vector<float> seen;
    explicit Walker(Model& model) : m(model), seen(zero_model_count(&model.layout)) {}
    ZeroResult start() { // parameters that differ from each other
        for (int s = 0; s < m.layout.segments_count; s++) {
            const ZeroSegment& segment = m.layout.segments[s];
            std::vector<float> x(segment.count);
            std::vector<uint16_t> halves(segment.count);
            for (size_t i = 0; i < segment.count; i++) x[i] = (float)((segment.model_offset + i) % 13) - 6.0f;
            std::transform(x.begin(), x.end(), halves.begin(), upper_half);
            const void* values = m.layout.dtype == ZERO_FP32 ? (void*)x.data() : (void*)halves.data();
            ZERO_TRY(zero_params_write(&m.z, s, 0, segment.count, values));
            ZERO_TRY_CUDA(cudaStreamSynchronize(m.stream));
        }
        return zero_params_changed(&m.z);
    }
    ZeroResult use(int unit) { // reads an open unit
        void* params;
        ZERO_TRY(zero_params_acquire(&m.z, unit, &params));
        for (int s = 0; s < m.layout.segments_count; s++) {
            const ZeroSegment& segment = m.layout.segments[s];
            std::vector<float> x(segment.count);
            if (segment.unit != unit || segment.count == 0) continue;
            ZERO_TRY(
                m.read((char*)params + zero_unit_offset(&m.layout, s) * zero_dtype_bytes(m.layout.dtype), x));
            std::copy(x.begin(), x.end(), seen.begin() + (ptrdiff_t)segment.model_offset);
        }
        return zero_params_release(&m.z, unit);
    }
    ZeroResult open(int unit) {
        void* params;
        ZERO_TRY(zero_params_acquire(&m.z, unit, &params));
        return use(unit);
    }
    ZeroResult close(int unit) { return zero_params_release(&m.z, unit); }
    std::function<float(size_t)> gradient() {
        return
            [this](size_t i) { return 0.25f * seen[i] + 0.125f * (float)(i % 7) + 0.5f * (float)world.rank; };
    }
    /* GPT-2: unit 0 is the tied embedding, open from first to last; layer l + 1 is acquired before l is released */
    ZeroResult gpt2_step(int micros) {
        const int last = m.layout.units_count - 1;
        for (int micro = 0; micro < micros; micro++) {
            ZERO_TRY(zero_begin(&m.z, micro, micros, 1.0 / micros));
            ZERO_TRY(open(0));
            ZERO_TRY(open(1));
            for (int l = 1; l < last; l++) {
                ZERO_TRY(open(l + 1));
                ZERO_TRY(use(l));
                ZERO_TRY(close(l));
            }
            ZERO_TRY(m.put(0, gradient()));
            ZERO_TRY(m.give(last, gradient()));
            ZERO_TRY(close(last));
            for (int l = last - 1; l >= 1; l--) {
                ZERO_TRY(open(l));
                ZERO_TRY(m.give(l, gradient()));
                ZERO_TRY(close(l));
            }
            ZERO_TRY(use(0));
            ZERO_TRY(m.give(0, gradient()));
            ZERO_TRY(close(0));
        }
        return zero_update(&m.z, 0.01);
    }
    /* legal calls in an order that no prefetch can guess; the same on all ranks and in all stages */
    ZeroResult random_step(uint64_t* random) {
        const int units = m.layout.units_count;
        auto draw = [&](int below) { return (int)((*random = zero_mix(*random + 1)) % (uint64_t)below); };
        const int micros = 1 + draw(2);
        for (int micro = 0; micro < micros; micro++) {
            std::vector<int> order(units);
            ZERO_TRY(zero_begin(&m.z, micro, micros, 1.0 / micros));
            for (int visit = 0; visit < 2 * units; visit++) {
                const int a = draw(units), b = draw(units);
                ZERO_TRY(open(a));
                if (a != b) ZERO_TRY(open(b));
                ZERO_TRY(close(a));
                if (a != b) ZERO_TRY(close(b));
            }
            for (int u = 0; u < units; u++) order[u] = u;
            for (int u = units - 1; u > 0; u--) std::swap(order[u], order[draw(u + 1)]);
            for (int u : order) {
                ZERO_TRY(open(u));
                ZERO_TRY(m.give(u, gradient()));
                if (draw(2)) ZERO_TRY(use(u));
                ZERO_TRY(close(u));
            }
        }
        ZERO_TRY(zero_grad_norm(&m.z, NULL));
        if (draw(2)) ZERO_TRY(use(draw(units))); // the old parameters, before the update
        ZERO_TRY(zero_update(&m.z, 0.01));
        for (int visit = draw(3); visit > 0; visit--) ZERO_TRY(use(draw(units))); // evaluation
        return zero_ok();
    }
};

static ZeroConfig ordered(int stage, int overlap, const int* held) {
    ZeroConfig config = zero_config();
    config.stage = stage;
    config.overlap = overlap;
    config.reduction = ZERO_REDUCE_ORDERED;
    config.accumulation = ZERO_ACCUMULATE_MICRO;
    config.held_units = held;
    config.held_units_count = held != NULL;
    return config;
}

#ifdef CUDA_CPU
static const std::vector<const char*> STREAM_MODES = {"eager", "lazy", "rush:1"};
#else
static const std::vector<const char*> STREAM_MODES = {"eager"}; // a GPU takes no orders
#endif

/* A tied embedding open across layers, and calls in any order: every stage gives the bits of stage 1. */
TEST(Stages, UnitsThatComeAndGoGiveTheBitsOfStage1) {
    const int held = 0;
    for (const char* mode : STREAM_MODES)
        for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
            for (int seed = 0; seed < 4; seed++) { // 0: GPT-2's pattern
                std::vector<float> expected, p, seen;
                setenv("CUDA_CPU_STREAMS", mode, 1);
#ifdef CUDA_CPU
                cudaDeviceReset();
#endif
                for (int run = 0; run < 6; run++) {
                    const int stages[] = {1, 0, 2, 2, 3, 3};
                    Model m(ordered(stages[run], run % 2, seed == 0 ? &held : NULL), dtype,
                            {300, 7, 100, 33, 100, 34, 64, 1, 5}, 0, 1);
                    OK(m.result);
                    Walker walker(m);
                    uint64_t random = (uint64_t)seed;
                    OK(walker.start());
                    for (int step = 0; step < 3; step++)
                        OK(seed == 0 ? walker.gpt2_step(2) : walker.random_step(&random));
                    OK(m.params(run == 0 ? &expected : &p));
                    if (run == 0) seen = walker.seen;
                    if (run == 0) continue;
                    ASSERT_EQ(memcmp(expected.data(), p.data(), p.size() * sizeof(float)), 0)
                        << "stage " << stages[run] << " overlap " << run % 2 << " seed " << seed << " "
                        << mode;
                    ASSERT_EQ(memcmp(seen.data(), walker.seen.data(), seen.size() * sizeof(float)), 0);
                }
                unsetenv("CUDA_CPU_STREAMS");
#ifdef CUDA_CPU
                cudaDeviceReset();
#endif
            }
}

/* With overlap the neighbour's gather has been issued before anybody acquires it; without it has not. */
TEST(Stages, TheNextUnitIsFetchedEarly) {
    if (world.ranks == 1) return; // nothing is sharded
    for (int overlap = 0; overlap <= 1; overlap++) {
        void* params;
        Model m(ordered(3, overlap, NULL), ZERO_FP32, {100, 1, 100, 2, 100, 3}, 0, 1);
        OK(m.result);
        OK(zero_params_acquire(&m.z, 0, &params));
        const ZeroSlot* next = zero_slots_find(&m.z.params_slots, 1);
        ASSERT_EQ(next != NULL, overlap == 1);
        if (next) {
            EXPECT_EQ(next->pending, 1);
            EXPECT_EQ(next->open, 0);
        }
        OK(zero_params_release(&m.z, 0));
    }
}

/* check_use: what must not be read any more, or was never written, is NaN. */
TEST(Stages, MisuseOfSlotsShowsAsNaN) {
    if (world.ranks == 1) return;
    for (int stage = 2; stage <= 3; stage++) {
        ZeroConfig config = ordered(stage, 1, NULL);
        ZeroReport report;
        std::vector<float> x(10);
        void* pointer;
        int add;
        config.check_use = 1;
        Model m(config, ZERO_FP32, {10, 7, 10, 7, 10, 7}, 0, 1);
        OK(m.result);
        if (stage == 3) { // the pointer of a unit that was released; its neighbour has been fetched before
            OK(zero_params_acquire(&m.z, 0, &pointer));
            OK(m.read(pointer, x));
            for (float value : x) ASSERT_EQ(value, 0.0f);
            OK(zero_params_release(&m.z, 0));
            OK(m.read(pointer, x));
            for (float value : x) ASSERT_TRUE(std::isnan(value));
        }
        OK(zero_begin(&m.z, 0, 1, 1.0));
        OK(m.give(2, [](size_t) { return 1.0f; }));
        OK(zero_grads_acquire(&m.z, 1, &pointer, &add)); // one tensor is written, the second is forgotten
        OK(m.write(pointer, std::vector<float>(10, 1.0f)));
        OK(zero_grads_ready(&m.z, 1));
        OK(m.give(0, [](size_t) { return 1.0f; }));
        OK(zero_update(&m.z, 1.0));
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(report.skipped, 1u) << "stage " << stage;
    }
}

/* NCCL sees counts only: units of one size in another order on one rank are found when replicas are compared. */
TEST(Stages, AnotherOrderOnOneRankIsFound) {
    if (world.ranks == 1) return;
    for (int stage = 1; stage <= 3; stage++)
        for (int swap = 0; swap <= 1; swap++) {
            Model m(sgd(stage), ZERO_FP32, {64, 0, 64, 0, 64}, 0, 1);
            const int other = swap && world.rank == world.ranks - 1;
            OK(m.result);
            OK(zero_begin(&m.z, 0, 1, 1.0));
            for (int unit : {2, other ? 0 : 1, other ? 1 : 0}) OK(m.give(unit, [](size_t) { return 1.0f; }));
            OK(zero_update(&m.z, 1.0));
            const ZeroResult found = zero_check_replicas(&m.z, NULL);
            EXPECT_EQ(found.code, swap ? ZERO_ERROR_ORDER : ZERO_OK)
                << "stage " << stage << ": " << found.text;
            const std::string words =
                "rank " + std::to_string(world.ranks - 1) + " of " + std::to_string(world.ranks);
            EXPECT_EQ(std::string(found.text).find(words) == 0, swap == 1) << found.text;
        }
}

int main(int argc, char** argv) {
    if (start_ranks(argc, argv) != 0) return 1;
    int failed = RUN_ALL_TESTS();
    zero_world_finish(&world);
    return failed;
}
