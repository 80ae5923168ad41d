// Says how many threads a parallel region gets: one state for all libraries of this process (team.hpp).
//
// A region ends when its last thread does. If another process keeps a core busy, one of our threads loses it for some
// milliseconds at a time, and a decode step of a dozen short regions waits a dozen times. So after a thread was kept
// off its core, teams are one thread smaller for a while; then all threads are tried again, at growing intervals.
#include "team.hpp"

#include <algorithm>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t MS = 1000000;            // ns
constexpr int64_t LOST = MS / 2;           // time off the core in one region that is too long for a mere interrupt
constexpr int64_t SHORTEST = 20 * MS, LONGEST = 640 * MS;

std::atomic<int> size{0};                  // size of the team until `until`; 0: all threads
std::atomic<int64_t> until{0}, pause{SHORTEST};

}  // namespace

EXPORT int kv_team_size(int64_t now) {
    int all = omp_get_max_threads(), some = size.load(std::memory_order_relaxed);
    return some && now < until.load(std::memory_order_relaxed) ? std::min(some, all) : all;
}

// Reports that a region of `threads` threads ended at `now`, and one of them was off its core for `lost` ns.
EXPORT void kv_team_report(int threads, int64_t lost, int64_t now) {
    if (lost > LOST) {
        bool again = now < until.load(std::memory_order_relaxed) + pause.load(std::memory_order_relaxed);
        pause = again ? std::min(2 * pause.load(), LONGEST) : SHORTEST;
        size = std::max(1, threads - 1);
        until = now + pause;
    }
}

EXPORT void kv_team_forget() { size = 0, until = 0, pause = SHORTEST; }
