// Runs parallel regions that do not wait for a thread whose core another process took (team.cpp).
#pragma once
#include <omp.h>
#include <time.h>

#include <atomic>
#include <cstdint>

extern "C" int kv_team_size(int64_t now);
extern "C" void kv_team_report(int threads, int64_t lost, int64_t now);

inline int64_t nanoseconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
}

// Stands for one region: create it before, and a `Member` in each thread. A team of one reads no clock.
struct Team {
    int threads = 1;
    int64_t began = 0;
    std::atomic<int64_t> lost{0};  // in ns, for the thread that was off its core the longest

    explicit Team(bool worth = true) {
        if (!worth || omp_get_max_threads() == 1) return;
        began = nanoseconds(CLOCK_MONOTONIC);
        threads = kv_team_size(began);
    }
    ~Team() {
        if (threads > 1) kv_team_report(threads, lost, nanoseconds(CLOCK_MONOTONIC));
    }
};

// Counts a thread's time from the region's start, since it may be kept from joining at all.
struct Member {
    Team& team;
    int64_t worked = 0;  // this thread's CPU time before the region

    explicit Member(Team& team) : team(team) {
        if (team.threads > 1) worked = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    }
    ~Member() {
        if (team.threads == 1) return;
        int64_t wall = nanoseconds(CLOCK_MONOTONIC) - team.began;
        int64_t off = wall - (nanoseconds(CLOCK_THREAD_CPUTIME_ID) - worked), seen = team.lost;
        while (off > seen && !team.lost.compare_exchange_weak(seen, off)) {}
    }
};

// Calls f(task) for all tasks, handed out one by one; unless it is `worth` it, in this thread alone.
template <class F> void each_task(int64_t tasks, bool worth, F f) {
    Team team(worth && tasks > 1);
    if (team.threads == 1) {
        for (int64_t task = 0; task < tasks; task++) f(task);
        return;
    }
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(task);
    }
}
