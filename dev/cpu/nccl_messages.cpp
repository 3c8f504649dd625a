/* dev/cpu/nccl_messages.cpp - the sends and receives of one group.

   From each rank to each other leads a channel that holds one message. The sender posts where its data
   lies; the receiver reads it in place and takes the message. All channels of a group advance together, so
   the order of the calls cannot deadlock. A receiver that expects another count or type writes so into the
   channel: both ranks stop with both sides' values.
*/
#include "nccl_world.h"
#include <string.h>

namespace cuda_cpu {
namespace nccl {
namespace {

struct Queue {
    std::vector<const Call*> calls;
    size_t done = 0;
    bool waiting = false;
};

void disagree(const World& w, int sender, int receiver, const Channel& ch) {
    (void)w;
    fatal("the ranks disagree: rank %d: %s to rank %d, rank %d: %s from rank %d", sender,
          describe(ch.send).c_str(), receiver, receiver, describe(ch.recv).c_str(), sender);
}

/* Posts the next message to a peer if the last one is taken. True if anything moved. */
bool advance_send(World& w, int to, Queue& q) {
    Channel& ch = w.control->channels[w.rank * MAX_RANKS + to];
    bool moved = false;
    if (ch.mismatch.load()) disagree(w, w.rank, to, ch);
    if (q.waiting && ch.taken.load() == ch.posted.load()) {
        q.waiting = false;
        q.done++;
        moved = true;
    }
    if (!q.waiting && q.done < q.calls.size()) {
        ch.send = publishable(*q.calls[q.done]);
        ch.posted.fetch_add(1);
        world_ring(w.control);
        q.waiting = moved = true;
    }
    return moved;
}

/* Takes a message from a peer if there is one. -1: its memory cannot be reached. */
int advance_recv(World& w, int from, Queue& q) {
    Channel& ch = w.control->channels[from * MAX_RANKS + w.rank];
    if (q.done == q.calls.size() || ch.posted.load() == ch.taken.load()) return 0;
    const Call& c = *q.calls[q.done];
    if (ch.send.count != c.count || ch.send.type != c.type) {
        ch.recv = publishable(c);
        ch.mismatch.store(1);
        world_ring(w.control);
        disagree(w, from, w.rank, ch);
    }
    const char* in = world_memory(w, from, ch.send.send_offset);
    if (!in) return -1;
    if (c.count) memcpy(c.recv, in, c.count * type_bytes(c.type));
    ch.taken.fetch_add(1);
    world_ring(w.control);
    q.done++;
    return 1;
}

} // namespace

cudaError_t run_messages(World& w, const std::vector<Call>& calls) {
    if (world_failed(w, nullptr, nullptr)) return cudaErrorUnknown;
    std::vector<Queue> sends(w.ranks), recvs(w.ranks);
    for (const Call& c : calls) {
        check_buffers(w, c);
        (c.kind == SEND ? sends : recvs)[c.root].calls.push_back(&c);
    }
    auto open = [&](int r) {
        return sends[r].done < sends[r].calls.size() || recvs[r].done < recvs[r].calls.size();
    };
    for (;;) {
        bool moved = false, left = false;
        for (int r = 0; r < w.ranks; r++) {
            moved |= advance_send(w, r, sends[r]);
            int took = advance_recv(w, r, recvs[r]);
            if (took < 0) return cudaErrorUnknown;
            moved |= took > 0;
            left |= open(r);
        }
        if (!left) return cudaSuccess;
        if (moved) continue;
        /* nothing to do until some peer posts or takes; any one will do, so none "lacks" as soon as one
           moved */
        auto ready = [&](int r) {
            const Channel& out = w.control->channels[w.rank * MAX_RANKS + r];
            const Channel& in = w.control->channels[r * MAX_RANKS + w.rank];
            bool sent = sends[r].waiting && (out.taken.load() == out.posted.load() || out.mismatch.load());
            bool came = recvs[r].done < recvs[r].calls.size() && in.posted.load() != in.taken.load();
            return sent || came;
        };
        auto lacks = [&](int r) {
            for (int k = 0; k < w.ranks; k++)
                if (ready(k)) return false;
            return open(r);
        };
        if (!world_wait(w, "ncclSend and ncclRecv", lacks)) return cudaErrorUnknown;
    }
}

} // namespace nccl
} // namespace cuda_cpu
