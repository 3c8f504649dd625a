/* llmc_zero/slots.cuh - device buffers that hold one unit each: gradients in stages 2 and 3, parameters in stage 3. Which
   unit lies in which, and which one is wanted next. Host logic only; the stream order is optimizer.cuh's.

   A held unit has a slot of its own; the others share the common slots. A slot that is open (its unit is acquired) is never
   given away; of the others the one goes first whose unit came first.

   The next unit is the one that followed the last time when this unit was reached from the same side (from a lower unit, from
   a higher one, or from itself); the first time it is the neighbour in the same direction. A wrong guess costs a gather,
   nothing else. All ranks make the same calls, so they guess alike.

   defines: ZeroSlot, ZeroSlots, zero_slots_create, zero_slots_free, zero_slots_find, zero_slots_pick, zero_slots_visit
*/
#ifndef LLMC_ZERO_SLOTS_CUH_INCLUDED
#define LLMC_ZERO_SLOTS_CUH_INCLUDED

#include "collectives.cuh"

#define ZERO_NO_UNIT (-1)

typedef struct ZeroSlot {
    void* memory;
    size_t count; /* elements */
    int unit;     /* that lies in it, or ZERO_NO_UNIT */
    int open;     /* acquired, and so often not released */
    int pending;  /* a collective reads or writes it, and the compute stream has not waited for that yet */
    cudaEvent_t done; /* behind that collective */
    uint64_t used;    /* when its unit came, in counts of zero_slots_pick */
} ZeroSlot;

typedef struct ZeroSlots {
    ZeroSlot* slots;
    int count, common; /* the first `common` ones are for any unit that is not held */
    int units_count;
    int* held;   /* of a unit: its own slot, or -1 */
    int* follow; /* of a unit, three: what came next after reaching it from below, from above, from itself */
    uint64_t clock;
    int unit, side; /* the last visit */
} ZeroSlots;

static inline size_t zero_slot_bytes(const ZeroSlot* slot, const ZeroLayout* layout) {
    return slot->count * zero_dtype_bytes(layout->dtype);
}

/* Frees what lies on the host, and the events; slot memory is the caller's. */
static inline void zero_slots_free(ZeroSlots* s) {
    int i;
    for (i = 0; i < s->count; i++)
        if (s->slots[i].done) cudaEventDestroy(s->slots[i].done);
    free(s->slots);
    free(s->held);
    free(s->follow);
    memset(s, 0, sizeof(*s));
}

/* Describes `common` slots of common_count elements and one for each held unit; memory is not allocated here. On an error call
   zero_slots_free. */
static inline ZeroResult zero_slots_create(ZeroSlots* s, const ZeroLayout* layout,
                                           const ZeroPlanChoice* choice, int common, size_t common_count) {
    const size_t units = (size_t)layout->units_count;
    int i, u;
    memset(s, 0, sizeof(*s));
    s->units_count = layout->units_count;
    s->common = common;
    s->unit = ZERO_NO_UNIT;
    s->slots =
        (ZeroSlot*)zero_alloc_array((size_t)common + (size_t)choice->held_units_count, sizeof(ZeroSlot));
    s->held = (int*)zero_alloc_array(units, sizeof(int));
    s->follow = (int*)zero_alloc_array(3 * units, sizeof(int));
    if (!s->slots || !s->held || !s->follow)
        return zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu units", units);
    for (s->count = 0; s->count < common; s->count++) s->slots[s->count].count = common_count;
    for (u = 0; u < layout->units_count; u++) {
        size_t first, count = zero_unit_span(layout, u, &first);
        s->held[u] = -1;
        for (i = 0; i < 3; i++) s->follow[3 * u + i] = ZERO_NO_UNIT;
        if (!zero_is_held(choice, u) || count == 0) continue;
        s->slots[s->count].count = count;
        s->held[u] = s->count++;
    }
    for (i = 0; i < s->count; i++) {
        s->slots[i].unit = ZERO_NO_UNIT;
        ZERO_TRY_CUDA(cudaEventCreateWithFlags(&s->slots[i].done, cudaEventDisableTiming));
    }
    return zero_ok();
}

/* The slot in which a unit lies, or NULL. */
static inline ZeroSlot* zero_slots_find(ZeroSlots* s, int unit) {
    int i;
    if (s->held[unit] >= 0) return s->slots[s->held[unit]].unit == unit ? &s->slots[s->held[unit]] : NULL;
    for (i = 0; i < s->common; i++)
        if (s->slots[i].unit == unit) return &s->slots[i];
    return NULL;
}

/* A slot for a unit that lies in none; what was there is given up. NULL: all are open. */
static inline ZeroSlot* zero_slots_pick(ZeroSlots* s, int unit) {
    ZeroSlot* best = s->held[unit] >= 0 ? &s->slots[s->held[unit]] : NULL;
    int i;
    for (i = 0; i < s->common && s->held[unit] < 0; i++) {
        ZeroSlot* slot = &s->slots[i];
        if (slot->open) continue;
        if (!best || slot->used < best->used) best = slot;
    }
    if (!best) return NULL;
    for (i = 0; i < s->common; i++)
        if (s->slots[i].unit == unit)
            s->slots[i].unit = ZERO_NO_UNIT; /* gradients of an earlier micro-step */
    best->unit = unit;
    best->used = ++s->clock;
    return best;
}

/* Which unit will probably be wanted behind the one visited last; ZERO_NO_UNIT: none. */
static inline int zero_slots_next(const ZeroSlots* s) {
    int next;
    if (s->unit == ZERO_NO_UNIT) return ZERO_NO_UNIT;
    next = s->follow[3 * s->unit + s->side];
    if (next != ZERO_NO_UNIT) return next;
    next = s->side == 0 || (s->side == 2 && s->unit == 0) ? s->unit + 1 : s->unit - 1;
    return next >= 0 && next < s->units_count ? next : ZERO_NO_UNIT;
}

/* Notes that a unit was acquired. */
static inline void zero_slots_visit(ZeroSlots* s, int unit) {
    if (s->unit != ZERO_NO_UNIT) s->follow[3 * s->unit + s->side] = unit;
    s->side = unit > s->unit ? 0 : unit < s->unit ? 1 : 2;
    s->unit = unit;
}

/* For error messages: a unit in an open common slot. */
static inline int zero_slots_open_unit(const ZeroSlots* s) {
    int i;
    for (i = 0; i < s->common; i++)
        if (s->slots[i].open) return s->slots[i].unit;
    return ZERO_NO_UNIT;
}

#endif /* LLMC_ZERO_SLOTS_CUH_INCLUDED */
