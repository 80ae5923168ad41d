// Copies rows of each KV head to and from a block of their own. Rows of a head are scattered, so they are prefetched.
#include "calls.hpp"
#include "simd.hpp"

namespace {

constexpr int64_t AHEAD = 1 << 13;  // bytes prefetched ahead of the copy
constexpr int64_t TASK = 1 << 15;   // bytes per task

inline char* row_of(const CopyRows& call, int64_t i) {
    int64_t pair = i / call.count, sequence = pair / call.groups, group = pair % call.groups;
    if (const int64_t* at = call.table ? call.table + 3 * sequence : nullptr)
        return (char*)at[0] + group * at[1] + call.rows[i] * at[2];
    return (char*)call.x + sequence * call.x_batch + group * call.x_group + call.rows[i] * call.x_row;
}

// Calls f(row of x, row of the block) for all rows, in parallel.
template <class F> void per_sequence(const CopyRows& call, F f) {
    int64_t total = call.pairs * call.count, ahead = AHEAD / call.width + 1, per_task = TASK / call.width + 1;
    each_task((total + per_task - 1) / per_task, total * call.width > 2 * TASK, [&](int64_t task) {
        for (int64_t i = task * per_task; i < std::min(total, (task + 1) * per_task); i++) {
            if (call.counts && i % call.count >= call.counts[i / call.count / call.groups]) continue;
            const char* later = row_of(call, std::min(i + ahead, total - 1));
            for (int64_t c = 0; c < call.width; c += LINE) __builtin_prefetch(later + c, 0, 2);
            f(row_of(call, i), (char*)call.block + i * call.width, call.width);
        }
    });
}

}  // namespace

EXPORT void gather_rows(const CopyRows& call) {
    per_sequence(call, [](char* row, char* place, int64_t width) { std::memcpy(place, row, width); });
}
EXPORT void gather_tiers(const CopyTiers& call) {
    int64_t total = call.pairs * call.count, per_task = TASK / call.width + 1;
    each_task((total + per_task - 1) / per_task, total * call.width > 2 * TASK, [&](int64_t task) {
        for (int64_t i = task * per_task; i < std::min(total, (task + 1) * per_task); i++) {
            int64_t pair = i / call.count, sequence = pair / call.groups, group = pair % call.groups;
            const int64_t slot = call.slots[i], *at = call.table ? call.table + 3 * sequence : nullptr;
            const char* row =
                slot >= 0
                    ? (const char*)call.held + sequence * call.held_batch + group * call.held_group + slot * call.held_row
                : at ? (const char*)at[0] + group * at[1] + call.rows[i] * at[2]
                     : (const char*)call.far + sequence * call.far_batch + group * call.far_group + call.rows[i] * call.far_row;
            std::memcpy((char*)call.block + i * call.width, row, call.width);
        }
    });
}
EXPORT void put_rows(const CopyRows& call) {
    per_sequence(call, [](char* row, char* place, int64_t width) { std::memcpy(row, place, width); });
}
