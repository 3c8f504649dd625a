/* test/test_grad_norm.cu - llmc_zero/grad_norm.cuh: norm, clip factor, skip, t, on one device playing all
   ranks.

   `Ranks` is a layout with one gradient buffer a rank; `norm` runs the launches as every rank would (squares of
   its own chunks, its losses), adds up the words as the all-reduce does, and finishes on every rank: all must
   agree to the bit. Built twice, without and with --use_fast_math; every expectation is the same.
*/
#include <algorithm>
#include <float.h>
#include <gtest/gtest.h>
#include <math.h>
#include <random>
#include <vector>

#include "device.h"
#include "llmc_zero/grad_norm.cuh"

namespace {

typedef std::vector<float> Floats;
typedef std::vector<uint64_t> Words;

ZeroStepSettings settings_of(int ranks, double grad_scale = 1.0, double max_norm = 0.0) {
    (void)ranks;
    ZeroStepSettings settings = {0.9, 0.999, grad_scale, max_norm, 42, 0.0};
    return settings;
}

/* ------------------------------------------------------------------ all ranks on one device */

struct Ranks {
    ZeroLayout layout;
    std::vector<std::vector<ZeroChunk>> tables; /* of each rank */
    std::vector<ZeroScalars> scalars;           /* of each rank, from step to step */
    size_t shift = 0;                           /* elements by which the gradients' base pointer is off */
    std::vector<std::vector<double>> losses;    /* of each rank */
    int drops = 0;                              /* ranks that drop the step */

    Ranks(const std::vector<size_t>& counts, int ranks, ZeroDtype dtype, size_t bucket_bytes = 0,
          size_t max_count = ZERO_CHUNK_MAX_COUNT, const std::vector<size_t>& offsets = {}) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig config = zero_layout_config(ranks, dtype);
        config.bucket_bytes = bucket_bytes;
        for (size_t count : counts) segments.push_back(zero_segment("s", count, 0));
        config.offsets_given = !offsets.empty();
        for (size_t s = 0; s < offsets.size(); s++) segments[s].flat_offset = offsets[s];
        ok(zero_layout(&layout, segments.data(), (int)segments.size(), &config));
        for (int rank = 0; rank < ranks; rank++) {
            ZeroChunk* table;
            std::vector<size_t> first((size_t)layout.buckets_count + 1);
            ok(zero_chunk_table(&layout, rank, max_count, &table, first.data()));
            tables.emplace_back(table, table + first[layout.buckets_count]);
            free(table);
        }
        scalars.assign((size_t)ranks, ZeroScalars());
    }
    ~Ranks() { zero_layout_free(&layout); }
    Ranks(const Ranks&) = delete;

    /* Model order to a flat buffer whose gaps and padding hold `padding`. */
    Floats flat(const Floats& model, float padding) const {
        Floats all(layout.padded_count, padding);
        for (int s = 0; s < layout.segments_count; s++)
            for (size_t k = 0; k < layout.segments[s].count; k++)
                all[layout.segments[s].flat_offset + k] = model[layout.segments[s].model_offset + k];
        return all;
    }

    /* One rank's launches 1 and 2 over its gradients: its words of the all-reduce. */
    Words own_sums(int rank, const Floats& grads) {
        const std::vector<ZeroChunk>& table = tables[(size_t)rank];
        Device<ZeroChunk> chunks(table);
        Device<uint64_t> own(Words(ZERO_SUM_WORDS, 0)), sums(ZERO_SUM_WORDS);
        Device<float> floats(grads.size() + shift);
        Device<uint16_t> halves(grads.size() + shift);
        std::vector<float> all(shift, NAN);
        all.insert(all.end(), grads.begin(), grads.end());
        std::vector<uint16_t> bits;
        for (float x : all) bits.push_back((uint16_t)(bits_of(x) >> 16));
        floats.put(all), halves.put(bits);
        bool bf16 = layout.dtype == ZERO_BF16;
        ZeroNorm work = {
            chunks.at,    table.size(), bf16 ? (void*)(halves.at + shift) : (void*)(floats.at + shift),
            layout.dtype, own.at,       sums.at,
            NULL};
        for (double x : losses.empty() ? std::vector<double>() : losses[(size_t)rank]) {
            Device<double> loss(std::vector<double>(1, x));
            ok(zero_add_loss_launch(loss.at, own.at, NULL));
        }
        ok(zero_norm_squares(&work, NULL));
        ok(zero_norm_share(&work, rank % 2, drops > rank, NULL));
        ok(cudaDeviceSynchronize());
        EXPECT_EQ(own.get(), Words(ZERO_SUM_WORDS, 0)) << "the next step begins at zero";
        return sums.get();
    }

    /* The words of all ranks; grads[rank] is rank's flat buffer, one for all if there is only one. */
    Words sums(const std::vector<Floats>& grads) {
        Words all(ZERO_SUM_WORDS, 0);
        for (int rank = 0; rank < layout.ranks; rank++) {
            const Words own = own_sums(rank, grads[(size_t)rank % grads.size()]);
            for (int i = 0; i < ZERO_SUM_WORDS; i++) all[(size_t)i] += own[(size_t)i];
        }
        return all;
    }

    /* One step. */
    ZeroScalars norm(const std::vector<Floats>& grads, const ZeroStepSettings& settings) {
        return finish(sums(grads), settings);
    }

    ZeroScalars finish(const Words& words, const ZeroStepSettings& settings) {
        Device<uint64_t> all(words);
        for (ZeroScalars& s : scalars) {
            Device<ZeroScalars> device(std::vector<ZeroScalars>(1, s));
            ZeroNorm work = {NULL, 0, NULL, layout.dtype, NULL, all.at, device.at};
            ok(zero_norm_finish(&work, &settings, NULL));
            s = device.get()[0];
            EXPECT_EQ(memcmp(&s, &scalars[0], sizeof(s)), 0) << "ranks differ";
        }
        return scalars[0];
    }
};

double squares_of(const Words& words) { return zero_exact_value(words.data() + ZERO_SUM_SQUARES); }

/* Words whose squares have this sum. */
Words words_of(double squares) {
    Words words(ZERO_SUM_WORDS, 0);
    zero_exact_add(words.data() + ZERO_SUM_SQUARES, squares);
    return words;
}

/* Numbers of many magnitudes, so that another order of adding squares in fp64 gives other bits. */
Floats of_many_magnitudes(size_t count, ZeroDtype dtype, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    Floats x(count);
    for (float& g : x) {
        g = normal(random) * powf(10.0f, (float)(random() % 21) - 10);
        if (dtype == ZERO_BF16) {
            const uint32_t cut = bits_of(g) & 0xffff0000u;
            memcpy(&g, &cut, sizeof(g));
        }
    }
    return x;
}

/* ------------------------------------------------------------------ the norm */

TEST(Norm, B1_only_the_own_slice_counts) {
    for (int ranks : {1, 2, 3, 4}) {
        Ranks x({64 * 4}, ranks, ZERO_FP32);
        Floats model(256, 0.0f);
        model[0] = 3, model[255] = 4;
        std::vector<Floats> grads;
        for (int rank = 0; rank < ranks; rank++) { /* what the other slices hold is not reduced: anything */
            Floats flat = x.flat(model, 0.0f);
            for (size_t i = 0; i < flat.size(); i++)
                if (i / zero_slice_count(&x.layout, 0) != (size_t)rank) flat[i] = 100;
            grads.push_back(flat);
        }
        EXPECT_EQ(x.norm(grads, settings_of(ranks)).norm, 5.0f) << ranks;
    }
}

TEST(Norm, B2_a_gradient_that_every_rank_holds_counts_once) {
    for (int ranks : {1, 2, 4, 7}) {
        Ranks x({2}, ranks, ZERO_FP32);
        ZeroScalars s = x.norm({x.flat({3, 4}, 0.0f)}, settings_of(ranks));
        EXPECT_EQ(s.norm, 5.0f) << ranks;
        EXPECT_EQ(s.grad_factor, 1.0f);
        EXPECT_EQ(x.norm({x.flat({3, 4}, 0.0f)}, settings_of(ranks, 1.0 / ranks)).norm,
                  (float)(5.0 / ranks)); /* sums over ranks */
    }
}

TEST(Norm, B4_large_bf16_gradients_are_exact) {
    Ranks x({1000000}, 1, ZERO_BF16);
    EXPECT_EQ(x.norm({x.flat(Floats(1000000, 1000.0f), 0.0f)}, settings_of(1)).norm, 1000000.0f);
    Ranks y({1000}, 3, ZERO_FP32); /* squares beyond fp32 */
    ZeroScalars s = y.norm({y.flat(Floats(1000, 3e38f), 0.0f)}, settings_of(3, 1e-10));
    EXPECT_EQ(s.skip, 0);
    EXPECT_NEAR(s.norm / (3e28 * sqrt(1000.0)), 1.0, 1e-7);
}

/* Whole numbers: every order of adding gives the same, so the norm is exact at any place, cut and number of
 * ranks. */
TEST(Norm, WholeNumbersAreExactWhereverTheyLie) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (size_t n : {1, 2, 3, 4, 5, 7, 40, 257, 4096, 4099, 20011}) {
            Floats model(n);
            double squares = 0;
            for (size_t i = 0; i < n; i++) model[i] = (float)(i % 200) - 90, squares += model[i] * model[i];
            for (int ranks : {1, 2, 5})
                for (size_t max_count : {4096, 61}) /* chunks at every offset modulo 4 */
                    for (size_t shift : {0, 1, 3}) {
                        Ranks x({n / 3, n - n / 3}, ranks, dtype, 2048, max_count);
                        x.shift = shift;
                        Floats flat = x.flat(model, NAN); /* padding never counts, whatever it holds */
                        ASSERT_EQ(squares_of(x.sums({flat})), squares)
                            << "n " << n << ", ranks " << ranks << ", chunks of " << max_count << ", shift "
                            << shift;
                    }
        }
}

TEST(Norm, MoreChunksThanWarps) {
    for (size_t chunks : {4223, 4224, 4225, 17001}) {
        std::vector<size_t> counts(chunks, 1);
        Floats model(chunks);
        double squares = 0;
        for (size_t i = 0; i < chunks; i++) model[i] = (float)(i % 77), squares += model[i] * model[i];
        Ranks x(counts, 1, ZERO_FP32);
        ASSERT_EQ(x.tables[0].size(), chunks);
        EXPECT_EQ(squares_of(x.own_sums(0, x.flat(model, NAN))), squares);
    }
}

TEST(Norm, AgainstLongDouble) {
    for (unsigned round = 0; round < 6; round++) {
        const Floats model = of_many_magnitudes(50021, ZERO_FP32, round);
        long double squares = 0;
        for (float g : model) squares += (long double)g * g;
        Ranks x({50000, 21}, 3, ZERO_FP32, 65536);
        Floats flat = x.flat(model, NAN);
        /* 64 squares are added in fp64, 7 roundings deep, all else exactly */
        EXPECT_LT(fabsl(squares_of(x.sums({flat})) / squares - 1), 7 * 1.2e-16L);
        float due = (float)sqrtl(squares);
        EXPECT_LE(fabsf(x.norm({flat}, settings_of(3)).norm - due), due * 6e-8f);
    }
}

/* N1, N2: the words themselves are the same, so the norm is in its last bit: for any number of ranks, buckets, chunks of whole
   cells, and a buffer that no vector access fits. Segments that share slices, cells cut short by a segment's end. */
TEST(Norm, TheSameForAnyRanksBucketsAndChunks) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16}) {
        const std::vector<size_t> counts = {1, 63, 64, 65, 5000, 2049, 130};
        const Floats model = of_many_magnitudes(7372, dtype, 17);
        Words first;
        for (int ranks : {1, 2, 3, 4, 5, 7, 16})
            for (size_t bucket_bytes : {0, 2048, 20000})
                for (size_t max_count : {2048, 64, 640})
                    for (size_t shift : {0, 1, 4}) {
                        Ranks x(counts, ranks, dtype, bucket_bytes, max_count);
                        x.shift = shift;
                        Words words = x.sums({x.flat(model, NAN)});
                        zero_exact_carry(words.data() + ZERO_SUM_SQUARES);
                        words.resize(ZERO_EXACT_WORDS + 1);
                        if (first.empty()) first = words;
                        ASSERT_EQ(words, first) << ranks << " ranks, buckets of " << bucket_bytes
                                                << ", chunks of " << max_count << ", shift " << shift;
                    }
        EXPECT_GT(squares_of(first), 0.0);
    }
}

/* Offsets of the caller's, which begin anywhere: cells are those of the flat buffer, and slices cut none. */
TEST(Norm, TheSameWithOffsetsGiven) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16}) {
        const Floats model = of_many_magnitudes(6151, dtype, 18);
        Words first;
        for (int ranks : {1, 2, 3, 5, 8})
            for (size_t bucket_bytes : {0, 4096}) {
                Ranks x({1, 3, 6000, 17, 130}, ranks, dtype, bucket_bytes, ZERO_CHUNK_MAX_COUNT,
                        {1, 5, 11, 6013, 6031});
                Words words = x.sums({x.flat(model, NAN)});
                zero_exact_carry(words.data() + ZERO_SUM_SQUARES);
                words.resize(ZERO_EXACT_WORDS);
                if (first.empty()) first = words;
                ASSERT_EQ(words, first) << ranks << " ranks, buckets of " << bucket_bytes;
            }
    }
}

/* ------------------------------------------------------------------ skip */

TEST(Skip, InfAndNanAtEveryPlaceOnAllRanks) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (size_t place = 0; place < 150; place++)
            for (float bad : {(float)INFINITY, (float)-INFINITY, (float)NAN, -(float)NAN}) {
                Ranks x({70, 1, 79}, 3, dtype, 0, 64);
                Floats model(150, 1.0f);
                ZeroScalars before = x.norm({x.flat(model, 0.0f)}, settings_of(3));
                model[place] = bad;
                ZeroScalars s = x.norm({x.flat(model, 0.0f)}, settings_of(3));
                ASSERT_EQ(s.skip, ZERO_SKIP_NOT_FINITE) << bad << " at " << place;
                ASSERT_EQ(s.t, before.t);
                ASSERT_EQ(s.skipped, 1u);
                ASSERT_EQ(s.norm, INFINITY) << "one value, whatever it was";
                model[place] = 2.0f; /* and the next good step counts on */
                s = x.norm({x.flat(model, 0.0f)}, settings_of(3));
                ASSERT_EQ(s.skip, 0);
                ASSERT_EQ(s.t, before.t + 1);
            }
}

TEST(Skip, CountersInARow) {
    Ranks x({4}, 2, ZERO_FP32);
    Floats good = x.flat({1, 1, 1, 1}, 0.0f), bad = x.flat({1, NAN, 1, 1}, 0.0f);
    const char* steps = "gbbgbbbg";
    uint64_t t = 0, skipped = 0, row = 0;
    for (const char* step = steps; *step; step++) {
        *step == 'g' ? (t++, row = 0) : (skipped++, row++);
        ZeroScalars s = x.norm({*step == 'g' ? good : bad}, settings_of(2));
        EXPECT_EQ(s.t, t);
        EXPECT_EQ(s.skipped, skipped);
        EXPECT_EQ(s.skipped_in_row, row);
        EXPECT_EQ(s.skip, *step == 'b');
        EXPECT_EQ(s.dropped, 0u);
    }
}

TEST(Skip, TheCallerDropsAStepOnce) {
    Ranks x({4}, 1, ZERO_FP32);
    Floats good = x.flat({1, 1, 1, 1}, 0.0f), bad = x.flat({1, INFINITY, 1, 1}, 0.0f);
    auto skip = [&] {
        Device<ZeroScalars> device(x.scalars);
        ok(zero_skip_launch(device.at, NULL));
        x.scalars = device.get();
        return x.scalars[0];
    };
    x.norm({good}, settings_of(1));
    ZeroScalars first = x.norm({good}, settings_of(1));
    EXPECT_EQ(first.t, 2u);
    for (int i = 0; i < 3; i++) { /* asked again, it stays one drop */
        ZeroScalars s = skip();
        EXPECT_EQ(s.t, 1u);
        EXPECT_EQ(s.skip, ZERO_SKIP_CALLER);
        EXPECT_EQ(s.dropped, 1u);
        EXPECT_EQ(s.skipped, 0u);
    }
    ZeroScalars again =
        x.norm({good}, settings_of(1)); /* the next step is update 2, with its corrections and noise */
    EXPECT_EQ(again.t, 2u);
    EXPECT_EQ(again.skip, 0);
    EXPECT_EQ(again.bias1_inverse, first.bias1_inverse);
    EXPECT_EQ(again.bias2_sqrt, first.bias2_sqrt);
    EXPECT_EQ(memcmp(again.noise_key, first.noise_key, sizeof(first.noise_key)), 0);
    x.norm({bad}, settings_of(1));
    ZeroScalars s = skip(); /* a step that is skipped already is not dropped on top */
    EXPECT_EQ(s.t, 2u);
    EXPECT_EQ(s.dropped, 1u);
    EXPECT_EQ(s.skipped, 1u);
}

/* Case N7: one rank's word skips the step, which then has no norm and no loss; the count of skips in a row stays. */
TEST(Skip, ARankMayDropTheStep) {
    Ranks x({4}, 3, ZERO_FP32);
    const Floats good = x.flat({1, 1, 1, 1}, 0.0f), bad = x.flat({1, NAN, 1, 1}, 0.0f);
    x.norm({good}, settings_of(3));
    x.norm({bad}, settings_of(3));
    for (x.drops = 1; x.drops <= 3; x.drops++)
        for (const Floats& grads : {good, bad}) {
            const ZeroScalars before = x.scalars[0], s = x.norm({grads}, settings_of(3));
            EXPECT_EQ(s.skip, ZERO_SKIP_DROPPED);
            EXPECT_EQ(s.drops, x.drops);
            EXPECT_EQ(s.t, before.t);
            EXPECT_EQ(s.dropped, before.dropped + 1);
            EXPECT_EQ(s.skipped, 1u);
            EXPECT_EQ(s.skipped_in_row, 1u);
            EXPECT_TRUE(isnan(s.norm) && isnan(s.loss_sum));
        }
    x.drops = 0;
    const ZeroScalars s = x.norm({good}, settings_of(3));
    EXPECT_EQ(s.skip, ZERO_SKIP_NONE);
    EXPECT_EQ(s.t, 2u);
    EXPECT_EQ(s.skipped_in_row, 0u);
    EXPECT_EQ(s.norm, 2.0f);
}

/* Case N6: why a step is skipped, and that what clipping makes legal is not. grads: of 1000 elements. */
TEST(Skip, ForTheTrueReason) {
    const double adam = 1.8e19, sgd = 3.4e38;
    const struct {
        float g;
        double max_norm, limit;
        ZeroSkip due;
    } rows[] = {
        {1e38f, 1, adam, ZERO_SKIP_NONE},          {1e38f, 1, sgd, ZERO_SKIP_NONE},
        {3e38f, 1e-3, adam, ZERO_SKIP_NONE},       {1e38f, 0, adam, ZERO_SKIP_TOO_LARGE},
        {1e38f, 0, sgd, ZERO_SKIP_TOO_LARGE},      {1e30f, 0, adam, ZERO_SKIP_TOO_LARGE},
        {1e30f, 0, sgd, ZERO_SKIP_NONE},           {1e30f, 1e25, adam, ZERO_SKIP_TOO_LARGE},
        {1e30f, 1e-44, adam, ZERO_SKIP_TOO_SMALL}, {1.0f, 1e-44, adam, ZERO_SKIP_TOO_SMALL},
        {0.0f, 1e-44, adam, ZERO_SKIP_NONE},       {1e-40f, 0, adam, ZERO_SKIP_NONE},
        {INFINITY, 1, adam, ZERO_SKIP_NOT_FINITE}, {NAN, 1e-44, adam, ZERO_SKIP_NOT_FINITE},
    };
    for (auto& row : rows)
        for (int ranks : {1, 3}) {
            Ranks x({1000}, ranks, ZERO_FP32);
            ZeroStepSettings settings = settings_of(ranks, 1.0, row.max_norm);
            settings.norm_limit = row.limit;
            const ZeroScalars s = x.norm({x.flat(Floats(1000, row.g), 0.0f)}, settings);
            EXPECT_EQ(s.skip, row.due) << row.g << " clip " << row.max_norm;
            EXPECT_EQ(s.t, row.due == ZERO_SKIP_NONE);
            EXPECT_EQ(s.skipped, row.due != ZERO_SKIP_NONE);
            const double norm = sqrt(1000.0) * row.g;
            if (!isfinite(row.g))
                EXPECT_EQ(s.norm, INFINITY);
            else if (norm > FLT_MAX)
                EXPECT_EQ(s.norm, FLT_MAX);
            else
                EXPECT_NEAR(s.norm, norm, 1e-6 * norm + 1e-37);
            if (s.skip) continue;
            const double factor = (double)s.grad_factor * (s.grad_small ? 0x1p-126 : 1.0);
            const double due = row.max_norm > 0 ? row.max_norm / (norm + 1e-6) : 1.0;
            EXPECT_NEAR(factor, due, 1e-7 * due) << row.g << " clip " << row.max_norm;
        }
}

/* Other settings may make good what the first ones found too large, not what is not finite. */
TEST(Skip, IsDecidedAgainOnOtherSettings) {
    for (float g : {1e30f, (float)NAN}) {
        Ranks x({4}, 1, ZERO_FP32);
        ZeroStepSettings no_clip = settings_of(1), clip = settings_of(1, 1.0, 1.0);
        no_clip.norm_limit = clip.norm_limit = 1.8e19;
        const Words words = x.sums({x.flat({g, g, g, g}, 0.0f)});
        Device<uint64_t> sums(words);
        for (int step = 1; step <= 2; step++) {
            x.finish(words, no_clip);
            EXPECT_EQ(x.scalars[0].skipped, g > 0 ? 1u : (unsigned)step);
            Device<ZeroScalars> device(x.scalars);
            ZeroNorm work = {NULL, 0, NULL, ZERO_FP32, NULL, sums.at, device.at};
            ok(zero_norm_again(&work, &clip, 7, NULL));
            x.scalars = device.get();
            const ZeroScalars& s = x.scalars[0];
            EXPECT_EQ(s.skip, g > 0 ? ZERO_SKIP_NONE : ZERO_SKIP_NOT_FINITE);
            EXPECT_EQ(s.t, g > 0 ? 7u : 0u);
            EXPECT_EQ(s.skipped, g > 0 ? 0u : (unsigned)step);
            EXPECT_EQ(s.skipped_in_row, g > 0 ? 0u : (unsigned)step);
            EXPECT_NEAR(s.grad_factor, g > 0 ? 0.5e-30 : 0.0, 1e-37);
        }
    }
}

/* Case N5: frozen segments, lr_factor 0, are not read. */
TEST(Norm, FrozenSegmentsDoNotCount) {
    for (int ranks : {1, 2, 3, 4})
        for (size_t bucket_bytes : {(size_t)0, (size_t)2048}) {
            Ranks x({700, 5000, 3, 4099}, ranks, ZERO_FP32, bucket_bytes);
            Floats model(700 + 5000 + 3 + 4099, 1.0f);
            for (size_t i = 700; i < 5700; i++) model[i] = i % 2 ? NAN : INFINITY;
            for (auto& table : x.tables)
                for (ZeroChunk& chunk : table) chunk.lr_factor = chunk.segment != 1;
            EXPECT_EQ(squares_of(x.sums({x.flat(model, NAN)})), 4802.0);
            EXPECT_EQ(x.norm({x.flat(model, NAN)}, settings_of(ranks)).skip, ZERO_SKIP_NONE);
        }
}

/* ------------------------------------------------------------------ clip and scale */

TEST(Clip, FactorAndNorm) {
    struct {
        double max_norm, grad_scale;
        float g;
    } rows[] = {{0, 1, 3},      {1, 1, 3},        {5, 1, 3},        {100, 1, 3},        {3, 1, 3},
                {1, 0.25, 3},   {1e-3, 2, 3},     {1, 1, 0},        {0, 0.5, 0},        {1e-7, 1, 0},
                {1, 1, 1e-30f}, {1, 1e-3, 1e30f}, {1e30, 1, 3e38f}, {1, 1.0 / 3, 0.1f}, {2.5, 1, 1e-4f}};
    for (auto& row : rows)
        for (int ranks : {1, 3}) {
            Ranks x({2}, ranks, ZERO_FP32);
            ZeroScalars s =
                x.norm({x.flat({row.g, -row.g}, 0.0f)}, settings_of(ranks, row.grad_scale, row.max_norm));
            double norm = sqrt(2.0) * row.g * row.grad_scale, clip = row.max_norm / (norm + 1e-6);
            double due = row.grad_scale * (row.max_norm > 0 && clip < 1 ? clip : 1);
            EXPECT_EQ(s.skip, 0);
            EXPECT_TRUE(fabs(s.norm - norm) <= 6e-8 * norm || (s.norm == FLT_MAX && norm > FLT_MAX))
                << "before clipping";
            EXPECT_NEAR(s.grad_factor, due, 6e-8 * due)
                << row.max_norm << " " << row.grad_scale << " " << row.g;
            EXPECT_TRUE(row.max_norm > 0 || s.grad_factor == (float)row.grad_scale);
        }
}

TEST(Clip, ImpossibleSettingsAreRefusedInWords) {
    Device<uint64_t> sums(words_of(1));
    Device<ZeroScalars> scalars(std::vector<ZeroScalars>(1, ZeroScalars()));
    ZeroNorm work = {NULL, 0, NULL, ZERO_FP32, NULL, sums.at, scalars.at};
    for (double bad : {(double)NAN, (double)INFINITY, 1e300, -1e39}) {
        ZeroStepSettings settings = settings_of(1, bad);
        ZeroResult r = zero_norm_finish(&work, &settings, NULL);
        EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(strstr(r.text, "grad_scale"), nullptr) << r.text;
    }
    for (double bad : {(double)NAN, -1.0}) {
        ZeroStepSettings settings = settings_of(1, 1.0, bad);
        EXPECT_NE(strstr(zero_norm_finish(&work, &settings, NULL).text, "max_norm"), nullptr);
    }
    EXPECT_EQ(scalars.get()[0].t, 0u); /* and nothing was launched */
}

/* ------------------------------------------------------------------ losses, votes, t, bias corrections */

TEST(Norm, LossesAreAddedExactly) {
    Ranks x({300}, 3, ZERO_FP32);
    Floats flat = x.flat(Floats(300, 1.0f), 0.0f);
    ZeroScalars s = x.norm({flat}, settings_of(3));
    EXPECT_EQ(s.loss_sum, 0.0); /* none */
    EXPECT_EQ(s.votes, 1);      /* rank 1's */
    x.losses = {{0.1}, {1e17}, {-1e17}};
    EXPECT_EQ(x.norm({flat}, settings_of(3)).loss_sum, 0.1);
    x.losses = {{1e17, 0.25}, {}, {-0.5, -1e17, 1e-9}};
    EXPECT_EQ(x.norm({flat}, settings_of(3)).loss_sum, -0.25 + 1e-9);
    for (double bad : {(double)NAN, -(double)NAN, (double)INFINITY, -(double)INFINITY}) {
        x.losses = {{1.5}, {bad}, {2}};
        s = x.norm({flat}, settings_of(3)); /* a loss that is not a number does not skip */
        EXPECT_EQ(s.loss_sum, INFINITY) << "one value, whatever it was";
        EXPECT_EQ(s.skip, 0);
    }
    x.losses = {{1}, {2}, {3}};
    flat[0] = NAN; /* and it arrives in a skipped step too */
    EXPECT_EQ(x.norm({flat}, settings_of(3)).loss_sum, 6.0);
}

TEST(Norm, ARankWithNothingLaunchesNothingAndSendsZero) {
    Ranks x({3}, 4, ZERO_FP32);
    EXPECT_EQ(x.tables[3].size(), 0u);
    Floats flat = x.flat({3, 0, 4}, NAN);
    EXPECT_EQ(squares_of(x.own_sums(3, flat)), 0.0);
    ZeroNorm work = {NULL, 0, NULL, ZERO_FP32, NULL, NULL, NULL}; /* nothing here could be touched */
    ok(zero_norm_squares(&work, NULL));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(x.norm({flat}, settings_of(4)).norm, 5.0f);
}

TEST(Step, BiasCorrectionsAgainstLongDouble) {
    for (double beta1 : {0.0, 0.5, 0.9, 0.999})
        for (double beta2 : {0.0, 0.95, 0.999, 0.999999})
            for (uint64_t t : {(uint64_t)1, (uint64_t)2, (uint64_t)10, (uint64_t)1000, (uint64_t)1000000000,
                               (uint64_t)1 << 40}) {
                Ranks x({1}, 1, ZERO_FP32);
                ZeroStepSettings settings = {beta1, beta2, 1.0, 0.0, 42, 0.0};
                Device<ZeroScalars> device(x.scalars);
                ok(zero_set_t_launch(device.at, t - 1, NULL));
                x.scalars = device.get();
                ZeroScalars s = x.finish(words_of(1), settings);
                float due1 = (float)(1 / (1 - powl(beta1, t))), due2 = (float)sqrtl(1 - powl(beta2, t));
                EXPECT_EQ(s.t, t);
                EXPECT_LE(fabsf(s.bias1_inverse - due1), due1 * 6e-8f) << beta1 << " " << t;
                EXPECT_LE(fabsf(s.bias2_sqrt - due2), due2 * 6e-8f) << beta2 << " " << t;
            }
}

TEST(Step, NoiseKeysDifferByStepAndSeed) {
    std::vector<uint64_t> keys;
    for (uint64_t seed = 0; seed < 10; seed++) {
        Ranks x({1}, 1, ZERO_FP32);
        for (int t = 0; t < 100; t++) {
            ZeroStepSettings settings = {0.9, 0.999, 1.0, 0.0, seed, 0.0};
            ZeroScalars s = x.finish(words_of(1), settings);
            keys.push_back((uint64_t)s.noise_key[1] << 32 | s.noise_key[0]);
        }
    }
    std::sort(keys.begin(), keys.end());
    EXPECT_EQ(std::unique(keys.begin(), keys.end()) - keys.begin(), 1000);
}

TEST(Step, ScalarsAndSumsFitTheirBlocks) {
    EXPECT_LE(sizeof(ZeroScalars), (size_t)ZERO_SCALARS_BYTES);
    EXPECT_LE(ZERO_SUM_WORDS * sizeof(uint64_t), (size_t)ZERO_SUMS_BYTES);
}

} // namespace
