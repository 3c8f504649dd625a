/* llmc_zero/call_order.cuh - which calls a micro-step makes, in their order. Host only, C99 and C++.

   Collectives are started by the calls for units: a gather by an acquire, a reduce by a ready. A rank that cannot compute its
   micro-batch has to start them all the same, in the order of the other ranks (zero_drop). That order is the program's, and
   known once it has run: every micro-step's calls are noted, and kept when it has ended, for a step's last micro-step and for
   those before it. They may differ: a program that begins a micro-step where backward begins has the next forward's calls
   at its end.

   defines: ZeroCall, ZeroCallList, ZeroCallOrder, zero_calls_note, zero_calls_keep, zero_calls_usual, zero_calls_free
*/
#ifndef LLMC_ZERO_CALL_ORDER_CUH_INCLUDED
#define LLMC_ZERO_CALL_ORDER_CUH_INCLUDED

#include "layout.cuh"

typedef enum ZeroCall {
    ZERO_CALL_PARAMS_ACQUIRE = 0,
    ZERO_CALL_PARAMS_RELEASE,
    ZERO_CALL_GRADS_ACQUIRE,
    ZERO_CALL_GRADS_READY
} ZeroCall;

typedef struct ZeroCallList {
    int64_t* calls; /* 4 * unit + ZeroCall */
    size_t count, capacity;
    int whole; /* 0: nothing is known, or there was no memory for all of it */
} ZeroCallList;

typedef struct ZeroCallOrder {
    ZeroCallList now;      /* the micro-step that runs */
    ZeroCallList usual[2]; /* the newest that has ended: [1] a step's last one, [0] one before the last */
} ZeroCallOrder;

static inline void zero_calls_free(ZeroCallOrder* order) {
    free(order->now.calls);
    free(order->usual[0].calls);
    free(order->usual[1].calls);
    memset(order, 0, sizeof(*order));
}

/* A micro-step begins. */
static inline void zero_calls_begin(ZeroCallOrder* order) {
    order->now.count = 0;
    order->now.whole = 1;
}

/* A call has been made. Without memory for it the order is not known, which matters to zero_drop alone. */
static inline void zero_calls_note(ZeroCallOrder* order, int unit, ZeroCall call) {
    ZeroCallList* now = &order->now;
    if (!now->whole) return;
    if (now->count == now->capacity) {
        const size_t capacity = now->capacity ? 2 * now->capacity : 64;
        int64_t* calls = (int64_t*)realloc(now->calls, capacity * sizeof(*calls));
        now->whole = calls != NULL;
        if (!calls) return;
        now->calls = calls;
        now->capacity = capacity;
    }
    now->calls[now->count++] = 4 * (int64_t)unit + (int64_t)call;
}

/* The micro-step that runs has ended: so it is done. */
static inline void zero_calls_keep(ZeroCallOrder* order, int last) {
    const ZeroCallList before = order->usual[last];
    if (!order->now.whole) return;
    order->usual[last] = order->now;
    order->now = before;
    order->now.whole = 0;
}

/* How many calls a micro-step usually makes, and which; 0: not known. A last micro-step is as the one before it, without what
   that may have of the next forward: acquires after the last gradients. */
static inline size_t zero_calls_usual(const ZeroCallOrder* order, int last, const int64_t** calls) {
    const ZeroCallList* list = &order->usual[last];
    size_t count, i;
    if (!list->whole && last) list = &order->usual[0];
    if (!list->whole) return 0;
    *calls = list->calls;
    count = list->count;
    if (list == &order->usual[last]) return count;
    for (i = count; i > 0 && list->calls[i - 1] % 4 != ZERO_CALL_GRADS_READY; i--)
        if (list->calls[i - 1] % 4 == ZERO_CALL_PARAMS_ACQUIRE) count = i - 1;
    return count;
}

#endif /* LLMC_ZERO_CALL_ORDER_CUH_INCLUDED */
