// Copies rows of each KV head to and from a block of their own. Rows of a head are scattered, so they are prefetched.
#include "calls.hpp"
#include "simd.hpp"

namespace {

constexpr int64_t AHEAD = 1 << 13;  // bytes prefetched ahead of the copy
constexpr int64_t TASK = 1 << 15;   // bytes per task

inline char* row_of(const CopyRows& call, int64_t i) {
    int64_t pair = i / call.count, group = pair % call.groups;
    return HeadRows(call.x, call.x_batch, call.x_group, call.x_row, call.table, pair / call.groups, group)[call.rows[i]];
}

// Returns the row of `held` that a slot names, or else the row of `far`.
inline char* row_of(const CopyTiers& call, int64_t i) {
    int64_t pair = i / call.count, sequence = pair / call.groups, group = pair % call.groups, slot = call.slots[i];
    if (slot >= 0) return HeadRows(call.held, call.held_batch, call.held_group, call.held_row, nullptr, sequence, group)[slot];
    return HeadRows(call.far, call.far_batch, call.far_group, call.far_row, call.table, sequence, group)[call.rows[i]];
}

// Calls f(row of x, row of the block) for all rows, in parallel; a number below zero names none.
template <class Call, class F> void each_row(const Call& call, const int64_t* counts, F f) {
    int64_t total = call.pairs * call.count, ahead = AHEAD / call.width + 1, per_task = TASK / call.width + 1;
    each_task((total + per_task - 1) / per_task, total * call.width > 2 * TASK, [&](int64_t task) {
        for (int64_t i = task * per_task; i < std::min(total, (task + 1) * per_task); i++) {
            if (call.rows[i] < 0 || (counts && i % call.count >= counts[i / call.count / call.groups])) continue;
            const char* later = row_of(call, std::min(i + ahead, total - 1));
            for (int64_t c = 0; c < call.width; c += LINE) __builtin_prefetch(later + c, 0, 2);
            f(row_of(call, i), (char*)call.block + i * call.width);
        }
    });
}

}  // namespace

EXPORT void gather_rows(const CopyRows& call) {
    each_row(call, call.counts, [&](char* row, char* place) { std::memcpy(place, row, call.width); });
}
EXPORT void gather_tiers(const CopyTiers& call) {
    each_row(call, nullptr, [&](char* row, char* place) { std::memcpy(place, row, call.width); });
}
EXPORT void put_rows(const CopyRows& call) {
    each_row(call, call.counts, [&](char* row, char* place) { std::memcpy(row, place, call.width); });
}
