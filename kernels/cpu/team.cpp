// How many threads a parallel region gets: one state for all libraries of this process (team.hpp).
//
// A region ends when its last thread does. Where another process keeps a core busy, the kernel takes that core from one
// of ours for some milliseconds, and a decode step of a dozen short regions waits a dozen times. So a thread that was
// kept off its core is left out for a while; then all are tried again, later and later while it goes on.
#include "team.hpp"

#include <algorithm>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t MS = 1000000;            // ns
constexpr int64_t LOST = MS / 2;           // off the core for as long as this in one region: not a mere interrupt
constexpr int64_t SHORTEST = 20 * MS, LONGEST = 640 * MS;

std::atomic<int> size{0};                  // of the team while `until` has not come; 0: all threads
std::atomic<int64_t> until{0}, pause{SHORTEST};

}  // namespace

EXPORT int kv_team_size(int64_t now) {
    int all = omp_get_max_threads(), some = size.load(std::memory_order_relaxed);
    return some && now < until.load(std::memory_order_relaxed) ? std::min(some, all) : all;
}

// A region of `threads` threads ended at `now`; one of them was off its core for `lost` ns.
EXPORT void kv_team_report(int threads, int64_t lost, int64_t now) {
    if (lost > LOST) {
        bool again = now < until.load(std::memory_order_relaxed) + pause.load(std::memory_order_relaxed);
        pause = again ? std::min(2 * pause.load(), LONGEST) : SHORTEST;
        size = std::max(1, threads - 1);
        until = now + pause;
    }
}

EXPORT void kv_team_forget() { size = 0, until = 0, pause = SHORTEST; }
