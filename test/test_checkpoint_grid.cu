/* test/test_checkpoint_grid.cu - llmc_zero/checkpoint_grid.cuh: parts cover every element once, on the rank that holds it;
   one rank writes a piece, all write about as much; the header depends on the model alone. No call of CUDA in it. */
#include <gtest/gtest.h>
#include <stdio.h>

#include "llmc_zero/checkpoint.cuh"

namespace {

/* What of an optimizer the grid looks at. */
struct Case {
    ZeroLayout layout = {};
    ZeroOptimizer z;
    ZeroArray arrays[3];
    int arrays_count = 0;
    ZeroFileHeader header;
    ZeroGrid grid;
    std::vector<std::string> names;

    Case(const std::vector<size_t>& counts, int ranks, ZeroDtype dtype, int stage, size_t bucket_bytes) {
        std::vector<ZeroSegment> segments;
        ZeroLayoutConfig config = zero_layout_config(ranks, dtype);
        memset(&z, 0, sizeof(z));
        for (size_t s = 0; s < counts.size(); s++) names.push_back("layer." + std::to_string(s) + ".weight");
        for (size_t s = 0; s < counts.size(); s++)
            segments.push_back(zero_segment(names[s].c_str(), counts[s], (int)(s / 2)));
        config.bucket_bytes = bucket_bytes;
        config.units_apart = stage >= 2;
        EXPECT_EQ(zero_layout(&layout, segments.data(), (int)segments.size(), &config).code, ZERO_OK);
        z.layout = &layout;
        z.ranks = ranks;
        z.config.stage = stage;
        z.schedule.params_sharded = stage == 3;
        z.params = z.exp_avg = z.exp_avg_sq = (float*)&z; /* there, never read */
        arrays_count = zero_checkpoint_arrays(&z, arrays);
        const ZeroCheckpoint what = zero_checkpoint();
        EXPECT_EQ(zero_checkpoint_header(&z, &what, arrays, arrays_count, &header).code, ZERO_OK);
        zero_grid(&grid, &z, arrays, arrays_count, &header);
    }
    ~Case() { zero_layout_free(&layout); }
};

/* Where the layout says that element i of the model lies. */
void expect_place(const Case& c, const ZeroPart& part, size_t i) {
    const ZeroLayout* layout = &c.layout;
    int s = 0, b = 0;
    while (i >= layout->segments[s].model_offset + layout->segments[s].count) s++;
    const size_t flat = layout->segments[s].flat_offset + i - layout->segments[s].model_offset;
    while (flat >= layout->buckets[b].flat_offset + layout->buckets[b].count) b++;
    int owner = 0;
    while (flat >= zero_slice_offset(layout, b, owner) + zero_slice_count(layout, b)) owner++;
    ASSERT_EQ(part.owner, owner);
    const size_t shard = zero_shard_offset(layout, b) + flat - zero_slice_offset(layout, b, owner);
    ASSERT_EQ(part.first, part.held_by_all ? flat : shard);
}

TEST(Grid, PartsCoverEveryElementOnceWhereItLies) {
    for (auto& counts :
         std::vector<std::vector<size_t>>{{0}, {1}, {3, 0, 5, 0}, {64, 64, 64}, {5000, 33, 4097, 0, 3}})
        for (int ranks = 1; ranks <= 5; ranks++)
            for (ZeroDtype dtype : {ZERO_FP32, ZERO_BF16})
                for (int stage = 0; stage <= 3; stage++)
                    for (size_t bucket_bytes : {0, 3000}) {
                        Case c(counts, ranks, dtype, stage, bucket_bytes);
                        uint64_t next = 0;
                        while (next < c.header.data_bytes) {
                            const uint64_t end = std::min(c.header.data_bytes, next / 1000 * 1000 + 1000);
                            const ZeroPart part = zero_part_at(&c.z, c.arrays, c.arrays_count, next, end);
                            ASSERT_GE(part.count, 1u);
                            ASSERT_EQ(part.bytes, part.count * part.array->element_bytes);
                            ASSERT_LE(next + part.bytes, end);
                            ASSERT_EQ(part.held_by_all, part.array->is_flat || stage == 0);
                            const size_t i =
                                (size_t)((next - part.array->offset) / part.array->element_bytes);
                            ASSERT_LE(i + part.count, c.layout.model_count);
                            ASSERT_NO_FATAL_FAILURE(expect_place(c, part, i));
                            ZeroPart last = part; /* its last element lies beside the first */
                            last.first += part.count - 1;
                            ASSERT_NO_FATAL_FAILURE(expect_place(c, last, i + part.count - 1));
                            next += part.bytes;
                        }
                        ASSERT_EQ(next, c.header.data_bytes);
                    }
}

TEST(Grid, ARankWithMoreThanHalfOfAPieceWritesIt) {
    for (int ranks : {2, 3, 4, 7}) {
        Case c({9000000, 1000, 5000000}, ranks, ZERO_FP32, 1, 0);
        for (size_t k = 0; k < c.header.pieces.size(); k++) {
            const ZeroFilePiece& piece = c.header.pieces[k];
            std::vector<uint64_t> owned((size_t)ranks, 0);
            for (uint64_t at = piece.offset; at < piece.offset + piece.bytes;) {
                const ZeroPart part =
                    zero_part_at(&c.z, c.arrays, c.arrays_count, at, piece.offset + piece.bytes);
                owned[(size_t)part.owner] += part.bytes;
                at += part.bytes;
            }
            const auto most = std::max_element(owned.begin(), owned.end());
            const int expected =
                2 * *most > piece.bytes ? (int)(most - owned.begin()) : (int)(k % (size_t)ranks);
            EXPECT_EQ(c.grid.writer[k], expected) << ranks << " ranks, piece " << k;
        }
    }
}

/* In each round a rank writes one piece at most, and its pieces come in order. */
TEST(Grid, RoundsHoldEveryPieceOnce) {
    for (int ranks : {1, 2, 3, 8})
        for (size_t bucket_bytes : {0, 100000}) {
            Case c({9000000, 1000, 5000000}, ranks, ZERO_BF16, 2, bucket_bytes);
            std::vector<size_t> next((size_t)ranks, 0);
            std::set<size_t> seen;
            for (const auto& entry : c.grid.rounds) {
                EXPECT_EQ(entry.first, next[(size_t)c.grid.writer[entry.second]]++);
                EXPECT_TRUE(seen.insert(entry.second).second);
            }
            EXPECT_EQ(seen.size(), c.header.pieces.size());
            const size_t fair = c.header.pieces.size() / (size_t)ranks;
            EXPECT_LE(*std::max_element(next.begin(), next.end()), fair + 3) << ranks << " ranks";
        }
}

/* Case N8: 7e9 parameters, whatever ranks, stage and buckets are; 64 ranks and buckets of 1 MB were 187 MB once. */
TEST(Grid, TheHeaderDependsOnTheModelAlone) {
    std::vector<size_t> counts(2 * 33, 104000000);
    std::string first;
    for (size_t s = 1; s < counts.size(); s += 2) counts[s] = 108000000;
    struct {
        int ranks, stage;
        size_t bucket_bytes;
    } const cases[] = {{1, 1, 0}, {2, 3, 0}, {64, 1, 1000000}, {64, 2, 0}, {1024, 1, 0}, {1024, 3, 0}};
    for (const auto& one : cases) {
        Case c(counts, one.ranks, ZERO_FP32, one.stage, one.bucket_bytes);
        std::string text;
        EXPECT_NEAR((double)c.layout.model_count, 7e9, 1e7);
        ASSERT_EQ(zero_file_describe(c.header, &text).code, ZERO_OK);
        EXPECT_LE(text.size(), 2000000u);
        EXPECT_EQ(text.size() % 65536, 0u);
        if (first.empty()) first = text;
        EXPECT_TRUE(text == first) << one.ranks << " ranks, stage " << one.stage;
        printf("%d ranks, stage %d, buckets of %zu bytes: header of %zu bytes, %zu pieces\n", one.ranks,
               one.stage, one.bucket_bytes, text.size(), c.header.pieces.size());
    }
}

} // namespace
