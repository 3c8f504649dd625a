/* test/test_reduce.cu - llmc_zero/reduce.cuh: the sum kernel against a loop on the host, to the bit: a left fold in fp32 over
   what was there and the senders in rank order; squares. Chunks with heads and tails, cut by pieces. */
#include <cmath>

#include "device.h"
#include "llmc_zero/reduce.cuh"

namespace {

float bf16_value(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}
// noinline: g++ else folds cut and widened value back into x where the type is chosen at run time
__attribute__((noinline)) uint16_t bf16_cut(float x) { return (uint16_t)(bits_of(x) >> 16); }

/* Element `flat` of rank r: magnitudes far apart, so that another order of additions gives other bits. */
float gradient(size_t flat, int r) {
    const uint64_t h = zero_mix(flat * 16 + (uint64_t)r);
    return std::ldexp((float)(int)(h >> 52) - 2048.0f, (int)(h & 15) - 12);
}

struct Setting {
    ZeroDtype dtype;
    int ranks, rank, ordered, sharded, add;
    size_t piece_count, shift; /* shift: elements by which the gradients are moved off their alignment */
    int idle = 0;              /* ranks at the end that have no micro-batch */
};

/* Runs every piece of a rank's slices and compares sums, what must stay untouched, and the sum of squares. */
void check(const std::vector<size_t>& counts, const std::vector<size_t>& offsets, const Setting& t,
           size_t poison_at = SIZE_MAX, float poison = 0.0f) {
    std::vector<ZeroSegment> segments;
    ZeroLayoutConfig config = zero_layout_config(t.ranks, t.dtype);
    ZeroLayout layout;
    for (size_t s = 0; s < counts.size(); s++) {
        segments.push_back(zero_segment("t", counts[s], 0));
        segments.back().flat_offset = offsets[s];
    }
    config.offsets_given = 1;
    ok(zero_layout(&layout, segments.data(), (int)segments.size(), &config));
    std::vector<size_t> bucket_chunks((size_t)layout.buckets_count + 1);
    ZeroChunk* chunks = NULL;
    ok(zero_chunk_table(&layout, t.rank, ZERO_CHUNK_MAX_COUNT, &chunks, bucket_chunks.data()));
    std::vector<ZeroPiece> pieces(
        zero_walk_pieces(&layout, t.rank, t.piece_count, chunks, bucket_chunks.data(), NULL, NULL));
    zero_walk_pieces(&layout, t.rank, t.piece_count, chunks, bucket_chunks.data(), pieces.data(), NULL);
    Device<ZeroChunk> table(std::vector<ZeroChunk>(chunks, chunks + bucket_chunks.back()));
    const size_t padded = zero_padded_count(&layout), shard = zero_shard_count(&layout);
    auto value = [&](size_t flat, int r) {
        const float x = flat == poison_at && r == t.ranks - 1 ? poison : gradient(flat, r);
        return t.dtype == ZERO_BF16 ? bf16_value(bf16_cut(x)) : x;
    };
    auto fill = [&](char* at, size_t i, float x) {
        const uint16_t half = bf16_cut(x);
        if (t.dtype == ZERO_BF16)
            memcpy(at + 2 * i, &half, 2);
        else
            memcpy(at + 4 * i, &x, 4);
    };
    const size_t bytes = zero_dtype_bytes(t.dtype);
    std::vector<char> own((padded + t.shift) * bytes, (char)0xff); /* gaps are NaN: never read */
    for (auto& s : segments)
        for (size_t i = s.flat_offset; i < s.flat_offset + s.count; i++)
            fill(own.data(), i + t.shift, value(i, t.rank));
    Device<char> grads(own);
    const float old = 0.375f, untouched = -77.0f;
    std::vector<float> before(shard, untouched);
    for (size_t c = 0; c < bucket_chunks.back() && t.add; c++)
        for (size_t i = 0; i < chunks[c].count; i++) before[chunks[c].state_offset + i] = old;
    Device<float> sums(before);
    Device<uint64_t> words(std::vector<uint64_t>(ZERO_SUM_WORDS, 0));
    const int senders = t.ranks - t.idle;
    for (const ZeroPiece& piece : pieces) {
        std::vector<char> received(piece.count * (size_t)t.ranks * bytes, (char)0xff);
        for (int r = 0, at = 0; r < senders; r++) {
            if (r == t.rank) continue;
            for (auto& s : segments)
                for (size_t i = s.flat_offset; i < s.flat_offset + s.count; i++)
                    if (i >= piece.flat_first && i < piece.flat_first + piece.count)
                        fill(received.data(), (size_t)at * piece.count + i - piece.flat_first, value(i, r));
            at++;
        }
        Device<char> others(received);
        ZeroSum sum = {};
        sum.chunks = table.at;
        sum.piece = piece;
        sum.grads = grads.at + t.shift * bytes;
        sum.dtype = t.dtype;
        sum.others = t.ordered ? others.at : NULL;
        sum.senders = senders;
        sum.rank = t.rank;
        sum.sums = t.sharded ? sums.at : (float*)(grads.at + t.shift * bytes);
        sum.sums_sharded = t.sharded;
        sum.add = t.add;
        sum.own_sums = words.at;
        ok(zero_sum_launch(&sum, 0));
        ok(cudaDeviceSynchronize());
    }
    const std::vector<float> got_shard = sums.get();
    const std::vector<char> got_flat = grads.get();
    std::vector<float> expected = before;
    double squares = 0.0;
    for (size_t c = 0; c < bucket_chunks.back(); c++)
        for (size_t i = 0; i < chunks[c].count; i++) {
            const size_t flat = chunks[c].flat_offset + i;
            volatile float x = old;
            for (int r = 0; r < (t.ordered ? senders : 1); r++) {
                const float g = value(flat, t.ordered ? r : t.rank);
                x = r == 0 && !t.add ? g : x + g;
            }
            expected[chunks[c].state_offset + i] = x;
            squares += (double)x * (double)x;
            if (!t.sharded) {
                float got;
                memcpy(&got, got_flat.data() + (flat + t.shift) * 4, 4);
                ASSERT_EQ(bits_of(got), bits_of(x)) << "flat element " << flat;
            }
        }
    for (size_t i = 0; t.sharded && i < shard; i++) {
        if (std::isnan(expected[i]))
            ASSERT_TRUE(std::isnan(got_shard[i])) << "shard element " << i;
        else
            ASSERT_EQ(bits_of(got_shard[i]), bits_of(expected[i])) << "shard element " << i;
    }
    const std::vector<uint64_t> got = words.get();
    if (std::isfinite(squares)) {
        ASSERT_NEAR(zero_exact_value(got.data() + ZERO_SUM_SQUARES), squares, 1e-12 * squares);
    }
    ASSERT_EQ(got[ZERO_SUM_SQUARES_BAD] != 0, !std::isfinite(squares));
    free(chunks);
    zero_layout_free(&layout);
}

const std::vector<size_t> COUNTS = {1, 3, 6000, 17, 130}, OFFSETS = {1, 5, 11, 6013, 6031};

TEST(Reduce, SumsInRankOrderToTheBit) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (int ranks : {2, 3, 5})
            for (int rank = 0; rank < ranks; rank++)
                for (size_t piece_count : {(size_t)128, (size_t)640, (size_t)1 << 20})
                    for (int add = 0; add <= 1; add++)
                        for (size_t shift = 0; shift < 4; shift++)
                            check(COUNTS, OFFSETS, {dtype, ranks, rank, 1, 1, add, piece_count, shift});
}

/* The last round of a step: some ranks have no micro-batch. They are left out, the own rank too. */
TEST(Reduce, RanksWithoutAMicroBatchAreLeftOut) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (int idle = 1; idle < 5; idle++)
            for (int rank = 0; rank < 5; rank++)
                for (int add = 0; add <= 1; add++)
                    check(COUNTS, OFFSETS, {dtype, 5, rank, 1, 1, add, 640, 0, idle});
    for (int rank = 0; rank < 3; rank++) check(COUNTS, OFFSETS, {ZERO_FP32, 3, rank, 1, 0, 0, 640, 0, 2});
}

/* A left fold keeps the sign of zero where a sum with zeros would not, and does not regroup. */
TEST(Reduce, IsALeftFold) {
    const float one[2] = {1.0f, 0.0f}, tiny[2] = {0x1p-24f, -0.0f};
    Device<float> own(std::vector<float>(one, one + 2)),
        others(std::vector<float>{tiny[0], tiny[1], tiny[0], tiny[1]});
    Device<float> sums(std::vector<float>{0x1p-24f, -0.0f});
    ZeroChunk chunk = {0, 0, 0, 2, 1.0f, 1.0f, 0};
    Device<ZeroChunk> chunks(std::vector<ZeroChunk>(1, chunk));
    ZeroSum sum = {};
    sum.chunks = chunks.at, sum.piece.count = 2, sum.piece.chunk_count = 1;
    sum.grads = own.at, sum.others = others.at, sum.rank = 2, sum.senders = 3;
    sum.sums = sums.at, sum.sums_sharded = 1, sum.add = 1;
    ok(zero_sum_launch(&sum, 0));
    std::vector<float> got = sums.get(); /* ((2^-24 + 2^-24) + 2^-24) + 1; 1 first would lose all three */
    EXPECT_EQ(got[0], 1.0f + 0x1p-22f);
    EXPECT_EQ(bits_of(got[1]), bits_of(0.0f));
    sums.put({0x1p-24f, -0.0f});
    sum.senders = 2; /* the own rank has none: -0 stays -0 */
    ok(zero_sum_launch(&sum, 0));
    got = sums.get();
    EXPECT_EQ(got[0], 0x1.8p-23f);
    EXPECT_EQ(bits_of(got[1]), bits_of(-0.0f));
}

/* Where NCCL has summed already, and on one rank: the kernel takes the own gradients as they are. */
TEST(Reduce, TakesSumsThatAreThere) {
    for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
        for (int ranks : {1, 3})
            for (int add = 0; add <= 1; add++)
                check(COUNTS, OFFSETS, {dtype, ranks, ranks - 1, 0, 1, add, (size_t)1 << 20, 0});
}

TEST(Reduce, InPlaceInFp32) {
    for (int rank = 0; rank < 3; rank++)
        for (size_t shift = 0; shift < 4; shift++)
            check(COUNTS, OFFSETS, {ZERO_FP32, 3, rank, 1, 0, 0, 640, shift});
}

/* One element of one rank that is not finite reaches the sum and the squares. */
TEST(Reduce, WhatIsNotFiniteStaysSo) {
    for (float poison : {NAN, INFINITY, -INFINITY})
        for (size_t at : {(size_t)1, (size_t)12, (size_t)700})
            for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
                check(COUNTS, OFFSETS, {dtype, 2, 0, 1, 1, 0, 640, 0}, at, poison);
}

TEST(Reduce, RefusesBf16InPlace) {
    ZeroSum sum = {};
    sum.dtype = ZERO_BF16;
    ZeroResult r = zero_sum_launch(&sum, 0);
    EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
    EXPECT_NE(strstr(r.text, "fp32 shard"), nullptr) << r.text;
}

} // namespace
