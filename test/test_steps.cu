/* test/test_steps.cu - steps that are not like others: frozen segments, steps that a rank drops, calls after a failed
   zero_init. mpirun -np N build/test/test_steps. */
#include "model.h"

static const char* const REDUCTIONS[] = {"nccl", "ordered", "allreduce"};

// Every stage with what it can reduce by, each micro-step or once a step, with overlap and without.
static std::vector<ZeroConfig> all_ways() {
    std::vector<ZeroConfig> ways;
    for (int stage = 0; stage <= 3; stage++)
        for (int kind = 0; kind < 12; kind++) {
            ZeroConfig c = zero_config();
            c.stage = stage;
            c.reduction = (ZeroReduction)(kind % 3);
            c.accumulation = kind / 3 % 2 ? ZERO_ACCUMULATE_MICRO : ZERO_ACCUMULATE_STEP;
            c.overlap = kind / 6;
            if (c.reduction == ZERO_REDUCE_ALLREDUCE && (stage > 0 || kind / 3 % 2)) continue;
            if (stage >= 2 && kind / 3 % 2) continue; // it has no choice
            ways.push_back(c);
        }
    return ways;
}

static std::string name_of(const ZeroConfig& c) {
    return "stage " + std::to_string(c.stage) + " -R " + REDUCTIONS[c.reduction] + " -A " +
           std::to_string(c.accumulation) + " -O " + std::to_string(c.overlap);
}

// Small whole numbers, others for each step, micro-step and rank: sums are exact in any order.
static float gradient(size_t i, int step, int micro, int rank) {
    return (float)((i * 7 + (size_t)(step * 3 + micro * 5 + rank)) % 9) - 4.0f;
}

/* ------------------------------------------------------------------ frozen segments */

// Three units of two segments: of the first one segment is frozen, the second whole, of the third none.
struct Frozen : Model {
    std::vector<char> is_frozen; // of elements, by model index
    Frozen(const ZeroConfig& config, ZeroDtype dtype, size_t bucket_bytes, int units_apart)
        : Model(config, dtype, {}, bucket_bytes, units_apart) {
        const size_t counts[] = {300, 70, 5000, 129, 64, 1000};
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig layout_config = zero_layout_config(world.ranks, dtype);
        for (int s = 0; s < 6; s++) {
            segments.push_back(zero_segment("tensor", counts[s], s / 2));
            if (s >= 1 && s <= 3) segments.back().lr_factor = 0.0f;
            is_frozen.insert(is_frozen.end(), counts[s], s >= 1 && s <= 3);
        }
        layout_config.bucket_bytes = bucket_bytes;
        layout_config.units_apart = units_apart || config.stage >= 2;
        zero_layout_free(&layout);
        result = zero_layout(&layout, segments.data(), 6, &layout_config);
        if (result.code == ZERO_OK) result = create(config);
        if (result.code == ZERO_OK) result = start();
    }
    ZeroResult start() {
        for (int s = 0; s < 6; s++) {
            std::vector<float> x(layout.segments[s].count, 0.5f);
            std::vector<uint16_t> halves(x.size(), upper_half(0.5f));
            ZERO_TRY(zero_params_write(&z, s, 0, x.size(),
                                       layout.dtype == ZERO_FP32 ? (void*)x.data() : (void*)halves.data()));
            ZERO_TRY_CUDA(cudaStreamSynchronize(stream));
        }
        return zero_params_changed(&z);
    }
    // way 0: the frozen unit is left out; 1: acquired and reported with NaN in it; 2: that on odd ranks alone
    ZeroResult backward(int step, int micro, int way) {
        for (int unit = 2; unit >= 0; unit--) {
            if (unit == 1 && (way == 0 || (way == 2 && world.rank % 2 == 0))) continue;
            ZERO_TRY(give(
                unit, [&](size_t i) { return is_frozen[i] ? NAN : gradient(i, step, micro, world.rank); }));
        }
        return zero_ok();
    }
    double norm_due(int step, int micros) const {
        double squares = 0.0;
        for (size_t i = 0; i < is_frozen.size(); i++) {
            double sum = 0.0;
            for (int micro = 0; micro < micros && !is_frozen[i]; micro++)
                for (int rank = 0; rank < world.ranks; rank++) sum += gradient(i, step, micro, rank);
            squares += sum * sum;
        }
        return sqrt(squares) / world.ranks;
    }
};

/* Case N5: in every stage and way of reducing, whoever reports them, frozen segments are in no norm, skip nothing, and
   neither their parameters nor their state move; what is not frozen is as if they were not there. */
TEST(Frozen, CountInNothing) {
    for (const ZeroConfig& way : all_ways())
        for (int kind = 0; kind < 6; kind++) {
            const ZeroDtype dtype = kind / 3 ? ZERO_BF16 : ZERO_FP32;
            ZeroConfig config = way;
            ZeroReport report;
            config.weight_decay = 0.1;
            Frozen m(config, dtype, kind % 3 == 1 ? 2048 : 0, kind % 3 == 2);
            OK(m.result);
            for (int step = 0; step < 3; step++) {
                for (int micro = 0; micro < 2; micro++) {
                    OK(zero_begin(&m.z, micro, 2, 1.0));
                    OK(m.backward(step, micro, step));
                }
                OK(zero_update(&m.z, 0.125));
                OK(zero_report(&m.z, &report));
                ASSERT_EQ(report.norm, (float)m.norm_due(step, 2)) << name_of(way) << " " << kind;
                ASSERT_EQ(report.skip, 0);
            }
            std::vector<float> p;
            OK(zero_check_replicas(&m.z, NULL));
            OK(m.params(&p));
            int moved = 0;
            for (size_t i = 0; i < p.size(); i++) {
                ASSERT_TRUE(!m.is_frozen[i] || p[i] == 0.5f) << name_of(way) << " element " << i;
                moved += p[i] != 0.5f;
            }
            EXPECT_GT(moved, 1300) << name_of(way);
        }
}

static std::vector<float> state_of(Frozen& m, const float* from) {
    std::vector<float> x(zero_state_count(&m.layout, m.z.config.stage));
    EXPECT_EQ(cudaStreamSynchronize(m.stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(x.data(), from, x.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
    return x;
}

/* The state of frozen elements is zero, and their masters the parameters: what checkpoints will hold. */
TEST(Frozen, StateStays) {
    for (int stage = 0; stage <= 3; stage++) {
        ZeroConfig config = zero_config();
        ZeroChunk* chunks;
        config.stage = stage;
        Frozen m(config, ZERO_BF16, 0, 0);
        OK(m.result);
        for (int step = 0; step < 2; step++) {
            OK(zero_begin(&m.z, 0, 1, 1.0));
            OK(m.backward(step, 0, 1));
            OK(zero_update(&m.z, 0.125));
        }
        const std::vector<float> exp_avg = state_of(m, m.z.exp_avg), exp_avg_sq = state_of(m, m.z.exp_avg_sq),
                                 masters = state_of(m, m.z.masters);
        std::vector<size_t> first((size_t)m.layout.buckets_count + 1);
        OK(zero_chunk_table(&m.layout, stage ? world.rank : ZERO_ALL_RANKS, 2048, &chunks, first.data()));
        for (size_t c = 0; c < first.back(); c++)
            for (size_t i = 0; i < chunks[c].count; i++) {
                const size_t at = chunks[c].state_offset + i;
                const bool frozen = m.is_frozen[chunks[c].model_offset + i];
                const bool kept = exp_avg[at] == 0 && exp_avg_sq[at] == 0 && masters[at] == 0.5f;
                ASSERT_TRUE(frozen ? kept : masters[at] != 0.0f); // which a gap or padding would be
            }
        free(chunks);
    }
}

/* A model of which nothing learns takes steps that change nothing. */
TEST(Frozen, EverythingMayBe) {
    for (const ZeroConfig& way : all_ways()) {
        std::vector<ZeroSegment> segments = {zero_segment("a", 300, 0), zero_segment("b", 5, 1)};
        ZeroLayoutConfig layout_config = zero_layout_config(world.ranks, ZERO_FP32);
        ZeroReport report;
        Model m(way, ZERO_FP32, {}, 0, 1);
        segments[0].lr_factor = segments[1].lr_factor = 0.0f;
        layout_config.units_apart = 1;
        zero_layout_free(&m.layout);
        OK(zero_layout(&m.layout, segments.data(), 2, &layout_config));
        OK(m.create(way));
        OK(zero_begin(&m.z, 0, 1, 1.0));
        OK(zero_update(&m.z, 1.0));
        OK(zero_report(&m.z, &report));
        EXPECT_EQ(report.norm, 0.0f);
        EXPECT_EQ(report.t, 1u);
    }
}

/* What is acquired is reported: a unit in the hands of a kernel must not be taken for done. */
TEST(Frozen, AnAcquiredUnitIsReported) {
    ZeroConfig config = zero_config();
    void* grads;
    int add;
    Frozen m(config, ZERO_FP32, 0, 1);
    OK(m.result);
    OK(zero_begin(&m.z, 0, 1, 1.0));
    OK(m.backward(0, 0, 0));
    OK(zero_grads_acquire(&m.z, 1, &grads, &add));
    ZeroResult result = zero_grad_norm(&m.z, NULL);
    EXPECT_EQ(result.code, ZERO_ERROR_ORDER);
    EXPECT_NE(std::string(result.text).find("unit 1 of 3"), std::string::npos) << result.text;
    OK(zero_grads_ready(&m.z, 1));
    OK(zero_update(&m.z, 1.0));
}

/* ------------------------------------------------------------------ steps that a rank drops */

// Where the rank that drops stops.
enum Place { AT_BEGIN, IN_FORWARD, IN_BACKWARD, HOLDING_A_UNIT, AT_THE_END };

struct Program : Model {
    int begins_late; // forward before zero_begin, as a program whose zero_begin stands where backward begins
    Program(const ZeroConfig& config, int late)
        : Model(config, ZERO_FP32, {300, 7, 2000, 1, 129, 64}, late ? 0 : 1024, 0), begins_late(late) {}
    ZeroResult forward(int from, int to) {
        void* params;
        for (int unit = from; unit < to; unit++) {
            ZERO_TRY(zero_params_acquire(&z, unit, &params));
            ZERO_TRY(zero_params_release(&z, unit));
        }
        return zero_ok();
    }
    ZeroResult backward(int step, int micro, int from, int to) {
        void* params;
        for (int unit = from; unit >= to; unit--) {
            ZERO_TRY(zero_params_acquire(&z, unit, &params));
            ZERO_TRY(give(unit, [&](size_t i) { return gradient(i, step, micro, world.rank); }));
            ZERO_TRY(zero_params_release(&z, unit));
        }
        return zero_ok();
    }
    // The step up to `place` of micro-step `drop_at`, and zero_drop.
    ZeroResult part_of_a_step(int step, int micros, int drop_at, Place place) {
        void* pointer;
        int add;
        for (int micro = 0; micro <= drop_at; micro++) {
            const bool here = micro == drop_at;
            if (begins_late) ZERO_TRY(forward(0, here && place == IN_FORWARD && micro > 0 ? 2 : 3));
            if (begins_late && here && place == IN_FORWARD && micro > 0) break;
            ZERO_TRY(zero_begin(&z, micro, micros, 1.0));
            if (here && place == AT_BEGIN) break;
            if (!begins_late) ZERO_TRY(forward(0, here && place == IN_FORWARD ? 2 : 3));
            if (here && place == IN_FORWARD) break;
            ZERO_TRY(backward(step, micro, 2, here && place != AT_THE_END ? 1 : 0));
            if (!here || place != HOLDING_A_UNIT) continue;
            ZERO_TRY(zero_params_acquire(&z, 0, &pointer));
            ZERO_TRY(zero_grads_acquire(&z, 0, &pointer, &add));
        }
        return zero_drop(&z);
    }
    ZeroResult whole_step(int step, int micros, ZeroReport* report) {
        for (int micro = 0; micro < micros; micro++) {
            if (begins_late) ZERO_TRY(forward(0, 3));
            ZERO_TRY(zero_begin(&z, micro, micros, 1.0));
            if (!begins_late) ZERO_TRY(forward(0, 3));
            ZERO_TRY(backward(step, micro, 2, 0));
        }
        ZERO_TRY(zero_grad_norm(&z, NULL));
        ZERO_TRY(zero_update(&z, 0.125));
        return zero_report(&z, report);
    }
    // Step 0 a usual one, step 1 dropped by `dropper` (no rank: -1), 2 and 3 usual ones; without: step 1 is not there.
    ZeroResult run(int micros, int drop_at, Place place, int without, std::vector<float>* p) {
        const int dropper = world.ranks - 1;
        ZeroReport report;
        for (int step = 0; step < 4; step++) {
            if (step == 1 && without) continue;
            if (step == 1 && world.rank == dropper) {
                ZERO_TRY(part_of_a_step(step, micros, drop_at, place));
                ZERO_TRY(zero_report(&z, &report));
            } else {
                ZERO_TRY(whole_step(step, micros, &report));
            }
            EXPECT_EQ(report.skip, step == 1 ? ZERO_SKIP_DROPPED : 0);
            EXPECT_EQ(report.drops, step == 1);
            EXPECT_EQ(std::isnan(report.norm), step == 1);
        }
        EXPECT_EQ(report.t, 3u);
        EXPECT_EQ(report.dropped, without ? 0u : 1u);
        EXPECT_EQ(report.skipped, 0u);
        ZERO_TRY(zero_check_replicas(&z, NULL)); // and the order of the collectives
        return params(p);
    }
};

/* Case N7: one rank drops a step, at any place in it; the others do as ever. The run goes on as if the step had not been. */
TEST(Drop, AStepThatOneRankDropsNeverHappened) {
    for (const ZeroConfig& config : all_ways())
        for (int late = 0; late <= 1; late++)
            for (int micros : {1, 3}) {
                std::vector<float> clean, p;
                Program undisturbed(config, late);
                OK(undisturbed.result);
                OK(undisturbed.run(micros, 0, AT_BEGIN, 1, &clean));
                for (int drop_at = 0; drop_at < micros; drop_at++)
                    for (Place place : {AT_BEGIN, IN_FORWARD, IN_BACKWARD, HOLDING_A_UNIT, AT_THE_END}) {
                        if (drop_at == 1 && place != IN_BACKWARD && place != IN_FORWARD) continue;
                        Program m(config, late);
                        OK(m.result);
                        OK(m.run(micros, drop_at, place, 0, &p));
                        ASSERT_TRUE(p == clean) << name_of(config) << (late ? " late" : "") << " micro-step "
                                                << drop_at << " of " << micros << " place " << place;
                    }
            }
}

/* The first step's order is not known, but after its first micro-step; with one rank, or where all reduces come at the end,
   there is none to know. */
TEST(Drop, TheOrderMustBeKnown) {
    for (const ZeroConfig& config : all_ways())
        for (int known = 0; known <= 1; known++) {
            const bool matters = world.ranks > 1 && (config.stage >= 2 || config.overlap);
            ZeroReport report;
            Program m(config, 0);
            OK(m.result);
            if (matters && !known) { // every rank drops: none is left alone
                OK(zero_begin(&m.z, 0, 2, 1.0));
                OK(m.forward(0, 3));
                const ZeroResult result = zero_drop(&m.z);
                EXPECT_EQ(result.code, ZERO_ERROR_ORDER) << name_of(config);
                EXPECT_NE(std::string(result.text).find("is not known"), std::string::npos) << result.text;
                continue;
            }
            if (world.rank == 0) {
                OK(m.part_of_a_step(0, 2, known, IN_BACKWARD));
                OK(zero_report(&m.z, &report));
            } else {
                OK(m.whole_step(0, 2, &report));
            }
            EXPECT_EQ(report.dropped, 1u) << name_of(config);
            OK(m.whole_step(1, 2, &report));
            EXPECT_EQ(report.t, 1u);
            OK(zero_check_replicas(&m.z, NULL));
        }
}

TEST(Drop, MisuseIsSaidInWords) {
    ZeroConfig config = zero_config();
    ZeroReport report;
    Program m(config, 0);
    OK(m.result);
    auto says = [](ZeroResult result, const char* words) {
        EXPECT_EQ(result.code, ZERO_ERROR_ORDER) << result.text;
        EXPECT_NE(std::string(result.text).find(words), std::string::npos) << result.text;
    };
    says(zero_drop(&m.z), "no step has begun");
    OK(m.whole_step(0, 1, &report));
    says(zero_drop(&m.z), "no step has begun");
    OK(zero_begin(&m.z, 0, 1, 1.0));
    OK(m.forward(1, 2)); // another unit first
    if (world.ranks > 1) says(zero_drop(&m.z), "call number 1 is another");
    OK(m.backward(1, 0, 2, 0));
    OK(zero_grad_norm(&m.z, NULL));
    says(zero_drop(&m.z), "zero_skip");
    OK(zero_update(&m.z, 1.0));
}

/* ------------------------------------------------------------------ there is no optimizer */

/* Case N25: after a zero_init that failed, and after zero_free, every call says so. */
TEST(NoOptimizer, EveryCallSaysSo) {
    ZeroOptimizer z;
    ZeroConfig config = zero_config();
    ZeroReport report;
    ZeroMemory memory = zero_memory();
    Model m(config, ZERO_FP32, {10, 3}, 0, 0);
    OK(m.result);
    uint64_t words[2] = {0, 0}, hash;
    float norm, values[10] = {};
    double loss = 0.0;
    void* pointer;
    int add, idle, open = ZERO_NO_UNIT;
    for (int freed = 0; freed <= 1; freed++) {
        config.beta1 = freed ? 0.9 : 2.0;
        ZeroResult made = zero_init(&z, &config, &m.layout, world.rank, world.comm, m.stream, &memory);
        ASSERT_EQ(made.code, freed ? ZERO_OK : ZERO_ERROR_ARGUMENT) << made.text;
        if (freed) zero_free(&z);
        const ZeroResult results[] = {zero_alloc_params(&z, NULL),
                                      zero_alloc_params(&z, values),
                                      zero_alloc_grads(&z, NULL),
                                      zero_alloc_grads(&z, values),
                                      zero_alloc_state(&z),
                                      zero_params_acquire(&z, 0, &pointer),
                                      zero_params_release(&z, 0),
                                      zero_params_settle(&z),
                                      zero_params_acquire_all(&z, &pointer),
                                      zero_params_visit(&z, 0, &open, &pointer),
                                      zero_params_write(&z, 0, 0, 10, values),
                                      zero_params_changed(&z),
                                      zero_state_changed(&z),
                                      zero_set_t(&z, 1),
                                      zero_begin(&z, 0, 1, 1.0),
                                      zero_begin_batches(&z, 0, 1, 1.0, &idle),
                                      zero_grads_acquire(&z, 0, &pointer, &add),
                                      zero_grads_ready(&z, 0),
                                      zero_add_loss(&z, &loss),
                                      zero_grad_norm(&z, &norm),
                                      zero_set_step(&z, 1, 1.0),
                                      zero_skip(&z),
                                      zero_drop(&z),
                                      zero_update(&z, 1.0),
                                      zero_report(&z, &report),
                                      zero_check_replicas(&z, &hash),
                                      zero_run_hash(&z, &hash, &hash),
                                      zero_check_settings(&z, 0),
                                      zero_exchange_words(&z, words, words)};
        for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++) {
            EXPECT_EQ(results[i].code, ZERO_ERROR_ORDER) << "call " << i << ": " << results[i].text;
            EXPECT_NE(std::string(results[i].text).find("zero_init"), std::string::npos) << results[i].text;
        }
        zero_vote(&z, 1);
        zero_micros(&z, 1);
        zero_free(&z);
    }
    EXPECT_EQ(zero_memory_total(&memory), 0u);
}

int main(int argc, char** argv) {
    if (start_ranks(argc, argv) != 0) return 1;
    int failed = RUN_ALL_TESTS();
    zero_world_finish(&world);
    return failed;
}
