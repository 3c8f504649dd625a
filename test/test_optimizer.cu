/* test/test_optimizer.cu - ZeroOptimizer on real ranks: mpirun -np N build/test/test_optimizer. Exact inputs: SGD with
   lr 1 and gradients that are small integers, so that every expected number is exact. */
#include "model.h"

/* Cases A1, A5, C9, C10: each rank's gradient is its own function of the index; every weight moves to minus the mean, on
   every rank, in every plan. */
TEST(Optimizer, EveryElementGetsTheMeanOfItsOwnGradients) {
    for (int stage = 0; stage <= 3; stage++)
        for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
            for (const Plan& plan : PLANS)
                for (int overlap = 0; overlap <= 1; overlap++) {
                    ZeroConfig config = sgd(stage);
                    std::vector<float> p;
                    config.overlap = overlap;
                    Model m(config, dtype, plan.counts, plan.bucket_bytes, plan.units_apart);
                    OK(m.result);
                    const float ranks = (float)world.ranks;
                    OK(m.step(
                        [&](size_t i) { return ranks * (float)(i % 8 + 1) + ranks * (float)world.rank; }));
                    OK(m.params(&p));
                    ASSERT_EQ(p.size(), zero_model_count(&m.layout));
                    for (size_t i = 0; i < p.size(); i++) {
                        float sum_of_ranks = ranks * (ranks - 1) / 2;
                        ASSERT_EQ(p[i], -(ranks * (float)(i % 8 + 1) + sum_of_ranks))
                            << "element " << i << " stage " << stage;
                    }
                }
}

/* Cases C2, C3: micro gradients 1, 2, 3, 4 apply 2.5; the next step starts anew. */
TEST(Optimizer, MicroStepsAddUpOnce) {
    for (int stage = 0; stage <= 3; stage++) {
        std::vector<float> p;
        Model m(sgd(stage), ZERO_FP32, {100, 33, 7}, 256, 0);
        OK(m.result);
        for (int step = 1; step <= 3; step++) {
            for (int micro = 0; micro < 4; micro++) {
                OK(zero_begin(&m.z, micro, 4, 0.25));
                OK(m.give_all([&](size_t) { return (float)(micro + 1); }));
            }
            OK(zero_update(&m.z, 1.0)); // without a norm before it
            OK(m.params(&p));
            for (float x : p) ASSERT_EQ(x, -2.5f * (float)step);
        }
    }
}

/* Cases B1, B2, B5: gradient (3, 4) everywhere reports 5 at any number of ranks, sharded or not; clip halves it. */
TEST(Optimizer, NormIsGlobalAndTheSameOnAllRanks) {
    for (int stage = 0; stage <= 3; stage++) {
        ZeroConfig config = sgd(stage);
        std::vector<float> p;
        float norm = 0.0f;
        config.max_norm = 2.5;
        Model m(config, ZERO_FP32, {1, 1}, 0, 0);
        OK(m.result);
        OK(m.step([](size_t i) { return i == 0 ? 3.0f : 4.0f; }, &norm));
        EXPECT_EQ(norm, 5.0f);
        OK(m.params(&p));
        EXPECT_NEAR(p[0], -1.5f, 1e-5);
        EXPECT_NEAR(p[1], -2.0f, 1e-5);
    }
}

/* Case A7: whatever stands in the padding of gradients never reaches norm or weights. */
TEST(Optimizer, PaddingIsNeverRead) {
    for (int stage = 0; stage <= 3; stage++) {
        std::vector<float> p;
        float norm = 0.0f;
        Model m(sgd(stage), ZERO_FP32, {73}, 0, 0);
        OK(m.result);
        ASSERT_GT(zero_padded_count(&m.layout), 73u);
        const std::vector<float> poison(zero_padded_count(&m.layout) - 73, NAN);
        if (m.z.grads) OK(m.write((float*)m.z.grads + 73, poison));
        for (int i = 0; i < m.z.grads_slots.count; i++)
            OK(m.write((float*)m.z.grads_slots.slots[i].memory + 73, poison));
        OK(m.step([](size_t) { return 1.0f; }, &norm));
        EXPECT_NEAR(norm, std::sqrt(73.0), 1e-6);
        OK(m.params(&p));
        for (float x : p) ASSERT_EQ(x, -1.0f);
    }
}

/* A caller's own buffers get their gaps zeroed, and may have offsets and units in any order. */
TEST(Optimizer, FixedOffsetsOfTheCaller) {
    ZeroSegment segments[4] = {zero_segment("a0", 5, 0), zero_segment("a1", 5, 1), zero_segment("b0", 70, 0),
                               zero_segment("b1", 70, 1)};
    const size_t offsets[4] = {1, 6, 13, 83}; // tensor-major, not aligned
    for (int units_apart = 0; units_apart <= 1; units_apart++) {
        ZeroLayoutConfig layout_config = zero_layout_config(world.ranks, ZERO_FP32);
        ZeroConfig config = zero_config();
        std::vector<float> p;
        for (int s = 0; s < 4; s++) segments[s].flat_offset = offsets[s];
        layout_config.offsets_given = 1;
        layout_config.units_apart = units_apart;
        Model m(sgd(1), ZERO_FP32, {1}, 0, 0);
        zero_free(&m.z);
        zero_layout_free(&m.layout);
        OK(zero_layout(&m.layout, segments, 4, &layout_config));
        float *params, *grads;
        const size_t bytes = zero_padded_count(&m.layout) * sizeof(float);
        ASSERT_EQ(cudaMalloc((void**)&params, bytes), cudaSuccess);
        ASSERT_EQ(cudaMalloc((void**)&grads, bytes), cudaSuccess);
        ASSERT_EQ(cudaMemset(params, 0, bytes), cudaSuccess);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); // the memset is on another stream than what follows
        config = sgd(1);
        OK(zero_init(&m.z, &config, &m.layout, world.rank, world.comm, m.stream, NULL));
        OK(zero_alloc_params(&m.z, params));
        OK(zero_alloc_grads(&m.z, grads));
        OK(zero_alloc_state(&m.z));
        std::vector<float> gap(1);
        OK(m.read(grads + 12, gap)); // between a1 and b0
        EXPECT_EQ(gap[0], 0.0f);
        OK(m.step([](size_t i) { return (float)i; }));
        OK(m.params(&p));
        for (size_t i = 0; i < p.size(); i++) ASSERT_EQ(p[i], -(float)i);
        zero_free(&m.z);
        cudaFree(params);
        cudaFree(grads);
    }
}

/* Cases D1, D2: a poisoned step on one rank is no step at all, on every rank, for every optimizer and type. */
TEST(Optimizer, APoisonedStepNeverHappened) {
    const float poisons[] = {NAN, INFINITY, -INFINITY};
    for (int stage = 0; stage <= 3; stage++)
        for (int algorithm = ZERO_ADAMW; algorithm <= ZERO_SGD; algorithm++)
            for (int type = 0; type < 3; type++) {
                std::vector<float> clean, poisoned;
                for (int with_poison = 0; with_poison <= 1; with_poison++) {
                    ZeroConfig config = zero_config();
                    ZeroReport report;
                    config.stage = stage;
                    config.algorithm = (ZeroAlgorithm)algorithm;
                    config.masters = type == 1;
                    config.weight_decay = 0.01;
                    Model m(config, type ? ZERO_BF16 : ZERO_FP32, {50, 3}, 0, 0);
                    OK(m.result);
                    for (int step = 1; step <= 4; step++) {
                        const float poison = poisons[(algorithm + type) % 3];
                        if (step == 3 && !with_poison) continue;
                        OK(m.step(
                            [&](size_t i) {
                                return step == 3 && i == 52 && world.rank == world.ranks - 1
                                           ? poison
                                           : (float)(i % 5) - 1.0f;
                            },
                            NULL, 0.125));
                    }
                    OK(zero_report(&m.z, &report));
                    EXPECT_EQ(report.t, 3u);
                    EXPECT_EQ(report.skipped, (uint64_t)with_poison);
                    EXPECT_EQ(report.skipped_in_row, 0u);
                    OK(m.params(with_poison ? &poisoned : &clean));
                }
                ASSERT_EQ(memcmp(clean.data(), poisoned.data(), clean.size() * sizeof(float)), 0)
                    << algorithm << " " << type;
            }
}

/* Case D3: a run of skips ends with an error, in the same step on all ranks when the norm is asked for. */
TEST(Optimizer, TooManySkipsAreAnError) {
    ZeroConfig config = sgd(1);
    float norm;
    config.skip_limit = 3;
    Model m(config, ZERO_FP32, {10}, 0, 0);
    OK(m.result);
    for (int step = 1; step <= 2; step++) OK(m.step([](size_t) { return NAN; }, &norm));
    OK(zero_begin(&m.z, 0, 1, 1.0));
    OK(m.give_all([](size_t) { return NAN; }));
    ZeroResult result = zero_grad_norm(&m.z, &norm);
    EXPECT_EQ(result.code, ZERO_ERROR_SKIPS);
    EXPECT_NE(std::string(result.text).find("3 steps in a row"), std::string::npos) << result.text;
}

/* zero_skip drops a good step on all ranks; t does not count it. */
TEST(Optimizer, TheCallerMayDropAStep) {
    for (int stage = 0; stage <= 3; stage++) {
        ZeroReport report;
        std::vector<float> p;
        Model m(sgd(stage), ZERO_FP32, {10, 200}, 0, 0);
        OK(m.result);
        EXPECT_EQ(zero_skip(&m.z).code, ZERO_ERROR_ORDER);
        for (int step = 1; step <= 3; step++) {
            OK(zero_begin(&m.z, 0, 1, 1.0));
            OK(m.give_all([](size_t) { return 1.0f; }));
            OK(zero_grad_norm(&m.z, NULL));
            if (step == 2) OK(zero_skip(&m.z));
            OK(zero_update(&m.z, 1.0));
        }
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(report.t, 2u);
        EXPECT_EQ(report.dropped, 1u);
        EXPECT_EQ(report.skipped, 0u);
        OK(m.params(&p));
        for (float x : p) ASSERT_EQ(x, -2.0f);
    }
}

/* A vote of one rank reaches all with the same step, changes no number, and also travels with a step that is skipped. */
TEST(Optimizer, AVoteIsHeardByAllInTheSameStep) {
    std::vector<float> p;
    Model m(sgd(1), ZERO_FP32, {10, 200}, 0, 0);
    OK(m.result);
    for (int step = 1; step <= 4; step++) {
        ZeroReport report;
        zero_vote(&m.z, (step == 2 && world.rank == world.ranks - 1) || step == 4);
        OK(m.step([&](size_t) { return step == 4 ? NAN : 1.0f; }));
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(report.votes, step == 2 ? 1 : step == 4 ? world.ranks : 0);
        EXPECT_EQ(report.skip, step == 4);
    }
    OK(m.params(&p));
    for (float x : p) ASSERT_EQ(x, -3.0f);
}

/* Case E2: weights written from outside are not undone by old masters. */
TEST(Optimizer, MastersFollowNewWeights) {
    for (int stage = 0; stage <= 3; stage++) {
        ZeroConfig config = sgd(stage);
        std::vector<float> p;
        Model m(config, ZERO_BF16, {100}, 0, 0);
        OK(m.result);
        const std::vector<uint16_t> values(100, 0x3fc0); // 1.5
        OK(zero_params_write(&m.z, 0, 0, 100, values.data()));
        ASSERT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
        OK(zero_params_changed(&m.z));
        OK(m.step([](size_t) { return 1.0f; }, NULL, 0.0));
        OK(m.params(&p));
        for (float x : p) ASSERT_EQ(x, 1.5f);
    }
}

/* zero_set_step: settings that come with the update give what settings from the start give. */
TEST(Optimizer, AStepMayBringItsOwnSettings) {
    for (int stage = 0; stage <= 3; stage++)
        for (int kind = 0; kind < 3; kind++) { // clip; a factor of the caller's; another t
            std::vector<float> from_start, with_step;
            for (int late = 0; late <= 1; late++) {
                ZeroConfig config = zero_config();
                config.stage = stage;
                if (!late)
                    config.beta1 = 0.8, config.beta2 = 0.95, config.eps = 1e-4, config.weight_decay = 0.1;
                if (!late && kind == 0) config.max_norm = 1.0;
                Model m(config, ZERO_FP32, {300, 7, 65}, 256, 0);
                OK(m.result);
                if (!late && kind == 2) OK(zero_set_t(&m.z, 9));
                for (int step = 1; step <= 3; step++) {
                    const float scale = !late && kind == 1 ? 0.5f : 1.0f;
                    OK(zero_begin(&m.z, 0, 1, 1.0));
                    OK(m.give_all([&](size_t i) { return scale * ((float)(i % 7) - 2.0f); }));
                    if (late) {
                        m.z.config.beta1 = 0.8, m.z.config.beta2 = 0.95;
                        m.z.config.eps = 1e-4, m.z.config.weight_decay = 0.1;
                        if (step != 2) OK(zero_grad_norm(&m.z, NULL));
                        if (step == 2) {
                            EXPECT_EQ(zero_set_step(&m.z, 1, -1.0).code, ZERO_ERROR_ORDER);
                        }
                        if (step == 2) OK(zero_grad_norm(&m.z, NULL));
                        m.z.config.max_norm = kind == 0 ? 1.0 : 0.0;
                        OK(zero_set_step(&m.z, (kind == 2 ? 9 : 0) + (uint64_t)step, kind == 1 ? 0.5 : -1.0));
                    }
                    OK(zero_update(&m.z, 0.01));
                }
                ZeroReport report;
                OK(zero_report(&m.z, &report));
                EXPECT_EQ(report.t, kind == 2 ? 12u : 3u);
                OK(m.params(late ? &with_step : &from_start));
            }
            ASSERT_EQ(memcmp(from_start.data(), with_step.data(), with_step.size() * sizeof(float)), 0)
                << "stage " << stage << " kind " << kind;
        }
}

TEST(Optimizer, AStepsOwnSettingsAreChecked) {
    ZeroReport report;
    std::vector<float> p;
    Model m(zero_config(), ZERO_FP32, {10}, 0, 0);
    OK(m.result);
    OK(zero_begin(&m.z, 0, 1, 1.0));
    OK(m.give_all([](size_t) { return NAN; }));
    OK(zero_grad_norm(&m.z, NULL));
    EXPECT_EQ(zero_set_step(&m.z, 0, -1.0).code, ZERO_ERROR_ARGUMENT);
    EXPECT_EQ(zero_set_step(&m.z, 1, NAN).code, ZERO_ERROR_ARGUMENT);
    EXPECT_EQ(zero_set_step(&m.z, 1, INFINITY).code, ZERO_ERROR_ARGUMENT);
    m.z.config.beta1 = 1.0;
    EXPECT_EQ(zero_set_step(&m.z, 1, -1.0).code, ZERO_ERROR_ARGUMENT);
    m.z.config.beta1 = 0.9;
    OK(zero_set_step(&m.z, 7, 1.0)); // what is skipped stays skipped
    OK(zero_update(&m.z, 1.0));
    OK(zero_report(&m.z, &report));
    EXPECT_EQ(report.t, 0u);
    EXPECT_EQ(report.skipped, 1u);
    OK(m.params(&p));
    for (float x : p) ASSERT_EQ(x, 0.0f);

    OK(zero_begin(&m.z, 0, 1, 1.0)); // good, but too large for the factor that the caller gives
    OK(m.give_all([](size_t) { return 1e15f; }));
    OK(zero_grad_norm(&m.z, NULL));
    OK(zero_set_step(&m.z, 5, 1e30));
    OK(zero_update(&m.z, 1.0));
    OK(zero_report(&m.z, &report));
    EXPECT_EQ(report.t, 0u);
    EXPECT_EQ(report.skipped, 2u);
    EXPECT_EQ(report.skipped_in_row, 2u);
}

/* zero_state_changed: this rank's masters (fp32: its slices of the params) give back the params of all ranks. */
TEST(Optimizer, ParamsComeBackFromTheState) {
    for (int stage = 0; stage <= 3; stage++)
        for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
            for (const Plan& plan : PLANS) {
                ZeroConfig config = zero_config();
                std::vector<float> before, after;
                config.stage = stage;
                Model old(config, dtype, plan.counts, plan.bucket_bytes, plan.units_apart);
                Model m(config, dtype, plan.counts, plan.bucket_bytes, plan.units_apart);
                OK(old.result);
                OK(m.result);
                OK(old.step([](size_t i) { return (float)(i % 11) - 5.0f; }, NULL, 0.01));
                OK(old.params(&before));
                const size_t bytes = zero_dtype_bytes(dtype);
                if (old.z.masters)
                    OK([&]() -> ZeroResult {
                        ZERO_TRY_CUDA(cudaMemcpyAsync(m.z.masters, old.z.masters, zero_state_bytes(&old.z),
                                                      cudaMemcpyDeviceToDevice, m.stream));
                        return zero_ok();
                    }());
                else
                    for (int b = 0; b < m.layout.buckets_count; b++)
                        OK([&]() -> ZeroResult {
                            const int sharded = m.z.schedule.params_sharded;
                            const size_t first = sharded ? zero_shard_offset(&m.layout, b)
                                                 : stage ? zero_slice_offset(&m.layout, b, world.rank)
                                                         : m.layout.buckets[b].flat_offset;
                            const size_t count =
                                stage ? zero_slice_count(&m.layout, b) : m.layout.buckets[b].count;
                            ZERO_TRY_CUDA(cudaMemcpyAsync((char*)m.z.params + bytes * first,
                                                          (char*)old.z.params + bytes * first, bytes * count,
                                                          cudaMemcpyDeviceToDevice, m.stream));
                            return zero_ok();
                        }());
                OK(zero_state_changed(&m.z));
                OK(m.params(&after));
                ASSERT_EQ(memcmp(before.data(), after.data(), after.size() * sizeof(float)), 0);
                OK(zero_begin(&m.z, 0, 1, 1.0));
                EXPECT_EQ(zero_state_changed(&m.z).code, ZERO_ERROR_ORDER);
            }
}

/* zero_check_settings: one rank with another plan, stage or number is refused on every rank. */
TEST(Optimizer, RanksMustAgreeOnTheirSettings) {
    const int odd = world.rank == world.ranks - 1 && world.ranks > 1;
    const ZeroCode expected = world.ranks > 1 ? ZERO_ERROR_ARGUMENT : ZERO_OK;
    ZeroConfig config = zero_config();
    Model same(config, ZERO_FP32, {300, 7}, 256, 0);
    OK(same.result);
    OK(zero_check_settings(&same.z, 5));
    EXPECT_EQ(zero_check_settings(&same.z, odd ? 6 : 5).code, expected);
    config.overlap = !odd;
    Model overlap(config, ZERO_FP32, {300, 7}, 256, 0);
    OK(overlap.result);
    EXPECT_EQ(zero_check_settings(&overlap.z, 5).code, expected);
    static const int held_unit = 0;
    config = zero_config();
    config.stage = 3;
    config.held_units = &held_unit;
    config.held_units_count = odd;
    Model held(config, ZERO_FP32, {300, 7, 5}, 256, 0);
    OK(held.result);
    EXPECT_EQ(zero_check_settings(&held.z, 5).code, expected);
    Model plan(zero_config(), ZERO_FP32, {300, 7}, odd ? 0 : 256, 0);
    OK(plan.result);
    ZeroResult result = zero_check_settings(&plan.z, 5);
    EXPECT_EQ(result.code, expected);
    if (world.ranks > 1) {
        EXPECT_NE(std::string(result.text).find("start all ranks alike"), std::string::npos) << result.text;
    }
}

static uint64_t expected_hash(const std::vector<float>& p) {
    uint64_t hash = 0;
    for (size_t i = 0; i < p.size(); i++) {
        uint32_t bits;
        memcpy(&bits, &p[i], 4);
        hash += zero_mix((uint64_t)bits << 32 ^ zero_mix(i));
    }
    return hash;
}

/* Case C10: zero_check_replicas gives the hash of the model, whatever the plan, and sees one element on one rank. */
TEST(Optimizer, ReplicasAreCompared) {
    for (int stage = 0; stage <= 3; stage++)
        for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
            for (const Plan& plan : PLANS) {
                ZeroConfig config = zero_config();
                std::vector<float> p;
                uint64_t hash = 1;
                config.stage = stage;
                Model m(config, dtype, plan.counts, plan.bucket_bytes, plan.units_apart);
                OK(m.result);
                OK(m.step([](size_t i) { return (float)(i % 11) - 5.0f; }, NULL, 0.01));
                OK(zero_check_replicas(&m.z, &hash));
                OK(m.params(&p));
                ASSERT_EQ(hash, expected_hash(p));
                OK(zero_begin(&m.z, 0, 1, 1.0));
                EXPECT_EQ(zero_check_replicas(&m.z, &hash).code, ZERO_ERROR_ORDER);
                OK(m.give_all([](size_t) { return 0.0f; }));
                OK(zero_update(&m.z, 0.0));

                if (m.z.schedule.params_sharded) continue; // no replicas that could differ
                const ZeroSegment& segment = m.layout.segments[0];
                const size_t at = segment.flat_offset + segment.count - 1;
                if (world.rank == world.ranks - 1)
                    OK(m.write((char*)m.z.params + at * zero_dtype_bytes(dtype), {42.0f}));
                ZeroResult result = zero_check_replicas(&m.z, NULL);
                EXPECT_EQ(result.code, world.ranks > 1 ? ZERO_ERROR_REPLICAS : ZERO_OK) << result.text;
                if (world.ranks > 1) {
                    EXPECT_NE(std::string(result.text).find("differ"), std::string::npos);
                }
            }
}

#ifdef CUDA_CPU
namespace cuda_cpu {
void reload_options(); /* dev/cpu/internal.h: the environment is read again */
}
static void next_malloc_fails() {
    setenv("CUDA_CPU_FAIL", "cudaMalloc:1", 1);
    cuda_cpu::reload_options();
    unsetenv("CUDA_CPU_FAIL");
}
#else
static void next_malloc_fails() {}
#endif

/* In one message, in several, and two words at a time where one rank has no device memory left. */
TEST(Optimizer, WordsOfAllRanksAreGathered) {
    Model m(sgd(1), ZERO_FP32, {10}, 0, 0);
    OK(m.result);
    const size_t ranks = (size_t)world.ranks, most = ZERO_GATHER_BYTES / sizeof(uint64_t) / ranks;
    for (int fails = 0; fails <= 1; fails++)
        for (size_t count : {(size_t)1, (size_t)2, (size_t)3, (size_t)1001, most, 2 * most + 5}) {
            std::vector<uint64_t> own(count), all(std::max(count, (size_t)2) * ranks);
            const size_t before = m.memory.held_bytes[ZERO_MEMORY_SCRATCH];
            if (fails && count > 1001) continue;
            if (fails && count > 2 && world.rank == world.ranks - 1) next_malloc_fails();
            for (size_t i = 0; i < count; i++) own[i] = zero_mix(i * ranks + (size_t)world.rank);
            OK(zero_gather_words(&m.z, own.data(), count, all.data()));
            for (size_t r = 0; r < ranks; r++)
                for (size_t i = 0; i < count; i++)
                    ASSERT_EQ(all[r * count + i], zero_mix(i * ranks + r)) << "rank " << r << " word " << i;
            EXPECT_EQ(m.memory.held_bytes[ZERO_MEMORY_SCRATCH], before);
        }
}

TEST(Optimizer, LossesAreAddedUpOverRanksAndMicroSteps) {
    ZeroReport report;
    double mine = world.rank == 0 ? 1e17 : world.rank == world.ranks - 1 ? -1e17 : 0.125, *device;
    Model m(sgd(1), ZERO_FP32, {10}, 0, 0);
    OK(m.result);
    ASSERT_EQ(cudaMalloc((void**)&device, sizeof(double)), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(device, &mine, sizeof(double), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(zero_add_loss(&m.z, device).code, ZERO_ERROR_ORDER);
    for (int micros = 1; micros <= 3; micros++) {
        for (int micro = 0; micro < micros; micro++) {
            OK(zero_begin(&m.z, micro, micros, 1.0));
            OK(m.give_all([](size_t) { return 1.0f; }));
            OK(zero_add_loss(&m.z, device));
        }
        OK(zero_update(&m.z, 1.0));
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(report.loss_sum, world.ranks == 1 ? 1e17 * micros : 0.125 * (world.ranks - 2) * micros);
    }
    cudaFree(device);
}

/* Misuse is an error with a text that names the unit, and never a hang: every rank makes the same mistake. */
TEST(Optimizer, MisuseIsSaidInWords) {
    void* pointer;
    int add;
    Model m(sgd(1), ZERO_FP32, {10, 1, 20, 2, 30}, 0, 0);
    OK(m.result);
    auto says = [](ZeroResult result, ZeroCode code, const char* words) {
        EXPECT_EQ(result.code, code) << result.text;
        EXPECT_NE(std::string(result.text).find(words), std::string::npos) << result.text;
    };
    says(zero_grads_acquire(&m.z, 0, &pointer, &add), ZERO_ERROR_ORDER, "before zero_begin");
    says(zero_grads_ready(&m.z, 0), ZERO_ERROR_ORDER, "before zero_begin");
    says(zero_update(&m.z, 1.0), ZERO_ERROR_ORDER, "zero_grad_norm");
    says(zero_params_release(&m.z, 1), ZERO_ERROR_ORDER, "unit 1 is released more often");
    says(zero_params_acquire(&m.z, 3, &pointer), ZERO_ERROR_ARGUMENT, "unit 3");
    says(zero_begin(&m.z, 1, 2, 1.0), ZERO_ERROR_ORDER, "0 of 2 is next");
    says(zero_begin(&m.z, 0, 0, 1.0), ZERO_ERROR_ARGUMENT, "0 of 0");
    says(zero_begin(&m.z, 0, 1, NAN), ZERO_ERROR_ARGUMENT, "grad_scale");
    OK(zero_begin(&m.z, 0, 2, 1.0));
    OK(zero_grads_acquire(&m.z, 2, &pointer, &add));
    EXPECT_EQ(add, 0);
    OK(zero_grads_acquire(&m.z, 2, &pointer, &add)); // again before its ready
    EXPECT_EQ(add, 1);
    OK(m.give(2, [](size_t) { return 0.0f; }));
    says(zero_grads_ready(&m.z, 2), ZERO_ERROR_ORDER, "unit 2: zero_grads_ready twice");
    says(zero_grads_acquire(&m.z, 2, &pointer, &add), ZERO_ERROR_ORDER, "after zero_grads_ready");
    says(zero_begin(&m.z, 1, 2, 1.0), ZERO_ERROR_ORDER, "unit 0 of 3 (tensor ...) was not reported");
    OK(m.give(0, [](size_t) { return 0.0f; }));
    OK(m.give(1, [](size_t) { return 0.0f; }));
    says(zero_grad_norm(&m.z, NULL), ZERO_ERROR_ORDER, "micro-step 0 of 2");
    OK(zero_begin(&m.z, 1, 2, 1.0));
    OK(m.give(0, [](size_t) { return 0.0f; }));
    says(zero_update(&m.z, 1.0), ZERO_ERROR_ORDER, "unit 1 of 3");
    OK(m.give(1, [](size_t) { return 0.0f; }));
    OK(m.give(2, [](size_t) { return 0.0f; }));
    says(zero_update(&m.z, NAN), ZERO_ERROR_ARGUMENT, "lr");
    OK(zero_update(&m.z, 1.0));
}

TEST(Optimizer, BadSettingsAreRefused) {
    struct {
        std::function<void(ZeroConfig*)> spoil;
        const char* words;
    } cases[] = {
        {[](ZeroConfig* c) { c->stage = 4; }, "stage 4"},
        {[](ZeroConfig* c) { c->stage = -1; }, "stage -1"},
        {[](ZeroConfig* c) { c->algorithm = (ZeroAlgorithm)7; }, "algorithm 7 is not known"},
        {[](ZeroConfig* c) { c->reduction = (ZeroReduction)7; }, "reduction 7 is not known"},
        {[](ZeroConfig* c) { c->accumulation = (ZeroAccumulation)7; }, "accumulation 7 is not known"},
        {[](ZeroConfig* c) {
             static const int unit = 5;
             c->stage = 3, c->held_units = &unit, c->held_units_count = 1;
         },
         "held unit 5; the layout has units 0 .. 0"},
        {[](ZeroConfig* c) { c->stage = 2, c->held_units_count = -1; }, "-1 held units"},
        {[](ZeroConfig* c) { c->stage = 3, c->held_units_count = 1; }, "1 held units at"},
        {[](ZeroConfig* c) { c->reduction = ZERO_REDUCE_ALLREDUCE; },
         "works in stage 0, once a step; not in stage 1"},
        {[](ZeroConfig* c) {
             c->beta1 = 1.0;
             c->algorithm = ZERO_ADAMW;
         },
         "below 1"},
        {[](ZeroConfig* c) { c->eps = NAN; }, "eps is nan"},
        {[](ZeroConfig* c) { c->max_norm = -1.0; }, "max_norm is -1"}};
    for (auto& bad : cases) {
        ZeroConfig config = sgd(1);
        bad.spoil(&config);
        Model m(config, ZERO_FP32, {10}, 0, 0);
        EXPECT_EQ(m.result.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(std::string(m.result.text).find(bad.words), std::string::npos) << m.result.text;
        EXPECT_EQ(zero_memory_total(&m.memory), 0u);
    }
}

#ifdef CUDA_CPU
extern "C" size_t cudaCpuLiveBytes(void);

/* In lazy mode nothing runs until the host waits: a step that asks for no number leaves everything queued. */
TEST(Optimizer, AStepThatAsksForNothingWaitsForNothing) {
    setenv("CUDA_CPU_STREAMS", "lazy", 1);
    cudaDeviceReset();
    {
        Model m(sgd(1), ZERO_FP32, {100}, 0, 0);
        OK(m.result);
        ASSERT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
        OK(zero_begin(&m.z, 0, 1, 1.0));
        void* grads;
        int add;
        OK(zero_grads_acquire(&m.z, 0, &grads, &add));
        ASSERT_EQ(cudaMemsetAsync(grads, 0, 400, m.stream), cudaSuccess);
        OK(zero_grads_ready(&m.z, 0));
        OK(zero_grad_norm(&m.z, NULL));
        OK(zero_update(&m.z, 1.0));
        EXPECT_EQ(cudaStreamQuery(m.stream), cudaErrorNotReady)
            << "something in the step waited for the stream";
        ASSERT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
    }
    unsetenv("CUDA_CPU_STREAMS");
    cudaDeviceReset();
}

/* Deliver: buckets are reduced while backward runs and gathered while the next forward starts; with overlap 0 at the end.
   In lazy mode a stream that was given nothing says so, and work that nobody waits for does not run. */
TEST(Optimizer, OverlapIsWhatItSays) {
    if (world.ranks == 1) return;
    for (int overlap = 0; overlap <= 1; overlap++) {
        setenv("CUDA_CPU_STREAMS", "lazy", 1);
        cudaDeviceReset();
        {
            ZeroConfig config = sgd(1);
            config.overlap = overlap;
            Model m(config, ZERO_FP32, {1000, 10, 1000, 10, 1000, 10}, 0, 1);
            OK(m.result);
            ASSERT_EQ(m.layout.buckets_count, 3);
            OK(zero_comm_drain(&m.z.comm));
            OK(zero_begin(&m.z, 0, 1, 1.0));
            OK(m.give(2, [](size_t) { return 1.0f; }));
            EXPECT_EQ(cudaStreamQuery(m.z.comm.stream), overlap ? cudaErrorNotReady : cudaSuccess)
                << "after the first unit of backward";
            OK(m.give(1, [](size_t) { return 1.0f; }));
            OK(m.give(0, [](size_t) { return 1.0f; }));
            OK(zero_update(&m.z, 1.0));
            ASSERT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
            EXPECT_EQ(cudaStreamQuery(m.z.comm.stream), overlap ? cudaErrorNotReady : cudaSuccess)
                << "the update's stream waits for the gathers exactly without overlap";
            (void)cudaGetLastError();
            OK(zero_comm_drain(&m.z.comm));
        }
        unsetenv("CUDA_CPU_STREAMS");
        cudaDeviceReset();
    }
}

/* A host that never asks and runs ahead of the device still hears of too many skips. */
TEST(Optimizer, SkipsAreNoticedByAHostThatRunsAhead) {
    for (const char* mode : {"eager", "lazy"}) {
        if (world.ranks > 1 && strcmp(mode, "lazy") == 0) continue; // ranks may hear of it in different steps
        setenv("CUDA_CPU_STREAMS", mode, 1);
        cudaDeviceReset();
        {
            ZeroConfig config = sgd(1);
            ZeroResult result = zero_ok();
            int step = 0;
            config.skip_limit = 5;
            Model m(config, ZERO_FP32, {10}, 0, 0);
            OK(m.result);
            OK(zero_comm_drain(&m.z.comm));
            ASSERT_EQ(cudaMemsetAsync(m.z.grads, 0xff, 40, m.stream), cudaSuccess); // NaN
            for (; step < 100 && result.code == ZERO_OK; step++) {
                void* grads;
                int add;
                OK(zero_begin(&m.z, 0, 1, 1.0));
                OK(zero_grads_acquire(&m.z, 0, &grads, &add));
                OK(zero_grads_ready(&m.z, 0));
                result = zero_grad_norm(&m.z, NULL);
                if (result.code == ZERO_OK) result = zero_update(&m.z, 1.0);
            }
            EXPECT_EQ(result.code, ZERO_ERROR_SKIPS) << mode << ": " << step << " steps";
        }
        unsetenv("CUDA_CPU_STREAMS");
        cudaDeviceReset();
    }
}

/* The exposed time is there when ranks exchange data, and nothing without timing or with one rank. */
TEST(Optimizer, ExposedTimeIsMeasured) {
    for (int timing = 0; timing <= 1; timing++) {
        ZeroConfig config = sgd(1);
        ZeroReport report;
        config.timing = timing;
        Model m(config, ZERO_FP32, {100000}, 0, 0);
        OK(m.result);
        OK(m.step([](size_t) { return 1.0f; }));
        OK(zero_report(&m.z, &report));
        if (timing && world.ranks > 1) {
            EXPECT_GT(report.exposed_ms, 0.0);
        } else {
            EXPECT_EQ(report.exposed_ms, 0.0);
        }
    }
}

/* No call leaves "not ready" or anything else behind as the caller's last error. */
TEST(Optimizer, TheCallersLastErrorStaysClean) {
    setenv("CUDA_CPU_STREAMS", "lazy", 1);
    cudaDeviceReset();
    {
        float norm;
        ZeroReport report;
        Model m(sgd(1), ZERO_FP32, {100}, 0, 0);
        OK(m.result);
        for (int step = 0; step < 3; step++) {
            OK(m.step([](size_t) { return 1.0f; }, step == 1 ? &norm : NULL));
            EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "step " << step;
        }
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
        zero_free(&m.z);
        EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    }
    unsetenv("CUDA_CPU_STREAMS");
    cudaDeviceReset();
}

static ZeroResult one_run(int stage, ZeroReduction reduction) {
    float norm;
    ZeroConfig config = zero_config();
    config.stage = stage;
    config.reduction = reduction;
    config.timing = 1;
    Model m(config, ZERO_BF16, {100, 33, 7}, 256, 0);
    ZERO_TRY(m.result);
    ZERO_TRY(zero_check_settings(&m.z, 1));
    for (int step = 0; step < 2; step++) {
        ZeroReport report;
        ZERO_TRY(m.step([](size_t i) { return (float)i; }, &norm));
        ZERO_TRY(zero_report(&m.z, &report));
    }
    ZERO_TRY(zero_begin(&m.z, 0, 1, 1.0));
    ZERO_TRY(m.give_all([](size_t i) { return (float)i; }));
    ZERO_TRY(zero_grad_norm(&m.z, NULL));
    ZERO_TRY(zero_set_step(&m.z, 1, 1.0));
    ZERO_TRY(zero_update(&m.z, 1.0));
    ZERO_TRY(zero_check_replicas(&m.z, NULL));
    return zero_state_changed(&m.z);
}

/* Every call of CUDA and NCCL fails once, at each of its places: an error with the call's name, nothing leaked, no
   crash. All ranks fail alike. */
TEST(Optimizer, EveryCallMayFail) {
    const char* calls[] = {"cudaMalloc",
                           "cudaMallocHost",
                           "cudaMemcpy",
                           "cudaMemcpyAsync",
                           "cudaMemsetAsync",
                           "cudaLaunchKernelEx",
                           "cudaStreamCreateWithFlags",
                           "cudaEventCreateWithFlags",
                           "cudaEventCreate",
                           "cudaEventRecord",
                           "cudaStreamWaitEvent",
                           "ncclReduceScatter",
                           "ncclAllGather",
                           "cudaEventQuery",
                           "cudaEventElapsedTime",
                           "cudaStreamSynchronize",
                           "ncclGroupStart",
                           "ncclGroupEnd",
                           "ncclSend",
                           "ncclRecv",
                           "ncclBroadcast"};
    const struct {
        int stage;
        ZeroReduction reduction;
    } runs[] = {
        {0, ZERO_REDUCE_NCCL}, {1, ZERO_REDUCE_NCCL}, {0, ZERO_REDUCE_ORDERED}, {3, ZERO_REDUCE_ORDERED}};
    for (const char* call : calls) {
        int all_failures = 0;
        for (auto& run : runs) {
            int failures = 0;
            // a rank that owns padding only launches and copies less, so the n-th call is not the same one on all ranks
            if (world.ranks > 1 &&
                (strcmp(call, "cudaLaunchKernelEx") == 0 || strcmp(call, "cudaMemcpy") == 0))
                continue;
            for (int n = 1; n < 400; n++) {
                char setting[64];
                snprintf(setting, sizeof(setting), "%s:%d", call, n);
                setenv("CUDA_CPU_FAIL", setting, 1);
                cudaDeviceReset();
                const size_t live = cudaCpuLiveBytes();
                ZeroResult result = one_run(run.stage, run.reduction);
                unsetenv("CUDA_CPU_FAIL");
                cudaDeviceReset();
                ASSERT_EQ(cudaCpuLiveBytes(), live) << setting;
                if (result.code == ZERO_OK) break;
                ASSERT_GT(strlen(result.text), 10u) << setting;
                if (strncmp(call, "nccl", 4) == 0) { // the reason is not cut off
                    ASSERT_NE(std::string(result.text).find("CUDA_CPU_FAIL"), std::string::npos)
                        << result.text;
                }
                failures++;
            }
            ASSERT_LT(failures, 399) << call;
            all_failures += failures;
        }
        if (world.ranks > 1 && strcmp(call, "cudaLaunchKernelEx") != 0 && strcmp(call, "cudaMemcpy") != 0) {
            EXPECT_GT(all_failures, 0) << call << " was never called: is it spelt right?";
        }
    }
}
#endif

int main(int argc, char** argv) {
    if (start_ranks(argc, argv) != 0) return 1;
    int failed = RUN_ALL_TESTS();
    zero_world_finish(&world);
    return failed;
}
