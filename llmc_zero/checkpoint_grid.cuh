/* llmc_zero/checkpoint_grid.cuh - the pieces of a checkpoint: which rank writes which, and where its bytes lie.

   The file's data is cut into pieces of 4 MB (the last one shorter), whatever ranks, stage and buckets are: a piece has
   one checksum, and one rank writes all of it. So the header tells nothing of who wrote the file, and no two ranks write
   bytes of one page: a client of a network's file system writes whole pages back, which would undo what another rank
   has written beside it.
   G1  pieces begin at multiples of 4 MB of the data, and the data at a multiple of 64 KB of the file (ZERO_FILE_ALIGN).
   G2  every rank computes the same writers from the same layout. A piece's writer is the rank that owns more than half
       of it; where no rank does, piece k is written by rank k modulo ranks. With slices that are large beside a piece
       only what lies at their edges moves from one rank to another, with small ones most does, and the writing is
       shared evenly all the same.
   G3  a piece is made of parts: elements of one array that one rank holds side by side. What all ranks hold (params
       that are not sharded, everything in stage 0) is taken from the writer itself.

   defines: ZeroPart, zero_part_at, ZeroGrid, zero_grid
*/
#ifndef LLMC_ZERO_CHECKPOINT_GRID_CUH_INCLUDED
#define LLMC_ZERO_CHECKPOINT_GRID_CUH_INCLUDED

#include "checkpoint_parts.cuh"

/* Elements [first, first + count) of an array's buffer on the rank that holds them. */
typedef struct ZeroPart {
    const ZeroArray* array;
    int owner;       /* of the slice that they lie in */
    int held_by_all; /* in buffers of other ranks as well, at the same place */
    size_t first, count;
    uint64_t bytes;
} ZeroPart;

/* The part that begins at byte `at` of the data and ends at byte `end` at the latest. at < end <= the data's bytes. */
static inline ZeroPart zero_part_at(const ZeroOptimizer* z, const ZeroArray* arrays, int arrays_count,
                                    uint64_t at, uint64_t end) {
    const ZeroLayout* layout = z->layout;
    const ZeroArray* array = &arrays[arrays_count - 1];
    ZeroPart part;
    while (array->offset > at) array--;
    const size_t index = (size_t)((at - array->offset) / array->element_bytes);
    const ZeroSegment* segment =
        std::upper_bound(layout->segments, layout->segments + layout->segments_count, index,
                         [](size_t i, const ZeroSegment& s) { return i < s.model_offset; }) -
        1; /* not one of no elements: the next begins where it does */
    const size_t flat = segment->flat_offset + (index - segment->model_offset);
    const ZeroBucket* bucket =
        std::upper_bound(layout->buckets, layout->buckets + layout->buckets_count, flat,
                         [](size_t i, const ZeroBucket& b) { return i < b.flat_offset; }) -
        1;
    const int b = (int)(bucket - layout->buckets);
    const size_t slice = zero_slice_count(layout, b), inside = (flat - bucket->flat_offset) % slice;
    part.array = array;
    part.owner = (int)((flat - bucket->flat_offset) / slice);
    part.held_by_all = array->is_flat || z->config.stage == 0;
    part.first = part.held_by_all ? flat : zero_shard_offset(layout, b) + inside;
    part.count = std::min(slice - inside, segment->model_offset + segment->count - index);
    part.count = (size_t)std::min<uint64_t>(part.count, (end - at) / array->element_bytes);
    part.bytes = part.count * array->element_bytes;
    return part;
}

typedef struct ZeroGrid {
    std::vector<int> writer; /* of each piece */
    /* the pieces in the order in which they are written: in round i each rank writes its i-th one */
    std::vector<std::pair<size_t, size_t>> rounds; /* round, piece */
} ZeroGrid;

/* The rank that owns more than half of bytes [at, end), or -1: the only candidate is the one that is left when bytes of
   different ranks cancel each other out. */
static inline int zero_grid_majority(const ZeroOptimizer* z, const ZeroArray* arrays, int arrays_count,
                                     uint64_t at, uint64_t end) {
    uint64_t lead = 0, owned = 0;
    int rank = -1;
    for (uint64_t from = at; from < end;) {
        const ZeroPart part = zero_part_at(z, arrays, arrays_count, from, end);
        if (part.owner == rank)
            lead += part.bytes;
        else if (lead >= part.bytes)
            lead -= part.bytes;
        else
            rank = part.owner, lead = part.bytes - lead;
        from += part.bytes;
    }
    for (uint64_t from = at; from < end;) {
        const ZeroPart part = zero_part_at(z, arrays, arrays_count, from, end);
        if (part.owner == rank) owned += part.bytes;
        from += part.bytes;
    }
    return 2 * owned > end - at ? rank : -1;
}

/* Pieces, without checksums, and their writers (G1, G2). */
static inline void zero_grid(ZeroGrid* grid, const ZeroOptimizer* z, const ZeroArray* arrays,
                             int arrays_count, ZeroFileHeader* header) {
    std::vector<size_t> written((size_t)z->ranks, 0);
    for (uint64_t at = 0; at < header->data_bytes; at += ZERO_FILE_PIECE_BYTES) {
        const size_t k = header->pieces.size();
        const uint64_t end = std::min(at + ZERO_FILE_PIECE_BYTES, header->data_bytes);
        int writer = zero_grid_majority(z, arrays, arrays_count, at, end);
        if (writer < 0) writer = (int)(k % (size_t)z->ranks);
        header->pieces.push_back({at, end - at, 0});
        grid->writer.push_back(writer);
        grid->rounds.push_back({written[(size_t)writer]++, k});
    }
    std::sort(grid->rounds.begin(), grid->rounds.end());
}

#endif /* LLMC_ZERO_CHECKPOINT_GRID_CUH_INCLUDED */
