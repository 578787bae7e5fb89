// `together`: a function that all threads of torch's pool run at the same time, with a barrier at which they wait for each
// other. A forward is one such function: to wake the threads for each of its hundred steps would take longer than a small
// step takes.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#ifdef GNU_OPENMP
// clang turns the pragma below into calls of LLVM's library, which torch's wheels for Linux do not bring. So the threads
// of GNU's OpenMP library are called by name.
extern "C" {
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
}
#elif defined(_OPENMP)
#include <omp.h>
#endif

typedef std::chrono::steady_clock Clock;

struct Barrier {
    alignas(64) std::atomic<long> arrived{0};
    alignas(64) std::atomic<long> rounds{0};
    std::atomic<long> stalled{-1}, stalls{0};  // the last round that waited long for a thread; how many did
    std::atomic<Clock::rep> lost{0};           // and the time that they waited
};

// How many threads the next functions are run by. Where another process takes a core, a thread waits for one that does not
// run, at each of a hundred barriers: half as many threads are many times as fast then. Half of them take twice as long for
// the work, so they run only if more than half of a function's time was lost in such waits. After `left` functions all of
// them try again. All threads compute the same numbers, however many they are.
struct Crew {
    static constexpr long STALLS = 3, FIRST = 32, MOST = 4096;
    long threads = 0, left = 0, next = FIRST;

    long size(long full) { return left > 0 ? left--, std::min(threads, full) : full; }
    void ran(long of, long full, long stalls, Clock::rep lost, Clock::rep took) {
        if (stalls >= STALLS && lost > took / 2) {
            threads = (of + 1) / 2, left = next, next = std::min(2 * next, MOST);
        } else if (of == full) {
            next = FIRST;
        }
    }
};
inline thread_local Crew crew;

// One of the threads that run a function together. full: how many they are where no other process takes a core.
struct Member {
    Barrier& barrier;
    long number = 0, of = 1, full = 1;

    // Returns once all threads have called it.
    void wait() const {
        if (of == 1) return;
        long before = barrier.rounds.load(std::memory_order_relaxed);
        if (barrier.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == of) {
            barrier.arrived.store(0, std::memory_order_relaxed);
            barrier.rounds.store(before + 1, std::memory_order_release);
            return;
        }
        // Who yields gives its core to another process for long. With more threads than cores the thread that this one
        // waits for may need it.
        static const long cores = std::thread::hardware_concurrency();
        Clock::time_point begun;
        bool stalled = false;
        for (long tries = of > cores ? 100'000 : 0; barrier.rounds.load(std::memory_order_acquire) == before; tries++) {
            if (tries == 100) begun = Clock::now();  // Most waits are shorter, and shall not ask for the time.
            if (tries == 100'000 && of <= cores) stalled = barrier.stalled.exchange(before) != before;
            if (tries >= 100'000) std::this_thread::yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
        if (stalled) barrier.stalls++, barrier.lost += (Clock::now() - begun).count();
    }

    // This thread's part of the numbers 0 to count - 1 is first to last - 1. Parts begin at multiples of `unit`.
    struct Part {
        long first, last;
    };
    Part part(long count, long unit = 1) const {
        long units = (count + unit - 1) / unit;
        return {units * number / of * unit, std::min(count, units * (number + 1) / of * unit)};
    }
};

// f(member) on each thread; on the calling thread alone if the work is too small to be shared out.
template <typename F>
void together(bool shared, const F& f) {
    Barrier barrier;
#if defined(GNU_OPENMP) || defined(_OPENMP)
    const auto begun = Clock::now();
    const long full = shared ? omp_get_max_threads() : 1, of = full > 1 ? crew.size(full) : 1;
    if (of == 1) return f(Member{barrier, 0, 1, full});
    auto run = [&] { f(Member{barrier, omp_get_thread_num(), omp_get_num_threads(), full}); };
#if defined(GNU_OPENMP)
    GOMP_parallel([](void* data) { (*static_cast<decltype(run)*>(data))(); }, &run, of, 0);
#else
#pragma omp parallel num_threads(of)
    run();
#endif
    if (barrier.rounds > 0)  // Without barriers nothing waits.
        crew.ran(of, full, barrier.stalls, barrier.lost, (Clock::now() - begun).count());
#else
    f(Member{barrier});
#endif
}
