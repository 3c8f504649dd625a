/* test/test_schedule.cu - llmc_zero/schedule.cuh: pieces and windows cover every element once, scratch stays in its bounds.
   No CUDA in it. */
#include <gtest/gtest.h>
#include <vector>

#include "llmc_zero/memory.cuh"

namespace {

const std::vector<std::vector<size_t>> MODELS = {
    {1}, {3, 0, 5}, {64, 64, 64}, {5000, 33, 4097, 700, 3}, {100000, 1, 2049, 12345}};

struct Case {
    ZeroLayout layout = {};
    Case(const std::vector<size_t>& counts, int ranks, ZeroDtype dtype, size_t bucket_bytes) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig config = zero_layout_config(ranks, dtype);
        for (size_t s = 0; s < counts.size(); s++)
            segments.push_back(zero_segment("t", counts[s], (int)(s / 2)));
        config.bucket_bytes = bucket_bytes;
        config.units_apart = 1;
        EXPECT_EQ(zero_layout(&layout, segments.data(), (int)segments.size(), &config).code, ZERO_OK);
    }
    ~Case() { zero_layout_free(&layout); }
};

ZeroPlanChoice choose(int stage, ZeroReduction reduction, ZeroAccumulation accumulation) {
    ZeroPlanChoice choice = {};
    choice.stage = stage;
    choice.reduction = reduction;
    choice.accumulation = accumulation;
    choice.overlap = 1;
    return choice;
}

template <typename Body> void for_all(Body body) {
    for (auto& counts : MODELS)
        for (int ranks = 1; ranks <= 9; ranks++)
            for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
                for (size_t bucket_bytes : {0, 1, 30000})
                    body(Case(counts, ranks, dtype, bucket_bytes).layout);
}

/* Elements of the model that lie in [first, end) of the flat buffer. */
size_t real_elements(const ZeroLayout& layout, size_t first, size_t end) {
    size_t count = 0;
    for (int s = 0; s < layout.segments_count; s++) {
        const size_t a = layout.segments[s].flat_offset, b = a + layout.segments[s].count;
        const size_t from = a > first ? a : first, to = b < end ? b : end;
        if (from < to) count += to - from;
    }
    return count;
}

TEST(Schedule, PiecesCoverEverySliceOnceAndFitIntoTheScratch) {
    for_all([](const ZeroLayout& layout) {
        ZeroPlanChoice choice = choose(1, ZERO_REDUCE_ORDERED, ZERO_ACCUMULATE_MICRO);
        ZeroSchedule s;
        ASSERT_EQ(zero_schedule(&s, &layout, &choice).code, ZERO_OK);
        for (size_t piece_count : {s.piece_count, layout.align, 3 * layout.align})
            for (int rank = 0; rank < layout.ranks; rank++) {
                std::vector<size_t> bucket_chunks((size_t)layout.buckets_count + 1),
                    bucket_pieces(bucket_chunks);
                ZeroChunk* chunks = NULL;
                size_t p = 0;
                ASSERT_EQ(
                    zero_chunk_table(&layout, rank, ZERO_CHUNK_MAX_COUNT, &chunks, bucket_chunks.data()).code,
                    ZERO_OK);
                std::vector<ZeroPiece> pieces(
                    zero_walk_pieces(&layout, rank, piece_count, chunks, bucket_chunks.data(), NULL, NULL));
                ASSERT_EQ(zero_walk_pieces(&layout, rank, piece_count, chunks, bucket_chunks.data(),
                                           pieces.data(), bucket_pieces.data()),
                          pieces.size());
                for (int b = 0; b < layout.buckets_count; b++) {
                    size_t at = zero_slice_offset(&layout, b, rank);
                    const size_t end = at + zero_slice_count(&layout, b);
                    ASSERT_EQ(bucket_pieces[(size_t)b], p);
                    for (; p < bucket_pieces[(size_t)b + 1]; p++) {
                        const ZeroPiece& piece = pieces[p];
                        size_t covered = 0;
                        ASSERT_EQ(piece.flat_first, at);
                        ASSERT_GT(piece.count, 0u);
                        ASSERT_LE(piece.count, piece_count);
                        ASSERT_EQ(piece.count % layout.align, 0u);
                        at += piece.count;
                        for (size_t c = piece.chunk_first; c < piece.chunk_first + piece.chunk_count; c++) {
                            size_t from = chunks[c].flat_offset, to = from + chunks[c].count;
                            if (from < piece.flat_first) from = piece.flat_first;
                            if (to > at) to = at;
                            ASSERT_LT(from, to) << "a chunk without an element in its piece";
                            covered += to - from;
                        }
                        ASSERT_EQ(covered, real_elements(layout, piece.flat_first, at));
                    }
                    ASSERT_EQ(at, end);
                }
                ASSERT_EQ(p, pieces.size());
                free(chunks);
            }
    });
}

TEST(Schedule, WindowsCoverTheModelOnceInOrder) {
    for_all([](const ZeroLayout& layout) {
        ZeroPlanChoice choice = choose(0, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_MICRO);
        ZeroSchedule s;
        size_t chunks_count, at = 0, covered = 0;
        ASSERT_EQ(zero_schedule(&s, &layout, &choice).code, ZERO_OK);
        ASSERT_EQ(s.sums_gather, layout.ranks > 1);
        if (!s.sums_gather) return;
        ASSERT_GE(s.window_count, layout.align);
        ASSERT_LE(2 * s.window_count * sizeof(float), s.scratch_bytes);
        std::vector<ZeroWindow> windows(
            1 + zero_walk_windows(&layout, s.window_count, NULL, NULL, &chunks_count));
        std::vector<ZeroChunk> chunks(chunks_count);
        zero_walk_windows(&layout, s.window_count, windows.data(), chunks.data(), &chunks_count);
        for (size_t w = 0; w + 1 < windows.size(); w++) {
            const ZeroWindow& window = windows[w];
            const size_t slice = zero_slice_offset(&layout, window.bucket, window.owner);
            ASSERT_EQ(window.flat_first, at);
            ASSERT_LE(window.count, s.window_count);
            ASSERT_GE(window.flat_first, slice);
            at += window.count;
            ASSERT_LE(at, slice + zero_slice_count(&layout, window.bucket)) << "a window of two owners";
            for (size_t c = window.chunk_first; c < windows[w + 1].chunk_first; c++) {
                ASSERT_GE(chunks[c].flat_offset, window.flat_first);
                ASSERT_LE(chunks[c].flat_offset + chunks[c].count, at);
                ASSERT_EQ(chunks[c].state_offset, chunks[c].flat_offset); // stage 0 holds the whole state
                covered += chunks[c].count;
            }
        }
        ASSERT_EQ(at, zero_padded_count(&layout));
        ASSERT_EQ(covered, zero_model_count(&layout));
        ASSERT_EQ(windows.back().chunk_first, chunks_count);
    });
}

TEST(Schedule, ScratchStaysInItsBounds) {
    for_all([](const ZeroLayout& layout) {
        for (int stage = 0; stage <= 3; stage++)
            for (ZeroReduction reduction : {ZERO_REDUCE_NCCL, ZERO_REDUCE_ORDERED})
                for (ZeroAccumulation accumulation : {ZERO_ACCUMULATE_STEP, ZERO_ACCUMULATE_MICRO}) {
                    ZeroPlanChoice choice = choose(stage, reduction, accumulation);
                    const size_t bytes = zero_dtype_bytes(layout.dtype), others = (size_t)layout.ranks - 1;
                    const size_t least = others * ZERO_ALIGN_BYTES;
                    size_t largest = 0, bound;
                    ZeroSchedule s;
                    ASSERT_EQ(zero_schedule(&s, &layout, &choice).code, ZERO_OK);
                    for (int b = 0; b < layout.buckets_count; b++)
                        if (layout.buckets[b].count > largest) largest = layout.buckets[b].count;
                    if (layout.ranks == 1 || (reduction == ZERO_REDUCE_NCCL && !s.sums_gather)) {
                        ASSERT_EQ(s.scratch_bytes, 0u);
                        ASSERT_EQ(s.piece_count, largest);
                        continue;
                    }
                    bound =
                        largest * bytes < ZERO_SCRATCH_BYTES_MAX ? largest * bytes : ZERO_SCRATCH_BYTES_MAX;
                    if (bound < least) bound = least;
                    if (s.sums_gather && bound < 2 * layout.align * sizeof(float))
                        bound = 2 * layout.align * sizeof(float);
                    ASSERT_LE(s.scratch_bytes, bound);
                    ASSERT_GE(s.scratch_bytes, s.piece_count * others * bytes);
                    ASSERT_EQ(s.piece_count % layout.align, 0u);
                }
    });
}

/* Slots: two as large as the largest unit, one of gradients without overlap, a slot of its own for a held unit. */
TEST(Schedule, SlotsOfStages2And3) {
    Case c({1000, 24, 2000, 48, 512, 0}, 2, ZERO_FP32, 0); // units of 1024, 2048 (and padding), 512
    const int held[] = {1};
    size_t first, spans[3];
    for (int u = 0; u < 3; u++) spans[u] = zero_unit_span(&c.layout, u, &first);
    for (int stage = 2; stage <= 3; stage++)
        for (int overlap = 0; overlap <= 1; overlap++)
            for (int hold = 0; hold <= 1; hold++) {
                ZeroPlanChoice choice = choose(stage, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_STEP);
                ZeroSchedule s;
                choice.overlap = overlap;
                choice.held_units = held;
                choice.held_units_count = hold;
                ASSERT_EQ(zero_schedule(&s, &c.layout, &choice).code, ZERO_OK);
                EXPECT_EQ(s.micro, 1);
                EXPECT_EQ(s.sums_sharded, 1);
                EXPECT_EQ(s.grads_slots, overlap ? 2 : 1);
                EXPECT_EQ(s.grads_slot_count, hold ? spans[0] : spans[1]);
                EXPECT_EQ(s.held_count, hold ? spans[1] : 0u);
                EXPECT_EQ(s.params_sharded, stage == 3);
                EXPECT_EQ(s.params_slots, stage == 3 ? 2 : 0);
            }
}

TEST(Schedule, RefusedInWords) {
    ZeroSegment segments[] = {zero_segment("a", 5, 0), zero_segment("b", 5, 1)};
    ZeroLayoutConfig config = zero_layout_config(2, ZERO_FP32);
    ZeroLayout layout;
    ZeroSchedule s;
    const int held[] = {2};
    ASSERT_EQ(zero_layout(&layout, segments, 2, &config).code, ZERO_OK);
    ZeroPlanChoice choice = choose(2, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_STEP);
    ZeroResult r = zero_schedule(&s, &layout, &choice);
    EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
    EXPECT_NE(strstr(r.text, "units_apart = 1"), nullptr) << r.text;
    choice = choose(1, ZERO_REDUCE_ALLREDUCE, ZERO_ACCUMULATE_STEP);
    EXPECT_NE(strstr(zero_schedule(&s, &layout, &choice).text, "not in stage 1"), nullptr);
    choice = choose(0, ZERO_REDUCE_ALLREDUCE, ZERO_ACCUMULATE_MICRO);
    EXPECT_NE(strstr(zero_schedule(&s, &layout, &choice).text, "every micro-step"), nullptr);
    zero_layout_free(&layout);
    config.units_apart = 1;
    ASSERT_EQ(zero_layout(&layout, segments, 2, &config).code, ZERO_OK);
    choice = choose(3, ZERO_REDUCE_NCCL, ZERO_ACCUMULATE_STEP);
    choice.held_units = held;
    choice.held_units_count = 1;
    EXPECT_NE(strstr(zero_schedule(&s, &layout, &choice).text, "held unit 2; the layout has units 0 .. 1"),
              nullptr);
    zero_layout_free(&layout);
}

} // namespace
