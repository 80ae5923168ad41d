// Rows of each KV head to and from a block of their own. A row is asked for some rows ahead: they lie apart.
#include "simd.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t AHEAD = 1 << 13;  // bytes asked for before they are copied
constexpr int64_t TASK = 1 << 15;   // bytes of a task

struct Call {  // strides in bytes
    char* x;
    const int64_t* rows;  // [B G K]
    char* block;          // [B G K width]
    int64_t pairs, groups, count, width, x_batch, x_group, x_row;

    char* row(int64_t i) const {
        int64_t pair = i / count;
        return x + pair / groups * x_batch + pair % groups * x_group + rows[i] * x_row;
    }
};

// Calls f(row of x, row of the block) for all rows, in parallel.
template <class F> void each(const int64_t* numbers, F f) {
    Call call;
    std::memcpy(&call, numbers, sizeof call);
    int64_t total = call.pairs * call.count, ahead = AHEAD / call.width + 1, some = TASK / call.width + 1;
    each_task((total + some - 1) / some, total * call.width > 2 * TASK, [&](int64_t task) {
        for (int64_t i = task * some; i < std::min(total, (task + 1) * some); i++) {
            const char* later = call.row(std::min(i + ahead, total - 1));
            for (int64_t c = 0; c < call.width; c += LINE) __builtin_prefetch(later + c, 0, 2);
            f(call.row(i), call.block + i * call.width, call.width);
        }
    });
}

}  // namespace

// Numbers as in struct Call.
EXPORT void gather_rows(const int64_t* numbers) {
    each(numbers, [](char* row, char* place, int64_t width) { std::memcpy(place, row, width); });
}
EXPORT void put_rows(const int64_t* numbers) {
    each(numbers, [](char* row, char* place, int64_t width) { std::memcpy(row, place, width); });
}
