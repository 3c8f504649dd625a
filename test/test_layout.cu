/* test/test_layout.cu - llmc_zero/layout.cuh: every small layout, the numbered invariants, sizes beyond 32
   bits.

     dev/cpu/nvcc -std=c++17 -O3 -I. test/test_layout.cu -lgtest_main -lgtest -o build/test/test_layout
     g++ -x c++ -std=c++17 -I. -fsanitize=address,undefined test/test_layout.cu -lgtest_main -lgtest

   The sweep builds each layout of 0..64 elements on 1..9 ranks, in both types, cut into segments, units and
   buckets in several ways, and looks at it through a map of the flat buffer that is made here, element by
   element, without the code under test: who lies at this offset. Each invariant L1..L6 of layout.cuh is one
   check and one test, and so are the relation of units and buckets and the faults A1, A3, A5, A7 known from
   other libraries. A check gives "" or one line that says what is wrong; the layout is put before it.
*/
#include <functional>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string>
#include <vector>

/* The header's allocations go through these, so that each of them can fail once and none can be forgotten. */
static int allocations_live = 0;
static int allocations_until_failure = -1; /* -1: never */
static void* counted_calloc(size_t count, size_t bytes) {
    if (allocations_until_failure == 0) return NULL;
    if (allocations_until_failure > 0) allocations_until_failure--;
    void* pointer = calloc(count, bytes);
    allocations_live += pointer != NULL;
    return pointer;
}
static void counted_free(void* pointer) {
    allocations_live -= pointer != NULL;
    free(pointer);
}
#define calloc counted_calloc
#define free counted_free
#include "llmc_zero/layout.cuh"
#undef calloc
#undef free

namespace {

typedef std::vector<ZeroSegment> Segments;
typedef unsigned long long u64;

std::string text(const char* format, ...) {
    char line[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    return line;
}

/* ------------------------------------------------------------------ a layout and the map of its flat buffer
 */

struct Element {
    int segment = -1; /* -1: gap or padding */
    size_t model = 0;
};

struct Case {
    Segments segments; /* as handed in */
    ZeroLayoutConfig config;
    ZeroLayout layout;
    std::vector<Element> at; /* by flat offset */
    std::string fault;       /* while the map was made */

    Case(const Segments& s, const ZeroLayoutConfig& c) : segments(s), config(c) {
        ZeroResult r = zero_layout(&layout, segments.data(), (int)segments.size(), &config);
        if (r.code != ZERO_OK) {
            fault = r.text;
            return;
        }
        size_t model = 0;
        at.resize(layout.padded_count);
        for (int i = 0; i < layout.segments_count; i++)
            for (size_t k = 0; k < segments[i].count; k++, model++) {
                size_t flat = layout.segments[i].flat_offset + k;
                if (flat >= at.size()) {
                    fault = text("segment %d ends past the buffer", i);
                    return;
                }
                if (at[flat].segment >= 0) {
                    fault = text("segments %d and %d share %zu", at[flat].segment, i, flat);
                    return;
                }
                at[flat].segment = i;
                at[flat].model = model;
            }
    }
    ~Case() { zero_layout_free(&layout); }
    Case(const Case&) = delete;

    int unit_at(size_t flat) const { return at[flat].segment < 0 ? -1 : segments[at[flat].segment].unit; }
    std::string name() const {
        size_t n = 0;
        for (const ZeroSegment& s : segments) n += s.count;
        return text(
            "n %zu in %zu segments, %d ranks, %s, buckets of %zu bytes, units_apart %d, offsets_given %d: ",
            n, segments.size(), config.ranks, zero_dtype_name(config.dtype), config.bucket_bytes,
            config.units_apart, config.offsets_given);
    }
};

typedef std::string (*Check)(const Case&);

/* ------------------------------------------------------------------ the checks */

std::string check_L1(const Case& c) {
    const ZeroLayout& l = c.layout;
    size_t model = 0, align = ZERO_ALIGN_BYTES / zero_dtype_bytes(c.config.dtype);
    std::vector<size_t> unit_end(l.units_count + 1, 0), unit_start(l.units_count + 1, SIZE_MAX);
    if (!c.fault.empty()) return c.fault;
    if (l.align != align) return text("align is %zu", l.align);
    for (int i = 0; i < l.segments_count; i++) {
        const ZeroSegment& s = l.segments[i];
        if (s.model_offset != model)
            return text("segment %d has model offset %zu, not %zu", i, s.model_offset, model);
        if (s.count != c.segments[i].count || s.unit != c.segments[i].unit)
            return text("segment %d changed", i);
        if (c.config.offsets_given && s.flat_offset != c.segments[i].flat_offset)
            return text("offset %d changed", i);
        if (!c.config.offsets_given && s.flat_offset % align) return text("segment %d is not aligned", i);
        if (s.flat_offset + s.count > l.padded_count && s.count) return text("segment %d ends outside", i);
        if (s.count && zero_unit_offset(&l, i) + l.unit_offset[s.unit] != s.flat_offset)
            return text("unit offset %d", i);
        model += s.count;
        if (s.count == 0) continue;
        if (s.flat_offset < unit_start[s.unit]) unit_start[s.unit] = s.flat_offset;
        if (s.flat_offset + s.count > unit_end[s.unit]) unit_end[s.unit] = s.flat_offset + s.count;
    }
    if (zero_model_count(&l) != model) return text("model count %zu, not %zu", l.model_count, model);
    for (int u = 0; u < l.units_count; u++) { /* units lie one after another; each begins where it says */
        if (unit_start[u] == SIZE_MAX) continue;
        if (l.unit_offset[u] > unit_start[u]) return text("unit %d begins before its offset", u);
        for (int w = u + 1; w < l.units_count && !c.config.offsets_given; w++)
            if (unit_start[w] < unit_end[u]) return text("unit %d lies before unit %d", w, u);
    }
    return "";
}

std::string check_L2(const Case& c) {
    const ZeroLayout& l = c.layout;
    size_t end = 0;
    for (int b = 0; b < l.buckets_count; b++) {
        if (l.buckets[b].flat_offset != end)
            return text("bucket %d begins at %zu, not %zu", b, l.buckets[b].flat_offset, end);
        if (l.buckets[b].count == 0) return text("bucket %d is empty", b);
        end += l.buckets[b].count;
    }
    return end == zero_padded_count(&l) ? "" : text("buckets end at %zu of %zu", end, zero_padded_count(&l));
}

std::string check_L3(const Case& c) {
    const ZeroLayout& l = c.layout;
    size_t quantum = (size_t)c.config.ranks * ZERO_ALIGN_BYTES; /* bytes */
    size_t limit = c.config.bucket_bytes < quantum ? quantum : c.config.bucket_bytes;
    for (int b = 0; b < l.buckets_count; b++) {
        size_t offset = l.buckets[b].flat_offset * zero_dtype_bytes(l.dtype),
               bytes = l.buckets[b].count * zero_dtype_bytes(l.dtype);
        if (offset % quantum || bytes % quantum) return text("bucket %d: bytes %zu at %zu", b, bytes, offset);
        if (c.config.bucket_bytes && bytes > limit)
            return text("bucket %d has %zu bytes, limit %zu", b, bytes, limit);
        /* a slice's address is a multiple of 256 bytes, flat and in the shard, and 16-byte accesses work (I4)
         */
        for (int r = 0; r < l.ranks; r++)
            if (zero_slice_offset(&l, b, r) * zero_dtype_bytes(l.dtype) % ZERO_ALIGN_BYTES ||
                zero_shard_offset(&l, b) * zero_dtype_bytes(l.dtype) % ZERO_ALIGN_BYTES)
                return text("slice %d of bucket %d is not aligned", r, b);
    }
    if (c.config.bucket_bytes == 0 && !c.config.units_apart && l.buckets_count > 1)
        return "more than one bucket";
    size_t least = 0;
    for (size_t flat = 0; flat < c.at.size(); flat++)
        if (c.at[flat].segment >= 0) least = flat + 1;
    if (l.padded_count * zero_dtype_bytes(l.dtype) >= least * zero_dtype_bytes(l.dtype) + quantum)
        return text("padded to %zu, %zu are in use: more than one quantum too many", l.padded_count, least);
    return "";
}

std::string check_L4(const Case& c) {
    const ZeroLayout& l = c.layout;
    for (int r = 0; r < l.ranks; r++) {
        size_t shard = 0;
        for (int b = 0; b < l.buckets_count; b++) {
            size_t count = l.buckets[b].count / (size_t)l.ranks;
            if (zero_slice_count(&l, b) != count || count * (size_t)l.ranks != l.buckets[b].count)
                return text("bucket %d has slices of %zu", b, zero_slice_count(&l, b));
            if (zero_slice_offset(&l, b, r) != l.buckets[b].flat_offset + (size_t)r * count)
                return text("rank %d: slice of bucket %d at %zu", r, b, zero_slice_offset(&l, b, r));
            if (zero_shard_offset(&l, b) != shard)
                return text("bucket %d at %zu in the shard, not %zu", b, zero_shard_offset(&l, b), shard);
            if ((zero_slice_offset(&l, b, r) - shard) % l.align)
                return text("bucket %d: offsets differ modulo align", b);
            shard += count;
        }
        if (shard != zero_shard_count(&l))
            return text("slices add up to %zu, shard %zu", shard, zero_shard_count(&l));
    }
    return "";
}

/* Walks the table of `rank` (or of all) and counts how often it covers each element of the flat buffer. */
std::string cover(const Case& c, int rank, size_t max_count, std::vector<int>* covered) {
    const ZeroLayout& l = c.layout;
    std::vector<size_t> first((size_t)l.buckets_count + 1);
    std::string fault;
    ZeroChunk* chunks = NULL;
    ZeroResult r = zero_chunk_table(&l, rank, max_count, &chunks, first.data());
    if (r.code != ZERO_OK) return r.text;
    if (chunks == NULL) return "no table, and no error";
    if (first[0] != 0) fault = "bucket_first does not begin at 0";
    for (int b = 0; b < l.buckets_count && fault.empty(); b++) {
        if (first[b + 1] < first[b]) {
            fault = "bucket_first falls";
            break;
        }
        size_t start = rank == ZERO_ALL_RANKS ? l.buckets[b].flat_offset : zero_slice_offset(&l, b, rank);
        size_t count = rank == ZERO_ALL_RANKS ? l.buckets[b].count : zero_slice_count(&l, b);
        size_t shift = rank == ZERO_ALL_RANKS ? 0 : start - zero_shard_offset(&l, b);
        for (size_t i = first[b]; i < first[b + 1] && fault.empty(); i++) {
            const ZeroChunk& k = chunks[i];
            if (k.count < 1 || k.count > max_count) fault = text("chunk %zu of %u elements", i, k.count);
            if (k.flat_offset < start || k.flat_offset + k.count > start + count)
                fault = text("chunk %zu leaves its slice", i);
            if (k.state_offset != k.flat_offset - shift)
                fault = text("chunk %zu: state offset %llu", i, (u64)k.state_offset);
            if (k.state_offset % 4 != k.flat_offset % 4)
                fault = text("chunk %zu: state offset not aligned as flat", i);
            for (size_t e = 0; e < k.count && fault.empty(); e++) {
                const Element& element = c.at[k.flat_offset + e];
                if (element.segment != (int)k.segment)
                    fault =
                        text("chunk %zu covers %s", i, element.segment < 0 ? "padding" : "another segment");
                else if (element.model != k.model_offset + e)
                    fault = text("chunk %zu: model index %llu", i, (u64)k.model_offset);
                else
                    (*covered)[k.flat_offset + e]++;
            }
            const ZeroSegment& s = c.segments[k.segment];
            if (k.lr_factor != s.lr_factor || k.decay_factor != s.decay_factor)
                fault = text("chunk %zu: factors", i);
        }
    }
    counted_free(chunks);
    return fault;
}

std::string check_L5(const Case& c) {
    static const size_t max_counts[] = {ZERO_CHUNK_MAX_COUNT, 3, 1, 64, UINT32_MAX};
    for (size_t max_count : max_counts) {
        if (c.config.ranks % 3 == 2 && max_count != 3)
            continue; /* the table's cut does not depend on the ranks */
        std::vector<int> own(c.at.size(), 0), all(c.at.size(), 0);
        for (int rank = 0; rank < c.layout.ranks; rank++) {
            std::string fault = cover(c, rank, max_count, &own);
            if (!fault.empty()) return text("rank %d, max_count %zu: ", rank, max_count) + fault;
        }
        std::string fault = cover(c, ZERO_ALL_RANKS, max_count, &all);
        if (!fault.empty()) return text("all ranks, max_count %zu: ", max_count) + fault;
        for (size_t flat = 0; flat < c.at.size(); flat++) {
            int due = c.at[flat].segment >= 0;
            if (own[flat] != due || all[flat] != due)
                return text("offset %zu is covered %d times by ranks, %d by the whole, %d due", flat,
                            own[flat], all[flat], due);
        }
    }
    return "";
}

std::string check_L6(const Case& c) {
    size_t real = 0, free_offsets = 0;
    for (const Element& e : c.at) e.segment < 0 ? free_offsets++ : real++;
    if (real != c.layout.model_count)
        return text("%zu of %zu elements have a place", real, c.layout.model_count);
    if (real + free_offsets != zero_padded_count(&c.layout)) return "gaps and elements do not add up";
    return "";
}

/* bucket_units and unit_buckets say the same, which is what the map says; each once, buckets in rising order
 */
std::string check_units(const Case& c) {
    const ZeroLayout& l = c.layout;
    size_t pairs = 0;
    std::vector<std::vector<int>> buckets((size_t)l.units_count);
    for (int b = 0; b < l.buckets_count; b++) {
        const ZeroBucket& bucket = l.buckets[b];
        std::vector<int> holds;
        for (size_t flat = bucket.flat_offset; flat < bucket.flat_offset + bucket.count; flat++) {
            int u = c.unit_at(flat);
            bool known = u < 0;
            for (int h : holds) known = known || h == u;
            if (!known) holds.push_back(u);
        }
        if (c.config.units_apart && !c.config.offsets_given && holds.size() > 1)
            return text("bucket %d has two units", b);
        if (bucket.units_first != (int)pairs || bucket.units != (int)holds.size())
            return text("bucket %d says %d units from %d, has %zu from %zu", b, bucket.units,
                        bucket.units_first, holds.size(), pairs);
        for (size_t k = 0; k < holds.size(); k++) {
            if (l.bucket_units[pairs + k] != holds[k]) return text("bucket %d names the wrong unit", b);
            buckets[(size_t)holds[k]].push_back(b);
        }
        pairs += holds.size();
    }
    for (int u = 0; u < l.units_count; u++) {
        int first = l.unit_buckets_first[u], count = l.unit_buckets_first[u + 1] - first;
        if (count != (int)buckets[u].size())
            return text("unit %d says %d buckets, has %zu", u, count, buckets[u].size());
        for (int k = 0; k < count; k++)
            if (l.unit_buckets[first + k] != buckets[u][k]) return text("unit %d names the wrong bucket", u);
    }
    return "";
}

/* ------------------------------------------------------------------ the sweep */

/* n elements, cut in one of several ways; factors and units differ so that a mix-up shows */
Segments cut(size_t n, int way) {
    Segments s;
    size_t left = n;
    while (left > 0 || s.empty()) {
        size_t i = s.size();
        size_t count = way == 0   ? left
                       : way == 1 ? 1
                       : way == 2 ? (i % 3 == 1 ? 0 : 5)
                       : way == 3 ? 1 + i * 7 % 11
                                  : left / 2 + 1;
        if (count > left) count = left;
        s.push_back(zero_segment("s", count, 0));
        s.back().lr_factor = 1.0f + (float)i;
        s.back().decay_factor = 0.5f * (float)i;
        left -= count;
    }
    if (way == 2) s.push_back(zero_segment(NULL, 0, 0));
    for (size_t i = 0, count = s.size(); i < count; i++) { /* 1 .. 5 units, in order, falling, and mixed */
        size_t unit = way == 0   ? 0
                      : way == 1 ? i * 5 / count
                      : way == 2 ? (count - 1 - i) * 3 / count
                      : way == 3 ? i * 7 % 4
                                 : i % 2;
        s[i].unit = (int)(unit < count ? unit : count - 1);
    }
    return s;
}

/* Offsets as a framework may have fixed them: packed without alignment, gaps, the last segment first. */
void give_offsets(Segments* s, int way) {
    size_t end = way == 1 ? 3 : 0;
    for (size_t i = 0; i < s->size(); i++) {
        ZeroSegment& segment = (*s)[way == 1 ? s->size() - 1 - i : i];
        segment.flat_offset = end;
        end += segment.count + (way == 1 ? i * 13 % 70 : 0);
    }
}

/* Calls `use` with every layout of n elements on `ranks` ranks. */
void for_each_layout(size_t n, int ranks, const std::function<void(const Case&)>& use) {
    for (int way = 0; way < 5; way++) {
        if (way == 1 && n > 200) continue; /* single elements: the small ones show it */
        for (int offsets = 0; offsets < 3; offsets++)
            for (int dtype = 0; dtype < 2; dtype++)
                for (size_t bucket_bytes :
                     {(size_t)0, (size_t)1, (size_t)256 * 3, (size_t)1024 * 5 + 7, (size_t)1 << 40})
                    for (int apart = 0; apart < 2; apart++) {
                        ZeroLayoutConfig config = zero_layout_config(ranks, (ZeroDtype)dtype);
                        Segments segments = cut(n, way);
                        if (offsets) give_offsets(&segments, offsets - 1);
                        config.offsets_given = offsets > 0;
                        config.bucket_bytes = bucket_bytes;
                        config.units_apart = apart;
                        use(Case(segments, config));
                    }
    }
}

struct Invariant {
    Check check;
    long layouts;
    std::string faults; /* the first few */
};

/* All small layouts, and some larger ones in which a segment spans several slices and chunks; once for all
 * checks. */
const std::vector<Invariant>& sweep() {
    static std::vector<Invariant> invariants;
    if (!invariants.empty()) return invariants;
    for (Check check : {check_L1, check_L2, check_L3, check_L4, check_L5, check_L6, check_units})
        invariants.push_back({check, 0, ""});
    auto use = [&](const Case& c) {
        for (Invariant& invariant : invariants) {
            std::string fault = c.fault.empty() ? invariant.check(c) : c.fault;
            invariant.layouts++;
            if (!fault.empty() && invariant.faults.size() < 1000) invariant.faults += c.name() + fault + "\n";
        }
    };
    for (int ranks = 1; ranks <= 9; ranks++) {
        for (size_t n = 0; n <= 64; n++) for_each_layout(n, ranks, use);
        if (ranks == 1 || ranks == 3 || ranks == 8)
            for (size_t n : {(size_t)127, (size_t)1025, (size_t)4096 * 2 + 1}) for_each_layout(n, ranks, use);
    }
    return invariants;
}

void expect_holds(Check check) {
    for (const Invariant& invariant : sweep())
        if (invariant.check == check) {
            EXPECT_EQ(invariant.faults, "");
            EXPECT_GE(invariant.layouts, 9 * 65 * 300);
        }
}

TEST(Layout, L1_segments_lie_in_the_buffer_and_do_not_overlap) { expect_holds(check_L1); }
TEST(Layout, L2_buckets_cover_the_buffer) { expect_holds(check_L2); }
TEST(Layout, L3_buckets_and_slices_are_aligned_and_within_the_limit) { expect_holds(check_L3); }
TEST(Layout, L4_slices_are_equal_and_fill_the_shard) { expect_holds(check_L4); }
TEST(Layout, L5_chunk_tables_cover_each_element_once) { expect_holds(check_L5); }
TEST(Layout, L6_padding_belongs_to_nobody) { expect_holds(check_L6); }
TEST(Layout, UnitsAndBucketsKnowEachOther) { expect_holds(check_units); }
TEST(Layout, NothingIsLeftAllocated) { EXPECT_EQ(allocations_live, 0); }

/* ------------------------------------------------------------------ faults of others */

size_t owned(const ZeroLayout& l, int rank) {
    ZeroChunk* chunks;
    std::vector<size_t> first((size_t)l.buckets_count + 1);
    size_t sum = 0;
    EXPECT_EQ(zero_chunk_table(&l, rank, ZERO_CHUNK_MAX_COUNT, &chunks, first.data()).code, ZERO_OK);
    for (size_t i = 0; i < first[l.buckets_count]; i++) sum += chunks[i].count;
    counted_free(chunks);
    return sum;
}

Segments one_segment(size_t n) { return Segments(1, zero_segment("w", n, 0)); }

TEST(Layout, A1_fewer_elements_than_ranks) {
    for (size_t n : {(size_t)3, (size_t)5}) {
        Case c(one_segment(n), zero_layout_config(4, ZERO_FP32));
        EXPECT_EQ(owned(c.layout, 0), n);
        for (int rank = 1; rank < 4; rank++) EXPECT_EQ(owned(c.layout, rank), 0u);
        EXPECT_EQ(zero_slice_count(&c.layout, 0), 64u); /* and still the common count */
    }
}

TEST(Layout, A3_any_rank_may_hold_padding_and_each_knows_its_real_length) {
    for (int ranks = 1; ranks <= 9; ranks++) {
        Case c(one_segment(64 * 5 + 10),
               zero_layout_config(ranks, ZERO_FP32)); /* 5 blocks of 64 and 10 elements */
        size_t sum = 0, slice = zero_slice_count(&c.layout, 0);
        for (int rank = 0; rank < ranks; rank++) {
            size_t start = (size_t)rank * slice, end = start + slice;
            size_t real = end <= 330 ? slice : start < 330 ? 330 - start : 0;
            EXPECT_EQ(owned(c.layout, rank), real) << rank << " of " << ranks;
            sum += owned(c.layout, rank);
        }
        EXPECT_EQ(sum, 330u);
    }
}

TEST(Layout, A5_A7_every_bucket_is_padded_to_equal_slices) {
    ZeroLayoutConfig config = zero_layout_config(4, ZERO_FP32);
    config.units_apart = 1;
    Segments segments = {zero_segment("a", 10, 0), zero_segment("b", 73, 1), zero_segment("c", 300, 2)};
    Case c(segments, config);
    ASSERT_EQ(c.layout.buckets_count, 3);
    EXPECT_EQ(c.layout.buckets[0].count, 256u);
    EXPECT_EQ(c.layout.buckets[1].count, 256u);
    EXPECT_EQ(c.layout.buckets[2].count, 512u);
    EXPECT_EQ(c.layout.padded_count, 1024u); /* what the caller allocates, tail included */
}

TEST(Layout, UnitsLieInTheOrderOfUse) {
    Segments segments = {zero_segment("late", 100, 2), zero_segment("early", 100, 0),
                         zero_segment("middle", 0, 1), zero_segment("early too", 1, 0)};
    Case c(segments, zero_layout_config(2, ZERO_FP32));
    EXPECT_EQ(c.layout.segments[1].flat_offset, 0u);
    EXPECT_EQ(c.layout.segments[3].flat_offset, 128u);
    EXPECT_EQ(c.layout.segments[0].flat_offset, 192u);
    EXPECT_EQ(c.layout.segments[0].model_offset, 0u); /* model order stays the caller's */
    EXPECT_EQ(c.layout.segments[1].model_offset, 100u);
    EXPECT_EQ(zero_unit_offset(&c.layout, 3), 128u);
    EXPECT_EQ(c.layout.units_count, 3);
    EXPECT_EQ(c.layout.unit_buckets_first[2] - c.layout.unit_buckets_first[1], 0); /* no element, no bucket */
}

TEST(Layout, OffsetsGivenInterleavedUnits) {
    ZeroLayoutConfig config = zero_layout_config(2, ZERO_FP32);
    Segments segments = {zero_segment("a0", 50, 0), zero_segment("b0", 50, 1), zero_segment("a1", 50, 0),
                         zero_segment("b1", 50, 1)};
    size_t offsets[] = {401, 1, 101, 1001};
    config.offsets_given = 1;
    config.bucket_bytes = 512;
    for (int i = 0; i < 4; i++) segments[i].flat_offset = offsets[i];
    for (config.units_apart = 0; config.units_apart < 2; config.units_apart++) {
        Case c(segments, config);
        EXPECT_EQ(c.layout.unit_offset[0], 101u);
        EXPECT_EQ(c.layout.unit_offset[1], 1u);
        for (Check check : {check_L1, check_L2, check_L3, check_L4, check_L5, check_L6, check_units})
            EXPECT_EQ(check(c), "") << c.name();
    }
}

/* ------------------------------------------------------------------ beyond 32 bits: arithmetic only */

TEST(Layout, SizesBeyond32Bits) {
    for (size_t n : {((size_t)1 << 31) - 1, (size_t)1 << 31, ((size_t)1 << 32) + 1, (size_t)1 << 40})
        for (int ranks : {1, 2, 3, 7}) {
            Segments segments = {zero_segment("first", 5, 0), zero_segment("big", n, 0),
                                 zero_segment("last", 9, 0)};
            ZeroLayoutConfig config = zero_layout_config(ranks, ZERO_BF16);
            config.bucket_bytes = n / 3;
            Case c(Segments(), config);
            zero_layout_free(&c.layout); /* without the map, which has no room for so many */
            ASSERT_EQ(zero_layout(&c.layout, segments.data(), 3, &config).code, ZERO_OK);
            EXPECT_EQ(check_L2(c) + check_L4(c), "");
            EXPECT_EQ(c.layout.model_count, n + 14);
            EXPECT_EQ(c.layout.segments[1].flat_offset, 128u);
            EXPECT_EQ(c.layout.segments[2].flat_offset, (128 + n + 127) / 128 * 128);
            EXPECT_EQ(c.layout.segments[2].model_offset, n + 5);
            size_t sum = 0, model_end = 0;
            for (int rank = 0; rank < ranks; rank++) {
                ZeroChunk* chunks;
                std::vector<size_t> first((size_t)c.layout.buckets_count + 1);
                ASSERT_EQ(zero_chunk_table(&c.layout, rank, 0x10000000, &chunks, first.data()).code, ZERO_OK);
                for (size_t i = 0; i < first[c.layout.buckets_count]; i++) {
                    const ZeroSegment& s = c.layout.segments[chunks[i].segment];
                    sum += chunks[i].count;
                    EXPECT_EQ(chunks[i].model_offset - s.model_offset, chunks[i].flat_offset - s.flat_offset);
                    EXPECT_LE(chunks[i].state_offset + chunks[i].count, zero_shard_count(&c.layout));
                    if (chunks[i].model_offset + chunks[i].count > model_end)
                        model_end = chunks[i].model_offset + chunks[i].count;
                }
                counted_free(chunks);
            }
            EXPECT_EQ(sum, n + 14);
            EXPECT_EQ(model_end, n + 14);
        }
}

TEST(Layout, HugeModelsAreCountedAtOnce) {
    Segments segments = one_segment((size_t)1 << 57);
    ZeroLayoutConfig config = zero_layout_config(1, ZERO_FP32);
    ZeroLayout layout;
    ZeroChunk* chunks;
    config.bucket_bytes = 256; /* 2^51 buckets: refused without counting one by one */
    ZeroResult r = zero_layout(&layout, segments.data(), 1, &config);
    EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
    EXPECT_NE(strstr(r.text, "256 bytes"), nullptr) << r.text;
    config.bucket_bytes = 0;
    ASSERT_EQ(zero_layout(&layout, segments.data(), 1, &config).code, ZERO_OK);
    EXPECT_EQ(zero_walk_chunks(&layout, 0, 4096, NULL, NULL), (size_t)1 << 45);
    allocations_until_failure = 0; /* 2^45 chunks: no memory, in words */
    r = zero_chunk_table(&layout, 0, 4096, &chunks, NULL);
    allocations_until_failure = -1;
    EXPECT_EQ(r.code, ZERO_ERROR_MEMORY);
    EXPECT_NE(strstr(r.text, "35184372088832"), nullptr) << r.text;
    zero_layout_free(&layout);
}

/* ------------------------------------------------------------------ what is refused */

/* The refusal's text has `word` in it; nothing is left. */
void refused(const Segments& segments, int count, const ZeroLayoutConfig& config, const char* word) {
    ZeroLayout layout;
    int before = allocations_live;
    ZeroResult r = zero_layout(&layout, segments.data(), count, &config);
    EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT) << word;
    EXPECT_NE(strstr(r.text, word), nullptr) << r.text;
    EXPECT_EQ(strchr(r.text, '\n'), nullptr);
    EXPECT_EQ(allocations_live, before) << r.text;
    EXPECT_EQ(layout.segments, nullptr);
    EXPECT_EQ(layout.buckets, nullptr);
}

TEST(Layout, BadInputIsRefusedInWords) {
    const ZeroLayoutConfig good = zero_layout_config(2, ZERO_FP32);
    Segments segments = {zero_segment("w", 10, 0), zero_segment(NULL, 20, 1)};
    ZeroLayoutConfig config = good;
    config.ranks = 0, refused(segments, 2, config, "0 ranks");
    config.ranks = -3, refused(segments, 2, config, "-3 ranks");
    config = good;
    config.dtype = (ZeroDtype)7, refused(segments, 2, config, "dtype 7");
    refused(segments, -1, good, "-1 segments");
    refused(Segments(), 4, good, "4 segments");
    for (int unit : {-1, 2, 2147483647}) {
        segments[1].unit = unit;
        refused(segments, 2, good, std::to_string(unit).c_str());
    }
    segments[1].unit = 1;
    segments[1].count = SIZE_MAX - 5, refused(segments, 2, good, "18446744073709551610");
    segments[1].count = SIZE_MAX / 4, refused(segments, 2, good, "too large");
    segments[0].count = SIZE_MAX / 64 - 1, segments[1].count = 1, refused(segments, 2, good, "too many");
    segments[0].count = 10, segments[1].count = 20;
    config = good;
    config.offsets_given = 1;
    segments[1].flat_offset = 9,
    refused(segments, 2, config, "starts at 9, inside segment 0 that ends at 10");
    segments[1].flat_offset = SIZE_MAX - 3, refused(segments, 2, config, "18446744073709551612");
    segments[1].flat_offset = 10;
    EXPECT_EQ(check_L5(Case(segments, config)), ""); /* side by side is no overlap */
    config = zero_layout_config(1, ZERO_FP32);
    config.bucket_bytes = 256;
    refused(one_segment((size_t)64 * ZERO_BUCKETS_MAX + 1), 1, config,
            std::to_string(ZERO_BUCKETS_MAX).c_str());
}

TEST(Layout, AsManyBucketsAsAllowed) {
    ZeroLayoutConfig config = zero_layout_config(1, ZERO_FP32);
    Segments segments = one_segment((size_t)64 * ZERO_BUCKETS_MAX);
    ZeroLayout layout;
    config.bucket_bytes = 256;
    ASSERT_EQ(zero_layout(&layout, segments.data(), 1, &config).code, ZERO_OK);
    EXPECT_EQ(layout.buckets_count, ZERO_BUCKETS_MAX);
    zero_layout_free(&layout);
}

TEST(Layout, BadChunkTablesAreRefusedInWords) {
    Case c(one_segment(100), zero_layout_config(3, ZERO_FP32));
    ZeroChunk* chunks = (ZeroChunk*)&c;
    for (int rank : {3, -2}) {
        ZeroResult r = zero_chunk_table(&c.layout, rank, 4096, &chunks, NULL);
        EXPECT_EQ(r.code, ZERO_ERROR_ARGUMENT);
        EXPECT_NE(strstr(r.text, std::to_string(rank).c_str()), nullptr) << r.text;
        EXPECT_EQ(chunks, nullptr);
    }
    EXPECT_EQ(zero_chunk_table(&c.layout, 0, 0, &chunks, NULL).code, ZERO_ERROR_ARGUMENT);
    EXPECT_EQ(zero_chunk_table(&c.layout, 0, (size_t)UINT32_MAX + 1, &chunks, NULL).code,
              ZERO_ERROR_ARGUMENT);
}

TEST(Layout, EveryAllocationMayFail) {
    Segments segments = cut(300, 3);
    ZeroLayoutConfig config = zero_layout_config(2, ZERO_FP32);
    config.bucket_bytes = 1024;
    int n;
    for (n = 0; n < 100; n++) {
        ZeroLayout layout;
        int before = allocations_live;
        allocations_until_failure = n;
        ZeroResult r = zero_layout(&layout, segments.data(), (int)segments.size(), &config);
        bool enough = allocations_until_failure > 0 || r.code == ZERO_OK;
        allocations_until_failure = -1;
        if (r.code == ZERO_OK) zero_layout_free(&layout);
        EXPECT_EQ(allocations_live, before) << "allocation " << n;
        if (enough) break;
        EXPECT_EQ(r.code, ZERO_ERROR_MEMORY) << "allocation " << n;
        EXPECT_NE(strstr(r.text, "no host memory"), nullptr) << r.text;
    }
    EXPECT_GE(n, 8); /* segments, keys, by_offset, unit_offset, buckets, seen, three of units */
    EXPECT_LT(n, 100);
}

} // namespace
